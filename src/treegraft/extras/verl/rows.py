"""Rows of trees for verl's queue, and the factors that its loss needs. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft import Config, Tree
from treegraft.extras.verl.arguments import HOST
from treegraft.parts import LeafRow

ADVANTAGES = "tree_advantages"
"""The column of the queue with the advantage of each token."""
FACTS = "treegraft"
"""The entry of a row's `extra_fields` with its `Facts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the loss of a row needs in addition to its tokens."""

    shaping: float
    """RAPO's 1 + m F."""
    weight: float
    """w_i, 0..1; those of a group sum to 1."""
    num_denominator: int
    """|y_i| in tokens."""
    num_loss: int
    """Tokens that carry loss."""
    group: str
    """The prompt's uid."""

    @classmethod
    def of(cls, row: LeafRow, uid: str) -> Facts:
        """Returns those of a row."""
        return cls(
            shaping=row.shaping,
            weight=row.weight,
            num_denominator=row.num_denominator,
            num_loss=sum(row.loss_mask),
            group=uid,
        )


def tree_rows(tree: Tree, config: Config) -> list[LeafRow]:
    """Returns one row for each leaf that counts and has a token: failed leaves have none, and the
    others of the group share their weight.

    Raises:
        SettingError: more leaves than verl has rows for, or a token that was sampled at another
            temperature than verl scores it at.
    """
    # A leaf without a token has nothing that verl could score.
    return [row for row in HOST.rows(tree, config) if row.completion_ids]


def factors(facts: Sequence[Facts | None], config: Config, *, num_rows: int) -> list[float]:
    """Returns what turns verl's coefficient of each row of a minibatch into that of `leaf_rows`: 1
    where no leaf failed and all weights of a group are equal.

        token-mean      (w_i / Σ_j w_j |y_j|) / (1 / loss tokens of all rows)
        sequence-mean   (w_i / (|y_i| |G|)) / (1 / (loss tokens of i · num_rows))
        sequence-sum    (w_i / (constant |G|)) / (1 / (constant · num_rows))

    The minimum of two terms in verl's loss is homogeneous in positive factors of the advantage, so
    they may be there.

    Args:
        facts: of each row, None for verl's padding.
        num_rows: of the minibatch on all ranks, padding included.
    """
    real = [one for one in facts if one is not None]
    tokens = sum(one.weight * one.num_denominator for one in real)
    num_loss = sum(one.num_loss for one in real)
    # Groups whose leaves all failed have no row, and count nowhere.
    groups = len({one.group for one in real})

    def factor(one: Facts) -> float:
        if config.loss.aggregation == "token-mean":
            return one.weight * num_loss / max(tokens, 1e-12)
        of_group = one.weight * num_rows / groups
        if config.loss.aggregation == "sequence-sum":
            return of_group
        return of_group * one.num_loss / max(1, one.num_denominator)

    return [0.0 if one is None else factor(one) for one in facts]


def minibatches(
    keys: Sequence[str], tags: Sequence[dict[str, Any]], size: int, num_leaves: int
) -> Iterator[list[int]]:
    """Yields the places of `size` rows at a time: the rows of size / num_leaves trees, filled up
    with verl's padding where leaves failed.

    Args:
        keys: "{uid}_{session}_{index}" of each row.
        num_leaves: the most rows of a tree.
    """
    trees: dict[str, list[int]] = {}
    padding: list[int] = []
    for place, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding", False):
            padding.append(place)
        else:
            trees.setdefault(key.rsplit("_", 2)[0], []).append(place)
    groups = list(trees.values())
    at_once = size // num_leaves
    for start in range(0, len(keys) // num_leaves, at_once):
        rows = [place for group in groups[start : start + at_once] for place in group]
        missing = size - len(rows)
        # verl cuts a batch by numbers of rows, so failed leaves have to be filled up.
        rows += padding[:missing]
        del padding[:missing]
        yield rows
