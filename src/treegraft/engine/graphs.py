"""Decoding steps on a GPU as CUDA graphs, by batch bucket. Not run on a GPU: each recording proves itself before it is used.

A step in which every row takes in one token is the same operators each time, and launching them one by one takes longer than
they do. It is recorded once for so many rows over so many blocks, with all that changes in tensors that stay where they are, and
played back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from treegraft.attention import AttentionOptions
from treegraft.engine.blocks import BlockPool
from treegraft.engine.forward import HookedForward, distance, limit_of
from treegraft.engine.ragged import BUCKETS, Gathered, RaggedPlan

_log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, *BUCKETS)
"""Numbers of rows that steps are recorded for."""
FIRST_BLOCKS = 16
"""Blocks of the longest path that steps are recorded for; then twice as many, and so on."""

Run = Callable[[], torch.Tensor]
Recorder = Callable[[Run], Run]
"""Returns what does the same again, on what then stands in the same tensors."""


class DecodingPlan:
    """The attention of one token of each of R rows over paths of at most B blocks, in tensors that stay where they are."""

    def __init__(self, pool: BlockPool, rows: int, blocks: int, device: torch.device) -> None:
        self._pool = pool
        self.ids, self.positions = torch.zeros(2, rows, dtype=torch.long, device=device)
        self.used = torch.zeros(rows, blocks, dtype=torch.long, device=device)
        self._gathered: Gathered | None = None

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, used: torch.Tensor) -> None:
        """Takes over a step of `len(used)` rows; the rows that are left do what the first one does, to the same places."""
        count, blocks = used.shape
        self.ids[:count], self.ids[count:] = ids[:count], ids[0]
        self.positions[:count], self.positions[count:] = positions[:count], positions[0]
        self.used[:count, :blocks] = used.to(self.used.device)
        self.used[count:] = self.used[0]

    def begin(self) -> None:
        """Forms what all layers have in common, from what the tensors hold."""
        self._gathered = Gathered.of(self.positions, self.used)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Returns [rows, heads, width]; stores the keys and values of the tokens."""
        assert self._gathered is not None
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        self._gathered.store(key, value, keys, values)
        return self._gathered.attend(query, keys, values, options).to(query.dtype)


@dataclass(frozen=True)
class _Recording:
    plan: DecodingPlan
    play: Run


class RecordedForward:
    """Plays decoding steps back and hands all others to `forward`.

    Where a recording fails or differs from the step itself, none is used any more, with a notice.
    """

    kernels = None
    is_rowwise = False

    def __init__(self, forward: HookedForward, record: Recorder) -> None:
        self._forward, self._record = forward, record
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self._num_blocks = 0
        self._is_off = False

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, plan: RaggedPlan) -> torch.Tensor:
        used = None if self._is_off else plan.blocks_of_decoding()
        if used is None:
            return self._forward(ids, positions, plan)
        if plan.pool.num_blocks != self._num_blocks:  # it has moved
            self._recordings.clear()
            self._num_blocks = plan.pool.num_blocks
        rows = next(bucket for bucket in ROWS if bucket >= len(used))
        blocks = max(FIRST_BLOCKS, 1 << (used.shape[1] - 1).bit_length())
        recording = self._recordings.get((rows, blocks))
        if recording is None:
            return self._first(ids, positions, plan, used, rows, blocks)
        recording.plan.fill(ids, positions, used)
        return _padded(recording.play()[: len(used)], len(ids))

    def refresh(self) -> None:
        """Takes over weights that have changed in place, as recordings do."""
        self._forward.refresh()

    def _first(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: RaggedPlan, used: torch.Tensor, rows: int, blocks: int
    ) -> torch.Tensor:
        """A step without a recording; it is recorded and compared with what is played back."""
        states = self._forward(ids, positions, plan)
        own = DecodingPlan(plan.pool, rows, blocks, ids.device)
        own.fill(ids, positions, used)

        def run() -> torch.Tensor:
            own.begin()
            return self._forward(own.ids, own.positions, own)

        try:
            recording = _Recording(own, self._record(run))
            gap = distance(recording.play()[: len(used)], states[: len(used)])
        except RuntimeError as error:
            self._turn_off(f"a recording failed with {(str(error).splitlines() or [''])[0]}")
            return states
        if gap > limit_of(states.dtype):
            self._turn_off(f"states played back differ by {gap:.3g} of their length")
        else:
            self._recordings[rows, blocks] = recording
        return states

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        self._recordings.clear()
        _log.warning("engine: decoding steps run without CUDA graphs, which is slower: %s", reason)


def _padded(states: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, rows - len(states)))


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns what records on `device`; None where nothing is recorded."""
    return _cuda_recorder() if device.type == "cuda" else None


def _cuda_recorder() -> Recorder:
    memory = torch.cuda.graph_pool_handle()

    def record(run: Run) -> Run:
        # Libraries set themselves up in a first run, which must not be recorded.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the GPU meanwhile, to embed texts.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            states = run()

        def play() -> torch.Tensor:
            graph.replay()
            return states

        return play

    return record
