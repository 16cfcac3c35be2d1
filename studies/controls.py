"""Controls: buffers whose steps follow the wrong histories, to see what their content does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treegraft import StepContent, Trace, TraceBuffer
from treegraft.parts import keyed

Stored = tuple[Trace, ...]
"""A trajectory's traces in order."""


def shuffled(trajectories: Iterable[Stored], seed: int) -> Iterator[Trace]:
    """Yields the traces of each trajectory with its steps in another order, each under the history
    of another step. A final answer stays last.

    A trajectory with fewer than two steps before its answer has no other order and stays unchanged.
    """
    for traces in trajectories:
        num_moved = len(traces) - traces[-1].terminal
        order = _cyclic_order(num_moved, seed, *_name(traces))
        values = [traces[place].value for place in order]
        yield from _with_values(traces, [*values, *(one.value for one in traces[num_moved:])])


def swapped(trajectories: Iterable[Stored], seed: int) -> Iterator[Trace]:
    """Yields the traces of each trajectory with the steps of another task's, drawn by the seed from
    those of as many steps; left out where no other task has one."""
    by_length: dict[int, list[Stored]] = defaultdict(list)
    for traces in trajectories:
        by_length[len(traces)].append(traces)
    for alike in by_length.values():
        for traces in alike:
            others = [one for one in alike if one[0].task_id != traces[0].task_id]
            if others:
                donor = keyed.keyed_choice(others, "swapped", seed, *_name(traces))
                yield from _with_values(traces, [one.value for one in donor])


def shuffle(source: Path, out: Path, *, seed: int, **_: Any) -> dict[str, float]:
    """Writes the buffer of a study with shuffled steps."""
    return _write(source, out, shuffled, seed)


def swap(source: Path, out: Path, *, seed: int, **_: Any) -> dict[str, float]:
    """Writes the buffer of a study with steps of other tasks."""
    return _write(source, out, swapped, seed)


def _write(source: Path, out: Path, mix: Any, seed: int) -> dict[str, float]:
    with (
        TraceBuffer.open_as_built(source) as before,
        TraceBuffer(out, before.load_encoder()) as mixed,
    ):
        mixed.add(mix(before.trajectories(), seed))
        return {"trajectories": sum(1 for _ in mixed.trajectories())}


def _name(traces: Stored) -> tuple[str, str, str]:
    first = traces[0]
    return first.source, first.task_id, first.trajectory


def _with_values(traces: Stored, values: Sequence[str | StepContent]) -> Iterator[Trace]:
    for trace, value in zip(traces, values, strict=True):
        terminal = isinstance(value, StepContent) and value.answer is not None
        yield replace(trace, value=value, terminal=terminal)


def _cyclic_order(num: int, *key: int | str) -> list[int]:
    """A permutation of 0 .. num - 1 that is a single cycle, all of them equally likely.

    Source: S. Sattolo, An algorithm to generate a random cyclic permutation, Information Processing
    Letters 22 (1986).
    """
    order = list(range(num))
    for last in range(num - 1, 0, -1):
        other = keyed.keyed_int("shuffled", *key, last) % last
        order[last], order[other] = order[other], order[last]
    return order
