"""Model Context Protocol servers as sets of tools, through the official SDK (the extra "mcp").

Each server has a thread with an event loop of its own, which has the one connection to it from
the start of a run to its end: a run has several loops, one after another.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import json
import logging
import os
import re
import threading
from collections.abc import Container, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import TYPE_CHECKING, Any

from treegraft import SettingError, Task, ToolError, ToolUnavailable
from treegraft.extras.mcp.plugin import McpSettings
from treegraft.parts import EnvironmentTool, addresses, interfaces, packages, plain

if TYPE_CHECKING:
    from treegraft.extras.mcp.bounds import Pipes

CLOSE_S = 10.0
"""Longest wait for a server to end, in seconds; the SDK kills one that has not ended after a
few."""
BACKOFF_S = 0.2
"""Wait before the first restart, in seconds; it doubles each time."""
MAX_BACKOFF_S = 30.0
"""Longest wait before a restart, in seconds."""
_log = logging.getLogger(__name__)


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, described: Any) -> None:
        """Takes name, description and arguments from `described`, the SDK's record of the tool."""
        self.own_name = str(described.name)
        """The server's name of it."""
        self.name = EnvironmentTool.tag_of(self.own_name)
        words = described.description or described.title or f"The tool {self.own_name}."
        self.description = " ".join(words.split())
        chosen = server.settings.capability
        hints = described.annotations
        # A tool that writes has a state, and no server can copy it for a branch.
        only_reads = chosen == "auto" and hints is not None and hints.read_only_hint
        self.capability = (
            interfaces.Capability.STATELESS
            if only_reads or chosen == "stateless"
            else interfaces.Capability.NONE
        )
        self.cacheable = server.settings.cacheable
        self.signature = interfaces.Signature.of_schema(described.input_schema)
        self._server = server

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the texts of the result.

        Raises `ToolError` for arguments that are no JSON object, for an error of the server's, and
        where the server ended during the call; `ToolUnavailable` where the server has ended for
        good.
        """
        arguments = self.signature.arguments(body, self.name)
        return await self._server.call(self.own_name, arguments)

    async def close(self) -> None:
        """Ends the server, for all its tools."""
        await asyncio.to_thread(self._server.close)


class McpServer:
    """The connection to one server."""

    def __init__(self, settings: McpSettings) -> None:
        """Starts or reaches the server and reads its list of tools.

        Raises `SettingError` where the SDK is missing, an environment variable is not set, or the
        server gives no tools in time.
        """
        packages.require("tools.mcp", "mcp")
        # What the SDK logs of a bad answer, with tracebacks, is the call's error already.
        for name in ("mcp", "client"):
            if (log := logging.getLogger(name)).level == logging.NOTSET:
                log.setLevel(logging.CRITICAL)
        self.settings = settings
        self._env = {name: _variable(name, settings) for name in settings.env}
        self._token = settings.token_env and _variable(settings.token_env, settings)
        self._client: Any = None
        self._error = ""
        self._pipes = _pipes_of(settings, self._env)
        self._loop = asyncio.new_event_loop()
        self._listed: concurrent.futures.Future[Sequence[Any]] = concurrent.futures.Future()
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        self._supervisor: asyncio.Task[Any] | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, daemon=True, name=f"treegraft-mcp-{settings.name}"
        )
        self._thread.start()
        # The thread is a daemon, so an exit without `close` would leave the server's process.
        atexit.register(self.close)
        try:
            described = self._listed.result(settings.start_timeout_s)
        except Exception as error:
            said = addresses.redacted(str(error))
            reason = f"it could not be started or reached: {said}{self._last_words()}"
            if isinstance(error, TimeoutError):
                reason = f"no list of tools within start_timeout_s = {settings.start_timeout_s:g} s"
            self.close()
            raise SettingError(f"{self._place}: {reason}", code="mcp-not-started") from error
        self.tools = [McpTool(self, one) for one in described]
        """Its tools, in its order."""

    @property
    def _place(self) -> str:
        where = " ".join(self.settings.command) or self.settings.url
        return f"tools.mcp: server '{self.settings.name}' ({where})"

    # Calls, from any event loop

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the texts of a result. Raises as `McpTool` does."""
        if self._is_closing or not self._thread.is_alive():
            raise ToolUnavailable(
                f"the MCP server '{self.settings.name}' has ended:"
                f" {self._error or 'it was closed'}",
                code="mcp-ended",
            )
        call = self._call(name, dict(arguments))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        # Over a restart; the toolbox's deadline bounds the wait.
        await self._connected.wait()
        client = self._client
        if client is None:
            raise ToolUnavailable(
                f"the MCP server '{self.settings.name}' has ended: {self._error}", code="mcp-ended"
            )
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            # So the SDK names an event beyond its bound; the connection is sound.
            if error.code != CONNECTION_CLOSED or "byte limit" in error.message:
                text = re.sub(r"\s*\[type=.*|(?<=\n)\s+", "", error.message, flags=re.DOTALL)
                raise ToolError(text or "the call failed", code="mcp-refused") from None
            self._lose(client, error.message)
        except ValueError as error:  # a result of unknown form
            from treegraft.extras.mcp.bounds import reason_of

            raise ToolError(
                f"the server answered in an unknown shape: {reason_of(error)}",
                code="mcp-answer-invalid",
            ) from None
        except Exception as error:  # any error of the transport once the other end is gone
            self._lose(client, _said(error))
        else:
            text = _text_of(result)
            if result.is_error:
                raise ToolError(text or "the call failed", code="mcp-refused")
            return text
        # Not made again: the server may have acted on it before it ended.
        raise ToolError(
            f"the server of {EnvironmentTool.tag_of(name)} ended during the call",
            code="mcp-ended-in-call",
        )

    def _lose(self, client: Any, reason: str) -> None:
        """Gives up a connection that ended by itself; the supervisor opens another."""
        if self._client is client:  # not yet replaced after another call
            self._client = None
            self._error = reason
            self._connected.clear()
            self._changed.set()

    # The thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._supervise())
        except (Exception, asyncio.CancelledError) as error:
            # Reported to the constructor if it still waits for the list, else to later calls.
            self._error = _said(error)
        finally:
            if not self._listed.done():
                self._listed.set_exception(
                    ToolUnavailable(self._error or "it ended at once", code="mcp-ended")
                )
            calls = asyncio.all_tasks(self._loop)
            for call in calls:
                call.cancel()
            self._loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))
            self._loop.close()

    async def _supervise(self) -> None:
        # One task opens and closes all connections, as the SDK's cancel scopes demand.
        self._supervisor = asyncio.current_task()
        num_restarts = 0
        while True:
            self._changed.clear()
            try:
                await self._connect()
            except Exception as error:  # no such command, no server at the port, a failed handshake
                self._error = _said(error)
                if not self._listed.done():
                    raise
            if self._is_closing:
                return
            if num_restarts >= self.settings.max_restarts:
                text = "%s ended and stays so after %d restarts: %s"
                _log.warning(text, self._place, num_restarts, self._error)
                break
            num_restarts += 1
            words = self._error + self._last_words()
            _log.warning("%s ended: %s; restart %d", self._place, words, num_restarts)
            await asyncio.sleep(min(BACKOFF_S * 2 ** min(num_restarts - 1, 20), MAX_BACKOFF_S))
        # Calls that wait for a connection fail now.
        self._client = None
        self._connected.set()
        while not self._is_closing:
            await self._changed.wait()
            self._changed.clear()

    async def _connect(self) -> None:
        """Holds one connection until it is lost or closed."""
        from mcp import Client

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(await self._transport(stack)))
            if not self._listed.done():
                page = await client.list_tools()
                found = list(page.tools)
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    found += page.tools
                self._listed.set_result(found)
            self._client = client
            self._connected.set()
            await self._changed.wait()
            self._client = None

    async def _transport(self, stack: AsyncExitStack) -> Any:
        if self._pipes is not None:
            return self._pipes.open()
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        from treegraft.extras.mcp.bounds import BoundedTransport

        max_bytes = self.settings.max_answer_mb * 2**20
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        # No read timeout: the toolbox has the deadline of a call.
        timeout = httpx2.Timeout(self.settings.start_timeout_s, read=None)
        transport = BoundedTransport(max_bytes)
        http = await stack.enter_async_context(
            httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport)
        )
        return streamable_http_client(
            addresses.expanded(self.settings.url, "tools.mcp"),
            http_client=http,
            max_sse_event_size=max_bytes,
        )

    def _last_words(self) -> str:
        """The last lines of a command's standard error, for a message; empty without any."""
        lines = [plain(line, 300) for line in self._pipes.last_lines()] if self._pipes else []
        return f". Its last lines on stderr: {' | '.join(lines)}" if lines else ""

    def close(self) -> None:
        """Ends the connection, and the process behind it. May be called again."""
        atexit.unregister(self.close)
        self._is_closing = True
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._wake)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("%s did not end within %g s", self._place, CLOSE_S)

    def _wake(self) -> None:
        if self._client is None and self._supervisor is not None:
            # It may be waiting for a server that never answers.
            self._supervisor.cancel()
        self._changed.set()
        self._connected.set()


def open_servers(settings: Sequence[McpSettings], taken: Container[str]) -> list[McpTool]:
    """Returns the tools of all servers, started.

    Raises:
        SettingError: a server that does not start, or two tools of one name, `taken` names
            included; the servers are ended again.
    """
    tools: dict[str, McpTool] = {}
    with ExitStack() as started:
        for one in settings:
            server = McpServer(one)
            started.callback(server.close)
            offered = {tool.own_name: tool for tool in server.tools}
            if unknown := sorted(set(one.tools) - set(offered)):
                raise SettingError(
                    f"tools.mcp: server '{one.name}' has no tool {unknown}; it offers"
                    f" {', '.join(offered) or 'none'}.",
                    code="mcp-tool-unknown",
                )
            for own_name, tool in offered.items():
                if one.tools and own_name not in one.tools:
                    continue
                if tool.name in taken or tool.name in tools:
                    other = f"'{tools[tool.name].own_name}'" if tool.name in tools else "a tool"
                    raise SettingError(
                        f"tools.mcp: '{own_name}' of server '{one.name}' is named '{tool.name}'"
                        f" here, as is {other} already; leave one of them out with `tools`.",
                        code="tools-same-name",
                    )
                tools[tool.name] = tool
        started.pop_all()
    return list(tools.values())


def _said(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # the SDK's tasks wrap it in groups
    if isinstance(error, FileNotFoundError):
        return f"there is no command '{error.filename}'"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _text_of(result: Any) -> str:
    """The texts of a result; other contents by their type."""
    parts: list[str] = []
    for block in result.content:
        # A resource has its text one level below.
        holder = getattr(block, "resource", block)
        parts.append(getattr(holder, "text", f"[{block.type}, not shown]"))
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _pipes_of(settings: McpSettings, env: Mapping[str, str]) -> Pipes | None:
    if not settings.command:
        return None
    from treegraft.extras.mcp.bounds import Pipes

    command = [os.path.expandvars(word) for word in settings.command]
    return Pipes(command, env, settings.max_answer_mb * 2**20)


def _variable(name: str, settings: McpSettings) -> str:
    if value := os.environ.get(name):
        return value
    raise SettingError(
        f"tools.mcp: server '{settings.name}' asks for the environment variable {name}, which is"
        " not set.",
        code="key-unset",
    )
