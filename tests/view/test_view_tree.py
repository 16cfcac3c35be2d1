"""The drawing of a tree, measured in Chromium: nothing overlaps, nothing is cut, nothing runs
through a label, at four widths, for trees of every shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.grown import BRANCH, GRAFT, SHAPES, Grown, considered, flat, grafted, search
from tests.support.viewed import served, write_run
from tests.view.test_view_browser import browser, pytestmark, show, until  # noqa: F401
from typer.testing import CliRunner

from treegraft.cli.main import app as command_line
from treegraft.core.types import BranchCause, Tree
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees
from treegraft.view.pages import content_numbers, draw

PHONE = 390
LAPTOP = 1280
MONITORS = (1920, 2560)

MEASURE = (Path(__file__).parents[1] / "support" / "measure.js").read_text(encoding="utf-8")

SETTLED = """new Promise((go) =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(go, 40))))"""
"""A change of size is seen in one frame and drawn in the next."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = write_run(tmp_path_factory.mktemp("grown") / "run", num_updates=1)
    write_trees(RunFolder(path).trees_path(1), [make() for make in SHAPES.values()])
    with served(path) as found:
        yield found


@pytest.fixture(scope="module")
def page(browser: Any, address: str) -> Iterator[Any]:  # noqa: F811
    made = browser.new_page()
    made.set_default_timeout(60_000)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    yield made
    made.close()
    assert problems == []


def open_tree(page: Any, address: str, shape: str, query: str = "") -> None:
    show(page, address, f"#/r/run/t/update-000001/{list(SHAPES).index(shape)}{query}")


def resize(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844 if width < 500 else 900})
    page.evaluate(SETTLED)


NOTHING: dict[str, list[str]] = {
    "overlaps": [],
    "clipped": [],
    "crossed": [],
    "small": [],
    "wide": [],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.smoke
def test_nothing_overlaps_or_is_cut(page: Any, address: str, shape: str) -> None:
    open_tree(page, address, shape)
    resize(page, LAPTOP)
    assert page.evaluate(MEASURE) == NOTHING
    resize(page, PHONE)
    assert page.evaluate(MEASURE) == NOTHING
    # A phone shows the tree without scrolling.
    assert page.evaluate("document.querySelector('.drawingpane').getBoundingClientRect().top") < 300


@pytest.mark.slow
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "empty"])
def test_nothing_overlaps_on_monitors_or_unfolded(page: Any, address: str, shape: str) -> None:
    open_tree(page, address, shape)
    for width in MONITORS:
        resize(page, width)
        assert page.evaluate(MEASURE) == NOTHING, f"{shape} at {width}"
    page.keyboard.press("x")  # every equal step by itself
    for width in (*MONITORS, LAPTOP, PHONE):
        resize(page, width)
        assert page.evaluate(MEASURE) == NOTHING, f"{shape} unfolded, the other theme, at {width}"
    page.keyboard.press("d")


def test_the_measure_finds_what_it_looks_for(page: Any, address: str) -> None:
    open_tree(page, address, "both")
    resize(page, 1280)
    page.evaluate(
        """() => {
          const [first, second] = document.querySelectorAll('.node.start, .node.graft');
          second.style.setProperty('left', first.style.left);
          second.style.setProperty('top', first.style.top);
          document.querySelector('.leaf .verdict').style.setProperty('margin-left', '400px');
          document.querySelector('.edges').style.setProperty('left', '60px');
          document.querySelector('.node.graft .icon').style.setProperty('margin-right', '-20px');
          const narrow = document.querySelector('.node.branch');
          narrow.style.setProperty('width', '50px');
          narrow.querySelector('.words').textContent = 'e1';
          document.querySelector('.drawing').style.setProperty('width', '3000px');
        }"""
    )
    found = page.evaluate(MEASURE)
    assert found["overlaps"] and found["clipped"] and found["crossed"] and found["wide"]
    assert "icon over e12 r2" in found["overlaps"] and "e1" in found["clipped"]


def test_equal_steps_are_drawn_once_and_unfold(page: Any, address: str) -> None:
    open_tree(page, address, "flat")
    resize(page, 1280)

    def count() -> int:
        return int(page.locator(".drawing .node").count())

    # Root, four first steps (13 are equal), and answers: four of the 13 are one, as token ids tell.
    assert count() == 1 + 4 + (13 - 3) + 3
    row = page.locator(".leaf:has(.times)")
    assert row.locator(".times").inner_text() == "\u00d74" and row.count() == 1
    row.locator(".times").click()
    page.evaluate(SETTLED)
    assert count() == 1 + 4 + 13 + 3
    page.keyboard.press("x")
    until(page, "document.querySelectorAll('.drawing .node').length === 33")
    assert page.locator(".said").first.inner_text() == "2 of 16 right: leaves 3, 9"


def test_an_empty_tree_and_one_without_variance_say_so(page: Any, address: str) -> None:
    open_tree(page, address, "empty")
    assert page.locator(".said").all_inner_texts() == ["This tree has no leaf."]
    page.keyboard.press("j")
    open_tree(page, address, "one leaf")
    assert page.locator(".leaf .verdict").all_inner_texts() == ["\u2205 failed"]
    assert page.locator(".best").count() == 0


def test_a_wrong_leaf_is_never_called_the_best(page: Any, address: str) -> None:
    open_tree(page, address, "deep", "?leaf=4")
    assert "\u2605 best" in page.locator(".pathhead").inner_text()
    page.keyboard.press("j")
    until(page, "document.querySelector('.pathpane').dataset.leaf === '5'")
    assert "\u2605" not in page.locator(".pathhead").inner_text()


def forked_deep(num_steps: int = 12) -> Tree:
    """Returns a path of so many steps, with a branch beside each but the first and the last."""
    tree = Grown()
    path = [tree.add("0", search("e1 r1"))]
    for number in range(2, num_steps):
        path.append(tree.add(path[-1], search(f"e{number} r1"), decision=considered(1, 1)))
    tree.answer(path[-1], "e3", right=True)
    # Depth first: the lowest branch stands next to the answer.
    for number, step in reversed([*enumerate(path[:-1])]):
        tree.answer(step, f"e{number}", cause=BRANCH)
    return tree.done()


def test_forks_of_a_deep_tree_have_their_numbers(
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "run", num_updates=1)
    write_trees(RunFolder(path).trees_path(1), [forked_deep()])
    page = browser.new_page(viewport={"width": LAPTOP, "height": 900})
    with served(path) as address:
        show(page, address, "#/r/run/t/update-000001/0")
        page.evaluate(SETTLED)
        assert page.locator(".node .mark.branch").count() == 10
        assert page.locator(".node .mark.branch span").count() == 10
        assert page.evaluate(MEASURE) == NOTHING
        page.goto("about:blank")


def test_equal_tokens_have_one_number() -> None:
    tree = flat()
    numbers = content_numbers(tree)
    by_tokens = {(tuple(one.token_ids), tuple(one.origins)) for one in tree.steps}
    assert len(set(numbers.values())) == len(by_tokens) < len(tree.steps)
    assert numbers["0.0"] == numbers["0.12"] != numbers["0.13"]
    # A graft with the tokens of a step of the policy is not that step.
    both = grafted()
    assert len(set(content_numbers(both).values())) > 2


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_agree_with_themselves(shape: str) -> None:
    tree = SHAPES[shape]()
    for leaf in tree.leaves:
        if leaf.is_correct is not None:
            words = set((leaf.answer or "").split())
            assert bool(words & set(tree.task.reference)) is leaf.is_correct
    for step in tree.steps:
        if step.decision is not None:
            seen = step.decision.seen
            assert seen.bar is not None
            assert (seen.probability > seen.bar) is (step.decision.num_wanted > 0)
            assert (seen.entropy_change > 0) is (step.decision.num_wanted > 0)


def test_of_equal_rewards_the_highest_advantage_is_the_best() -> None:
    tree = grafted()
    # Leaves 1, 3, 5 and 7 are right; retrieval rewards set their advantages apart.
    leaves = [
        replace(leaf, advantage={3: 0.4, 5: 0.6}.get(n, leaf.advantage and 0.2))
        for n, leaf in enumerate(tree.leaves)
    ]
    assert draw(replace(tree, leaves=tuple(leaves)))["best"] == 5


def test_a_phone_folds_the_sentences_and_offers_a_list_of_colours(page: Any, address: str) -> None:
    open_tree(page, address, "both")
    resize(page, PHONE)
    assert page.locator(".said:visible").all_inner_texts() == ["4 of 16 right: leaves 2, 6, 10, 14"]
    page.click("text=5 more")
    assert page.locator(".said:visible").count() == 6
    page.select_option(".overlays select", "advantage")
    assert page.locator(".chip:visible").all_inner_texts() == [
        "\u22121.19",
        "0",
        "+1.19",
        "no loss",
    ]
    resize(page, LAPTOP)
    assert page.locator(".said:visible").count() == 6
    assert page.locator(".unfold:visible, .overlays select:visible").count() == 0


def sentences(page: Any, address: str, shape: str) -> str:
    open_tree(page, address, shape)
    return "\n".join(page.locator(".said").all_inner_texts())


def test_sentences_name_what_the_drawing_shows(page: Any, address: str) -> None:
    resize(page, LAPTOP)
    both = sentences(page, address, "both")
    # The odd starts were grafted and are right, and the branch beside each is wrong.
    assert "4 grafts (all different)" not in both
    assert "4 grafts: e12 r2 \u00d74 from expert; 4 of 8 right with one, 0 of 8" in both
    assert (
        "Right by way: graft only 4 of 4, branch only 0 of 4, both 0 of 4, neither 0 of 4" in both
    )
    assert "8 branches where entropy rose (+0.002 in the rule's unit; rule P > 0.50)" in both
    assert "1 truncated: leaf 5" in both
    branched = sentences(page, address, "branched")
    assert (
        "2 truncated: leaves 0, 6; 2 in violation of the format: leaves 1, 7; 2 failed" in branched
    )
    assert "No branch: forks are rollouts that began alike" in sentences(page, address, "flat")
    deep = sentences(page, address, "deep")
    assert "no comparison: every leaf has one (1 of 6 right)" in deep
    # As many grafts as the sentence counts, folded or not.
    badges = page.locator(".node.graft").evaluate_all(
        "all => all.map(one => Number(one.querySelector('.times')?.textContent.slice(1) ?? 1))"
    )
    assert f"{sum(badges)} grafts" in deep


def test_a_legend_has_what_occurs_and_nothing_else(page: Any, address: str) -> None:
    resize(page, LAPTOP)
    open_tree(page, address, "flat")
    shown = page.locator(".treelegend").inner_text()
    assert "rollouts that began alike, drawn once" in shown and "fork without a mark" in shown
    assert not {"branch,", "graft:", "loss:"} & set(shown.split())
    open_tree(page, address, "wide")
    shown = " ".join(page.locator(".treelegend").inner_text().split())
    assert "P .50 branch, and the rule's probability" in shown and "alike" not in shown
    assert page.locator(".node.noloss").count() == 0
    open_tree(page, address, "grafted")
    assert "no loss: not learned from" in page.locator(".treelegend").inner_text()
    assert page.locator(".node.noloss").count() == page.locator(".node.graft").count() == 4


def test_equal_leaves_of_different_ways_stand_apart(page: Any, tmp_path: Path) -> None:
    tree = Grown()
    for _ in range(16):
        start = tree.add("0", search("e36 r1"), same=1)
        after = tree.add(start, search("e12 r2"), GRAFT, same=2)
        tree.answer(after, "e4", same=3)
        tree.answer(after, "e4", same=3, cause=BRANCH)
    path = write_run(tmp_path / "ways", num_updates=1)
    write_trees(RunFolder(path).trees_path(1), [tree.done()])
    with served(path) as found:
        show(page, found, "#/r/ways/t/update-000001/0")
        for width in (LAPTOP, PHONE):
            resize(page, width)
            counts = page.locator(".times:visible").all_inner_texts()
            # A search, a graft and two leaves, each sixteen times.
            assert counts.count("\u00d716") == 4, width
            assert page.evaluate(MEASURE) == NOTHING, width
        resize(page, LAPTOP)
        icons = page.locator(".leaf .ends .via")
        assert [icons.nth(n).locator(".icon.branch").count() for n in (0, 1)] == [0, 1]
        page.goto("about:blank")


def test_children_drawn_at_random_are_not_explained_by_entropy(
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    grown = Grown()
    drawn = BranchCause(entropy_change=0.0, probability=1.0, rule="random")
    start = grown.add("0", search("e36 r1"))
    grown.answer(start, "e12")
    grown.answer(start, "e3", right=True, cause=drawn)
    path = write_run(tmp_path / "run", num_updates=1)
    write_trees(RunFolder(path).trees_path(1), [grown.done()])
    arguments = ["view", str(path), "--text", "update-000001/0"]
    shown = CliRunner().invoke(command_line, arguments, env={"COLUMNS": "200"}).output
    assert "branch: a further child of a finished step, drawn at random" in shown
    page = browser.new_page(viewport={"width": LAPTOP, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    with served(path) as address:
        # A leaf that is no number is the first one.
        show(page, address, "#/r/run/t/update-000001/0?leaf=abc")
        said = page.locator(".said.branch").inner_text()
        assert said.strip().startswith("1 branch below finished steps, drawn at random; ")
        assert "helped" not in said
        assert "drawn branch: a further child of a finished step" in " ".join(
            page.locator(".treelegend").inner_text().split()
        )
        assert "Leaf 0" in page.locator("h2").first.inner_text()
        assert "P 1" not in page.locator("#page").inner_text()
        assert page.evaluate(MEASURE) == NOTHING
    page.close()
    assert problems == []
