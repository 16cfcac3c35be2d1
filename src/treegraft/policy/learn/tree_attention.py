"""Attention over packed trees, exact in forward and backward.

Token j is visible to token i iff j <= i < end(node of j). On a CPU our kernels do it; on a GPU
batches are padded to whole blocks, and large ones take FlexAttention's block masks. Where there are
neither, small trees and layers with
windows, softcaps or sinks use a dense mask, large trees two flash calls per node: its tokens on
themselves (causal) and everything below it on its keys (unmasked, contiguous), merged by

    lse = log(exp(lse_1) + exp(lse_2)),   o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2

Since a flash backward needs only the final output and lse, the backward pass calls it per part with
the merged ones.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

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
    is_exact,
    tree_mask,
)
from treegraft.policy.learn.flex import (
    BLOCK,
    MIN_TOKENS,
    PROOF_TOKENS,
    Flex,
    flex_attend,
    node_positions,
    padding_nodes,
    proven_flex,
    tree_block_mask,
)
from treegraft.policy.learn.pack import Node, PackedTree, TreeBatch

DENSE_LIMIT = 256
"""Packed tokens up to which one dense mask beats two flash calls per node of a branched tree (on
two cores about 250)."""
MASK_LIMIT = 4096
"""Tokens of a tree up to which a GPU takes a dense mask: past it the scores of a layer with 32
heads are over 2 GB in float32."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_log = logging.getLogger(__name__)


class PackedPlan:
    """The attention plan of one batch."""

    def __init__(
        self,
        batch: TreeBatch,
        *,
        compile_kernels: bool = True,
        dense_limit: int = DENSE_LIMIT,
        flex: Flex | None = None,
    ) -> None:
        """Args:
        compile_kernels: whether our kernels are taken where there are any.
        dense_limit: without them, see `DENSE_LIMIT`.
        flex: FlexAttention, taken wherever it can be; None: that of a GPU, for large batches,
            where it is proven.
        """
        device, size = batch.token_ids.device, batch.num_tokens
        # One program then serves packs of all lengths, and no block is cut.
        self.num_padding = -size % BLOCK if flex is not None or device.type == "cuda" else 0
        """Tokens that the caller adds behind the batch, with ids 0 and positions from 0 on."""
        self._trees = batch.trees
        self.inputs = batch.token_ids, batch.position_ids
        """Token ids and positions of the model's call, padding included."""
        if self.num_padding:
            nodes = padding_nodes(size, self.num_padding)
            self._trees = (*batch.trees, PackedTree(size, size + self.num_padding, tuple(nodes)))
            behind = torch.arange(self.num_padding, device=device)
            self.inputs = (
                torch.cat([batch.token_ids, torch.zeros_like(behind)]),
                torch.cat([batch.position_ids, behind]),
            )
        self._compile_kernels = compile_kernels
        self._runs: TreeRuns | None = None
        # From the nodes: the tensor's maximum would make the host wait for the device.
        firsts = node_positions(self._nodes())
        self._longest = max(
            (n.end - n.start + at for n, at in zip(self._nodes(), firsts, strict=True)), default=0
        )
        self._positions = self.inputs[1]
        self._dense_limit, self._own_flex = dense_limit, flex
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._block_masks: dict[int | None, Any] = {}
        self.num_calls = 0
        """Layers that called; equals the model's layers where the hook reaches all of them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [tokens, heads, width]; trees do not see each other.

        Raises:
            ModelError: a tree too large for a dense mask on a GPU, where FlexAttention fails.
        """
        self.num_calls += 1
        # A window as long as the longest path hides nothing, and without it the faster ways serve.
        if options.window is not None and options.window >= self._longest:
            options = AttentionOptions(options.scaling, None, options.softcap, options.sinks)
        if (flex := self._flex(query, key, options)) is not None:
            blocks = self._block_mask(options.window)
            return flex_attend(flex, query, key, value, blocks, options).transpose(0, 1)
        # Before flash: they pass over the tree once, where flash takes two calls a node.
        if (kernels := self._kernels(query, key, value, options)) is not None:
            if self._runs is None:
                self._runs = TreeRuns(self._nodes(), self._trees[-1].end, kernels.num_threads())
            return kernels.attend(query, key, value, self._runs, options.scaling)
        # By tree: a batch may hold a long one beside others for which a mask is faster.
        takes_flash = [self._takes_flash(tree, query, options) for tree in self._trees]
        # All trees at once, which saves slicing: the nodes of one never see those of another.
        if all(takes_flash):
            return _flash_nodes(query, key, value, self._nodes(), options.scaling).transpose(0, 1)
        outputs = []
        for index, tree in enumerate(self._trees):
            part = slice(tree.start, tree.end)
            if takes_flash[index]:
                nodes = tuple(
                    Node(n.start - tree.start, n.end - tree.start, n.subtree_end - tree.start)
                    for n in tree.nodes
                )
                outputs.append(
                    _flash_nodes(
                        query[:, part], key[:, part], value[:, part], nodes, options.scaling
                    )
                )
            else:
                mask = self._mask(index, options.window)
                outputs.append(
                    dense_attend(query[:, part], key[:, part], value[:, part], mask, options)
                )
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def _nodes(self) -> tuple[Node, ...]:
        return tuple(node for tree in self._trees for node in tree.nodes)

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
        longest = max(tree.end - tree.start for tree in self._trees)
        if longest > MASK_LIMIT:
            raise ModelError(
                f"learner: a tree of {longest:,} tokens would take a dense attention mask on the"
                f" GPU, expected at most {MASK_LIMIT:,}: {problem}. Set learn.max_pack_tokens to"
                f" {MASK_LIMIT} or less (trees are then split by leaves) and keep single paths"
                " below it.",
                code="tree-too-long",
            )
        return None

    def _kernels(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> TreeKernels | None:
        is_alike = len({(x.shape[-1], x.dtype) for x in (query, key, value)}) == 1
        if not (self._compile_kernels and self._trees and is_alike and _is_plain(options)):
            return None
        return tree_kernels(query.shape[-1], query.dtype, query.device.type)

    def _block_mask(self, window: int | None) -> Any:
        if window not in self._block_masks:
            self._block_masks[window] = tree_block_mask(
                self._nodes(), window, self._positions.device
            )
        return self._block_masks[window]

    def _takes_flash(self, tree: PackedTree, query: Tensor, options: AttentionOptions) -> bool:
        # A lone path needs a single causal call, while a mask computes its upper half too.
        gains = tree.end - tree.start > self._dense_limit or len(tree.nodes) == 1
        return _is_plain(options) and query.device.type == "cpu" and gains

    def _mask(self, index: int, window: int | None) -> Tensor:
        """[tokens, tokens] bool of one tree, row i sees column j."""
        # Kept for the batch: all layers with the same window share one.
        if (index, window) not in self._masks:
            tree = self._trees[index]
            self._masks[index, window] = tree_mask(
                tree, self._positions[tree.start : tree.end], window
            )
        return self._masks[index, window]


def _is_plain(options: AttentionOptions) -> bool:
    return options.window is None and options.softcap is None and options.sinks is None


def _flash_nodes(
    query: Tensor, key: Tensor, value: Tensor, nodes: tuple[Node, ...], scale: float
) -> Tensor:
    output: Tensor = _FlashTree.apply(query[None], key[None], value[None], nodes, scale)  # type: ignore[no-untyped-call]
    return output[0]


def _widened(x: Tensor, heads: int) -> Tensor:
    """[1, heads, tokens, width] for [1, kv heads or heads, tokens, width], in the type in which
    flash attention is faster.

    Without a matrix unit for bfloat16 its backward pass takes more than twice as long as in
    float32.
    """
    fast = x if x.dtype != torch.bfloat16 or torch.cpu._is_amx_tile_supported() else x.float()
    return fast if x.shape[1] == heads else fast.repeat_interleave(heads // x.shape[1], dim=1)


def _calls(nodes: Sequence[Node]) -> list[tuple[slice, slice, bool]]:
    """(rows, columns, causal) of the flash calls that make up a tree."""
    calls = []
    for node in nodes:
        columns = slice(node.start, node.end)
        calls.append((columns, columns, True))
        if node.subtree_end > node.end:
            calls.append((slice(node.end, node.subtree_end), columns, False))
    return calls


class _FlashTree(torch.autograd.Function):
    """query [1, heads, tokens, width], key and value [1, kv heads, tokens, width] -> [1, heads,
    tokens, width]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: tuple[Node, ...], scale: float
    ) -> Tensor:
        wide = [_widened(x, query.shape[1]) for x in (query, key, value)]
        # In float32, whatever the type: up to one part per ancestor is merged into each row.
        output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        # The flash kernel keeps lse as [batch, tokens, heads] behind a transposed view; its
        # backward reads it so.
        shape = (query.shape[0], query.shape[2], query.shape[1])
        lse = output.new_full(shape, float("-inf")).transpose(1, 2)
        for rows, columns, is_causal in _calls(nodes):
            parts = (
                x[:, :, where] for x, where in zip(wide, (rows, columns, columns), strict=True)
            )
            part, part_lse = _flash(*parts, 0.0, is_causal, scale=scale)
            before = lse[:, :, rows]
            merged = torch.logaddexp(before, part_lse)
            output[:, :, rows] *= torch.exp(before - merged)[..., None]
            output[:, :, rows] += torch.exp(part_lse - merged)[..., None] * part
            lse[:, :, rows] = merged
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.nodes, ctx.scale = nodes, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output, lse = ctx.saved_tensors
        heads = inputs[0].shape[1]
        query, key, value, output, grad = (
            _widened(x, heads) for x in (*inputs, output, grads[0].contiguous())
        )
        totals = [
            torch.zeros(query.shape, dtype=torch.float32, device=query.device) for _ in inputs
        ]
        for rows, columns, is_causal in _calls(ctx.nodes):
            # With the merged output and lse, each part's probabilities come out normalised over the
            # whole path, so the parts' gradients simply add up.
            parts = _flash_backward(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                output[:, :, rows],
                lse[:, :, rows],
                0.0,
                is_causal,
                scale=ctx.scale,
            )
            for total, part, where in zip(totals, parts, (rows, columns, columns), strict=True):
                total[:, :, where] += part
        # A key's gradient is the sum over the query heads that read it.
        grouped = (
            t.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
            for t, x in zip(totals, inputs, strict=True)
        )
        return (*grouped, None, None)


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
    if is_exact(gap, dtype):
        return kernels
    _log.warning(
        "learner: attention over trees takes torch's operators, which is slower: our kernels are"
        " off by %.3g",
        gap,
    )
    return None
