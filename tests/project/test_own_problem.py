"""The page "Your own problem with a real model": its files are written, its commands run, and the
first update learns something."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from tests.support.families import byte_model
from tests.support.pages import PAGES, ROOT

from treegraft.cli import main as cli
from treegraft.runs.record import read_metrics
from treegraft.settings.load import load_config

PAGE = PAGES["own-problem.md"]
EXAMPLE = ROOT / "examples" / "problem"
QUICK = (
    "run.num_updates=1",
    "run.tasks_per_update=2",
    "explore.num_leaves=2",
    "tasks.num_eval=2",
    "rollout.max_completion_tokens=240",
    "rollout.max_agent_steps=2",
    "eval.num_samples=0",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the example, which the page shows, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Another test's module of the same name.
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for path in EXAMPLE.glob("*.*"):
        assert f"<!-- include: examples/problem/{path.name} -->" in PAGE
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    runpy.run_path("make_data.py")
    return tmp_path


def treegraft(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["treegraft", *map(str, words)])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_data_are_100_problems_with_their_answers(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 100
    for row in rows:
        bags, apples, eaten = map(int, re.findall(r"\d+", row["question"]))
        assert row["answer"] == bags * apples - eaten


def test_tool_and_reward_are_right_on_trajectories_by_hand(folder: Path) -> None:
    import mine  # type: ignore[import-not-found]

    assert mine.calc("3 * 4 + 1") == "13" and mine.calc("(7 - 2) / 2") == "2.5"
    with pytest.raises(ValueError, match="only numbers"):
        mine.calc("__import__('os')")
    said = ["So 46 are left.", "46 of 50.", "none", "-46", "<tool_call> 2"]
    assert mine.near(said, [46, 46, 46, -46, 3]) == [1.0, 0.1, 0.0, 1.0, 0.25]


def test_the_page_s_recipe_runs_with_a_tiny_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"model.path={byte_model(folder / 'model')}"
    assert treegraft(monkeypatch, "doctor", "mine.toml", *QUICK, model) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the reference earns more than a wrong answer" in printed
    assert "How many are left?" in printed and "verdict: ready" in printed
    assert treegraft(monkeypatch, "train", "mine.toml", *QUICK, model) == 0
    (line,) = [one for one in read_metrics(folder / "runs/mine") if one["update"] == 1]
    assert line["rollout/num_trajectories"] == 4
    # What doctor printed on the page is what it prints here, the number of tokens apart.
    shown = re.findall(r"^ ok  (\S.*?)  ", PAGE, re.M)
    assert shown and all(one in printed for one in shown)


def test_settings_of_the_page_exist(folder: Path) -> None:
    config = load_config("mine.toml")
    assert (config.format.require_boxed, config.format.require_think) == (False, False)
    dotted = re.findall(r"`([a-z]+\.[a-z_]+(?:\.[a-z_]+)*)(?: = [^`]+)?`", PAGE)
    assert dotted
