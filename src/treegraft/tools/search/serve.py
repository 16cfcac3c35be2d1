"""A retrieval server over any search, in Search-R1's protocol (see `remote`), and where it listens.

Requests that come in while a search is under way are searched for together after it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import signal
import socket
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treegraft.core.errors import SettingError, ToolError, ToolUnavailable
from treegraft.tools.search.tool import SearchBackend

MAX_BYTES = 8_000_000
"""Longest request, in bytes."""
MAX_QUERIES = 4096
"""In one request."""
MAX_TOP_K = 1000


def search_app(backend: SearchBackend, *, default_top_k: int, hosts: list[str]) -> Starlette:
    """Returns the application; it closes the backend at its end.

    Args:
        default_top_k: passages for a request that does not say.
        hosts: what the Host header may say; ["*"] for anything.
    """

    async def retrieve(request: Request) -> Response:
        try:
            queries, top_k, with_scores = _asked(await _body(request), default_top_k)
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, status_code=422)
        try:
            found = await backend.search(queries, top_k)
        except ToolError as error:
            return JSONResponse(
                {"detail": str(error)},
                status_code=503 if isinstance(error, ToolUnavailable) else 422,
            )
        result = [
            [
                (
                    {
                        "document": {"id": passage.id, "contents": passage.contents},
                        "score": passage.score,
                    }
                    if with_scores
                    else {"id": passage.id, "contents": passage.contents}
                )
                for passage in passages
            ]
            for passages in found
        ]
        return JSONResponse({"result": result})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await backend.close()

    routes = [Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise ValueError(f"the request is longer than {MAX_BYTES} bytes")
    return bytes(body)


def _asked(body: bytes, default_top_k: int) -> tuple[list[str], int, bool]:
    """Returns queries, passages wanted for each, and whether with scores. Raises ValueError for
    what is none of that."""
    try:
        asked: Any = json.loads(body)
    except RecursionError as error:
        raise ValueError("the request is nested too deeply") from error
    if not isinstance(asked, dict):
        raise ValueError(
            'expected an object such as {"queries": ["..."], "topk": 3, "return_scores": true}'
        )
    queries, top_k = asked.get("queries"), asked.get("topk")
    if (
        not isinstance(queries, list)
        or not all(isinstance(query, str) for query in queries)
        or len(queries) > MAX_QUERIES
    ):
        raise ValueError(f"'queries': expected a list of at most {MAX_QUERIES} strings")
    top_k = default_top_k if top_k is None else top_k
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"'topk': expected a whole number from 1 to {MAX_TOP_K}")
    return queries, top_k, bool(asked.get("return_scores", False))


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there; port 0 takes a free one.

    Raises:
        SettingError: the address is unknown or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(512)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or"
            " --port."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the address of the retrieval that listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/retrieve"


def accepted_hosts(host: str) -> list[str]:
    """Returns what the Host header of a request may say: names of this machine for a loopback
    address, else anything.

    A page in a browser can make its own name point to this machine, and would then be answered.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return ["127.0.0.1", "localhost", "[::1]", host] if is_loopback else ["*"]


class _Server(uvicorn.Server):
    """Remembers Ctrl-C: uvicorn raises the signal again at its end, which does nothing where a
    script's `&` had it ignored."""

    is_interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.is_interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)


def serve(app: Starlette, listener: socket.socket) -> None:
    """Answers requests until Ctrl-C, which lets those under way finish, for five seconds at most.

    Raises:
        KeyboardInterrupt: at the end, after Ctrl-C.
    """
    server = _Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=5
        )
    )
    with contextlib.closing(listener):
        server.run(sockets=[listener])
    if server.is_interrupted:
        raise KeyboardInterrupt
