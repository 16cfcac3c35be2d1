"""Copies of the viewer that need no server: which trees they hold, how they are named and refused,
and their pages in Chromium, from a folder and from a plain web server."""

from __future__ import annotations

import functools
import json
import re
import shutil
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.viewed import as_lines, expert_hash, write_run, write_update
from tests.view.test_view_browser import (
    CHROMIUM,
    INJECTIONS,
    browser,
    hostile_tree,
    show,
    text,
    until,
)
from tests.view.test_view_damage import DAMAGES, SECRET
from typer.testing import CliRunner

from treegraft.cli.main import app as command_line
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees
from treegraft.view.bundle import join_modules, write_bundle
from treegraft.view.runs import open_runs
from treegraft.view.server import Api, static_files

__all__ = ["browser"]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs, one of them with texts that are markup."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first", num_updates=3)
    hostile = write_run(folder / "second", num_updates=1, with_buffer=False)
    write_trees(RunFolder(hostile).trees_path(1), [hostile_tree()])
    return folder


def held(root: Path, key: str) -> Any:
    """Returns what a file of data hands over."""
    body = (root / "data" / f"{key}.js").read_text()
    match = re.fullmatch(r"treegraft\('([^']*)','(.*)'\);\n", body, re.S)
    assert match is not None and match[1] == key
    return json.loads(re.sub(r"\\(.)", r"\1", match[2], flags=re.S))


def test_a_bundle_holds_the_trees_that_were_chosen(home: Path, tmp_path: Path) -> None:
    made = write_bundle(open_runs([home / "first"]), tmp_path / "copy", updates="1,3-9")
    # Updates 1 and 3 of three; the evaluation after update 2 was not asked for.
    assert made.updates == {"first": (2, 4)} and made.notes == []
    assert made.num_bytes == sum(f.stat().st_size for f in made.path.rglob("*") if f.is_file())
    about = held(made.path, "0/run")
    assert [one["name"] for one in about["run"]["files"]] == ["update-000001", "update-000003"]
    assert [line["update"] for line in about["metrics"]["lines"]] == [0, 1, 2, 3]
    tree = held(made.path, "0/update-000001/0")
    # Four paths of 4, 3, 4 and 2 steps; the prompt and 0.0 are on several of them.
    assert [len(leaf) for leaf in tree["leaves"]] == [4, 3, 4, 2]
    assert len(tree["steps"]) < 13
    grafts = held(made.path, "0/buffer")["grafts"]
    assert [place["file"] for place in grafts[expert_hash()]] == ["update-000001", "update-000003"]
    index = held(made.path, "index")
    assert index["runs"][0]["path"] == "first" and str(home) not in json.dumps(index["runs"])


def test_a_run_that_appears_meanwhile_is_not_listed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(home, tmp_path / "runs"))
    monkeypatch.setattr("treegraft.view.runs._LOOK_S", 0.0)
    begun = Api.metrics

    def late(self: Api, request: Any) -> Any:
        if not (folder / "third").exists():
            shutil.copytree(folder / "second", folder / "third")
        return begun(self, request)

    monkeypatch.setattr(Api, "metrics", late)
    made = write_bundle(open_runs([folder]), tmp_path / "copy", updates="1")
    assert [run["name"] for run in held(made.path, "index")["runs"]] == ["first", "second"]


def test_many_updates_are_spread_and_a_zip_holds_the_same(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_updates=1, with_buffer=False)
    for update in range(2, 25):
        write_update(run, update)
    made = write_bundle(open_runs([run]), tmp_path / "copy.zip")
    with zipfile.ZipFile(tmp_path / "copy.zip") as archive:
        names = archive.namelist()
    assert all(name.startswith("copy/") for name in names) and "copy/index.html" in names
    found = {int(m[1]) for name in names if (m := re.search(r"/update-(\d+)/0\.js$", name))}
    # Ten of 1 to 24, evenly, with both ends; and the one evaluation.
    assert len(found) == 10 and {1, 24} <= found and made.updates == {"run": (11, 25)}
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("updates", ["x", "1,", "3-", "-1", "1 2", "", "5-1", "1,3-2"])
def test_updates_that_cannot_be_read_are_refused(home: Path, tmp_path: Path, updates: str) -> None:
    with raises_code("updates-invalid"):
        write_bundle(open_runs([home]), tmp_path / "copy", updates=updates)
    assert list(tmp_path.iterdir()) == []


def test_updates_that_match_no_trees_are_refused(home: Path, tmp_path: Path) -> None:
    with raises_code("updates-without-trees"):
        write_bundle(open_runs([home]), tmp_path / "copy", updates="40-50")
    assert list(tmp_path.iterdir()) == []
    made = write_bundle(open_runs([home / "first"]), tmp_path / "copy", updates="none")
    assert made.updates == {"first": (0, 4)}


def test_the_command(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy.zip"
    run = CliRunner().invoke(command_line, ["view", str(home), "--bundle", str(out)])
    assert run.exit_code == 0, run.output
    assert "trees of 4 of 4 updates and evaluations" in run.output
    for more, told in (
        ([], "it exists already"),
        (["--port", "80"], "--port would have no effect with --bundle"),
        (["--text"], "--text would have no effect with --bundle"),
    ):
        command = ["view", str(home), "--bundle", str(out), *more]
        refused = CliRunner().invoke(command_line, command)
        assert refused.exit_code != 0 and told in str(refused.exception)
    alone = CliRunner().invoke(command_line, ["view", str(home), "--updates", "1"])
    assert "without --bundle" in str(alone.exception)


def test_a_damaged_file_is_named_and_the_others_are_kept(home: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(home / "first", tmp_path / "first"))
    as_lines(copy).with_name("update-000002.jsonl").write_text("damaged\n")
    made = write_bundle(open_runs([copy]), tmp_path / "copy")
    assert len(made.notes) == 1 and "update-000002" in made.notes[0]
    assert "error" in held(made.path, "0/update-000002")
    assert held(made.path, "0/update-000003")["groups"]


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_does_not_hide_the_others(home: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(home / "first", tmp_path / "bad"))
    DAMAGES[name](copy)
    runs = open_runs([copy, home / "second"])
    made = write_bundle(runs, tmp_path / "out", updates="all")
    whole = held(made.path, "1/update-000001/0")
    assert len(whole["leaves"]) == len(INJECTIONS)
    assert not any(SECRET in file.read_text() for file in made.path.rglob("*.js"))


def test_modules_that_cannot_be_joined_are_noticed() -> None:
    modules = {name: body.decode() for name, (body, _) in static_files().items()}
    script = join_modules({n: t for n, t in modules.items() if re.fullmatch(r"[a-z]+\.js", n)})
    assert not re.search(r"^(import|export)\b", script, re.M)
    with pytest.raises(AssertionError, match="not known here"):
        join_modules({"app.js": 'import other from "./other.js";'})


@contextmanager
def plainly_served(root: Path) -> Iterator[str]:
    """Gives the address of a web server that knows nothing of us."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/index.html"
    finally:
        server.shutdown()
        server.server_close()


@needs_chromium
@pytest.mark.smoke
def test_every_page_of_a_bundle_opens(browser: Any, home: Path, tmp_path: Path) -> None:
    root = write_bundle(open_runs([home]), tmp_path / "copy", updates="1,2").path
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
    tree = "#/r/first/t/update-000001/0"
    places = (
        ("", "Held-out accuracy"),
        (f"{tree}?mode=tokens&leaf=1", "e1"),
        ("#/r/first/s?q=nonsense", "2 trees in 2 of 2 files"),
        ("#/runs", "2 runs"),
        ("#/settings", "These runs have equal settings."),
        ("#/r/first", "evaluation after update 2"),
        ("#/r/first/t/update-000001", "2 trees"),
        (f"{tree}/vs?a=0&b=1", "They part after 9 tokens"),
        ("#/r/first/task?id=t%2F1", "One task across updates"),
        ("#/r/first/buffer", "2 traces"),
        ("#/r/first/buffer?q=e3&near=1", "needs the encoder"),
        (f"#/r/first/buffer/{expert_hash()}", "A trace of expert"),
        ("#/r/second/t/update-000001", INJECTIONS[0]),
    )
    with plainly_served(root) as served:
        # The same files: of a web server the first few are enough.
        for address, some in ((f"file://{root}/index.html", places), (served, places[:3])):
            for place, expected in some:
                show(page, address, place)
                if expected not in page.locator("#page").inner_text():
                    pytest.fail(f"{address}{place}: {text(page, '#page')}")
                assert page.evaluate("window.hacked") is None
            show(page, address, "#/r/first/t/update-000003/0")
            assert "does not hold the trees of update 3" in text(page, "#page")
            assert "copy of 20" in text(page, "#live")
            # A filter is applied in the page itself.
            show(page, address, "#/r/first/t/update-000001")
            page.select_option("#f-graft", "1")
            until(page, "document.getElementById('count').textContent === '1 tree'")
    # The one problem is the file that is not there.
    missing = [one for one in problems if "ERR_FILE_NOT_FOUND" in one or "404" in one]
    assert len(missing) == 2 and problems == missing
    page.close()
