"""From logits to a token, its log-probability and the exact entropy, with noise that is a function
of a key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from treegraft.core.interfaces import NoiseKey
from treegraft.policy.kernels.engine import DRAWN, Kernels
from treegraft.policy.noise import noise_words, philox_gumbels

Columns = tuple[Tensor, Tensor, Tensor]


def sample_tokens(
    logits: Tensor,
    temperatures: Sequence[float],
    noise_keys: Sequence[NoiseKey | None],
    positions: Sequence[int],
    kernels: Kernels | None = None,
) -> Columns:
    """Returns one token per row with its log-probability and the entropy of its distribution.

    token = argmax_v ( log p_v + g_v ),  g_v = -log(-log u_v),  p = softmax(logits / T)
    H = -Σ_v p_v log p_v

    The Gumbel-max trick draws from p exactly. A large vocabulary is drawn from in two such steps,
    p(block) and then p(token | block).

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows] T; 0 is greedy and scored at T = 1.
        noise_keys: [rows] the keys of the completions; None for greedy rows.
        positions: [rows] tokens of the completion before this one.
        kernels: those for the logits' type; None means torch's operators.

    Returns:
        [rows] token ids, [rows] natural logarithms, [rows] nats; the last two float32.
    """
    device = logits.device
    size = logits.shape[-1]
    rows = []
    for temperature, key, position in zip(temperatures, noise_keys, positions, strict=True):
        words = (0, 0, -1) if key is None else (*noise_words(key), position)
        rows.append((temperature if temperature > 0 else 1.0, *words))
    # A double is exact for words of 32 bits.
    numbers = torch.tensor(rows, dtype=torch.float64, device=device)
    scale = numbers[:, 0].float()
    draws = numbers[:, 1:].long()
    is_whole = size <= DRAWN
    # Noise for the blocks and for one block's tokens, not for the whole vocabulary: drawing it took
    # longer than everything else here.
    num_entries = size if is_whole else -(-size // DRAWN) + DRAWN
    draw = philox_gumbels if kernels is None else kernels.gumbels
    noise = draw(draws, num_entries)
    if is_whole:
        return _sample_at_once(logits / scale[:, None], noise)
    is_greedy = draws[:, 2] < 0 if any(key is None for key in noise_keys) else None
    return _sample_by_blocks(logits, scale, noise, is_greedy, kernels)


def _sample_at_once(scaled: Tensor, noise: Tensor) -> Columns:
    # Not by an inverse cumulative sum: there a rounding error in any logit before the token moves
    # the borders of all that follow, and with them the token; here only a tie can flip.
    logprobs = torch.log_softmax(scaled.float(), dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    tokens = (logprobs + noise).argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies


def _sample_by_blocks(
    logits: Tensor, scale: Tensor, noise: Tensor, is_greedy: Tensor | None, kernels: Kernels | None
) -> Columns:
    """H = log Z - Σ_v e_v s_v / Z with s = logits / T - max, e = exp(s), Z = Σ_v e_v, so that no
    log-probability is written out."""
    size = logits.shape[-1]
    peaks, blocks, moments = (
        _block_sums(logits, scale) if kernels is None else kernels.blocks(logits, scale)
    )
    totals = blocks.sum(dim=-1)
    log_totals = totals.log()
    chosen = (blocks.log() + noise[:, : blocks.shape[1]]).argmax(dim=-1)
    places = chosen[:, None] * DRAWN + torch.arange(DRAWN, device=logits.device)
    inside = _shifted(logits.gather(1, places.clamp(max=size - 1)), peaks, scale).masked_fill(
        places >= size, float("-inf")
    )
    tokens = chosen * DRAWN + (inside + noise[:, blocks.shape[1] :]).argmax(dim=-1)
    if is_greedy is not None:
        # The most likely token need not lie in the most likely block.
        tokens = torch.where(is_greedy, logits.argmax(dim=-1), tokens)
    logprobs = _shifted(logits.gather(1, tokens[:, None]), peaks, scale)[:, 0] - log_totals
    return tokens, logprobs, log_totals - moments / totals


def _shifted(logits: Tensor, peaks: Tensor, scale: Tensor) -> Tensor:
    return (logits.float() - peaks[:, None]) / scale[:, None]


def _block_sums(logits: Tensor, scale: Tensor) -> Columns:
    """The result of `Kernels.blocks`, by torch's operators."""
    peaks = logits.amax(dim=-1).float()
    shifted = _shifted(logits, peaks, scale)
    weights = shifted.exp()
    missing = -logits.shape[-1] % DRAWN
    filled = functional.pad(weights, (0, missing)) if missing else weights
    blocks = filled.unflatten(-1, (-1, DRAWN)).sum(dim=-1)
    return peaks, blocks, weights.mul_(shifted).sum(dim=-1)
