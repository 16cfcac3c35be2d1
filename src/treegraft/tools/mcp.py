"""Model Context Protocol servers as sets of tools, through the official SDK (the extra "mcp").

Each server has a thread with an event loop of its own, in which the one connection to it lives from
the start of a run to its end: whoever calls a tool may live in another loop. A connection that ends
by itself is opened again, a limited number of times.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from treegraft.core.errors import SettingError, ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability, Signature
from treegraft.core.types import Task
from treegraft.settings.tools import McpSettings

CLOSE_S = 10.0
"""Longest wait for a server to end, in seconds; the SDK kills one that has not ended after a
few."""
BACKOFF_S = 0.2
"""Wait before the first restart, in seconds; it doubles each time."""
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_log = logging.getLogger(__name__)


class McpTool:
    """One tool of a server."""

    def __init__(
        self, server: McpServer, described: Any, *, capability: Capability, cacheable: bool
    ) -> None:
        """Args:
        described: the SDK's description of the tool.
        """
        self.own_name = str(described.name)
        """What the server calls it."""
        self.name = tag_of(self.own_name)
        self.description = " ".join(
            (described.description or described.title or f"The tool {self.own_name}.").split()
        )
        self.capability = capability
        self.cacheable = cacheable
        self.signature = signature_from(described.input_schema)
        self._server = server

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the texts of the result.

        Raises `ToolError` for arguments that are no JSON object, for what the server calls an
        error, and where the server ended during the call; `ToolUnavailable` where there is no
        server any more.
        """
        text_parameter = self.signature.text_parameter
        if text_parameter is not None:
            return await self._server.call(self.own_name, {text_parameter: body})
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ToolError(
                f"{self.name} needs a JSON object of its arguments; this is not JSON: {error}"
            ) from None
        if not isinstance(arguments, dict):
            raise ToolError(
                f"{self.name} needs a JSON object of its arguments; got {type(arguments).__name__}"
            )
        return await self._server.call(self.own_name, arguments)

    async def close(self) -> None:
        """Ends the server, for all its tools."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """The same, for callers without an event loop."""
        self._server.close()


class McpServer:
    """The connection to one server."""

    def __init__(self, settings: McpSettings) -> None:
        """Starts or reaches the server and reads its list of tools.

        Raises `SettingError` where the SDK is missing, an environment variable is not set, or the
        server gives no tools in time.
        """
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise SettingError(
                "tools.mcp: the package 'mcp' is not installed, which speaks to servers; run: pip"
                " install 'treegraft[mcp]'"
            ) from error
        self.settings = settings
        self._env = {name: _variable(name, settings) for name in settings.env}
        self._token = (
            None if settings.token_env is None else _variable(settings.token_env, settings)
        )
        self._num_restarts = 0
        self._client: Any = None
        self._error = ""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # lives as long as this
        self._loop = asyncio.new_event_loop()
        self._listed: concurrent.futures.Future[Sequence[Any]] = concurrent.futures.Future()
        self._changed, self._connected = asyncio.Event(), asyncio.Event()
        self._supervisor: asyncio.Task[Any] | None = None
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, daemon=True, name=f"treegraft-mcp-{settings.name}"
        )
        self._thread.start()
        atexit.register(self.close)
        try:
            described = self._listed.result(settings.start_timeout_s)
        except TimeoutError as error:
            self.close()
            raise SettingError(
                f"{self._place}: no list of tools within start_timeout_s ="
                f" {settings.start_timeout_s:g} s."
            ) from error
        except Exception as error:
            words = self._last_words()
            self.close()
            raise SettingError(
                f"{self._place}: it could not be started or reached: {error}{words}"
            ) from error
        self.tools = [
            McpTool(self, one, capability=self._capability(one), cacheable=settings.cacheable)
            for one in described
        ]
        """What it offers, in its order."""

    @property
    def _place(self) -> str:
        where = " ".join(self.settings.command) or self.settings.url
        return f"tools.mcp: server '{self.settings.name}' ({where})"

    def _capability(self, described: Any) -> Capability:
        if self.settings.capability != "auto":
            return Capability(self.settings.capability)
        hints = described.annotations
        return (
            Capability.STATELESS if hints is not None and hints.read_only_hint else Capability.NONE
        )

    # Calls, from any event loop

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the texts of a result. Raises as `McpTool` does."""
        if self._is_closing or not self._thread.is_alive():
            raise ToolUnavailable(
                f"the MCP server '{self.settings.name}' has ended: {self._error or 'it was closed'}"
            )
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._call(name, dict(arguments)), self._loop)
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        await self._connected.wait()
        client = self._client
        if client is None:
            raise ToolUnavailable(f"the MCP server '{self.settings.name}' has ended: {self._error}")
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(error.message or "the call failed") from None
            self._lose(client, error.message)
        except ValueError as error:  # a result in no known shape
            raise ToolError(
                f"the server answered in an unknown shape: {str(error).splitlines()[0]}"
            ) from None
        except Exception as error:  # whatever the transport raises when its other end is gone
            self._lose(client, f"{type(error).__name__}: {error}")
        else:
            text = _text_of(result)
            if result.is_error:
                raise ToolError(text or "the call failed")
            return text
        raise ToolError(f"the server of {tag_of(name)} ended during the call")

    def _lose(self, client: Any, reason: str) -> None:
        """Gives up a connection that ended by itself; the supervisor opens another."""
        if self._client is client:
            self._client, self._error = None, reason
            self._connected.clear()
            self._changed.set()

    # The thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._supervise())
        except (
            Exception,
            asyncio.CancelledError,
        ) as error:  # reported to who waits for the list, else to later calls
            self._error = f"{type(error).__name__}: {error}"
        finally:
            if not self._listed.done():
                self._listed.set_exception(ToolUnavailable(self._error or "it ended at once"))
            calls = asyncio.all_tasks(self._loop)
            for call in calls:
                call.cancel()
            self._loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))
            self._loop.close()

    async def _supervise(self) -> None:
        self._supervisor = asyncio.current_task()
        while True:
            self._changed.clear()
            try:
                await self._connect()
            except Exception as error:  # a command that is not there, a port without a server, a handshake that fails
                self._error = _innermost(error)
                if not self._listed.done():
                    raise
            if self._is_closing:
                return
            if self._num_restarts >= self.settings.max_restarts:
                _log.warning(
                    "%s ended and stays so after %d restarts: %s",
                    self._place,
                    self._num_restarts,
                    self._error,
                )
                break
            self._num_restarts += 1
            _log.warning(
                "%s ended: %s; restart %d",
                self._place,
                self._error + self._last_words(),
                self._num_restarts,
            )
            await asyncio.sleep(BACKOFF_S * 2 ** (self._num_restarts - 1))
        # Whoever waits for a connection learns that there is none.
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
                self._listed.set_result(await _list_tools(client))
            self._client = client
            self._connected.set()
            await self._changed.wait()
            self._client = None

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self.settings.url:
            import httpx2

            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            # A tool may take long; its deadline is the tool box's.
            timeout = httpx2.Timeout(self.settings.start_timeout_s, read=None)
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=headers, timeout=timeout)
            )
            return streamable_http_client(self.settings.url, http_client=http)
        command, *args = [os.path.expandvars(word) for word in self.settings.command]
        return stdio_client(
            StdioServerParameters(command=command, args=args, env=self._env), errlog=self._errors
        )

    def _last_words(self) -> str:
        """What a command wrote last to its standard error, for a message; empty where nothing is
        left of it."""
        try:
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        except (ValueError, OSError):
            return ""
        return f" (its last words: {lines[-1][:300]})" if lines else ""

    def close(self) -> None:
        """Ends the connection, and the process behind it. May be called again."""
        atexit.unregister(self.close)
        self._is_closing = True
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._wake)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("%s did not end within %g s", self._place, CLOSE_S)
        else:
            self._errors.close()

    def _wake(self) -> None:
        if self._client is None and self._supervisor is not None:
            # It may be waiting for a server that never says a word.
            self._supervisor.cancel()
        self._changed.set()
        self._connected.set()


def open_servers(settings: Sequence[McpSettings]) -> list[McpTool]:
    """Returns the tools of all servers, started.

    Raises:
        SettingError: a server that does not start, or two tools of one name; the others are ended
            again.
    """
    servers: list[McpServer] = []
    tools: dict[str, McpTool] = {}
    try:
        for one in settings:
            servers.append(McpServer(one))
            for tool in servers[-1].tools:
                if tool.name in tools:
                    raise SettingError(
                        f"tools.mcp: '{tool.own_name}' of server '{one.name}' and"
                        f" '{tools[tool.name].own_name}' are both named '{tool.name}' here; leave"
                        " one of them out with `tools`."
                    )
                if not one.tools or tool.own_name in one.tools:
                    tools[tool.name] = tool
            unknown = set(one.tools) - {tool.own_name for tool in servers[-1].tools}
            if unknown:
                offered = ", ".join(tool.own_name for tool in servers[-1].tools)
                raise SettingError(
                    f"tools.mcp: server '{one.name}' has no tool {sorted(unknown)}; it offers"
                    f" {offered or 'none'}."
                )
    except BaseException:
        for server in servers:
            server.close()
        raise
    return list(tools.values())


async def _list_tools(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return found


def tag_of(name: str) -> str:
    """Returns a server's name of a tool in lower-case letters and underscores, as a tag needs it:
    readFile2 gives read_file_two."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    spelled = re.sub(r"[0-9]", lambda digit: f"_{_DIGITS[int(digit[0])]}_", parted)
    return re.sub(r"[^a-z]+", "_", spelled.lower()).strip("_") or "tool"


def signature_from(schema: Mapping[str, Any]) -> Signature:
    """Returns the signature of a tool with this JSON schema; a single text is a call's whole
    body."""
    properties = schema.get("properties") or {}
    single = next(iter(properties), None) if len(properties) == 1 else None
    is_text = (
        single is not None
        and isinstance(properties[single], Mapping)
        and properties[single].get("type") == "string"
    )
    return Signature(dict(schema), single if is_text else None)


def _text_of(result: Any) -> str:
    """The texts of a result; what is no text is named."""
    parts: list[str] = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        if text is None and block.type != "text":
            kind = (
                getattr(block, "mime_type", None)
                or getattr(resource, "mime_type", None)
                or block.type
            )
            place = getattr(block, "uri", None) or getattr(resource, "uri", None)
            text = f"[{kind}{f' at {place}' if place else ', not shown'}]"
        parts.append(text or "")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _variable(name: str, settings: McpSettings) -> str:
    value = os.environ.get(name)
    if not value:
        raise SettingError(
            f"tools.mcp: server '{settings.name}' asks for the environment variable {name}, which"
            " is not set."
        )
    return value


def _innermost(error: BaseException) -> str:
    """What went wrong below the groups that the SDK's tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
