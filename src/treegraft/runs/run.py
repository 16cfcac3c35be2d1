"""One run: its folder and its state, from the first byte to the last. It knows no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from treegraft.core.errors import EngineError, StorageError, first_cause
from treegraft.core.files import storage_fault
from treegraft.core.interfaces import Display
from treegraft.core.interrupt import Ended, Interrupted, Stop, run_to_end
from treegraft.core.spans import span
from treegraft.core.types import Tree
from treegraft.runs.checkpoint import TrainState
from treegraft.runs.checkpoints import Checkpoints, Write
from treegraft.runs.metrics import CALLS
from treegraft.runs.record import read_metrics
from treegraft.runs.reporter import Reporter
from treegraft.runs.result import RunResult
from treegraft.runs.start import Start, spent_limits

Result = TypeVar("Result")
SPENT = (CALLS, ("rollout/num_sampled_tokens",))
"""What counts against the limits of [run]: executed calls, and tokens."""


class Run:
    """One run from its first byte to its last.

    Nothing is written before `opened`, so bad input leaves nothing behind. `command` is the word of
    the command line that goes on with the run: "train" or "sft"; `callbacks` are those of
    `treegraft.train`.
    """

    def __init__(
        self, start: Start, display: Display, command: str, callbacks: Sequence[Any] = ()
    ) -> None:
        self.start, self.config = start, start.config
        self.state, self.path = start.state, start.path
        self.stop, self.checkpoints = Stop(), Checkpoints(start)
        self._command = command
        self._is_opened = False
        try:
            self.reporter = Reporter(start, display, callbacks)
        except BaseException:
            start.give_up(start.folder)
            raise
        self.display = self.reporter.display

    @property
    def _resume_command(self) -> str:
        return f"treegraft {self._command} --resume {self.path}"

    @property
    def is_over(self) -> bool:
        """Whether no further update begins."""
        return bool(spent_limits(self.config, self.state))

    # ------------------------------------------------------------------ from beginning to end

    def carry_out(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of the run's coroutine, also where an event loop is running already.

        Raises:
            TreegraftError: the first cause, where many tasks failed at once.
            KeyboardInterrupt: after Ctrl-C.
        """
        try:
            with first_cause():
                return run_to_end(work, on_interrupt=self.stop.ask)
        finally:
            if not self._is_opened:
                self.start.give_up(self.start.folder)

    @contextmanager
    def opened(self, write_checkpoint: Write, defects: Sequence[str] = ()) -> Iterator[None]:
        """Holds the run folder for the time of the block. A first signal that asks for an end ends
        the block at the next safe point and saves; a second Ctrl-C ends it at once.

        Args:
            write_checkpoint: writes weights, optimiser and the given state to a folder.
            defects: of the tasks' data, one sentence each.

        Raises:
            KeyboardInterrupt: after Ctrl-C; Ended, which is one, after another signal.
        """
        self.folder = self.start.open_folder()
        self.path = self.folder.path
        with ExitStack() as ends:
            ends.callback(self.folder.release)
            signals = self.stop.on_signals(
                self.display.warn, "stopping and saving", "Ctrl-C again to stop without saving"
            )
            ends.enter_context(signals)
            try:
                self.checkpoints.open(self.folder, write_checkpoint)
                ends.enter_context(self.reporter.opened(self.folder, defects))
            except BaseException:
                self.start.give_up(self.folder)
                raise
            self._is_opened = True
            with self._told_ends():
                yield

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
            since = " since the last checkpoint" if self.checkpoints.is_any else ""
            self.display.warn(
                f"stopped at once; everything{since} is lost, and repeated when the run is resumed"
            )
            self.display.interrupted(self._resume_command, False)
            raise
        except Exception as error:
            how = "go on from its last checkpoint" if self.checkpoints.is_any else "begin anew"
            self.display.warn(
                f"the run has failed; once the cause is mended, {how} with: {self._resume_command}"
            )
            if fault := storage_fault(error):
                safe = ". Everything up to its last checkpoint is safe"
                if not self.checkpoints.is_any:
                    safe = " before its first checkpoint"
                raise StorageError(
                    f"run folder '{self.path}': writing failed ({fault}){safe}. Make room or mend"
                    f" the folder, then {how} with: {self._resume_command}",
                    code="not-written",
                ) from error
            raise

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
        self.reporter.finish()
        return self._finished(self.checkpoints.path(self.state), self.reporter.latest)

    def already_finished(self, checkpoint: Path) -> RunResult:
        """Returns the results of a run that has nothing left to do, and shows how to train on."""
        self.start.give_up(self.start.folder)  # first, as damaged metrics are an error
        metrics, limits = self.start.latest_metrics(), spent_limits(self.config, self.state)
        run, shares = self.config.run, self.config.run.spent(self.state.spent)
        # Twice what was spent: the last update may have gone far beyond the limit.
        most = {name: round(2 * getattr(run, name) * shares.get(name, 1)) for name in limits}
        more = (f"run.{name}={num or 20}" for name, num in most.items())
        self.display.warn(
            f"run {self.path} is finished after update {self.state.update}. To train on:"
            f" treegraft train --resume {self.path} {' '.join(more)}"
        )
        return self._finished(checkpoint, metrics)

    def _finished(self, checkpoint: Path, metrics: Mapping[str, float]) -> RunResult:
        self.display.finished(self.path, checkpoint, metrics)
        return RunResult(
            run_dir=self.path, checkpoint_dir=checkpoint, metrics=metrics, given=self.start.given
        )

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

    def is_warmup_evaluation_due(self) -> bool:
        """Returns whether the held-out tasks are to be evaluated after the present warm-up step and
        are not yet: warmup.jsonl has no line of it."""
        settings, done = self.config.warmup, self.state.warmup_steps
        if self.state.update or self.state.is_closed or not settings.eval_every:
            return False
        is_due = done == settings.num_steps or done % settings.eval_every == 0
        if not is_due or (done == 0 and not self.config.eval.at_start):
            return False
        if not self.folder.warmup_path.exists():
            return True
        lines = read_metrics(self.path, self.folder.warmup_path.name)
        return all(line.get("warmup/num_steps", 0) != done for line in lines)

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
        self.reporter.update(update, trees)
        calls, tokens = (sum(int(metrics.get(key, 0)) for key in keys) for keys in SPENT)
        spent = (self.state.spent[0] + calls, self.state.spent[1] + tokens)
        own: dict[str, Any] = {"update": update, "pending": metrics, "spent": spent}
        self.state = replace(self.state, is_closed=False, **own, **more_state)

    def keep_update(self, evaluated: Mapping[str, float]) -> None:
        """Logs the update with its evaluation (empty for none), and keeps the best and the latest
        checkpoints."""
        update, state = self.state.update, self.state
        metrics = {**state.pending, **evaluated}
        if update and evaluated:
            # The clock of the update stopped before its evaluation, which belongs to it.
            metrics["time/update_s"] += metrics["time/eval_s"]
        self.reporter.metrics(update, metrics)
        accuracy = metrics.get("eval/accuracy", metrics.get("eval/accuracy_sampled"))
        is_best = accuracy is not None and (
            state.best_accuracy is None or accuracy > state.best_accuracy
        )
        best = accuracy if is_best else state.best_accuracy
        # Closed before anything is saved: a resume from here must not evaluate and log it again.
        self.state = replace(self.state, is_closed=True, pending={}, best_accuracy=best)
        if is_best:
            self._write(self.checkpoints.write_best)
        if self.is_over or ((every := self.config.checkpoint.every) and update % every == 0):
            self.save()
        # A safe point: nothing is pending that a checkpoint would not hold.
        self.stop.raise_if_asked()

    def save(self) -> None:
        """Writes a checkpoint of the present state, unless there is one."""
        if not self.checkpoints.has(self.state):
            self._write(self.checkpoints.write)

    def _write(self, write: Callable[[TrainState], TrainState]) -> None:
        self.reporter.written()
        with self.stop.shielded(), span("checkpoint"):
            self.state = write(self.state)
