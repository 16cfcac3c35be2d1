"""Operations of a model's passes by its shape, and what cards do at best by their data sheets.

With N weights in n layers of width h, H query heads of width d and V words, the forward pass of a
token takes

    2 · (N - E) + 2 · s · V · h + 4 · n · H · d · v operations

E being the weights of embeddings and head, s the share of tokens that are scored, v how many tokens
a token sees on average. A backward pass takes twice a forward pass; activations that are computed
again are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from treegraft.policy.shapes import ModelShape


class Card(NamedTuple):
    """What a card does in a second at best. Card(flops=989e12, bandwidth=3.35e12)"""

    flops: float
    """Operations of dense bfloat16 products."""
    bandwidth: float
    """Bytes from its memory."""


CARDS: Mapping[str, Card] = {
    "H200": Card(989e12, 4.8e12),
    "H100": Card(989e12, 3.35e12),
    "A100": Card(312e12, 2.04e12),
    "L40S": Card(362e12, 0.864e12),
}
"""By their data sheets, SXM where there are two kinds."""


def known_card(device_name: str) -> Card | None:
    """Returns the card whose name is part of the driver's; None for another."""
    return next((card for name, card in CARDS.items() if name in device_name), None)


def forward_flops(shape: ModelShape, num_seen: float, scored_frac: float = 1.0) -> float:
    """Returns the operations of one token's forward pass.

    Args:
        num_seen: tokens that a token sees on average, itself included.
        scored_frac: share of the tokens whose logits are made, 0..1.
    """
    head = 2.0 * scored_frac * shape.vocab_size * shape.hidden_size
    attention = 4.0 * shape.num_layers * shape.query_width * num_seen
    return 2.0 * shape.num_layer_weights + head + attention
