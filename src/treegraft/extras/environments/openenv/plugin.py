"""What brings sessions of OpenEnv servers."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers sessions of OpenEnv servers."""
    registry.environment(
        "openenv", "treegraft.extras.environments.openenv.environment:OpenEnvEnvironments"
    )
