"""The teacher's settings in [buffer.build], and its place in the registry."""

from __future__ import annotations

from typing import Any

from treegraft.parts import Registry, Settings, setting, value_of

AGENT = "buffer.build.agent"


def _asks_a_server(config: Any) -> str:
    agent = value_of(config, AGENT)
    return "" if "://" in agent else f"{AGENT} is {agent!r}, not the URL of a server"


def _of_servers(default: Any, **facts: Any) -> Any:
    return setting(default, only_for="buffer build", idle_unless=(_asks_a_server,), **facts)


class TeacherSettings(Settings):
    model: str | None = _of_servers(None, acts="nothing")
    """Model of the server; None if it serves only one."""
    api_key_env: str | None = _of_servers(None, acts="reads")
    """Environment variable with the server's key; None if it wants none."""


def register(registry: Registry) -> None:
    """Registers the teacher."""
    registry.part(
        "agent",
        "server",
        "treegraft.extras.teacher.agent:teacher_of",
        settings={"buffer.build": TeacherSettings},
    )
