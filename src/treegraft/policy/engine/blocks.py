"""Keys and values in blocks of 64 positions, and the prefix tree that says which path each block
belongs to.

    root ─ [p p p p] ─ [p p s s] ─ [s t s]   a path: full blocks, and a tail that grows
                     └ [p p s x] ─ [y y]     a branch inside a block: its beginning is copied

A block begins at a multiple of 64 tokens of its path, so its content is a function of the path
alone. A full block is read by every path below it; a tail belongs to the one row that lengthens it.
A block that no row uses stays until room is needed; the oldest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from treegraft.core.errors import EngineError
from treegraft.policy.kernels.engine import BLOCK, padded_width
from treegraft.policy.output_head import layer_heads
from treegraft.settings.policy import CPU_CACHE_GB

FIRST_BLOCKS = 64
"""Blocks that the pool begins with; it doubles until it reaches its limit."""


class BlockPool:
    """Keys [blocks, kv heads, width, 64] and values [blocks, kv heads, 64, padded width] of every
    layer."""

    def __init__(self, model: Any, max_bytes: float) -> None:
        """`max_bytes` limits the blocks that stay; a path that is alone may take more.

        On a GPU all of them are allocated here: growing would copy and leave holes.
        """
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for heads, width in layer_heads(model.config.get_text_config()):
            self.keys.append(like.new_zeros(0, heads, width, BLOCK))
            self.values.append(like.new_zeros(0, heads, BLOCK, padded_width(width)))
        numbers = sum(layer.shape[1:].numel() for layer in (*self.keys, *self.values))
        self.num_blocks = 0
        self.max_blocks = max(1, int(max_bytes // (numbers * like.element_size())))
        if like.device.type != "cpu":
            self.grow(self.max_blocks)

    def grow(self, needed: int) -> None:
        """Makes room for `needed` blocks; stored ones stay."""
        size = max(needed, min(max(2 * self.num_blocks, FIRST_BLOCKS), self.max_blocks))
        for column in (self.keys, self.values):
            for layer, old in enumerate(column):
                column[layer] = old.new_zeros(size, *old.shape[1:])
                column[layer][: self.num_blocks] = old
        self.num_blocks = size

    def copy(self, source: int, target: int, positions: int) -> None:
        """Copies the first positions of one block to another."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :, :positions] = keys[source, :, :, :positions]
            values[target, :, :positions] = values[source, :, :positions]


@dataclass(eq=False)
class Node:
    """One block of one path."""

    block: int
    parent: Node | None
    token_ids: list[int] = field(default_factory=list)
    """Whose keys and values are stored; at most 64."""
    children: list[Node] = field(default_factory=list)
    num_users: int = 0
    """Rows whose path goes through it."""


@dataclass(eq=False)
class Row:
    """A path under way."""

    slot: int
    """Its row in the table of blocks."""
    token_ids: list[int]
    """All that is known of the path, from its first token on."""
    fed: int
    """Leading tokens whose keys and values are stored."""
    nodes: list[Node]
    """Its blocks from the root on; the last may still grow and is then this row's own."""
    max_nodes: int
    """As many as it may come to have."""

    @property
    def num_unfed(self) -> int:
        return len(self.token_ids) - self.fed


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many leading entries agree."""
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return number
    return min(len(a), len(b))


class PathCache:
    """Finds the longest stored beginning of a path, shares its blocks, and makes room by age."""

    def __init__(self, pool: BlockPool, max_rows: int) -> None:
        self.pool = pool
        # Never fed and never dropped: a full block, below which every path begins.
        self.root = Node(block=-1, parent=None, token_ids=[0] * BLOCK)
        self.table = torch.zeros(max_rows, 16, dtype=torch.int32)
        """[rows, blocks] the block numbers of each row's path."""
        self.rows: list[Row] = []
        # Reversed, so that the lowest slot is popped first.
        self._free_slots = list(range(max_rows))[::-1]
        self._free_blocks = list(range(pool.num_blocks))
        self._idle: OrderedDict[Node, None] = OrderedDict()
        """Nodes without users and children, those to go first in front."""
        self._num_unused = 0
        """Nodes without users."""
        self.num_evictions = 0
        """Blocks dropped for others; they cost a prefill if a path needs them again."""

    def matched(self, path_ids: Sequence[int]) -> int:
        """Returns how many leading tokens of the path are stored, at most all but the last."""
        chain, _, common = self._match(path_ids)
        return len(chain) * BLOCK + common

    def open(self, path_ids: list[int], max_tokens: int) -> Row | None:
        """Returns a row for the path, which may grow to `max_tokens`, with its stored beginning in
        place; None: no room yet."""
        chain, tail, common = self._match(path_ids)
        num_nodes = -(-max_tokens // BLOCK)
        # Before any block is taken: a row that opens can always come to its end.
        if not self._free_slots or not self._has_room(chain, num_nodes):
            return None
        for node in chain:
            self._use(node)
        row = Row(self._free_slots.pop(), path_ids, len(chain) * BLOCK, chain, num_nodes)
        blocks = torch.tensor([node.block for node in chain], dtype=torch.int32)
        self.table[row.slot, : len(chain)] = blocks
        self.rows.append(row)
        if tail is not None:
            self._continue(row, tail, common)
            row.fed += common
        return row

    def extend(self, row: Row, count: int) -> None:
        """Sees to it that there are blocks for the next `count` tokens."""
        while len(row.nodes) * BLOCK < row.fed + count:
            self._append(row, Node(self._take_block(), row.nodes[-1] if row.nodes else self.root))

    def fed(self, row: Row, count: int) -> None:
        """Notes that the next `count` tokens are stored."""
        start = row.fed
        row.fed += count
        for index in range(start // BLOCK, -(-row.fed // BLOCK)):
            first = max(start, index * BLOCK)
            last = min(row.fed, (index + 1) * BLOCK)
            row.nodes[index].token_ids += row.token_ids[first:last]

    def close(self, row: Row) -> None:
        """Ends a row; its keys and values stay until other paths need the room."""
        self.rows.remove(row)
        self._free_slots.append(row.slot)
        # From the end on: a block becomes idle once nothing hangs below it.
        for node in reversed(row.nodes):
            node.num_users -= 1
            if node.num_users:
                continue
            self._num_unused += 1
            if not node.children:
                self._idle[node] = None
                # A row that ended before its new block was fed leaves nothing worth storing.
                if not node.token_ids:
                    self._drop(node)

    def clear(self) -> None:
        """Drops everything; no row may be under way."""
        # Nodes alone are dropped; the tensors stay for the next update.
        self._free_blocks.extend(node.block for node in _below(self.root))
        self.root.children.clear()
        self._idle.clear()
        self._num_unused = 0

    # ------------------------------------------------------------------ inside

    def _match(self, path_ids: Sequence[int]) -> tuple[list[Node], Node | None, int]:
        """The full blocks that hold the path's beginning, the node that goes on with it best, and
        how many tokens that has."""
        chain: list[Node] = []
        # The last token is always fed: its output is what the next one is sampled from.
        node = self.root
        limit = len(path_ids) - 1
        while True:
            at = len(chain) * BLOCK
            wanted = list(path_ids[at : min(at + BLOCK, limit)])
            best = None
            common = 0
            least = wanted[:1]
            for child in node.children:
                # Most differ at once, and one that has less in common than the best cannot be it.
                if child.token_ids[: len(least)] != least:
                    continue
                # Of equals a tail without users: it can be taken over, others must be copied.
                length = common_length(child.token_ids, wanted)
                if length > common or (
                    length
                    and length == common
                    and best is not None
                    and _is_taken(best) > _is_taken(child)
                ):
                    best = child
                    common = length
                    least = wanted[:length]
            if common < BLOCK or best is None:
                return chain, best, common
            chain.append(best)
            node = best

    def _has_room(self, chain: list[Node], num_nodes: int) -> bool:
        """Whether this row and all under way can come to their full lengths within the limit; one
        that is alone always may."""
        if not self.rows:
            return True
        # Counted at their full lengths: blocks in use are never dropped, so rows that grow beyond
        # the limit together could none of them end.
        promised = sum(row.max_nodes - len(row.nodes) for row in self.rows)
        newly_used = sum(not node.num_users for node in chain)
        in_use = self.pool.num_blocks - len(self._free_blocks) - self._num_unused
        return in_use + promised + newly_used + num_nodes - len(chain) <= self.pool.max_blocks

    def _continue(self, row: Row, tail: Node, common: int) -> None:
        """Takes over a tail that ends where the path goes on; copies the beginning of a block that
        is another path's."""
        parent = row.nodes[-1] if row.nodes else self.root
        # An idle tail that the path continues, as after a tool result: nothing to copy.
        if tail in self._idle and common == len(tail.token_ids):
            self._use(tail)
            row.nodes.append(tail)
            self._note(row)
            return
        # The copy needs a block, and the oldest idle one, dropped for it, may be this very tail.
        tail.num_users += 1
        self._idle.pop(tail, None)
        own = Node(self._take_block(), parent)
        tail.num_users -= 1
        # Also if it was not idle: the block that was dropped may have been its last child's.
        if not _is_taken(tail):
            self._idle[tail] = None
        self.pool.copy(tail.block, own.block, common)
        own.token_ids += tail.token_ids[:common]
        self._append(row, own)

    def _append(self, row: Row, node: Node) -> None:
        assert node.parent is not None
        node.parent.children.append(node)
        # A parent is dropped after its children only.
        self._idle.pop(node.parent, None)
        node.num_users = 1
        row.nodes.append(node)
        self._note(row)

    def _note(self, row: Row) -> None:
        count = len(row.nodes)
        if count > self.table.shape[1]:
            self.table = torch.nn.functional.pad(self.table, (0, self.table.shape[1]))
        self.table[row.slot, count - 1] = row.nodes[-1].block

    def _use(self, node: Node) -> None:
        if not node.num_users:
            self._num_unused -= 1
            self._idle.pop(node, None)
        node.num_users += 1

    def _take_block(self) -> int:
        # Beyond the limit where nothing is idle: a path that is alone may take more.
        if not self._free_blocks and (
            self.pool.num_blocks < self.pool.max_blocks or not self._idle
        ):
            before = self.pool.num_blocks
            self.pool.grow(before + 1)
            self._free_blocks.extend(range(before, self.pool.num_blocks))
        if not self._free_blocks:
            self._drop(next(iter(self._idle)))
            self.num_evictions += 1
        return self._free_blocks.pop()

    def _drop(self, node: Node) -> None:
        """Gives back an idle node's block; its parent may be idle then, and goes next."""
        parent = node.parent
        assert parent is not None
        del self._idle[node]
        self._num_unused -= 1
        self._free_blocks.append(node.block)
        parent.children.remove(node)
        if parent is not self.root and not _is_taken(parent):
            # In front: it is as old as the child that has just gone, and older than the rest.
            self._idle[parent] = None
            self._idle.move_to_end(parent, last=False)


def _below(node: Node) -> Iterator[Node]:
    waiting = list(node.children)
    while waiting:
        child = waiting.pop()
        waiting.extend(child.children)
        yield child


def _is_taken(node: Node) -> bool:
    return node.num_users > 0 or bool(node.children)


def cache_bytes(
    cache_gb: float | Literal["auto"], device: torch.device, reserved: float = 0.0
) -> float:
    """Returns the room for keys and values on `device`, in bytes.

    Args:
        reserved: bytes of a GPU that are still to be taken, by the learner most of all; "auto"
            leaves them free.

    Raises:
        EngineError: the GPU has less free memory than this.
    """
    if device.type != "cuda":
        return 1e9 * (CPU_CACHE_GB if cache_gb == "auto" else cache_gb)
    free, whole = torch.cuda.mem_get_info(device)
    wanted = free - reserved if cache_gb == "auto" else 1e9 * cache_gb
    if not 0 < wanted <= free:
        raise EngineError(
            f"engine.native.cache_gb: got {cache_gb} on {device}, where {free / 1e9:.1f} of"
            f" {whole / 1e9:.1f} GB are free and learning will take {reserved / 1e9:.1f}; expected"
            " room for keys and values too. `treegraft doctor RECIPE --gpus 1` says what takes it"
            " and what to change.",
            code="gpu-memory-short",
        )
    return wanted
