"""Attention over a packed tree by one dense mask, which faster ways have to equal before they are
used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from treegraft.policy.attention_hook import AttentionOptions, merge_partials, partial_attention
from treegraft.policy.learn.pack import Node, PackedTree


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """AttentionShape(heads=4, kv_heads=2, width=64): the attention of a layer, without its scale
    and sinks."""

    heads: int
    kv_heads: int
    width: int
    """Of one head."""
    window: int | None = None
    softcap: float | None = None

    @property
    def options(self) -> AttentionOptions:
        """The options of such a layer, scores times width^-½."""
        return AttentionOptions(self.width**-0.5, self.window, self.softcap, None)


def probe_tree(num_tokens: int) -> PackedTree:
    """Returns a prompt of half the tokens with two branches, the second with two of a single token:
    for `num_tokens` 401 a prompt of 201 and branches of 99.

    Callers name odd sizes, lengths that are no multiple of a tile or a run: there kernels go wrong
    first.
    """
    prompt = num_tokens // 2 + 1
    singles = num_tokens - 2
    middle = (prompt + singles) // 2
    nodes = (
        Node(0, prompt, num_tokens),
        Node(prompt, middle, middle),
        Node(middle, singles, num_tokens),
        Node(singles, singles + 1, singles + 1),
        Node(singles + 1, num_tokens, num_tokens),
    )
    return PackedTree(0, num_tokens, nodes)


PROBE = probe_tree(401)
"""The tree on which kernels are tried on a CPU."""


def subtree_ends(tree: PackedTree, device: torch.device) -> Tensor:
    """Returns [tokens] end(node of j) - start of the tree."""
    ends = torch.zeros(tree.end - tree.start, dtype=torch.long, device=device)
    for node in tree.nodes:
        ends[node.start - tree.start : node.end - tree.start] = node.subtree_end - tree.start
    return ends


def tree_mask(tree: PackedTree, positions: Tensor, window: int | None) -> Tensor:
    """Returns [tokens, tokens] bool: j <= i < end(node of j), and position_i - position_j < window
    where there is one."""
    ends = subtree_ends(tree, positions.device)
    index = torch.arange(len(ends), device=positions.device)
    visible = (index[None] <= index[:, None]) & (index[:, None] < ends[None])
    if window is not None:
        visible &= positions[:, None] - positions[None] < window
    return visible


def dense_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Returns [heads, tokens, width] for query [heads, tokens, width], key and value [kv heads,
    seen, width].

    Args:
        mask: [tokens, seen] which keys a query sees; None for those up to its own, without caps
            and sinks.
    """
    heads, size, width = query.shape
    kv_heads = key.shape[0]
    if options.softcap is None and options.sinks is None:
        if not query.is_cpu:
            # Elsewhere no fast operator has both a mask and heads that share keys.
            key, value = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (key, value))
        found = functional.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.scaling,
            enable_gqa=True,
        )
        return found[0]
    assert mask is not None
    # No operator of torch knows caps and sinks, so the scores are written out.
    stacked = query.reshape(kv_heads, -1, width)
    part = partial_attention(stacked, key, value, mask.repeat(heads // kv_heads, 1), options)
    sinks = None
    if options.sinks is not None:
        sinks = options.sinks.float().view(kv_heads, -1, 1).repeat_interleave(size, dim=1)
    return merge_partials([part], sinks).reshape(heads, size, width).to(query.dtype)


# The first batch may come without gradients, or within a layer whose activations are computed
# again.
@torch.inference_mode(False)
def distance_from_dense(
    attend: Callable[..., Tensor],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    tree: PackedTree = PROBE,
) -> float:
    """Returns the largest of ‖x - x'‖ / ‖x'‖ over output and gradients of `attend(query, key,
    value)` on `tree`; NaN if any is.

    Shapes of inputs and output are `dense_attend`'s.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return (
            # Drawn on the CPU, since each device would draw other numbers.
            torch.randn(heads, tree.end, shape.width, generator=generator, dtype=torch.float32)
            .to(device, dtype)
            .requires_grad_()
        )

    kv = shape.kv_heads
    inputs = (drawn(shape.heads), drawn(kv), drawn(kv))
    upstream = drawn(shape.heads).detach()
    none = torch.zeros(tree.end, dtype=torch.long, device=device)
    positions = tree_mask(tree, none, None).sum(dim=1) - 1
    mask = tree_mask(tree, positions, shape.window)
    # Hooks of its own: those of an activation checkpoint around the first batch would pack ours.
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        outputs = attend(*inputs), dense_attend(*inputs, mask, shape.options)
        pairs = [
            outputs,
            *zip(*(torch.autograd.grad(x, inputs, upstream) for x in outputs), strict=True),
        ]
    gaps = []
    for ours, exact in pairs:
        exact = exact.detach().float()
        gaps.append((ours.detach().float() - exact).norm() / exact.norm())
    # By torch, in whose maximum NaN wins.
    return float(torch.stack(gaps).max())


def exactness(dtype: torch.dtype) -> float:
    """Returns the largest distance of outputs or gradients from a dense mask's that is rounding."""
    return 1e-3 if dtype == torch.float32 else 0.05
