"""From [explore] to an explorer and to who gets a tree's branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treegraft.core.interfaces import Explorer
from treegraft.core.plugins import make, pick
from treegraft.explore.axpo import Axpo
from treegraft.explore.balanced import BalancedBranching
from treegraft.explore.budget import Allocation, Budget, Rounds, Shares
from treegraft.explore.commit import CommitBranching
from treegraft.explore.compose import Composed
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.explore.peaks import EntropyPeaks
from treegraft.explore.prefix import PREFIX_RULES, UniformPrefix
from treegraft.explore.tree_search import TreeSearch
from treegraft.settings.explore import ExploreSettings

EXPLORERS: Mapping[str, type[Explorer]] = {
    "independent": Independent,
    "entropy": EntropyBranching,
    "graft": HybridRollout,
    "tree_search": TreeSearch,
    "balanced": BalancedBranching,
    "entropy_peaks": EntropyPeaks,
    "prefix": UniformPrefix,
    "axpo": Axpo,
    "commit": CommitBranching,
}


def build_explorer(settings: ExploreSettings, *, vocab_size: int, penalty: float = 0.0) -> Explorer:
    """Returns the explorer of a recipe, several composed into one.

    Args:
        vocab_size: the tokenizer's, V in ARPO's normaliser.
        penalty: weight of the reward "overlong", see `independent.rewards_vary`.

    Raises:
        SettingError: an unknown name.
    """
    explorers = [_one_explorer(name, settings, vocab_size, penalty) for name in settings.explorers]
    return explorers[0] if len(explorers) == 1 else Composed(explorers)


def _one_explorer(
    name: str, settings: ExploreSettings, vocab_size: int, penalty: float
) -> Explorer:
    found = pick(name, EXPLORERS, "explore.explorers")
    if found is Axpo:
        return Axpo(settings.axpo)
    if found is CommitBranching:
        return CommitBranching(settings.commit)
    if found is BalancedBranching:
        return BalancedBranching(settings.entropy, settings.balanced, vocab_size=vocab_size)
    if found is EntropyBranching:
        return EntropyBranching(settings.entropy, vocab_size=vocab_size)
    if found is HybridRollout:
        hybrid = HybridRollout(
            settings.graft,
            num_leaves=settings.num_leaves,
            num_starts=num_starts(settings),
            is_spread=settings.explorers[0] == "balanced" or settings.num_first is not None,
        )
        return hybrid.in_stages(settings.num_first, settings.fill_from, penalty)
    if found is Independent:
        return Independent().in_stages(settings.num_first, settings.fill_from, penalty)
    if found is EntropyPeaks:
        return EntropyPeaks(settings.entropy_peaks)
    if found is TreeSearch:
        return TreeSearch(settings.tree_search)
    if found is UniformPrefix:
        return PREFIX_RULES[settings.prefix.rule](settings.prefix)
    explorer: Explorer = make(found, Explorer, name, "explore.explorers")
    return explorer


def num_starts(settings: ExploreSettings) -> int:
    """Returns how many first-level rollouts a tree opens at once."""
    # Starts come from the first explorer, as in `Composed`; the others only add to them.
    first = settings.explorers[0]
    if first not in ("entropy", "tree_search", "entropy_peaks", "axpo"):
        return settings.num_leaves
    num: int = getattr(settings, first).num_starts
    return min(num, settings.num_leaves)


def build_allocation(settings: ExploreSettings) -> Callable[[Budget], Allocation]:
    """Returns a function that makes, for each tree, the rule that grants its branches."""
    if settings.entropy.allocation == "shares":
        return lambda budget: Shares(budget, min(num_starts(settings), budget.max_leaves))
    return lambda budget: Rounds(budget, settings.entropy.ranking)
