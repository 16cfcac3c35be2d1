"""Gumbel noise that is a function of key, position and entry, the same on every device.

Philox is counter-based: every entry is computed by itself, in integer operations, wherever the
logits are.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from treegraft.core.interfaces import NoiseKey
from treegraft.core.keyed import keyed_int

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""Of the first and the third word of a counter."""
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
"""Of the two words of a key, from round to round."""
ROUNDS = 10


def philox_4x32(counters: Tensor, keys: Tensor) -> Tensor:
    """Returns the words of Philox-4x32-10, [4, ...], for counters [4, ...] and keys [2, ...], all
    int64 below 2^32.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    multipliers, increments = (
        torch.tensor(pair, device=keys.device).view(2, *[1] * (keys.dim() - 1))
        for pair in (MULTIPLIERS, INCREMENTS)
    )
    # A product of two words fills all 64 bits, the sign's too, and a shift takes the sign along.
    # Only what is multiplied next has to be free of such upper bits.
    even = counters[0::2]
    odd = counters[1::2]
    for number in range(ROUNDS):
        products = (even * multipliers).flip(0)
        even = (products >> 32).bitwise_xor_(odd)
        even = even.bitwise_xor_(keys + number * increments).bitwise_and_(MASK)
        odd = products
    return torch.stack((even, odd & MASK), dim=1).flatten(0, 1)


def philox_gumbels(draws: Tensor, size: int) -> Tensor:
    """Returns [rows, size] float32 variates -log(-log u), on the device of `draws`.

    Entry v of position t is word v mod 4 of the counter (v div 4, t, 0, 0); u = (word + 1/2) /
    2^32. The logarithms are taken in float64, so that two devices differ by 1 unit of the last
    place at most.

    Args:
        draws: [rows, 3] int64: the two of `noise_words`, and the position below 2^32; a position of
            -1 for a row without noise, whose entries are 0.
    """
    num_counters = -(-size // 4)
    counters = torch.zeros(4, len(draws), num_counters, dtype=torch.long, device=draws.device)
    counters[0] = torch.arange(num_counters, device=draws.device)
    counters[1] = draws[:, 2:] & MASK
    words = philox_4x32(counters, draws.t()[:2, :, None]).permute(1, 2, 0)
    uniforms = words.flatten(1)[:, :size].double().add_(0.5).mul_(2.0**-32)
    noise = uniforms.log_().neg_().log_().neg_().float()
    return noise.masked_fill_(draws[:, 2:] < 0, 0.0)


@functools.lru_cache(maxsize=4096)
def noise_words(noise_key: NoiseKey) -> tuple[int, int]:
    """Returns the lower and the upper word of the key of Philox, 32 bits each."""
    # Hashed once per completion, not per token.
    bits = keyed_int(*noise_key)
    return bits & MASK, bits >> 32
