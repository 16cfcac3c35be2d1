"""What client and server agree on: names, versions, sizes, and numbers in replies."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treegraft.core.errors import SettingError
from treegraft.policy.engine.served import NUM_ASKED, TokenReply

PLUGIN_VERSION = 4
"""Grows with every change of what client and plugin say to each other."""
DRAW = "treegraft"
"""Name of our part of a request's extra arguments: {"key", "offset", "temperature",
"filters"}."""
PLUGIN = "treegraft.policy.engine.vllm.plugin"
"""Module of the plugin; not imported on this side, since it needs vllm. The same holds for the two
below."""
DRAW_CLASS = "treegraft.policy.engine.vllm.draw:Draw"
COLUMNS = "treegraft.policy.engine.vllm.columns.Columns"
ROUTE, PLAIN_ROUTE = "/treegraft/v1/generate", "/inference/v1/generate"
"""Our route for requests, answered in columns; vLLM's own, for servers without anything of
ours."""
KINDS = {"token_ids": "<i4", "logprobs": "<f4", "entropies": "<f4", "tails": "<f4"}
"""The columns of a reply, in their order, and what they hold; tails beside entropies over the most
likely tokens alone."""
MIN_LOGPROBS = 2
"""Log-probabilities a token that a drawn row has to carry: its own entry and the other."""
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


def drawn_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (log-probabilities, entropies), each [tokens], of rows that `marked_rows` left.

    Args:
        table: [tokens, 3] of each row the drawn token's entry, and the two largest.
    """
    entropies, logprobs = table[:, 0], table[:, 2]
    small = 2 * _ZERO
    return np.where(logprobs >= -small, 0.0, logprobs), np.where(entropies <= small, 0.0, entropies)


def likely_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the drawn tokens' log-probabilities, Σ -p ln p over the most likely tokens, and the
    tails: the probability of all others.

    Args:
        table: [tokens, 1 + k] log-probabilities: of the drawn token, and of the k most likely ones.
    """
    likely = table[:, 1:]
    with np.errstate(invalid="ignore"):  # of a token that cannot be drawn: 0 times infinity
        entropies = np.nansum(-np.exp(likely) * likely, axis=1)
    return table[:, 0], entropies, 1.0 - np.exp(likely).sum(axis=1)


def tail_bounds(tails: np.ndarray, num_left: int) -> np.ndarray:
    """Returns m ln(n / m), in nats: the most that n = `num_left` tokens of probability m together
    add to an entropy, where each has m / n. Where one has all of m they add m ln(1 / m), the least.
    Below 0 by rounding, m counts as 0."""
    own = np.clip(tails, _ZERO, 1.0)
    return np.asarray(own * np.log(max(num_left, 1) / own))


def packed(*columns: Any) -> dict[str, str]:
    """Returns columns by the names of `KINDS`, each as text: its numbers' bytes in base64."""
    return {
        name: base64.b64encode(np.asarray(column, kind).tobytes()).decode()
        for (name, kind), column in zip(KINDS.items(), columns, strict=False)
    }


def unpacked(choice: Mapping[str, Any], num_tokens: int | None = None) -> TokenReply:
    """Returns a reply that is in columns or as vLLM itself writes it.

    Args:
        num_tokens: size of the vocabulary; None for replies with exact entropies.

    Raises KeyError, TypeError or ValueError for one that lacks them.
    """
    if isinstance(choice["token_ids"], str):
        named = [*KINDS.items()][: 3 if num_tokens is None else 4]
        texts = [base64.b64decode(choice[name], validate=True) for name, _ in named]
        columns = [np.frombuffer(text, kind) for text, (_, kind) in zip(texts, named, strict=True)]
        num_kept = NUM_ASKED
    else:
        columns, num_kept = _columns_of(choice), NUM_ASKED - 1
    bounds = [] if num_tokens is None else [tail_bounds(columns[3], num_tokens - num_kept)]
    return TokenReply(*(one.tolist() for one in (*columns[:3], *bounds)))


def _columns_of(choice: Mapping[str, Any]) -> list[np.ndarray]:
    # Of 20 an unlikely token that was drawn takes the place of the last one.
    table = np.array(
        [
            [row["logprob"], *sorted((top["logprob"] for top in row["top_logprobs"]), reverse=True)]
            for row in choice["logprobs"]["content"]
        ]
    )[:, :NUM_ASKED]
    if table.shape[1] < 2 or table.max() > 0:
        raise ValueError("no log-probabilities")
    return [np.array(choice["token_ids"]), *likely_columns(table)]


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
