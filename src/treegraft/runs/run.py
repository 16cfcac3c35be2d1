"""One run: its folder, state, warnings, trackers and display. It knows nothing of models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from treegraft.core.errors import CheckpointError, EngineError, StorageError, TreegraftError
from treegraft.core.files import storage_fault
from treegraft.core.interfaces import Display
from treegraft.core.interrupt import Ended, Interrupted, Stop, run_to_end
from treegraft.core.spans import check_place, recorded, span
from treegraft.core.types import Status, Tree
from treegraft.runs.background import BackgroundWriter
from treegraft.runs.beside import Beside, ways_out
from treegraft.runs.checkpoint import TrainState, checkpoint_name, prune_checkpoints
from treegraft.runs.exporter import Exporter, check_exporter
from treegraft.runs.health import Monitor, explained
from treegraft.runs.record import read_metrics, write_trees
from treegraft.runs.roles import read_roles
from treegraft.runs.start import Start, update_latest
from treegraft.runs.trackers import Trackers, find_trackers

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves behind."""

    run_dir: Path
    checkpoint_dir: Path
    """The final checkpoint, a folder that transformers loads."""
    metrics: Mapping[str, float]
    """The latest value of every metric."""


class LastingDisplay:
    """A display whose end is not the run's: a terminal that is closed, a log on a full disk."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns the display's method, which from the first OSError on does nothing."""

        def show(*args: Any, **kwargs: Any) -> None:
            try:
                if self._display is not None:
                    getattr(self._display, name)(*args, **kwargs)
            except OSError:
                self._display = None

        return show


class Run:
    """One run from its first byte to its last.

    Nothing is written before `opened`, so bad input leaves nothing behind. `command` is the word of
    the command line that goes on with the run: "train" or "sft".
    """

    def __init__(self, start: Start, display: Display, command: str) -> None:
        self.start, self.config = start, start.config
        self.state, self.path = start.state, start.path
        self.display: Display = LastingDisplay(display)
        self.stop = Stop()
        self._more_beside: Callable[[], dict[str, str]] = dict
        self._replayed: Callable[[], Sequence[Path]] = tuple
        self._imitated: dict[str, str] = {}
        self._beside = Beside(start.path)
        self._writer = BackgroundWriter()
        self.latest: dict[str, float] = {}
        """The latest value of every metric."""
        self._resume_command = f"treegraft {command} --resume {start.path}"
        # A run that goes on from a checkpoint has nothing to save before something changes.
        self._saved = None if start.checkpoint is None else start.state
        self._is_opened = False
        try:
            self._make_trackers = find_trackers(self.config.track.trackers)
            check_place(self.config.track.spans)
            check_exporter(self.config.track.prometheus)
        except BaseException:
            start.give_up(start.folder)
            raise

    # ------------------------------------------------------------------ from beginning to end

    def carry_out(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of the run's coroutine, also where an event loop is running already.

        Raises:
            TreegraftError: the first cause, where many tasks failed at once.
            KeyboardInterrupt: after Ctrl-C.
        """
        try:
            return run_to_end(work, on_interrupt=self.stop.ask)
        except BaseExceptionGroup as group:
            # Tasks that fail together arrive as a group; the reader wants the cause.
            cause: BaseException | None = group.split(TreegraftError)[0]
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            if cause is None:
                raise
            raise cause from group
        finally:
            if not self._is_opened:
                self.start.give_up(self.start.folder)

    @contextmanager
    def opened(
        self, write_checkpoint: Callable[[Path, TrainState], None], defects: Sequence[str] = ()
    ) -> Iterator[None]:
        """Holds the run folder for the time of the block. A first signal that asks for an end ends
        the block at the next safe point and saves; a second Ctrl-C ends it at once.

        Args:
            write_checkpoint: writes weights, optimiser and the given state to a folder.
            defects: of the tasks' data, one sentence each.

        Raises:
            KeyboardInterrupt: after Ctrl-C; Ended, which is one, after another signal.
        """
        self.folder = self.start.open_folder()
        with ExitStack() as ends:
            ends.callback(self.folder.release)
            # Before the folder is given up, also where the run has failed.
            ends.callback(self._writer.close)
            signals = self.stop.on_signals(
                self.display.warn, "stopping and saving", "Ctrl-C again to stop without saving"
            )
            ends.enter_context(signals)
            try:
                self._begin(write_checkpoint, defects, ends)
            except BaseException:
                self.start.give_up(self.folder)
                raise
            self._is_opened = True
            ends.enter_context(recorded(self.config.track.spans, self.path, "rank 0"))
            with self._told_ends():
                yield

    def _begin(
        self,
        write_checkpoint: Callable[[Path, TrainState], None],
        defects: Sequence[str],
        ends: ExitStack,
    ) -> None:
        self._trackers = Trackers(
            self._make_trackers,
            self.path,
            self.start.history(),
            self.display.warn,
            self.display.note,
        )
        ends.callback(self._trackers.close)
        self._write_checkpoint = write_checkpoint
        self.latest = self.start.latest_metrics()
        self.health = Monitor(self.config.health, self.start.history())
        for text in (*self.start.notices, *defects):
            self.display.warn(text)
        if place := self.config.track.prometheus:
            exporter = Exporter(
                place,
                lambda: self.latest,
                run=self.path.name,
                role="rank 0",
                roles=lambda: read_roles(self.path / "roles.json"),
            )
            ends.callback(exporter.close)
            self.display.note(f"metrics for Prometheus: {exporter.address}")
        title = f"{self.config.model.path} on {self.config.tasks.kind}"
        self.display.started(self.path, title, self.config.run.num_updates)
        if self.health.standing:
            standing = ", ".join(self.health.standing)
            self.display.note(f"warnings that stood when the run stopped: {standing}")

    @contextmanager
    def _told_ends(self) -> Iterator[None]:
        """Tells how to go on, where the block does not come to its end."""
        try:
            yield
        except Interrupted as error:
            # Raised at safe points only, so that the state is whole.
            self.save()
            self.display.interrupted(self._resume_command)
            raise Ended(self.stop.number) from error
        except (KeyboardInterrupt, asyncio.CancelledError):
            lost = "everything since the last checkpoint" if self._has_checkpoint else "everything"
            self.display.warn(
                f"stopped at once; {lost} is lost, and repeated when the run is resumed"
            )
            self.display.interrupted(self._resume_command, False)
            raise
        except Exception as error:
            how = "go on from its last checkpoint" if self._has_checkpoint else "begin anew"
            self.display.warn(
                f"the run has failed; once the cause is mended, {how} with: {self._resume_command}"
            )
            if fault := storage_fault(error):
                failed = (
                    f"run folder '{self.path}': writing failed ({fault}). Everything up to its last"
                    f" checkpoint is safe. Make room or mend the folder, then go on with:"
                    f" {self._resume_command}"
                )
                if not self._has_checkpoint:
                    failed = (
                        f"run folder '{self.path}': writing failed ({fault}) before its first"
                        f" checkpoint. Make room or mend the folder, then begin anew with:"
                        f" {self._resume_command}"
                    )
                raise StorageError(failed) from error
            raise

    @property
    def _has_checkpoint(self) -> bool:
        """Whether a resume has one to go on from."""
        return self._saved is not None

    async def interruptible(self, work: Coroutine[Any, Any, Result], *, waits_on: object) -> Result:
        """Returns the result of the work, or raises Interrupted where a stop is asked for first.
        Where the engine fails the state is saved, which the work must not change.

        Args:
            waits_on: its text names the owners of the wait, for a line after every minute.
        """
        try:
            return await self.stop.interruptible(
                work, waits_on=waits_on, on_heartbeat=self.display.warn
            )
        except (EngineError, ExceptionGroup) as error:
            is_engine = isinstance(error, EngineError) or error.subgroup(EngineError) is not None
            if is_engine and self._is_opened:
                # Whatever keeps it from being saved, the engine's error is the one to show.
                try:
                    self.save()
                except Exception as fault:
                    self.display.warn(f"the state could not be saved: {fault}")
            raise

    def result(self) -> RunResult:
        """Returns where the results are, after a last checkpoint."""
        self.save()
        self.written()
        self._trackers.finish(self.latest)
        return self._finished(self._checkpoint_path(), self.latest)

    def already_finished(self, checkpoint: Path) -> RunResult:
        """Returns the results of a run that has nothing left to do, and shows how to train on."""
        self.start.give_up(self.start.folder)  # first, as damaged metrics are an error
        metrics, count = self.start.latest_metrics(), self.config.run.num_updates
        self.display.warn(
            f"run {self.path} is finished: {count} of {count} updates are done. To train on:"
            f" treegraft train --resume {self.path} run.num_updates={2 * count or 20}"
        )
        return self._finished(checkpoint, metrics)

    def _finished(self, checkpoint: Path, metrics: Mapping[str, float]) -> RunResult:
        self.display.finished(self.path, checkpoint, metrics)
        return RunResult(run_dir=self.path, checkpoint_dir=checkpoint, metrics=metrics)

    def depends_on(self, checksums: Callable[[], dict[str, str]]) -> None:
        """Has checkpoints hold the checksums of what else a resume depends on, see
        `runs.beside`."""
        self._more_beside = checksums

    def replays(self, files: Callable[[], Sequence[Path]]) -> None:
        """Has checkpoints hold the checksums of the files of trees that a resume replays."""
        self._replayed = files

    # ------------------------------------------------------------------ after a warm-up step

    def warmed_up(
        self, num_steps: int, metrics: Mapping[str, float], spent: Mapping[str, float]
    ) -> None:
        """Takes the number of warm-up steps done, their metrics so far, and what has been spent
        since the last call, which is added up."""
        before = self.state.pending
        sums = {key: before.get(key, 0.0) + value for key, value in spent.items()}
        own = {"warmup/num_steps": float(num_steps), **metrics, **sums}
        self.state = replace(self.state, warmup_steps=num_steps, pending={**before, **own})

    def imitates(self, path: Path, checksum: str) -> None:
        """Has the checkpoints of the warm-up hold the checksum of its demonstrations.

        Raises:
            CheckpointError: it is not that of the checkpoint to go on from.
        """
        start, name = self.start, "demonstrations"
        noted = start.state.beside.get(name, checksum)
        if noted != checksum and start.checkpoint is not None and not start.accepts_changes:
            raise CheckpointError(
                f"run folder '{self.path}': the demonstrations in '{path}' have changed since"
                f" {start.checkpoint.name} was written, so the resumed run would not equal an"
                f" undisturbed one. {ways_out(self.path, start.checkpoint)}"
            )
        self._imitated = {name: checksum}

    def is_warmup_evaluated(self) -> bool:
        """Returns whether the evaluation after the present warm-up step is in warmup.jsonl."""
        if not self.folder.warmup_path.exists():
            return False
        lines = read_metrics(self.path, self.folder.warmup_path.name)
        return any(line.get("warmup/num_steps", 0) == self.state.warmup_steps for line in lines)

    def log_warmup(self, evaluated: Mapping[str, float]) -> None:
        """Writes the evaluation after a warm-up step, with what has been spent so far."""
        self.folder.append_warmup({**self.state.pending, **evaluated})

    # ------------------------------------------------------------------ after an update

    def record_update(
        self,
        update: int,
        trees: Sequence[Tree],
        metrics: Mapping[str, float],
        more_state: Mapping[str, Any],
    ) -> None:
        """Records an update that is learned and published; `keep_update` logs it."""
        # A failed leaf is otherwise a number among many.
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        failed = [leaf for leaf in leaves if leaf.status is Status.FAILED]
        if failed and "failed" not in self.health.standing:
            self.display.warn(
                f"{len(failed)} of {len(leaves)} trajectories failed and left their groups; the"
                f" first: {failed[0].error}"
            )
        # One update's trees wait at most: a slow disk would fill the memory with more.
        self.written()
        self.record(update, trees)
        self.display.sample(trees[0])
        self._trackers.sample(update, trees)
        self.state = replace(
            self.state, update=update, is_closed=False, pending=metrics, **more_state
        )

    def record(self, update: int, trees: Sequence[Tree], kind: str = "") -> None:
        """Has trees written where the recipe asks for it; `kind` names those of an evaluation.
        They are there before the update's line of metrics and before a checkpoint."""
        if self.config.track.record_trees:
            path = self.folder.trees_path(update, kind)
            with span("record"):
                self._writer.submit(lambda: write_trees(path, trees))

    def written(self) -> None:
        """Waits for all trees and metrics so far to be in the run folder."""
        self._writer.drain()

    def keep_update(self, evaluated: Mapping[str, float]) -> None:
        """Logs the update with its evaluation (empty for none), and keeps the best and the latest
        checkpoints."""
        update, state = self.state.update, self.state
        metrics = {**state.pending, **evaluated}
        if update and evaluated:
            # The clock of the update stopped before its evaluation, which belongs to it.
            metrics["time/update_s"] += metrics["time/eval_s"]
        self.log(update, metrics)
        accuracy = metrics.get("eval/accuracy", metrics.get("eval/accuracy_sampled"))
        is_best = accuracy is not None and (
            state.best_accuracy is None or accuracy > state.best_accuracy
        )
        best = accuracy if is_best else state.best_accuracy
        # Closed before anything is saved: a resume from here must not evaluate and log it again.
        self.state = replace(self.state, is_closed=True, pending={}, best_accuracy=best)
        if is_best:
            self._write(self.folder.checkpoints_dir / "best")
        every, is_last = self.config.checkpoint.every, update == self.config.run.num_updates
        if is_last or (every and update % every == 0):
            self.save()
        # A safe point: nothing is pending that a checkpoint would not hold.
        self.stop.raise_if_asked()

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Writes a line of metrics, with the warnings that stand after it."""
        full = {**metrics, "policy_version": float(update)}
        found, began, over = self.health.take({"update": update, **full})
        full |= {warning.key: warning.value for warning in found}
        # Behind the update's trees: a line of metrics says that they are there.
        self._writer.submit(lambda: self.folder.append_metrics(update, full))
        self.latest = update_latest(self.latest, full)
        self._trackers.log(update, full, began)
        # Update 0 is the evaluation before the first update: no progress to show.
        if update:
            self.display.update(update, self.config.run.num_updates, full)
        for warning in began:
            self.display.warn(explained(warning, update))
        for text in over:
            self.display.note(text)

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Writes a checkpoint of the present state, unless there is one."""
        if self.state == self._saved:
            return
        self._write(self._checkpoint_path())
        # `_write` has set metrics_size, so the state is remembered after it.
        self._saved = self.state
        prune_checkpoints(self.folder.checkpoints_dir, self.config.checkpoint.keep)

    def _write(self, place: Path) -> None:
        self.written()
        # A resume cuts the metrics to this length.
        state = replace(self.state, metrics_size=self.folder.metrics_size())
        beside = self._beside.checksums(state, self._replayed()) | self._more_beside()
        if state.warmup_steps < self.config.warmup.num_steps:
            beside |= self._imitated
        self.state = replace(state, beside=beside)
        with self.stop.shielded(), span("checkpoint"):
            self._write_checkpoint(place, self.state)

    def _checkpoint_path(self) -> Path:
        return self.folder.checkpoints_dir / checkpoint_name(self.state)


class Clock:
    """Seconds of the parts of an update."""

    def __init__(self) -> None:
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds the time of the block to a part."""
        began = time.monotonic()
        with span(part):
            yield
        self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - began

    def take_metrics(self) -> dict[str, float]:
        """Returns time/PART_s of each part, and time/update_s and time/cpu_s since the start."""
        return {f"time/{part}_s": seconds for part, seconds in self._parts.items()} | {
            "time/update_s": time.monotonic() - self._began,
            "time/cpu_s": time.process_time() - self._cpu_began,
        }
