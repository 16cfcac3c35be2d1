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
    max_reply_tokens: int | None = _of_servers(None, ge=1)
    """Tokens of a server's reply; None for rollout.max_completion_tokens."""
    timeout_s: float = _of_servers(120.0, ge=0.1)
    """Deadline for one reply of a server."""
    max_retries: int = _of_servers(4, ge=0)
    """Repeated requests to a server after a failed one."""
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
