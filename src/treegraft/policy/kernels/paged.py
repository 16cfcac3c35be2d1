"""Attention of rows that decode over their blocks, in Triton on a GPU: nothing is gathered or
copied. Not run on a GPU: run by Triton's interpreter, and proven on the device before it is used.

A program reads SPLIT blocks of one path for one kv head; a second kernel joins the parts of a path
in order. How a path is split depends on its positions alone, and rows that share all blocks of a
split are read together in a tile of the same shape, so a row's numbers do not depend on the batch.
"""

# Triton's compiler reads the functions; the types of their arguments are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.kernels.engine import BLOCK

SPLIT = 8
"""Blocks that one program reads."""
TOGETHER = 4
"""Neighbouring rows that are read together where they share a split."""
LEAST = 16
"""The smallest side of a tile that tensor cores multiply."""


@triton.jit
def _is_shared(
    first, split, used, positions, num_rows, max_blocks,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether ROWS rows from `first` on all read the same whole split."""
    tile, last = first + tl.arange(0, ROWS), split * SPLIT + SPLIT - 1
    is_row = tile < num_rows
    at = tl.load(positions + tile, mask=is_row, other=-1)
    is_whole = tl.min(at) >= (last + 1) * BLOCK - 1
    # Blocks form a tree, so rows with the same last block have all before it in common.
    end = tl.minimum(last, max_blocks - 1)
    ends = tl.load(used + tile * max_blocks + end, mask=is_row, other=-1)
    return is_whole & (tl.min(ends) == tl.max(ends))


@triton.jit
def _weights(
    scores, there, at, peak, window, softcap,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The block's weights, the factor of what was found before, and the new maximum."""
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 / softcap * scores) + 1.0))
    is_seen = there[None, :] <= at[:, None]
    if HAS_WINDOW:
        is_seen = is_seen & (at[:, None] - there[None, :] < window)
    scores = tl.where(is_seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    # Lanes without a row see nothing, and infinity less infinity is no number.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp(scores - base[:, None]), tl.exp(peak - base), higher


# Not specialised for the size of a batch: it would be compiled anew, and might round otherwise.
@triton.jit(do_not_specialize=["num_rows", "max_blocks", "num_splits", "window"])
def _split(
    query, keys, values, used, positions, peaks, totals, weighted,
    query_row, query_head, num_rows, max_blocks, num_splits, window, scaling, softcap,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SIDE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax attention of a row, or of rows that share the split's blocks, over one split."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    oldest = 0
    if HAS_WINDOW:
        oldest = tl.maximum(position - window + 1, 0)
    if (split * SPLIT * BLOCK > position) | ((split + 1) * SPLIT * BLOCK <= oldest):
        return
    # A lane of the tile is a query head of a row; a row has the same lanes, read alone or not.
    first = row // ROWS * ROWS
    lane = tl.arange(0, ROWS * HEADS)
    lane_row, lane_head = first + lane // HEADS, lane % HEADS
    is_lane = (lane_head < GROUP) & (lane_row == row)
    # With a window each row would begin elsewhere.
    is_shared = position < 0
    if not HAS_WINDOW:
        is_shared = _is_shared(
            first, split, used, positions, num_rows, max_blocks, ROWS, SPLIT, BLOCK
        )
    if is_shared:
        if row != first:
            return
        is_lane = lane_head < GROUP
    column, place = tl.arange(0, SIDE), tl.arange(0, BLOCK)
    is_column = column < WIDTH
    heads = head * GROUP + lane_head
    lanes_at = lane_row[:, None] * query_row + heads[:, None] * query_head
    is_cell = is_lane[:, None] & is_column[None, :]
    own = tl.load(query + lanes_at + column[None, :], mask=is_cell, other=0.0)
    at = tl.load(positions + lane_row, mask=is_lane, other=-1)
    peak = tl.full((ROWS * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS * HEADS,), tl.float32)
    found = tl.zeros((ROWS * HEADS, SIDE), tl.float32)
    stop = tl.minimum(split * SPLIT + SPLIT - 1, position // BLOCK) + 1
    for number in range(tl.maximum(split * SPLIT, oldest // BLOCK), stop):
        block = tl.load(used + row * max_blocks + number).to(tl.int64) * KV + head
        inside = column[:, None] * BLOCK + place[None, :]
        key = tl.load(keys + block * WIDTH * BLOCK + inside, mask=is_column[:, None], other=0.0)
        inside = place[:, None] * PADDED + column[None, :]
        value = tl.load(
            values + block * BLOCK * PADDED + inside, mask=is_column[None, :], other=0.0
        )
        scores = tl.dot(own, key, input_precision=PRECISION) * scaling
        weights, factor, peak = _weights(
            scores, number * BLOCK + place, at, peak, window, softcap, HAS_WINDOW, HAS_SOFTCAP
        )
        total = total * factor + tl.sum(weights, axis=1)
        found = found * factor[:, None]
        found += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    to = (lane_row * KV * GROUP + heads) * num_splits + split
    tl.store(peaks + to, peak, mask=is_lane)
    tl.store(totals + to, total, mask=is_lane)
    tl.store(weighted + to[:, None] * WIDTH + column[None, :], found, mask=is_cell)


@triton.jit(do_not_specialize=["num_splits", "window"])
def _join(
    peaks, totals, weighted, sinks, positions, out, num_splits, window,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, SPAN: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head, in order of their positions."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // SPAN
    column = tl.arange(0, SIDE)
    peak, total = float("-inf"), 0.0
    if HAS_SINKS:
        peak, total = tl.load(sinks + head).to(tl.float32), 1.0
    found = tl.zeros((SIDE,), tl.float32)
    for split in range(first, position // SPAN + 1):
        at = (row * HEADS + head) * num_splits + split
        own = tl.load(peaks + at)
        higher = tl.maximum(peak, own)
        before, factor = tl.exp(peak - higher), tl.exp(own - higher)
        total = total * before + tl.load(totals + at) * factor
        part = tl.load(weighted + at * WIDTH + column, mask=column < WIDTH, other=0.0)
        found = found * before + part * factor
        peak = higher
    tl.store(
        out + (row * HEADS + head) * WIDTH + column,
        (found / total).to(out.dtype.element_ty),
        mask=column < WIDTH,
    )


def attend_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    used: Tensor,
    positions: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Returns attention [rows, heads, width] of one token of each row over its path.

    Args:
        query: [heads, rows, width], the last axis contiguous.
        keys, values: the blocks of a layer, see `BlockPool`.
        used: [rows, blocks] int64, the blocks of each path, those behind its end any.
        positions: [rows] int64 tokens before each row's token, whose keys and values are stored.
    """
    num_heads, num_rows, width = query.shape
    kv_heads, padded = keys.shape[1], values.shape[3]
    group, num_splits = num_heads // kv_heads, -(-used.shape[1] // SPLIT)
    lanes = max(triton.next_power_of_2(group), LEAST // TOGETHER)
    side = max(triton.next_power_of_2(width), LEAST)
    shape = (num_rows, num_heads, num_splits)
    peaks, totals = query.new_empty(2, *shape, dtype=torch.float32)
    weighted = query.new_empty(*shape, width, dtype=torch.float32)
    out = query.new_empty(num_rows, num_heads, width)
    has_window = options.window is not None
    common: dict[str, Any] = {"HAS_WINDOW": has_window, "WIDTH": width, "SIDE": side}
    # The default of float32 products on a GPU has 10 bits.
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    # A thread's own device is the first one, wherever the tensors are.
    with torch.cuda.device_of(query):
        _split[(num_rows, kv_heads, num_splits)](
            *(query, keys, values, used, positions, peaks, totals, weighted),
            *(query.stride(1), query.stride(0), num_rows, used.stride(0), num_splits),
            *(options.window or 0, options.scaling, options.softcap or 0.0),
            KV=kv_heads,
            GROUP=group,
            PADDED=padded,
            ROWS=TOGETHER,
            HEADS=lanes,
            **{"SPLIT": SPLIT, "BLOCK": BLOCK, "PRECISION": precision, **common},
            HAS_SOFTCAP=options.softcap is not None,
        )
        sinks = peaks if options.sinks is None else options.sinks.contiguous()
        _join[(num_rows, num_heads)](
            *(peaks, totals, weighted, sinks, positions, out, num_splits, options.window or 0),
            **{"HEADS": num_heads, "SPAN": SPLIT * BLOCK, **common},
            HAS_SINKS=options.sinks is not None,
        )
    return out
