"""APPO: finished rollouts branch where they were least sure."""

from __future__ import annotations

from treegraft.extras.methods.leaves import half_the_leaves
from treegraft.parts import ExplorerKind, OutcomeKind, Registry, Settings, setting


class PeaksSettings(Settings):
    """Branches of finished rollouts at their most uncertain steps (APPO, arXiv 2606.12384)."""

    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest are
    branches."""


class _LossFields(Settings):
    future_weight: float = setting(0.0, ge=0)
    """Raises advantages by how much likelier the policy has made what follows the token (APPO's b,
    1 in its code): each is multiplied by 1 + this times a factor from 1 to 1.2; 0 for none."""


APPO = OutcomeKind(
    compare="treegraft.extras.methods.appo_math:compared",
    finish="treegraft.extras.methods.appo_math:with_prefix_credit",
)


def register(registry: Registry) -> None:
    """Registers APPO's explorer, its credit and its factors of advantages."""
    registry.explorer(
        "entropy_peaks",
        ExplorerKind(
            make="treegraft.extras.methods.appo_explorer:entropy_peaks",
            title="APPO",
            leads=True,
            leaves="explore.entropy_peaks.num_starts",
            opens_at_once=True,
            branches=True,
        ),
        table=PeaksSettings,
    )
    registry.credit("appo", APPO)
    registry.objective(
        "future_weight",
        "treegraft.extras.methods.appo_loss:future_factors",
        role="factor",
        settings={"loss": _LossFields},
    )
