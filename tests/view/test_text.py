"""A tree and a trajectory show themselves: in notebooks, in print, in one line."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.grown import SHAPES, Grown, chat, grafted, search
from tests.support.viewed import write_run

from treegraft.core.types import Observation, StepContent, ToolCall
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees
from treegraft.view.runs import RunReader
from treegraft.view.text import show

HOSTILE = """</style></pre><script>alert(1)</script><img src=x onerror='alert("2")'>&lt;"""


class Reader(HTMLParser):
    """Collects elements, attributes and the text, and sees that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_of_a_notebook_has_every_leaf(shape: str) -> None:
    tree = SHAPES[shape]()
    page = Reader(tree._repr_html_())
    assert page.tags <= {"pre", "span"} and page.names <= {"style"}
    assert page.text.count("[leaf ") == len(tree.leaves)


def test_hostile_texts_are_inert() -> None:
    tree = grafted(branches=True)
    content = StepContent(
        thought=HOSTILE,
        calls=(ToolCall(HOSTILE, HOSTILE),),
        observations=(Observation(text=HOSTILE),),
        answer=HOSTILE,
    )
    steps = tuple(replace(one, content=content, violation=HOSTILE) for one in tree.steps)
    task = replace(tree.task, id=HOSTILE, question=HOSTILE, reference=(HOSTILE,))
    tree = replace(tree, group_id=HOSTILE, task=task, steps=steps)
    for shown in (tree, tree.trajectories()[0]):
        page = Reader(shown._repr_html_())
        assert page.tags == {"pre", "span"} and page.names == {"style"}
        assert HOSTILE[:20] in page.text  # the words are there, as text
        for text in (repr(shown), repr(tree.steps[1])):
            assert "\n" not in text and len(text) < 600


def test_a_long_path_needs_no_recursion() -> None:
    tree = Grown()
    at = "0"
    for n in range(1200):
        at = tree.add(at, search(f"e{n} r1"))
    tree.answer(at, "e3", right=True)
    assert "e1199 r1" in str(tree.done())


def test_print_is_the_text_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    path = write_run(tmp_path / "run", num_updates=1)
    tree = chat()
    write_trees(RunFolder(path).trees_path(1), [tree])
    console = Console(file=io.StringIO(), width=90)
    console.print(show(RunReader(path), "update-000001/0"))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().rstrip().splitlines()
    assert str(tree).splitlines() == lines and len(lines) > 20
    # The trajectory is printed below the tree.
    assert str(tree.trajectories()[0]).splitlines() == lines[lines.index("") + 2 :]


def test_one_line_names_what_matters() -> None:
    tree = grafted()
    assert repr(tree) == (
        f"<Tree {tree.group_id!r} of {tree.task.question!r}: {len(tree.steps)} steps, 8 leaves,"
        " mean reward 0.5>"
    )
    path = tree.trajectories()[1]
    assert repr(path) == (
        f"<Trajectory of {tree.task.question!r}: 4 steps, completed, answer 'e3', reward 1>"
    )
    assert repr(path.steps[2]).startswith("<Step 0.1.0 by retrieved: ")


def test_data_do_not_load_the_viewer() -> None:
    code = (
        "import sys; from treegraft.core.types import Task, Tree; repr(Task);"
        "assert not any(name.startswith('treegraft.view') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
