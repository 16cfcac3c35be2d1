"""ARPO: branching where entropy rises after a tool result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from treegraft.algo.arpo import branch_probability, entropy_change
from treegraft.core.keyed import keyed_unit
from treegraft.core.types import (
    Branch,
    BranchCause,
    Generate,
    Graft,
    Origin,
    PathView,
    Start,
    Step,
    Tree,
)


class EntropyBranching:
    """Opens some leaves at the root and the others where the agent became unsure.

    ΔH = Σ_j (H_j - H_j^initial) / normaliser,   P = clip(α + β ΔH, 0, 1)
    threshold: branch where P > τ (Dong et al., arXiv 2507.19849, sec. 3.1)
    bernoulli: branch with probability P (their code)

    H_j is the exact entropy of the j-th of the first k tokens after a tool result, H_j^initial that
    of the trajectory's own j-th token. A branch is a child of the same step as the tokens probed,
    and inherits the start's H^initial; so the probe costs nothing, it is the trajectory's own
    continuation. What is left of the budget when all leaves have ended becomes fresh starts. With α
    = τ, as published, the threshold rule branches wherever entropy rose, whatever β and the
    normaliser are.

    The statistic "lagging" is the released code's: the entropies are those of the step that made
    the call, so a decision comes one result late and the first one sees no change. Not copied: its
    baselines that outlive a batch, its truncated entropies, a branch that takes its own first
    segment as baseline, and a back-fill of one start a round, which may branch (ours opens all that
    is missing at once, when nothing is left to branch).
    """

    def __init__(
        self,
        *,
        num_starts: int = 8,
        num_branches: int = 1,
        probe_tokens: int = 20,
        rule: Literal["threshold", "bernoulli"] = "threshold",
        base_prob: float = 0.5,
        entropy_weight: float = 0.2,
        threshold: float = 0.5,
        statistic: Literal["probe", "lagging"] = "probe",
        normaliser: float = 1.0,
    ) -> None:
        """Takes ARPO's N, Z, k, rule, α, β and τ; `normaliser` is V, ln V or 1."""
        self.probe_tokens: int | None = probe_tokens if statistic == "probe" else 0
        self._num_starts, self._num_branches, self._first = num_starts, num_branches, probe_tokens
        self._rule, self._threshold, self._statistic = rule, threshold, statistic
        self._base, self._weight, self._normaliser = base_prob, entropy_weight, normaliser

    def starts(self, max_leaves: int) -> Start:
        """Returns N starts."""
        return Start(min(self._num_starts, max_leaves))

    def before_step(self, path: PathView) -> Generate | Graft:
        """Returns Generate, always."""
        return Generate()

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        """Returns Z further children where the rule says so, else 0 with what it saw."""
        current = probe if self._statistic == "probe" else self._first_entropies(path.steps[-1])
        change = entropy_change(current, self._first_entropies(path.steps[1]), self._normaliser)
        probability = branch_probability(change, self._base, self._weight)
        bar = (
            self._threshold if self._rule == "threshold" else keyed_unit(*path.noise_key, "branch")
        )
        num = self._num_branches if probability > bar else 0
        return Branch(
            num,
            BranchCause(entropy_change=change, probability=probability, rule=self._rule, bar=bar),
        )

    def fill(self, tree: Tree, max_leaves: int) -> Start:
        """Returns the leaves that are still missing, all at once."""
        return Start(max_leaves - len(tree.leaves))

    def _first_entropies(self, step: Step) -> list[float]:
        sampled = (
            entropy
            for entropy, origin in zip(step.entropies, step.origins, strict=True)
            if origin is Origin.POLICY
        )
        return [entropy for _, entropy in zip(range(self._first), sampled, strict=False)]
