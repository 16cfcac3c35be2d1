"""The viewer without a browser: what it reads of run folders, what it answers, and whom it
refuses."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.support.error_codes import raises_code
from tests.support.examples import at_most
from tests.support.trees import recorded_trees
from tests.support.viewed import (
    as_lines,
    copy_without_checkpoints,
    grown_tree,
    metrics_of,
    plain_tree,
    write_run,
    write_update,
)
from typer.testing import CliRunner

from treegraft.cli.main import app as command_line
from treegraft.core.errors import DataError
from treegraft.core.listener import is_own_name
from treegraft.core.types import Tree
from treegraft.runs.health import recorded
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import find_part, write_trees
from treegraft.runs.tree_json import parse_tree, tree_from_json, tree_to_json
from treegraft.view.pages import draw, page_warnings, path_tokens, summarise
from treegraft.view.runs import RunReader, open_runs
from treegraft.view.server import CONTENT_SECURITY_POLICY, build_app


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def client(run_dir: Path) -> TestClient:
    return TestClient(build_app(open_runs([run_dir])), base_url="http://127.0.0.1:8000")


def ask(client: TestClient, path: str, **query: Any) -> Any:
    answer = client.get(f"/api/runs/first{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---------------------------------------------------------------------- reading


def test_a_group_is_summed_up() -> None:
    group = summarise(grown_tree(1, "t/1"))
    counts = [group[f"num_{one}"] for one in ("leaves", "grafts", "branches", "errors")]
    assert counts == [4, 1, 1, 1]
    assert [group[f"reward_{one}"] for one in ("mean", "min", "max")] == [0.25, 0.0, 1.0]
    # pppp + ssstt + rrrr + ss; the graft's own call is another agent's.
    assert [leaf["num_tokens"] for leaf in group["leaves"]] == [15, 12, 14, 12]
    assert [leaf["num_calls"] for leaf in group["leaves"]] == [1, 1, 2, 0]
    assert group["statuses"] == {"completed": 3, "truncated": 1}


def test_a_tree_is_drawn_with_its_reasons() -> None:
    drawn = draw(grown_tree(1, "t/1"))
    steps = {step["id"]: step for step in drawn["steps"]}
    assert steps["0.0.1"]["cause"] == {
        "kind": "branch",
        "entropy_change": 0.25,
        "probability": 0.625,
        "rule": "threshold",
        "bar": None,
    }
    assert steps["0.0.0"]["origin"] == "retrieved" and steps["0.0.0"]["origins"] == {"retrieved": 4}
    assert steps["0.0"]["origins"] == {"policy": 3, "tool": 2}
    # 0.0 lies on two leaves of equal weight: (1.5 - 0.5) / 2.
    assert steps["0.0"]["advantage"] == pytest.approx(0.5)
    # The policy's step before the graft has entropies .1 .2 .3, the one after it .1 .2.
    assert drawn["leaves"][0]["effects"]["0.0.0"] == pytest.approx([0.2, 0.15])


def test_tokens_carry_what_was_recorded() -> None:
    steps = path_tokens(grown_tree(1, "t/1").trajectories()[0])
    assert [step["id"] for step in steps] == ["0", "0.0", "0.0.0", "0.0.0.0"]
    assert steps[1]["origins"] == [[1, 3], [2, 2]] and steps[1]["loss_mask"] == [[1, 3], [0, 2]]
    assert steps[1]["ratios"] == pytest.approx([1.1, 1.2, 1.3]) and steps[1]["advantage"] == 1.5


def test_metrics_are_followed_and_a_cut_is_noticed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", num_updates=2)
    run = RunReader(path)
    lines = run.metrics()
    assert [line["update"] for line in lines] == [0, 1, 2]
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 3, "reward/mean": NaN}\n{"update": 4, "rew')
    (last,) = run.metrics()[3:]
    assert last["update"] == 3 and math.isnan(last["reward/mean"])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 0.5}\n')
    assert run.metrics()[-1] == {"update": 4, "reward/mean": 0.5}
    RunFolder(path).cut_to(
        1, len((path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0])
    )
    assert run.metrics() == [lines[0]]


def test_a_rewritten_file_is_read_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", num_updates=1)
    run = RunReader(path)
    assert len(run.groups("update-000001")) == 2
    file = as_lines(path)
    file.write_text(file.read_text().splitlines()[0] + "\n")
    assert len(run.groups("update-000001")) == 1 and run.num_trees("update-000001") == 1
    write_update(path, 2)
    assert [f.name for f in run.files()] == ["update-000001", "update-000002", "eval-000002-greedy"]


def test_warnings_say_what_is_wrong() -> None:
    lines = [{"update": n, **metrics_of(n)} for n in range(5)]
    known = [recorded(line) for line in lines]
    assert [bool(some) for some in known] == [False, False, False, True, False]
    text = "trajectories lost to failures of ours: 25.0%"
    assert page_warnings(known[3]) == [{"name": "failed", "rule": "failed", "text": text}]
    broken = recorded({"update": 1, "health/tool_broken_search": 0.75})
    assert page_warnings(broken)[0]["text"] == "the tool search failed in 75% of its calls"


def test_two_folders_of_one_name(tmp_path: Path, run_dir: Path) -> None:
    other = write_run(tmp_path / "first", num_updates=1)
    assert list(open_runs([run_dir, other, run_dir])) == ["first", "first-2"]
    (tmp_path / "empty").mkdir()
    with raises_code("not-a-run"):
        open_runs([tmp_path / "empty"])
    with raises_code("not-a-run"):
        open_runs([tmp_path / "nowhere"])


def test_a_folder_of_runs_is_read_and_read_again(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    first = write_run(home / "sweep" / "first", num_updates=2)
    write_run(home / "second", num_updates=1)
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text('{"hidden_size": 8}')
    (first / "checkpoints" / "best" / "config.json").write_text('{"hidden_size": 8}')
    runs = open_runs([home])
    assert list(runs) == ["second", "first"]
    assert [runs.folder_of(name) for name in runs] == ["", "sweep"]
    write_run(home / "sweep" / "deeper" / "second", num_updates=0)
    runs.refresh()
    assert "second-2" not in runs  # it was looked for a moment ago
    runs._looked = 0.0
    runs.refresh()
    assert list(runs) == ["second", "first", "second-2"]
    assert runs.folder_of("second-2") == "sweep/deeper"


def test_sums_so_far_are_the_axes_of_charts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", num_updates=0)
    lines = [
        {"update": 0, "time/eval_s": 2.0, "time/warmup_s": 10.0},
        {"update": 1, "time/update_s": 3.0, "time/eval_s": 1.0, "rollout/num_tool_calls": 5},
        {
            "update": 2,
            "time/update_s": float("nan"),
            "rollout/num_tool_calls": 7,
            "environment/num_replayed_calls": 4,
        },
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # The first line has no update: its seconds are those of the warm-up and of the evaluation.
    expected = {"wall_s": [12.0, 15.0, 15.0], "calls": [0.0, 5.0, 16.0]}
    assert open_runs([path])["run"].table().axes([0, 1, 2]) == expected
    assert open_runs([path])["run"].state()["sums"] == {"wall_s": 15.0, "calls": 16.0}


@pytest.mark.parametrize(
    ("limits", "calls", "is_over"),
    [({}, 400, False), ({"max_calls": 401}, 400, False), ({"max_calls": 400}, 400, True)],
)
def test_a_run_is_over_once_a_limit_is_spent(
    tmp_path: Path, limits: dict[str, int], calls: int, is_over: bool
) -> None:
    path = write_run(tmp_path / "run", num_updates=0)
    settings = json.loads((path / "config.json").read_text())
    settings["run"] |= {"num_updates": 100_000, "max_calls": None, "max_tokens": None, **limits}
    (path / "config.json").write_text(json.dumps(settings))
    line = {"update": 1, "rollout/num_tool_calls": 100, "environment/num_replayed_calls": 300}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    state = open_runs([path])["run"].state()
    assert (state["is_over"], state["is_live"]) == (is_over, not is_over)


# ---------------------------------------------------------------------- answers


def test_every_page_has_what_it_asks_for(client: TestClient) -> None:
    (run,) = client.get("/api/runs").json()
    assert (run["name"], run["update"], run["num_updates"], run["is_live"]) == (
        "first",
        4,
        10,
        True,
    )
    assert [f["name"] for f in ask(client, "")["files"]][:3] == [
        "update-000001",
        "update-000002",
        "eval-000002-greedy",
    ]
    assert [bool(line["warnings"]) for line in ask(client, "/metrics")["lines"]] == [
        False,
        False,
        False,
        True,
        False,
    ]
    groups = ask(client, "/groups", file="update-000001")
    assert [(row["file"], row["n"], row["num_leaves"]) for row in groups] == [
        ("update-000001", 0, 4),
        ("update-000001", 1, 1),
    ]
    assert ask(client, "/trees/update-000001/0")["best"] == 0
    tokens = ask(client, "/tokens/update-000001/0", leaf=0)
    assert tokens["steps"][0]["texts"] == ["? ", "search ", "e1 ", "e2 "]


def test_large_answers_are_compressed(client: TestClient) -> None:
    page = client.get("/api/settings", headers={"accept-encoding": "gzip"})
    assert page.headers["content-encoding"] == "gzip" and len(page.json()) > 150
    assert "content-encoding" not in client.get("/api/runs").headers


def test_clients_that_hang_up_print_nothing(run_dir: Path) -> None:
    words = [sys.executable, "-m", "treegraft", "view", str(run_dir), "--port", "0"]
    with subprocess.Popen(
        [*words, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as viewer:
        assert viewer.stdout is not None
        port = int(re.findall(r":(\d+)", viewer.stdout.readline())[0])
        for number in range(24):
            with socket.create_connection(("127.0.0.1", port)) as gone:
                length = "Content-Length: 9\r\n" if number % 2 else ""
                end = "\r\n" if number % 3 else ""
                head = f"GET /api/settings HTTP/1.1\r\nHost: localhost\r\n{length}{end}"
                gone.sendall(head.encode())
                if number % 4 == 0:
                    time.sleep(0.05)
                # Closed with a reset, as by a browser that is ended.
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with httpx.Client() as client:
            client.get(f"http://127.0.0.1:{port}/")
        viewer.terminate()
        assert viewer.communicate(timeout=60)[1] == ""


def test_a_copied_folder_without_checkpoints(run_dir: Path, tmp_path: Path) -> None:
    copy = copy_without_checkpoints(run_dir, tmp_path / "first")
    for folder in (copy / "trees", copy):
        folder.chmod(0o555)
    client = TestClient(build_app(open_runs([copy])), base_url="http://localhost")
    assert ask(client, "/tokens/update-000001/0", leaf=0)["steps"][0]["texts"] is None
    for folder in (copy, copy / "trees"):
        folder.chmod(0o755)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "first", num_updates=1)
    with as_lines(path).open("a") as file:
        file.write('{"group_id": "half')
    answer = TestClient(build_app(open_runs([path])), base_url="http://localhost").get(
        "/api/runs/first/groups?file=update-000001"
    )
    assert answer.status_code == 404 and "line 3" in answer.json()["error"]
    assert answer.json()["code"] == "tree-unreadable"


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:80", "localhost:9", "LOCALHOST", "[::1]", "[::1]:80", "127.1.2.3"],
)
def test_own_names(host: str) -> None:
    assert is_own_name(host, "127.0.0.1")


FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "10.0.0.1",
    "[::1]x",
    "a@localhost",
]
FOREIGN += ["localhost:80:80", "169.254.169.254", "localhost:x", "127.0.0.1, evil.example"]


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names_are_refused(client: TestClient, host: str) -> None:
    answer = client.get("/api/runs", headers={"host": host})
    assert answer.status_code == 421 and "first" not in answer.text


def test_an_open_server_still_refuses_names_of_others() -> None:
    assert is_own_name("10.0.0.1:8000", "0.0.0.0") and is_own_name("box.lan", "box.lan")
    assert not is_own_name("evil.example", "0.0.0.0") and not is_own_name("10.0.0.1", "127.0.0.1")


PATHS = [
    "/static/../server.py",
    "/static/..%2fserver.py",
    "/static/%2e%2e/server.py",
    "/static//etc/passwd",
    "/static/....//server.py",
    "/../../etc/passwd",
    "/api/runs/..",
    "/api/runs/first/trees/..%2f..%2fconfig/0",
    "/api/runs/first/trees/update-000001.jsonl/0",
    "/api/runs/first/trees/update-000001%00/0",
    "/api/runs/first/groups?file=../../secret",
    "/api/runs/first/trees/update-000009/0",
    "/api/runs/first/trees/update-000001/99",
    "/api/runs/%2fetc/metrics",
    "/static/vendor",
    "/server.py",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_lead_nowhere(client: TestClient, path: str, run_dir: Path) -> None:
    (run_dir.parent / "secret.jsonl").write_text('{"secret": 1}')
    answer = client.get(path)
    assert answer.status_code in (404, 405), answer.text
    assert "secret" not in answer.text.replace("../../secret", "") and "root:" not in answer.text


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "first", num_updates=1)
    outside = write_run(tmp_path / "other", num_updates=1)
    for number, name in ((100, "update-000100.jsonl.zst"), (7, "update-000007.jsonl")):
        write_update(outside, number)
        file = outside / "trees" / name
        if number == 7:
            file.write_text(tree_to_json(plain_tree(7, "t/1")) + "\n")
        (path / "trees" / name).symlink_to(file)
    run = RunReader(path)
    assert [file.update for file in run.files()] == [1, 2]
    for name in ("update-000007", "update-000100"):
        with pytest.raises(DataError):
            run.tree(name, 0)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_is_written(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/nowhere"])
def test_every_answer_carries_the_policy(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert (
        headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        and headers["x-content-type-options"] == "nosniff"
    )
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "access-control-allow-origin" not in headers


def test_pages_load_nothing_from_elsewhere_and_never_make_markup_of_text() -> None:
    static = Path(__file__).resolve().parents[2] / "src" / "treegraft" / "view" / "static"
    for file in [*static.glob("*.js"), *static.glob("*.html"), *static.glob("*.css")]:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new"
            r" Function|style=\"",
            text,
        ), file
    assert "MIT License" in (static / "vendor" / "uplot.LICENSE.txt").read_text()


# ---------------------------------------------------------------------- the command


def printed(run_dir: Path, place: str) -> str:
    arguments = ["view", str(run_dir), "--text", place]
    done = CliRunner().invoke(command_line, arguments, env={"COLUMNS": "200"})
    if done.exception is not None:
        raise done.exception
    return done.output


def test_text_shows_trees_and_transcripts(run_dir: Path) -> None:
    assert "r2 of r1 of e1 ?" in printed(run_dir, "newest")
    shown = printed(run_dir, "update-000001/0")
    for part in (
        "branch: p 0.625",
        "4 leaves, 1 correct, mean reward",
        "graft from expert, similarity 0.875",
        "leaf 0 (0 to 3), the best by reward",
    ):
        assert part in shown
    shown = printed(run_dir, "eval-000002-greedy/0/2")
    assert "no such entity" in shown and "wrong" in shown and "graft from" not in shown


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("update-000009/0", "trees-missing"),
        ("update-000001/7", "no-such-tree"),
        ("update-000001/0/4", "no-such-leaf"),
        ("update-000001", "no-such-tree"),
        ("update-000001/x", "no-such-tree"),
    ],
)
def test_a_place_without_a_tree_is_named(run_dir: Path, place: str, code: str) -> None:
    with raises_code(code):
        printed(run_dir, place)


def test_the_command_serves_and_ends_with_ctrl_c(run_dir: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "treegraft",
        "view",
        str(run_dir),
        "--port",
        "0",
        "--no-browser",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            # Its last part is the token: 128 bits.
            address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", process.stdout.readline())
            assert address is not None
            assert httpx.get(f"{address[0]}api/runs", timeout=60).json()[0]["name"] == "first"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "viewer ended\n", "")


def test_the_viewer_starts_without_torch() -> None:
    code = (
        "import sys, treegraft.view.server, treegraft.view.command; sys.exit(bool({'torch',"
        " 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------- trees that change


@given(trees=st.lists(recorded_trees(), max_size=3))
@at_most(40)
def test_each_tree_is_found_by_its_place(trees: list[Tree]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trees" / "update-000001"
        write_trees(path, trees[:1])
        write_trees(path.with_name("update-000002"), trees)
        part = find_part(path.with_name("update-000002"))
        assert part is not None and [*part.trees()] == trees
        for number, tree in enumerate(trees):
            ((_, line),) = part.lines(number, 1)
            assert tree_from_json(line) == tree


def test_the_leaves_of_a_tree_are_read_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunReader(run_dir)
    read: list[str] = []
    monkeypatch.setattr(
        "treegraft.view.runs.parse_tree",
        lambda line, where: read.append(where) or parse_tree(line, where),
    )
    whole = run.tree("update-000001", 0).trajectories()
    assert [run.path_of("update-000001", 0, leaf) for leaf in range(len(whole))] == whole
    assert len(read) == 1
    with raises_code("no-such-leaf"):
        run.path_of("update-000001", 0, len(whole))


def test_trees_written_anew_are_read_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", num_updates=1)
    run = RunReader(path)
    file = path / "trees" / "update-000001"
    assert len(run.path_of("update-000001", 0, 0).steps) == 4
    write_trees(file, [plain_tree(1, "t/1")])
    assert len(run.path_of("update-000001", 0, 0).steps) == 2
    file = as_lines(path)
    file.write_text(tree_to_json(grown_tree(1, "t/1")) + "\n" + "damaged\n")
    assert len(run.path_of("update-000001", 0, 0).steps) == 4


def test_many_metrics_are_thinned(tmp_path: Path) -> None:
    path = write_run(tmp_path / "long", num_updates=0)
    # Line 0 was there; every 1,000th line has an evaluation, line 7,777 a warning.
    with (path / "metrics.jsonl").open("a") as file:
        for n in range(1, 50_000):
            more = ', "eval/accuracy": 0.5' if n % 1000 == 0 else ""
            more += ', "health/truncated": 0.9' if n in (7777, 7778) else ""
            file.write(f'{{"update": {n}, "reward/mean": {n / 100}, "time/update_s": 1.5{more}}}\n')
    client = TestClient(build_app(open_runs([path])), base_url="http://127.0.0.1:8000")
    got = client.get("/api/runs/long/metrics").json()
    assert got["stride"] == 50  # 50,000 / 1,000
    by = {line["update"]: line for line in got["lines"]}
    assert {*range(0, 50_000, 50), *range(1000, 50_000, 1000), 7777, 7778, 49_999} == set(by)
    assert by[50]["reward/mean"] == 0.5 and by[3000]["eval/accuracy"] == 0.5
    assert all(by[n]["warnings"] for n in (7777, 7778))
    assert client.get("/api/runs").json()[0]["num_lines"] == 50_000
    # The report reads all of them.
    assert len(RunReader(path).metrics()) == 50_000
