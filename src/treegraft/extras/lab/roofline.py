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

from treegraft.parts import shapes


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


def decode_bytes(shape: shapes.ModelShape, num_rows: int, num_tokens: float, width: int) -> float:
    """Returns the bytes that one decoding step has to read: each weight, and each row's keys and
    values of `num_tokens`, once."""
    read = shape.num_layer_weights + shape.vocab_size * shape.hidden_size
    return read * width + num_rows * num_tokens * shape.kv_bytes(width)


def decode_bound(
    shape: shapes.ModelShape, num_rows: int, num_tokens: float, width: int, bandwidth: float
) -> float:
    """Returns the tokens a second that `bandwidth` (bytes a second) allows at best."""
    return num_rows * bandwidth / decode_bytes(shape, num_rows, num_tokens, width)


def forward_flops(shape: shapes.ModelShape, num_seen: float, scored_frac: float = 1.0) -> float:
    """Returns the operations of one token's forward pass.

    Args:
        num_seen: tokens that a token sees on average, itself included.
        scored_frac: share of the tokens whose logits are made, 0..1.
    """
    head = 2.0 * scored_frac * shape.vocab_size * shape.hidden_size
    attention = 4.0 * shape.num_layers * shape.query_width * num_seen
    return 2.0 * shape.num_layer_weights + head + attention


def model_flops_utilisation(
    shape: shapes.ModelShape,
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
