"""GiGPO: what it brings."""

from __future__ import annotations

from treegraft.parts import OutcomeKind, Registry

GIGPO = OutcomeKind(compare="treegraft.extras.methods.gigpo_math:compared")


def register(registry: Registry) -> None:
    """Registers GiGPO's credit."""
    registry.credit("gigpo", GIGPO)
    registry.credit(
        "states",
        "treegraft.extras.methods.gigpo_math:states",
        role="attribution",
    )
