"""The Step-Trace Buffer that rollouts retrieve from: a file that is read in its place, or a copy
that is made or grown, in a run's folder or in a temporary one."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from treegraft.assemble import Parts
from treegraft.core.demonstration import solution
from treegraft.core.errors import DataError, about, nearest_file
from treegraft.core.interfaces import TaskSource
from treegraft.core.types import Origin, Status, Trace, Trajectory, Tree
from treegraft.settings.config import Config
from treegraft.settings.explore import BuildSettings, retrieving, takes_warmup_of_buffer
from treegraft.tools.search.encoders import Encoder, build_encoder
from treegraft.traces.agents import ScriptedAgent
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.collect import ScoredAgent, build_traces
from treegraft.traces.imports import check_lines, import_files
from treegraft.traces.keys import says_something, split_steps
from treegraft.traces.retrieve import BufferRetriever
from treegraft.traces.store import IN_MEMORY

BufferOrigin = Literal["none", "file", "import", "expert", "self"]
"""Where a run's buffer comes from: a buffer's file, a .jsonl file of trajectories, the tasks'
scripted expert, or the agent's own trajectories alone."""
BufferReader = Literal["explorer", "lessons", "warmup"]
"""What reads it: an explorer that retrieves, the loss on stored successes, the warm-up."""
OWN_FILE = Path("buffer") / "traces.sqlite"
"""The place of a run's copy."""
BUFFER = "buffer"
"""Its name among the inputs of a resume, wherever it is."""
OWN = "self"
"""Source of the agent's own traces."""


def may_retrieve(config: Config) -> bool:
    """Returns whether the explorers of a recipe retrieve, as far as that is known without them."""
    # By the settings: checks need the answer before anything is built.
    explorers = config.explore.explorers
    # A user's own explorer may; it cannot answer before it is built.
    is_asked = bool(config.buffer.path) and any(":" in name for name in explorers)
    return bool(retrieving(explorers)) or is_asked


def buffer_use(config: Config) -> tuple[BufferOrigin, frozenset[BufferReader]]:
    """Returns where a run's buffer comes from, and what reads it."""
    by_suffix: BufferOrigin = "import" if named_file(config).suffix == ".jsonl" else "file"
    without_file: dict[str, BufferOrigin] = {"": "none", "expert": "expert", "self": "self"}
    reads: dict[BufferReader, bool] = {
        "explorer": may_retrieve(config),
        "lessons": config.loss.lesson_coef > 0,
        "warmup": takes_warmup_of_buffer(config),
    }
    readers = frozenset(compress(reads, reads.values()))
    return without_file.get(config.buffer.path, by_suffix), readers


def named_file(config: Config) -> Path:
    """Returns what buffer.path names."""
    return Path(os.path.expandvars(config.buffer.path)).expanduser()


class RolloutBuffer:
    """The buffer that rollouts retrieve from; none if the recipe's explorers do not retrieve.

    One that is only read is opened in its place. One that is made or grown is a copy: in `folder`,
    where a resumed run rolls it back to its checkpoint, or in a temporary one.
    """

    def __init__(
        self,
        config: Config,
        source: TaskSource,
        folder: Path | None = None,
        *,
        saved: Path | None = None,
    ) -> None:
        """Checks the buffer and loads its encoder.

        Args:
            source: the tasks, whose expert can fill the buffer.
            folder: of the run, which has a copy there; the original is then no longer needed.
            saved: a copy that was saved with the weights to go on from; None to begin anew.

        Raises:
            DataError: no such file, an empty buffer, another encoder, no expert.
            SettingError, ModelError: no such encoder, or one that cannot be loaded.
        """
        self._config = config
        self._source = source
        self.folder = folder
        self._saved = saved
        self._checksum = ""
        self.buffer: TraceBuffer | None = None
        self.retriever: BufferRetriever | None = None
        """None, like `buffer`, unless the buffer is used and open."""
        self.origin, self.readers = buffer_use(config)
        # Loaded before any work: an encoder that cannot be loaded is bad input.
        # Lessons are read by task, without a search.
        is_only_read = not ("explorer" in self.readers or config.buffer.grow.num_best)
        self._encoder = self._checked_encoder(is_only_read) if self.is_due else None

    @property
    def is_due(self) -> bool:
        """Whether it is opened or made: a warm-up reads a finished file by itself."""
        return self._is_open or ("warmup" in self.readers and self._is_made)

    @property
    def _is_open(self) -> bool:
        """Whether it is open while trees grow."""
        return bool(self.readers - {"warmup"})

    @property
    def _is_made(self) -> bool:
        """Whether it is made here, not read from a buffer's file."""
        return self.origin in ("expert", "import", "self")

    @property
    def is_own(self) -> bool:
        """Whether it is written to: made here, or a copy that grows."""
        return self._is_made or self._config.buffer.grow.num_best > 0

    @property
    def _own(self) -> Path:
        """The place of the copy, in the run's folder or in a temporary one."""
        return (self.folder or self._temporary) / OWN_FILE

    @cached_property
    def _temporary(self) -> Path:
        """The folder of a session without one; it goes with this object."""
        path = mkdtemp(prefix="treegraft-buffer-")
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return Path(path)

    @property
    def file(self) -> Path:
        """Its place: the copy, which is not there before `build`, or the file that buffer.path
        names."""
        has_own = self._is_made or (self.is_own and self._own.exists())
        return self._own if has_own else named_file(self._config)

    @property
    def _is_to_make(self) -> bool:
        """Whether it has yet to be made."""
        return self.is_due and self._is_made and not (self._own.exists() or self._saved)

    # ------------------------------------------------------------------ checks before any work

    def _checked_encoder(self, is_only_read: bool) -> Encoder | None:
        settings = self._config.buffer
        begun = self._own if self._own.exists() else self._saved
        if begun is not None:
            return self._encoder_of(begun, is_only_read)
        if self.origin in ("expert", "self"):
            with about("buffer.encoder"):
                encoder = build_encoder(settings.encoder)
            if self.origin == "self":
                return encoder
            # One task is enough: a source has an expert for all of its tasks or for none.
            if not any(solution(self._source, task, 0) for task in self._source.train_tasks()[:1]):
                raise DataError(
                    'buffer.path is "expert", but these tasks have no scripted expert; make a'
                    " buffer with `treegraft buffer build` or `treegraft buffer import` and name"
                    " its file",
                    code="expert-missing",
                )
            return encoder
        path = named_file(self._config)
        if not path.is_file():
            raise DataError(
                f"buffer.path: there is no file '{path}'; expected a Step-Trace Buffer, or .jsonl"
                f" of trajectories.{nearest_file(path)} Make a buffer with: treegraft buffer build"
                f" RECIPE {path.with_suffix('.sqlite')}",
                code="buffer-missing",
            )
        if self.origin == "import":
            with about("buffer.path"):
                check_lines(path)
            with about("buffer.encoder"):
                return build_encoder(settings.encoder)
        return self._encoder_of(path, is_only_read)

    def _encoder_of(self, path: Path, is_only_read: bool) -> Encoder | None:
        """The encoder of a buffer's file, which is checked; None where nothing is searched."""
        # What belongs to a checkpoint stays as it was written.
        is_saved = path == self._saved
        with TraceBuffer(path, self._config.buffer.encoder, is_frozen=is_saved) as buffer:
            self._refuse_empty(buffer)
            return None if is_only_read else buffer.load_encoder()

    def checksum_before(self, update: int) -> dict[str, str]:
        """Returns the checksum of the buffer's file as it was after `update`, before it is opened;
        empty if there is no file to go on with.

        What later updates have added to a copy counts as undone.
        """
        if not self._is_open:
            return {}
        path = self._own if self.is_own else named_file(self._config)
        if not path.is_file():
            return {}
        with TraceBuffer(path, self._config.buffer.encoder) as buffer:
            return {BUFFER: buffer.checksum(update if self.is_own else None)}

    # ------------------------------------------------------------------ making and opening

    async def build(self, parts: Parts) -> None:
        """Makes the copy of the expert's steps or of a .jsonl file, if that is still to do;
        arguments as in `opened`. Raises `DataError` for one without any."""
        if self._is_to_make:
            await self._make(0, parts)
            with TraceBuffer(self._own, self._encoder) as buffer:
                self._refuse_empty(buffer)

    @asynccontextmanager
    async def opened(self, update: int, parts: Parts) -> AsyncIterator[None]:
        """Holds the buffer as it was after `update` (0: at the beginning), built first where there
        is none yet.

        Args:
            parts: those of the run.
        """
        # A warm-up has read it by now.
        if not self._is_open:
            yield
            return
        with await self._taken(update, parts) as buffer:
            self._refuse_empty(buffer)
            has_world = bool(self._config.environment.kind)
            self.buffer = buffer
            self.retriever = BufferRetriever(buffer, self._config.buffer, is_tried=has_world)
            try:
                yield
            finally:
                # A run that is stopped writes its checkpoint after this.
                with suppress(DataError):
                    self.checksums()
                self.buffer = None
                self.retriever.close()

    async def _taken(self, update: int, parts: Parts) -> TraceBuffer:
        """The buffer, open; arguments as of `opened`."""
        if not self.is_own:
            return TraceBuffer(named_file(self._config), self._encoder)
        # A copy that is there belongs to a run that goes on.
        is_new = not self._own.exists()
        if is_new:
            await self._make(update, parts)
        buffer = TraceBuffer(self._own, self._encoder)
        if not is_new:
            # Later updates are run again, and add the same traces again. A new copy may
            # hold the marks of another run's updates, which must stay.
            buffer.roll_back(update)
        return buffer

    async def _make(self, update: int, parts: Parts) -> None:
        """Makes the copy, complete under its name or not there at all."""
        if self._saved is not None:
            with TraceBuffer(self._saved, self._encoder, is_frozen=True) as saved:
                # A run that wrote the checkpoint may have gone on since.
                saved.copy_to(self._own, update)
        elif not self._is_made:
            with TraceBuffer(named_file(self._config), self._encoder) as named:
                named.copy_to(self._own)
        else:
            with TraceBuffer(IN_MEMORY, self._encoder) as made:
                await self._fill(made, parts)
                made.copy_to(self._own)

    async def _fill(self, buffer: TraceBuffer, parts: Parts) -> None:
        """Adds the steps of a .jsonl file or of the expert; one of the agent's own trajectories
        alone begins empty."""
        if self.origin == "import":
            of = self._config.buffer.build
            file = named_file(self._config)
            import_files([file], buffer, num_best=of.num_best, min_reward=of.min_reward)
        elif self.origin == "expert":
            seed = self._config.run.seed
            agent = ScriptedAgent(self._source, seed=seed, environments=parts.environments)
            asked = ScoredAgent(agent=agent, format=parts.format, scorer=parts.scorer)
            # Its expert has no chance in it, so one attempt is all there is.
            once = BuildSettings(num_samples=1, num_best=1)
            await build_traces(self._source.train_tasks(), asked, once, buffer, seed=seed)

    def _refuse_empty(self, buffer: TraceBuffer) -> None:
        if not len(buffer) and self.origin != "self":
            raise DataError(
                f"buffer.path: the buffer '{buffer.path}' is empty; nothing could be grafted. Fill"
                " it with `treegraft buffer build` or `treegraft buffer import`.",
                code="buffer-empty",
            )

    def checksums(self) -> dict[str, str]:
        """Returns the buffer's checksum for a checkpoint; empty if none is used."""
        # A buffer that is only read is hashed once; a growing one costs its new traces.
        if self.buffer is not None and (not self._checksum or self._config.buffer.grow.num_best):
            self._checksum = self.buffer.checksum()
        return {BUFFER: self._checksum} if self._checksum else {}

    # ------------------------------------------------------------------ while trees grow

    def grow(self, trees: Sequence[Tree], update: int) -> list[tuple[Trace, ...]]:
        """Adds the update's best trajectories where the recipe says so, and returns the traces of
        each."""
        settings = self._config.buffer.grow
        if self.buffer is None or not settings.num_best:
            return []
        found = own_traces(
            trees, num_best=settings.num_best, min_reward=settings.min_reward, update=update
        )
        self.buffer.add(chain.from_iterable(found), update=update)
        return found

    def take_metrics(self) -> dict[str, float]:
        """Returns the buffer/* metrics, and those of the retrievals since the last call."""
        if self.buffer is None or self.retriever is None:
            return {}
        stats = self.buffer.stats()
        num_own = stats.sources[OWN].num_traces if OWN in stats.sources else 0
        return self.retriever.take_metrics() | {
            "buffer/num_traces": float(stats.num_traces),
            "buffer/num_own": float(num_own),
        }


def own_traces(
    trees: Sequence[Tree], *, num_best: int, min_reward: float, update: int
) -> list[tuple[Trace, ...]]:
    """Returns the traces of each tree's best completed trajectories, those steps that the policy
    itself sampled; none of one without such a step.

    Ties go to the one that is first in the tree.
    """
    found: list[tuple[Trace, ...]] = []
    for tree in trees:
        paths: list[Trajectory] = []
        for path in tree.trajectories():
            is_good = path.status is Status.COMPLETED and (path.reward or 0.0) >= min_reward
            # A reward may accept an answer of no letters, which is no step to imitate.
            if is_good and not path.is_stored and all(map(says_something, path.contents)):
                paths.append(path)
        for path in sorted(paths, key=lambda path: -(path.reward or 0.0))[:num_best]:
            steps = path.steps[1:]
            split = split_steps(
                path.task.id,
                path.task.question,
                [step.content for step in steps],
                reward=path.reward or 0.0,
                source=OWN,
                trajectory=f"{update}/{path.leaf.step_id}",
                policy_version=steps[-1].policy_version,
            )
            # Grafted steps are in the buffer already, under their own agent's name.
            sampled = [step.origin is Origin.POLICY for step in steps]
            if own := tuple(compress(split, sampled)):
                found.append(own)
    return found


def place_of_own(traces: Sequence[Trace]) -> list[int]:
    """Returns update and leaf of one of the agent's own trajectories, as numbers that sort."""
    return [int(part) for part in traces[0].trajectory.replace("/", ".").split(".")]
