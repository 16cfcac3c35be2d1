"""The story of a run: warm up, then update after update - grow trees, score, credit, learn, publish, evaluate, record.

    sample tasks -> grow trees -> score -> credit -> pack and learn -> publish -> evaluate -> record -> checkpoint

The state between two updates is small: weights, optimiser, and the counters in `TrainState`. Everything else is a function of the
settings, the seed and the update's number, which is why a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treegraft.algo.advantages import assign_credit
from treegraft.assemble import assemble, build_explorer, build_trackers, max_live_trees, training_limits
from treegraft.checkpoint import (
    TrainState,
    checkpoint_name,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from treegraft.config import Config
from treegraft.errors import CheckpointError, DataError
from treegraft.evaluate import Evaluation, evaluate
from treegraft.learn.drift import DriftGuard
from treegraft.learn.learner import Learner
from treegraft.learn.sft import Demonstrations, keyed_int, step_skill, warm_up
from treegraft.recipe import config_json, load_config
from treegraft.record import RunFolder, read_trees, write_trees
from treegraft.rollout.measure import paired_gain, rollout_metrics
from treegraft.tasks.build import build_tasks
from treegraft.types import Task

if TYPE_CHECKING:
    from treegraft.terminal import Display

HEARTBEAT_S = 60.0
"""A wait this long says what it is waiting for, and again after as long."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind."""

    run_dir: Path
    checkpoint_dir: Path
    """The final checkpoint, a folder that transformers loads."""
    metrics: Mapping[str, float]
    """The latest value of every metric."""


class Interrupted(Exception):
    """The person asked to stop; what is done is saved."""


def train(
    config: Config | Mapping[str, Any] | str | Path | None,
    *,
    recipe: str | None = None,
    resume: Path | None = None,
    display: Display | None = None,
) -> RunResult:
    """Trains an agent and returns where the results are.

    Args:
        config: settings, a dict of them, or a recipe's path; None only with `resume`, which takes the run's own.
        recipe: name of the recipe, for the run folder's default name.
        resume: a run folder to continue from its latest checkpoint.

    Raises:
        TreegraftError: bad input, before any work starts where that can be known.
        KeyboardInterrupt: after Ctrl-C, with everything saved.
    """
    settings, folder = _prepare(config, recipe, resume)
    return _run(_Run(settings, folder, display, stops_after_warmup=False).main())


def sft(config: Config | Mapping[str, Any] | str | Path, *, recipe: str | None = None, display: Display | None = None) -> RunResult:
    """Runs the warm-up alone and returns where the results are; arguments and errors as in `train`."""
    settings, folder = _prepare(config, recipe, None)
    return _run(_Run(settings, folder, display, stops_after_warmup=True).main())


def _prepare(
    config: Config | Mapping[str, Any] | str | Path | None, recipe: str | None, resume: Path | None
) -> tuple[Config, RunFolder | tuple[Path, str]]:
    """Settings, and the run folder (or where to make it, once all parts are known to work)."""
    if resume is not None:
        folder = RunFolder.open(Path(resume))
        own = load_config(folder.path / "config.json")
        if config is not None and load_config(config) != own:
            raise CheckpointError(
                f"run folder '{resume}' was started with other settings than those given; expected the same ones. Resume without a "
                "recipe to use the run's own, or start a new run."
            )
        return own, folder
    if config is None:
        raise CheckpointError("train: neither settings nor a run to resume were given; name a recipe or a run folder")
    settings = load_config(config)
    stem = Path(recipe).stem if recipe else (Path(config).stem if isinstance(config, str | Path) else "run")
    name = settings.run.name or f"{stem}-seed{settings.run.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path(settings.run.dir).expanduser() / name
    if path.exists() and settings.run.name is None:
        path = next(p for n in range(2, 1000) if not (p := path.with_name(f"{name}-{n}")).exists())
    if path.exists():
        RunFolder.create(path, "")
    return settings, (path, config_json(settings))


def _run(work: Coroutine[Any, Any, RunResult]) -> RunResult:
    """Runs the coroutine to its end, also where an event loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


class _Run:
    """One run from its first byte to its last."""

    def __init__(
        self, config: Config, folder: RunFolder | tuple[Path, str], display: Display | None, *, stops_after_warmup: bool
    ) -> None:
        self.config = config
        self._display = display
        self._stops_after_warmup = stops_after_warmup
        source = build_tasks(config.tasks, config.run.seed)
        self.train_tasks = list(source.train_tasks())
        self.eval_tasks = list(source.eval_tasks())
        if not self.train_tasks and config.run.num_updates:
            raise DataError("the training tasks are empty; expected at least one row. See tasks.num_train and [tasks.dataset].")
        self.is_resumed = isinstance(folder, RunFolder)
        checkpoint = latest_checkpoint(folder.checkpoints_dir) if isinstance(folder, RunFolder) else None
        self.state = TrainState(update=0, warmup_steps=0, metrics_size=0)
        optimiser = None
        if checkpoint is not None:
            self.state, optimiser = load_checkpoint(checkpoint)
        fresh_weights = checkpoint is None or bool(config.model.lora.rank)
        self.parts = assemble(config, model_path=None if fresh_weights else checkpoint, source=source)
        self.learner = Learner(self.parts.model, config.learn, config.loss, length_constant=config.rollout.max_completion_tokens)
        if optimiser is not None:
            self.learner.load_state(optimiser)
        self.drift = DriftGuard(self.parts.engine, self.learner, config.model.dtype, self.state)
        for task in (*self.train_tasks[:1], *self.eval_tasks[:1]):
            self.parts.format.prompt_ids(task)
        self.demonstrations = None
        if self.state.warmup_steps < config.warmup.num_steps:
            self.demonstrations = Demonstrations(source, self.parts.format, config.warmup, config.run.seed)
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder.create(*folder)
        if self.is_resumed:
            self.folder.cut_to(self.state.update if self.state.has_begun else -1, self.state.metrics_size)
        self.trackers = build_trackers(config.track.trackers, self.folder.path)
        self.latest: dict[str, float] = {}
        self.stop = asyncio.Event()
        self._warn(source.report())

    # ------------------------------------------------------------------ the story

    async def main(self) -> RunResult:
        """Everything, from the first warm-up step to the last checkpoint."""
        with self._stop_on_ctrl_c():
            try:
                self._show("started", self.folder.path, self.config)
                self._warm_up()
                await self.drift.publish(self.state.update)
                if not self._stops_after_warmup:
                    await self._begin()
                    while self.state.update < self.config.run.num_updates:
                        await self._update(self.state.update + 1)
                checkpoint = self._checkpoint_path()
                self._show("finished", self.folder.path, checkpoint, self.latest)
                return RunResult(run_dir=self.folder.path, checkpoint_dir=checkpoint, metrics=self.latest)
            except (Interrupted, asyncio.CancelledError) as error:
                self._show("interrupted", f"treegraft train --resume {self.folder.path}")
                raise KeyboardInterrupt from error
            finally:
                await self.parts.close()
                for tracker in self.trackers:
                    tracker.close()

    def _warm_up(self) -> None:
        """Supervised fine-tuning on traces, where the recipe asks for it and it is not done yet."""
        settings = self.config.warmup
        if self.demonstrations is None:
            return
        began, every = time.monotonic(), max(1, settings.num_steps // 4)

        def on_step(done: int, loss: float) -> bool:
            self.state = replace(self.state, warmup_steps=done, pending={"warmup/loss": loss})
            self._show("phase", "warm-up", done, settings.num_steps, f"loss {loss:.3f}")
            if done < settings.num_steps and (done % every == 0 or self.stop.is_set()):
                self._save()
            return self.stop.is_set()

        warm_up(self.learner, self.demonstrations, settings, first_step=self.state.warmup_steps, on_step=on_step)
        if self.state.warmup_steps < settings.num_steps:
            raise Interrupted
        self.learner.optimiser.reset()
        measured = {"time/warmup_s": time.monotonic() - began}
        demonstrations = [(task, self.parts.source.expert(task, 0)) for task in self.eval_tasks]
        held_out = [(task, steps) for task, steps in demonstrations if steps]
        if held_out:
            measured["warmup/skill"] = step_skill(self.learner, self.parts.format, held_out)
        self.state = replace(self.state, pending={**self.state.pending, **measured})
        if self._stops_after_warmup:
            self._log(0, self.state.pending)
        self._save()
        self._raise_if_stopped()

    async def _begin(self) -> None:
        """The evaluation before the first update, and the checkpoint that training can always come back to."""
        if self.config.loss.kl_coef:
            self._keep_reference()
        if self.state.has_begun:
            return
        metrics = dict(self.state.pending)
        if self.config.eval.at_start and self.eval_tasks:
            metrics |= await self._interruptible(self._evaluate(0), saves=False)
        if metrics:
            self._log(0, metrics)
        self.state = replace(self.state, has_begun=True, pending={})
        self._save()

    async def _update(self, update: int) -> None:
        """One update; nothing of it is kept if it is interrupted before learning begins."""
        config, began = self.config, time.monotonic()
        grower = self.parts.grower(build_explorer(config.explore.explorers), training_limits(config))
        tasks = self._sample_tasks(update)
        grown = await self._interruptible(
            grower.grow_all(
                tasks,
                noise_key=(config.run.seed, "train", update),
                group_prefix=str(update),
                max_live_trees=max_live_trees(config),
                on_tree=lambda done, _: self._show("phase", "rollout", done, len(tasks), str(grower.watch)),
            ),
            waits_on=grower.watch,
        )
        rolled = time.monotonic()
        credit = config.credit.model_dump() | {"learn_from_truncated": config.loss.learn_from_truncated}
        trees = [assign_credit(tree, **credit) for tree in grown]
        self._show("phase", "learning", 0, 1, "")
        trees, learned = self.learner.learn(trees)
        done_learning = time.monotonic()
        await self.drift.publish(update)
        metrics = rollout_metrics(trees) | learned | self._tool_metrics()
        metrics |= {
            "time/rollout_s": rolled - began,
            "time/learn_s": done_learning - rolled,
            "time/publish_s": time.monotonic() - done_learning,
        }
        self.drift.check(update, metrics, self._warn)
        self.state = replace(self.state, update=update, **self.drift.state())
        if self._evaluates_after(update):
            metrics |= await self._evaluate(update)
        metrics["time/update_s"] = time.monotonic() - began
        if config.track.record_trees:
            write_trees(self.folder.trees_path(update), trees)
        self._log(update, metrics)
        self._show("sample", trees[0])
        if update % config.checkpoint.every == 0 or update == config.run.num_updates or self.stop.is_set():
            self._save()
        self._raise_if_stopped()

    # ------------------------------------------------------------------ its parts

    def _sample_tasks(self, update: int) -> list[Task]:
        """The update's tasks: epochs over the training tasks, each shuffled by a key of its own."""
        count, size = len(self.train_tasks), self.config.run.tasks_per_update
        wanted = range((update - 1) * size, update * size)
        orders: dict[int, list[int]] = {}
        chosen: dict[str, Task] = {}
        for position in wanted:
            epoch = position // count
            if epoch not in orders:
                orders[epoch] = sorted(range(count), key=lambda n: (keyed_int(self.config.run.seed, "epoch", epoch, n), n))
            task = self.train_tasks[orders[epoch][position % count]]
            chosen.setdefault(task.id, task)
        return list(chosen.values())

    def _evaluates_after(self, update: int) -> bool:
        settings = self.config.eval
        is_last = update == self.config.run.num_updates
        return bool(self.eval_tasks) and bool((settings.every and update % settings.every == 0) or (is_last and settings.at_end))

    async def _evaluate(self, update: int) -> dict[str, float]:
        """Metrics of the held-out tasks; the trees go to files of their own."""
        began = time.monotonic()
        evaluation = await evaluate(
            self.parts,
            self.eval_tasks,
            update,
            on_progress=lambda *progress: self._show("phase", "evaluation", *progress),
        )
        self.parts.toolbox.take_metrics()
        for kind, trees in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
            if trees is not None and self.config.track.record_trees:
                write_trees(self.folder.trees_path(update, kind), trees)
        metrics = evaluation.metrics
        if update == self.config.run.num_updates:
            metrics |= self._gain(evaluation)
        self._show("evaluated", f"update {update}" if update else "start", metrics)
        return metrics | {"time/eval_s": time.monotonic() - began}

    def _gain(self, evaluation: Evaluation) -> dict[str, float]:
        """How much better the end is than the start, where both were recorded."""
        metrics: dict[str, float] = {}
        for kind, after in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
            before = self.folder.trees_path(0, kind)
            if after is not None and before.exists() and self.state.update > 0:
                name = "eval/gain" if kind == "greedy" else "eval/gain_sampled"
                gain, low, high = paired_gain(read_trees(before), after)
                metrics |= {name: gain, f"{name}_low": low, f"{name}_high": high}
        return metrics

    def _tool_metrics(self) -> dict[str, float]:
        metrics = self.parts.toolbox.take_metrics()
        take = getattr(self.parts.engine, "take_metrics", None)
        return metrics if take is None else metrics | take()

    def _keep_reference(self) -> None:
        """The reference of the KL term is the policy before the first update, also after a resume."""
        place = self.folder.path / "reference"
        if self.state.update > 0:
            self.learner.load_reference(place)
            return
        self.learner.keep_reference()
        self.learner.save_reference(place)

    # ------------------------------------------------------------------ keeping

    def _log(self, update: int, metrics: Mapping[str, float]) -> None:
        full = {**metrics, "policy_version": float(update)}
        self.folder.append_metrics(update, full)
        self.latest |= full
        for tracker in self.trackers:
            tracker.log(update, full)
        if update:
            self._show("update", update, self.config.run.num_updates, full)

    def _checkpoint_path(self) -> Path:
        return self.folder.checkpoints_dir / checkpoint_name(self.state)

    def _save(self) -> None:
        """Writes a checkpoint of the present state, and of the best one so far."""
        accuracy = self.latest.get("eval/accuracy", self.latest.get("eval/accuracy_sampled"))
        is_best = accuracy is not None and accuracy > (self.state.best_accuracy or -1.0)
        best = accuracy if is_best else self.state.best_accuracy
        self.state = replace(self.state, metrics_size=self.folder.metrics_size(), best_accuracy=best)
        weights = self.learner.export_weights()
        places = [self._checkpoint_path()] + ([self.folder.checkpoints_dir / "best"] if is_best else [])
        for place in reversed(places):
            save_checkpoint(
                place,
                model=self.parts.model,
                tokenizer=self.parts.tokenizer,
                weights=weights,
                optimiser=self.learner.state(),
                state=self.state,
                config_json=config_json(self.config),
                keep_adapter=not self.config.model.lora.merge,
            )
        prune_checkpoints(self.folder.checkpoints_dir, self.config.checkpoint.keep)

    # ------------------------------------------------------------------ stopping and showing

    @contextmanager
    def _stop_on_ctrl_c(self) -> Iterator[None]:
        """The first Ctrl-C asks to stop at the next safe point, the second stops at once."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            self.stop.set()
            self._show("warn", "stopping: saving what is done (Ctrl-C again to stop without saving)")
            loop.remove_signal_handler(signal.SIGINT)

        # Signals reach the main thread alone; a run in another thread is stopped by its caller.
        with suppress(ValueError, NotImplementedError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, on_signal)
        try:
            yield
        finally:
            with suppress(ValueError, NotImplementedError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)

    async def _interruptible(
        self, work: Coroutine[Any, Any, Result], *, saves: bool = True, waits_on: object = "evaluation"
    ) -> Result:
        """The result of the work, unless a stop is asked for first: then the last complete state is saved (`saves`)."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        began = time.monotonic()
        while not (await asyncio.wait({task, stop}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            self._show("warn", f"still waiting after {time.monotonic() - began:.0f} s: {waits_on}")
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if saves:
            self._save()
        raise Interrupted

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise Interrupted

    def _warn(self, texts: Sequence[str] | str) -> None:
        for text in [texts] if isinstance(texts, str) else texts:
            self._show("warn", text)

    def _show(self, method: str, *arguments: Any) -> None:
        if self._display is not None:
            call: Callable[..., None] = getattr(self._display, method)
            call(*arguments)


__all__ = ["RunResult", "sft", "train"]
