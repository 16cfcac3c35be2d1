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

    In the order of transformers, and of vLLM.

    Args:
        logits: [vocabulary].
        temperature: 0 divides by nothing.
        path: ids of the tokens before, the prompt and tool results included.
    """
    # Here: a run without filters does not load it.
    from transformers.generation import logits_process as hf

    # The penalty first, since it depends on the sign of the raw logit.
    steps: list[hf.LogitsProcessor] = []
    if filters.repetition_penalty != 1.0:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(filters.repetition_penalty))
    if temperature > 0:
        steps.append(hf.TemperatureLogitsWarper(float(temperature)))
    if filters.top_k > 0:
        steps.append(hf.TopKLogitsWarper(filters.top_k, filter_value=EXCLUDED))
    if filters.top_p < 1.0:
        steps.append(hf.TopPLogitsWarper(filters.top_p, filter_value=EXCLUDED))
    scores = logits.float()[None]
    ids = torch.tensor([[*path]], dtype=torch.long, device=scores.device)
    for step in steps:
        scores = step(ids, scores)
    return scores[0]
