"""Attention of one forward pass over ragged rows: some decode one token, some take in many.

A token's numbers depend on its own path only: on which blocks of 64 positions it is spread, never
on who shares them or on the other rows of the batch. On a CPU our kernels run it block by block.
Without them, and on a card, torch's operators run it over copies of the blocks, which is slow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from treegraft.core.errors import ModelError
from treegraft.policy.attention_hook import AttentionOptions, merge_partials, partial_attention
from treegraft.policy.engine.blocks import BlockPool, Row
from treegraft.policy.kernels.engine import BLOCK, Kernels, Pass

MIN_ROWS = 16
"""Float32 matrix products round differently below about a dozen rows."""
BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows that a forward pass may have in float32."""


@dataclass(eq=False)
class Segment:
    """Tokens of one row that this pass takes in: `count` tokens from `fed` on, at rows `offset`..
    of the batch."""

    row: Row
    count: int
    offset: int


@dataclass(frozen=True)
class Gathered:
    """R paths of n tokens each, R or n being 1, over B blocks."""

    positions: Tensor
    """[R * n]"""
    used: Tensor
    """[R, B] the blocks of each path."""

    def store(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts key and value [kv heads, R * n, width] into their blocks."""
        numbers = self.positions // BLOCK
        places = self.positions % BLOCK
        blocks = self.used.gather(1, numbers.view(len(self.used), -1)).flatten()
        keys[blocks, :, :, places] = key.transpose(0, 1)
        # Values are padded to whole vector registers; the padding stays 0.
        values[blocks, :, places, : value.shape[-1]] = value.transpose(0, 1)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [R * n, heads, width] for query [heads, R * n, width], over copies of the paths'
        blocks laid side by side; the query heads of a kv head are stacked."""
        heads, count, width = query.shape
        num_paths = self.used.shape[0]
        kv_heads = keys.shape[1]
        length = count // num_paths
        group = heads // kv_heads
        own_keys = keys[self.used].permute(0, 2, 1, 4, 3).reshape(num_paths, kv_heads, -1, width)
        own_values = (
            values[self.used]
            .permute(0, 2, 1, 3, 4)
            .reshape(num_paths, kv_heads, -1, values.shape[-1])[..., :width]
        )
        stacked = query.reshape(kv_heads, group, num_paths, length, width).permute(2, 0, 1, 3, 4)
        # A block's places behind the path's last token hold what an earlier path left there; their
        # columns are larger than every position, so the causal mask hides them too.
        rows = self.positions.view(num_paths, 1, 1, length, 1)
        columns = torch.arange(own_keys.shape[2], device=query.device)
        visible = columns <= rows
        if options.window is not None:
            # The same condition as in the learner, so that both see the same keys.
            visible &= rows - columns < options.window
        visible = visible.expand(-1, -1, group, -1, -1).reshape(num_paths, 1, group * length, -1)
        part = partial_attention(
            stacked.reshape(num_paths, kv_heads, -1, width), own_keys, own_values, visible, options
        )
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.float().view(kv_heads, group, 1).repeat_interleave(length, dim=1)
        merged = merge_partials([part], sinks).reshape(num_paths, kv_heads, group, length, width)
        return merged.permute(0, 3, 1, 2, 4).reshape(count, heads, width)


class RaggedPlan:
    """The plan of one forward pass over `num_tokens` batch rows (padding included)."""

    def __init__(
        self,
        num_tokens: int,
        pool: BlockPool,
        table: Tensor,
        segments: list[Segment],
        kernels: Kernels | None,
    ) -> None:
        self.pool = pool
        self.kernels = kernels
        self._table = table
        self._segments = segments
        # Rows of padding are token 0 in no slot: kernels pass over them.
        ids = [0] * num_tokens
        positions = [0] * num_tokens
        slots = [-1] * num_tokens
        for segment in segments:
            rows = slice(segment.offset, segment.offset + segment.count)
            first = segment.row.fed
            ids[rows] = segment.row.token_ids[first : first + segment.count]
            positions[rows] = range(first, first + segment.count)
            slots[rows] = [segment.row.slot] * segment.count
        # 32 bits, as the kernels read them.
        self._columns = torch.tensor([ids, positions, slots], dtype=torch.int32)
        self._positions, self._slots = self._columns[1:]
        self.num_calls = 0
        """Layers that called, as in `PackedPlan`."""
        self._batch: Pass | None = None
        self._gathered: list[tuple[slice, Gathered]] | None = None

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns [num_tokens] token ids and [num_tokens] positions on `device`."""
        ids, positions = self._columns[:2].to(device, torch.long)
        return ids, positions

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Returns [num_tokens, heads, width]; stores the keys and values of the tokens taken in.

        Args:
            rotation: cosines and sines [num_tokens, width], by which the query (in place) and the
                key are rotated first; needs kernels.

        Raises:
            ValueError: this layer has another shape or type than the first one.
        """
        self.num_calls += 1
        if self.kernels is None:
            assert rotation is None
            return self._attend_gathered(layer, query, key, value, options)
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)
        )
        keys = self.pool.keys[layer]
        values = self.pool.values[layer]
        if self._batch is None:
            self._batch = self.kernels.batch(
                self._table, self._slots, self._positions, query.shape[0], keys.shape[1]
            )
        # All keys before any attention: tokens of one pass see those before them in it.
        self.kernels.store(self._batch, query, key, value, keys, values, rotation)
        return self.kernels.attend(self._batch, query, keys, values, options)

    def _attend_gathered(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """The same with torch's operators, over copies of the paths' blocks laid side by side."""
        heads, count, width = query.shape
        if self._gathered is None:
            self._gathered = list(self._groups(query.device))
        keys = self.pool.keys[layer]
        values = self.pool.values[layer]
        # Zeros, since rows of padding belong to no path and would stay uninitialised.
        output = query.new_zeros(count, heads, width)
        for tokens, part in self._gathered:
            part.store(key[:, tokens], value[:, tokens], keys, values)
            output[tokens] = part.attend(query[:, tokens], keys, values, options).to(output.dtype)
        return output

    def _groups(self, device: torch.device) -> Iterator[tuple[slice, Gathered]]:
        """Rows that decode, side by side, in one call; chunks one by one, since their lengths
        differ and padding them to the longest would cost more than the calls."""
        _, positions = self.inputs(device)
        first = 0
        while first < len(self._segments):
            group = [self._segments[first]]
            for one in self._segments[first + 1 :]:
                if one.count > 1 or group[-1].count > 1 or one.offset != group[-1].offset + 1:
                    break
                group.append(one)
            last = max(one.row.fed + one.count for one in group) - 1
            tokens = slice(group[0].offset, group[-1].offset + group[-1].count)
            used = self._table[[one.row.slot for one in group], : last // BLOCK + 1]
            yield tokens, Gathered(positions[tokens], used.to(device, torch.long))
            first += len(group)


@torch.inference_mode()
def usable_rows(model: Any) -> tuple[int, ...]:
    """Returns the numbers of rows that a forward pass may have, ascending: in float32 those at
    which products round as at 16.

    Where threads cut an activation into parts that are no multiple of a vector register, the odd
    elements take another path.

    Raises:
        ModelError: there are none.
    """
    # Bits are promised in float32 on a CPU alone; elsewhere a few numbers of rows are enough, so
    # that little is padded and a library's choice of kernels is made once for each.
    if model.dtype != torch.float32 or model.device.type != "cpu":
        return (*range(8, 256, 8), *range(256, BUCKETS[-1] + 1, 64))
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    # One layer of each shape: rounding depends on shapes alone.
    shapes = {module.weight.shape: module for module in linears}
    usable = set(BUCKETS)
    generator = torch.Generator().manual_seed(0)
    for (_, width), linear in shapes.items():
        # Random numbers, since equal ones would round alike in any order of a sum.
        rows = torch.randn(BUCKETS[-1], width, generator=generator, dtype=torch.float32)
        reference = torch.cat([linear(part) for part in rows.split(MIN_ROWS)])
        for bucket in BUCKETS:
            # Every row must come out alike, at the beginning and at the end.
            upright = linear(rows[:bucket])
            upside_down = linear(rows[:bucket].flip(0)).flip(0)
            for found in (upright, upside_down):
                if not torch.equal(found, reference[:bucket]):
                    usable.discard(bucket)
    if not usable:
        raise ModelError(
            "engine: no number of rows gives repeatable matrix products on this machine",
            code="rows-not-repeatable",
        )
    head = model.get_output_embeddings()
    # No activation follows the head.
    widths = {module.out_features for module in linears if module is not head}
    even = usable.copy()
    for bucket in usable:
        for width in widths:
            if not _activations_are_even(bucket, width):
                even.discard(bucket)
    # If no number is even, repeatable products are still worth having.
    return tuple(sorted(even or usable))


def _activations_are_even(bucket: int, width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, width, generator=generator, dtype=torch.float32)
    many = rows.expand(bucket, width).contiguous()
    gelu = functools.partial(functional.gelu, approximate="tanh")
    for activation in (functional.silu, gelu):
        if not (activation(many) == activation(rows)).all():
            return False
    return True
