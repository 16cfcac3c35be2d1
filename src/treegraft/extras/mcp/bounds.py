"""Connections to Model Context Protocol servers with bounds: on an answer, on a line, and on the
stored standard error.

An answer that is too long or cannot be read becomes an error of its call, at once, and the
connection goes on.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
import mcp_types
import pydantic
from anyio.abc import ByteReceiveStream, Process
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from treegraft.extras.mcp import keeper
from treegraft.extras.mcp.keeper import GRACE_S
from treegraft.parts import plain

KEPT_BYTES = 4096
"""Stored bytes of a server's standard error, and of a line to find out whose answer it was."""
_ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"\\]{0,100}")')


class Pipes:
    """A server started as a process and spoken to over its standard input and output."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], max_bytes: int) -> None:
        """Starts nothing; `env` comes on top of PATH, HOME and the like."""
        self._command = list(command)
        self._max_bytes = max_bytes
        if sys.platform == "linux":
            parent = str(os.getpid())
            self._command = [sys.executable, "-I", keeper.__file__, parent, *command]
        self._env = get_default_environment() | dict(env)
        self._asked: set[int | str] = set()
        """Requests without an answer yet."""
        self._errors = bytearray()

    def last_lines(self) -> list[str]:
        """Returns the last lines that the server wrote to its standard error, at most 3."""
        lines = (line.strip() for line in self._errors.decode("utf-8", "replace").splitlines())
        # Without those in which a traceback underlines a place.
        return [line for line in lines if line.strip("~^ ")][-3:]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Any, Any]]:
        """Yields the streams of messages from and to the server.

        Raises OSError where the process cannot be started.
        """
        process = await anyio.open_process(self._command, env=self._env, start_new_session=True)
        assert process.stdin and process.stdout and process.stderr
        incoming, read_stream = anyio.create_memory_object_stream[Any](0)
        write_stream, outgoing = anyio.create_memory_object_stream[Any](0)
        self._asked.clear()
        async with anyio.create_task_group() as pumps:
            pumps.start_soon(self._read, process.stdout, incoming)
            pumps.start_soon(self._write, process, outgoing, incoming)
            pumps.start_soon(self._keep_errors, process.stderr)
            try:
                yield read_stream, write_stream
            finally:
                with anyio.CancelScope(shield=True):
                    # First, so that a server stuck on its output gets rid of it and can end.
                    read_stream.close()
                    write_stream.close()
                    await _end(process)
                pumps.cancel_scope.cancel()

    async def _read(self, source: ByteReceiveStream, incoming: Any) -> None:
        line = bytearray()
        is_long = False
        async with incoming:
            async for chunk in _chunks(source):
                *whole, rest = chunk.split(b"\n")
                for part in whole:
                    line += part
                    if not is_long:
                        await self._take(bytes(line), incoming)
                    line.clear()
                    is_long = False
                if not is_long:
                    line += rest
                if len(line) > self._max_bytes and not is_long:
                    # Told without waiting for its end; what still comes of it is dropped.
                    is_long = True
                    size = self._max_bytes / 2**20
                    text = f"the server's answer is larger than max_answer_mb = {size:g}"
                    await self._fail(bytes(line), text, incoming)
                    line.clear()

    async def _take(self, line: bytes, incoming: Any) -> None:
        if not line.strip():
            return
        try:
            message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except (ValueError, RecursionError) as error:
            # Other lines are what careless servers print between their messages.
            if b'"jsonrpc"' in line:
                text = f"the server's answer cannot be read: {reason_of(error)}"
                await self._fail(line, text, incoming)
            return
        self._asked.discard(getattr(message, "id", None))
        await _send(incoming, SessionMessage(message))

    async def _fail(self, line: bytes, text: str, incoming: Any) -> None:
        """Answers the request that a line belongs to; all that wait, where the line does not say
        which."""
        named: set[int | str] = set()
        # An id comes first or last as a rule; in between anybody's text may look like one.
        for end in (line[:KEPT_BYTES], line[-KEPT_BYTES:]):
            named |= set(map(_id_of, _ID.findall(end))) & self._asked
        for one in named if len(named) == 1 else set(self._asked):
            self._asked.discard(one)
            error = mcp_types.ErrorData(code=mcp_types.PARSE_ERROR, message=text)
            answer = mcp_types.JSONRPCError(jsonrpc="2.0", id=one, error=error)
            await _send(incoming, SessionMessage(answer))

    async def _write(self, process: Process, outgoing: Any, incoming: Any) -> None:
        assert process.stdin
        try:
            async with outgoing:
                async for sent in outgoing:
                    message = sent.message
                    if isinstance(message, mcp_types.JSONRPCRequest):
                        self._asked.add(message.id)
                    text = message.model_dump_json(by_alias=True, exclude_unset=True)
                    await process.stdin.send(text.encode() + b"\n")
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            # The session shall see the connection end, not wait for an answer.
            await incoming.aclose()

    async def _keep_errors(self, source: ByteReceiveStream) -> None:
        async for chunk in _chunks(source):
            self._errors += chunk
            del self._errors[:-KEPT_BYTES]


def reason_of(error: Exception) -> str:
    """Returns the first fault that pydantic found, or the error's first line."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"][-3:]))
        return plain(f"{place}: {first['msg']}" if place else first["msg"], 200)
    return plain(f"{type(error).__name__}: {error}".split("\n")[0], 200)


def _id_of(found: bytes) -> int | str:
    text = found.decode("utf-8", "replace")
    return text.strip('"') if text.startswith('"') else int(text)


async def _chunks(source: ByteReceiveStream) -> AsyncIterator[bytes]:
    """Yields what comes out of a pipe until it ends, is closed or breaks."""
    with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        while True:
            yield await source.receive()


async def _send(stream: Any, message: SessionMessage) -> None:
    # Once the session is gone, messages are read and dropped: the server may have to get rid of
    # them before it can end.
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        await stream.send(message)


async def _end(process: Process) -> None:
    """Ends a process and what it started: by the end of its input, then by signals."""
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        assert process.stdin
        await process.stdin.aclose()
    # After SIGTERM the keeper waits as long, then kills; killed itself, it could not.
    for name, wait_s in (("SIGTERM", GRACE_S), ("SIGKILL", 2 * GRACE_S)):
        with anyio.move_on_after(wait_s):
            # Not `wait`, which also waits for pipes that a child of the server may hold.
            while process.returncode is None:
                await anyio.sleep(0.01)
            break
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, getattr(signal, name))
    with anyio.move_on_after(GRACE_S):
        while process.returncode is None:
            await anyio.sleep(0.01)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                await stream.aclose()


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """HTTP whose answers, and events of a stream of events, end in an error beyond a size."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Returns the response; its body raises `httpx2.StreamError` where it grows too long."""
        # Unpacked, a small answer may be of any size.
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        # The SDK bounds the events of a stream itself.
        if response.headers.pop("content-encoding", "identity").lower() != "identity":
            text = "the server packs its answers, which was not asked for"
            response.stream = _Bounded(response.stream, 0, text)
        elif not response.headers.get("content-type", "").startswith("text/event-stream"):
            text = f"it is larger than max_answer_mb = {self._max_bytes / 2**20:g}"
            response.stream = _Bounded(response.stream, self._max_bytes, text)
        return response


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, max_bytes: int, error: str) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._max_bytes:
                # The SDK makes this an error of the one call.
                raise httpx2.StreamError(self._error)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
