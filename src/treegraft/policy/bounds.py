"""What a card could do at best: bytes and operations of sampling and learning by a model's shape.

With N weights of b bytes in n layers of width h, H query heads and K key-value heads of width d and
V words:

    keys and values of a token   n · 2 · K · d · b bytes
    decoding step                N' · b + rows · tokens · (keys and values of a token) bytes
    forward pass of a token      2 · (N - E) + 2 · s · V · h + 4 · n · H · d · v operations

N' are the weights that a step reads (of the input embeddings it reads a row a token, so they do not
count unless they are the head too), E those of embeddings and head, s the share of tokens that are
scored, v how many tokens a token sees on average. A backward pass takes twice a forward pass;
activations that are computed again are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """ModelShape(num_weights=9000, num_layers=2, num_kv_heads=1, head_dim=8, hidden_size=16,
    vocab_size=100)"""

    num_weights: int
    """A head that is tied to the embeddings counts once."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    num_heads: int = 0
    """0 where not known: hidden_size / head_dim is taken."""
    intermediate_size: int = 0
    """0 where not known: 4 times the width is taken."""
    is_tied: bool = False

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
            intermediate_size=fields.get("intermediate_size") or 0,
            is_tied=bool(fields.get("tie_word_embeddings")),
        )

    @property
    def inner_width(self) -> int:
        """Width of the feed-forward part."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def query_width(self) -> int:
        """Query heads times their width."""
        return self.num_heads * self.head_dim or self.hidden_size

    @property
    def num_layer_weights(self) -> int:
        """Those of the layers: all but embeddings and head."""
        ends = self.vocab_size * self.hidden_size
        return self.num_weights - (ends if self.is_tied else 2 * ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Card(name="H100", flops=989e12, bandwidth=3.35e12, memory=80e9), by its data sheet."""

    name: str
    flops: float
    """Operations a second of dense bfloat16 products."""
    bandwidth: float
    """Bytes a second from its memory."""
    memory: float
    """Bytes."""


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card(name="H200", flops=989e12, bandwidth=4.8e12, memory=141e9),
        Card(name="H100", flops=989e12, bandwidth=3.35e12, memory=80e9),
        Card(name="A100", flops=312e12, bandwidth=2.04e12, memory=80e9),
        Card(name="L40S", flops=362e12, bandwidth=0.864e12, memory=48e9),
    )
}
"""The cards whose data sheets are known here, SXM where there are two kinds."""


def known_card(device_name: str) -> Card | None:
    """Returns the card whose name is part of the driver's, None for another."""
    return next((card for name, card in CARDS.items() if name in device_name), None)


def kv_bytes(shape: ModelShape, width: int) -> int:
    """Returns the bytes of one token's keys and values, `width` bytes a number."""
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * width


def decode_bytes(shape: ModelShape, num_rows: int, num_tokens: float, width: int) -> float:
    """Returns the bytes that one decoding step has to read: each weight, and each row's keys and
    values of `num_tokens`, once."""
    read = shape.num_layer_weights + shape.vocab_size * shape.hidden_size
    return read * width + num_rows * num_tokens * kv_bytes(shape, width)


def decode_bound(
    shape: ModelShape, num_rows: int, num_tokens: float, width: int, bandwidth: float
) -> float:
    """Returns the tokens a second that `bandwidth` (bytes a second) allows at best."""
    return num_rows * bandwidth / decode_bytes(shape, num_rows, num_tokens, width)


def forward_flops(shape: ModelShape, num_seen: float, scored_frac: float = 1.0) -> float:
    """Returns the operations of one token's forward pass.

    Args:
        num_seen: tokens that a token sees on average, itself included.
        scored_frac: share of the tokens whose logits are made, 0..1.
    """
    head = 2.0 * scored_frac * shape.vocab_size * shape.hidden_size
    attention = 4.0 * shape.num_layers * shape.query_width * num_seen
    return 2.0 * shape.num_layer_weights + head + attention


def model_flops_utilisation(
    shape: ModelShape,
    num_tokens: float,
    seconds: float,
    flops: float,
    *,
    num_seen: float,
    scored_frac: float = 1.0,
) -> float:
    """Returns the share of `flops` (operations a second) that forward and backward passes of
    `num_tokens` used, 0..1."""
    used = 3.0 * forward_flops(shape, num_seen, scored_frac) * num_tokens
    return used / (seconds * flops)
