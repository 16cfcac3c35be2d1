"""Forward passes of the native engine: our own for decoders of Llama's shape, transformers' with
our attention for the others.

Ours runs each layer as four matrix products, with query, key and value in one and gate and up in
another, and our kernels between them. It is taken where the model's modules have that shape and its
hidden states prove to be those of a plain forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from treegraft.policy.attention_hook import (
    AttentionOptions,
    AttentionPlan,
    install_attention,
    plain_attention,
    structure_problem,
    tree_attention,
)
from treegraft.policy.engine.blocks import BlockPool, PathCache
from treegraft.policy.engine.packed import LaidOutLinears, Product, product_kind, take_over
from treegraft.policy.engine.ragged import RaggedPlan, Segment
from treegraft.policy.kernels.engine import Kernels, kernels_for
from treegraft.policy.output_head import decoder, first_line, head_problem, layer_heads

_log = logging.getLogger(__name__)

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = ("q_norm", "k_norm")
PROBE_LENGTH = 75
PROBE_CUTS = (64, 10, 1)
"""The path that a forward pass is tried on: two blocks, taken in as a block, a chunk and a single
token."""


class Forward(Protocol):
    """Hidden states of a ragged batch."""

    @property
    def kernels(self) -> Kernels | None: ...

    @property
    def is_rowwise(self) -> bool:
        """Whether a row's bits, those of its logits too, do not depend on the number of rows
        (batch-invariant)."""

    def __call__(self, ids: Tensor, positions: Tensor, plan: RaggedPlan) -> Tensor:
        """Returns [tokens, hidden size], the decoder's last norm included, for ids and positions
        [tokens]."""

    def refresh(self) -> None:
        """Reads the weights again after they changed in place."""


class HookedForward:
    """transformers' own layers with our attention in them."""

    is_rowwise = False

    def __init__(self, model: Any, kernels: Kernels | None, *, pack: bool = True) -> None:
        """Packs the model's products; a trial that may leave no trace does not."""
        self.kernels: Kernels | None = kernels
        install_attention(model)
        self._decoder = decoder(model)
        self._products = take_over(model.modules(), product_kind(model, kernels)) if pack else []

    def __call__(self, ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        output = self._decoder(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_plan=plan
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def refresh(self) -> None:
        for product in self._products:
            product.refresh()


class _Layer:
    """The products, norms and options of one layer."""

    def __init__(self, layer: Any, product: Callable[..., Product]) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self.in_norm = layer.input_layernorm
        self.out_norm = layer.post_attention_layernorm
        self.head_norms = _head_norms(attention)
        # No soft cap and no sinks: decoders of Llama's shape have neither.
        self.options = AttentionOptions(attention.scaling, _window(attention), None, None)
        self.project = product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.join = product(attention.o_proj)
        self.widen = product(mlp.gate_proj, mlp.up_proj)
        self.narrow = product(mlp.down_proj)
        self.products = (self.project, self.join, self.widen, self.narrow)


class FusedForward:
    """A decoder of Llama's shape as matrix products and kernels."""

    def __init__(self, model: Any, kernels: Kernels) -> None:
        """The model's `shape_problem` must be None."""
        inner = decoder(model)
        attention = inner.layers[0].self_attn
        self.kernels: Kernels | None = kernels
        self._kernels = kernels
        self._embed = inner.embed_tokens
        self._rotary = inner.rotary_emb
        self._last_norm = inner.norm
        self._width = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._sizes = tuple(linear.out_features for linear in projections)
        kind = product_kind(model, kernels)
        self.layers = [_Layer(layer, kind) for layer in inner.layers]
        # The head too: with a large vocabulary it is the largest product of a pass.
        self._output = model.get_output_embeddings()
        self._head = take_over([self._output], kind)
        self.is_rowwise = bool(self._head) and isinstance(self._head[0], LaidOutLinears)

    def __call__(self, ids: Tensor, positions: Tensor, plan: RaggedPlan) -> Tensor:
        state = functional.embedding(ids, self._embed.weight)
        cosines, sines = (
            part[0].contiguous()
            for part in self._rotary(state.new_zeros(1, dtype=torch.float32), positions[None])
        )
        # Each norm also adds the block's output to the residual `state`: one reading of memory for
        # both, and on a CPU memory is the limit.
        rows = self._norm(state, None, self.layers[0].in_norm)
        for index, layer in enumerate(self.layers):
            # Views of one product; the kernels take strides, so nothing is copied.
            query, key, value = layer.project(rows).split(self._sizes, dim=-1)
            query, key, value = (x.unflatten(-1, (-1, self._width)) for x in (query, key, value))
            # Before the rotation, as in Qwen3; without such norms the loop is empty.
            for part, norm in zip((query, key), layer.head_norms, strict=False):
                self._kernels.norm_heads(part, norm.weight, norm.variance_epsilon)
            seen = plan.attend(
                index,
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                layer.options,
                (cosines, sines),
            )
            rows = self._norm(state, layer.join(seen.flatten(1)), layer.out_norm)
            # One product for both, which reads the input once.
            gate, up = layer.widen(rows).chunk(2, dim=-1)
            is_last = index + 1 == len(self.layers)
            following = self._last_norm if is_last else self.layers[index + 1].in_norm
            rows = self._norm(state, layer.narrow(self._kernels.gate(gate, up)), following)
        return rows

    def _norm(self, state: Tensor, added: Tensor | None, norm: Any) -> Tensor:
        return self._kernels.norm(state, added, norm.weight, norm.variance_epsilon)

    def refresh(self) -> None:
        for layer in self.layers:
            for product in layer.products:
                product.refresh()
        for product in self._head:
            product.refresh()

    def give_back(self) -> None:
        """Leaves the model as it was."""
        # The head's `forward` is the only thing that was set on the model itself.
        self._output.__dict__.pop("forward", None)


def shape_problem(model: Any) -> str | None:
    """Returns why a decoder is not of Llama's shape, or None where it is."""
    inner = decoder(model)
    # A scale that begins to act far beyond the probe's path, so the probe would not show it.
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in rope:
        return "its queries are scaled by their position"
    if not {"embed_tokens", "layers", "norm", "rotary_emb"} <= dict(inner.named_children()).keys():
        return "its decoder has other parts"
    return next(filter(None, map(_layer_problem, inner.layers)), None)


def _window(attention: Any) -> int | None:
    """The layer's own, or where it names none that of the whole model (Mistral)."""
    window: int | None = getattr(
        attention, "sliding_window", getattr(attention.config, "sliding_window", None)
    )
    return window


def _head_norms(attention: Any) -> list[Any]:
    return [getattr(attention, name) for name in HEAD_NORMS if hasattr(attention, name)]


def _layer_problem(layer: Any) -> str | None:
    # By the sets of parts, not by the classes' names: families that copy Llama's layer are many,
    # and one with a part more (a norm behind attention, a router) must not pass.
    if dict(layer.named_children()).keys() != LAYER_PARTS:
        return "its layers have other parts"
    attention = layer.self_attn
    mlp = layer.mlp
    parts = dict(attention.named_children()).keys()
    if parts not in (ATTENTION_PARTS, ATTENTION_PARTS | set(HEAD_NORMS)):
        return "its attention has other parts"
    # The kernel `gate` computes silu and nothing else.
    if type(getattr(mlp, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        return "its activation is not silu"
    places = [(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    places += [(attention, name) for name in ATTENTION_PARTS]
    for owner, name in places:
        # Not isinstance: a quantized layer or an adapter computes something else.
        if type(getattr(owner, name, None)) is not nn.Linear:
            return "its products are not plain linear layers"
    head_norms = _head_norms(attention)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, *head_norms):
        if not hasattr(norm, "variance_epsilon") or norm.weight.dim() != 1:
            return "its norms are of another kind"
    for norm in head_norms:
        if norm.weight.numel() != attention.head_dim:
            return "its norms of queries and keys go over all heads"
    # There the window is in the configuration alone, and a layer may or may not obey it.
    if not hasattr(attention, "sliding_window") and (_window(attention) or 0) >= PROBE_LENGTH:
        return "its sliding window is longer than the path that it could be tried on"
    return None


def build_forward(model: Any) -> tuple[Forward | None, str | None]:
    """Returns the fastest forward pass that proves right, with the reason why there is none.

    The model is changed (attention, packed products) only where one is returned.
    """
    # The reference first, while the model is still untouched.
    with plain_attention(model):
        if problem := head_problem(model):
            return None, problem
        plain = _plain_states(model)
    kernels = model_kernels(model)
    if kernels is not None and shape_problem(model) is None:
        fused = FusedForward(model, kernels)
        if (problem := _distance_problem(model, fused, plain)) is None:
            return fused, None
        fused.give_back()
        _log.info("engine: layers run in transformers' own way: %s", problem)
    problem = _hooked_problem(model, kernels, plain)
    # A wrong kernel costs speed, not the run.
    if problem is not None and kernels is not None:
        _log.warning(
            "engine: running on torch's operators alone, which is slower: with our kernels %s",
            problem,
        )
        kernels = None
        problem = _hooked_problem(model, None, plain)
    # Only now packed and installed: a model that is refused stays as it came.
    forward = None if problem is not None else HookedForward(model, kernels)
    return forward, problem


def _hooked_problem(model: Any, kernels: Kernels | None, plain: Tensor) -> str | None:
    with tree_attention(model):
        return _distance_problem(model, HookedForward(model, kernels, pack=False), plain)


def model_kernels(model: Any) -> Kernels | None:
    """Returns the kernels for the width of the model's heads and its type; None where there are
    none, or layers differ in it."""
    try:
        (width,) = {width for _, width in layer_heads(model.config.get_text_config())}
    except (AttributeError, TypeError, ValueError):
        return None
    return kernels_for(width, model.dtype, model.device.type)


def _probe_ids(model: Any) -> Tensor:
    ids: Tensor = (
        torch.arange(PROBE_LENGTH, device=model.device) * 7 + 3
    ) % model.config.get_text_config().vocab_size
    return ids


@torch.inference_mode()
def _plain_states(model: Any) -> Tensor:
    states: Tensor = decoder(model)(
        input_ids=_probe_ids(model)[None], use_cache=False
    ).last_hidden_state[0]
    return states


@torch.inference_mode()
def _distance_problem(model: Any, forward: Forward, plain: Tensor) -> str | None:
    """Why a forward pass is not to be used on this model: a path in three parts is run against one
    plain pass."""
    ids = _probe_ids(model)
    parts = []
    try:
        # No memory to spare is needed: a path that is alone may exceed the limit.
        cache = PathCache(BlockPool(model, max_bytes=0.0), max_rows=1)
        row = cache.open(ids.tolist(), PROBE_LENGTH)
        assert row is not None
        for count in PROBE_CUTS:
            cache.extend(row, count)
            segments = [Segment(row, count, 0)]
            plan = RaggedPlan(count, cache.pool, cache.table, segments, forward.kernels)
            parts.append(forward(*plan.inputs(ids.device), plan))
            cache.fed(row, count)
        states = torch.cat(parts)
        if problem := structure_problem(model, plan.num_calls):
            return problem
    # From a layer that was written for other arguments, or a configuration without attention.
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"its layers do not take our attention ({first_line(error)})"
    gap = float((states.float() - plain.float()).norm() / plain.float().norm())
    # The largest that is rounding; compared this way round, so that NaN is a problem.
    if gap <= (1e-4 if model.dtype == torch.float32 else 0.05):
        return None
    return (
        f"its hidden states differ from those of a plain forward pass by {gap:.3g} of their length"
    )
