"""Settings of Model Context Protocol servers, and what brings their tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from treegraft.parts import Contradiction, Registry, Settings, setting


class McpSettings(Settings):
    name: str = setting(..., acts="nothing")
    """The server's name in messages."""
    command: list[str] = setting([], acts="runs")
    """Program and arguments of a server that is started here and spoken to over its standard input
    and output (variables are expanded)."""
    url: str = setting("", acts="sends")
    """Address of one that runs already and speaks streamable HTTP, such as
    http://127.0.0.1:8000/mcp; instead of `command`."""
    tools: list[str] = setting([], acts="nothing")
    """The tools to take, by the server's names; empty for all."""
    env: list[str] = setting([], acts="reads")
    """Names of environment variables that the command gets, with PATH, HOME and the like."""
    token_env: str | None = setting(None, acts="reads")
    """Name of the environment variable whose value is sent to the url as bearer token; None sends
    none."""
    capability: Literal["auto", "stateless", "none"] = "auto"
    """Whether trees may branch over its tools: "auto" where the server says that a tool only
    reads."""
    cacheable: bool = False
    """The same call always gives the same result."""
    max_restarts: int = setting(3, ge=0)
    """How often in a run a connection that ended by itself is opened again."""
    start_timeout_s: float = setting(30.0, gt=0)
    """Longest wait for its list of tools, in seconds."""
    max_answer_mb: int = setting(16, ge=1)
    """Largest answer that is read, in MiB; a larger one is an error that the agent reads."""


class _Tables(Settings):
    mcp: list[McpSettings] = []
    """Model Context Protocol servers, each {name = ..., command = [...]} or {name = ..., url =
    ...}; their tools are on in addition to those of `use`."""


def _wrong(config: Any) -> Iterator[Contradiction]:
    servers: list[McpSettings] = config.tools.mcp
    names = [server.name for server in servers]
    # Messages name a server by it alone.
    if len(set(names)) < len(names):
        text = f"tools.mcp: got servers named {names}, expected each name once."
        yield Contradiction(("tools.mcp",), text)
    for server in servers:
        if bool(server.command) == bool(server.url):
            both = "both" if server.url else "neither"
            yield Contradiction(
                ("tools.mcp",),
                f"tools.mcp: server '{server.name}' has {both} of command and url; expected one of"
                " them.",
            )
        for kind, unused in (("command", "token_env"), ("url", "env")):
            if getattr(server, kind) and getattr(server, unused):
                yield Contradiction(
                    ("tools.mcp",),
                    f"tools.mcp: server '{server.name}': {unused} would have no effect beside"
                    f" {kind}.",
                )


def _needs(config: Any) -> Iterator[tuple[str, str]]:
    if config.tools.mcp:
        yield "tools.mcp", "mcp"


def register(registry: Registry) -> None:
    """Registers the tools of Model Context Protocol servers."""
    registry.part(
        "toolset",
        "mcp",
        "treegraft.extras.mcp.client:open_servers",
        settings={"tools": _Tables},
        checks=(_wrong,),
        needs=_needs,
    )
