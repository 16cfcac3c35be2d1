"""Which tokens may be drawn: repetition penalty, temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treegraft.core.types import Filters

EXCLUDED = -1e30
"""Logit of a token that cannot be drawn: its probability is 0, and 0 times it is 0 and not NaN."""


def filtered(logits: Tensor, temperature: float, filters: Filters, path: Sequence[int]) -> Tensor:
    """Returns the logits, float32, of the distribution to draw from at temperature 1.

    In the order of transformers; vLLM's differs in that min-p comes before top-k. With p the
    softmax of what the steps before have left:

        l_v ← l_v / r where l_v > 0, else l_v r      for the tokens v of the path
        l_v ← l_v / T                                 at T = 0 not divided
        top-k: keep v where l_v is at least the k-th largest (ties stay)
        top-p: keep the most likely tokens, as few as have Σ p_v >= top_p

    Args:
        logits: [vocabulary].
        path: ids of the tokens before, the prompt and tool results included.
    """
    scores = logits.float().clone()
    if filters.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(path)), dtype=torch.long, device=scores.device)
        own, rate = scores[seen], filters.repetition_penalty
        scores[seen] = torch.where(own > 0, own / rate, own * rate)
    if temperature > 0:
        scores /= temperature
    if 0 < filters.top_k < len(scores):
        scores[scores < scores.topk(filters.top_k).values[-1]] = EXCLUDED
    if filters.top_p < 1.0:
        ordered, places = scores.sort(descending=True, stable=True)
        before = ordered.softmax(dim=0).cumsum(dim=0)[:-1]
        # The most likely one stays, and each whose predecessors do not reach top_p.
        scores[places[1:][before >= filters.top_p]] = EXCLUDED
    return scores
