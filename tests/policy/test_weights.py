"""Checksums of weights, and what reading them from GGUF files asks for once."""

from __future__ import annotations

import pytest
import torch

from treegraft.policy import weights


def test_a_checksum_is_the_same_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ (2 i + 1) · bits_i modulo 2^64, by Python's integers."""
    words = torch.tensor([3, -5, 7, 2**31 - 1, -(2**31), 11, 13], dtype=torch.int32)
    expected = sum((2 * n + 1) * one for n, one in enumerate(words.tolist())) % 2**64
    for chunk in (1, 3, 100):
        monkeypatch.setattr(weights, "CHUNK", chunk)
        assert int(weights.bit_sum(words)) % 2**64 == expected
        parts = weights.bit_sum(words[:4]) + weights.bit_sum(words[4:], first=4)
        assert int(parts) % 2**64 == expected
