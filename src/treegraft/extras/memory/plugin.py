"""The way of publishing that publish.kind = "memory" names."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers the way of publishing that publish.kind = "memory" names."""
    registry.part("sender", "memory", "treegraft.extras.memory.senders:Senders")
