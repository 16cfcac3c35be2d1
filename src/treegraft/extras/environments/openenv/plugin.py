"""What brings sessions of OpenEnv servers."""

from __future__ import annotations

from treegraft.parts import Plugin

plugin = Plugin(
    name="openenv",
    environments={
        "openenv": "treegraft.extras.environments.openenv.environment:OpenEnvEnvironments"
    },
)
