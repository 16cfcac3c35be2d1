"""From logits to a token, its log-probability and the exact entropy, with noise that is a function of a key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.nn import functional

from treegraft.interfaces import NoiseKey


def keyed_seed(noise_key: NoiseKey, position: int) -> int:
    """Returns a 63-bit seed that depends on the key and the position alone.

    Python's own `hash` differs between processes, so the key's text is hashed.
    """
    digest = hashlib.blake2b(repr((tuple(noise_key), position)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


BLOCK = 256
"""Tokens of one block of the vocabulary; a vocabulary of one block is drawn from at once."""

ROWS = 16
"""Rows that are drawn for together, so that what is computed between fits in a processor's cache (3 MB for 49,152 tokens)."""
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sample_tokens(logits: torch.Tensor, temperatures: Sequence[float], seeds: Sequence[int | None]) -> Columns:
    """Returns one token per row with its log-probability and the entropy of its distribution.

    token = argmax_v ( log p_v + g_v ),  g_v = -log(-log u_v),  p = softmax(logits / T)
    H = -Σ_v p_v log p_v

    The Gumbel-max trick draws from p exactly, and unlike an inverse cumulative sum it does not flip a token when a logit moves
    by a rounding error. A large vocabulary is drawn from in two such steps, p(block) and then p(token | block), which is p as
    well and needs noise for the blocks and for one of them alone. Noise is drawn on the CPU, so that a key means the same on every
    device.

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows] T; 0 is greedy and scored at T = 1.
        seeds: [rows] from `keyed_seed`; None for greedy rows.

    Returns:
        [rows] token ids, [rows] natural logarithms, [rows] nats; the last two float32.
    """
    scale = torch.tensor([t if t > 0 else 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)
    draw = _sample_at_once if logits.shape[-1] <= BLOCK else _sample_by_blocks
    step = ROWS if logits.device.type == "cpu" else len(seeds)
    parts = [
        draw(torch.div(logits[first : first + step], scale[first : first + step, None]), seeds[first : first + step])
        for first in range(0, len(seeds), step)
    ]
    tokens, logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, logprobs, entropies


def _sample_at_once(scaled: torch.Tensor, seeds: Sequence[int | None]) -> Columns:
    logprobs = torch.log_softmax(scaled, dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    tokens = (logprobs + _gumbels(seeds, scaled.shape[-1]).to(scaled.device)).argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies


def _sample_by_blocks(scaled: torch.Tensor, seeds: Sequence[int | None]) -> Columns:
    """H = log Z - Σ_v e_v s_v / Z with s = logits / T - max, e = exp(s), Z = Σ_v e_v, so that no log-probability is written out."""
    num_rows, size = scaled.shape
    shifted = scaled.sub_(scaled.amax(dim=-1, keepdim=True))
    weights = shifted.exp()
    num_blocks = -(-size // BLOCK)
    missing = num_blocks * BLOCK - size
    filled = functional.pad(weights, (0, missing)) if missing else weights
    blocks = filled.view(num_rows, num_blocks, BLOCK).sum(dim=-1)
    totals = blocks.sum(dim=-1)
    log_totals = totals.log()
    entropies = log_totals - weights.mul_(shifted).sum(dim=-1) / totals
    noise = _gumbels(seeds, num_blocks + BLOCK).to(scaled.device)
    chosen = (blocks.log() + noise[:, :num_blocks]).argmax(dim=-1)
    places = chosen[:, None] * BLOCK + torch.arange(BLOCK, device=scaled.device)
    inside = shifted.gather(1, places.clamp(max=size - 1)).masked_fill(places >= size, float("-inf"))
    tokens = chosen * BLOCK + (inside + noise[:, num_blocks:]).argmax(dim=-1)
    if any(seed is None for seed in seeds):
        # The most likely token need not lie in the most likely block.
        is_greedy = torch.tensor([seed is None for seed in seeds], device=scaled.device)
        tokens = torch.where(is_greedy, shifted.argmax(dim=-1), tokens)
    return tokens, shifted.gather(1, tokens[:, None])[:, 0] - log_totals, entropies


def _gumbels(seeds: Sequence[int | None], size: int) -> torch.Tensor:
    """[rows, size] variates -log(-log u), and 0 for greedy rows."""
    noise = torch.ones(len(seeds), size)
    generator = torch.Generator()
    for row, seed in zip(noise, seeds, strict=True):
        if seed is not None:
            generator.manual_seed(seed)
            torch.rand(size, generator=generator, out=row)
            row.log_().neg_()
    return noise.log_().neg_()
