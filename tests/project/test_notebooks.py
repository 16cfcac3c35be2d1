"""The notebooks of examples/notebooks run from top to bottom in a kernel of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from treegraft import RunResult

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NAMES = ("first_agent", "look_at_trees", "own_tool_reward_data")


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text("utf-8"))[
        "cells"
    ]
    return found


def test_each_notebook_is_tested() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_stored_without_outputs(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] for cell in code)
    assert all(cell["execution_count"] is None for cell in code)
    imported = re.findall(r"(?:from|import) (treegraft[\w.]*)", "".join(map(str, code)))
    assert {*imported} <= {"treegraft", "treegraft.parts"}


def executed(name: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns all that a notebook printed, and the results of its cells."""
    reason = "the kernel of a notebook needs nbclient and ipykernel (pip install 'treegraft[dev]')"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    import nbformat

    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=place).execute()
    outputs = [one for cell in book.cells for one in cell.get("outputs", [])]
    printed = "".join(one.text for one in outputs if one.output_type == "stream")
    return printed, [one.data for one in outputs if one.output_type != "stream"]


@pytest.mark.smoke
def test_smoke_test_of_a_first_agent(tmp_path: Path) -> None:
    printed, results = executed("first_agent", tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    result = RunResult.read(run)
    assert [line["update"] for line in result.history] == [0, 1, 2, 3, 4]
    tree, answer = (one for one in results if "text/html" in one)
    assert tree["text/plain"] == repr(result.trees()[0])
    assert tree["text/html"] == result.trees()[0]._repr_html_()
    assert answer["text/plain"].startswith("<Answer")
    # Progress is one line that is written over.
    assert "\r" in printed and "warm-up " in printed and "finished runs/" in printed


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("look_at_trees", "expert similarity"),
        ("own_tool_reward_data", "{'exact_match': 1.0, 'thrift': -2.0} -> 0.8"),
    ],
)
def test_smoke_test_of_the_other_notebooks(name: str, said: str, tmp_path: Path) -> None:
    printed, results = executed(name, tmp_path)
    assert said in printed and sum("text/html" in one for one in results) >= 1
    if name == "look_at_trees":
        assert any("IFrame" in one["text/plain"] for one in results)
