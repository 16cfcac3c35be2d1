"""The sandbox of the python tool: the recipe's word, else what works here; a run keeps it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft.cli.doctor import examine
from treegraft.extras.python import bwrap
from treegraft.extras.python.monty_tool import MontyTool
from treegraft.extras.python.plugin import PythonToolSettings, findings
from treegraft.parts import NoDisplay
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.table import with_choices
from treegraft.tools.build import build_tools
from treegraft.train import train


def works(monkeypatch: pytest.MonkeyPatch, does: bool) -> None:
    problem = None if does else "it does not work here."
    monkeypatch.setattr(bwrap, "find_problem", lambda: problem)


def using(backend: str = "auto") -> Config:
    tools = {"use": ["python"], "python": {"backend": backend}}
    return load_config({"tools": tools})


def test_auto_takes_bubblewrap_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PythonToolSettings().backend == "auto"
    works(monkeypatch, True)
    assert with_choices(using()).tools.python.backend == "bwrap"
    works(monkeypatch, False)
    assert with_choices(using()).tools.python.backend == "monty"
    (tool,) = build_tools(using().tools, [])
    assert isinstance(tool, MontyTool)


@pytest.mark.parametrize("backend", ["monty", "bwrap"])
def test_the_word_of_the_recipe_wins(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works(monkeypatch, backend == "monty")
    assert with_choices(using(backend)).tools.python.backend == backend


def test_nothing_is_tried_for_a_recipe_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwrap, "find_problem", lambda: pytest.fail("a sandbox was started"))
    assert with_choices(load_config({})).tools.python.backend == "auto"


def test_doctor_names_a_sandbox_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (found,) = findings(using("bwrap"))
    assert (found.value, found.is_good) == ("missing", False)
    assert "apt-get install bubblewrap" in found.note
    assert list(findings(using("monty"))) == []


def test_where_there_is_neither_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    works(monkeypatch, False)
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    sentence = r"without bubblewrap needs pydantic-monty .*pip install 'treegraft\[sandbox\]'"
    with raises_code("package-missing", match=sentence):
        build_tools(using().tools, [])
    with raises_code("packages-missing", match=sentence):
        train(run_in(tmp_path), display=False)
    assert list(tmp_path.iterdir()) == []
    assert "pydantic-monty" in str(examine(run_in(tmp_path)).faults[0])


def run_in(folder: Path, backend: str | None = None, **run: Any) -> Config:
    python = {} if backend is None else {"backend": backend}
    own = {"dir": str(folder), "name": "own", "num_updates": 1, **run}
    return load_config(tiny(run=own, tools={"use": ["python"], "python": python}))


class Noted(NoDisplay):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def recorded(run_dir: Path) -> str:
    config = json.loads((run_dir / "config.json").read_text())
    return str(config["tools"]["python"]["backend"])


def test_a_run_says_and_records_the_choice_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    works(monkeypatch, False)
    display = Noted()
    run_dir = train(run_in(tmp_path), display=display).run_dir
    assert display.notes.count("tools.python.backend = 'monty'") == 1
    assert recorded(run_dir) == "monty"
    # The same recipe on a machine where bubblewrap works.
    monkeypatch.setattr(bwrap, "find_problem", lambda: pytest.fail("it was chosen anew"))
    again = Noted()
    train(run_in(tmp_path, num_updates=2), resume=run_dir, display=again)
    assert again.notes.count("tools.python.backend = 'monty'") == 1 and recorded(run_dir) == "monty"
    with raises_code("resumed-other-settings"):
        train(run_in(tmp_path, "bwrap", num_updates=3), resume=run_dir, display=False)


def test_a_choice_gives_the_run_of_a_recipe_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    works(monkeypatch, False)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    chosen = train(run_in(tmp_path / "a"), display=False).run_dir
    named = train(run_in(tmp_path / "b", "monty"), display=False).run_dir
    trees = [path.name for path in sorted((named / "trees").iterdir())]
    assert trees
    for name in trees:
        assert (chosen / "trees" / name).read_bytes() == (named / "trees" / name).read_bytes()
