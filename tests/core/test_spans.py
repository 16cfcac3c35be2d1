"""Spans of a run: a tree of what its seconds went to, in a file, at a collector, and across
processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.forked import Forked
from tests.support.tiny import differing, tiny

from treegraft.core import spans
from treegraft.train import train

pytest.importorskip("opentelemetry.sdk", reason="the extra spans is not installed")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Spans by id."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["context"]["span_id"]: line for line in lines}


def names_above(found: dict[str, dict[str, Any]], one: dict[str, Any]) -> list[str]:
    names = []
    while one["parent_id"] is not None:
        one = found[one["parent_id"]]
        names.append(one["name"])
    return names


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tiny(
        run={"dir": str(tmp_path_factory.mktemp("spans")), "name": "a"},
        explore={"explorers": ["entropy"], "entropy": {"num_starts": 2}},
        track={"spans": "file"},
    )
    return train(own, display=False).run_dir


def test_an_update_is_a_tree_of_spans(run_dir: Path) -> None:
    found = read(run_dir / "spans-rank-0.jsonl")
    by_name = Counter(one["name"] for one in found.values())
    assert by_name["update"] == by_name["learn"] == by_name["publish"] == 2
    assert by_name["evaluation"] == 3
    above: dict[str, set[tuple[str, ...]]] = {}
    for one in found.values():
        above.setdefault(one["name"], set()).add(tuple(names_above(found, one)))
    assert above["learn"] == {("update",)} == above["publish"]
    grown = {("tree", "rollout", "update"), ("tree", "evaluation")}
    # Branches are opened by the engine's thread, and hang in their tree all the same.
    assert above["engine"] == grown and above["tool search"] <= grown
    trees = [one for one in found.values() if names_above(found, one) == ["rollout", "update"]]
    assert Counter(one["attributes"]["group_id"][:2] for one in trees) == {"1/": 3, "2/": 3}
    assert {one["resource"]["attributes"]["treegraft.role"] for one in found.values()} == {"rank 0"}
    # Names that are proposed for OpenTelemetry.
    facts = [one["resource"]["attributes"] for one in found.values()]
    assert {(one["rl.system"], one["rl.run.id"]) for one in facts} == {("treegraft", run_dir.name)}
    updates = [one["attributes"] for one in found.values() if one["name"] == "update"]
    assert sorted(one["rl.loop.iteration"] for one in updates) == [1, 2]


def test_spans_change_nothing(run_dir: Path) -> None:
    own = tiny(
        run={"dir": str(run_dir.parent), "name": "b"},
        explore={"explorers": ["entropy"], "entropy": {"num_starts": 2}},
    )
    plain = train(own, display=False).run_dir
    different = [name for name in differing(plain, run_dir) if not name.endswith("config.json")]
    assert different == ["spans-rank-0.jsonl"]


def test_a_stopped_span_is_marked_and_the_next_process_begins_a_line(tmp_path: Path) -> None:
    path = tmp_path / "spans-rank-0.jsonl"
    for stop in (asyncio.CancelledError, ValueError):
        with contextlib.suppress(stop), spans.recorded("file", tmp_path, "rank 0"):
            with spans.span("whole"):
                pass
            with spans.span("stopped"):
                raise stop
        # As a killed process leaves it.
        with path.open("a", encoding="utf-8") as file:
            file.write('{"name": "cut')
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines[:-1]]
    told = [(one["name"], one["status"]["status_code"]) for one in found]
    assert told == [("whole", "UNSET"), ("stopped", "ERROR")] * 2


def test_nothing_is_recorded_and_imported_where_no_run_asks() -> None:
    assert isinstance(spans.span("x"), contextlib.nullcontext)
    assert spans.carrier() == spans.trace_headers() == {}
    with spans.joined({}, "rank 1"), spans.recorded(None, Path(), "rank 0"), spans.span("x", n=1):
        pass
    seen = "import sys, treegraft.train; print([m for m in sys.modules if 'opentel' in m])"
    with Forked(["-c", seen], cwd=Path(), stderr=subprocess.STDOUT) as process:
        assert process.communicate(timeout=120)[0].strip() == "[]"


def test_another_process_goes_on_with_a_span(tmp_path: Path) -> None:
    program = """
import json, sys
from treegraft.core import spans
with spans.joined(json.loads(sys.argv[1]), "rank 1"), spans.span("learn", step=2):
    pass
"""
    with spans.recorded("file", tmp_path, "rank 0"), spans.span("update"):
        carried = spans.carrier()
        assert spans.trace_headers().keys() == {"traceparent"}
        subprocess.run([sys.executable, "-c", program, json.dumps(carried)], check=True)
    found = read(tmp_path / "spans-rank-0.jsonl") | read(tmp_path / "spans-rank-1.jsonl")
    (learn,) = (one for one in found.values() if one["name"] == "learn")
    assert names_above(found, learn) == ["update"] and learn["attributes"] == {"step": 2}
    assert len({one["context"]["trace_id"] for one in found.values()}) == 1
    pids = {one["resource"]["attributes"]["process.pid"] for one in found.values()}
    assert os.getpid() in pids and len(pids) == 2


@pytest.fixture
def collector() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that takes spans by OTLP, and the names of those that came."""
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    came: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = trace_service.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                came.extend(one.name for scope in resource.scope_spans for one in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
    server.shutdown()
    server.server_close()


def test_a_collector_gets_them(collector: tuple[str, list[str]], tmp_path: Path) -> None:
    address, came = collector
    with spans.recorded(address, tmp_path, "rank 0"), spans.span("update"), spans.span("learn"):
        pass
    assert came == ["learn", "update"] and not any(tmp_path.iterdir())


def test_places_that_spans_cannot_go_to_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("spans-place-invalid"):
        spans.check_place("collector")
    with raises_code("spans-place-invalid"):
        train(tiny(track={"spans": "jsonl"}), display=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with raises_code("package-missing"):
        spans.check_place("file")
