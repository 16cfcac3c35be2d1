"""The notebooks of examples/notebooks run from top to bottom in a kernel of their own."""

from __future__ import annotations

import ast
import json
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treegraft import RunResult, load_config, train

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
def test_notebooks_are_stored_without_outputs_and_import_public_names(name: str) -> None:
    import treegraft
    import treegraft.parts

    known = {"treegraft": treegraft.__all__, "treegraft.parts": treegraft.parts.__all__}
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] for cell in code)
    assert all(cell["execution_count"] is None for cell in code)
    for cell in code:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        tree = compile("".join(cell["source"]), name, "exec", flags)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("treegraft"):
                assert {one.name for one in node.names} <= {*known[str(node.module)]}
            if isinstance(node, ast.Import):
                assert not any(one.name.startswith("treegraft") for one in node.names)


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
    assert "\rwarm-up " in printed and "finished runs/" in printed


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


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    manager = pytest.importorskip("jupyter_client.manager", reason="comes with ipykernel")
    pytest.importorskip("ipykernel", reason="pip install 'treegraft[dev]'")
    made, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    yield made, client
    client.stop_channels()
    made.shutdown_kernel(now=True)


@pytest.mark.smoke
def test_smoke_test_of_an_interrupted_kernel(kernel: tuple[Any, Any], tmp_path: Path) -> None:
    """It saves, says how to go on, and does."""
    manager, client = kernel
    settings = "['run.num_updates=500', 'warmup.num_steps=20', 'tasks.num_eval=4']"
    code = f"from treegraft import *; train(load_config('demo', [*{settings}, 'run.name=a']))"
    asked = client.execute(code)
    text, is_interrupted, until = "", False, time.monotonic() + 240
    while time.monotonic() < until:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        content = message["content"]
        text += content.get("text", "")
        if "update 2/500" in text and not is_interrupted:
            manager.interrupt_kernel()
            is_interrupted = True
        is_idle = content.get("execution_state") == "idle"
        if is_idle and message["parent_header"].get("msg_id") == asked:
            break
    assert "interrupted and saved; go on with: treegraft train --resume runs/a" in text
    assert "or in Python: train(resume='runs/a')" in text
    replies = iter(lambda: client.get_shell_msg(timeout=60), None)
    reply = next(one for one in replies if one["parent_header"]["msg_id"] == asked)
    assert reply["content"]["ename"] == "Ended"
    done = RunResult.read(tmp_path / "runs" / "a")
    updates = int(done.checkpoint_dir.name.removeprefix("update-"))
    assert 2 <= updates < 500 and len(done.trees(updates)) == 12
    config = load_config(done.run_dir / "config.json", [f"run.num_updates={updates + 1}"])
    again = train(config, resume=done.run_dir, display=False)
    assert again.history[-1]["update"] == updates + 1
