"""AEPO: a budget that follows the first rollout's entropies, and branches that do not pile up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from treegraft import Origin, Step, Tree, branch_probability, entropy_change
from treegraft.extras.methods.aepo_math import coin_probability, damping, num_global_rollouts
from treegraft.parts import (
    Branch,
    BranchCause,
    EntropyBranching,
    Expand,
    ExplorerFacts,
    PathView,
    Start,
    keyed,
)

BUDGET_WEIGHT = 0.5
"""β of AEPO's code: how strongly entropy after results moves leaves from the prompt to branches."""
PENALTY = 0.05
"""γ' of AEPO's code: loss of branching probability for each of the path's latest branches in a row,
as a share."""


class BalancedBranching(EntropyBranching):
    """Lets one rollout run to its end, then opens as many further ones as its entropies ask for;
    all of them branch where entropy rises, less and less for branches in a row.

    threshold: branch where (α + γ ΔH) · max(0, 1 - γ' l) > τ     (the paper)
    bernoulli: branch where (U + γ ΔH) · max(0, 1 - γ' l) ≥ τ     (the released code)

    Source: Dong et al., AEPO, arXiv 2510.14545. ΔH, α, γ and τ are [explore.entropy]'s, as in ARPO;
    m, the rollouts from the prompt, is `num_global_rollouts`. l counts the path's latest steps that
    asked for a branch, in a row; a step without a decision leaves it as it is.

    The probe is the first rollout of the tree, so none of its tokens is wasted; the released code
    throws its probe away. It branches like the others, before m is known, so a tree may have fewer
    than k - m leaves left for those. Leaves that no branch took become further rollouts from the
    prompt, m at a time and half of them at most, so that these can branch too; the code has one at
    a time. The code counts l for a whole prompt instead of a path, and resets it by what other
    prompts of the batch do; that is not here, since a tree's decisions would then depend on other
    trees and on which leaf comes first.
    """

    plans_starts = False
    """How many leaves are starts is known with the first of them."""

    def __init__(self, settings: Any, *, vocab_size: int) -> None:
        """Takes the settings of `EntropyBranching`."""
        super().__init__(settings, vocab_size=vocab_size)
        self.probe_tokens = settings.probe_tokens

    def starts(self, max_leaves: int) -> Start:
        """Returns one start, whose rollout is the probe."""
        return Start(1)

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        """Returns Z further children where the rule says so, else 0 with the numbers it saw."""
        first = path.steps[1]
        # Counted anew from the path: an explorer has no state between calls.
        in_a_row = 0
        key = path.noise_key
        for before, step in pairwise(path.steps[1:]):
            if _is_asked(before, step):
                # The coin of that time had the same key but for the step's id, which comes last.
                wants = self._decide(self._first_entropies(step), first, in_a_row, key, step.id)
                in_a_row = in_a_row + 1 if wants.num else 0
        return self._decide(probe, first, in_a_row, key, str(key[-1]))

    def _decide(
        self,
        current: Sequence[float],
        first: Step,
        in_a_row: int,
        key: tuple[int | str, ...],
        step_id: str,
    ) -> Branch:
        own = self._settings
        damped = damping(in_a_row, PENALTY)
        change = entropy_change(current, self._first_entropies(first), self._normaliser)
        if own.rule == "bernoulli":
            coin = keyed.keyed_unit(*key[:-1], step_id, "branch")
            probability = coin_probability(change, own.entropy_weight, own.threshold, damped)
            bar = coin
            branches = coin < probability
        else:
            base = own.base_prob * damped
            weight = own.entropy_weight * damped
            probability = branch_probability(change, base, weight)
            bar = own.threshold
            branches = probability > own.threshold
        cause = BranchCause(entropy_change=change, probability=probability, rule=own.rule, bar=bar)
        return Branch(own.num_branches if branches else 0, cause)

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand]:
        """Returns the rollouts from the prompt that the probe's entropies ask for; at later calls a
        part of what is missing, which leaves room for branches."""
        missing = max_leaves - len(tree.leaves)
        wanted = num_global_rollouts(self._changes(tree), max_leaves, weight=BUDGET_WEIGHT)
        if (more := wanted - sum(step.before == tree.root.id for step in tree.steps)) > 0:
            return Start(min(missing, more))
        # At most half, so that the rest can still branch.
        return Start(min(wanted, (missing + 1) // 2))

    def _changes(self, tree: Tree) -> list[float]:
        """ΔH of the probe's steps after a result; its own continuations are the first children."""
        by_id = {step.id: step for step in tree.steps}
        probe = []
        name = f"{tree.root.id}.0"
        while name in by_id:
            probe.append(by_id[name])
            name += ".0"
        if not probe:
            return []
        baseline = self._first_entropies(probe[0])
        found = []
        for before, step in pairwise(probe):
            if _is_asked(before, step):
                entropies = self._first_entropies(step)
                found.append(entropy_change(entropies, baseline, self._normaliser))
        return found


def _is_asked(before: Step, step: Step) -> bool:
    """Whether the rule decided at a step: not at a branch's own first one, nor around a graft."""
    is_branch = isinstance(step.cause, BranchCause)
    return not is_branch and step.origin is before.origin is Origin.POLICY


def balanced(explore: Any, facts: ExplorerFacts) -> BalancedBranching:
    """Returns the explorer of a table [explore]."""
    return BalancedBranching(explore.entropy, vocab_size=facts.vocab_size)
