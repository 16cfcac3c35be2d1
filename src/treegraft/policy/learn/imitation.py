"""Demonstrations in packs, and the steps of them that the policy would write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treegraft.core.demonstration import Written, plain_step
from treegraft.core.types import ROOT_ID, Origin, StepContent, Tree
from treegraft.policy.learn.pack import num_tree_tokens, plan_packs

MIN_SHARED = 32
"""Shared prompt tokens from which joining demonstrations pays."""


def imitation_packs(trees: Sequence[Tree], max_tokens: int) -> list[list[Tree]]:
    """Returns demonstrations in packs of at most `max_tokens`; those of a pack share the beginning
    that their prompts share."""
    prompts = [tree.root.token_ids.tolist() for tree in trees]
    # Short of their last token, so that each path keeps a prompt of its own.
    limit = min(map(len, prompts)) - 1
    shared = 0
    while shared < limit and len({prompt[shared] for prompt in prompts}) == 1:
        shared += 1
    if shared < MIN_SHARED:
        # A short beginning costs less than the further nodes of a joined tree.
        shared = 0
    packs = []
    sizes = [num_tree_tokens(tree) - shared for tree in trees]
    for pack in plan_packs(sizes, max(1, max_tokens - shared)):
        chosen = [trees[n] for n in pack]
        packs.append([joined(chosen, shared)] if shared and len(chosen) > 1 else chosen)
    return packs


def joined(trees: Sequence[Tree], shared: int) -> Tree:
    """Returns one tree whose root holds the `shared` first prompt tokens, and below it each tree's
    path in order.

    A system prompt is the longest part of many demonstrations; so it is paid for once.
    """
    prompt = tuple(trees[0].root.token_ids[:shared].tolist())
    root = plain_step(ROOT_ID, None, Written(StepContent(), [(prompt, Origin.PROMPT)]))
    steps = [root]
    leaves = []
    for number, tree in enumerate(trees):

        def moved(step_id: str, number: int = number) -> str:
            return f"{ROOT_ID}.{number}{step_id[len(ROOT_ID) :]}"

        for step in tree.steps:
            cut = shared if step.before is None else 0
            tokens = step.num_tokens - cut
            steps.append(
                replace(
                    step,
                    id=moved(step.id),
                    parent=ROOT_ID if step.before is None else step.parent and moved(step.parent),
                    depth=step.depth + 1,
                    token_ids=step.token_ids[cut:],
                    origins=step.origins[cut:],
                    loss_mask=step.loss_mask[cut:],
                    sampling_logprobs=np.zeros(tokens),
                    entropies=np.zeros(tokens),
                )
            )
        leaves += [replace(leaf, step_id=moved(leaf.step_id)) for leaf in tree.leaves]
    # By numbers: as text, "0.10" stands before "0.2".
    steps.sort(key=lambda step: step.ordinals)
    return Tree(task=trees[0].task, group_id="warmup", steps=tuple(steps), leaves=tuple(leaves))
