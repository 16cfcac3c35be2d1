"""Attention over packed trees, exact in forward and backward.

Token j is visible to token i iff j <= i < end(node of j). On a CPU our kernels do it; on a GPU
batches are padded to whole blocks, and large ones take FlexAttention's block masks. Where there are
neither, and for small batches on a GPU and layers with windows, softcaps or sinks, a small tree
takes one call of torch's attention with a dense mask, and a large one a call a node, on the keys of
its path, gathered root first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treegraft.core.errors import KernelError, ModelError
from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.kernels.trees import TreeKernels, TreeRuns
from treegraft.policy.learn.dense import (
    PROBE,
    AttentionShape,
    dense_attend,
    distance_from_dense,
    exactness,
    tree_mask,
)
from treegraft.policy.learn.flex import (
    BLOCK,
    MIN_TOKENS,
    PROOF_TOKENS,
    Flex,
    flex_attend,
    num_tokens_of,
    padding_nodes,
    paths_of,
    proven_flex,
    tree_block_mask,
)
from treegraft.policy.learn.pack import Node, PackedTree, TreeBatch

DENSE_LIMIT = 256
"""Tokens of a tree up to which one call with a dense mask beats a call a node: on a CPU 1.0 ms to
2.4 at 60 tokens in 13 nodes, equal at 200, 13.9 to 11.4 at 300."""
MASK_LIMIT = 4096
"""Tokens of a path up to which a GPU works on gathered keys: past it the scores of a layer with 32
heads may be over 2 GB in float32."""

_log = logging.getLogger(__name__)


class PackedPlan:
    """The attention plan of one batch."""

    def __init__(self, batch: TreeBatch, *, flex: Flex | None = None) -> None:
        """Args:
        flex: FlexAttention, taken wherever it can be; None: that of a GPU, for large batches,
            where it is proven.
        """
        device = batch.token_ids.device
        size = batch.num_tokens
        # One program then serves packs of all lengths, and no block is cut.
        self.num_padding = -size % BLOCK if flex is not None or device.type == "cuda" else 0
        """Tokens that the caller adds behind the batch, with ids 0 and positions from 0 on."""
        self.inputs = batch.token_ids, batch.position_ids
        """Token ids and positions of the model's call, padding included."""
        self._trees = list(batch.trees)
        if self.num_padding:
            padding = padding_nodes(size, self.num_padding)
            self._trees.append(PackedTree(size, size + self.num_padding, tuple(padding)))
            behind = torch.arange(self.num_padding, device=device)
            self.inputs = (
                torch.cat([batch.token_ids, torch.zeros_like(behind)]),
                torch.cat([batch.position_ids, behind]),
            )
        self._nodes = [node for tree in self._trees for node in tree.nodes]
        self._runs: TreeRuns | None = None
        # From the nodes: the tensor's maximum would make the host wait for the device.
        self._longest = max(map(num_tokens_of, paths_of(self._nodes)), default=0)
        self._own_flex = flex
        # By window: in some models layers with one and without one take turns.
        self._views: dict[int | None, list[list[_View]]] = {}
        self._block_masks: dict[int | None, Any] = {}
        self.num_calls = 0
        """Layers that called; equals the model's layers where the hook reaches all of them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [tokens, heads, width]; trees do not see each other.

        Raises:
            ModelError: a path too long for a mask on a GPU, where FlexAttention fails.
        """
        self.num_calls += 1
        # A window as long as the longest path hides nothing, and without it the faster ways serve.
        if options.window is not None and options.window >= self._longest:
            options = AttentionOptions(options.scaling, None, options.softcap, options.sinks)
        if (flex := self._flex(query, key, options)) is not None:
            blocks = self._block_mask(options.window)
            return flex_attend(flex, query, key, value, blocks, options).transpose(0, 1)
        if (kernels := self._kernels(query, key, value, options)) is not None:
            if self._runs is None:
                self._runs = TreeRuns(self._nodes, self._nodes[-1].end, kernels.num_threads())
            return kernels.attend(query, key, value, self._runs, options.scaling)
        return self._gathered(query, key, value, options).transpose(0, 1)

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """[heads, tokens, width] by one call a view."""
        seen = self._seen(options.window, query.device)
        # Tree by tree: the gradient of a cut is as large as what is cut, so that views cut from the
        # whole batch would cost its tokens times its nodes.
        sizes = [tree.end - tree.start for tree in self._trees]
        queries, keys, values = (x.split(sizes, dim=1) for x in (query, key, value))
        outputs = []
        for number, views in enumerate(seen):
            inputs = queries[number], keys[number], values[number]
            outputs += [_seen_by(view, *inputs, options) for view in views]
        return torch.cat(outputs, dim=1)

    def _seen(self, window: int | None, device: torch.device) -> list[list[_View]]:
        """What each tree's tokens see, for all layers with this window: one view of a small tree,
        one a node of a large one."""
        if window not in self._views:
            self._views[window] = [self._views_of(tree, window, device) for tree in self._trees]
        return self._views[window]

    def _views_of(self, tree: PackedTree, window: int | None, device: torch.device) -> list[_View]:
        size = tree.end - tree.start
        if len(tree.nodes) > 1 and size <= DENSE_LIMIT:
            mask = tree_mask(tree, self.inputs[1][tree.start : tree.end], window)
            return [_View(slice(size), None, mask, is_causal=False)]
        return [_view(path, tree.start, window, device) for path in paths_of(tree.nodes)]

    def _flex(self, query: Tensor, key: Tensor, options: AttentionOptions) -> Flex | None:
        if self._own_flex is not None:
            return None if options.sinks is not None else self._own_flex
        if query.device.type != "cuda" or query.shape[1] < MIN_TOKENS:
            return None
        problem = "FlexAttention does not know its attention sinks"
        if options.sinks is None:
            shape = AttentionShape(
                query.shape[0], key.shape[0], query.shape[-1], options.window, options.softcap
            )
            flex, problem = proven_flex(shape, query.dtype, query.device, PROOF_TOKENS)
            if flex is not None:
                return flex
        if self._longest > MASK_LIMIT:
            raise ModelError(
                f"learner: a path of {self._longest:,} tokens would take a dense attention mask on"
                f" the GPU, expected at most {MASK_LIMIT:,}: {problem}. Keep paths below it, such"
                " as by a smaller rollout.max_completion_tokens, or take another model.",
                code="tree-too-long",
            )
        return None

    def _kernels(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> TreeKernels | None:
        is_alike = len({(x.shape[-1], x.dtype) for x in (query, key, value)}) == 1
        if not (is_alike and _is_plain(options)):
            return None
        return tree_kernels(query.shape[-1], query.dtype, query.device.type)

    def _block_mask(self, window: int | None) -> Any:
        if window not in self._block_masks:
            device = self.inputs[1].device
            self._block_masks[window] = tree_block_mask(self._nodes, window, device)
        return self._block_masks[window]


def _is_plain(options: AttentionOptions) -> bool:
    return options.window is None and options.softcap is None and options.sinks is None


class _View(NamedTuple):
    """The keys that the tokens of a node or tree see."""

    own: slice
    """The tokens that see them, counted in the tree."""
    places: Tensor | None
    """[seen] the tokens of the node's path, its own last, counted in the tree; None for its own
    alone."""
    mask: Tensor
    """[own, seen] bool"""
    is_causal: bool
    """Whether each token sees all up to itself, windows apart."""


def _seen_by(
    view: _View, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """[heads, own, width] of the tokens of a view, for the tensors of its tree."""
    keys = key[:, view.own]
    values = value[:, view.own]
    if view.places is not None:
        keys = key.index_select(1, view.places)
        values = value.index_select(1, view.places)
    # A causal call leaves out the half that a mask would compute for nothing.
    mask = None if view.is_causal and _is_plain(options) else view.mask
    return dense_attend(query[:, view.own], keys, values, mask, options)


def _view(path: Sequence[Node], first: int, window: int | None, device: torch.device) -> _View:
    """Args: first: the first packed token of the tree."""
    node = path[-1]
    seen = num_tokens_of(path)
    own = node.end - node.start
    places = None
    if len(path) > 1:
        places = torch.cat([torch.arange(one.start, one.end) for one in path]).to(device) - first
    # Tokens of a path have consecutive positions, so that places in it do for positions.
    mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
    if window is not None:
        mask = mask.triu(seen - own - window + 1)
    place = slice(node.start - first, node.end - first)
    return _View(place, places, mask.to(device), is_causal=len(path) == 1)


def tree_kernels(width: int, dtype: torch.dtype, device: str) -> TreeKernels | None:
    """Returns the kernels for heads of `width`; None where there are none: another device, type or
    processor, no compiler."""
    # In bfloat16 the kernels read two elements as one word, so an odd width has no layout.
    if device != "cpu" or dtype not in (torch.float32, torch.bfloat16) or width % 2:
        return None
    return _tree_kernels(width, dtype)


@functools.cache
def _tree_kernels(width: int, dtype: torch.dtype) -> TreeKernels | None:
    try:
        kernels = TreeKernels(width, dtype)
    except KernelError as error:
        _log.warning(
            "learner: attention over trees takes torch's operators, which is slower: %s", error
        )
        return None
    # One thread of ours is no match for many of torch's.
    if not kernels.is_usable or kernels.num_threads() < torch.get_num_threads():
        return None
    runs = TreeRuns(PROBE.nodes, PROBE.end, kernels.num_threads())

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernels.attend(query, key, value, runs, width**-0.5).transpose(0, 1)

    # Tried once for each width and type: the compiler and the processor are this machine's own.
    gap = distance_from_dense(attend, AttentionShape(4, 2, width), dtype, torch.device("cpu"))
    if gap <= exactness(dtype):
        return kernels
    _log.warning(
        "learner: attention over trees takes torch's operators, which is slower: our kernels are"
        " off by %.3g",
        gap,
    )
    return None
