"""ARPO: branching where entropy rises after a tool result."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treegraft.algo.arpo import branch_probability, entropy_change
from treegraft.core.keyed import keyed_unit
from treegraft.core.types import Branch, BranchCause, PathView, Start, Step
from treegraft.explore.independent import Independent
from treegraft.settings.explore import EntropySettings


class EntropyBranching(Independent):
    """Opens some leaves at the root and the others where the agent became unsure.

    ΔH = Σ_j (H_j - H_j^initial) / normaliser,   P = clip(α + β ΔH, 0, 1)
    threshold: branch where P > τ (Dong et al., arXiv 2507.19849, sec. 3.1)
    bernoulli: branch with probability P (their code)

    H_j is the exact entropy of the j-th of the first k tokens after a tool result, H_j^initial that
    of the trajectory's own j-th token. A branch is a child of the same step as the probed tokens.
    The probe costs nothing, since it is the trajectory's own continuation. When all leaves have
    ended, the rest of the budget becomes fresh starts. With the published α = τ, the threshold
    rule branches after every rise of entropy, for any β and normaliser.

    The statistic "lagging" is the released code's. It takes the entropies of the step that made
    the call, so each decision comes one result late and the first sees no change. Not copied: its
    baselines that outlive a batch, its truncated entropies, a branch that takes its own first
    segment as baseline, and a back-fill of one start a round, which may branch (ours opens all that
    is missing at once, when nothing is left to branch).
    """

    def __init__(self, settings: EntropySettings, *, vocab_size: int) -> None:
        """Takes ARPO's N, Z, k, rule, α, β and τ from the settings, and V, the tokenizer's size."""
        self._settings = settings
        # The lagging statistic reads a finished step, so it needs no token of the one under way.
        self.probe_tokens = settings.probe_tokens if settings.statistic == "probe" else 0
        size = float(vocab_size)
        normalisers = {"vocabulary": size, "log_vocabulary": math.log(size), "none": 1.0}
        self._normaliser = normalisers[settings.normaliser]

    def starts(self, max_leaves: int) -> Start:
        """Returns N starts."""
        return Start(min(self._settings.num_starts, max_leaves))

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        """Returns Z further children where the rule says so, else 0 with the numbers it saw."""
        own = self._settings
        current = probe if own.statistic == "probe" else self._first_entropies(path.steps[-1])
        # A branch inherits the baseline of its start, which is the first step of its path.
        change = entropy_change(current, self._first_entropies(path.steps[1]), self._normaliser)
        probability = branch_probability(change, own.base_prob, own.entropy_weight)
        is_coin = own.rule == "bernoulli"
        bar = keyed_unit(*path.noise_key, "branch") if is_coin else own.threshold
        # Recorded also where the rule says no, so that a run shows how near its steps were to
        # branching.
        cause = BranchCause(entropy_change=change, probability=probability, rule=own.rule, bar=bar)
        return Branch(own.num_branches if probability > bar else 0, cause)

    def _first_entropies(self, step: Step) -> list[float]:
        return step.sampled_entropies[: self._settings.probe_tokens]
