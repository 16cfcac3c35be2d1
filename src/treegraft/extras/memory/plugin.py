"""The way of publishing that publish.kind = "memory" names."""

from __future__ import annotations

from treegraft.parts import Plugin

plugin = Plugin(name="memory", senders={"memory": "treegraft.extras.memory.senders:Senders"})
