"""What brings environments of the package verifiers."""

from __future__ import annotations

from treegraft.parts import Plugin

plugin = Plugin(
    name="verifiers",
    environments={
        "verifiers": "treegraft.extras.environments.verifiers.environment:VerifiersEnvironments"
    },
)
