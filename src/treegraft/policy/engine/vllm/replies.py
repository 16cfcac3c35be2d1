"""What client and plugin agree on, and how a reply of `/inference/v1/generate` is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from treegraft.policy.engine.served import NUM_ASKED, TokenReply

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
REPLY_BYTES = 4096
"""Largest share of a token in a reply: 21 entries of at most 70 bytes, with a margin."""
_ZERO = 1e-30
"""Stands for a probability of 0 in logarithms."""


def read_reply(choice: Mapping[str, Any], num_tokens: int | None) -> TokenReply:
    """Returns a reply's tokens, log-probabilities, entropies, and the bounds of what these lack.

    Args:
        num_tokens: size of the vocabulary; None if servers measure entropies, which then have no
            bounds.

    Raises KeyError, TypeError, ValueError or IndexError for a reply that lacks them.
    """
    rows = choice["logprobs"]["content"]
    logprobs = [row["logprob"] for row in rows]
    if num_tokens is None:
        entropies = [row["top_logprobs"][1]["logprob"] for row in rows]
        return TokenReply(choice["token_ids"], logprobs, entropies)
    likely = []
    for row in rows:
        # Of 20 an unlikely token that was drawn takes the place of the last one.
        values = sorted((top["logprob"] for top in row["top_logprobs"]), reverse=True)
        likely.append(values[: NUM_ASKED - 1])
    table = np.array(likely)
    if not table.size or table.max() > 0:
        raise ValueError("no log-probabilities")
    sums, tails = likely_entropies(table)
    bounds = tail_bounds(tails, num_tokens - table.shape[1])
    return TokenReply(choice["token_ids"], logprobs, sums.tolist(), bounds.tolist())


def likely_entropies(logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns Σ -p ln p over the most likely tokens, and the tails: the probability of all others.

    Args:
        logprobs: [tokens, k] of the k most likely tokens.
    """
    with np.errstate(invalid="ignore"):  # of a token that cannot be drawn: 0 times infinity
        sums = np.nansum(-np.exp(logprobs) * logprobs, axis=1)
    return sums, 1.0 - np.exp(logprobs).sum(axis=1)


def tail_bounds(tails: np.ndarray, num_left: int) -> np.ndarray:
    """Returns m ln(n / m), in nats: the most that n = `num_left` tokens of probability m together
    add to an entropy, which they do if each has m / n. If one has all of m they add m ln(1 / m),
    the least. Below 0 by rounding, m counts as 0."""
    own = np.clip(tails, _ZERO, 1.0)
    return np.asarray(own * np.log(max(num_left, 1) / own))
