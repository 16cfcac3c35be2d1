"""GiGPO: its settings, and what it brings."""

from __future__ import annotations

from treegraft.parts import OutcomeKind, Plugin, Settings, setting, when

_BY_STATE = when("credit.attribution", "states", "evidence")


class _CreditFields(Settings):
    state_weight: float = setting(1.0, ge=0, idle_unless=_BY_STATE)
    """GiGPO's omega."""
    discount: float = setting(0.95, ge=0, le=1, idle_unless=_BY_STATE)
    """GiGPO's gamma: a step's return is the reward times this to the power of the steps after
    it."""


plugin = Plugin(
    name="gigpo",
    outcomes={"gigpo": OutcomeKind(compare="treegraft.extras.methods.gigpo_math:compared")},
    attributions={"states": "treegraft.extras.methods.gigpo_math:states"},
    settings={"credit": _CreditFields},
)
