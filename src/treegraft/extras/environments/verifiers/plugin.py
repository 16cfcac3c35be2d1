"""What brings environments of the package verifiers."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers environments of the package verifiers."""
    registry.environment(
        "verifiers", "treegraft.extras.environments.verifiers.environment:VerifiersEnvironments"
    )
