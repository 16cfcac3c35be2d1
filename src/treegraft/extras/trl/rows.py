"""Rows of trees as the tensors of TRL's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treegraft import Config, Tree
from treegraft.extras.trl.arguments import HOST
from treegraft.parts import LeafRow


class Row(NamedTuple):
    """A row of TRL's batch: a leaf, or what fills a group up."""

    prompt_ids: list[int]
    leaf: LeafRow | None
    """None for a leaf that failed, and for one that the tree does not have."""


def tree_rows(trees: Sequence[Tree], config: Config) -> list[Row]:
    """Returns explore.num_leaves rows for each tree, in the order of its leaves."""
    size = config.explore.num_leaves
    rows: list[Row] = []
    for tree in trees:
        counting = {row.leaf_id: row for row in HOST.rows(tree, config)}
        leaves = [counting.get(leaf.step_id) for leaf in tree.leaves]
        # Also a filler has the prompt of its tree, since TRL groups rows by place.
        prompt_ids = tree.steps[0].token_ids.tolist()
        rows += [Row(prompt_ids, one) for one in leaves + [None] * (size - len(leaves))]
    return rows


def rollout_fields(rows: Sequence[Row], filler: int) -> dict[str, list[object]]:
    """Returns what a `rollout_func` of TRL returns.

    Args:
        filler: the token of a row without tokens, of which TRL reads the last one; it carries no
            loss.
    """
    leaves = [row.leaf for row in rows]
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [(one.completion_ids if one else []) or [filler] for one in leaves],
        "logprobs": [(one.sampling_logprobs if one else []) or [0.0] for one in leaves],
        # Tool results, grafts, forced and stored text carry no loss.
        "env_mask": [list(map(int, one.loss_mask if one else [])) or [0] for one in leaves],
        "reward": [one.reward if one else None for one in leaves],
    }


def own_sums(rows: Sequence[Row]) -> Tensor:
    """Returns [2] this process's part of Σ w_i |y_i|, and of the number of groups that count."""
    leaves = [row.leaf for row in rows if row.leaf]
    tokens = sum(one.weight * one.num_denominator for one in leaves)
    groups = {one.group_id for one in leaves}
    return torch.tensor([tokens, len(groups)], dtype=torch.float32)


def coefficients(rows: Sequence[Row], config: Config, sums: Tensor) -> Tensor:
    """Returns [B] c_i of `leaf_rows`, the coefficient of each token's loss; 0 for fillers.

    Args:
        sums: of all processes, see `own_sums`.
    """
    tokens, groups = (float(one) for one in sums.clamp(min=1e-12))
    # As in our own learner.
    constant = config.loss.length_constant or config.rollout.max_completion_tokens

    def coefficient(row: LeafRow) -> float:
        if config.loss.aggregation == "token-mean":
            return row.weight / tokens
        if config.loss.aggregation == "sequence-sum":
            return row.weight / (constant * groups)
        return row.weight / (max(1, row.num_denominator) * groups)

    own = [coefficient(row.leaf) if row.leaf else 0.0 for row in rows]
    return torch.tensor(own, dtype=torch.float32)


def trl_coefficients(
    rows: Sequence[Row], config: Config, *, num_tokens: float, num_rows: int
) -> Tensor:
    """Returns [B] TRL's coefficient of each token's loss.

        token-mean      1 / num_tokens
        sequence-mean   1 / (loss tokens of i · num_rows)
        sequence-sum    1 / (rollout.max_completion_tokens · num_rows)

    Args:
        num_tokens: loss tokens of all processes.
        num_rows: of all processes, fillers included.
    """
    if config.loss.aggregation == "token-mean":
        return torch.full((len(rows),), 1.0 / max(1.0, num_tokens), dtype=torch.float32)
    if config.loss.aggregation == "sequence-sum":
        longest = config.rollout.max_completion_tokens
        return torch.full((len(rows),), 1.0 / (longest * num_rows), dtype=torch.float32)
    lengths = [max(1, sum(row.leaf.loss_mask)) if row.leaf else 1 for row in rows]
    return 1.0 / (torch.tensor(lengths, dtype=torch.float32) * num_rows)


def row_advantages(rows: Sequence[Row], width: int) -> Tensor:
    """Returns [B, width] the advantage of each token, 0 behind a row's end."""
    found = torch.zeros(len(rows), width, dtype=torch.float32)
    for place, row in enumerate(rows):
        if row.leaf:
            own = torch.tensor(row.leaf.advantages, dtype=torch.float32)
            found[place, : len(own)] = own
    return found


def row_shaping(rows: Sequence[Row]) -> Tensor:
    """Returns [B, 1] RAPO's 1 + m F."""
    own = [[row.leaf.shaping if row.leaf else 1.0] for row in rows]
    return torch.tensor(own, dtype=torch.float32)


def shaped_at_one(advantages: Tensor, shaping: Tensor, config: Config) -> Tensor:
    """Returns [B, T] the advantages of a step whose ratios are all 1, with RAPO's factor in them:

        (1 + m F) A,   0 where the clip acts: A > 0 and 1 + m F > 1 + clip_high,
                       or A < 0 and 1 + m F > dual_clip

    Source: RAPO (arXiv 2603.03078, eq. 8 and 11). TRL forms no old log-probabilities there, which
    the factor could be taken from.
    """
    loss = config.loss
    is_clipped = (advantages > 0) & (shaping > 1 + loss.clip_high)
    if loss.dual_clip is not None:
        is_clipped |= (advantages < 0) & (shaping > loss.dual_clip)
    return torch.where(is_clipped, 0.0, advantages * shaping)
