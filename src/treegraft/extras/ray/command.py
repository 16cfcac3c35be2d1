"""The work of `treegraft cluster`: a run whose engines and growers stand on a Ray cluster, and
where the recipe asks for them several ranks of the learner too."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

import treegraft
from treegraft import Config
from treegraft.extras.ray.job import Job
from treegraft.extras.ray.placement import needs_of, place_of
from treegraft.extras.ray.plugin import cluster_settings
from treegraft.extras.ray.ray import ADDRESS, connected
from treegraft.parts import RunAsked, new_start, run_command


def run_on_cluster(
    config: Config,
    *,
    recipe: str | None,
    resume: Path | None,
    accepts_changes: bool,
    begin: Sequence[str],
    again: Sequence[str],
    display: Any = None,
) -> int:
    """Returns the exit code of a run, which has ended.

    Args:
        recipe, resume, accepts_changes, display: as of `train`.
        begin: arguments of `treegraft` that ask for this run, for its ranks.
        again: overrides and options with which ranks that start again go on with it.

    Raises:
        TreegraftError: bad input, before any work starts where that can be known.
        KeyboardInterrupt: after Ctrl-C, with everything saved; its kind `Ended` after SIGTERM,
            SIGHUP or SIGUSR1.
    """
    is_rank = ADDRESS in os.environ
    has_job = cluster_settings(config).learner_gpus > 0 or cluster_settings(config).num_ranks > 1
    if is_rank or not has_job:
        treegraft.train(
            config,
            recipe=recipe,
            resume=resume,
            accepts_changes=accepts_changes,
            display=display,
            placement="ray",
        )
        return 0
    if resume is None:
        # Ranks that start again have to find the folder.
        run_dir = new_start(config, recipe).path
        begin = [*begin, *([] if config.run.name else [f"run.name={run_dir.name}"])]
    else:
        run_dir = resume
    others = needs_of(config)
    name = "GPU" if cluster_settings(config).learner_gpus else "CPU"
    needs = {**others, "CPU": others["CPU"] + cluster_settings(config).num_ranks}
    if name == "GPU":
        needs["GPU"] += cluster_settings(config).num_ranks
    going_on = ["cluster", "--resume", str(run_dir), *again]
    with connected(config, needs):
        return Job(
            config, place_of(config, None), run_dir, begin, going_on, others, say
        ).carry_out()


def say(text: str) -> None:
    """Prints a line at once; a terminal that is gone is no fault of the run."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:
        pass


@run_command
def cluster(asked: RunAsked) -> None:
    """Train an agent with a recipe on a Ray cluster, as its table [cluster] says.

    The run folder, and the trees in it, are those of `treegraft train`.
    """
    with asked.carried_out() as arguments:
        code = run_on_cluster(
            asked.config,
            begin=["cluster", *asked.start_words, *asked.overrides],
            # What a rank goes on with is what it began with, but for the recipe.
            again=[] if asked.resume is None else [*asked.accept_words, *asked.overrides],
            **arguments,
        )
    if code:
        raise typer.Exit(code)
