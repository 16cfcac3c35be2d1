"""What client and server agree on: names, versions, sizes, and numbers in replies."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treegraft.core.errors import SettingError
from treegraft.policy.engine.served import top_k_entropy

PLUGIN_VERSION = 3
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


def likely_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the drawn tokens' log-probabilities, and Σ -p ln p over the most likely tokens.

    Args:
        table: [tokens, 1 + k] log-probabilities: of the drawn token, and of the k most likely ones.
    """
    likely = table[:, 1:]
    with np.errstate(invalid="ignore"):  # of a token that cannot be drawn: 0 times infinity
        return table[:, 0], np.nansum(-np.exp(likely) * likely, axis=1)


def packed(column: np.ndarray, kind: str) -> str:
    """Returns a column as text: its numbers in little-endian bytes, in base64."""
    return base64.b64encode(column.astype(kind).tobytes()).decode()


def unpacked(choice: Mapping[str, Any]) -> tuple[list[int], list[float], list[float]]:
    """Returns (token ids, log-probabilities, entropies) of a reply, in columns or as vLLM itself
    writes it.

    Raises KeyError, TypeError or ValueError for one that lacks them.
    """
    if isinstance(choice["token_ids"], str):
        kinds = {"token_ids": "<i4", "logprobs": "<f4", "entropies": "<f4"}
        ids, logprobs, entropies = (
            np.frombuffer(base64.b64decode(choice[name], validate=True), kind).tolist()
            for name, kind in kinds.items()
        )
        return ids, logprobs, entropies
    rows = choice["logprobs"]["content"]
    own = [float(row["logprob"]) for row in rows]
    tops = [[float(top["logprob"]) for top in row["top_logprobs"]] for row in rows]
    if not all(tops) or max((max(top) for top in (own, *tops)), default=0.0) > 0:
        raise ValueError("no log-probabilities")
    return list(choice["token_ids"]), own, [top_k_entropy(top) for top in tops]


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
