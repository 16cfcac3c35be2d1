"""What client and server agree on: names, versions, sizes, and numbers in replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from treegraft.core.errors import SettingError

PLUGIN_VERSION = 2
"""Grows with every change of what client and plugin say to each other."""
DRAW = "treegraft"
"""Name of our part of a request's extra arguments: {"key", "offset", "temperature",
"filters"}."""
PLUGIN = "treegraft.policy.engine.vllm.plugin"
"""Module of the plugin; not imported on this side, since it needs vllm."""
MIN_LOGPROBS = 2
"""Log-probabilities a token that a reply has to carry: the drawn token's entry and the other."""
TESTED = "0.32"
"""Version of vLLM that this was written against and tested with."""


_ZERO = 1e-30
"""Stands for 0, also where one token is certain: the signs tell the two entries apart."""


def marked_rows(logits: Tensor, drawn: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Returns rows in which two entries are finite: the drawn token's, which holds the entropy (at
    least 0), and another one's, which holds the drawn token's log-probability (below 0).

    The greedy choice is then the drawn token, and where replies carry the two largest logits of
    each row (`--logprobs-mode processed_logits`), an ordinary reply carries both numbers.

    Args:
        logits: [rows, vocabulary], of which shape and type are taken.
        drawn: what `sample_tokens` returned for them.
    """
    tokens, logprobs, entropies = drawn
    marked = torch.full_like(logits, float("-inf"))
    marked.scatter_(1, tokens[:, None], entropies.clamp_min(_ZERO)[:, None].to(logits.dtype))
    carrier = torch.where(tokens == 0, 1, 0)
    marked.scatter_(1, carrier[:, None], logprobs.clamp_max(-_ZERO)[:, None].to(logits.dtype))
    return marked


def entries_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the drawn token's log-probability and the entropy, from one token of a reply.

    Raises KeyError, TypeError or StopIteration for one that has no such entries.
    """
    own, entropy = row["token_id"], row["logprob"]
    logprob = next(top["logprob"] for top in row["top_logprobs"] if top["token_id"] != own)
    return (0.0 if logprob >= -_ZERO * 2 else logprob), (0.0 if entropy <= _ZERO * 2 else entropy)


def check_size(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compares a server's data type and longest path with the recipe's.

    Raises:
        SettingError: another type, or too short a context.
    """
    if found["dtype"] != expected["dtype"]:
        raise SettingError(
            f"{name} computes in {found['dtype']}, expected model.dtype = {expected['dtype']}."
            f" Start it with --dtype {expected['dtype']}, or change model.dtype.",
            code="server-other-dtype",
        )
    wanted = expected["max_context"]
    if wanted is not None and found["max_context"] < wanted:
        raise SettingError(
            f"{name} reads {found['max_context']} tokens, expected {wanted}, the longest path of"
            f" the recipe. Start it with --max-model-len {wanted}, or shorten prompts and"
            " rollout.max_completion_tokens.",
            code="server-context-short",
        )
