"""One run: its folder, its state, its checkpoints and its end. It knows no model and no engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from treegraft.core.errors import EngineError, SettingError, StorageError
from treegraft.core.files import free_name, storage_fault, write_atomically
from treegraft.core.given import GivenObjects
from treegraft.core.interfaces import Display
from treegraft.core.interrupt import Ended, Interrupted, Stop
from treegraft.core.team import Alone, Team
from treegraft.core.types import Tree
from treegraft.runs.checkpoint import (
    TrainState,
    checkpoint_name,
    prune_checkpoints,
)
from treegraft.runs.metrics import CALLS
from treegraft.runs.record import RunFolder, read_metrics
from treegraft.runs.recorder import Recorder
from treegraft.runs.result import RunResult, latest_of
from treegraft.runs.resume import Resumed, changes, folder_inputs, refuse_changed, resumed
from treegraft.runs.trust import remember
from treegraft.settings.config import Config
from treegraft.settings.load import config_json, load_config
from treegraft.settings.objects import Source
from treegraft.settings.table import with_choices

_BEST = "best"
SPENT = (CALLS, ("rollout/num_sampled_tokens",))
"""What counts against the limits of [run]: executed calls, and tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpStep:
    """A step of imitation that a session has made."""

    num_steps: int
    """Steps done."""
    metrics: Mapping[str, float]
    """warmup/loss."""
    spent: Mapping[str, float]
    """What the step cost, which is added up: tokens and seconds."""


def new_run_path(config: Config, recipe: str | None, source: object = None) -> Path:
    """Returns the folder of a new run, which is not there yet. Raises `CheckpointError` where none
    can be made, or something is there."""
    stem = Path(recipe or (source if isinstance(source, str | Path) else "run")).stem
    name = config.run.name or f"{stem}-seed{config.run.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path(config.run.dir).expanduser() / name
    if config.run.name is None:
        # Two runs that start within one second would have one name.
        path = free_name(path)
    RunFolder.refuse_unusable(path)
    return path


def reached_limits(config: Config, state: TrainState) -> list[str]:
    """Returns the limits of [run] that are reached; with any of them the run is over."""
    over = [name for name, share in config.run.spent(state.spent).items() if share >= 1.0]
    return over + ["num_updates"] * (state.update >= config.run.num_updates)


@dataclass(kw_only=True)
class Run:
    """One run from its first byte to its last. Nothing is written before `recording`, so bad input
    leaves nothing behind."""

    config: Config
    path: Path
    """Where the run folder is, or will be; with a number at its end where the user gave no name and
    another run takes this one first."""
    folder: RunFolder | None
    """The folder to go on in; None for a new run until `recording`."""
    checkpoint: Path | None
    """The checkpoint to go on from; None starts at the beginning."""
    state: TrainState
    given: GivenObjects
    """The Python objects that the settings lead to."""
    command: str
    """The word of the command line that goes on with the run: "train" or "sft"."""
    recorder: Recorder
    team: Team = field(default_factory=Alone)
    """The processes that run the training together."""
    accepts_changes: bool = False
    """Whether what lies beside the checkpoint is taken as it is, see `runs.resume`."""
    notices: Sequence[str] = ()
    """What the user is told when it begins, one sentence each."""

    def __post_init__(self) -> None:
        self.display = self.recorder.display
        # One for session and run, so that a signal ends both at the same point.
        self.stop = Stop()
        self._is_new = self.folder is None
        self._is_recorded = False
        # A run that goes on from a checkpoint has nothing to save before something changes.
        self._saved = None if self.checkpoint is None else self.state

    @classmethod
    def open(
        cls,
        source: Source | None,
        given: GivenObjects,
        display: Display,
        *,
        command: str,
        team: Team | None = None,
        recipe: str | None = None,
        resume: Path | str | None = None,
        accepts_changes: bool = False,
        callbacks: Sequence[Any] = (),
    ) -> Self:
        """Returns a new run, or one to go on with.

        Args:
            source: settings; None for those of the run to resume.
            given: the Python objects that they lead to.
            recipe: its name, for the run folder's default name.
            resume: a run folder to go on in; None for a new one.
            team: the processes that run the training together; None for this one.
            accepts_changes: go on although inputs have changed.
            callbacks: those of `treegraft.train`.

        Raises:
            TreegraftError: bad input, see `runs.resume.resumed`; nothing has been written then.
        """
        if resume is not None:
            found = resumed(Path(resume), source, accepts_changes=accepts_changes)
        elif accepts_changes:
            raise SettingError(
                "accepts_changes: got True for a new run; expected a run to resume. Leave it out.",
                code="nothing-resumed",
            )
        elif source is None:
            raise SettingError(
                "train: neither settings nor a run to resume were given; name a recipe or a run"
                " folder.",
                code="nothing-to-train",
            )
        else:
            config = with_choices(load_config(source))
            found = Resumed(config=config, state=TrainState.fresh())
        folder = found.folder
        try:
            return cls(
                config=found.config,
                path=new_run_path(found.config, recipe, source) if folder is None else folder.path,
                folder=folder,
                checkpoint=found.checkpoint,
                state=found.state,
                given=given,
                command=command,
                recorder=Recorder(found.config, display, callbacks),
                team=team or Alone(),
                accepts_changes=accepts_changes,
                notices=found.notices,
            )
        except BaseException:
            if folder is not None:
                folder.release()
            raise

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_recorded:
            self._give_up()

    def _give_up(self) -> None:
        """Leaves the folder as it was: removes one just made, and releases one to go on in."""
        if self.folder is not None:
            self.folder.release()
            if self._is_new:
                shutil.rmtree(self.folder.path)
                self.folder = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        is_closed = self.folder is not None and self.state.is_closed
        return is_closed and self.is_over and self.checkpoint is not None

    @property
    def is_over(self) -> bool:
        """Whether no further update begins."""
        return bool(reached_limits(self.config, self.state))

    @property
    def budget_used(self) -> float:
        """The share of the nearest limit of calls or tokens that is used up, 0 without one."""
        return max(self.config.run.spent(self.state.spent).values(), default=0.0)

    @property
    def _resume_command(self) -> str:
        return f"treegraft {self.command} --resume {self.path}"

    @contextmanager
    def recording(self, session: Any, warnings: Sequence[str] = ()) -> Iterator[None]:
        """Holds the run folder for the time of the block. A first signal that asks for an end ends
        the block at the next safe point and saves; a second Ctrl-C ends it at once.

        Args:
            session: the open `treegraft.Session`; a run knows no model and no engine.
            warnings: what is wrong with the tasks' data, one sentence each.

        Raises:
            CheckpointError: the session reads something else than at the checkpoint.
            KeyboardInterrupt: after Ctrl-C; Ended, which is one, after another signal.
        """
        self._session = session
        if self.checkpoint is not None and not self.accepts_changes:
            inputs = session.inputs(at_start=True)
            changed = changes(self.state.beside, inputs, session.input_places())
            refuse_changed(self.path, self.checkpoint, changed)
        folder = self._opened_folder()
        with ExitStack() as ends:
            ends.callback(folder.release)
            signals = self.stop.on_signals(
                self.display.warn, "stopping and saving", "Ctrl-C again to stop without saving"
            )
            ends.enter_context(signals)
            try:
                texts = [*self.notices, *warnings]
                ends.enter_context(self.recorder.opened(folder, self._history(), texts))
            except BaseException:
                self._give_up()
                raise
            self._is_recorded = True
            with self._told_ends():
                yield

    def _opened_folder(self) -> RunFolder:
        """The run folder: a new one, or the existing one cut to the state to go on from."""
        if self.folder is None:
            is_named = self.config.run.name is not None
            folder = RunFolder.create(self.path, config_json(self.config), is_named=is_named)
            # Another process could resume a folder that is there and not claimed.
            folder.claim()
            self.path = folder.path
        else:
            folder = self.folder
            # -1: without a checkpoint even the evaluation before the first update is repeated.
            update = -1 if self.checkpoint is None else self.state.update
            folder.cut_to(update, self.state.metrics_size, is_closed=self.state.is_closed)
            # The evaluation at this step comes again, unless updates have begun.
            if not (self.state.update or self.state.is_closed):
                folder.cut_warmup(self.state.warmup_steps)
            write_atomically(self.path / "config.json", config_json(self.config))
            remember(self.path / "config.json")
        self.folder = folder
        self._own = folder
        return folder

    def _history(self) -> list[dict[str, float]]:
        """The lines of metrics logged so far."""
        # A run that was stopped before its first line has no metrics.jsonl yet.
        return [] if self._is_new or not self.state.metrics_size else read_metrics(self.path)

    @contextmanager
    def _told_ends(self) -> Iterator[None]:
        """Tells how to go on, where the block does not come to its end."""
        try:
            # A block of its own, since this checkpoint may be interrupted, too.
            try:
                yield
            except EngineError:
                self._try_to_save()
                raise
        except Interrupted as error:
            # Raised at safe points only, so that the state is whole.
            self._save_with_others()
            self.display.interrupted(self._resume_command)
            raise Ended(self.stop.number) from error
        except (KeyboardInterrupt, asyncio.CancelledError):
            since = " since the last checkpoint" if self._saved is not None else ""
            self.display.warn(
                f"stopped at once; everything{since} is lost, and repeated when the run is resumed"
            )
            self.display.interrupted(self._resume_command, False)
            raise
        except Exception as error:
            has_any = self._saved is not None
            how = "go on from its last checkpoint" if has_any else "begin anew"
            self.display.warn(
                f"the run has failed; once the cause is mended, {how} with: {self._resume_command}"
            )
            if fault := storage_fault(error):
                safe = ". Everything up to its last checkpoint is safe"
                if not has_any:
                    safe = " before its first checkpoint"
                raise StorageError(
                    f"run folder '{self.path}': writing failed ({fault}){safe}. Make room or mend"
                    f" the folder, then {how} with: {self._resume_command}",
                    code="not-written",
                ) from error
            raise

    def _try_to_save(self) -> None:
        """Saves the state after a failure of the engine, unless the learner's weights are ahead of
        it or on their way to the engine. Whatever keeps it from being saved, the engine's error is
        the one to show."""
        if self._session.is_syncing or self._session.update != self.state.update:
            return
        try:
            self._save_with_others()
        except Exception as fault:
            self.display.warn(f"the state could not be saved: {fault}")

    def _save_with_others(self) -> None:
        """Saves, with the help of the other ranks, which wait for what comes next."""
        # After a checkpoint the signal may come before anything has changed.
        if self.state == self._saved:
            return
        self.team.call_off()
        self.save()
        self.team.share(None)
        # The others end now, and nobody misses them.
        self.team.finish()

    def result(self) -> RunResult:
        """Returns where the results are, after a last checkpoint; of a run that has nothing left to
        do, after a word on how to train on."""
        if self.is_finished and not self._is_recorded:
            return self._already_finished()
        self.save()
        self.team.share(None)
        place = self._own.checkpoints_dir / checkpoint_name(self.state)
        return self._finished(place, self.recorder.latest)

    def _already_finished(self) -> RunResult:
        assert self.checkpoint is not None
        limits = reached_limits(self.config, self.state)
        more = (f"run.{name}={2 * getattr(self.config.run, name) or 20}" for name in limits)
        self.display.warn(
            f"run {self.path} is finished after update {self.state.update}. To train on:"
            f" treegraft train --resume {self.path} {' '.join(more)}"
        )
        return self._finished(self.checkpoint, latest_of(self._history()))

    def _finished(self, checkpoint: Path, metrics: Mapping[str, float]) -> RunResult:
        self.display.finished(self.path, checkpoint, metrics)
        shared = {"run_dir": str(self.path), "checkpoint_dir": str(checkpoint)}
        self.team.share({**shared, "metrics": dict(metrics)})
        return RunResult(
            run_dir=self.path, checkpoint_dir=checkpoint, metrics=metrics, given=self.given
        )

    # ------------------------------------------------------------------ the warm-up

    def record_warm_up(self, step: WarmUpStep) -> None:
        """Records a step of the warm-up, with a checkpoint after each quarter and at the end."""
        before = self.state.pending
        num_all = self.config.warmup.num_steps
        sums = {key: before.get(key, 0.0) + value for key, value in step.spent.items()}
        # Sums over all processes of the run, since `pending` is in the checkpoint.
        own = {"warmup/num_steps": float(step.num_steps), **step.metrics, **sums}
        self.state = replace(self.state, warmup_steps=step.num_steps, pending={**before, **own})
        detail = f"loss {step.metrics['warmup/loss']:.3f}"
        self.display.phase("warm-up", step.num_steps, num_all, detail)
        # A kill costs at most a quarter of the warm-up, unless no checkpoint but the last is asked
        # for.
        save_every = max(1, num_all // (4 if self.config.checkpoint.every else 1))
        if step.num_steps == num_all or step.num_steps % save_every == 0:
            self.save()
        self.team.share(None)
        self.stop.raise_if_asked()

    def is_warm_up_evaluation_due(self) -> bool:
        """Returns whether the held-out tasks are to be evaluated after the present warm-up step."""
        return bool(self.team.share(self._is_warm_up_evaluation_due()))

    def _is_warm_up_evaluation_due(self) -> bool:
        settings = self.config.warmup
        done = self.state.warmup_steps
        if self.state.update or self.state.is_closed or not settings.eval_every:
            return False
        if done == 0:
            return self.config.eval.at_start
        return done == settings.num_steps or done % settings.eval_every == 0

    def log_warm_up(self, evaluation: Any) -> None:
        """Writes the evaluation after a warm-up step, with what has been spent so far."""
        if evaluation is None:  # there are no held-out tasks
            return
        self.display.evaluated(f"warm-up step {self.state.warmup_steps}", evaluation.metrics)
        self._own.append_warmup({**self.state.pending, **evaluation.metrics})

    # ------------------------------------------------------------------ updates

    def updates(self) -> Iterator[int]:
        """Yields the numbers of the updates that are left, each once the one before is closed. It
        ends at the limits of [run], and where a callback asks for the end."""
        while not (self.is_over or self.recorder.wants_end):
            yield self.team.share(self.state.update + 1)
        self.team.share(None)

    def record(
        self,
        update: int,
        trees: Sequence[Tree],
        metrics: Mapping[str, float],
        more_state: Mapping[str, Any],
    ) -> None:
        """Records an update that is learned and whose weights the engine has; `close` logs it."""
        # Before the state changes: a failed write must not count as recorded.
        self.recorder.update(update, trees)
        calls, tokens = (sum(int(metrics.get(key, 0)) for key in keys) for keys in SPENT)
        spent = (self.state.spent[0] + calls, self.state.spent[1] + tokens)
        own: dict[str, Any] = {"update": update, "pending": metrics, "spent": spent}
        self.state = replace(self.state, is_closed=False, **own, **more_state)

    def is_evaluation_due(self) -> bool:
        """Returns whether the held-out tasks are evaluated after the present update."""
        settings = self.config.eval
        number = self.state.update
        if self.state.is_closed:
            return False
        if number == 0:
            return settings.at_start
        is_last = settings.at_end and self.is_over
        return is_last or bool(settings.every and number % settings.every == 0)

    def close(self, evaluation: Any = None) -> None:
        """Logs the update with its evaluation (None for none), and keeps the best and the latest
        checkpoints; nothing if that is done."""
        if not self.state.is_closed:
            self._close(evaluation)
        self.team.share(None)
        # A safe point: nothing is pending that a checkpoint would not hold.
        self.stop.raise_if_asked()

    def _close(self, evaluation: Any) -> None:
        update = self.state.update
        state = self.state
        evaluated = {} if evaluation is None else self._recorded(evaluation)
        metrics = {**state.pending, **evaluated}
        if update and evaluated:
            # The clock of the update stopped before its evaluation, which belongs to it.
            metrics["time/update_s"] += metrics["time/eval_s"]
        self.recorder.metrics(update, metrics)
        accuracy = metrics.get("eval/accuracy", metrics.get("eval/accuracy_sampled"))
        is_best = accuracy is not None and (
            state.best_accuracy is None or accuracy > state.best_accuracy
        )
        best = accuracy if is_best else state.best_accuracy
        # Closed before anything is saved: a resume from here must not evaluate and log it again.
        self.state = replace(self.state, is_closed=True, pending={}, best_accuracy=best)
        if is_best:
            # A checkpoint of its own, since the latest ones are pruned.
            self._write(_BEST)
        if self.is_over or ((every := self.config.checkpoint.every) and update % every == 0):
            self.save()

    def log_pending(self) -> None:
        """Logs what an sft run has, so that a later training logs update 0 with its evaluation."""
        if not self.state.is_closed:
            self.recorder.metrics(self.state.update, self.state.pending)

    def _recorded(self, evaluation: Any) -> dict[str, float]:
        """Records the trees of an evaluation; returns its metrics."""
        number = self.state.update
        metrics: dict[str, float] = evaluation.metrics
        for kind, trees in evaluation.passes.items():
            self.recorder.trees(number, trees, kind)
        self.display.evaluated(f"update {number}" if number else "start", metrics)
        return metrics | {"time/eval_s": evaluation.seconds}

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Writes a checkpoint of the present state, unless there is one."""
        if self.state != self._saved:
            self._write(checkpoint_name(self.state))

    def _write(self, name: str) -> None:
        with self.stop.shielded():
            self._own.refuse_removed()
            # A resume cuts the metrics to this length.
            state = replace(self.state, metrics_size=self._own.metrics_size())
            beside = folder_inputs(self.path, state, self._session.replayed())
            beside |= self._session.inputs()
            self.state = replace(state, beside=beside)
            self._session.save(self._own.checkpoints_dir / name, self.state)
            if name != _BEST:
                self._saved = self.state
                # Last: until the new one is whole, a resume needs an old one.
                prune_checkpoints(self._own.checkpoints_dir, self.config.checkpoint.keep)
