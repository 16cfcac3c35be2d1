"""`treegraft buffer`: from a recipe to traces in a file and back to a reader's eyes, with real
parts."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.tiny import tiny, write_recipe

from treegraft.cli import main as cli
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld
from treegraft.traces.buffer import TraceBuffer

Run = Callable[..., int]
HASHING = "buffer.encoder=hashing"
FEW = (HASHING, "buffer.build.num_samples=2")
EASY = {"search_world": {"hops": [1], "num_entities": 8, "num_relations": 5}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "recipe.json", tiny())


@pytest.fixture
def treegraft(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process; returns the exit code."""

    def run(*arguments: object, stdin: str = "") -> int:
        monkeypatch.setattr(sys, "argv", ["treegraft", "buffer", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return code if isinstance(code, int) else 0

    return run


def printed_rows(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The rows that a command printed, by name."""
    lines = capsys.readouterr().out.splitlines()
    return dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines if "  " in line[1:])


def world() -> SearchWorld:
    """The tasks of the recipe."""
    settings = SearchWorldSettings(hops=[1, 2], num_entities=8, num_relations=5)
    return SearchWorld(settings, seed=3, num_train=12, num_eval=4)


def test_build_stats_and_search(
    treegraft: Run, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.traces"
    build = ("build", recipe, out, *FEW, "buffer.build.num_best=1")
    assert treegraft(*build, "buffer.build.num_tasks=4", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["num_tasks"],
        report["num_attempts"],
        report["num_kept"],
        report["mean_reward"],
    ) == (4, 8, 4, 1.0)
    assert report["num_new"] == 2 + 3 + 2 + 3
    # The same command goes on: four tasks are done, eight are not.
    assert treegraft(*build) == 0
    rows = printed_rows(capsys)
    assert (rows["tasks"], rows["skipped"], rows["new"], rows["duplicates"]) == (
        "8",
        "4",
        "20",
        "0",
    )

    assert treegraft("stats", out, "--json") == 0
    stats = json.loads(capsys.readouterr().out)
    assert (
        stats["num_traces"],
        stats["num_trajectories"],
        stats["num_terminal"],
        stats["encoder"],
    ) == (30, 12, 12, "hashing")
    assert stats["sources"] == {
        "expert": {"num_traces": 30, "num_trajectories": 12, "mean_reward": 1.0}
    }
    assert treegraft("stats", out) == 0
    rows = printed_rows(capsys)
    assert (rows["traces"], rows["terminal"]) == ("30", "12") and "sources expert" in rows

    question = world().train_tasks()[1].question
    assert treegraft("search", out, question, "-k", 1, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["key"], found["task_id"], found["position"]) == (
        question,
        "search_world/train/1",
        0,
    )
    assert found["similarity"] == pytest.approx(1.0, abs=1e-5)
    assert treegraft("search", out, question, "-k", 2) == 0
    text = capsys.readouterr().out
    assert f"history  {question}" in text
    assert "expert, search_world/train/1, step 0, reward 1" in text
    assert "step     search e" in text

    assert treegraft("show", out, "--task", "search_world/train/1") == 0
    text = capsys.readouterr().out
    assert f"task    {question}" in text and "step 0  search e" in text
    assert treegraft("show", out, "-n", 1) == 0
    assert "11 more" in capsys.readouterr().out
    assert treegraft("show", out, "--task", "x") == 2
    assert "has no trajectory of task 'x'" in capsys.readouterr().err


def test_overrides_shape_the_build(
    treegraft: Run, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without a file in its place, the first setting is no file either.
    stored = f"buffer.path={tmp_path / 'b'}"
    build = ("build", recipe, "tasks.search_world.error_prob=1.0", *FEW, stored)
    build += ("buffer.build.num_tasks=2",)
    assert treegraft(*build) == 1
    ended = capsys.readouterr()
    assert "none of 4 attempts was good enough to keep" in ended.err
    assert re.search(r"too low +4", ended.out)
    assert treegraft(*build, "buffer.build.min_reward=-1", "buffer.build.source=liar") == 0
    with TraceBuffer.open_as_built(tmp_path / "b") as buffer:
        assert list(buffer.stats().sources) == ["liar"]


def test_import(treegraft: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    into = tmp_path / "b"
    rows.write_text(
        '{"question": "q ?", "text":'
        ' "<search>a</search><result>b</result><answer>1</answer>"}\nnonsense\n' * 12
    )
    assert treegraft("import", rows, "buffer.build.source=them", "--into", into, HASHING) == 0
    ended = capsys.readouterr()
    assert re.search(r"new +2\b", ended.out) and re.search(r"duplicates +22\b", ended.out)
    assert re.search(r"problems +12\b", ended.out)
    assert f"{rows}, line 2: not JSON: Expecting value at column 1" in ended.err
    assert "--json lists all problems" in ended.err
    assert treegraft("import", rows, "buffer.build.source=them", "--into", into, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_new"], report["num_trajectories"], len(report["problems"])) == (0, 12, 12)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("stats", "nowhere"), 2, "there is no such file"),
        (("import", "nowhere", "--into", "b"), 2, "'nowhere': there is no such file or folder"),
        (
            ("import", "empty.jsonl", "--into", "b", HASHING),
            2,
            "nothing was imported into b",
        ),
        (("import", "good.jsonl", "learn.lr=1", "--into", "b"), 2, "'learn.lr=1' would have no"),
        (("import", "good.jsonl", "--into", "text"), 2, "'text' is not a Step-Trace Buffer"),
        (
            ("build", "recipe.json", "b", "buffer.build.temperature=1"),
            2,
            "buffer.build.agent is 'expert'",
        ),
        (("build", "recipe.json", "b", "buffer.encoder=hashin"), 2, "hashin"),
        (("build", "recipe.json", "b", "learn.rl=1"), 2, "learn.rl"),
        (("build", "recipe.json", "text", "buffer.encoder=hashing"), 2, "Step-Trace Buffer"),
        (("build", "recipe.json"), 2, "OUT: got none, and the recipe's buffer.path is ''"),
    ],
)
def test_bad_input_is_one_paragraph(
    treegraft: Run,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(recipe.parent)
    Path("text").write_text(
        "This is a text of some length, which is no database of any kind. " * 20
    )
    Path("empty.jsonl").write_text("")
    Path("runs/first/checkpoints").mkdir(parents=True)
    Path("good.jsonl").write_text('{"question": "q ?", "text": "<answer>1</answer>"}')
    assert treegraft(*arguments) == code
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert "Traceback" not in error


def test_the_best_of_each_task_are_imported(treegraft: Run, tmp_path: Path) -> None:
    rows = [
        {"question": "q ?", "text": f"<answer>{n}</answer>", "reward": n, "task_id": "t"}
        for n in range(5)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    into = tmp_path / "b"
    limits = ("buffer.build.num_best=2", "buffer.build.min_reward=2.5", HASHING)
    assert treegraft("import", tmp_path / "rows.jsonl", *limits, "--into", into) == 0
    with TraceBuffer.open_as_built(into) as buffer:
        assert sorted(trace.reward for trace in buffer) == [3.0, 4.0]
        assert {trace.source for trace in buffer} == {"rows"}


def test_another_encoder_is_an_error_that_names_both(
    treegraft: Run, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TraceBuffer(tmp_path / "b", "hashing"):
        pass
    assert treegraft("build", recipe, tmp_path / "b", "buffer.encoder=minilm") == 2
    error = capsys.readouterr().err
    assert "hashing" in error
    assert "minilm" in error
