"""The viewer's server: JSON about run folders, and the pages that show it. It answers GET requests
and writes nothing.

    Browser  --GET /api/...-->  this server  --reads-->  the run folders that were named
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from treegraft.core.addresses import public
from treegraft.core.errors import DataError, TreegraftError
from treegraft.core.listener import OwnNames
from treegraft.runs.health import recorded
from treegraft.runs.metrics import METRICS
from treegraft.settings.config import Config, known_settings
from treegraft.settings.load import setting_rows
from treegraft.settings.recipe import flatten
from treegraft.view.pages import explanations, page_warnings, path_tokens
from treegraft.view.runs import RunReader, RunSet

_log = logging.getLogger(__name__)
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src"
    " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The browser refuses inline scripts, foreign addresses, and text turned into markup."""
# A notebook shows the viewer in a frame, from another port of this machine.
_OWN_FRAMES = "frame-ancestors 'self' http://localhost:* http://127.0.0.1:*"
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
MAX_ANSWER = 64 << 20
"""Bytes of an answer."""
MOST_PLAIN = 20_000
"""Bytes from which an answer is compressed for browsers that take it so."""


class Guard(BaseHTTPMiddleware):
    """Puts the safety headers on every answer."""

    def __init__(self, app: ASGIApp, *, is_framed: bool = False) -> None:
        """Args: is_framed: pages of this machine, such as a notebook, may show it in a frame."""
        super().__init__(app)
        self._headers = dict(HEADERS)
        if is_framed:
            policy = CONTENT_SECURITY_POLICY.replace("frame-ancestors 'none'", _OWN_FRAMES)
            self._headers["content-security-policy"] = policy

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        answer = await call_next(request)
        # On refusals too: an error page could be framed or sniffed as well.
        answer.headers.update(self._headers)
        return answer


def _finite(value: Any) -> Any:
    # JSON has no NaN and no infinity; a loss that diverged becomes text.
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def json_bytes(data: Any) -> bytes:
    """Returns data as JSON that a browser reads, whatever a damaged record contains."""
    return json.dumps(_finite(data), separators=(",", ":")).encode()


def _json(data: Any, status: int = 200) -> Response:
    body = json_bytes(data)
    if len(body) > MAX_ANSWER:
        return _json({"error": f"the answer has more than {MAX_ANSWER >> 20} MB"}, 413)
    return Response(body, status, media_type="application/json")


def _refused(_: Request) -> Response:
    error = "refused: open the address that the viewer printed at its start, token included"
    return _json({"error": error}, 403)


def _whole(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    # No run has more of anything; longer texts are none of our pages'.
    return int(text) if re.fullmatch("[0-9]{1,12}", text) else None


def _state(run: RunReader) -> dict[str, Any]:
    """The run's state; of a damaged one, which must not hide the others, the error instead."""
    try:
        return run.state() | {"error": None}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


class Api:
    """The answers to the pages' requests."""

    # Plain functions, not coroutines: Starlette runs them in threads, since all of them read files.

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs

    def _run(self, request: Request) -> RunReader:
        name = request.path_params["run"]
        if name not in self._runs:
            known = [*self._runs]
            more = f" and {len(known) - 20} more" if len(known) > 20 else ""
            raise DataError(
                f"there is no run '{name:.80}'; expected one of {', '.join(known[:20])}{more}",
                code="no-such-run",
            )
        return self._runs[name]

    def _tree(self, request: Request) -> tuple[RunReader, str, int]:
        """The run, the file and the number of the requested tree."""
        number = request.path_params["n"]
        if not re.fullmatch("[0-9]{1,12}", number):
            raise DataError(
                f"there is no tree '{number:.40}'; expected its number, from 0", code="no-such-tree"
            )
        return self._run(request), request.path_params["file"], int(number)

    def runs(self, request: Request) -> Any:
        """The runs, with the numbers that change while they write."""
        self._runs.refresh()
        found = []
        for name, run in self._runs.items():
            place = {"name": name, "path": str(run.path), "folder": self._runs.folder_of(name)}
            found.append(place | _state(run))
        return found

    def run(self, request: Request) -> Any:
        """One run: its settings, its files of trees, and whether it has texts of tokens."""
        run = self._run(request)
        files = [
            {"name": f.name, "kind": f.kind, "update": f.update, "size": f.size}
            for f in run.files()
        ]
        config = run.config()
        return {
            "name": run.name,
            # Dotted names, as a recipe and the command line have them; former ones by their new.
            "settings": public(flatten(config)),
            "files": files,
            "has_texts": run.tokens.is_there,
            **run.state(),
        }

    def metrics(self, request: Request) -> Any:
        """The metrics of a run with their warnings; of too many lines for one page every stride-th,
        and those with an evaluation or a warning."""
        run = self._run(request)
        table = run.table()
        numbers, stride = table.chosen()
        lines = table.lines(numbers)
        for line in lines:
            line["warnings"] = page_warnings(recorded(line))
        # The trees say how many tasks were held out; a source may have fewer than the settings.
        evaluations = [file for file in run.files() if file.kind != "update"]
        num_eval = run.num_trees(evaluations[0].name) if evaluations else None
        every = dict.fromkeys(table.names(), 0.0)
        return {
            "stride": stride,
            "axes": table.axes(numbers),
            "lines": lines,
            "rules": explanations(recorded(every)),
            "num_eval": num_eval or run.setting("tasks", "num_eval"),
        }

    def meanings(self, _: Request) -> Any:
        """The meanings of metrics."""
        return dict(METRICS)

    def settings(self, _: Request) -> Any:
        """Returns every setting with its meaning, its default, and whether the default follows from
        other settings."""
        return [
            {
                "name": row.name,
                "default": row.value,
                "meaning": row.meaning,
                "follows": known_settings()[row.name].facts.default_of is not None,
            }
            for row in setting_rows(Config())
        ]

    def groups(self, request: Request) -> Any:
        """A summary of each tree of a file."""
        return self._run(request).groups(request.query_params.get("file", ""))

    def tree(self, request: Request) -> Any:
        """One tree as it is drawn, with its neighbours in the file."""
        run, name, number = self._tree(request)
        return run.drawn(name, number) | {
            "num_trees": run.num_trees(name),
            "has_texts": run.tokens.is_there,
        }

    def tokens(self, request: Request) -> Any:
        """The tokens of one path, with every column that was recorded."""
        run, name, number = self._tree(request)
        leaf = _whole(request, "leaf") or 0
        steps = path_tokens(run.path_of(name, number, leaf))
        for step in steps:
            step["texts"] = run.tokens.of(step["token_ids"])
        return {"leaf": leaf, "steps": steps}


def answering(method: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Returns a method with its answers as JSON; errors are answers too."""

    def answer(request: Request) -> Response:
        try:
            return _json(method(request))
        except TreegraftError as error:
            return _json({"error": str(error), "code": error.code}, 404)
        # A damaged file may make its readers raise anything.
        except Exception as error:
            _log.warning("%s could not be read", request.url.path, exc_info=error)
            found = f"{type(error).__name__}: {error}"
            return _json({"error": f"a file of this run is damaged ({found:.200})"}, 422)

    return answer


def build_app(
    runs: RunSet,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    is_framed: bool = False,
) -> ASGIApp:
    """Returns the viewer as an ASGI application.

    Args:
        runs: by name, from `open_runs`.
        host: the address on which it listens, for the check of the Host header.
        token: what a request has to know; None for a server that nothing but a test can reach.
        is_framed: whether pages of this machine may show it in a frame.
    """
    api = Api(runs)
    paths: Sequence[tuple[str, Callable[[Request], Any]]] = (
        ("/api/runs", api.runs),
        ("/api/meanings", api.meanings),
        ("/api/settings", api.settings),
        ("/api/runs/{run}", api.run),
        ("/api/runs/{run}/metrics", api.metrics),
        ("/api/runs/{run}/groups", api.groups),
        ("/api/runs/{run}/trees/{file}/{n}", api.tree),
        ("/api/runs/{run}/tokens/{file}/{n}", api.tokens),
    )
    routes: list[BaseRoute] = [Route(path, answering(method)) for path, method in paths]
    # Files by name within the folder; the library refuses paths and links that lead out of it.
    static = Path(__file__).with_name("static")
    routes.append(Route("/", lambda _: FileResponse(static / "index.html")))
    routes.append(Mount("/static", StaticFiles(directory=static)))
    if token is not None:
        # In the address, to which those in the pages are relative, and not in a cookie, which a
        # browser would send to every port of this machine.
        routes = [Mount(f"/{token}", routes=routes), Route("/{path:path}", _refused)]
    guards = [
        Middleware(Guard, is_framed=is_framed),
        # A page on the internet could point a name of its own here and read runs through it (DNS
        # rebinding).
        Middleware(OwnNames, host=host),
        Middleware(GZipMiddleware, minimum_size=MOST_PLAIN, compresslevel=1),
    ]
    return Starlette(routes=routes, middleware=guards)
