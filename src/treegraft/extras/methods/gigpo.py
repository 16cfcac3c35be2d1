"""GiGPO: its settings, and what it brings."""

from __future__ import annotations

from treegraft.parts import OutcomeKind, Registry, Settings, setting, when

_BY_STATE = when("credit.attribution", "states")


class _CreditFields(Settings):
    state_weight: float = setting(1.0, ge=0, idle_unless=_BY_STATE)
    """GiGPO's omega."""
    discount: float = setting(0.95, ge=0, le=1, idle_unless=_BY_STATE)
    """GiGPO's gamma: a step's return is the reward times this to the power of the steps after
    it."""


GIGPO = OutcomeKind(compare="treegraft.extras.methods.gigpo_math:compared")


def register(registry: Registry) -> None:
    """Registers GiGPO's credit."""
    registry.credit("gigpo", GIGPO)
    registry.credit(
        "states",
        "treegraft.extras.methods.gigpo_math:states",
        role="attribution",
        settings={"credit": _CreditFields},
    )
