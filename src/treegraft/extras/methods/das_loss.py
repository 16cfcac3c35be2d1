"""DAS' preference pairs in the loss: DPO on the token that decides between a call and an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treegraft import Origin, Status, Step, Tree, TreeBatch
from treegraft.extras.methods.das import RULE
from treegraft.extras.methods.leaves import first_difference
from treegraft.parts import Leaf, RetryCause


@dataclass(frozen=True, slots=True)
class Decision:
    """A place where one side was sampled and the other one forced."""

    tree: Tree
    step: Step
    """The one that was sampled."""
    place: int
    """The token of the step that decides."""
    sides: tuple[int, int]
    """The tokens there: the one that was sampled, the one that was forced."""
    rewards: tuple[float, float]
    """Means of the leaves below them."""

    @property
    def is_tied(self) -> bool:
        """Whether neither side is preferred."""
        return self.rewards[0] == self.rewards[1]

    @property
    def prefers_call(self) -> bool:
        """Whether the call earned more than the answer."""
        return (self.rewards[0] > self.rewards[1]) == bool(self.step.content.calls)

    def pair(self) -> Tree:
        """Returns a tree of two paths: all that stands before the token, then the preferred token,
        and the rejected one."""
        above = self.tree.path(self.step.id)[:-1]
        before = [*(step.token_ids for step in above), self.step.token_ids[: self.place]]
        root = _step("0", np.concatenate(before), Origin.PROMPT)
        best = self.sides if self.rewards[0] > self.rewards[1] else self.sides[::-1]
        # As the policy would write them: these trees are never recorded.
        steps = [
            _step(f"0.{n}", np.array([token]), Origin.POLICY, self.step.temperature)
            for n, token in enumerate(best)
        ]
        leaves = tuple(
            Leaf(step_id=step.id, status=Status.COMPLETED, weight=0.5, advantage=1.0 - 2 * n)
            for n, step in enumerate(steps)
        )
        return Tree(
            task=self.tree.task, group_id=self.tree.group_id, steps=(root, *steps), leaves=leaves
        )


def _step(name: str, ids: np.ndarray, origin: Origin, temperature: float = 1.0) -> Step:
    zeros = np.zeros(len(ids))
    return Step(
        id=name,
        parent=None if name == "0" else "0",
        depth=name.count("."),
        token_ids=ids,
        origins=np.full(len(ids), origin),
        loss_mask=np.full(len(ids), origin is Origin.POLICY),
        sampling_logprobs=zeros,
        entropies=zeros,
        temperature=temperature,
    )


def decisions(tree: Tree) -> list[Decision]:
    """Returns the decisions of a scored tree of which both sides have leaves that did not fail."""
    steps = {step.id: step for step in tree.steps}
    below: dict[str, list[float]] = {}
    for path in tree.trajectories():
        if path.status.rule.in_group:
            for step in path.steps:
                below.setdefault(step.id, []).append(path.reward or 0.0)
    forced: dict[tuple[str, int, int], list[float]] = {}
    for step in tree.steps:
        if isinstance(step.cause, RetryCause) and step.cause.rule == RULE:
            place = first_difference(steps[step.cause.beside].written_ids, step.written_ids)
            # Else both begin alike, and what differs is no opening.
            if Origin.FORCED in step.origins[place : place + 1]:
                key = (step.cause.beside, place, int(step.token_ids[place]))
                forced.setdefault(key, []).extend(below.get(step.id, ()))
    return [
        Decision(
            tree=tree,
            step=own,
            place=place,
            sides=(int(own.token_ids[place]), token),
            rewards=(fmean(below[name]), fmean(rewards)),
        )
        for (name, place, token), rewards in forced.items()
        if rewards and name in below and (own := steps[name]).sampled_mask[place]
    ]


def preference_loss(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """Returns [P] DPO's loss of each pair.

    l = -log σ( β [ (log π(a) - log π_ref(a)) - (log π(b) - log π_ref(b)) ] )

    a is the opening of the preferred side, b that of the rejected one, up to the first token in
    which they differ: log-probabilities of what both share cancel, so the two tokens at that one
    place remain. Ties make no pair.

    Sources: DPO (Rafailov et al., arXiv 2305.18290, eq. 7) on the pairs of DAS (Zhang et al., arXiv
    2602.03304). Assumed or changed: the loss is on the deciding token alone. The side whose leaves
    have the higher mean reward is preferred; to the paper a needless search is an error, so that
    the answer is preferred where both sides are right.

    Args:
        logprobs, ref_logprobs: [P, 2] of a and b; the latter detached.
        beta: β > 0.
    """
    gaps = logprobs - ref_logprobs
    return -torch.nn.functional.logsigmoid(beta * (gaps[:, 0] - gaps[:, 1]))


def learn_pairs(trees: Sequence[Tree], settings: Any, learner: Any, sums: Any) -> float:
    """Adds the gradient of c / |P| Σ l over the pairs of an optimiser step's trees, with c =
    loss.pair_coef and l of `preference_loss`; returns this process's share of the loss.

    π_ref is the policy before the first update where the learner keeps it (loss.kl_coef > 0), else
    the policy at the beginning of the optimiser step: then l = log 2 and its gradient is β/2 (∇ log
    π(b) - ∇ log π(a)), that of DPO with a new reference in every step. The pairs have a pass of
    their own, as lessons have, so it does not matter how the trees are packed.
    """
    found = [one for tree in trees for one in decisions(tree)]
    pairs = [one for one in found if not one.is_tied]
    sums.add("pair/tied_frac", torch.tensor([float(one.is_tied) for one in found]))
    sums.add("pair/calls_frac", torch.tensor([float(one.prefers_call) for one in pairs]))
    total = 0.0
    for batch in _batches(pairs, learner):
        ref_logprobs = None
        if learner.reference is not None:
            with torch.no_grad(), learner.reference.in_place():
                ref_logprobs = by_pair(batch, learner.scores(batch)[0])
        logprobs = by_pair(batch, learner.scores(batch)[0])
        if ref_logprobs is None:
            ref_logprobs = logprobs.detach()
        losses = preference_loss(logprobs, ref_logprobs, settings.pair_beta)
        loss = settings.pair_coef / len(pairs) * losses.sum()
        torch.autograd.backward(loss)
        total += float(loss.detach())
        sums.add("pair/margin", (logprobs[:, 0] - logprobs[:, 1]).detach())
    return total


def _batches(pairs: Sequence[Decision], learner: Any) -> Iterable[TreeBatch]:
    return learner.demonstrations([one.pair() for one in pairs]) if pairs else ()


def by_pair(batch: TreeBatch, logprobs: Tensor) -> Tensor:
    """Returns [P, 2] the log-probabilities of the preferred and of the rejected token of each pair
    in a batch of `Decision.pair` trees, whose paths come in this order."""
    return logprobs.index_select(0, batch.tokens[batch.carries_loss]).view(-1, 2)
