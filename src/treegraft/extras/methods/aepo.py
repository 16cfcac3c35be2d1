"""AEPO: a budget that follows the first rollout's entropies, and branches that do not pile up."""

from __future__ import annotations

from typing import Any

from treegraft.parts import ExplorerKind, Registry, Settings, setting, value_of


class _CreditFields(Settings):
    token_entropy_weight: float = setting(0.0, ge=0)
    """Raises the advantages of uncertain tokens (AEPO's a, 0.2 in its code): each is multiplied by
    1 + this times the standardised entropy of its token; 0 for none."""


def _has_effect(config: Any) -> str:
    return ""


def _starts_from_probe(config: Any) -> str:
    return "explore.explorers has 'balanced', which starts from one probe of the newest results"


def _base_counts(config: Any) -> str:
    if value_of(config, "explore.entropy.rule") == "threshold":
        return ""
    return "explore.explorers has 'balanced', whose coin knows explore.entropy.threshold alone"


def register(registry: Registry) -> None:
    """Registers AEPO's explorer and its weights of tokens."""
    registry.explorer(
        "balanced",
        ExplorerKind(
            make="treegraft.extras.methods.aepo_explorer:balanced",
            title="AEPO",
            leads=True,
            plans_starts=False,
            branches=True,
            idle={
                "explore.entropy": _has_effect,
                "explore.entropy.num_starts": _starts_from_probe,
                "explore.entropy.statistic": _starts_from_probe,
                "explore.entropy.base_prob": _base_counts,
                # The penalty moves the probability, so that a rise has to make up for it.
                "explore.entropy.entropy_weight": _has_effect,
                "explore.entropy.normaliser": _has_effect,
                "explore.entropy.threshold": _has_effect,
            },
            defaults={"explore.entropy.normaliser": "log_vocabulary"},
        ),
    )
    registry.credit(
        "token_entropy_weight",
        "treegraft.extras.methods.aepo_math:with_entropy_factors",
        role="refinement",
        settings={"credit": _CreditFields},
    )
