"""The one hook through which engine and learner replace a model's attention.

transformers hands every keyword argument of `model(...)` down to the attention function of each
layer. We register one function, which passes the layer's queries, keys and values to whatever plan
stands in the argument `attention_plan`: the engine's (ragged rows over a shared prompt) or the
learner's (packed trees). No mask function is registered, so none is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from treegraft.core.errors import ModelError
from treegraft.policy.output_head import base_model

ATTENTION = "treegraft"
MASKED = -1e30
"""Score of an invisible token: finite, so that a row that sees nothing of a part gives no NaN."""
SPAN = 256
"""Positions that one matrix product sums over: beyond some 384, float32 products split their sums
by the total length."""
Partial = tuple[Tensor, Tensor, Tensor]
"""Maximum, sum and weighted values of softmax attention over one part of the keys, [..., rows, 1 or
width]."""


class AttentionPlan(Protocol):
    """The attention that engine and learner put in the place of a layer's own."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Returns [tokens, heads, width] for query [heads, tokens, width] and key, value [kv heads,
        tokens, width]."""


# Not frozen: one is made for each layer of each pass, and setting its fields would cost more.
@dataclass(slots=True, eq=False)
class AttentionOptions:
    """The options of a layer's attention beside queries, keys and values."""

    scaling: float
    window: int | None
    """Sliding window in tokens: key j is visible to query i only if position_i - position_j <
    window. None: no window."""
    softcap: float | None
    """Scores become softcap * tanh(score / softcap). None: not."""
    sinks: Tensor | None
    """[heads] an extra logit per head that takes probability and gives no value. None: none."""


def _hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_plan is None:
        raise ModelError(
            "the model's attention is Treegraft's, but it was called without a plan; "
            "call it through the engine or the learner, or restore its own attention first",
            code="attention-without-plan",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    output = attention_plan.attend(int(module.layer_idx), query[0], key[0], value[0], options)  # type: ignore[arg-type]
    return output[None], None


def install_attention(model: nn.Module) -> None:
    """Puts our hook into every attention layer of `model`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _hook)
    base_model(model).set_attn_implementation(ATTENTION)


@contextmanager
def tree_attention(model: nn.Module) -> Iterator[None]:
    """Our hook inside the block, the model's own attention after it."""
    inner = base_model(model)
    before = inner.config._attn_implementation
    install_attention(model)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Transformers' own attention inside the block, written out; the model's present one after
    it."""
    inner = base_model(model)
    before = inner.config._attn_implementation
    # Not "sdpa": earlier versions (5.17) leave out the cap of Gemma 2's scores there.
    inner.set_attn_implementation("eager")
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


def structure_problem(model: nn.Module, num_calls: int) -> str | None:
    """Returns why tokens of a model see each other by other ways than our attention, None where
    they do not. In bfloat16, and on a short path, numbers alone do not show it.

    Args:
        num_calls: layers that called our attention in one pass.
    """
    inner = base_model(model)
    config = inner.config.get_text_config()
    # A layer of another kind (linear attention, convolution) ignores ours without an error.
    if num_calls != config.num_hidden_layers:
        return f"{num_calls} of its {config.num_hidden_layers} layers called our attention"
    if any(isinstance(module, nn.Conv1d) for module in inner.get_decoder().modules()):
        return "its layers have convolutions over tokens beside attention"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention is cut into chunks"
    return None


ROWS = 32
"""Queries of a float32 product on a CPU come in multiples of it, so that a row has the same bits in
any company: the matrix library cuts rows into tiles, threads cut them once more, and the rows of an
incomplete tile take another path. 4 would do for most widths and numbers of threads that were
tried; of none was a smaller multiple than 32 steadier."""


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions
) -> Partial:
    """Returns maximum, sum and weighted values (float32) of softmax attention over one part of the
    keys.

    query [..., rows, width], key and value [..., positions, width], visible bool broadcastable to
    [..., rows, positions]. A row that sees nothing gets a maximum of `MASKED`, which weighs nothing
    when merged. In float32 on a CPU a row's result depends neither on the other rows nor on
    invisible positions after its own.
    """
    count = query.shape[-2]
    # Rows of zeros, which see nothing of their own and are cut off again below.
    missing = -count % ROWS if query.is_cpu and query.dtype == torch.float32 else 0
    if missing > 0:
        query = functional.pad(query, (0, 0, 0, missing))
        visible = visible if visible.shape[-2] == 1 else functional.pad(visible, (0, 0, 0, missing))
    scores = (query @ key.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~visible, MASKED)
    peak = scores.amax(dim=-1, keepdim=True)
    # Masked once more: in a row that sees nothing, each score is the peak, and its weight 1.
    weights = torch.exp(scores - peak).masked_fill(~visible, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights.to(value.dtype)
    # Span by span in a fixed order, so that the sum does not depend on the path's length.
    weighted = (weights[..., :SPAN] @ value[..., :SPAN, :]).float()
    for start in range(SPAN, value.shape[-2], SPAN):
        weighted = (
            weighted
            + (weights[..., start : start + SPAN] @ value[..., start : start + SPAN, :]).float()
        )
    return peak[..., :count, :], total[..., :count, :], weighted[..., :count, :]


def merge_partials(parts: list[Partial], sinks: Tensor | None) -> Tensor:
    """Returns the attention output of parts with equal shapes [..., rows, width]; `sinks` broadcast
    to [..., rows, 1]."""
    peaks = [part[0] for part in parts] + ([] if sinks is None else [sinks])
    # The common maximum, so that no exponential overflows whichever part holds it.
    peak = functools.reduce(torch.maximum, peaks)
    total = torch.zeros_like(peak) if sinks is None else torch.exp(sinks - peak)
    output: Tensor | float = 0.0
    for part_peak, part_sum, part_values in parts:
        factor = torch.exp(part_peak - peak)
        total = total + factor * part_sum
        output = output + factor * part_values
    return output / total
