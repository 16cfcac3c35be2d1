"""One pass shared by several ranks: each runs the layers on a part of the tokens, and attention on
a part of the heads.

    rank   before attention            in attention                after it
    0      tokens 0..t, all heads      all tokens, heads 0..h      tokens 0..t, all heads
    1      tokens t..2t, all heads     all tokens, heads h..2h     tokens t..2t, all heads

Between them queries, keys, values and results change places (DeepSpeed-Ulysses, arXiv
2309.14509). The plan of the whole pack stays what it is, and with it masks and kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from treegraft.policy.head import decoder
from treegraft.policy.hook import AttentionOptions, AttentionPlan
from treegraft.policy.learn.flex import BLOCK
from treegraft.policy.learn.pack import Node, PackedTree, TreeBatch
from treegraft.policy.learn.scored import Scored
from treegraft.policy.learn.scores import Scores, chunked_argmax, chunked_scores
from treegraft.policy.learn.tree_attention import PackedPlan
from treegraft.settings.policy import LearnSettings


class Exchange:
    """An attention plan of all tokens for ranks that hold a part of them each."""

    def __init__(self, plan: AttentionPlan, group: dist.ProcessGroup) -> None:
        self._plan, self._group = plan, group

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [own tokens, heads, width] for query [heads, own tokens, width] and key, value
        [kv heads, own tokens, width]."""
        if options.sinks is not None:
            size = len(options.sinks) // self._group.size()
            rank = self._group.rank()
            options = replace(options, sinks=options.sinks[rank * size : (rank + 1) * size])
        query, key, value = (self._to_heads(part) for part in (query, key, value))
        return self._to_tokens(self._plan.attend(layer, query, key, value, options))

    def _to_heads(self, part: Tensor) -> Tensor:
        """[heads, own tokens, width] -> [own heads, tokens, width]"""
        heads, tokens, width = part.shape
        size = self._group.size()
        mine = self._changed(part.reshape(size, heads // size, tokens, width))
        return mine.transpose(0, 1).reshape(heads // size, size * tokens, width)

    def _to_tokens(self, part: Tensor) -> Tensor:
        """[tokens, own heads, width] -> [own tokens, heads, width]"""
        tokens, heads, width = part.shape
        size = self._group.size()
        mine = self._changed(part.reshape(size, tokens // size, heads, width))
        return mine.permute(1, 0, 2, 3).reshape(tokens // size, size * heads, width)

    def _changed(self, parts: Tensor) -> Tensor:
        """[ranks, ...]: part n goes to rank n of the group, and its part comes to place n."""
        found: Tensor = _Changed.apply(parts, self._group)  # type: ignore[no-untyped-call]
        return found


class _Changed(torch.autograd.Function):
    """Part n of [ranks, ...] goes to rank n, forward the values and backward their gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _changed(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _changed(grads[0], ctx.group), None


def _changed(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(found, parts.contiguous(), group=group)
    return found


class _Joined(torch.autograd.Function):
    """Values of which each rank has computed some, whole on every rank.

    Every rank computes the same loss from them, so each takes the gradient of its own ones from its
    own loss.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        found = own.new_zeros(count).index_copy_(0, places, own)
        # A sum with zeros, so exact.
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None, None


def widened(batch: TreeBatch, size: int) -> TreeBatch:
    """Returns the batch with so many tokens at its end, which nothing sees, that `size` divides
    their number."""
    count, missing = batch.num_tokens, -batch.num_tokens % size
    if not missing:
        return batch
    end = count + missing
    blank = PackedTree(count, end, (Node(count, end, end),))
    return replace(
        batch,
        token_ids=functional.pad(batch.token_ids, (0, missing)),
        position_ids=functional.pad(batch.position_ids, (0, missing)),
        trees=(*batch.trees, blank),
    )


def shared_hidden(
    model: nn.Module, batch: TreeBatch, group: dist.ProcessGroup, *, compile_kernels: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns (hidden [own, width], places [own]): the hidden states that predict sampled tokens
    and then lesson tokens, of those that this rank has, and which ones they are.

    Args:
        group: the ranks that share the pass, all of which call this with the same batch.
    """
    # On a GPU the plan would pad once more, to whole blocks.
    unit = BLOCK if batch.token_ids.device.type == "cuda" else 1
    wide = widened(batch, math.lcm(group.size(), unit))
    share = wide.num_tokens // group.size()
    first = share * group.rank()
    output = decoder(model)(
        input_ids=wide.token_ids[None, first : first + share],
        position_ids=wide.position_ids[None, first : first + share],
        use_cache=False,
        attention_plan=Exchange(PackedPlan(wide, compile_kernels=compile_kernels), group),
    )
    hidden: Tensor = output.last_hidden_state[0]
    sources = batch.sources
    if batch.lessons is not None:
        sources = torch.cat([sources, batch.lessons.sources])
    places = ((sources >= first) & (sources < first + share)).nonzero()[:, 0]
    return hidden.index_select(0, sources[places] - first), places


class SharedScored(Scored):
    """`Scored` of a group of ranks, each of which gets all results of a pass that they share."""

    def __init__(self, model: Any, settings: LearnSettings, group: dist.ProcessGroup) -> None:
        super().__init__(model, settings)
        self._group = group

    def forward(
        self, batch: TreeBatch, *, takes_lessons: bool = False, wants_argmax: bool = False
    ) -> Scores | Tensor:
        """As `Scored.forward`."""
        targets, temperatures = self._wanted(batch, takes_lessons)
        count, chunk = targets.numel(), self._settings.vocab_chunk
        hidden, places = shared_hidden(
            self.model, batch, self._group, compile_kernels=self._settings.compile_kernels
        )
        # Lesson tokens come last, so those that are not asked for can be cut off.
        is_wanted = places < count
        hidden, places = hidden[is_wanted], places[is_wanted]
        if wants_argmax:
            best = torch.zeros(count, dtype=torch.long, device=hidden.device)
            best[places] = chunked_argmax(self._head, hidden, chunk)
            dist.all_reduce(best, group=self._group)
            return best
        own = chunked_scores(self._head, hidden, targets[places], temperatures[places], chunk)
        logprobs, entropies = (
            _Joined.apply(column, places, count, self._group)  # type: ignore[no-untyped-call]
            for column in own
        )
        return logprobs, entropies
