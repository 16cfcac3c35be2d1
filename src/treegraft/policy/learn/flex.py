"""Attention over packed trees by FlexAttention's block masks, for GPUs. Not run on one: it is
compared with a dense mask before it is used.

A block mask of the whole batch says which 128 x 128 squares are empty, full or mixed, so that time
and memory follow the tokens that see each other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.learn.dense import AttentionShape, distance_from_dense, exactness, probe_tree
from treegraft.policy.learn.pack import Node
from treegraft.policy.output_head import first_line, layer_heads

_log = logging.getLogger(__name__)

BLOCK = 128
"""Tokens along the side of a square; packs on a GPU are padded to a multiple of it."""
MIN_TOKENS = 1024
"""Packed tokens from which block masks are taken on a GPU. A guess: not measured."""

WIDE = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32}
WIDE |= {"bwd_num_warps": 8}
"""Tiles of the backward program for heads of 128 in 16 bits, on H100 and B200. By torch's own (64 x
128) it spills 1,528 bytes a thread (docs/gpu.md). Not timed on a card: `make card` does."""
SINGLE = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "num_warps": 8}
"""Tiles for heads of 64 and 128 in float32, on H100 and B200: no program spills. With torch's own a
thread of the forward program spills 6 to 75 KB, by torch's version, and at 128 compiling takes
twice as long. Not timed on a card."""
RECOMPILES = 64
"""Programs of FlexAttention that a process may have. Torch stops at 8, with an error that would be
taken for one of FlexAttention: each shape of heads has a program with gradients and one without,
and has both once more for layers with a window or a cap."""

Flex = Callable[..., Tensor]
PROOF_TOKENS = 4097
"""Tokens of the tree on which FlexAttention is tried: past those of a path up to which a mask is
taken on a GPU, where it alone serves, and no multiple of a block."""


def paths_of(nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    """Returns the nodes from the root to each node, itself included.

    Args:
        nodes: of one tree or several, in depth-first order.
    """
    above: list[Node] = []
    found = []
    for node in nodes:
        while above and above[-1].subtree_end <= node.start:
            above.pop()
        above.append(node)
        found.append(tuple(above))
    return found


def num_tokens_of(path: Sequence[Node]) -> int:
    """Returns the tokens of nodes."""
    return sum(node.end - node.start for node in path)


def tree_block_mask(
    nodes: Sequence[Node], window: int | None, device: torch.device | str = "cpu"
) -> BlockMask:
    """Returns the tokens that each packed token sees, as `create_block_mask` would from every pair
    of them: j <= i < end(node of j), and position_i - position_j < window where there is one.

    Args:
        nodes: of all trees in depth-first order; they cover the tokens from 0 without a gap, in
            whole blocks.
    """
    total = nodes[-1].end
    lengths = [node.end - node.start for node in nodes]
    ends = np.repeat([node.subtree_end for node in nodes], lengths)
    before = [num_tokens_of(path[:-1]) - path[-1].start for path in paths_of(nodes)]
    positions = np.arange(total) + np.repeat(before, lengths)
    seen_until = torch.from_numpy(ends).to(device)
    place = torch.from_numpy(positions).to(device)

    def is_visible(_: Any, head: Any, row: Tensor, column: Tensor) -> Tensor:
        visible = (column <= row) & (row < seen_until[column])
        return visible if window is None else visible & (place[row] - place[column] < window)

    columns = torch.arange(total, device=device)
    counts = []
    # One row of blocks at a time: all pairs of tokens at once would take gigabytes for a large
    # pack, which is why it is not `create_block_mask` itself.
    for rows in columns.split(BLOCK):
        seen = is_visible(0, 0, rows[:, None], columns)
        counts.append(seen.view(BLOCK, -1, BLOCK).sum(dim=(0, 2)))
    table = torch.stack(counts)
    # Full blocks run without the mask's function, which costs time in each score.
    is_full = table == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *_ordered((table > 0) & ~is_full),
        *_ordered(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(total, total),
    )


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """([1, 1, blocks] how many of each row, [1, 1, blocks, blocks] which of them, those first)."""
    order = torch.argsort(table.int(), dim=-1, descending=True, stable=True)
    return table.sum(dim=-1).int()[None, None], order.int()[None, None]


def flex_attend(
    flex: Flex,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    options: AttentionOptions,
) -> Tensor:
    """Returns [heads, tokens, width] for query [heads, tokens, width] and key, value [kv heads,
    tokens, width]."""
    modify = None if options.softcap is None else _softcap(options.softcap)
    # At each call: torch has the limit by thread, and a layer that is computed again runs in one
    # of autograd's.
    dynamo: Any = torch._dynamo.config
    if dynamo.recompile_limit < RECOMPILES:
        dynamo.recompile_limit = RECOMPILES
    output = flex(
        query[None],
        key[None],
        value[None],
        score_mod=modify,
        block_mask=mask,
        scale=options.scaling,
        enable_gqa=True,
        kernel_options=_tiles(query),
    )
    return output[0]


def _tiles(query: Tensor) -> dict[str, int] | None:
    """Tiles in place of torch's own, which are otherwise right."""
    # Consumer cards of later capabilities have less shared memory than these tiles take.
    if not query.is_cuda or torch.cuda.get_device_capability()[0] not in (9, 10):
        return None
    width = query.shape[-1]
    if query.dtype == torch.float32:
        return SINGLE if width in (64, 128) else None
    return WIDE if width == 128 and query.dtype.itemsize == 2 else None


# One function for each cap: to the compiler another function is another program.
@functools.cache
def _softcap(cap: float) -> Callable[..., Tensor]:
    # The compiler makes a variable of a float, which a function of scores may not have; a text
    # stays a constant.
    text = repr(float(cap))

    def modify(score: Tensor, *_: Any) -> Tensor:
        constant = float(text)
        return constant * torch.tanh(score / constant)

    return modify


class Proof(NamedTuple):
    """The outcome of comparing FlexAttention with a dense mask."""

    flex: Flex | None
    """Compiled; None where it failed or was off."""
    problem: str
    """Why it is not used; empty where it is."""


def compiled_flex() -> Flex:
    """Returns FlexAttention, compiled when it is first called."""
    # Dynamic: packs have all lengths, and each would be compiled anew. A full graph: where one
    # cannot be had, not compiled FlexAttention would hold the scores of all pairs of tokens.
    flex: Flex = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return flex


def prove_flex(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Tries FlexAttention at the heads that a model's configuration names: before the
    optimiser and activations take its memory, and before any work is done."""
    window = getattr(config, "sliding_window", None)
    softcap = getattr(config, "attn_logit_softcapping", None)
    heads = layer_heads(config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(heads)
    for (kv_heads, width), kind in dict.fromkeys(zip(heads, kinds, strict=True)):
        own = window if kind == "sliding_attention" else None
        shape = AttentionShape(config.num_attention_heads, kv_heads, width, own, softcap)
        proven_flex(shape, dtype, device, PROOF_TOKENS)


@functools.cache
def proven_flex(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, num_tokens: int
) -> Proof:
    """Returns FlexAttention if its outputs and gradients on `device` are a dense mask's, tried once
    on a tree of `num_tokens` with heads of this shape; a notice is logged where they are not.

    Raises torch.OutOfMemoryError, which says nothing of FlexAttention and is not remembered.
    """
    problem = ""
    try:
        flex = compiled_flex()
        gap = flex_distance(flex, shape, dtype, device, num_tokens)
        # Asked this way round, so that NaN is a problem.
        if not gap <= exactness(dtype):
            problem = f"FlexAttention is off by {gap:.3g} of its length"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler has many ways to fail, and other attention is at hand
        problem = f"FlexAttention failed with {type(error).__name__}: {first_line(error)}"
    if problem:
        _log.warning("learner: attention of large batches takes gathered keys: %s", problem)
        return Proof(None, problem)
    return Proof(flex, "")


def flex_distance(
    flex: Flex, shape: AttentionShape, dtype: torch.dtype, device: torch.device, num_tokens: int
) -> float:
    """Returns how far FlexAttention is from a dense mask, see `distance_from_dense`."""
    tree = probe_tree(num_tokens)
    # Padded as packs are: the kernel for whole blocks is another program than that for a rest.
    padding = -num_tokens % BLOCK
    nodes = [*tree.nodes, *padding_nodes(num_tokens, padding)]
    mask = tree_block_mask(nodes, shape.window, device)

    def attend(*inputs: Tensor) -> Tensor:
        q, k, v = (functional.pad(x, (0, 0, 0, padding)) for x in inputs)
        return flex_attend(flex, q, k, v, mask, shape.options)[:, :num_tokens]

    return distance_from_dense(attend, shape, dtype, device, tree)


def padding_nodes(start: int, count: int) -> list[Node]:
    """Returns a node of `count` tokens that see each other alone; none for 0."""
    return [Node(start, start + count, start + count)] if count else []
