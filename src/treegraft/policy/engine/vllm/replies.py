"""What client and plugin agree on, and how a reply of `/inference/v1/generate` is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treegraft.core.types import EntropyKind
from treegraft.policy.engine.served import TokenReply, top_k_entropy

PLUGIN_VERSION = 6
"""Grows with every change of what client and plugin say to each other."""
PLUGIN = "treegraft.policy.engine.vllm.plugin.Extension"
"""By name, since it needs vllm, which is in the servers' environment alone."""
TESTED = "0.32"
"""Version of vLLM that this was written against and tested with."""
ROUTE = "/inference/v1/generate"
NUM_MEASURED = 2
"""Log-probabilities of each token that are asked for if the first one after its own is the entropy;
vLLM cuts the list there, the token's own entry included."""


def read_reply(choice: Mapping[str, Any], kind: EntropyKind) -> TokenReply:
    """Returns a reply's tokens, log-probabilities and entropies.

    Args:
        kind: EXACT if servers measure entropies.

    Raises KeyError, TypeError or IndexError for a reply that lacks them.
    """
    logprobs: list[float] = []
    entropies: list[float] = []
    for row in choice["logprobs"]["content"]:
        logprobs.append(row["logprob"])
        top = [one["logprob"] for one in row["top_logprobs"]]
        entropies.append(top[1] if kind is EntropyKind.EXACT else top_k_entropy(top))
    return TokenReply(choice["token_ids"], logprobs, entropies)
