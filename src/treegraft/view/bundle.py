"""`treegraft view RUN --bundle OUT`: the pages with the answers to what they ask, as files that any
web server gives out, and that open from a folder without one.

    OUT/index.html  static/   the pages, their modules joined into one script
    OUT/data/       index.js  RUN/run.js  RUN/FILE.js  RUN/FILE/TREE.js  RUN/buffer.js

A browser lets a page that was opened from a folder load scripts, but no JSON: each file of data is
a script that hands over one text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from treegraft.core.errors import DataError, SettingError
from treegraft.core.text import plain
from treegraft.core.types import GraftCause
from treegraft.runs.tree_files import TreePart
from treegraft.view.query import places_of
from treegraft.view.runs import RunReader, RunSet
from treegraft.view.server import DAMAGE, Api, answering, json_bytes, static_files

MOST_UPDATES = 10
"""Updates whose trees a bundle holds unless they are chosen."""
MOST_TRACES = 500
"""Traces of the buffer that a bundle holds beside those that were grafted."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; base-uri"
    " 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types bundle"
)
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+\.js)";$', re.M)
_EXPORT = re.compile(r"^export ((?:async )?(?:function\*?|const|class|let)) (\w+)", re.M)


@dataclass(slots=True)
class Bundle:
    """What was written: Bundle(path=Path("first.zip"), num_bytes=81234, updates={"first": (4, 9)},
    notes=[])."""

    path: Path
    num_bytes: int = 0
    """Of all files; a zip file is smaller."""
    updates: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By run: updates and evaluations whose trees it holds, and all of them."""
    notes: list[str] = field(default_factory=list)
    """A line for each file that could not be read."""


def write_bundle(
    runs: RunSet, out: Path, *, updates: str | None = None, buffer: Path | None = None
) -> Bundle:
    """Writes a copy of the viewer and of these runs into a new folder, or into a file with the
    suffix .zip.

    Args:
        updates: those whose trees are in it, such as "1,5,10-20", "all" or "none"; None for at most
            `MOST_UPDATES` of each run, evenly spread, with its first and its last evaluation.
        buffer: a Step-Trace Buffer outside the run folders.

    Raises:
        SettingError: `out` exists, or `updates` cannot be read or matches none.
    """
    if out.exists():
        raise SettingError(
            f"--bundle {out}: it exists already; expected a name that is free", code="bundle-exists"
        )
    wanted = None if updates is None else _parse_updates(updates)
    if updates is not None and updates.strip() != "none":
        files = [file for run in dict(runs).values() for file in run.files()]
        if files and not any(map(_parse_updates(updates), files)):
            there = [file.update for file in files]
            raise SettingError(
                f"--updates {updates}: these runs have no trees of such an update; expected some"
                f" of {min(there)} to {max(there)}, or all, or none",
                code="updates-without-trees",
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Bundle(out)
    # Beside the target, so that it can be moved there as a whole.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
        root = Path(place) / out.stem if out.suffix == ".zip" else Path(place) / out.name
        _Writer(runs, root, made, buffer).write(wanted)
        if out.suffix == ".zip":
            with zipfile.ZipFile(Path(place) / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for file in sorted(root.rglob("*")):
                    archive.write(file, file.relative_to(root.parent))
            (Path(place) / "zip").rename(out)
        else:
            root.rename(out)
    return made


def _parse_updates(text: str) -> Callable[[TreePart], bool]:
    """Returns whether a file of trees is wanted."""
    if text.strip() in ("all", "none"):
        return lambda _: text.strip() == "all"
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,12})\s*(?:-\s*(\d{1,12})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SettingError(
                f"--updates {text}: '{part.strip()}' is neither a number of an update nor a range"
                " from a lower to a higher one; expected some, such as 1,5,10-20, or all, or none",
                code="updates-invalid",
            )
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return lambda file: any(file.update in some for some in ranges)


def _spread(files: Sequence[TreePart]) -> Callable[[TreePart], bool]:
    """Chooses updates evenly, with the first and the last, and the first and last evaluations."""
    updates = sorted({file.update for file in files if file.kind == "update"})
    last = len(updates) - 1
    steps = min(MOST_UPDATES, len(updates))
    chosen = {updates[round(n * last / max(1, steps - 1))] for n in range(steps)}
    evaluated = sorted({file.update for file in files if file.kind != "update"})
    ends = {*evaluated[:1], *evaluated[-1:]}
    return lambda file: file.update in (chosen if file.kind == "update" else ends)


class _Writer:
    """Asks the server's own functions what the pages ask, and writes the answers."""

    def __init__(self, runs: RunSet, root: Path, made: Bundle, buffer: Path | None) -> None:
        self._runs, self._root, self._made = runs, root, made
        self._api = Api(runs, buffer)

    def write(self, wanted: Callable[[TreePart], bool] | None) -> None:
        for name, body in _pages().items():
            self._put(name, body)
        # One that appears meanwhile is not in this copy.
        runs = dict(self._runs)
        for number, run in enumerate(runs.values()):
            files = run.files()
            fits = wanted or _spread(files)
            chosen = [file for file in files if fits(file)]
            self._made.updates[run.name] = (len(chosen), len(files))
            self._write_run(f"{number}", run, chosen)
        index = {name: self._ask(getattr(self._api, name)) for name in ("meanings", "settings")}
        # The name says enough; the place on this machine is no one else's matter.
        index["runs"] = [
            one | {"path": one["name"], "is_live": False}
            for one in self._ask(self._api.runs)
            if one["name"] in runs
        ]
        index["made"] = time.strftime("%Y-%m-%d %H:%M")
        self._data("index", index)

    def _put(self, name: str, body: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        self._made.num_bytes += len(body)

    def _data(self, key: str, data: Any) -> None:
        # A text rather than an object: __proto__ in it would not be a name like others.
        text = json.dumps(data, separators=(",", ":")).replace("\\", "\\\\").replace("'", "\\'")
        self._put(f"data/{key}.js", f"treegraft('{key}','{text}');\n".encode())

    def _ask(self, method: Callable[[Request], Any], query: Any = None, **path: str) -> Any:
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": []}
        scope |= {"path_params": path, "query_string": urlencode(query or {}).encode()}
        return json.loads(bytes(answering(method)(Request(scope)).body))

    def _write_run(self, key: str, run: RunReader, files: Sequence[TreePart]) -> None:
        about = self._ask(self._api.run, run=run.name)
        if "files" in about:
            about["files"] = [
                one for one in about["files"] if one["name"] in {file.name for file in files}
            ]
        metrics = self._ask(self._api.metrics, run=run.name)
        self._data(f"{key}/run", {"run": about, "metrics": metrics})
        grafts: dict[str, list[dict[str, Any]]] = {}
        for file in files:
            groups = self._ask(self._api.groups, {"file": file.name}, run=run.name)
            self._data(f"{key}/{file.name}", groups)
            if "error" in groups:
                self._made.notes.append(f"{run.name}, {file.name}: {groups['error']}")
                continue
            for number in (group["n"] for group in groups["groups"]):
                where = {"run": run.name, "file": file.name, "n": str(number)}
                self._data(f"{key}/{file.name}/{number}", self._tree(where))
                for content_hash, place in _grafts(run, file.name, number):
                    grafts.setdefault(content_hash, []).append(place)
        self._data(f"{key}/buffer", self._buffer(run, grafts))

    def _tree(self, where: dict[str, str]) -> dict[str, Any]:
        """A tree with the tokens of all its paths; a step that several paths share once."""
        tree = self._ask(self._api.tree, **where)
        numbers: dict[str, int] = {}
        leaves = []
        for leaf in range(len(tree.get("leaves", ()))):
            found = self._ask(self._api.tokens, {"leaf": leaf}, **where)
            texts = [json.dumps(step) for step in found.get("steps", ())]
            leaves.append([numbers.setdefault(text, len(numbers)) for text in texts])
        return {"tree": tree, "steps": [json.loads(text) for text in numbers], "leaves": leaves}

    def _buffer(self, run: RunReader, grafts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Some of the traces, all those that were grafted with their trajectories, and where."""
        found = self._ask(self._api.buffer, run=run.name)
        if not found.get("stats", {}).get("is_there"):
            return {"answer": found}
        rows = {row["hash"]: row for row in found["rows"]}
        while len(rows) < min(MOST_TRACES, found["total"]):
            page = self._ask(self._api.buffer, {"offset": len(rows)}, run=run.name).get("rows")
            if not page:
                break
            rows |= {row["hash"]: row for row in page}
        members: dict[str, list[str]] = {}
        for content_hash in [*rows, *(one for one in grafts if one not in rows)]:
            trace = self._ask(self._api.trace, run=run.name, hash=content_hash)
            if "error" in trace:
                continue
            steps = trace.pop("steps")
            rows |= {row["hash"]: row for row in steps} | {content_hash: trace}
            members[content_hash] = [row["hash"] for row in steps]
        found["rows"] = []
        return {"answer": found, "rows": rows, "members": members, "grafts": grafts}


def _grafts(run: RunReader, file: str, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the traces that were grafted into a tree, with where; nothing of a damaged tree."""
    try:
        tree = run.tree(file, number)
    except (DataError, *DAMAGE):
        return
    causes = [step.cause for step in tree.steps]
    hashes = {one.content_hash for one in causes if isinstance(one, GraftCause)} - {None}
    for content_hash in sorted(map(str, hashes)):
        for place in places_of(tree, content_hash, file, number):
            yield content_hash, place


# ---------------------------------------------------------------------- the pages


def _pages() -> dict[str, bytes]:
    """The files of the pages by their path, the modules as one script."""
    files = {name: body for name, (body, _) in static_files().items()}
    modules = {
        name: files.pop(name).decode() for name in list(files) if re.fullmatch(r"[a-z]+\.js", name)
    }
    index = files.pop("index.html").decode()
    for old, new in (
        ('<html lang="en">', '<html lang="en" data-bundle>'),
        ('<script type="module" ', "<script defer "),
        ("<title>", f'<meta http-equiv="content-security-policy" content="{_POLICY}">\n<title>'),
    ):
        if index.count(old) != 1:
            raise AssertionError(f"index.html has no single {old}")
        index = index.replace(old, new)
    return {
        "index.html": index.encode(),
        "static/app.js": join_modules(modules).encode(),
        **{f"static/{name}": body for name, body in files.items()},
    }


def standalone_page(title: str, script: str, data: Any) -> str:
    """Returns a page of one file that needs neither a server nor the network. It has the viewer's
    styles, a script that may import its modules, and data as JSON in the element "data"."""
    files = {name: body.decode() for name, (body, _) in static_files().items()}
    modules = {name: text for name, text in files.items() if re.fullmatch(r"[a-z]+\.js", name)}
    joined, style = (
        join_modules(modules | {"page.js": script}, "page.js"),
        files["style.css"] + files["tree.css"],
    )
    policy = (
        f"default-src 'none'; script-src '{_digest(joined)}'; style-src '{_digest(style)}';"
        " base-uri 'none'; form-action 'none'; require-trusted-types-for 'script';"
        " trusted-types 'none'"
    )
    name = escape(plain(title))
    # Within a script element only "<" can end it, or begin a comment.
    text = json_bytes(data).decode().replace("<", r"\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><noscript>{name}. This page needs JavaScript.</noscript></main>
<script type="application/json" id="data">{text}</script>
<script>{joined}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    """The name by which a Content-Security-Policy allows an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def join_modules(modules: dict[str, str], entry: str = "app.js") -> str:
    """Returns a module, with those that it needs, as one plain script: a browser does not load
    modules from a folder.

    Args:
        modules: by name.
        entry: the module that is the page; all others have no top-level await.
    """
    needs: dict[str, set[str]] = {}
    left = [entry]
    while left:
        name = left.pop()
        needs[name] = {found[1] for found in _IMPORT.findall(modules[name])}
        left += needs[name] - needs.keys()
    parts = ['"use strict";', "const modules = {};"]
    for name in TopologicalSorter(needs).static_order():
        exported = [match[1] for match in _EXPORT.findall(modules[name])]
        text = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r'const {\1} = modules["\2"];', modules[name]))
        if re.search(r"^(import|export)\b", text, re.M):
            raise AssertionError(f"{name} imports or exports in a way that is not known here")
        start = "(async () => {" if name == entry else "(() => {"
        parts += [start, text, f'modules["{name}"] = {{ {", ".join(exported)} }};', "})();"]
    return "\n".join(parts)
