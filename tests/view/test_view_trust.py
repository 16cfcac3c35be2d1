"""What a run folder from elsewhere, another page of the browser, or another user of the machine
cannot do with the viewer."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.support.viewed import expert_hash, served, write_run

from treegraft import trust
from treegraft.core.errors import DataError
from treegraft.core.files import open_inside, read_inside
from treegraft.runs.tree_files import TreePart
from treegraft.traces.buffer import TraceBuffer
from treegraft.view.runs import open_runs
from treegraft.view.server import build_app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first", num_updates=1)


def asked(run: Path, path: str, **app: Any) -> Any:
    client = TestClient(build_app(open_runs([run]), **app), base_url="http://127.0.0.1")
    return client.get(f"/api/runs/first/{path}")


def change(run: Path, *statements: str) -> None:
    with sqlite3.connect(run / "buffer" / "traces.sqlite") as connection:
        for one in statements:
            connection.execute(one)
    connection.close()


class RunsWhatItLoads:
    """Loads a local folder as sentence-transformers before version 6 does: its modules are code."""

    def __init__(self, place: str, **_: object) -> None:
        exec((Path(place) / "custom.py").read_text(), {})
        raise OSError("no weights")


@pytest.mark.parametrize("is_trusted", [False, True])
def test_an_encoder_that_a_run_folder_names_is_not_loaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    monkeypatch.setattr("sentence_transformers.SentenceTransformer", RunsWhatItLoads)
    folder, marker = run / "buffer" / "model", tmp_path / "marker"
    folder.mkdir()
    (folder / "modules.json").write_text("[]")
    (folder / "custom.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    change(run, f"UPDATE meta SET value = '{folder}' WHERE name = 'encoder'")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"buffer": {"encoder": str(folder)}}))
    if is_trusted:
        trust(run)
    answer = asked(run, "buffer?near=1&q=e2")
    # The settings of a run that the user trusts are the user's own word.
    assert marker.exists() is is_trusted, answer.text
    assert answer.status_code >= 400
    assert ("may hold code" in answer.json()["error"]) is not is_trusted
    assert asked(run, "buffer?q=e3").json()["total"] == 2, "words are searched for all the same"


ENDLESS = """CREATE VIEW {name} AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
SELECT i AS id, 'h' AS hash,
'""' AS key, '""' AS value, 1.0 AS reward, 's' AS source,
't' AS task_id, 'j' AS trajectory, 0 AS position, 0 AS terminal, 0 AS policy_version,
NULL AS added_at, NULL AS evicted_at FROM n"""


@pytest.mark.parametrize("path", ["buffer", "buffer?q=x", "buffer/abc", "trees/update-000001/0"])
def test_an_endless_view_is_refused(run: Path, path: str) -> None:
    change(run, "DROP TABLE traces", ENDLESS.format(name="traces"))
    began = time.monotonic()
    answer = asked(run, path)
    assert time.monotonic() - began < 30
    # A tree is shown without what only the buffer knows.
    assert answer.status_code == (200 if path.startswith("trees") else 404)
    assert answer.status_code == 200 or "the view 'traces'" in answer.json()["error"]
    with pytest.raises(DataError, match="view 'traces'"):
        TraceBuffer.open_as_built(run / "buffer" / "traces.sqlite")


def test_what_acts_when_it_is_written_is_refused_by_a_run(run: Path) -> None:
    change(run, "CREATE TRIGGER gone AFTER INSERT ON traces BEGIN DELETE FROM traces; END")
    with pytest.raises(DataError, match="trigger 'gone'"):
        TraceBuffer.open_as_built(run / "buffer" / "traces.sqlite")


def test_a_question_to_the_buffer_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegraft.view.buffer.DEADLINE_S", -1.0)
    row = "SELECT i, i || 'h', '\"\"', '\"\"', 1, 's', 't', 'j', 0, 0, 0, NULL, NULL FROM n"
    numbers = "WITH RECURSIVE n(i) AS (SELECT 9 UNION ALL SELECT i + 1 FROM n LIMIT 20000)"
    change(run, f"INSERT INTO traces {numbers} {row}")
    answer = asked(run, "buffer?q=nowhere")
    assert answer.status_code == 404 and "interrupted" in answer.json()["error"]


def test_an_answer_has_so_many_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegraft.view.buffer._MAX_BYTES", 100_000)
    change(run, f"UPDATE traces SET value = '\"{'x' * 60_000}\"'")
    assert "MB of text" in asked(run, "buffer").json()["error"]
    monkeypatch.setattr("treegraft.view.server.MAX_ANSWER", 100)
    answer = asked(run, "groups?file=update-000001")
    assert answer.status_code == 413 and len(answer.content) < 100


# ---------------------------------------------------------------------- files


def test_only_plain_files_inside_are_opened(tmp_path: Path) -> None:
    inside = tmp_path / "run"
    inside.mkdir()
    (inside / "a").write_bytes(b"abc")
    (inside / "to-a").symlink_to(inside / "a")
    assert read_inside(inside / "a", inside) == read_inside(inside / "to-a", inside) == b"abc"
    (tmp_path / "secret").write_text("s")
    (inside / "out").symlink_to(tmp_path / "secret")
    os.mkfifo(inside / "pipe")
    for name in ("out", "pipe", "missing", "."):
        with pytest.raises(OSError):
            open_inside(inside / name, inside)
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_inside(inside / "a", inside, most=2)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "buffer.json", "trees/updates-000000.jsonl.zst"),
        "checkpoints/best/tokenizer.json",
    ],
)
def test_a_pipe_in_a_run_folder_keeps_nobody_waiting(run: Path, name: str) -> None:
    app = build_app(open_runs([run]))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    answers: list[int] = []

    def ask() -> None:
        client = TestClient(app, base_url="http://127.0.0.1")
        for path in ("", "/first", "/first/buffer", "/first/trees/update-000001/0"):
            answers.append(client.get(f"/api/runs{path}").status_code)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert len(answers) == 4


def test_a_link_that_is_changed_between_look_and_opening(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to the folder cannot win a race: what was opened is looked at."""
    other = write_run(tmp_path / "other", num_updates=1, note="elsewhere")
    reader = open_runs([run])["first"]
    (file,) = (run / "trees").glob("updates-*")
    assert reader.num_trees("update-000001") == 2
    found = reader._part
    reader.groups("update-000001")

    def part(name: str) -> TreePart:
        looked_at = found(name)
        file.unlink()
        file.symlink_to(other / "trees" / file.name)
        return looked_at

    monkeypatch.setattr(reader, "_part", part)
    for read in (
        lambda: [*reader.raw_lines("update-000001")],
        lambda: reader.path_of("update-000001", 0, 0),
    ):
        shutil.copy(other / "trees" / file.name, file)
        with pytest.raises((OSError, DataError), match=r"not a plain file|has no trees"):
            read()
        file.unlink()


# ---------------------------------------------------------------------- the token


def test_without_the_token_nothing_is_answered(run: Path) -> None:
    with served(run) as address, httpx.Client() as browser:
        root = address.removesuffix("a-token/")
        for path in ("", "api/runs", "static/app.js", "wrong/", "a-token", "a-token-/api/runs"):
            answer = browser.get(f"{root}{path}")
            assert answer.status_code == 403 and "first" not in answer.text
        # In the address it opens everything. A cookie would reach the other ports of this machine.
        page = browser.get(address)
        assert page.status_code == 200 and 'src="static/app.js"' in page.text
        for path in ("api/runs", "static/app.js"):
            assert browser.get(f"{address}{path}").status_code == 200
        assert not browser.cookies and browser.get(f"{root}api/runs").status_code == 403


def test_questions_change_nothing(run: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")
        }

    before = state()
    paths = ("", "metrics", "groups", "trees/update-000001/0", "tokens/update-000001/0", "buffer")
    for path in (*paths, "buffer?near=1&q=e", f"buffer/{expert_hash()}", "grafts/x", "task?id=t/1"):
        assert asked(run, path).status_code in (200, 404)
    assert state() == before


def test_a_linked_log_is_not_read(run: Path, tmp_path: Path) -> None:
    file = run / "buffer" / "traces.sqlite"
    outside = tmp_path / "outside"
    shutil.copy(file, outside)
    file.with_name("traces.sqlite-wal").symlink_to(outside)
    assert asked(run, "buffer").json()["stats"]["num_traces"] == 2
    assert json.loads((run / "buffer.json").read_text())["num_traces"] == 2
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("outside")] == ["outside"]
