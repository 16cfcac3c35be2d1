"""Environments of an OpenEnv server, over its WebSocket protocol: one session of the server for
each trajectory.

The server runs where it likes, with the package `openenv` and whatever its environment needs; here
only `websockets` is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from treegraft import SettingError, Task, ToolError, ToolUnavailable
from treegraft.parts import EnvironmentSettings, EnvironmentTool, Settings, addresses, interfaces

MAX_MESSAGE = 2**24
"""Longest message from a server, in bytes."""
_MCP_ACTIONS = {"Action", "CallToolAction", "ListToolsAction"}
_AGENTS_FAULT = {"VALIDATION_ERROR", "EXECUTION_ERROR"}


class OpenEnvOptions(Settings):
    """`environment.options` for "openenv"."""

    url: str
    """Where the server listens, such as http://127.0.0.1:8000."""
    tool: str = "step"
    """The agent's name of the one action of an environment without tools of its own."""
    tools: list[str] = Field(default_factory=list)
    """The tools to take, by the server's names; empty for all."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of reset, apart from the seed and the task's columns."""
    reward: Literal["sum", "last"] = "sum"
    """"sum": of the rewards of all steps; "last": of the last step that had one."""
    timeout_s: float = Field(10.0, gt=0)
    """Longest wait for the server's list of tools before the run, in seconds."""


class OpenEnvEnvironments:
    """The environments of one server."""

    has_reward = True

    def __init__(self, settings: EnvironmentSettings) -> None:
        """Asks the server for its tools.

        Raises:
            SettingError: the options are wrong, `websockets` is missing, or the server does not
                answer.
        """
        self.options = settings.options_as(OpenEnvOptions)
        self.name = f"openenv at {self.options.url}"
        self.capability = settings.capability_without_fork("an OpenEnv server copies no sessions")
        self._url = addresses.expanded(self.options.url, "environment.options").rstrip("/")
        # Steps go over the socket; plain HTTP has no session.
        scheme = "wss" if self._url.startswith("https") else "ws"
        self.ws_url = f"{scheme}://{self._url.split('://', 1)[-1]}/ws"
        self.calls: dict[str, tuple[str | None, interfaces.Signature]] = {}
        """The server's name of each tool of ours, None for the one action without a name, and its
        arguments."""
        self.tools: list[interfaces.Tool] = []
        for own_name, description, signature in self._described():
            name = EnvironmentTool.tag_of(own_name or self.options.tool)
            if name in self.calls:
                raise SettingError(
                    f"environment.options: two tools of the server are named '{name}' here; leave"
                    " one out with tools.",
                    code="tools-same-name",
                )
            self.calls[name] = (own_name, signature)
            self.tools.append(EnvironmentTool(name, description, self.capability, signature))

    def make(self) -> OpenEnvEnvironment:
        """Returns a fresh environment, not yet connected."""
        return OpenEnvEnvironment(self)

    def connection(self) -> Mapping[str, Any]:
        """Returns the arguments of `connect`."""
        is_here = urlsplit(self.ws_url).hostname in ("localhost", "127.0.0.1", "::1")
        return {
            "uri": self.ws_url,
            "max_size": MAX_MESSAGE,
            # environment.deadline_s bounds the whole reset.
            "open_timeout": None,
            # True: the proxy of the process's environment, which cannot reach this machine.
            "proxy": None if is_here else True,
        }

    def _described(self) -> list[tuple[str | None, str, interfaces.Signature]]:
        """The server's name, description and arguments of each tool."""
        try:
            import httpx

            reply = httpx.get(
                f"{self._url}/schema", timeout=self.options.timeout_s, trust_env=False
            )
            action = reply.raise_for_status().json()["action"]
            # Else the action is a call of a tool, and the server lists its tools on request.
            if action.get("title") not in _MCP_ACTIONS:
                words = str(action.get("description") or "Acts in the environment.").split()
                return [(None, " ".join(words), _signature(action))]
            listed = self._listed()
        except ImportError as error:
            raise SettingError(
                "environment.kind: \"openenv\" needs the package 'websockets'; run: pip install"
                " 'treegraft[environments]'",
                code="package-missing",
            ) from error
        except Exception as error:  # none there, or of another kind
            fault = addresses.redacted(str(error))
            raise SettingError(
                f"environment.options: url is '{self.options.url}', where no OpenEnv server"
                f" answers: {type(error).__name__}: {fault}. Start it first, or correct the url.",
                code="openenv-not-there",
            ) from error
        names = [str(one["name"]) for one in listed]
        # Before the run: a misspelt name would leave the agent without its tool.
        if unknown := sorted(set(self.options.tools) - set(names)):
            raise SettingError(
                f"environment.options: tools names {unknown}; the server offers"
                f" {', '.join(names) or 'none'}.",
                code="openenv-tool-unknown",
            )
        found: list[tuple[str | None, str, interfaces.Signature]] = []
        for name, one in zip(names, listed, strict=True):
            if name in (self.options.tools or names):
                words = str(one.get("description") or f"The tool {name}.").split()
                # OpenEnv writes one name, the MCP servers behind it the other.
                schema = one.get("input_schema") or one.get("inputSchema") or {}
                found.append((name, " ".join(words), _signature(schema)))
        return found

    def _listed(self) -> list[dict[str, Any]]:
        from websockets.sync.client import connect

        with connect(**{**self.connection(), "open_timeout": self.options.timeout_s}) as socket:
            socket.send(json.dumps({"type": "step", "data": {"type": "list_tools"}}))
            data = _data(socket.recv(self.options.timeout_s))
            return list(data["observation"]["tools"])


class OpenEnvEnvironment:
    """One session of the server."""

    def __init__(self, kind: OpenEnvEnvironments) -> None:
        self._kind = kind
        self._socket: Any = None
        self._rewards: list[float] = []
        self._is_over = False

    async def reset(self, task: Task) -> str:
        """Opens a session and returns its first observation."""
        from websockets.asyncio.client import connect

        self._socket = await connect(**self._kind.connection())
        row = {}
        for name, value in EnvironmentTool.reset_arguments(task).items():
            # Of our own entries the seed alone: an environment may refuse arguments that it has
            # not.
            if name == "seed" or name in task.columns:
                row[name] = value
        data = json.loads(json.dumps(row, default=str)) | self._kind.options.reset
        result = await self._ask({"type": "reset", "data": data})
        return shown(result["observation"])

    async def call(self, name: str, body: str, task: Task) -> str:
        """Returns the observation of one step.

        Raises `ToolError` for an action that the server refuses and after the end of the episode,
        `ToolUnavailable` for a server that is gone.
        """
        if self._is_over:
            raise ToolError(EnvironmentTool.over, code="episode-over")
        own_name, signature = self._kind.calls[name]
        arguments = signature.arguments(body, name)
        action = (
            arguments
            if own_name is None
            else {"type": "call_tool", "tool_name": own_name, "arguments": arguments}
        )
        result = await self._ask({"type": "step", "data": action})
        if result.get("reward") is not None:  # many environments give one at the end alone
            self._rewards.append(float(result["reward"]))
        self._is_over = bool(result.get("done"))
        text = shown(result["observation"])
        return f"{text}\n[{EnvironmentTool.over}]" if self._is_over else text

    async def reward(self) -> float:
        """Returns the rewards so far as one number; 0 before any."""
        chosen = self._rewards if self._kind.options.reward == "sum" else self._rewards[-1:]
        return float(sum(chosen))

    async def close(self) -> None:
        """Ends the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        # A server that refuses a session says why before it closes.
        with suppress(ConnectionClosed):
            await self._socket.send(json.dumps(message))
        try:
            return _data(await self._socket.recv())
        except ConnectionClosed as error:
            raise ToolUnavailable(
                f"{self._kind.name}: the session has ended: {error}", code="openenv-session-ended"
            ) from error


def shown(observation: Mapping[str, Any]) -> str:
    """Returns an observation as text: the one text in it, else JSON; without OpenEnv's metadata.

    Raises `ToolError` where it says that a tool failed.
    """
    if "tool_name" in observation and "result" in observation:
        if observation.get("error"):
            raise ToolError(
                str(observation["error"].get("message") or observation["error"]),
                code="openenv-refused",
            )
        result = observation["result"]
        if isinstance(result, Mapping):  # in the wrapping of MCP
            content = result.get("content")
            if result.get("data") is not None:
                result = result["data"]
            elif isinstance(content, list) and all(isinstance(block, Mapping) for block in content):
                result = "\n".join(str(block.get("text", "")) for block in content)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    fields = {}
    for name, value in observation.items():
        # Empty fields are those of other kinds of actions.
        if name != "metadata" and value not in (None, ""):
            fields[name] = value
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def _data(message: str | bytes) -> dict[str, Any]:
    """The body of a server's message. Raises `ToolError` for an error of the agent,
    `ToolUnavailable` for others."""
    reply = json.loads(message)
    data: dict[str, Any] = reply.get("data") or {}
    if reply.get("type") != "error":
        return data
    text = str(data.get("message") or data)
    if data.get("code") in _AGENTS_FAULT:
        for one in data.get("errors") or ():
            text += f"; {'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}"
        raise ToolError(text, code="openenv-refused")
    if data.get("code") == "CAPACITY_REACHED":
        text += (
            "; raise its max_concurrent_envs, or lower rollout.max_live_trees or explore.num_leaves"
        )
    raise ToolUnavailable(
        f"the OpenEnv server says {data.get('code')}: {text}", code="openenv-failed"
    )


def _signature(schema: Mapping[str, Any]) -> interfaces.Signature:
    """The agent's arguments: without those that OpenEnv itself fills in."""
    properties = dict(schema.get("properties") or {})
    for name in ("metadata", "type"):
        properties.pop(name, None)
    required = [name for name in schema.get("required") or [] if name in properties]
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return interfaces.Signature.of_schema(
        {"type": "object", "properties": properties, "required": required, **definitions}
    )
