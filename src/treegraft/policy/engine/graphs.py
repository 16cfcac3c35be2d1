"""Decoding steps on a GPU as CUDA graphs, by batch bucket. Not run on a GPU: each recording is
compared with the step itself before it is used.

A step in which every row takes in one token is the same operators each time, and launching them one
by one takes longer than they do. It is recorded once for so many rows over so many blocks, with all
that changes in tensors that stay where they are, and played back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.engine.blocks import BlockPool
from treegraft.policy.engine.forward import HookedForward, distance, limit_of
from treegraft.policy.engine.gathered import Gathered, makes_copies
from treegraft.policy.engine.ragged import BUCKETS, RaggedPlan
from treegraft.policy.output_head import first_line

_log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, *BUCKETS)
"""Numbers of rows that steps are recorded for."""
FIRST_BLOCKS = 4
"""Blocks of the longest path that steps are recorded for; then twice as many, and so on."""
MAX_BLOCKS = 65_536
"""Rows times blocks from which steps are not recorded: 256 rows of 16,384 tokens."""
MAX_COPIED = 4096
"""The same where attention copies blocks: there the operators take longer than their launching, and
much memory."""

Run = Callable[[], Tensor]
Recorder = Callable[[Run], Run]
"""Returns a function that repeats the step on the present contents of the same tensors."""


class DecodingPlan:
    """The attention of one token of each of R rows over paths of at most B blocks, in tensors that
    stay where they are."""

    def __init__(self, pool: BlockPool, rows: int, blocks: int, device: torch.device) -> None:
        self._pool = pool
        self.ids, self.positions = torch.zeros(2, rows, dtype=torch.long, device=device)
        self.used = torch.zeros(rows, blocks, dtype=torch.long, device=device)
        self._gathered: Gathered | None = None

    def fill(self, ids: Tensor, positions: Tensor, used: Tensor) -> None:
        """Takes over a step of `len(used)` rows; the rows that are left repeat the first one,
        to the same places."""
        count, blocks = used.shape
        # Into the same memory, which the recording reads. The rows that are left write a key that
        # is there already, so they need no block of their own.
        self.ids[:count], self.ids[count:] = ids[:count], ids[0]
        self.positions[:count], self.positions[count:] = positions[:count], positions[0]
        self.used[:count, :blocks] = used
        self.used[count:] = self.used[0]

    def begin(self) -> None:
        """Forms the common inputs of all layers, from the contents of the tensors."""
        self._gathered = Gathered.of(self.positions, self.used)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [rows, heads, width]; stores the keys and values of the tokens."""
        assert self._gathered is not None
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        self._gathered.store(key, value, keys, values)
        return self._gathered.attend(query, keys, values, options).to(query.dtype)


@dataclass
class _Recording:
    plan: DecodingPlan
    play: Run
    is_proven: bool = False


class RecordedForward:
    """Plays decoding steps back and hands all others to `forward`.

    A recording is played back for the first time beside the step itself, on other tokens than it
    was made with. Where that fails or differs none is used any more, with a notice.
    """

    kernels = None
    is_rowwise = False

    def __init__(self, forward: HookedForward, make_recorder: Callable[[], Recorder]) -> None:
        self._forward, self._make_recorder = forward, make_recorder
        self._record = make_recorder()
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self._too_large: set[tuple[int, int]] = set()
        """What there was no memory to record, with the present weights."""
        self._num_blocks = 0
        self._is_off = False

    def __call__(self, ids: Tensor, positions: Tensor, plan: RaggedPlan) -> Tensor:
        used = None if self._is_off else plan.blocks_of_decoding(ids.device)
        if used is None:
            return self._forward(ids, positions, plan)
        rows = next(bucket for bucket in ROWS if bucket >= len(used))
        # Powers of two: a recording for every length would take as long as it saves.
        blocks = max(FIRST_BLOCKS, 1 << (used.shape[1] - 1).bit_length())
        most = MAX_COPIED if makes_copies(ids.device) else MAX_BLOCKS
        if rows * blocks > most or (rows, blocks) in self._too_large:
            return self._forward(ids, positions, plan)
        if plan.pool.num_blocks != self._num_blocks:  # it has moved
            self._recordings.clear()
            self._record, self._num_blocks = self._make_recorder(), plan.pool.num_blocks
        recording = self._recordings.get((rows, blocks))
        if recording is not None and recording.is_proven:
            recording.plan.fill(ids, positions, used)
            return functional.pad(recording.play()[: len(used)], (0, 0, 0, len(ids) - len(used)))
        try:
            if recording is None:
                played = None
                own = DecodingPlan(plan.pool, rows, blocks, ids.device)
                own.fill(ids, positions, used)

                def run() -> Tensor:
                    own.begin()
                    return self._forward(own.ids, own.positions, own)

                self._recordings[rows, blocks] = _Recording(own, self._record(run))
            else:
                recording.plan.fill(ids, positions, used)
                # Cloned: the next replay writes into the same memory.
                played = recording.play()[: len(used)].clone()
        except RuntimeError as error:
            played = None
            if is_out_of_memory(error):
                # The learner may need less later; recordings in use take memory too.
                self._too_large.add((rows, blocks))
                self.release()
            else:
                self._turn_off(f"a recording failed with {first_line(error)}")
        # The step itself comes last, so that its keys and values stay.
        states = self._forward(ids, positions, plan)
        if recording is not None and played is not None:
            gap = distance(played, states[: len(used)])
            recording.is_proven = gap <= limit_of(states.dtype)
            if not recording.is_proven:  # NaN is no proof either
                self._turn_off(f"states played back differ by {gap:.3g} of their length")
        return states

    def refresh(self) -> None:
        """Takes over weights that have changed in place, as recordings do."""
        self._too_large.clear()
        self._forward.refresh()

    def release(self) -> None:
        """Drops all recordings, with the memory of their steps."""
        self._recordings.clear()
        self._record = self._make_recorder()

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        self._recordings.clear()
        _log.warning("engine: decoding steps run without CUDA graphs, which is slower: %s", reason)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether memory ran out; the end of a recording may raise another error after it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def recorder_maker(device: torch.device) -> Callable[[], Recorder] | None:
    """Returns the maker of recorders for `device`, each with memory of its own; None where nothing
    is recorded."""
    return functools.partial(_cuda_recorder, device) if device.type == "cuda" else None


def _cuda_recorder(device: torch.device) -> Recorder:
    with torch.cuda.device(device):
        memory, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            try:
                # Libraries set themselves up in a first run, which must not be recorded.
                stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    run()
                before.wait_stream(stream)
                # Another thread may use the GPU meanwhile, to embed texts.
                with torch.cuda.graph(
                    graph, pool=memory, stream=stream, capture_error_mode="thread_local"
                ):
                    states = run()
            finally:
                torch.cuda.set_stream(before)  # a recording that failed leaves its own

        def play() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            return states

        return play

    return record
