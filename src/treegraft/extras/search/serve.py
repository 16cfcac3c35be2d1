"""A retrieval server over any search, in Search-R1's protocol (see `remote`).

Requests that come in while a search is under way are answered together after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treegraft import ToolError, ToolUnavailable
from treegraft.parts import interfaces, listener

MAX_BYTES = 8_000_000
"""Longest request, in bytes."""
MAX_HELD = 64_000_000
"""Bytes of all requests together that are being read or answered."""
BODY_S = 20.0
"""Longest time in which a request arrives, in seconds."""
MAX_QUERIES = 4096
"""In one request."""
MAX_TOP_K = 1000
MAX_QUERY_CHARS = 10_000
"""Of one query; questions and thoughts of agents are far shorter."""
MAX_PASSAGES = 100_000
"""Queries times passages of one request."""
SLICE = 32
"""Queries that are searched at once: between slices those of other requests have their turn."""
DEADLINE_S = 60.0
"""Longest time for one request, in seconds."""


class Turns:
    """Lets searches begin, few at once; of those that wait, the one whose request has had and asks
    for the fewest queries: a light request does not wait for heavy ones."""

    def __init__(self) -> None:
        self._running, self._numbers = 0, count()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def turn(self, had: int, size: int) -> AsyncIterator[None]:
        """Waits for the turn of `size` queries of a request that has had `had`."""
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (had + size, next(self._numbers), size, mine))
        self._begin()
        try:
            await mine
            yield
        finally:
            # Cancelled while it waited: it was not let in, unless at the same moment.
            if mine.done() and not mine.cancelled():
                self._running -= size
            self._begin()

    def _begin(self) -> None:
        while self._waiting and (not self._running or self._running + self._waiting[0][2] <= SLICE):
            _, _, size, future = heapq.heappop(self._waiting)
            if not future.done():
                self._running += size
                future.set_result(None)


class _Busy(Exception):
    """There is no room for another request at present."""


class _Room:
    """The bytes of requests that the server holds."""

    def __init__(self) -> None:
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Gives a request's body, and counts it until the end of the block. Raises `_Busy`,
        TimeoutError, ValueError: too much of all, too slow, too long."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                # Read piece by piece: the length in the header is only the client's word.
                async for chunk in request.stream():
                    body += chunk
                    self._held += len(chunk)
                    if len(body) > MAX_BYTES:
                        raise ValueError(f"the request is longer than {MAX_BYTES} bytes")
                    if self._held > MAX_HELD:
                        raise _Busy
            yield bytes(body)
        finally:
            self._held -= len(body)


def search_app(backend: interfaces.SearchBackend, *, default_top_k: int, host: str) -> Starlette:
    """Returns the application; it closes the backend at its end.

    Args:
        default_top_k: passages for a request without "topk".
        host: where it listens. On loopback it answers to names of this machine alone, elsewhere to
            any name.
    """

    turns, room = Turns(), _Room()

    async def retrieve(request: Request) -> Response:
        # A page of another origin may send text without asking first, but not JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            detail = "expected the content type application/json"
            return JSONResponse({"detail": detail}, status_code=415)
        try:
            async with room.read(request) as body:
                return await answer(*_asked(body, default_top_k))
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, status_code=422)
        except TimeoutError:
            detail = f"the request did not arrive within {BODY_S:g} s"
            return JSONResponse({"detail": detail}, status_code=408)
        except _Busy:
            detail = "the server holds too many requests at present; ask again later"
            return JSONResponse({"detail": detail}, status_code=503)

    async def answer(queries: list[str], top_k: int, with_scores: bool) -> Response:
        found: list[list[interfaces.Passage]] = []
        try:
            async with asyncio.timeout(DEADLINE_S):
                for first in range(0, len(queries), SLICE):
                    some = queries[first : first + SLICE]
                    async with turns.turn(first, len(some)):
                        found += await backend.search(some, top_k)
        except TimeoutError:
            detail = f"the search took longer than {DEADLINE_S:g} s; ask for fewer queries at once"
            return JSONResponse({"detail": detail}, status_code=503)
        except ToolError as error:
            return JSONResponse(
                {"detail": str(error)},
                status_code=503 if isinstance(error, ToolUnavailable) else 422,
            )
        result = [[_shown(passage, with_scores) for passage in passages] for passages in found]
        # JSONResponse cannot hold half a surrogate pair, which a corpus may have.
        return Response(json.dumps({"result": result}), media_type="application/json")

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
        # Beyond loopback other machines reach it anyway, by names that nobody here can list.
        middleware=[Middleware(listener.OwnNames, host=host)] if listener.is_loopback(host) else [],
    )


def _shown(passage: interfaces.Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "contents": passage.contents}
    return {"document": document, "score": passage.score} if with_score else document


def _asked(body: bytes, default_top_k: int) -> tuple[list[str], int, bool]:
    """Returns queries, passages wanted for each, and whether with scores. Raises ValueError for
    any other request."""
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
    if (longest := max(map(len, queries), default=0)) > MAX_QUERY_CHARS:
        raise ValueError(f"'queries': got {longest} characters, expected {MAX_QUERY_CHARS} at most")
    top_k = default_top_k if top_k is None else top_k
    # In Python `true` is a whole number too.
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"'topk': expected a whole number from 1 to {MAX_TOP_K}")
    if len(queries) * top_k > MAX_PASSAGES:
        raise ValueError(
            f"{len(queries)} queries with topk {top_k} ask for {len(queries) * top_k} passages;"
            f" expected {MAX_PASSAGES} at most"
        )
    return queries, top_k, bool(asked.get("return_scores", False))
