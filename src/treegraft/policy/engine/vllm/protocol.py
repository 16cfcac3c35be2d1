"""What client and server agree on: names, versions, and a sample of draws."""

from __future__ import annotations

import torch

from treegraft.policy.engine.sampling import keyed_seed, sample_tokens

PLUGIN_VERSION = 1
"""Grows with every change of what client and plugin say to each other."""
DRAW = "treegraft"
"""Name of our part of a request's extra arguments: {"key", "offset", "temperature", "filters"}."""
PLUGIN = "treegraft.policy.engine.vllm.plugin"
"""Module of the plugin; not imported on this side, since it needs vllm."""
MIN_LOGPROBS = 2
"""Log-probabilities a token that a reply has to carry: the drawn token's entry and the other."""
TESTED = "0.32"
"""Version of vLLM that this was written against and tested with."""


def draws_of_sampling() -> list[int]:
    """Returns the tokens that this process draws for a few fixed keys: two processes whose draws
    differ do not sample alike."""
    # Without a random generator, whose numbers may change with torch's version.
    logits = torch.sin(torch.arange(8 * 1000, dtype=torch.float64) * 0.7).float().view(8, 1000)
    seeds: list[int | None] = [keyed_seed(("draws", row), row) for row in range(8)]
    return [int(token) for token in sample_tokens(logits * 3, [1.0] * 8, seeds)[0]]
