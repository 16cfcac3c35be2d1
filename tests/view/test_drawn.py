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
from tests.support.grown import SHAPES, Grown, chat, flat, grafted, search, wide
from tests.support.viewed import write_run

from treegraft.core.types import Observation, StepContent, ToolCall, Tree
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees
from treegraft.view.drawn import MOST_BYTES
from treegraft.view.runs import RunReader
from treegraft.view.text import show

HOSTILE = """</style></pre><script>alert(1)</script><img src=x onerror='alert("2")'>&lt;"""
GLYPHS = ("\u2713 ", "\u2717 ", "\u22ef ", "! ", "\u2205 ", "\u00b7 ")
ALLOWED = {"div", "style", "span", "i", "details", "summary", "pre"}


class Reader(HTMLParser):
    """Collects elements, attributes and texts, and sees that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.texts: list[str] = []
        self.rows: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        self.open.append(tag)
        if tag == "summary":
            self.rows.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.texts.append(data)
        if "summary" in self.open:
            self.rows[-1] += f"{data}|"


def hostile(tree: Tree, times: int = 1) -> Tree:
    """Returns the tree with every text of others in it replaced."""
    bad = HOSTILE * times
    content = StepContent(
        thought=bad,
        calls=(ToolCall(bad, bad),),
        observations=(Observation(text=bad),),
        answer=bad,
    )
    steps = tuple(replace(one, content=content, violation=bad) for one in tree.steps)
    task = replace(tree.task, id=bad, question=bad, reference=(bad,))
    return replace(tree, group_id=bad, task=task, steps=steps)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drawing_holds_no_script_and_every_leaf(shape: str) -> None:
    tree = SHAPES[shape]()
    page = Reader(tree._repr_html_())
    assert set(page.tags) <= ALLOWED and page.names <= {"class", "open"}
    cells = [row.rstrip("|").split("|") for row in page.rows]
    ends = [row for row in cells if row[-1][:2] in GLYPHS]
    times = [next((int(one[1:]) for one in row if one[0] == "\u00d7"), 1) for row in ends]
    assert sum(times) == len(tree.leaves)


@pytest.mark.parametrize("times", [1, 300])
def test_hostile_texts_are_inert(times: int) -> None:
    tree = hostile(grafted(branches=True), times)
    for shown in (tree, tree.trajectories()[0]):
        found = shown._repr_html_()
        page = Reader(found)
        assert set(page.tags) <= ALLOWED and page.names <= {"class", "open"}
        assert page.tags.count("style") == 1 and "<script" not in found and "<img" not in found
        # The words are there, as text.
        assert any(text.startswith(HOSTILE[:40]) for text in page.texts)
        for text in (repr(shown), repr(tree.steps[1])):
            assert "\n" not in text and len(text) < 600


def test_equal_siblings_are_drawn_once() -> None:
    rows = Reader(flat()._repr_html_()).rows
    # 13 of 16 starts are one; every fourth answer has the same tokens, and the right ones are two.
    assert rows[0].startswith("0.0|search e36 r1|\u00d713|r1 of e36 is e12|")
    assert len(rows) < len(flat().steps) - 1
    assert sum("\u2713 right" in row for row in rows) == 2 and "advantage" in rows[1]


def test_causes_and_ends_stand_in_the_rows() -> None:
    text = Reader(grafted(branches=True)._repr_html_()).rows
    assert sum("graft from" in row for row in text) == 4
    assert any("|branch|" in row for row in text)
    assert any("\u22ef truncated" in row for row in text)
    assert any("! violation" in row for row in Reader(SHAPES["branched"]()._repr_html_()).rows)


def test_a_big_tree_is_shortened_and_says_so() -> None:
    tree = Grown()
    for n in range(1000):
        start = tree.add(
            "0", StepContent(thought=f"{n} < {HOSTILE * 4}", calls=search("e1 r1").calls)
        )
        tree.answer(start, f"{n} \u2713 {HOSTILE * 4}")
    made = tree.done()
    found = made._repr_html_()
    assert len(found.encode()) <= MOST_BYTES and "shortened: " in found
    assert len(Reader(found).rows) >= 40
    assert "shortened: " not in wide()._repr_html_()


def test_a_long_path_needs_no_recursion() -> None:
    tree = Grown()
    at = "0"
    for n in range(1200):
        at = tree.add(at, search(f"e{n} r1"))
    tree.answer(at, "e3", right=True)
    rows = Reader(tree.done()._repr_html_()).rows
    assert rows[1].split("|")[:2] == ["0.0.0", "search e1 r1"]


def test_light_and_dark_are_those_of_the_viewer() -> None:
    style = flat()._repr_html_()
    for colour in ("#1f6fbf", "#4c9fe8"):  # --policy of either theme in style.css
        # Once for the system's theme, once for Jupyter's.
        assert style.count(f"--policy:{colour};") == 2
    for rule in ("prefers-color-scheme:dark", '[data-jp-theme-light="false"] .treegraft'):
        assert rule in style
    assert "url(" not in style and "http" not in style and "@import" not in style


def test_print_is_the_text_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    path = write_run(tmp_path / "run", num_updates=1, with_buffer=False)
    tree = chat()
    write_trees(RunFolder(path).trees_path(1), [tree])
    console = Console(file=io.StringIO(), width=90)
    console.print(show(RunReader(path), "update-000001", 0, None))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().rstrip().splitlines()
    assert str(tree).splitlines() == lines and len(lines) > 20
    # One trajectory is what stands behind the tree there.
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
