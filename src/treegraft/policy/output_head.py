"""A model's parts: decoder, head, end tokens, longest context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, its type's name where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def base_model(model: nn.Module) -> Any:
    """Returns the transformers model itself, without a LoRA wrapper (adapters stay inside it)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def decoder(model: nn.Module) -> Any:
    """Returns the part of the model that ends in hidden states."""
    inner = base_model(model)
    found = inner.base_model
    # Llama 4's does not have the name that the model says.
    return inner.model if found is inner and hasattr(inner, "model") else found


class OutputHead:
    """From hidden states to logits, with the model's own tail (scale, soft-cap), found by comparing
    on a few tokens."""

    def __init__(self, model: nn.Module) -> None:
        inner = base_model(model)
        self._project = inner.get_output_embeddings()
        config = inner.config.get_text_config()
        # Read from the configuration instead of running the model's own head: that one would make
        # the logits of every position at once. Granite divides, Cohere multiplies.
        self._divisor = float(getattr(config, "logits_scaling", None) or 1.0) / float(
            getattr(config, "logit_scale", None) or 1.0
        )
        self._softcap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns [rows, vocabulary] for hidden [rows, width]."""
        logits: Tensor = self._project(hidden)
        # Division by 1 would be exact too, but is a copy of all logits.
        if self._divisor != 1.0:
            logits = logits / self._divisor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


@torch.no_grad()
def head_problem(model: nn.Module) -> str | None:
    """Returns why `OutputHead` does not reproduce the model's logits, or None where it does."""
    inner = base_model(model)
    ids = torch.arange(8, device=inner.device)[None] % inner.config.get_text_config().vocab_size
    whole = inner(input_ids=ids, use_cache=False).logits[0].float()
    ours = OutputHead(model)(
        decoder(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
    ).float()
    gap = float((whole - ours).abs().max())
    # A missing scale or soft-cap shows in whole units; a rounding of bfloat16 logits stays below.
    limit = 1e-3 if inner.dtype == torch.float32 else 0.25
    if gap <= limit:
        return None
    return f"logits differ by up to {gap:.3g} from hidden states times output embeddings"


def end_token_ids(model: nn.Module, eos_token_id: int | None) -> tuple[int, ...]:
    """Returns every token that ends a completion: the tokenizer's `eos_token_id` and those of the
    model's generation settings."""
    # Chat models end a turn with a token of their own, which only these settings name.
    generation = getattr(base_model(model), "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    more = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({token for token in (eos_token_id, *more) if token is not None}))


def layer_heads(config: Any) -> list[tuple[int, int]]:
    """Returns (heads of keys and values, width of a head) of each layer, by the configuration of
    the text model; raises AttributeError where it has no attention heads."""
    # Gemma 4's layers differ in them.
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    found = []
    for layer in layers:
        heads = layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        found.append((getattr(layer, "num_key_value_heads", None) or heads, width))
    return found


def max_context(model: nn.Module) -> int | None:
    """Returns the longest path in tokens, or None where the model names none.

    Where positions past a first stretch change the rotation of all others ("longrope"), that
    stretch is the limit: keys of one path would depend on how long another one is.
    """
    config = base_model(model).config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limits.append(rope.get("original_max_position_embeddings"))
    return min((int(limit) for limit in limits if limit), default=None)
