"""Bounds of a card by hand, and against the estimates that the design was made with."""

from __future__ import annotations

import pytest

from treegraft.extras.lab.roofline import (
    CARDS,
    decode_bound,
    decode_bytes,
    forward_flops,
    known_card,
    model_flops_utilisation,
)
from treegraft.extras.lab.shape import num_shape_weights
from treegraft.policy.shapes import ModelShape, published_shape

# One layer: query and output 4 x 4, key and value 4 x 2, three of 4 x 6, two norms; 10 words, not
# tied, and a last norm.
SMALL = ModelShape(
    num_weights=32 + 16 + 72 + 8 + 80 + 4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    hidden_size=4,
    vocab_size=10,
    num_heads=2,
    intermediate_size=6,
)


def test_bounds_by_hand() -> None:
    assert SMALL.num_layer_weights == 132
    assert SMALL.kv_bytes(2) == 1 * 2 * 1 * 2 * 2 == 8
    # 132 weights of the layers and 40 of the head, then 3 rows of 5 tokens.
    assert decode_bytes(SMALL, 3, 5, 2) == 172 * 2 + 3 * 5 * 8 == 464
    assert decode_bound(SMALL, 3, 5, 2, 928.0) == pytest.approx(6.0)
    # 2 a weight; half of the tokens have logits; scores and values of 2 heads of 2 over 7 tokens.
    assert forward_flops(SMALL, 7, 0.5) == 2 * 132 + 0.5 * 2 * 40 + 4 * 4 * 7 == 416
    used = model_flops_utilisation(SMALL, 10, 2.0, 12480.0, num_seen=7, scored_frac=0.5)
    assert used == pytest.approx(3 * 416 * 10 / (2 * 12480)) == pytest.approx(0.5)


def test_a_tied_head_is_read_once_in_a_step() -> None:
    fields = published_shape("shape:qwen2.5-1.5b")
    shape = ModelShape.of_config(fields, num_shape_weights(fields))
    assert decode_bytes(shape, 1, 0, 2) == 2 * num_shape_weights(fields)


def test_a_7b_model_takes_what_the_estimates_say() -> None:
    """57 KB of keys and values a token; 14.5 GF a token over paths of 4k; on an H100 a step of 256
    rows with 2k tokens each takes 13.5 ms at best."""
    fields = published_shape("shape:qwen2.5-7b")
    shape = ModelShape.of_config(fields, num_shape_weights(fields))
    assert shape.kv_bytes(2) == 57_344
    assert forward_flops(shape, 2048, 0.6) == pytest.approx(14.5e9, rel=0.02)
    bound = decode_bound(shape, 256, 2048, 2, CARDS["H100"].bandwidth)
    assert 256 / bound == pytest.approx(13.4e-3, rel=0.02)


def test_cards_are_known_by_the_drivers_names() -> None:
    assert known_card("NVIDIA H200") is CARDS["H200"]
    assert known_card("NVIDIA H100 80GB HBM3") is CARDS["H100"]
    assert known_card("NVIDIA GeForce RTX 4090") is None
