"""The story of a run: warm up, then update after update - grow trees, score, credit, learn,
publish, evaluate, record.

    sample tasks -> grow trees -> score -> credit -> pack and learn -> publish -> evaluate -> record
    -> checkpoint

The state between two updates is small: weights, optimiser, and the counters in `TrainState`.
Everything else is a function of the settings, the seed and the update's number, which is why a
resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treegraft.assemble import (
    assemble,
    build_explorer,
    check_prompts,
    find_trackers,
    max_live_trees,
    training_limits,
)
from treegraft.core.errors import DataError, TreegraftError
from treegraft.core.interrupt import Interrupted, Stop, run_to_end
from treegraft.core.keyed import keyed_int
from treegraft.core.types import Status, Task, Tree
from treegraft.evals.evaluate import Evaluation, evaluate
from treegraft.policy.checkpoint import load_checkpoint, save_checkpoint
from treegraft.policy.learn.credit import credit_trees, find_credit_rule
from treegraft.policy.learn.drift import DriftGuard
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.sft import Demonstrations, step_skill, warm_up
from treegraft.rollout.loop import Watch
from treegraft.rollout.measure import paired_gain, rollout_metrics
from treegraft.rollout.unused import unused_metrics
from treegraft.runs.checkpoint import checkpoint_name, prune_checkpoints
from treegraft.runs.health import Monitor, explained
from treegraft.runs.record import read_trees, write_trees
from treegraft.runs.start import Source, Start, new_start, resumed_start, update_latest
from treegraft.settings.load import config_json
from treegraft.tasks.build import build_tasks
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.retrieve import BufferRetriever
from treegraft.traces.supply import (
    buffer_metrics,
    check_buffer,
    grow_buffer,
    needs_buffer,
    open_buffer,
)

if TYPE_CHECKING:
    from treegraft.core.interfaces import Display

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind."""

    run_dir: Path
    checkpoint_dir: Path
    """The final checkpoint, a folder that transformers loads."""
    metrics: Mapping[str, float]
    """The latest value of every metric."""


def train(
    config: Source,
    *,
    recipe: str | None = None,
    resume: Path | None = None,
    display: Display | None = None,
) -> RunResult:
    """Trains an agent and returns where the results are.

    Args:
        config: settings, a dict of them, or a recipe's path; with `resume` they may be None, which
            takes the run's own, or differ from those in `start.MAY_CHANGE` alone.
        recipe: name of the recipe, for the run folder's default name.
        resume: a run folder to continue from its latest checkpoint.

    Raises:
        TreegraftError: bad input, before any work starts where that can be known.
        KeyboardInterrupt: after Ctrl-C, with everything saved.
    """
    start = new_start(config, recipe) if resume is None else resumed_start(Path(resume), config)
    if start.is_finished and start.checkpoint is not None:
        return _already_finished(start, start.checkpoint, display)
    return _carry_out(start, display, only_warms_up=False)


def sft(
    config: Source,
    *,
    recipe: str | None = None,
    resume: Path | None = None,
    display: Display | None = None,
) -> RunResult:
    """Runs the warm-up alone and returns where the results are; arguments and errors as in
    `train`."""
    start = new_start(config, recipe) if resume is None else resumed_start(Path(resume), config)
    return _carry_out(start, display, only_warms_up=True)


def _already_finished(start: Start, checkpoint: Path, display: Display | None) -> RunResult:
    """Nothing is left to do: says so, and how to go on."""
    metrics = start.latest_metrics()
    start.give_up(start.folder)
    if display is not None:
        count = start.config.run.num_updates
        more = f"treegraft train --resume {start.path} run.num_updates={2 * count or 20}"
        display.warn(
            f"run {start.path} is finished: {count} of {count} updates are done. To train on:"
            f" {more}"
        )
        display.finished(start.path, checkpoint, metrics)
    return RunResult(run_dir=start.path, checkpoint_dir=checkpoint, metrics=metrics)


def _carry_out(start: Start, display: Display | None, *, only_warms_up: bool) -> RunResult:
    try:
        run = _Run(start, display, only_warms_up=only_warms_up)
    except BaseException:
        start.give_up(start.folder)
        raise
    try:
        return run_to_end(run.main(), on_interrupt=run.stop.ask)
    except BaseExceptionGroup as group:
        # What fails in one of many tasks at once arrives in a group; the reader wants the cause.
        cause: BaseException | None = group.split(TreegraftError)[0]
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if cause is None:
            raise
        raise cause from group


class _Run:
    """One run from its first byte to its last."""

    def __init__(self, start: Start, display: Display | None, *, only_warms_up: bool) -> None:
        """Makes all parts before the run folder, so that bad input leaves nothing behind."""
        self.config, self.state, self._display = start.config, start.state, display
        self._command = f"treegraft {'sft' if only_warms_up else 'train'} --resume {start.path}"
        self._only_warms_up = only_warms_up
        self._saved = None if start.checkpoint is None else start.state
        self.stop = Stop()
        self._show(
            "phase", "loading", 0, 0, f"{start.config.model.path}, {start.config.tasks.kind}"
        )
        trackers = find_trackers(self.config.track.trackers)
        self.credit_rule = find_credit_rule(self.config)
        source = build_tasks(self.config.tasks, self.config.run.seed)
        self.train_tasks, self.eval_tasks = list(source.train_tasks()), list(source.eval_tasks())
        if not self.train_tasks and self.config.run.num_updates and not only_warms_up:
            raise DataError(
                "the training tasks are empty; expected at least one row. See tasks.num_train and"
                " [tasks.dataset]."
            )
        is_fresh = start.checkpoint is None or bool(self.config.model.lora.rank)
        self.parts = assemble(
            self.config, model_path=None if is_fresh else start.checkpoint, source=source
        )
        try:
            check_prompts(self.parts, [*self.train_tasks, *self.eval_tasks])
            self.learner = Learner(
                self.parts.model,
                self.config.learn,
                self.config.loss,
                length_constant=self.config.rollout.max_completion_tokens,
            )
            if start.checkpoint is not None:
                self.learner.load_state(load_checkpoint(start.checkpoint)[1])
            self.drift = DriftGuard(
                self.parts.engine, self.learner, self.config.model.dtype, self.state
            )
            self.encoder = (
                check_buffer(self.config, source, start.path) if needs_buffer(self.config) else None
            )
            self.demonstrations = None
            if self.state.warmup_steps < self.config.warmup.num_steps:
                self.demonstrations = Demonstrations(
                    source, self.parts.format, self.config.warmup, self.config.run.seed
                )
            self.folder = start.open_folder()
            try:
                self.trackers = [make(self.folder.path) for make in trackers]
            except BaseException:
                start.give_up(self.folder)
                raise
        except BaseException:
            run_to_end(self.parts.close())
            raise
        self.buffer: TraceBuffer | None = None
        self.retriever: BufferRetriever | None = None
        self.latest = start.latest_metrics()
        self.health = Monitor(self.config.health, start.history())
        for text in source.report():
            self._warn(text)

    # ------------------------------------------------------------------ the story

    async def main(self) -> RunResult:
        """Everything, from the first warm-up step to the last checkpoint."""
        try:
            with self.stop.on_ctrl_c(self._announce_stop):
                title = f"{self.config.model.path} on {self.config.tasks.kind}"
                self._show("started", self.folder.path, title, self.config.run.num_updates)
                if self.health.standing:
                    self._show(
                        "note",
                        "warnings that stood when the run stopped:"
                        f" {', '.join(self.health.standing)}",
                    )
                self._warm_up()
                await self.drift.publish(self.state.update)
                if self._only_warms_up and not self.state.is_closed:
                    # After the checkpoint, so that a later training logs update 0 anew, evaluation
                    # and all.
                    self._log(self.state.update, self.state.pending)
                if not self._only_warms_up:
                    self._keep_reference()
                    await self._open_buffer()
                    await self._close_update()
                    while self.state.update < self.config.run.num_updates:
                        await self._update(self.state.update + 1)
                        await self._close_update()
            self._save()
            checkpoint = self._checkpoint_path()
            self._show("finished", self.folder.path, checkpoint, self.latest)
            return RunResult(
                run_dir=self.folder.path, checkpoint_dir=checkpoint, metrics=self.latest
            )
        except Interrupted as error:
            self._save()
            self._show("interrupted", self._command)
            raise KeyboardInterrupt from error
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._warn(
                "stopped at once; what was done since the last checkpoint is lost, and repeated"
                " when the run is resumed"
            )
            self._show("interrupted", self._command, False)
            raise
        except Exception:
            self._warn(
                "the run has failed; once the cause is mended, go on from its last checkpoint"
                f" with: {self._command}"
            )
            raise
        finally:
            await self.parts.close()
            if self.retriever is not None:
                self.retriever.close()
            if self.buffer is not None:
                self.buffer.close()
            for tracker in self.trackers:
                tracker.close()
            self.folder.release()

    def _warm_up(self) -> None:
        """Supervised fine-tuning on traces, where the recipe asks for it and it is not done yet."""
        settings = self.config.warmup
        if self.demonstrations is None:
            return
        began, every = time.monotonic(), max(1, settings.num_steps // 4)

        def on_step(done: int, loss: float) -> bool:
            self.state = replace(self.state, warmup_steps=done, pending={"warmup/loss": loss})
            self._show("phase", "warm-up", done, settings.num_steps, f"loss {loss:.3f}")
            if done < settings.num_steps and done % every == 0:
                self._save()
            return self.stop.is_asked

        warm_up(
            self.learner,
            self.demonstrations,
            settings,
            first_step=self.state.warmup_steps,
            on_step=on_step,
        )
        if self.state.warmup_steps == settings.num_steps:
            self.learner.optimiser.reset()
            measured = self._measure_skill() | {"time/warmup_s": time.monotonic() - began}
            self.state = replace(self.state, pending={**self.state.pending, **measured})
            self._save()
        self.stop.raise_if_asked()

    async def _update(self, update: int) -> None:
        """One update up to its publish; nothing of it is kept if it is interrupted before learning
        begins."""
        config, began, cpu_before = self.config, time.monotonic(), time.process_time()
        explorer = build_explorer(config.explore, vocab_size=len(self.parts.tokenizer))
        grower = self.parts.grower(explorer, training_limits(config), self.retriever)
        tasks = sample_tasks(
            self.train_tasks, update, size=config.run.tasks_per_update, seed=config.run.seed
        )
        grown = await self._interruptible(
            grower.grow_all(
                tasks,
                noise_key=(config.run.seed, "train", update),
                group_prefix=str(update),
                max_live_trees=max_live_trees(config),
                on_tree=lambda done, _: self._show(
                    "phase", "rollout", done, len(tasks), str(grower.watch)
                ),
            ),
            waits_on=grower.watch,
        )
        rolled = time.monotonic()
        self._show("phase", "learning", 0, 1)
        grown = self.learner.with_exact_entropies(grown)
        trees, learned = self.learner.learn(credit_trees(grown, config, self.credit_rule))
        done_learning = time.monotonic()
        await self.drift.publish(update)
        metrics = rollout_metrics(trees) | unused_metrics(
            trees, explorer, config.explore.num_leaves
        )
        metrics |= learned | self._part_metrics()
        if self.buffer is not None:
            metrics["graft/num_without_room"] = float(grower.num_grafts_without_room)
            grow_buffer(self.buffer, config, trees, update)
            metrics |= buffer_metrics(self.buffer)
        metrics |= {
            "time/rollout_s": rolled - began,
            "time/learn_s": done_learning - rolled,
            "time/publish_s": time.monotonic() - done_learning,
            "time/update_s": time.monotonic() - began,
            "time/cpu_s": time.process_time() - cpu_before,
        }
        metrics |= self.drift.check(update, metrics)
        self._warn_of_failures(trees)
        if config.track.record_trees:
            write_trees(self.folder.trees_path(update), trees)
        self._show("sample", trees[0])
        self.state = replace(
            self.state, update=update, is_closed=False, pending=metrics, **self.drift.state()
        )

    def _warn_of_failures(self, trees: Sequence[Tree]) -> None:
        """Says that trajectories were lost, since a failed leaf is otherwise a number among
        many."""
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        failed = [leaf for leaf in leaves if leaf.status is Status.FAILED]
        if failed and "failed" not in self.health.standing:
            self._warn(
                f"{len(failed)} of {len(leaves)} trajectories failed and left their groups; the"
                f" first: {failed[0].error}"
            )

    async def _close_update(self) -> None:
        """Evaluates, logs and keeps the state after an update, or before the first one (update 0),
        unless that is done."""
        if self.state.is_closed:
            return
        update, metrics = self.state.update, dict(self.state.pending)
        if self._evaluates_after(update):
            watch = Watch()
            metrics |= await self._interruptible(self._evaluate(update, watch), waits_on=watch)
            if update:
                metrics["time/update_s"] += metrics["time/eval_s"]
        self._log(update, metrics)
        accuracy = metrics.get("eval/accuracy", metrics.get("eval/accuracy_sampled"))
        is_best = accuracy is not None and (
            self.state.best_accuracy is None or accuracy > self.state.best_accuracy
        )
        best = accuracy if is_best else self.state.best_accuracy
        self.state = replace(self.state, is_closed=True, pending={}, best_accuracy=best)
        if is_best:
            self._write_checkpoint(self.folder.checkpoints_dir / "best")
        if update % self.config.checkpoint.every == 0 or update == self.config.run.num_updates:
            self._save()
        self.stop.raise_if_asked()

    # ------------------------------------------------------------------ its parts

    def _measure_skill(self) -> dict[str, float]:
        """How well the policy repeats the expert on the held-out tasks; empty where there is no
        expert."""
        demonstrations = [(task, self.parts.source.expert(task, 0)) for task in self.eval_tasks]
        held_out = [(task, steps) for task, steps in demonstrations if steps]
        return (
            {"warmup/skill": step_skill(self.learner, self.parts.format, held_out)}
            if held_out
            else {}
        )

    def _evaluates_after(self, update: int) -> bool:
        settings = self.config.eval
        if update == 0:
            return settings.at_start and bool(self.eval_tasks)
        is_due = bool(settings.every) and update % settings.every == 0
        return bool(self.eval_tasks) and (
            is_due or (settings.at_end and update == self.config.run.num_updates)
        )

    async def _evaluate(self, update: int, watch: Watch) -> dict[str, float]:
        """Metrics of the held-out tasks; the trees go to files of their own."""
        began = time.monotonic()
        evaluation = await evaluate(
            self.parts,
            self.eval_tasks,
            update,
            watch=watch,
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

    def _part_metrics(self) -> dict[str, float]:
        metrics = self.parts.toolbox.take_metrics()
        for part in (self.parts.engine, self.retriever):
            take = getattr(part, "take_metrics", None)
            metrics |= {} if take is None else take()
        return metrics

    async def _open_buffer(self) -> None:
        """Opens or builds the Step-Trace Buffer, where the recipe grafts."""
        if self.encoder is None:
            return
        self._show("phase", "buffer", 0, 1, self.config.buffer.path)
        parts, update = self.parts, self.state.update
        self.buffer = await open_buffer(
            self.config,
            parts.source,
            parts.scorer,
            parts.format,
            self.folder.path,
            update,
            self.encoder,
        )
        self.retriever = BufferRetriever(self.buffer, self.config.buffer)

    def _keep_reference(self) -> None:
        """The reference of the KL term is the policy before the first update, also after a
        resume."""
        if not self.config.loss.kl_coef:
            return
        place = self.folder.path / "reference"
        if self.state.update > 0:
            self.learner.load_reference(place)
            return
        self.learner.keep_reference()
        self.learner.save_reference(place)

    # ------------------------------------------------------------------ keeping

    def _log(self, update: int, metrics: Mapping[str, float]) -> None:
        full = {**metrics, "policy_version": float(update)}
        found, began, over = self.health.take({"update": update, **full})
        full |= {warning.key: warning.value for warning in found}
        self.folder.append_metrics(update, full)
        self.latest = update_latest(self.latest, full)
        for tracker in self.trackers:
            tracker.log(update, full)
        if update:
            self._show("update", update, self.config.run.num_updates, full)
        for warning in began:
            self._warn(explained(warning, update))
        for text in over:
            self._show("note", text)

    def _checkpoint_path(self) -> Path:
        return self.folder.checkpoints_dir / checkpoint_name(self.state)

    def _save(self) -> None:
        """Writes a checkpoint of the present state, unless there is one."""
        if self.state == self._saved:
            return
        self._write_checkpoint(self._checkpoint_path())
        self._saved = self.state
        prune_checkpoints(self.folder.checkpoints_dir, self.config.checkpoint.keep)

    def _write_checkpoint(self, place: Path) -> None:
        self.state = replace(self.state, metrics_size=self.folder.metrics_size())
        save_checkpoint(
            place,
            model=self.parts.model,
            tokenizer=self.parts.tokenizer,
            weights=self.learner.export_weights(),
            optimiser=self.learner.state(),
            state=self.state,
            config_json=config_json(self.config),
            keep_adapter=not self.config.model.lora.merge,
        )

    # ------------------------------------------------------------------ stopping and showing

    async def _interruptible(
        self, work: Coroutine[Any, Any, Result], *, waits_on: object
    ) -> Result:
        return await self.stop.interruptible(work, waits_on=waits_on, on_heartbeat=self._warn)

    def _announce_stop(self) -> None:
        self._warn("stopping and saving what is done (Ctrl-C again to stop without saving)")

    def _warn(self, text: str) -> None:
        self._show("warn", text)

    def _show(self, method: str, *arguments: Any) -> None:
        if self._display is not None:
            call: Callable[..., None] = getattr(self._display, method)
            call(*arguments)


def sample_tasks(tasks: Sequence[Task], update: int, *, size: int, seed: int) -> list[Task]:
    """Returns the tasks of an update: epochs over all tasks, each shuffled by a key of its own;
    none twice in an update."""
    orders: dict[int, list[int]] = {}
    chosen: dict[str, Task] = {}
    for position in range((update - 1) * size, update * size):
        epoch, place = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = sorted(
                range(len(tasks)), key=lambda n: (keyed_int(seed, "epoch", epoch, n), n)
            )
        task = tasks[orders[epoch][place]]
        chosen.setdefault(task.id, task)
    return list(chosen.values())


__all__ = ["RunResult", "sft", "train"]
