"""What the README shows runs: the blocks marked runnable, and the settings and files it names.

A block of Python or TOML that begins with a comment naming a file becomes that file; any other Python block is executed. Recipes
are trained for one update with a tiny random model, or, where they name files of tasks, their tasks are read.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from treegraft.recipe import load_config
from treegraft.record import read_trees
from treegraft.tasks.build import build_tasks

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")

_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
_BLOCK = re.compile(r"<!-- runnable -->\n```(\w+)\n(.*?)```", re.S)

SMALL: dict[str, Any] = {
    "run.num_updates": 1,
    "run.tasks_per_update": 2,
    "model.tiny.hidden_size": 16,
    "model.tiny.intermediate_size": 16,
    "format.system_prompt": "",
    "rollout.max_completion_tokens": 16,
    "eval.every": 0,
    "eval.at_start": False,
    "eval.at_end": False,
}
"""So that a recipe of the page is done in a second; the page's own settings stay as they are."""


def sections() -> dict[str, list[tuple[str, str]]]:
    """Returns the runnable blocks (language, text) of each section that has any."""
    found = {title: _BLOCK.findall(text) for title, text in _SECTION.findall(PAGE)}
    return {title: blocks for title, blocks in found.items() if blocks}


def file_name(block: str) -> str | None:
    """Returns the file that a block says it is."""
    found = re.match(r"# (\w+\.(?:py|toml))\n", block)
    return found[1] if found else None


def test_the_marked_sections_are_found() -> None:
    assert list(sections()) == [
        *("Ten lines", "Your own tool", "Your own environment", "Python with libraries", "Your own tasks", "Your own rule"),
    ]


@pytest.mark.parametrize("title", sections())
def test_section_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipes = []
    for language, block in sections()[title]:
        name = file_name(block)
        if name is not None:
            (tmp_path / name).write_text(block, encoding="utf-8")
            recipes += [name] if language == "toml" else []
        else:
            exec(compile(block, f"README.md: {title}", "exec"), {})
            assert "runs/" in capsys.readouterr().out
    for recipe in recipes:
        if load_config(recipe).tasks.kind == "dataset":
            read_the_tasks(recipe, tmp_path, monkeypatch)
        else:
            train_small(recipe, tmp_path)


def read_the_tasks(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the files that the recipe names, with the columns that it names, and reads them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"question": f"{n} + 1?", "extra_info": {"answer": str(n + 1)}} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows[:2]), folder / "train.parquet")
    (folder / "test.jsonl").write_text(json.dumps(rows[2]) + "\n", encoding="utf-8")
    monkeypatch.setenv("MY_DATA", str(folder))
    source = build_tasks(load_config(recipe).tasks, 0)
    assert [(task.question, task.reference) for task in source.train_tasks()] == [("0 + 1?", ("1",)), ("1 + 1?", ("2",))]
    assert [task.reference for task in source.eval_tasks()] == [("3",)]


def train_small(recipe: str, folder: Path) -> None:
    """Trains the recipe for one update and looks for its parts in the record."""
    from treegraft.train import train

    config = load_config(recipe, [f"{name}={json.dumps(value)}" for name, value in SMALL.items()])
    trees = read_trees(train(config).run_dir)
    parts = {name for tree in trees for leaf in tree.leaves for name in leaf.reward_parts}
    assert parts == set(config.reward.funcs)
    if config.explore.explorers != ["independent"]:
        assert all(config.explore.num_leaves // 2 <= len(tree.leaves) <= config.explore.num_leaves for tree in trees)


def test_the_tool_of_the_page_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from treegraft.tools.build import build_tools
    from treegraft.types import Task

    for language, block in sections()["Your own tool"]:
        (tmp_path / str(file_name(block))).write_text(block, encoding="utf-8")
        assert language in ("python", "toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = {tool.name: tool for tool in build_tools(load_config("my_recipe.toml").tools, ())}
    assert tools["lookup"].description == "Returns the meaning of a word."
    task = Task(id="t", question="?", reference=())
    assert asyncio.run(tools["lookup"](" treegraft ", task)) == "a scion on a stock"


def test_settings_named_on_the_page_exist() -> None:
    from treegraft.recipe import known_settings

    tables = set(known_settings())
    named = set(re.findall(r"`((?:run|model|tasks|tools|reward|explore|engine|rollout|eval|learn|loss)\.[a-z_.]+)", PAGE))
    assert named and {name for name in named if not any(known == name for known in tables)} == set()


def test_recipes_of_the_table_exist() -> None:
    listed = set(re.findall(r"^\| `(\w+\.toml)` \|", PAGE, re.M))
    assert listed == {path.name for path in (ROOT / "recipes").glob("*.toml")}


def test_overrides_of_the_commands_are_settings() -> None:
    commands = re.findall(r"^treegraft (?:train|config|sft) (recipes/\w+\.toml)([^#\n]*)", PAGE, re.M)
    assert len(commands) >= 4
    for recipe, rest in commands:
        load_config(ROOT / recipe, [word for word in shlex.split(rest) if "=" in word])


def test_there_is_one_place_for_results() -> None:
    assert PAGE.count("<!-- results -->") == 1


def test_tests_and_examples_named_on_the_pages_exist() -> None:
    pages = PAGE + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:tests|examples)/\w+\.py", pages))
    assert named and {name for name in named if not (ROOT / name).exists()} == set()
