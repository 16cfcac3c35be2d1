"""Ways to learn from the same trajectories: the same model, loss, head, layers and micro-batches,
and a different layout of tokens or a different attention.

    padded                  one padded row a trajectory, torch's scaled_dot_product_attention
    rows, no padding        trajectories one behind another in one sequence, varlen_attn: the
                            baseline, what verl calls use_remove_padding
    prompt once             the prompt once, then each trajectory's own tokens (the scheme of
                            Prefix Grouper, arXiv 2506.05433)
    gathered keys           packed trees; the keys of a segment's whole path are copied behind one
                            another, and one varlen_attn takes them all (the scheme of TRL's
                            AsyncGRPOTrainer)
    packed                  packed trees, Treegraft's own attention

`varlen_attn` is a flash kernel for GPUs in 16 bits. Elsewhere one call of
scaled_dot_product_attention a segment takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from benchmarks.workloads import apart, prompt_once
from treegraft.core.types import Tree
from treegraft.policy.attention_hook import AttentionOptions, AttentionPlan, install_attention
from treegraft.policy.learn.flex import WIDE, compiled_flex, paths_of
from treegraft.policy.learn.pack import (
    TreeBatch,
    num_tree_tokens,
    pack_trees,
    plan_packs,
    split_tree,
)
from treegraft.policy.learn.scores import chunked_scores
from treegraft.policy.learn.tree_attention import PackedPlan
from treegraft.policy.output_head import OutputHead, base_model, decoder
from treegraft.policy.shapes import VOCAB_CHUNK

ROWS = "rows, no padding"
PACKED = "packed"
"""Rows whose logits exist at once, in every arm."""


class Plan(AttentionPlan, Protocol):
    """The attention of one batch."""

    inputs: tuple[Tensor, Tensor]
    """Token ids and positions of the model's call."""
    num_calls: int
    """Layers that called."""


class VarlenPlan:
    """Attention over packed trees by one call of varlen_attn: a segment's queries see the keys of
    its path, which are gathered root first. Of trajectories that share nothing every path is its
    own segment, and nothing is gathered."""

    def __init__(self, batch: TreeBatch) -> None:
        device = batch.token_ids.device
        self.inputs = batch.token_ids, batch.position_ids
        self.num_calls = 0
        nodes = [node for tree in batch.trees for node in tree.nodes]
        paths = paths_of(nodes)
        self._own = [node.end - node.start for node in nodes]
        self._seen = [sum(node.end - node.start for node in path) for path in paths]
        self._keys: Tensor | None = None
        if self._own != self._seen:
            spans = [torch.arange(node.start, node.end) for path in paths for node in path]
            self._keys = torch.cat(spans).to(device)
        self._borders = [
            torch.tensor([0, *lengths]).cumsum(0).int().to(device)
            for lengths in (self._own, self._seen)
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [tokens, heads, width]; windows, caps and sinks are not supported."""
        self.num_calls += 1
        if self._keys is not None:
            key = key.index_select(1, self._keys)
            value = value.index_select(1, self._keys)
        if query.is_cuda and query.dtype.itemsize == 2:
            return self._varlen(query, key, value, options.scaling)
        return self._segment_by_segment(query, key, value, options.scaling)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        q, k, v = (one.transpose(0, 1).contiguous() for one in (query, key, value))
        of_queries, of_keys = self._borders
        # From torch 2.12 on, heads that share keys have to be announced; 2.11 takes them as they
        # are.
        shared: dict[str, Any] = {"enable_gqa": True} if _ANNOUNCES_GROUPS else {}
        # A causal call is aligned to the last query and the last key.
        found: Any = varlen_attn(
            q,
            k,
            v,
            of_queries,
            of_keys,
            max(self._own),
            max(self._seen),
            scale=scale,
            window_size=(-1, 0),
            **shared,
        )
        return found  # type: ignore[no-any-return]

    def _segment_by_segment(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        heads = query.shape[0] // key.shape[0]
        # Without a matrix unit for bfloat16, a processor takes several times as long in it.
        is_slow = query.dtype == torch.bfloat16 and not torch.cpu._is_amx_tile_supported()
        dtype = torch.float32 if is_slow else query.dtype
        parts = zip(
            query.to(dtype).split(self._own, dim=1),
            key.to(dtype).repeat_interleave(heads, dim=0).split(self._seen, dim=1),
            value.to(dtype).repeat_interleave(heads, dim=0).split(self._seen, dim=1),
            strict=True,
        )
        found = [_causal(q, k, v, scale) for q, k, v in parts]
        return torch.cat(found, dim=1).transpose(0, 1).to(query.dtype)


_ANNOUNCES_GROUPS = "enable_gqa" in (varlen_attn.__kwdefaults__ or {})


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[heads, queries, width] of the last tokens of a path on all of them."""
    own = query.shape[1]
    seen = key.shape[1]
    mask = None
    if own != seen:
        mask = torch.ones(own, seen, dtype=torch.bool, device=query.device).tril(seen - own)
    found = functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return found[0]


def _backward(head: OutputHead, hidden: Tensor, batch: TreeBatch) -> None:
    """Adds the gradients of Σ advantage · log-probability.

    Args:
        hidden: [U, width] states that predict the sampled tokens.
    """
    targets = batch.token_ids[batch.sampled]
    logprobs = chunked_scores(head, hidden, targets, batch.temperatures, VOCAB_CHUNK)[0]
    (logprobs.index_select(0, batch.tokens) * batch.advantages).sum().backward()


class PackedArm:
    """Trees in packs, with the attention that `plan_of` makes for each."""

    def __init__(
        self, model: Any, trees: Sequence[Tree], max_tokens: int, plan_of: Callable[..., Plan]
    ) -> None:
        self._model = model
        self._plan_of = plan_of
        self._head = OutputHead(model)
        parts = [part for tree in trees for part in split_tree(tree, max_tokens)]
        groups = plan_packs([num_tree_tokens(part) for part in parts], max_tokens)
        device = base_model(model).device
        self._batches = [pack_trees([parts[n] for n in group], device=device) for group in groups]

    def run(self) -> None:
        """Adds the gradients of Σ advantage · log-probability over trajectories and tokens."""
        install_attention(self._model)
        for batch in self._batches:
            # In each pass anew, as the learner does.
            plan = self._plan_of(batch)
            token_ids, positions = plan.inputs
            hidden = decoder(self._model)(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                attention_plan=plan,
            ).last_hidden_state[0]
            layers = base_model(self._model).config.num_hidden_layers
            if plan.num_calls != layers:
                raise RuntimeError(f"{plan.num_calls} of {layers} layers called the attention")
            _backward(self._head, hidden.index_select(0, batch.sources), batch)


class PaddedArm:
    """Rows of one length, the longest trajectory's of their micro-batch, through the plain model
    of transformers."""

    def __init__(self, model: Any, trees: Sequence[Tree], max_tokens: int) -> None:
        self._model = model
        self._head = OutputHead(model)
        # By length, so that a micro-batch is padded as little as it can be.
        paths = sorted(apart(trees), key=num_tree_tokens)
        batches: list[list[Tree]] = [[]]
        for path in paths:
            if (len(batches[-1]) + 1) * num_tree_tokens(path) > max_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(path)
        self._batches = [self._padded(batch) for batch in batches]

    def _padded(self, paths: Sequence[Tree]) -> tuple[Tensor, TreeBatch, Tensor]:
        """Token ids [rows, longest], the rows as packed ones, and the place of each packed token
        among the padded ones."""
        device = base_model(self._model).device
        batch = pack_trees(paths, device=device)
        lengths = [num_tree_tokens(path) for path in paths]
        longest = max(lengths)
        places = torch.cat([n * longest + torch.arange(size) for n, size in enumerate(lengths)])
        token_ids = torch.zeros(len(paths) * longest, dtype=torch.long)
        token_ids[places] = batch.token_ids.cpu()
        return token_ids.view(len(paths), longest).to(device), batch, places.to(device)

    def run(self) -> None:
        """Adds the gradients of Σ advantage · log-probability over trajectories and tokens."""
        base_model(self._model).set_attn_implementation("sdpa")
        for token_ids, batch, places in self._batches:
            # Padding is behind a row's tokens, where a causal mask hides it.
            hidden = decoder(self._model)(input_ids=token_ids, use_cache=False).last_hidden_state
            _backward(
                self._head, hidden.flatten(0, 1).index_select(0, places[batch.sources]), batch
            )


class Arm(Protocol):
    """One way to learn."""

    def run(self) -> None:
        """Adds the gradients of Σ advantage · log-probability over trajectories and tokens."""


def arms(model: Any, trees: Sequence[Tree], max_tokens: int) -> Mapping[str, Callable[[], Arm]]:
    """Returns the makers of the arms by their names.

    Args:
        max_tokens: of one micro-batch; a single longer trajectory goes alone.
    """
    found: dict[str, Callable[[], Arm]] = {
        ROWS: lambda: PackedArm(model, apart(trees), max_tokens, VarlenPlan),
        PACKED: lambda: PackedArm(model, trees, max_tokens, own_plan(WIDE)),
        "gathered keys": lambda: PackedArm(model, trees, max_tokens, VarlenPlan),
        "prompt once": lambda: PackedArm(model, prompt_once(trees), max_tokens, own_plan(WIDE)),
        "padded": lambda: PaddedArm(model, trees, max_tokens),
    }
    if torch.cuda.is_available():
        found["packed, torch's tiles"] = lambda: PackedArm(model, trees, max_tokens, own_plan(None))
    return found


def own_plan(tiles: Mapping[str, int] | None) -> Callable[[TreeBatch], Plan]:
    """Returns the maker of Treegraft's attention, on a GPU FlexAttention with these tiles of its
    backward program, whether it has been proven or not."""
    if not torch.cuda.is_available():
        return PackedPlan
    flex = compiled_flex()

    def tiled(*inputs: Any, **options: Any) -> Tensor:
        return flex(*inputs, **options | {"kernel_options": tiles})

    return partial(PackedPlan, flex=tiled)


def gradients(model: Any, arm: Arm) -> dict[str, Tensor]:
    """Returns the gradients of one run by the names of the weights, and leaves none."""
    model.zero_grad(set_to_none=True)
    arm.run()
    found = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Returns ‖g - g'‖ / ‖g'‖ over all weights."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"gradients of different weights: {set(ours) ^ set(theirs)}")
    squares = [
        torch.stack(
            [(ours[name].double() - one.double()).square().sum(), one.double().square().sum()]
        )
        for name, one in theirs.items()
    ]
    off, norm = torch.stack([one.cpu() for one in squares]).sum(dim=0).tolist()
    return float((off / norm) ** 0.5)
