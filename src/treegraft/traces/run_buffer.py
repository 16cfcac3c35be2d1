"""The Step-Trace Buffer of a run: found or built before the first update, grown by the agent's own
best trajectories.

A run that only reads opens the buffer where it lies. One that builds or grows it works on a copy in
its run folder, which a resumed run rolls back to its checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import Literal

from treegraft.core.demonstration import solution
from treegraft.core.errors import CheckpointError, DataError, about
from treegraft.core.files import write_atomically
from treegraft.core.interfaces import Format, TaskSource, TreeScorer
from treegraft.core.sessions import SessionOpener
from treegraft.core.spans import span
from treegraft.core.types import Origin, Status, Trace, Tree
from treegraft.runs.resume_inputs import ways_out
from treegraft.runs.start import Start
from treegraft.settings.config import Config
from treegraft.settings.explore import BuildSettings, retrieving, takes_warmup_of_buffer
from treegraft.tools.environments.rehearsal import show
from treegraft.tools.search.encoders import Encoder, build_encoder
from treegraft.traces.agents import ScriptedAgent
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.collect import ScoredAgent, build_traces
from treegraft.traces.imports import check_lines, import_files
from treegraft.traces.keys import split_steps
from treegraft.traces.retrieve import BufferRetriever

BufferOrigin = Literal["none", "file", "import", "expert", "self"]
"""Where a run's buffer comes from: a buffer's file, a .jsonl file of trajectories, the tasks'
scripted expert, or the agent's own trajectories alone."""
BufferReader = Literal["explorer", "lessons", "warmup"]
"""What reads it: an explorer that retrieves, the loss on stored successes, the warm-up."""
OWN = "self"
"""Source of the agent's own traces."""
NUM_CHECKED = 8
"""Tasks whose expert is tried in their environments before the run."""
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
    record = path / "buffer.json"
    used = json.loads(record.read_text(encoding="utf-8")).get("path") if record.is_file() else None
    places = [path / OWN_FILE, path / OWN_FILE.name, *([Path(used)] if used else [])]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"'{path}' is a folder without a Step-Trace Buffer; expected the buffer's file, or the"
            f" folder of a run that retrieves, such as one with {OWN_FILE}"
        )
    return found


def may_retrieve(config: Config) -> bool:
    """Returns whether the explorers of a recipe retrieve, as far as that is known without them."""
    explorers = config.explore.explorers
    # A user's own explorer may; it cannot be asked before it is built.
    is_asked = bool(config.buffer.path) and any(":" in name for name in explorers)
    return bool(retrieving(explorers)) or is_asked


def buffer_use(config: Config) -> tuple[BufferOrigin, frozenset[BufferReader]]:
    """Returns where a run's buffer comes from, and what reads it."""
    without_file: dict[str, BufferOrigin] = {"": "none", "expert": "expert", "self": "self"}
    by_suffix: BufferOrigin = "import" if _place(config).suffix == ".jsonl" else "file"
    reads: dict[BufferReader, bool] = {
        "explorer": may_retrieve(config),
        "lessons": config.loss.lesson_coef > 0,
        "warmup": takes_warmup_of_buffer(config),
    }
    readers = frozenset(reader for reader, does_read in reads.items() if does_read)
    return without_file.get(config.buffer.path, by_suffix), readers


def _place(config: Config) -> Path:
    return Path(os.path.expandvars(config.buffer.path)).expanduser()


class RunBuffer:
    """The buffer that a run's rollouts retrieve from; none where the recipe's explorers do
    not retrieve."""

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
            DataError: no such file, an empty buffer, another encoder, no expert, nothing from the
                sources named.
            SettingError, ModelError: no such encoder, or one that cannot be loaded.
        """
        self._config, self._source, self._run_dir = config, source, run_dir
        self._start, self._checksum = start, ""
        self.buffer: TraceBuffer | None = None
        self.retriever: BufferRetriever | None = None
        """None, like `buffer`, unless the buffer is used and open."""
        self.origin, self.readers = buffer_use(config)
        # Loaded before the run folder is made: an encoder that cannot be loaded is bad input.
        # Lessons are read by task, without a search.
        is_only_read = not ("explorer" in self.readers or config.buffer.grow.num_best)
        self._encoder = self._checked_encoder(is_only_read) if self.is_due else None

    @property
    def is_due(self) -> bool:
        """Whether the run opens or makes it: a warm-up reads a finished file by itself."""
        return self._is_open or ("warmup" in self.readers and self._is_made)

    @property
    def file(self) -> Path:
        """Where it lies: the run's copy, or the file that buffer.path names; of one that the run
        makes, not there before `build`."""
        own = self._run_dir / OWN_FILE
        return own if own.exists() or self._is_made else _place(self._config)

    @property
    def _is_open(self) -> bool:
        """Whether it is held while the run trains."""
        return bool(self.readers - {"warmup"})

    @property
    def _is_made(self) -> bool:
        """Whether the run makes it, in its folder."""
        return self.origin in ("expert", "import", "self")

    @property
    def _is_own(self) -> bool:
        """Whether the run works on a buffer in its folder."""
        return self._is_made or self._config.buffer.grow.num_best > 0

    def _checked_encoder(self, is_only_read: bool) -> Encoder | None:
        settings, own = self._config.buffer, self._run_dir / OWN_FILE
        self._refuse_lost(own)
        if not own.exists() and self.origin in ("expert", "self"):
            with about("buffer.encoder"):
                encoder = build_encoder(settings.encoder)
            if self.origin == "self":
                return encoder
            # One task is enough: a source has an expert for all of its tasks or for none.
            if not any(solution(self._source, task, 0) for task in self._source.train_tasks()[:1]):
                raise DataError(
                    'buffer.path is "expert", but these tasks have no scripted expert; make a'
                    " buffer with `treegraft buffer build` or `treegraft buffer import` and name"
                    " its file"
                )
            return encoder
        path = own if own.exists() else _place(self._config)
        if not path.is_file():
            raise DataError(
                f"buffer.path: there is no file '{path}'; expected a Step-Trace Buffer, or .jsonl"
                " of trajectories. Make a buffer with: treegraft buffer build RECIPE"
                f" {path.with_suffix('.sqlite')}"
            )
        if path != own and self.origin == "import":
            with about("buffer.path"):
                check_lines(path)
            with about("buffer.encoder"):
                return build_encoder(settings.encoder)
        with TraceBuffer(path, settings.encoder) as buffer:
            self._refuse_empty(buffer)
            self._refuse_changed(buffer, own)
            return None if is_only_read else buffer.load_encoder()

    async def check_expert(self, environments: SessionOpener | None) -> None:
        """Makes the expert's calls at the first tasks in their environments, where the buffer will
        be built of them.

        Raises:
            DataError: results that differ, by task and call.
        """
        if environments is None or self.origin != "expert" or not self._is_to_make:
            return
        agent = ScriptedAgent(self._source, seed=self._config.run.seed)
        tasks = self._source.train_tasks()[:NUM_CHECKED]
        solved = [(task, steps) for task in tasks if (steps := agent.steps(task, 0))]
        await show(environments, solved)

    async def build(
        self, scorer: TreeScorer, format: Format, environments: SessionOpener | None
    ) -> None:
        """Makes the buffer of the expert's steps or of a .jsonl file, where that is still to do;
        arguments as in `opened`. Raises `DataError` for one without any."""
        if self._encoder is not None and self._is_to_make:
            own = self._run_dir / OWN_FILE
            await self._make_copy(own, self._encoder, scorer, format, environments)
            with TraceBuffer(own, self._encoder) as buffer:
                self._refuse_empty(buffer)

    @property
    def _is_to_make(self) -> bool:
        """Whether the run has yet to make its buffer itself."""
        return self.is_due and self._is_made and not (self._run_dir / OWN_FILE).exists()

    def _refuse_lost(self, own: Path) -> None:
        """Refuses to go on with a fresh copy where the checkpoint was trained with one."""
        start = self._start
        if start is None or start.checkpoint is None or own.exists() or not self._is_own:
            return
        if BESIDE in start.state.beside and not start.accepts_changes:
            raise CheckpointError(
                f"run folder '{self._run_dir}': its Step-Trace Buffer {OWN_FILE} is missing, which"
                f" {start.checkpoint.name} was trained with."
                f" {ways_out(self._run_dir, start.checkpoint)}"
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
            f"run folder '{self._run_dir}': the Step-Trace Buffer '{buffer.path}' (traces, vectors"
            f" or evictions) has changed since {start.checkpoint.name} was written, so the resumed"
            " run would not equal an undisturbed one."
            f" {ways_out(self._run_dir, start.checkpoint)}"
        )

    def checksums(self) -> dict[str, str]:
        """Returns the buffer's checksum for a checkpoint; empty where none is used."""
        # A buffer that is only read is hashed once; a growing one costs its new traces.
        if self.buffer is not None and (not self._checksum or self._config.buffer.grow.num_best):
            self._checksum = self.buffer.checksum()
        return {BESIDE: self._checksum} if self._checksum else {}

    @asynccontextmanager
    async def opened(
        self,
        update: int,
        scorer: TreeScorer,
        format: Format,
        environments: SessionOpener | None = None,
    ) -> AsyncIterator[None]:
        """Holds the buffer as it was after `update`, built first where there is none yet.

        Args:
            scorer, format: of an expert's traces.
            environments: where an expert's calls are made; None where the tasks have none.

        Raises:
            CheckpointError: somebody has changed the buffer since the run began.
        """
        if not self._is_open:
            yield
            return
        own, settings = self._run_dir / OWN_FILE, self._config.buffer
        is_own = self._is_own
        is_new = is_own and not own.exists()
        if is_new:
            assert self._encoder is not None
            await self._make_copy(own, self._encoder, scorer, format, environments)
        with TraceBuffer(own if is_own else _place(self._config), self._encoder) as buffer:
            if is_own and not is_new:
                # Later updates are run again, and add and evict the same traces again. A new copy
                # may hold the marks of another run's updates, which must stay.
                buffer.roll_back(update)
            is_accepted = self._start is not None and self._start.accepts_changes
            self._refuse_empty(buffer)
            self._note(buffer, is_own or is_accepted)
            has_world = bool(self._config.environment.kind)
            self.buffer = buffer
            self.retriever = BufferRetriever(buffer, settings, is_tried=has_world)
            try:
                yield
            finally:
                # A run that is stopped writes its checkpoint after this.
                with suppress(DataError):
                    self.checksums()
                self.buffer = None
                self.retriever.close()

    async def _make_copy(
        self,
        own: Path,
        encoder: Encoder,
        scorer: TreeScorer,
        format: Format,
        environments: SessionOpener | None,
    ) -> None:
        """Makes the run's buffer, complete under its name or not there at all."""
        own.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_made:
            with TraceBuffer(_place(self._config), encoder) as buffer:
                buffer.copy_to(own)
            return
        partial = own.with_name(f".{own.name}.partial")
        # Also the write-ahead log of a build that was killed, which SQLite would replay.
        for leftover in own.parent.glob(f"{partial.name}*"):
            leftover.unlink()
        seed, of = self._config.run.seed, self._config.buffer.build
        # One of the agent's own trajectories alone begins empty.
        with TraceBuffer(partial, encoder) as buffer:
            if self.origin == "import":
                place, best = _place(self._config), of.num_best
                import_files([place], buffer, num_best=best, min_reward=of.min_reward, seed=seed)
            elif self.origin == "expert":
                agent = ScriptedAgent(self._source, seed=seed, environments=environments)
                asked = ScoredAgent(agent=agent, format=format, scorer=scorer)
                once = BuildSettings(num_samples=1, num_best=1)
                await build_traces(self._source.train_tasks(), asked, once, buffer, seed=seed)
        partial.replace(own)

    def _note(self, buffer: TraceBuffer, is_own: bool) -> None:
        """Writes buffer.json when the run begins; later a buffer that others can change has to be
        the one that it names."""
        place, fingerprint = self._run_dir / "buffer.json", buffer.fingerprint()
        if not place.exists():
            note = {
                "path": os.path.relpath(buffer.path, self._run_dir),
                "fingerprint": fingerprint,
                "num_traces": len(buffer),
            }
            write_atomically(place, json.dumps(note, indent=2) + "\n")
        elif not is_own and (noted := json.loads(place.read_text())["fingerprint"]) != fingerprint:
            raise CheckpointError(
                f"buffer.path: the buffer '{buffer.path}' has changed since the run began"
                f" (fingerprint {fingerprint}, expected {noted}); put the old file back, or start a"
                " new run."
            )

    def _refuse_empty(self, buffer: TraceBuffer) -> None:
        settings, counts = self._config.buffer, buffer.stats().sources
        if not counts and self.origin != "self":
            raise DataError(
                f"buffer.path: the buffer '{buffer.path}' is empty; nothing could be grafted. Fill"
                " it with `treegraft buffer build` or `treegraft buffer import`."
            )
        # The run's own traces come with its first updates.
        known = {*counts, OWN} if settings.grow.num_best else {*counts}
        if missing := [name for name in settings.sources if name not in known]:
            raise DataError(
                f"buffer.sources names {missing}, which the buffer '{buffer.path}' has nothing of;"
                f" it has {sorted(counts)}."
            )

    def grow(self, trees: Sequence[Tree], update: int) -> list[tuple[Trace, ...]]:
        """Adds the update's best trajectories where the recipe says so, evicts what exceeds the
        capacity, and returns the traces of each."""
        settings = self._config.buffer.grow
        if self.buffer is None or not settings.num_best:
            return []
        found = own_traces(
            trees, num_best=settings.num_best, min_reward=settings.min_reward, update=update
        )
        with span("record"):
            self.buffer.add([trace for traces in found for trace in traces], update=update)
            self.buffer.evict(settings.capacity, source=OWN, update=update)
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

    Ties go to the one that stands first in the tree.
    """
    found: list[tuple[Trace, ...]] = []
    for tree in trees:
        paths = [
            path
            for path in tree.trajectories()
            if path.status is Status.COMPLETED and (path.reward or 0.0) >= min_reward
            if not path.is_stored
        ]
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
