"""From [explore] to an explorer."""

from __future__ import annotations

from treegraft.core.import_paths import make, pick
from treegraft.core.interfaces import Explorer
from treegraft.core.kinds import ExplorerFacts
from treegraft.core.registry import loaded
from treegraft.explore.compose import Composed
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.settings.explore import CORE_EXPLORERS, ExploreSettings, explorer_kinds
from treegraft.settings.table import value_of


def build_explorer(settings: ExploreSettings, *, vocab_size: int, penalty: float = 0.0) -> Explorer:
    """Returns the explorer of a recipe, several composed into one.

    Args:
        vocab_size: the tokenizer's, V in ARPO's normaliser.
        penalty: weight of the reward "overlong", see `independent.rewards_vary`.

    Raises:
        SettingError: an unknown name.
    """
    facts = ExplorerFacts(vocab_size=vocab_size, penalty=penalty)
    explorers = [_one_explorer(name, settings, facts) for name in settings.explorers]
    return explorers[0] if len(explorers) == 1 else Composed(explorers)


def _one_explorer(name: str, settings: ExploreSettings, facts: ExplorerFacts) -> Explorer:
    kinds = explorer_kinds([*CORE_EXPLORERS, *settings.explorers])
    makers = {name: kind.make for name, kind in kinds.items()}
    found = pick(name, makers, "explore.explorers")
    if name in makers:
        built_in: Explorer = loaded(found)(settings, facts)
        return built_in
    explorer: Explorer = make(found, Explorer, name, "explore.explorers")
    return explorer


def make_independent(settings: ExploreSettings, facts: ExplorerFacts) -> Explorer:
    """Returns the explorer of GRPO."""
    return Independent().in_stages(settings.num_first, settings.fill_from, facts.penalty)


def make_entropy(settings: ExploreSettings, facts: ExplorerFacts) -> Explorer:
    """Returns the explorer of ARPO."""
    return EntropyBranching(settings.entropy, vocab_size=facts.vocab_size)


def make_graft(settings: ExploreSettings, facts: ExplorerFacts) -> Explorer:
    """Returns the explorer of RAPO."""
    first = explorer_kinds(settings.explorers[:1]).values()
    hybrid = HybridRollout(
        settings.graft,
        num_leaves=settings.num_leaves,
        num_starts=num_starts(settings),
        is_spread=settings.num_first is not None or not all(one.plans_starts for one in first),
    )
    return hybrid.in_stages(settings.num_first, settings.fill_from, facts.penalty)


def num_starts(settings: ExploreSettings) -> int:
    """Returns how many first-level rollouts a tree opens at once."""
    # Starts come from the first explorer, as in `Composed`; the others only add to them.
    for kind in explorer_kinds(settings.explorers[:1]).values():
        if kind.opens_at_once:
            num: int = value_of(settings, kind.leaves.removeprefix("explore."))
            return min(num, settings.num_leaves)
    return settings.num_leaves
