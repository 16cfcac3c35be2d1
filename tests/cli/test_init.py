"""`treegraft init`: the project works as it is made."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from tests.project.test_examples import threads  # noqa: F401
from tests.support.error_codes import raises_code
from tests.support.forked import Forked

from treegraft.cli.init import init
from treegraft.settings.load import load_config
from treegraft.tasks.build import build_tasks
from treegraft.tasks.scoring import exact_match
from treegraft.train import train

ROOT = Path(__file__).resolve().parents[2]


def said(folder: Path, *words: str) -> str:
    """Returns what a command prints that goes well."""
    with Forked(["treegraft", *words], cwd=folder) as process:
        printed, problems = process.communicate(timeout=120)
    assert process.returncode == 0, problems
    return printed


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, which is the working directory."""
    init(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    return tmp_path / "mine"


@pytest.mark.usefixtures("threads")
@pytest.mark.smoke
def test_the_project_is_trained_and_passes_its_tests(project: Path, tmp_path: Path) -> None:
    overrides = ["num_updates=1", "warmup.num_steps=40", "warmup.lr_warmup_steps=0", "num_eval=4"]
    done = train(load_config("recipe.toml", overrides))
    assert done.metrics["learn/grad_norm"] > 0 and done.metrics["warmup/loss"] > 0
    tests = runpy.run_path(str(project / "test_project.py"))
    tests["test_the_tool_calculates"]()
    tests["test_the_reward_asks_for_one_call"]()
    tests["test_one_update"](tmp_path / "runs")


def test_the_commands_that_are_printed_work(tmp_path: Path) -> None:
    """As a user types them, the training cut short."""
    printed = said(tmp_path, "init", "my agent")
    assert "my agent/my_tool.py" in printed
    assert "next: cd 'my agent' && " in printed
    assert "verdict: ready" in said(tmp_path / "my agent", "doctor", "recipe.toml")


@pytest.mark.slow
@pytest.mark.usefixtures("project", "threads")
def test_the_project_learns_to_use_its_tool() -> None:
    """Two of three demonstrations guess, so the warm-up leaves much to reinforcement learning."""
    before, *_, after = train("recipe.toml").evaluations
    assert after["accuracy"] - before["accuracy"] > 0.2


def test_a_model_of_ones_own_is_a_setting_of_the_chat_recipe(project: Path) -> None:
    config = load_config(project / "chat.toml", ["model.path=owner/name"])
    assert (config.model.path, config.format.kind) == ("owner/name", "chat")


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    init(tmp_path / "empty")
    for place in (tmp_path / "empty", tmp_path / "empty" / "recipe.toml"):
        with raises_code("folder-taken"):
            init(place)


@pytest.mark.usefixtures("project")
def test_references_are_right() -> None:
    """Each answer is the value of its expression, and no test question is in the training data."""
    from my_tool import calculate  # type: ignore[import-not-found]

    source = build_tasks(load_config("recipe.toml").tasks, 0)
    learned = source.train_tasks()
    held_out = source.eval_tasks()
    assert (len(learned), len(held_out)) == (200, 40)
    for task in (*learned, *held_out):
        assert exact_match(calculate(task.columns["expression"]), task.reference) == 1.0
    assert not {task.question for task in learned} & {task.question for task in held_out}
    assert {"+", "-", "Ann"} < set(source.vocabulary())


@pytest.mark.usefixtures("project")
def test_the_rows_hold_all_words_of_the_demonstrations() -> None:
    """The tiny model knows the words of the rows alone, and would read others as <unk>."""
    rows, traces = (
        [json.loads(line) for line in Path("data", name).read_text().splitlines()]
        for name in ("train.jsonl", "traces.jsonl")
    )
    known = {word for row in rows for value in row.values() for word in str(value).split()}
    steps = [step for trace in traces for step in trace["steps"]]
    texts = [step["answer"] for step in steps if "answer" in step]
    texts += [call["body"] for step in steps for call in step.get("calls", ())]
    assert {word for text in texts for word in text.split()} <= known


def test_the_page_of_a_project_names_what_the_wheel_does_not_bring() -> None:
    page = (ROOT / "examples" / "project" / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"(?m)^pytest", page) and "pip install pytest && pytest" in page
