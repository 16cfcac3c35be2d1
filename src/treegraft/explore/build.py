"""From [explore] to an explorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treegraft.core.import_paths import make, pick
from treegraft.core.interfaces import Explorer
from treegraft.core.kinds import ExplorerFacts
from treegraft.core.registry import loaded
from treegraft.explore.compose import Composed
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.settings.explore import ExploreSettings, explorer_kinds
from treegraft.settings.table import value_of

Maker = Callable[[ExploreSettings, ExplorerFacts], Explorer]


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
    known = _makers(settings)
    found = pick(name, known, "explore.explorers")
    if name in known:
        built_in: Explorer = loaded(known[name])(settings, facts)
        return built_in
    explorer: Explorer = make(found, Explorer, name, "explore.explorers")
    return explorer


def _makers(settings: ExploreSettings) -> Mapping[str, Maker | str]:
    plugged = {name: kind.make for name, kind in explorer_kinds(settings.explorers).items()}
    return {**plugged, **MAKERS}


def _independent(settings: ExploreSettings, facts: ExplorerFacts) -> Explorer:
    return Independent().in_stages(settings.num_first, settings.fill_from, facts.penalty)


def _entropy(settings: ExploreSettings, facts: ExplorerFacts) -> Explorer:
    return EntropyBranching(settings.entropy, vocab_size=facts.vocab_size)


def _graft(settings: ExploreSettings, facts: ExplorerFacts) -> Explorer:
    first = explorer_kinds(settings.explorers[:1]).values()
    hybrid = HybridRollout(
        settings.graft,
        num_leaves=settings.num_leaves,
        num_starts=num_starts(settings),
        is_spread=settings.num_first is not None or not all(one.plans_starts for one in first),
    )
    return hybrid.in_stages(settings.num_first, settings.fill_from, facts.penalty)


MAKERS: Mapping[str, Maker] = {"independent": _independent, "entropy": _entropy, "graft": _graft}


def num_starts(settings: ExploreSettings) -> int:
    """Returns how many first-level rollouts a tree opens at once."""
    # Starts come from the first explorer, as in `Composed`; the others only add to them.
    for kind in explorer_kinds(settings.explorers[:1]).values():
        if kind.opens_at_once:
            num: int = value_of(settings, kind.leaves.removeprefix("explore."))
            return min(num, settings.num_leaves)
    return settings.num_leaves
