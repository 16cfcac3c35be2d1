"""The advantages of an update's trees: the built-in credit by its settings, then the user's own
rule where a recipe names one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from treegraft.algo.advantages import assign_credit, batch_outcomes, scale_of
from treegraft.algo.groups import Floats
from treegraft.core.errors import SettingError
from treegraft.core.interfaces import CreditRule, EntropyScorer
from treegraft.core.kinds import OutcomeKind
from treegraft.core.registry import find, registered, weighed
from treegraft.core.types import Step, Tree
from treegraft.settings.config import Config
from treegraft.settings.policy import CreditSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What [credit] of a recipe names, found once; `credit_trees` credits by it."""

    outcome: str | OutcomeKind
    attribution: Any
    """The core's name, or a function of the trajectories of a group."""
    refinements: Sequence[tuple[Callable[..., Any], float]]
    """Those of extensions whose weight is not 0, with their weights."""
    rule: CreditRule | None
    """The function that credit.rule names, which sees each tree as the others have credited it."""


def find_credit(config: Config, rule: CreditRule | None = None) -> Credit:
    """Returns what [credit] names.

    Args:
        rule: in place of the function that credit.rule names; None for that one.

    Raises:
        SettingError: there is no such function, or none that credit.advantage or
            credit.attribution names.
    """
    outcome = _outcome(config.credit.advantage)
    return Credit(
        outcome=outcome,
        attribution=_attribution(config.credit),
        refinements=weighed("refinement", config.credit),
        rule=rule or _rule(config.credit.rule),
    )


def _named(name: str, seam: str, expected: str) -> Any:
    """The function that an extension has registered, or that at an import path."""
    setting = f"credit.{seam}"
    found = find(name, {}, seam, setting)
    if not callable(found) and not isinstance(found, OutcomeKind):
        raise SettingError(
            f"{setting}: '{name}' is a {type(found).__name__}; expected {expected}.",
            settings=[setting],
            code="credit-name-invalid",
        )
    return found


def _rule(name: str | None) -> CreditRule | None:
    if name is None:
        return None
    rule: CreditRule = _named(name, "rule", "a function that takes a tree and returns it")
    return rule


def credit_trees(trees: Sequence[Tree], config: Config, found: Credit | None = None) -> list[Tree]:
    """Returns the trees with advantages and weights filled in.

    Args:
        found: `find_credit` of the configuration; None finds it now.

    Raises:
        SettingError: the rule failed, or returned something other than its tree with other
            advantages.
    """
    credit = config.credit
    kind = config.credit.advantage
    found = found or find_credit(config)
    how = partial(
        assign_credit,
        advantage=found.outcome,
        leaf_weight=credit.leaf_weight,
        attribution=found.attribution,
        retrieval_reward=credit.retrieval_reward,
        retrieval_weight=credit.retrieval_weight,
        restarts=credit.restarts,
        learn_from_truncated=config.loss.learn_from_truncated,
    )
    outcomes: Sequence[Floats | None] = [None] * len(trees)
    if kind in ("reinforce++", "reinforce++-baseline"):
        outcomes = batch_outcomes(
            trees, has_baseline=kind == "reinforce++-baseline", restarts=config.credit.restarts
        )
    credited = [how(tree, outcomes=known) for tree, known in zip(trees, outcomes, strict=True)]
    # After the built-in credit, whose advantages they change.
    for refine, weight in found.refinements:
        credited = refine(credited, weight=weight)
    if found.rule is None:
        return credited
    # Last, so that the user's rule has the final word.
    return [_ruled(tree, found.rule, credit.rule) for tree in credited]


def credit_by_entropy(
    scorer: EntropyScorer, trees: Sequence[Tree], config: Config, found: Credit
) -> list[Tree]:
    """Returns `credit_trees` of the trees, with the entropies that credit reads made exact first,
    where an engine knows its top-k ones only."""
    if not trees:
        return []
    # Refinements compare tokens, whose entropies have to be of one kind.
    exact = scorer.with_exact_entropies(trees, everywhere=bool(found.refinements))
    return credit_trees(exact, config, found)


def _outcome(name: str) -> Any:
    """The core's names as they are; an extension's comparison of outcomes; or that at an import
    path, an `OutcomeKind` or its function alone."""
    if ":" not in name and name not in registered("advantage"):
        return name
    found = _named(name, "advantage", "a function of trajectories and eps, or an OutcomeKind")
    return found if isinstance(found, OutcomeKind) else OutcomeKind(compare=found)


def _attribution(credit: CreditSettings) -> Any:
    """The core's names as they are; another function with the settings filled in."""
    name = credit.attribution
    if name in ("soft", "hard"):
        return name
    found = _named(name, "attribution", "a function of trajectories, credit and scale")
    return partial(found, credit=credit, scale=scale_of(credit.advantage))


def _ruled(tree: Tree, rule: CreditRule, name: str | None) -> Tree:
    where = f"credit.rule '{name}', tree '{tree.group_id}'"
    # A user's function: whatever it raises, the message has to name the rule and the tree.
    try:
        found = rule(tree)
    except Exception as error:
        raise SettingError(
            f"{where}: it failed with {type(error).__name__}: {error}", code="credit-raised"
        ) from error
    if not isinstance(found, Tree):
        raise SettingError(
            f"{where}: got a {type(found).__name__}, expected the tree, with other advantages.",
            code="credit-no-tree",
        )
    if _with_advantages(found, _none) != _with_advantages(tree, _none):
        raise SettingError(
            f"{where}: got a tree that differs in more than advantages; expected the tree it was"
            " given, where only Leaf.advantage, Step.advantage and Step.credit_factors are other"
            " ones.",
            code="credit-other-tree",
        )
    try:
        found = _with_advantages(found, float)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"{where}: an advantage is not a number: {error}", code="advantage-no-number"
        ) from error
    # A NaN would reach every weight of the model with the next optimiser step.
    for leaf in found.leaves:
        has_one = leaf.advantage is not None and math.isfinite(leaf.advantage)
        if not (has_one if leaf.status.rule.in_group else leaf.advantage is None):
            raise SettingError(
                f"{where}: leaf '{leaf.step_id}' has advantage {leaf.advantage}; expected a finite"
                " number, or None of a leaf that has failed and left the group.",
                code="advantage-not-finite",
            )
    for step in found.steps:
        factors = () if step.credit_factors is None else tuple(step.credit_factors.tolist())
        if not all(map(math.isfinite, (step.advantage or 0.0, *factors))):
            raise SettingError(
                f"{where}: step '{step.id}' has advantage {step.advantage} and credit_factors"
                f" {factors}; expected finite numbers, one factor for each of its tokens, or None.",
                code="advantage-not-finite",
            )
    return found


def _with_advantages(tree: Tree, change: Callable[[Any], float | None]) -> Tree:
    """The tree with its advantages and factors changed, where they are not None."""

    def changed(value: float | None) -> float | None:
        return None if value is None else change(value)

    def with_advantage(step: Step) -> Step:
        factors = None if change is _none else step.credit_factors
        return replace(step, advantage=changed(step.advantage), credit_factors=factors)

    return replace(
        tree,
        steps=tuple(map(with_advantage, tree.steps)),
        leaves=tuple(replace(leaf, advantage=changed(leaf.advantage)) for leaf in tree.leaves),
    )


def _none(_: Any) -> None:
    return None
