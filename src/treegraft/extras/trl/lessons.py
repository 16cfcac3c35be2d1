"""Texts that are imitated beside the rows of a step: a loss of its own, since rows hold what the
policy sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from treegraft import Config, SettingError, Tree, pack_trees
from treegraft.parts import losses


class Text(NamedTuple):
    """What is imitated: a text of another agent at the place of its graft, or a stored success."""

    before: list[int]
    """The path's tokens up to it, of at least one."""
    token_ids: list[int]
    weights: list[float]
    """[tokens] Of a graft Σ factor · max(A, 0) over the trajectories that hold it; of a stored
    success c w / (n |Z|), and 0 where its agent did not write."""
    is_graft: bool


def imitated_texts(trees: Sequence[Tree], config: Config, sums: Tensor) -> list[Text]:
    """Returns what loss.graft_coef has imitated in a process's trees.

    Args:
        sums: of all processes, see `rows.own_sums`.

    Raises:
        SettingError: a graft at another temperature than the one that TRL scores tokens at.
    """
    if not config.loss.graft_coef:
        return []
    tokens, groups = (float(one) for one in sums)
    constant = config.loss.length_constant or config.rollout.max_completion_tokens
    denominators = losses.Denominators(max(1, int(groups)), tokens, constant)
    found = list[Text]()
    for tree in trees:
        batch = pack_trees([tree], takes_imitated=True)
        imitated, paths = batch.imitated, batch.paths
        if imitated is None:
            continue
        if (imitated.temperatures != config.rollout.temperature).any():
            raise SettingError(
                f"tree '{tree.group_id}': a graft has another temperature than rollout.temperature"
                f" = {config.rollout.temperature:g}, the one that TRL scores all tokens at.",
                code="trl-other-temperature",
            )
        leaf_weights = batch.lengths.new_tensor([path.leaf.weight for path in paths])
        factors = losses.contribution_weights(
            leaf_weights, batch.lengths, denominators, config.loss.aggregation
        )
        advantages = factors.new_tensor([path.leaf.advantage or 0.0 for path in paths])
        each = (factors * advantages.clamp(min=0.0)).index_select(0, imitated.trajectories)
        # A text that several trajectories hold is scored once, as in the learner.
        sizes = list(imitated.lengths)
        weights = each.new_zeros(sum(sizes)).index_add(0, imitated.tokens, each)
        for path, size, own in zip(imitated.paths, sizes, weights.split(sizes), strict=True):
            found.append(Text(list(path[:-size]), list(path[-size:]), own.tolist(), True))
    return found


def stored_texts(lessons: Sequence[Tree], config: Config, share: slice) -> list[Text]:
    """Returns a process's share of an update's stored successes, of `Session.lessons`; those of
    weight 0 count in |Z| alone.

    Raises:
        SettingError: TRL scores tokens at another temperature than lessons are learned at, 1.
    """
    if lessons and config.rollout.temperature != 1.0:
        raise SettingError(
            f"rollout.temperature: got {config.rollout.temperature:g}, expected 1 inside TRL beside"
            " loss.lesson_coef: TRL scores all tokens at one temperature.",
            code="trl-temperature",
        )
    found = list[Text]()
    for lesson in lessons[share]:
        (path,) = lesson.trajectories()
        start, mask = len(path.prompt_ids), path.loss_mask
        weight = config.loss.lesson_coef / len(lessons) * (path.leaf.advantage or 0.0)
        if weight:
            each = [weight / max(1, sum(mask)) if one else 0.0 for one in mask[start:]]
            found.append(Text(path.prompt_ids, path.completion_ids, each, False))
    return found


def text_rows(texts: Sequence[Text], filler: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (ids [B, P + T], mask [B, P + T], weights [B, T]) as TRL pads prompts and
    completions: prompts to the left, completions to the right."""
    most = max(len(one.before) for one in texts)
    longest = max(len(one.token_ids) for one in texts)
    ids, masks, weights = list[list[int]](), list[list[int]](), list[list[float]]()
    for before, own, own_weights, _ in texts:
        left, right = most - len(before), longest - len(own)
        ids.append([filler] * left + before + own + [filler] * right)
        masks.append([0] * left + [1] * (len(before) + len(own)) + [0] * right)
        weights.append(own_weights + [0.0] * right)
    return torch.tensor(ids), torch.tensor(masks), torch.tensor(weights, dtype=torch.float32)
