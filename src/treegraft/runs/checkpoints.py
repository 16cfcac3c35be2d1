"""The checkpoints that a run writes, with the checksums of what a resume depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from treegraft.core.errors import CheckpointError
from treegraft.runs.checkpoint import TrainState, checkpoint_name, prune_checkpoints
from treegraft.runs.record import RunFolder
from treegraft.runs.resume_inputs import ResumeInputs, ways_out
from treegraft.runs.start import Start

Write = Callable[[Path, TrainState], None]
"""Writes weights, optimiser and the given state to a folder."""


class Checkpoints:
    """The checkpoints of one run: the latest few, and the best."""

    def __init__(self, start: Start) -> None:
        self._start = start
        # A run that goes on from a checkpoint has nothing to save before something changes.
        self._saved = None if start.checkpoint is None else start.state
        self._more: Callable[[], dict[str, str]] = dict
        self._replayed: Callable[[], Sequence[str]] = tuple
        self._imitated: dict[str, str] = {}
        self._asked: dict[str, str] = {}

    def open(self, folder: RunFolder, write: Write) -> None:
        """Takes the folder to write to, and how."""
        self._folder, self._write_to = folder, write
        self._beside = ResumeInputs(folder.path)

    @property
    def is_any(self) -> bool:
        """Whether a resume has one to go on from."""
        return self._saved is not None

    def has(self, state: TrainState) -> bool:
        """Returns whether the latest checkpoint is of this state."""
        return state == self._saved

    def path(self, state: TrainState) -> Path:
        """Returns the folder of a state's checkpoint."""
        return self._folder.checkpoints_dir / checkpoint_name(state)

    def write(self, state: TrainState) -> TrainState:
        """Writes a checkpoint, of which the latest few are kept; returns the state in it."""
        # `_write` sets metrics_size, so the state is remembered after it.
        self._saved = self._write(self.path(state), state)
        prune_checkpoints(self._folder.checkpoints_dir, self._start.config.checkpoint.keep)
        return self._saved

    def write_best(self, state: TrainState) -> TrainState:
        """Writes the checkpoint of the best evaluation so far; returns the state in it."""
        return self._write(self._folder.checkpoints_dir / "best", state)

    def _write(self, place: Path, state: TrainState) -> TrainState:
        # A resume cuts the metrics to this length.
        state = replace(state, metrics_size=self._folder.metrics_size())
        beside = self._beside.checksums(state, self._replayed())
        beside |= self._asked | self._more()
        if state.warmup_steps < self._start.config.warmup.num_steps:
            beside |= self._imitated
        state = replace(state, beside=beside)
        self._write_to(place, state)
        return state

    # ------------------------------------------------------------------ what a resume depends on

    def depends_on(self, checksums: Callable[[], dict[str, str]]) -> None:
        """Has checkpoints hold the checksums of what else a resume depends on, see
        `runs.resume_inputs`."""
        self._more = checksums

    def replays(self, labels: Callable[[], Sequence[str]]) -> None:
        """Has checkpoints hold the checksums of the trees that a resume replays."""
        self._replayed = labels

    def imitates(self, path: Path, checksum: str) -> None:
        """Has the checkpoints of the warm-up hold the checksum of its demonstrations.

        Raises:
            CheckpointError: it is not that of the checkpoint to go on from.
        """
        if problem := self._change("demonstrations", checksum, f" in '{path}'"):
            raise CheckpointError(problem, code="demonstrations-changed")
        self._imitated = {"demonstrations": checksum}

    def asks(self, checksum: str) -> None:
        """Has checkpoints hold the checksum of the tasks; raises as `imitates`."""
        if problem := self._change("tasks", checksum):
            raise CheckpointError(problem, code="tasks-changed")
        self._asked = {"tasks": checksum}

    def _change(self, name: str, checksum: str, where: str = "") -> str:
        """Why the run may not go on with what has this checksum now; empty where it may."""
        start = self._start
        is_same = start.state.beside.get(name, checksum) == checksum
        if is_same or start.checkpoint is None or start.accepts_changes:
            return ""
        return (
            f"run folder '{start.path}': the {name}{where} have changed since"
            f" {start.checkpoint.name} was written, so the resumed run would not equal an"
            f" undisturbed one. {ways_out(start.path, start.checkpoint)}"
        )
