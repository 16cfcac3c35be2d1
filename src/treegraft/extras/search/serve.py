"""A retrieval server over any search, in Search-R1's protocol (see `remote`).

Requests that come in while a search is under way are answered together after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
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
"""Longest time for one request, from its first byte to its answer, in seconds."""


def search_app(backend: interfaces.SearchBackend, *, default_top_k: int, host: str) -> Starlette:
    """Returns the application; it closes the backend at its end.

    Args:
        default_top_k: passages for a request without "topk".
        host: where it listens. On loopback it answers to names of this machine alone, elsewhere to
            any name.
    """

    async def retrieve(request: Request) -> Response:
        # A page of another origin may send text without asking first, but not JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _refused(415, "expected the content type application/json")
        try:
            async with asyncio.timeout(DEADLINE_S):
                queries, top_k, with_scores = _asked(await _body(request), default_top_k)
                found: list[list[interfaces.Passage]] = []
                for first in range(0, len(queries), SLICE):
                    found += await backend.search(queries[first : first + SLICE], top_k)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except ValueError as error:
            return _refused(422, str(error))
        except TimeoutError:
            return _refused(
                503, f"the request took longer than {DEADLINE_S:g} s; ask for fewer queries at once"
            )
        except ToolError as error:
            return _refused(503 if isinstance(error, ToolUnavailable) else 422, str(error))
        result = []
        for passages in found:
            result.append([_shown(passage, with_scores) for passage in passages])
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


async def _body(request: Request) -> bytes:
    """Returns the body. Raises ValueError if it is too long."""
    body = bytearray()
    # Read piece by piece: the length in the header is only the client's word.
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise ValueError(f"the request is longer than {MAX_BYTES} bytes")
    return bytes(body)


def _refused(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status_code=status)


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
    queries = asked.get("queries")
    top_k = asked.get("topk")
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
