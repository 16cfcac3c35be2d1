"""From logits to a token, its log-probability and the exact entropy, with noise that is a function of a key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from treegraft.interfaces import NoiseKey


def keyed_seed(noise_key: NoiseKey, position: int) -> int:
    """Returns a 63-bit seed that depends on the key and the position alone.

    Python's own `hash` differs between processes, so the key's text is hashed.
    """
    digest = hashlib.blake2b(repr((tuple(noise_key), position)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_tokens(
    logits: torch.Tensor, temperatures: Sequence[float], seeds: Sequence[int | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns one token per row with its log-probability and the entropy of its distribution.

    token = argmax_v ( log p_v + g_v ),  g_v = -log(-log u_v),  p = softmax(logits / T)
    H = -Σ_v p_v log p_v

    The Gumbel-max trick draws from p exactly, and unlike an inverse cumulative sum it does not flip a token when a logit moves
    by a rounding error. Noise is drawn on the CPU, so that a key means the same on every device.

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows] T; 0 is greedy and scored at T = 1.
        seeds: [rows] from `keyed_seed`; None for greedy rows.

    Returns:
        [rows] token ids, [rows] natural logarithms, [rows] nats; the last two float32.
    """
    scale = torch.tensor([t if t > 0 else 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    scores = logprobs
    if any(seed is not None for seed in seeds):
        scores = logprobs - _exponentials(seeds, logits.shape[-1]).log_().to(logits.device)
    tokens = scores.argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies


def _exponentials(seeds: Sequence[int | None], size: int) -> torch.Tensor:
    """[rows, size] exponential variates -log u, and 1 (no noise after the logarithm) for greedy rows."""
    noise = torch.ones(len(seeds), size)
    generator = torch.Generator()
    for row, seed in zip(noise, seeds, strict=True):
        if seed is not None:
            generator.manual_seed(seed)
            torch.rand(size, generator=generator, out=row)
            row.log_().neg_()
    return noise
