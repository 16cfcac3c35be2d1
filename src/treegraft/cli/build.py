"""`treegraft buffer build`: an agent fills the Step-Trace Buffer, as [buffer.build] says."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treegraft.cli.commands import (
    AsJson,
    BufferRecipe,
    Overrides,
    Smoke,
    print_facts,
    say,
    split_overrides,
)
from treegraft.core.errors import EngineError, SettingError
from treegraft.core.interrupt import Ended

if TYPE_CHECKING:
    from treegraft.settings.config import Config
    from treegraft.traces.fill import BufferBuild

COMMAND = "buffer build"
Out = Annotated[
    str | None,
    typer.Argument(
        metavar="[OUT]",
        help="File of the buffer; an existing one is extended. Default: the recipe's buffer.path.",
    ),
]


def build(
    recipe: BufferRecipe,
    out: Out = None,
    overrides: Overrides = None,
    smoke: Smoke = False,
    as_json: AsJson = False,
) -> None:
    """Store an agent's best trajectories of the training tasks as traces.

    The settings buffer.build choose agent, attempts and kept trajectories; buffer.encoder is the
    encoder. The same command continues an earlier one: tasks that already have traces are skipped.
    """
    from treegraft.settings.load import load_config, refuse_foreign
    from treegraft.traces.fill import BufferBuild

    # Without OUT, the first setting stands in its place.
    places, typed = split_overrides([out] if out else [])
    typed += overrides or []
    refuse_foreign(typed, COMMAND)
    config = load_config(recipe, typed, used=["buffer"], smoke=smoke)
    place = Path(places[0]) if places else _out_of(config)
    _fill(BufferBuild(config, place), config.buffer.build.min_reward, place, as_json)


def _fill(work: BufferBuild, min_reward: float, out: Path, as_json: bool) -> None:
    """Does the work and says what came of it."""
    from treegraft.runs.display import display_on

    try:
        with display_on(sys.stderr if as_json else None) as display:
            work.run(display=display)
    except EngineError:
        # The traces so far stay, so their counts come before the error.
        _print_report(work, out, as_json)
        raise
    _print_report(work, out, as_json)
    report = work.report
    if work.stopped_by is not None:
        say(
            f"stopped; the finished tasks are in {out}, and the same command goes on.",
            to_stderr=True,
        )
        raise Ended(work.stopped_by)
    # An empty buffer would end the training that is to use it.
    if not report.num_kept and not report.num_skipped:
        raise EngineError(
            f"agent '{work.source}': none of {report.num_attempts} attempts was good enough to"
            f" keep. Expected rewards above {min_reward:g}; look at the counts and failures above.",
            code="nothing-kept",
        )


def _out_of(config: Config) -> Path:
    """The file that a recipe names."""
    from treegraft.settings.explore import MADE_BY_RUN

    path = config.buffer.path
    # Those are made by a run, or are read alone.
    if path in ("", *MADE_BY_RUN) or path.endswith(".jsonl"):
        raise SettingError(
            f"command line: OUT: got none, and the recipe's buffer.path is '{path}'; expected the"
            " file of a buffer: treegraft buffer build RECIPE traces.sqlite",
            code="out-missing",
        )
    return Path(os.path.expandvars(path)).expanduser()


def _print_report(work: BufferBuild, out: Path, as_json: bool) -> None:
    report = work.report
    facts = asdict(report) | {"failures": dict(report.failures.most_common())}
    facts |= {"mean_reward": report.mean_reward, "buffer": str(out), "source": work.source}
    print_facts(f"{out}: {work.source}", facts | {"is_stopped": work.is_stopped}, as_json)
