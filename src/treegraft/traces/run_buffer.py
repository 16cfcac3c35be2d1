"""The Step-Trace Buffer of a run: found or built before the first update, grown by the agent's own
best trajectories.

A run that only reads opens the buffer where it lies. One that builds or grows it works on a copy in
its run folder, which a resumed run rolls back to its checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.files import write_atomically
from treegraft.core.interfaces import Format, TaskSource, TreeScorer
from treegraft.core.types import Origin, Status, Trace, Trajectory, Tree
from treegraft.settings.config import Config
from treegraft.tools.search.encoders import Encoder, build_encoder
from treegraft.traces.agents import ScriptedAgent
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.collect import build_traces
from treegraft.traces.keys import split_steps
from treegraft.traces.retrieve import BufferRetriever

EXPERT = "expert"
OWN = "self"
"""Source of the agent's own traces."""
OWN_FILE = Path("buffer") / "traces.sqlite"
"""Where a run keeps its copy."""


class RunBuffer:
    """What a run's rollouts retrieve from; nothing where the recipe's explorers do not retrieve.

    Made and checked before any work, held open by `opened` while the run lasts.
    """

    def __init__(self, config: Config, source: TaskSource, run_dir: Path) -> None:
        """Raises DataError, SettingError or ModelError where the buffer could not be used.

        Args:
            source: the tasks, whose expert can fill the buffer.
            run_dir: where the run keeps its copy, if it has one; the original is then no longer
                needed.
        """
        self._config, self._source, self._run_dir = config, source, run_dir
        self.retriever: BufferRetriever | None = None
        """None unless the buffer is used and open."""
        self._buffer: TraceBuffer | None = None
        explorers = config.explore.explorers
        self.is_used = "graft" in explorers or (
            bool(config.buffer.path) and any(":" in name for name in explorers)
        )
        # Loaded once, here: an encoder that cannot be loaded is bad input.
        self._encoder = check_buffer(config, source, run_dir) if self.is_used else None

    @asynccontextmanager
    async def opened(self, update: int, scorer: TreeScorer, format: Format) -> AsyncIterator[None]:
        """Holds the buffer as it was after `update`, built first where there is none yet.

        Args:
            scorer, format: what an expert's traces are rewarded and written with.

        Raises:
            CheckpointError: somebody has changed the buffer since the run began.
        """
        if self._encoder is None:
            yield
            return
        self._buffer = await open_buffer(
            self._config, self._source, scorer, format, self._run_dir, update, self._encoder
        )
        try:
            self.retriever = BufferRetriever(self._buffer, self._config.buffer)
            try:
                yield
            finally:
                self.retriever.close()
        finally:
            self._buffer.close()

    def grow(self, trees: Sequence[Tree], update: int) -> None:
        """Adds the update's best trajectories where the recipe says so, and evicts what exceeds
        the capacity."""
        settings = self._config.buffer.grow
        if self._buffer is None or not settings.num_best:
            return
        traces = own_traces(
            trees, num_best=settings.num_best, min_reward=settings.min_reward, update=update
        )
        self._buffer.add(traces, update=update)
        self._buffer.evict(settings.capacity, source=OWN, update=update)

    def take_metrics(self) -> dict[str, float]:
        """Returns the buffer/* metrics, and those of the retrievals since the last call."""
        if self._buffer is None or self.retriever is None:
            return {}
        stats = self._buffer.stats()
        num_own = stats.sources[OWN].num_traces if OWN in stats.sources else 0
        return self.retriever.take_metrics() | {
            "buffer/num_traces": float(stats.num_traces),
            "buffer/num_own": float(num_own),
        }


def check_buffer(config: Config, source: TaskSource, run_dir: Path) -> Encoder:
    """Returns the encoder of the buffer; one that could not be used is refused before any work.

    Args:
        run_dir: where the run keeps its copy, if it has one; the original is then no longer needed.

    Raises:
        DataError: no such file, an empty buffer, another encoder, no expert, nothing from the
            sources named.
        SettingError, ModelError: no such encoder, or one that cannot be loaded.
    """
    if (run_dir / OWN_FILE).exists():
        return _check_file(run_dir / OWN_FILE, config)
    if config.buffer.path == EXPERT:
        encoder = build_encoder(config.buffer.encoder)
        tasks = source.train_tasks()
        if not any(source.expert(task, 0) for task in tasks[:1]):
            raise DataError(
                'buffer.path is "expert", but these tasks have no scripted expert; make a buffer'
                " with `treegraft buffer build` or `treegraft buffer import` and name its file"
            )
        return encoder
    path = _expanded(config.buffer.path)
    if not path.is_file():
        raise DataError(
            f"buffer.path: there is no file '{path}'; expected a Step-Trace Buffer. Make one with:"
            f" treegraft buffer build RECIPE --out {path}"
        )
    return _check_file(path, config)


def _check_file(path: Path, config: Config) -> Encoder:
    with TraceBuffer(path, config.buffer.encoder) as buffer:
        _refuse_empty(buffer, config)
        return buffer.load_encoder()


async def open_buffer(
    config: Config,
    source: TaskSource,
    scorer: TreeScorer,
    format: Format,
    run_dir: Path,
    update: int,
    encoder: Encoder,
) -> TraceBuffer:
    """Returns the run's buffer as it was after `update`, built first where there is none yet.

    Args:
        encoder: what `check_buffer` returned; it is loaded once.
        source, scorer, format: what an expert's traces are made, rewarded and written with.
        update: the update that the run goes on from; what later ones added or evicted is undone.
    """
    own = run_dir / OWN_FILE
    settings = config.buffer
    if settings.path != EXPERT and not settings.grow.num_best:
        buffer = TraceBuffer(_expanded(settings.path), encoder)
    elif own.exists():
        buffer = TraceBuffer(own, encoder)
        buffer.roll_back(update)
    else:
        buffer = await _own_copy(config, source, scorer, format, own, encoder)
    _refuse_empty(buffer, config)
    _note(buffer, run_dir, is_own=buffer.path == own)
    return buffer


def _note(buffer: TraceBuffer, run_dir: Path, *, is_own: bool) -> None:
    """Writes buffer.json when the run begins; later a buffer that others can change has to be the
    one that it names."""
    place = run_dir / "buffer.json"
    fingerprint = buffer.fingerprint()
    if not place.exists():
        note = {
            "path": os.path.relpath(buffer.path, run_dir),
            "fingerprint": fingerprint,
            "num_traces": len(buffer),
        }
        write_atomically(place, json.dumps(note, indent=2) + "\n")
    elif not is_own and json.loads(place.read_text())["fingerprint"] != fingerprint:
        buffer.close()
        raise CheckpointError(
            f"buffer.path: the buffer '{buffer.path}' has changed since the run began (fingerprint"
            f" {fingerprint}, expected {json.loads(place.read_text())['fingerprint']}); put the old"
            " file back, or start a new run."
        )


async def _own_copy(
    config: Config,
    source: TaskSource,
    scorer: TreeScorer,
    format: Format,
    own: Path,
    encoder: Encoder,
) -> TraceBuffer:
    """A buffer in the run folder, complete under its name or not there at all."""
    partial = own.with_name(f".{own.name}.partial")
    own.parent.mkdir(parents=True, exist_ok=True)
    for leftover in own.parent.glob(f"{partial.name}*"):
        leftover.unlink()
    if config.buffer.path == EXPERT:
        agent = ScriptedAgent(source, seed=config.run.seed)
        with TraceBuffer(partial, encoder) as buffer:
            await build_traces(
                source.train_tasks(),
                agent,
                scorer,
                format,
                buffer,
                num_samples=1,
                num_best=1,
                seed=config.run.seed,
            )
        partial.replace(own)
    else:
        with TraceBuffer(_expanded(config.buffer.path), encoder) as buffer:
            buffer.copy_to(own)
    return TraceBuffer(own, encoder)


def own_traces(
    trees: Sequence[Tree], *, num_best: int, min_reward: float, update: int
) -> list[Trace]:
    """Returns the traces of each tree's best completed trajectories, those steps that the policy
    itself sampled.

    Ties go to the one that stands first in the tree.
    """
    traces: list[Trace] = []
    for tree in trees:
        paths = [
            path
            for path in tree.trajectories()
            if path.status is Status.COMPLETED and (path.reward or 0.0) >= min_reward
        ]
        for path in sorted(paths, key=lambda path: -(path.reward or 0.0))[:num_best]:
            traces += _traces_of(path, update)
    return traces


def _traces_of(path: Trajectory, update: int) -> list[Trace]:
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
    return [trace for trace, step in zip(split, steps, strict=True) if step.origin is Origin.POLICY]


def _refuse_empty(buffer: TraceBuffer, config: Config) -> None:
    sources = config.buffer.sources
    counts = buffer.stats().sources
    if not counts:
        raise DataError(
            f"buffer.path: the buffer '{buffer.path}' is empty; nothing could be grafted. Fill it"
            " with `treegraft buffer build` or `treegraft buffer import`."
        )
    missing = [
        name
        for name in sources
        if name not in counts and not (name == OWN and config.buffer.grow.num_best)
    ]
    if missing:
        raise DataError(
            f"buffer.sources names {missing}, which the buffer '{buffer.path}' has nothing of; it"
            f" has {sorted(counts)}."
        )


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()
