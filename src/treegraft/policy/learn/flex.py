"""Attention over packed trees by FlexAttention's block masks, for GPUs. Not run on one: it is
compared with a dense mask before it is used.

A block mask of the whole batch says which 128 x 128 squares are empty, full or mixed, so that time
and memory follow the tokens that see each other. Token j is visible to token i iff j <= i <
end(node of j), which also parts trees.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from treegraft.policy.head import first_line
from treegraft.policy.hook import AttentionOptions
from treegraft.policy.learn.dense import (
    PROBE,
    distance_from_dense,
    is_exact,
    probe_positions,
    subtree_ends,
)

_log = logging.getLogger(__name__)

MIN_TOKENS = 1024
"""Packed tokens from which block masks are taken on a GPU; a dense mask of so many is 1 MB. A
guess: not measured."""

Flex = Callable[..., Tensor]


def tree_block_mask(ends: Tensor, positions: Tensor, window: int | None) -> BlockMask:
    """Returns the tokens that each packed token sees.

    Args:
        ends: [T] one past the last packed token that sees token j.
        positions: [T] tokens before it on its path.
        window: key j is visible to query i only if position_i - position_j < window. None: no
            window.
    """

    def is_visible(_: Any, head: Any, row: Tensor, column: Tensor) -> Tensor:
        visible = (column <= row) & (row < ends[column])
        return (
            visible if window is None else visible & (positions[row] - positions[column] < window)
        )

    return create_block_mask(is_visible, None, None, len(ends), len(ends), device=ends.device)


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
    output = flex(
        query[None],
        key[None],
        value[None],
        score_mod=modify,
        block_mask=mask,
        scale=options.scaling,
        enable_gqa=True,
    )
    return output[0]


# One function for each cap: to the compiler another function is another program.
@functools.cache
def _softcap(cap: float) -> Callable[..., Tensor]:
    def modify(score: Tensor, *_: Any) -> Tensor:
        return cap * torch.tanh(score / cap)

    return modify


@functools.cache
def proven_flex(width: int, dtype: torch.dtype, device: torch.device) -> Flex | None:
    """Returns FlexAttention, compiled; None, with a notice, where outputs or gradients on `device`
    are not a dense mask's."""
    try:
        # Dynamic: packs have all lengths, and each would be compiled anew.
        flex: Flex = torch.compile(flex_attention, dynamic=True)
        gap = flex_distance(flex, width, dtype, device)
    except Exception as error:  # a compiler has many ways to fail, and dense masks are at hand
        _log.warning(
            "learner: attention of large trees takes dense masks: FlexAttention failed with %s: %s",
            type(error).__name__,
            first_line(error),
        )
        return None
    if is_exact(gap, dtype):
        return flex
    _log.warning(
        "learner: attention of large trees takes dense masks: FlexAttention is off by %.3g of its"
        " length",
        gap,
    )
    return None


def flex_distance(flex: Flex, width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Returns how far FlexAttention is from a dense mask, see `distance_from_dense`."""
    ends, positions = subtree_ends(PROBE, device), probe_positions(device)
    options = AttentionOptions(width**-0.5, None, None, None)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = tree_block_mask(ends, positions, None)
        return flex_attend(flex, query, key, value, mask, options)

    return distance_from_dense(attend, width, dtype, device)
