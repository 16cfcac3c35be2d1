"""The viewer's lists, charts and settings in Chromium: what they hide, what they are drawn over,
and that every page fits every width."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.viewed import metrics_of, plain_tree, served, write_run
from tests.view.test_view_browser import CHROMIUM, browser, query, show, text, until

from treegraft.core.types import Status
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees

__all__ = ["browser"]
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
NUM_ROWS = 120
LONG = "what is the very long answer to a question that has no end , r1 of e1 " * 4
VIEWS = {
    "overview": "",
    "one": "#/?runs=first&x=calls",
    "runs": "#/runs",
    "settings": "#/settings",
    "updates": "#/r/first",
    "groups": "#/r/first/t/update-000001",
    "rows": "#/r/first/t/eval-000004-greedy",
}
HEIGHTS = {390: 844, 1280: 800, 1920: 1080, 2560: 1440}
CLIPPED = """() => {
  const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const inScroller = (e) => e !== null && (scrolls(e) || inScroller(e.parentElement));
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const all = [...document.querySelectorAll("#bar *, #page *")];
  return all.filter((e) => e.checkVisibility() && hasText(e) && !inScroller(e)).filter((e) => {
    const [box, style] = [e.getBoundingClientRect(), getComputedStyle(e)];
    // Names of runs may end in an ellipsis; numbers never.
    const isCut = e.scrollWidth > e.clientWidth + 1 && style.overflowX === "hidden";
    const isOut = box.right > innerWidth + 1 || box.left < -1;
    return isOut || (isCut && style.textOverflow !== "ellipsis");
  }).map((e) => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 60)}`);
}"""


def lines_of(run: Path, num: int, scale: float) -> None:
    """Writes metrics with costs: update n makes 10 n calls and takes 3 seconds."""
    (run / "metrics.jsonl").unlink()
    for update in range(num + 1):
        costs = {"rollout/num_tool_calls": 10.0 * update, "learn/entropy": scale * 10.0**-update}
        RunFolder(run).append_metrics(update, metrics_of(update) | costs | {"zero/all": 0.0})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A viewer of a folder with two runs; the first has an evaluation of many tasks."""
    home = tmp_path_factory.mktemp("runs")
    first = write_run(home / "first")
    second = write_run(home / "sweep" / "second", num_updates=3)
    for run, scale, lr in ((first, 1.0, 0.1), (second, 2.0, 0.2)):
        lines_of(run, 4, scale)
        settings = {"run": {"num_updates": 10}, "tasks": {"num_eval": 40}, "learn": {"lr": lr}}
        if run is second:
            settings |= {"__proto__": {"a": "<b>"}, "model": {"path": "/models/" + "long/" * 20}}
        (run / "config.json").write_text(json.dumps(settings))
    trees = [plain_tree(4, f"held/{n}") for n in range(NUM_ROWS)]
    long = replace(trees[0], task=replace(trees[0].task, question=LONG))
    (leaf,) = long.leaves
    long = replace(long, leaves=(replace(leaf, status=Status.COMPLETED, reward=1.0, error=None),))
    write_trees(RunFolder(first).trees_path(4, "greedy"), [long, *trees[1:]])
    with served(home) as found:
        yield found


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    made = browser.new_page(viewport={"width": 1280, "height": 800})
    made.set_default_timeout(60_000)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
    yield made
    made.close()
    assert problems == []


def test_runs_are_chosen_filtered_and_compared(page: Any, address: str) -> None:
    show(page, address, "#/runs")
    rows = page.locator("#runs tbody tr")
    assert rows.count() == 2 and text(page, "#count") == "2 runs"
    # 10 + 20 + 30 + 40 calls and five lines of 3 s.
    row = page.locator("#runs tr", has_text="second").inner_text()
    assert "sweep" in row and "4/10" in row
    assert "tool calls 100" in text(page, ".equal") and "time 15 s" in text(page, ".equal")
    page.fill("#run-filter", "swe sec")
    until(page, "document.querySelectorAll('#runs tbody tr').length === 1")
    assert text(page, "#count") == "1 of 2 runs" and "q=swe" in query(page)
    page.uncheck("#runs input[type=checkbox]")
    page.click("#compare")
    page.wait_for_selector("section.card")
    assert query(page) == "#/?runs=first"
    pressed = page.locator("button.run").evaluate_all("(all) => all.map((b) => b.ariaPressed)")
    assert pressed == ["true", "false"]


def test_a_run_with_a_comma_is_chosen_and_a_click_opens_the_run_that_has_the_update(
    browser: Any, tmp_path: Path
) -> None:
    short = write_run(tmp_path / "a", num_updates=1)
    long = write_run(tmp_path / "a,b%2C")
    lines_of(short, 1, 1.0)
    lines_of(long, 2, 1.0)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    with served(tmp_path) as address:
        show(page, address, "#/?runs=a,a%252Cb%25252C")
        page.wait_for_selector("section.card")
        pressed = page.locator("button.run").evaluate_all("(all) => all.map((b) => b.ariaPressed)")
        assert pressed == ["true", "true"]
        page.route("**/metrics*", lambda route: route.fulfill(status=409, body='{"error": "torn"}'))
        lines_of(long, 3, 1.0)
        until(page, "document.getElementById('live').innerText.includes('not up to date: torn')")
        assert not page.evaluate("document.body.classList.contains('gone')")
        page.click("button.run >> nth=0")
        page.click("button.run >> nth=0")
        until(page, "location.hash.includes('runs=a%252Cb%25252C%2Ca')")
        box = page.query_selector("[data-card='Reward'] .u-over").bounding_box()
        page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 20)
        until(page, "location.hash.startsWith('#/r/a%2Cb%252C/t/update-000002')")
    page.close()


def test_settings_that_differ_come_first(page: Any, address: str) -> None:
    show(page, address, "#/settings")
    differing = page.locator("#differing tbody tr")
    names = differing.locator("th code").all_inner_texts()
    # Settings in their order, then names that this version does not know.
    assert names == ["model.path", "learn.lr", "__proto__.a"]
    row = differing.nth(1)
    assert row.locator("td").all_inner_texts()[:2] == ["0.1", "0.2"]
    assert "learning rate" in row.locator("small").inner_text()
    own = page.locator("#own tbody th code").all_inner_texts()
    assert own == ["run.num_updates", "tasks.num_eval"]
    page.fill("#setting-filter", "num_eval 40")
    until(page, "document.querySelectorAll('#differing tr').length === 0")
    assert page.locator("#own tbody tr").count() == 1


def test_charts_are_drawn_over_costs(page: Any, address: str) -> None:
    show(page, address, "#/?runs=first")
    # A series of zeros is not drawn unless it is asked for, and then says so.
    page.select_option("#more", "zero/all")
    card = "[data-card='zero/all']"
    page.wait_for_selector(card)
    assert "0 throughout" in text(page, card)
    page.select_option("#axis", "calls")
    until(page, "location.hash.includes('x=calls')")
    box = page.query_selector("[data-card='Reward'] .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
    # 10 + 20 + 30 + 40 calls up to update 4.
    assert "100 tool calls: update 4" in text(page, "#tip") and "0.4" in text(page, "#tip")


def test_long_lists_are_paged_and_say_what_is_equal(page: Any, address: str) -> None:
    show(page, address, "#/r/first/t/eval-000004-greedy")
    assert page.locator("#groups tbody tr").count() == 50
    assert "1 to 50 of 120" in text(page, ".pager")
    heads = page.locator("#groups th").all_inner_texts()
    assert "branches" not in heads and "spread" not in heads
    assert "branches 0" in text(page, ".equal")
    page.click(".pager button >> nth=1")
    until(page, "location.hash.includes('page=2')")
    assert text(page, "#groups tbody td") == "group 50"
    page.click(".equal button")
    assert "branches" in page.locator("#groups th").all_inner_texts() and "all=1" in query(page)
    show(page, address, "#/r/first/t/eval-000004-greedy?page=3")
    assert page.locator("#groups tbody tr").count() == 20


@pytest.mark.parametrize(
    "width", [pytest.param(one, marks=[pytest.mark.slow] if one > 390 else []) for one in HEIGHTS]
)
@pytest.mark.smoke
def test_every_page_fits_every_width(page: Any, address: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
    for name, place in VIEWS.items():
        show(page, address, place)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} scrolls sideways at {width}: {wide}"
        assert page.evaluate(CLIPPED) == [], name
