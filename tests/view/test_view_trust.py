"""What a run folder from elsewhere, another page of the browser, or another user of the machine
cannot do with the viewer."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.support.viewed import served, write_run

from treegraft.core.errors import DataError
from treegraft.core.files import open_inside, read_inside
from treegraft.runs.tree_files import TreePart
from treegraft.view.runs import open_runs
from treegraft.view.server import build_app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first", num_updates=1)


def asked(run: Path, path: str, **app: Any) -> Any:
    client = TestClient(build_app(open_runs([run]), **app), base_url="http://127.0.0.1")
    return client.get(f"/api/runs/first/{path}")


def test_an_answer_has_so_many_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "config.json",
        "trees/update-000001.jsonl.zst",
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
        for path in ("", "/first", "/first/metrics", "/first/trees/update-000001/0"):
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
    (file,) = (run / "trees").glob("update-*")
    assert reader.num_trees("update-000001") == 2
    found = reader._part

    def part(name: str) -> TreePart:
        looked_at = found(name)
        file.unlink()
        file.symlink_to(other / "trees" / file.name)
        return looked_at

    monkeypatch.setattr(reader, "_part", part)
    for read in (
        lambda: reader.groups("update-000001"),
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
    paths = (
        "",
        "metrics",
        "groups?file=update-000001",
        "trees/update-000001/0",
        "tokens/update-000001/0",
    )
    for path in paths:
        assert asked(run, path).status_code in (200, 404)
    assert state() == before
