"""The Step-Trace Buffer of a run: found or built before the first update, grown by the agent's own
best trajectories.

A run that only reads opens the buffer where it lies. One that builds or grows it works on a copy in
its run folder, which a resumed run rolls back to its checkpoint.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.files import parse_json, write_atomically
from treegraft.core.interfaces import TaskSource
from treegraft.runs.resume_inputs import ways_out
from treegraft.runs.start import Start
from treegraft.settings.config import Config
from treegraft.tools.search.encoders import Encoder
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.rollout_buffer import RolloutBuffer, TraceParts, named_file

OWN_FILE = Path("buffer") / "traces.sqlite"
"""Where a run keeps its copy."""
BESIDE = "buffer"
"""Its name among `TrainState.beside`, wherever it lies."""


def buffer_file(path: Path) -> Path:
    """Returns the file of a Step-Trace Buffer, given itself, its folder or the folder of a run that
    uses it.

    Raises:
        DataError: a folder in which there is none.
    """
    if not path.is_dir():
        return path
    used = _noted(path / "buffer.json", "path")
    places = [path / OWN_FILE, path / OWN_FILE.name, *([path / used] if used else [])]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"'{path}' is a folder without a Step-Trace Buffer; expected the buffer's file, or the"
            f" folder of a run that retrieves, such as one with {OWN_FILE}",
            code="folder-without-buffer",
        )
    return found


def _noted(record: Path, name: str) -> str:
    """What a run's note about its buffer says; empty without a note."""
    if not record.is_file():
        return ""
    try:
        return str(dict(parse_json(record.read_bytes()))[name])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"'{record}' is damaged ({error!r}); expected the note of a run about its buffer.",
            code="buffer-note-damaged",
        ) from error


class RunBuffer(RolloutBuffer):
    """The same for a run, which keeps what it makes or grows in its folder."""

    def __init__(
        self, config: Config, source: TaskSource, run_dir: Path, start: Start | None = None
    ) -> None:
        """Checks the buffer and loads its encoder.

        Args:
            source: the tasks, whose expert can fill the buffer.
            run_dir: where the run keeps its copy, if it has one; the original is then no longer
                needed.
            start: of a run that is resumed; the buffer has to be that of its checkpoint.

        Raises:
            CheckpointError: the buffer is not the one that the checkpoint was trained with.
            DataError, SettingError, ModelError: as of `RolloutBuffer`.
        """
        self.run_dir = run_dir
        self._start, self._checksum = start, ""
        super().__init__(config, source)

    @property
    def _own(self) -> Path:
        return self.run_dir / OWN_FILE

    @property
    def file(self) -> Path:
        """Where it lies: the run's copy, or the file that buffer.path names; of one that the run
        makes, not there before `build`."""
        return self._own if self._own.exists() or self._is_made else named_file(self._config)

    @property
    def _is_to_make(self) -> bool:
        return super()._is_to_make and not self._own.exists()

    def _checked_encoder(self, is_only_read: bool) -> Encoder | None:
        self._refuse_lost(self._own)
        if self._own.exists():
            return self._encoder_of(self._own, is_only_read)
        return super()._checked_encoder(is_only_read)

    async def build(self, parts: TraceParts) -> None:
        """Makes the buffer of the expert's steps or of a .jsonl file, where that is still to do;
        arguments as in `opened`. Raises `DataError` for one without any."""
        if self._encoder is not None and self._is_to_make:
            await self._make_copy(parts)
            with TraceBuffer(self._own, self._encoder) as buffer:
                self._refuse_empty(buffer)

    def _refuse_unfit(self, buffer: TraceBuffer) -> None:
        super()._refuse_unfit(buffer)
        self._refuse_changed(buffer, self._own)

    def _refuse_lost(self, own: Path) -> None:
        """Refuses to go on with a fresh copy where the checkpoint was trained with one."""
        start = self._start
        if start is None or start.checkpoint is None or own.exists() or not self._is_own:
            return
        if BESIDE in start.state.beside and not start.accepts_changes:
            raise CheckpointError(
                f"run folder '{self.run_dir}': its Step-Trace Buffer {OWN_FILE} is missing, which"
                f" {start.checkpoint.name} was trained with."
                f" {ways_out(self.run_dir, start.checkpoint)}",
                code="run-buffer-missing",
            )

    def _refuse_changed(self, buffer: TraceBuffer, own: Path) -> None:
        """Refuses another content than the one that the checkpoint was trained with."""
        start = self._start
        if start is None or start.checkpoint is None or not start.state.beside:
            return
        noted = start.state.beside.get(BESIDE)
        # What later updates have added is undone when the run goes on.
        update = start.state.update if buffer.path == own else None
        if noted is None or start.accepts_changes or buffer.checksum(update) == noted:
            return
        raise CheckpointError(
            f"run folder '{self.run_dir}': the Step-Trace Buffer '{buffer.path}' (traces, vectors"
            f" or evictions) has changed since {start.checkpoint.name} was written, so the resumed"
            " run would not equal an undisturbed one."
            f" {ways_out(self.run_dir, start.checkpoint)}",
            code="buffer-changed",
        )

    def checksums(self) -> dict[str, str]:
        """Returns the buffer's checksum for a checkpoint; empty where none is used."""
        # A buffer that is only read is hashed once; a growing one costs its new traces.
        if self.buffer is not None and (not self._checksum or self._config.buffer.grow.num_best):
            self._checksum = self.buffer.checksum()
        return {BESIDE: self._checksum} if self._checksum else {}

    async def _taken(self, update: int, parts: TraceParts) -> TraceBuffer:
        if not self._is_own:
            return await super()._taken(update, parts)
        is_new = not self._own.exists()
        if is_new:
            await self._make_copy(parts)
        buffer = TraceBuffer(self._own, self._encoder)
        if not is_new:
            # Later updates are run again, and add and evict the same traces again. A new copy may
            # hold the marks of another run's updates, which must stay.
            buffer.roll_back(update)
        return buffer

    def _begin(self, buffer: TraceBuffer) -> None:
        super()._begin(buffer)
        is_accepted = self._start is not None and self._start.accepts_changes
        self._note(buffer, self._is_own or is_accepted)

    def _end(self) -> None:
        # A run that is stopped writes its checkpoint after this.
        with suppress(DataError):
            self.checksums()

    async def _make_copy(self, parts: TraceParts) -> None:
        """Makes the run's buffer, complete under its name or not there at all."""
        if self._is_made:
            taken = await super()._taken(0, parts)
        else:
            taken = TraceBuffer(named_file(self._config), self._encoder)
        with taken as buffer:
            buffer.copy_to(self._own)

    def _note(self, buffer: TraceBuffer, is_own: bool) -> None:
        """Writes buffer.json when the run begins; later a buffer that others can change has to be
        the one that it names."""
        place, fingerprint = self.run_dir / "buffer.json", buffer.fingerprint()
        if not place.exists():
            note = {
                "path": os.path.relpath(buffer.path, self.run_dir),
                "fingerprint": fingerprint,
                "num_traces": len(buffer),
            }
            write_atomically(place, json.dumps(note, indent=2) + "\n")
        elif not is_own and (noted := _noted(place, "fingerprint")) != fingerprint:
            raise CheckpointError(
                f"buffer.path: the buffer '{buffer.path}' has changed since the run began"
                f" (fingerprint {fingerprint}, expected {noted}); put the old file back, or start a"
                " new run.",
                code="buffer-changed",
            )
