"""Damaged and hostile run folders: each stays one line in the list of runs, no file outside its
folder is shown, and no question makes the viewer fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.error_codes import raises_code
from tests.support.viewed import as_lines, write_run

from treegraft.extras.lab.report.records import read_run
from treegraft.view.compare import compare_runs
from treegraft.view.runs import open_runs
from treegraft.view.server import build_app

SECRET = "a text that lies outside"
DEEP = "[" * 100_000
LONG = "9" * 5000
PATHS = (
    "",
    "/metrics",
    "/groups?file=update-000001",
    "/trees/update-000001/0",
    "/tokens/update-000001/0?leaf=0",
)


def asked(*runs: Path) -> TestClient:
    return TestClient(
        build_app(open_runs(runs)), base_url="http://127.0.0.1", raise_server_exceptions=True
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "whole", num_updates=2)


def _text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        (run / name).write_bytes(data)

    return damage


def _line(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes the first tree of the first update."""

    def damage(run: Path) -> None:
        file = as_lines(run)
        first, *rest = file.read_text().splitlines()
        tree = json.loads(first)
        change(tree)
        file.write_text("\n".join([json.dumps(tree), *rest]) + "\n")

    return damage


def _all_lines(content: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        as_lines(run).write_text(content)

    return damage


def _pack(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        file = run / "trees" / "update-000001.jsonl.zst"
        file.write_bytes(change(file.read_bytes()))

    return damage


def _link(name: str) -> Callable[[Path], None]:
    """Moves a file or folder out of the run and leaves a link."""

    def damage(run: Path) -> None:
        outside = run.parent / "outside" / name
        outside.parent.mkdir(parents=True, exist_ok=True)
        (run / name).rename(outside)
        (run / name).symlink_to(outside)

    return damage


def _loop(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(run / name)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "settings are a list": _text("config.json", "[]"),
    "settings are a number": _text("config.json", "7"),
    "settings are cut": _text("config.json", '{"run": {'),
    "settings are nested deeply": _text("config.json", DEEP),
    "settings of other types": _text("config.json", '{"run": 5, "tasks": []}'),
    "number of updates is a text": _text("config.json", '{"run": {"num_updates": "x"}}'),
    "number of updates is a list": _text("config.json", '{"run": {"num_updates": [1]}}'),
    "settings are not text": _text("config.json", b"\xff\xfe"),
    "update is NaN": _text("metrics.jsonl", '{"update": NaN}\n'),
    "update is infinite": _text("metrics.jsonl", '{"update": 1e999}\n'),
    "update is a text": _text("metrics.jsonl", '{"update": "one"}\n'),
    "update is a table": _text("metrics.jsonl", '{"update": {"a": 1}}\n'),
    "metrics are nested deeply": _text("metrics.jsonl", f"{DEEP}\n"),
    "a metric is a table": _text("metrics.jsonl", '{"update": 1, "eval/accuracy": {"a": [1]}}\n'),
    "metrics are not text": _text("metrics.jsonl", b"\xff\xfe\n\x00\n"),
    "trees are nested deeply": _all_lines(f"{DEEP}\n"),
    "a tree is a number": _all_lines("5\n"),
    "a leaf without its step": _line(lambda tree: tree["leaves"][0].update(step_id="0.9.9")),
    "no leaves": _line(lambda tree: tree.pop("leaves")),
    "a step without a parent": _line(lambda tree: tree["steps"].pop(0)),
    "a reward is a text": _line(lambda tree: tree["leaves"][0].update(reward="one")),
    "a question is a number": _line(lambda tree: tree["task"].update(question=5)),
    "tokens are a text": _line(lambda tree: tree["steps"][1].update(token_ids="abc")),
    "an observation is a number": _line(lambda tree: tree["steps"][1]["content"].update(calls=[3])),
    "trees are cut": _pack(lambda data: data[:-5]),
    "trees are flipped": _pack(lambda data: data[:-9] + bytes([data[-9] ^ 8]) + data[-8:]),
    "trees are no frames": _pack(lambda data: b"?" + data),
    "settings lie outside": _link("config.json"),
    "metrics lie outside": _link("metrics.jsonl"),
    "trees lie outside": _link("trees"),
    "a link to itself among the trees": _loop("trees/update-000009.jsonl"),
    "metrics are a link to themselves": _loop("metrics.jsonl"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_one_line_of_the_list(whole: Path, tmp_path: Path, name: str) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(whole, bad)
    DAMAGES[name](bad)
    client = asked(bad, whole)
    runs = {one["name"]: one for one in client.get("/api/runs").json()}
    assert runs["whole"]["error"] is None and runs["whole"]["update"] == 2
    assert set(runs) == {"bad", "whole"}
    for path in PATHS:
        answer = client.get(f"/api/runs/bad{path}")
        assert answer.status_code in (200, 404, 409, 422), (path, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]
        assert client.get(f"/api/runs/whole{path}").status_code in (200, 404)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "trees"])
def test_nothing_outside_the_run_is_shown(whole: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    outside = tmp_path / "elsewhere"
    shutil.copytree(whole, run)
    shutil.copytree(whole, outside)
    as_lines(outside)
    for file in outside.rglob("*.json*"):
        file.write_text(file.read_text().replace("e1", SECRET).replace('"update"', f'"{SECRET}"'))
    (outside / "config.json").write_text(json.dumps({"run": {"name": SECRET}}))
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside / name)
    client = asked(run)
    answers = [client.get("/api/runs").text]
    answers += [client.get(f"/api/runs/run{path}").text for path in PATHS]
    assert not [text for text in answers if SECRET in text]


@pytest.mark.parametrize(
    "path",
    [
        f"/trees/update-{LONG}/0",
        f"/trees/update-000001/{LONG}",
        "/trees/update-000001/-1",
        "/trees/update-000001/%C2%B2",
        f"/trees/{'x' * 5000}/0",
        f"/tokens/update-000001/0?leaf={LONG}",
        "/tokens/update-000001/0?leaf=1e300",
        "/tokens/update-000001/0?leaf=nan",
        f"/groups?file=update-{LONG}",
    ],
)
def test_numbers_and_names_are_bounded(whole: Path, path: str) -> None:
    answer = asked(whole).get(f"/api/runs/whole{path}")
    assert answer.status_code in (200, 404), answer.text
    assert len(answer.text) < 100_000


def test_a_report_counts_the_lines_that_it_leaves_out(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = read_run(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'garbage\n{"update": "x"}\n')
    after = read_run(run)
    assert after.lines == before.lines
    assert set(after.notes) - set(before.notes) == {
        "damaged lines of metrics.jsonl were left out: 2"
    }


def test_a_comparison_leaves_out_the_same_lines(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    key, rows, notes = compare_runs([run])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'garbage\n{"update": "x"}\n')
    note = "run: damaged lines of metrics.jsonl were left out: 2"
    assert compare_runs([run]) == (key, rows, [*notes, note])
    (run / "metrics.jsonl").write_bytes(b"garbage\n")
    with raises_code("no-metrics-yet"):
        compare_runs([run])
