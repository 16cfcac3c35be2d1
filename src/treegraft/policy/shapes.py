"""The table of published model shapes (`shapes.toml`), for models of random weights."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar

from treegraft.core.errors import ModelError, nearest

VOCAB_CHUNK = 2048
"""Positions whose logits the learner has at once, 1 GB of float32 at 130,000 words. Of a pass with
more, they are computed twice."""

PREFIX = "shape:"
"""What model.path begins with where it names a shape."""


BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number, by model.dtype."""
_ROOMY_FLOATS = 3 * (1 << 27)
"""Numbers of the float32 copies while log-probabilities are made, see `learn.scores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model, such as ModelShape(num_weights=9000, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=8, hidden_size=16, inner_width=64, vocab_size=100)."""

    num_weights: int
    """A head that is tied to the embeddings counts once."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    inner_width: int
    """Of the feed-forward part."""
    is_tied: bool = False
    has_head_norms: bool = False
    """Whether each head of queries and keys has a norm, as in Qwen3."""
    RESERVED: ClassVar[float] = 2e9
    """Bytes of each card for the driver's context, kernels and fragments; a guess."""
    MARGIN: ClassVar[float] = 0.1
    """Share of the activations that is added to them, for what the formula does not count and for
    memory that the allocator cannot use."""

    @classmethod
    def of_config(cls, fields: Mapping[str, Any], num_weights: int) -> ModelShape:
        """Returns the shape for the fields of a config.json."""
        heads = fields["num_attention_heads"]
        return cls(
            num_weights=num_weights,
            num_layers=fields["num_hidden_layers"],
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            hidden_size=fields["hidden_size"],
            vocab_size=fields["vocab_size"],
            num_heads=heads,
            # As models without a field of this name have it.
            inner_width=fields.get("intermediate_size") or 4 * fields["hidden_size"],
            is_tied=bool(fields.get("tie_word_embeddings")),
            has_head_norms=str(fields.get("model_type")).startswith("qwen3"),
        )

    @classmethod
    def of_model(cls, model: Any) -> ModelShape:
        """Returns the shape of a model of transformers, also of one without weights."""
        num_weights = sum(weight.numel() for weight in model.parameters())
        return cls.of_config(model.config.get_text_config().to_dict(), num_weights)

    @property
    def query_width(self) -> int:
        """Query heads times their width."""
        return self.num_heads * self.head_dim

    @property
    def num_layer_weights(self) -> int:
        """Those of the layers: all but embeddings and head."""
        ends = self.vocab_size * self.hidden_size
        return self.num_weights - (ends if self.is_tied else 2 * ends)

    def kv_bytes(self, width: int) -> int:
        """Returns the bytes of one token's keys and values, `width` bytes a number."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * width

    @property
    def kept_width(self) -> int:
        """Numbers that autograd keeps of each token in each layer: 4 I + 2 Q + 2 K + 8 H.

        I, Q, K and H are the widths of the feed-forward part, of queries, of keys and of the layer.
        Kept are gate, activation, up and their product; queries and attention's output; keys and
        values; and for both norms the input in float32, which counts twice, the normed input and
        the output. Norms of queries and keys keep 3 Q + 3 K more.

        It is what `torch.autograd.graph.saved_tensors_hooks` counts for Llama, Qwen2 and Qwen3 in
        bfloat16 with FlexAttention, to 0.2 %. In float32 it is 2 H too much.
        """
        key = self.num_kv_heads * self.head_dim
        norms = 3 * (self.query_width + key) if self.has_head_norms else 0
        return 4 * self.inner_width + 2 * (self.query_width + key) + 8 * self.hidden_size + norms

    def activation_bytes(
        self, tokens: int, width: int, *, is_checkpointed: bool
    ) -> tuple[float, float]:
        """Returns (bytes of activations that all layers keep until the backward pass, bytes that it
        takes beside them in one layer at a time).

        The latter are that layer's gradients, 2 I + 2 H numbers a token, and what is computed again
        where layers keep their input alone.

        Args:
            tokens: unique ones of a pack.
            width: bytes of a number.
        """
        kept = self.kept_width
        passing = 2 * (self.inner_width + self.hidden_size)
        if is_checkpointed:
            kept, passing = self.hidden_size, passing + kept
        return self.num_layers * tokens * width * kept, tokens * width * passing

    def num_trained(self, config: Any) -> int:
        """Returns how many weights learn: all, or those of the adapters."""
        # Rank · (in + out) of the seven matrices of a layer: query and output, key and value, the
        # three of the feed-forward part.
        width = self.hidden_size
        key = self.num_kv_heads * self.head_dim
        ends = 2 * (width + self.query_width) + 2 * (width + key) + 3 * (width + self.inner_width)
        rank = config.model.lora.rank
        return self.num_layers * rank * ends if rank else self.num_weights

    def learner_parts(self, config: Any, ranks: int) -> dict[str, float]:
        """Returns the estimated bytes of each part of a learner on the GPU of one of `ranks` ranks.
        `treegraft doctor` prints them, and the native engine leaves room for them."""
        model = config.model
        learn = config.learn
        width = BYTES[model.dtype]
        trained = self.num_trained(config)
        is_one = ranks == 1
        weights = self.num_weights * width
        layer = self.num_layer_weights / self.num_layers
        frozen = (self.num_weights - trained if model.lora.rank else 0) * width
        tokens = learn.max_pack_tokens
        kept, passing = self.activation_bytes(
            tokens, width, is_checkpointed=model.gradient_checkpointing
        )
        rows = min(VOCAB_CHUNK, tokens)
        logits = 2 * rows * self.vocab_size * width
        floats = 4 * min(3 * rows * self.vocab_size, _ROOMY_FLOATS)
        has_reference = config.loss.kl_coef > 0 and not model.lora.rank
        parts: dict[str, float] = {
            "weights": weights if is_one else frozen / ranks,
            "masters": 4 * trained / ranks if width == 2 or not is_one else 0,
            "gradients": 4 * trained / ranks,
            "AdamW": 8 * trained / ranks,
            "reference": weights / ranks if has_reference else 0,
            "gathered layers": 0 if is_one else 2 * layer * width,
            "activations": (1 + self.MARGIN) * (kept + passing),
            # Gone before the layers' gradients come.
            "logits": max(0.0, logits + floats - passing),
            "reserved": self.RESERVED,
        }
        return {name: size for name, size in parts.items() if size}


@functools.cache
def shape_table() -> Mapping[str, Mapping[str, Any]]:
    """Returns the fields of a config.json by name of the shape."""
    file = resources.files("treegraft.policy") / "shapes.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def published_shape(path: str) -> dict[str, Any]:
    """Returns the fields for "shape:NAME".

    Raises:
        ModelError: there is no such shape.
    """
    name = path.removeprefix(PREFIX)
    table = shape_table()
    if name not in table:
        known = [PREFIX + one for one in table]
        raise ModelError(
            f"model.path: got '{path}', expected one of {', '.join(known)}.{nearest(path, known)}",
            code="unknown-shape",
        )
    # A copy, to which callers add fields of their own.
    return dict(table[name])


def shape_named(hub_id: str) -> str | None:
    """Returns "shape:NAME" for a model on a hub whose name begins with that of a published shape,
    such as "Qwen/Qwen2.5-7B-Instruct"; None if none does."""
    name = hub_id.rpartition("/")[2].lower()
    fits = [one for one in shape_table() if f"{name}-".startswith(f"{one}-")]
    return PREFIX + max(fits, key=len) if fits else None
