"""The work of `treegraft cluster`: a run whose engines stand on a Ray cluster, and
where the recipe asks for them several ranks of the learner too."""

from __future__ import annotations

import contextlib
import os

import typer

import treegraft
from treegraft.extras.ray.job import Job
from treegraft.extras.ray.placement import needs_of, place_of
from treegraft.extras.ray.ray import ADDRESS, connected
from treegraft.extras.ray.settings import cluster_settings
from treegraft.parts import commands


@commands.run_command
def cluster(asked: commands.RunAsked) -> None:
    """Train an agent with a recipe on a Ray cluster, as its table [cluster] says.

    The run folder, and the trees in it, are those of `treegraft train`.
    """
    settings = cluster_settings(asked.config)
    has_job = settings.learner_gpus > 0 or settings.num_ranks > 1
    with asked.carried_out() as arguments:
        if ADDRESS in os.environ or not has_job:
            treegraft.train(asked.config, **arguments, placement="ray")
            return
        code = _job_of(asked)
    if code:
        raise typer.Exit(code)


def _job_of(asked: commands.RunAsked) -> int:
    """Runs the learner's ranks to their end, and returns rank 0's exit code."""
    config, settings = asked.config, cluster_settings(asked.config)
    # Ranks that start again have to find the folder.
    run_dir = asked.run_dir()
    begin = ["cluster", *asked.start_words, *asked.overrides]
    if asked.resume is None and not config.run.name:
        begin.append(f"run.name={run_dir.name}")
    # What a rank goes on with is what it began with, but for the recipe.
    again = [] if asked.resume is None else [*asked.accept_words, *asked.overrides]
    others = needs_of(config)
    needs = {**others, "CPU": others["CPU"] + settings.num_ranks}
    if settings.learner_gpus:
        needs["GPU"] += settings.num_ranks
    going_on = ["cluster", "--resume", str(run_dir), *again]
    with connected(config, needs) as token:
        place = place_of(config, token)
        return Job(config, place, run_dir, begin, going_on, others, say).carry_out()


def say(text: str) -> None:
    """Prints a line at once; a terminal that is gone is no fault of the run."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
