"""The viewer's pages in a real headless Chromium: each view, keys, filters, addresses, following,
foreign text."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.viewed import (
    copy_without_checkpoints,
    grown_tree,
    metrics_of,
    plain_tree,
    served,
    step,
    write_run,
    write_update,
)

from treegraft.core.types import Leaf, StartCause, Status, StepContent, Task, Tree
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
    ),
    # Playwright's own loop leaves a transport to the collector.
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
    ),
]

INJECTIONS = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=1>",
    "<svg><script>window.hacked=1</script></svg>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<body onload=window.hacked=1>",
    "<a href=javascript:window.hacked=1>link</a>",
    "<details open ontoggle=window.hacked=1>",
    "<input autofocus onfocus=window.hacked=1>",
    "<video><source onerror=window.hacked=1></video>",
    "<math><mtext><script>window.hacked=1</script></mtext></math>",
    "<style>*{display:none}</style>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example/>",
    "<form action=//evil.example><button>go</button></form>",
    "<object data=//evil.example></object>",
    "<embed src=//evil.example>",
    "<template><script>window.hacked=1</script></template>",
    "</pre></article></main><script>window.hacked=1</script>",
    "--><script>window.hacked=1</script><!--",
    "]]><script>window.hacked=1</script>",
    '"><script>window.hacked=1</script>',
    "'onmouseover='window.hacked=1",
    '" onmouseover="window.hacked=1',
    "` onmouseover=`window.hacked=1",
    "javascript:window.hacked=1",
    "data:text/html,<script>parent.hacked=1</script>",
    "{{constructor.constructor('window.hacked=1')()}}",
    "${window.hacked=1}",
    "&lt;script&gt;window.hacked=1&lt;/script&gt;",
    "\\u003cscript\\u003ewindow.hacked=1\\u003c/script\\u003e",
    "<scr\u0000ipt>window.hacked=1</script>",
    "\u202e<script>window.hacked=1</script>",
    "<noscript><p title='</noscript><img src=x onerror=window.hacked=1>'>",
    "__proto__",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "first"), write_run(folder / "second", num_updates=3)


@pytest.fixture(scope="module")
def address(runs: tuple[Path, Path]) -> Iterator[str]:
    with served(*runs) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=180_000
            )
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start here: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    made = browser.new_page(viewport={"width": 1280, "height": 800})
    made.set_default_timeout(60_000)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    # Nothing leaves the machine, whatever a page says.
    foreign: list[str] = []
    made.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("http://127.0.0.1:", "data:"))
            else foreign.append(request.url)
        ),
    )
    yield made
    made.close()
    assert problems == [] and foreign == []


def show(page: Any, address: str, place: str) -> None:
    """Opens a page and waits until it is drawn."""
    page.goto("about:blank")
    page.goto(f"{address}{place}")
    page.wait_for_selector("#page[data-ready]")


def until(page: Any, expression: str) -> None:
    """Waits for JavaScript to hold. Playwright's own way evaluates text inside the page, which the
    pages' policy forbids."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"never came true: {expression}")


def text(page: Any, selector: str) -> str:
    found = page.locator(selector).first
    # Elements of a drawing have no inner text.
    return str(
        found.text_content()
        if found.evaluate("(e) => e instanceof SVGElement")
        else found.inner_text()
    )


def query(page: Any) -> str:
    return str(page.evaluate("location.hash"))


def test_overview(page: Any, address: str) -> None:
    show(page, address, "")
    cards = [card.get_attribute("data-card") for card in page.query_selector_all("section.card")]
    assert cards[:7] == [
        "Reward",
        "Held-out accuracy",
        "Entropy",
        "Tool calls",
        "Retrieved",
        "Branches",
        "Time",
    ]
    assert "Warnings (in 2 updates)" in text(
        page, ".warnings"
    ) and "trajectories lost to failures of ours: 25.0%" in text(page, ".warnings")
    # What it means and what to do stand with it, and each update that it stood in is a way there.
    assert "removed from their groups" in text(
        page, ".warning"
    ) and "To do: The failed leaves" in text(page, ".warning")
    assert page.locator(".warning a").first.get_attribute("href").endswith("update-000003")
    box = page.query_selector("[data-card='Reward'] .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
    assert "update 4" in text(page, "#tip") and "0.4" in text(page, "#tip")
    page.locator("#smooth").fill("0.1")
    assert "smooth=0.1" in query(page)
    page.click("button.run >> text=second")
    until(page, "document.querySelector('.warnings').innerText.includes('Warnings (in 1 update)')")
    assert "runs=first" in query(page)


def test_another_server_of_the_machine_learns_no_token(page: Any, address: str) -> None:
    """Cookies go to all ports of a host; the address of a page to none."""
    seen: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.path}\n{self.headers}")
            body = f"<title>Other</title><img src='/{len(seen)}.png'>".encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    show(page, address, "#/r/first/t/update-000001/0")
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{other.server_port}/"
        # A link in the viewer, one that opens another window, and an address that the user types.
        page.evaluate(
            "(to) => { for (const target of ['', '_blank']) document.body.append(Object.assign("
            "document.createElement('a'), {href: to, target, textContent: `other${target}`})) }",
            place,
        )
        with page.context.expect_page() as opened:
            page.get_by_text("other_blank", exact=True).click()
        opened.value.wait_for_load_state("networkidle")
        assert opened.value.evaluate("opener === null && document.referrer === ''")
        opened.value.close()
        page.get_by_text("other", exact=True).click()
        page.wait_for_load_state("networkidle")
        assert page.title() == "Other" and page.evaluate("document.referrer") == ""
        page.goto(f"{place}typed")
        page.wait_for_load_state("networkidle")
        other.shutdown()
    assert len(seen) >= 6
    found = "\n".join(seen).lower()
    assert "a-token" not in found and "cookie" not in found
    # Nor which server the viewer is.
    assert address.removesuffix("a-token/") not in found


def test_updates_are_sorted_and_opened_with_keys(page: Any, address: str) -> None:
    show(page, address, "#/r/first")
    first = "#updates tbody tr:first-child td:first-child"
    assert text(page, first) == "update 4" and page.locator("tr.warned").count() == 1
    badge = page.locator("tr.warned .badge")
    assert "failed" in badge.inner_text() and "To do: The failed leaves" in badge.get_attribute(
        "title"
    )
    # What an update learned is not said of the evaluation after it.
    cells = page.locator("#updates tr", has_text="evaluation after update 2").locator("td")
    found = dict(
        zip(
            cells.evaluate_all("(all) => all.map((one) => one.dataset.label)"),
            cells.all_inner_texts(),
            strict=True,
        )
    )
    assert (found["reward"], found["entropy"]) == ("\u2013", "\u2013")
    assert found["accuracy"] == "50 %"
    page.click("#updates th >> text=reward")
    page.click("#updates th >> text=reward")
    assert text(page, first) == "update 1"
    page.focus("#updates tbody tr:first-child a")
    page.keyboard.press("Enter")
    page.wait_for_selector("#groups")
    assert query(page).startswith("#/r/first/t/update-000001")
    page.keyboard.press("]")
    until(page, "location.hash.includes('update-000002')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#updates")


def test_filters_stand_in_the_address(page: Any, address: str) -> None:
    show(page, address, "#/r/first/t/update-000001")
    assert text(page, "#count") == "2 trees"
    page.select_option("#f-graft", "1")
    until(page, "document.getElementById('count').textContent === '1 tree'")
    assert "graft=1" in query(page)
    page.select_option("#f-error", "1")
    until(page, "document.getElementById('count').textContent === '0 trees'")
    show(page, address, "#/r/first/t/update-000001?status=failed")
    assert "why ?" in text(page, "#groups")
    assert text(page, "#count") == "1 tree"
    show(page, address, "#/r/first/t/update-000001?q=WHY&mixed=0")
    assert text(page, "#count") == "1 tree" and "why ?" in text(page, "#groups")


def test_the_tree_says_who_why_and_what_for(page: Any, address: str) -> None:
    show(page, address, "#/r/first/t/update-000001/0")
    said = [found.inner_text().strip() for found in page.query_selector_all(".said")]
    assert said == [
        "1 of 4 right: leaf 0",
        "1 truncated: leaf 3",
        "1 graft: e2 r2 from expert; 1 of 1 right with one, 0 of 3 without",
        "1 branch where entropy rose (+0.25 in the rule's unit; rule \u201cthreshold\u201d);"
        " 0 of 1 right with one, 1 of 3 without",
        "Right by way: graft only 1 of 1, branch only 0 of 1, both no leaf, neither 0 of 2",
        "Advantage +1.50 on leaf 0; lowest \u22120.50 on leaves 1, 2, 3",
    ]
    # The first steps of two starts are equal, and drawn once.
    assert page.locator(".drawing .node").count() == 8 and page.locator(".edge.branch").count() == 1
    assert page.locator(".node.graft .icon.graft").count() == 1
    assert page.locator(".node.branch .icon.branch").count() == 1
    assert page.locator(".node[data-step='0.1.0'] .icon.refused").count() == 1
    rows = [found.inner_text().split() for found in page.query_selector_all(".leaf .ends")]
    assert rows == [
        ["0", "\u2713", "right", "1.00", "+1.50"],
        ["1", "\u2717", "wrong", "0.00", "\u22120.50"],
        ["2", "\u2717", "wrong", "0.00", "\u22120.50"],
        ["3", "\u22ef", "truncated", "0.00", "\u22120.50"],
    ]
    graft = text(page, "article.step.graft")
    assert (
        "another agent" in graft
        and "similarity 0.875" in graft
        and "0.2 in its step before, 0.15 in its step after (-0.05)." in graft
        and "this very question" not in graft
    )
    assert "Mean reward: 1.00 over 1 leaf below it, 0.00 over the 3 others of the group." in graft
    assert "ratios \u00d7 1.0182 before clipping" in text(page, ".leaffacts")
    page.click(".leaf[data-leaf='1']")
    page.wait_for_selector(".pathpane[data-leaf='1']")
    assert "entropy rose by 0.25" in text(page, "article.step.branch") and "leaf=1" in query(page)
    page.keyboard.press("j")
    page.wait_for_selector(".pathpane[data-leaf='2']")
    page.wait_for_selector(".part.result.error")
    assert "no such entity" in text(page, ".part.result.error")
    refused = (
        "entropy fell by 0.125 in the rule's unit against the start of the trajectory, so P = 0.47"
        " is not above the threshold 0.50"
    )
    assert refused in text(page, "article[data-step='0.1.0'] .refused") and "shaping" not in text(
        page, ".leaffacts"
    )
    page.click(".findings button >> text=1 of 4 right")
    page.wait_for_selector(".pathpane[data-leaf='0']")
    assert "\u2605 best" in text(page, ".pathhead")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".node.sel[data-step='0.0']")
    # The reason for a mark shows under the pointer and under the keyboard's focus.
    page.hover(".node[data-step='0.0.0']")
    assert "retrieved from" in text(page, "#tip")
    page.hover(".pathhead h2")
    page.keyboard.press("Tab")
    page.evaluate("document.querySelector(\".node[data-step='0.0.1']\").focus()")
    assert "a branch:" in text(page, "#tip")
    page.click(".leaf[data-leaf='2'] .verdict")
    page.keyboard.press("x")
    until(page, "document.querySelectorAll('.drawing .node').length === 9")
    page.click("details.raw summary >> nth=1")
    until(
        page,
        "[...document.querySelectorAll('details.raw pre')].some((p) =>"
        " p.textContent.includes('search'))",
    )


def credited_tree() -> Tree:
    """Returns a grown tree with two equally short right leaves, one without credit for its
    retrieval and one pushed down most."""
    tree = grown_tree(1, "t/1")
    credit = (
        (1.0, 0.9, 1.0, 0.0),
        (1.0, 0.9, 1.0, 0.0),
        (0.0, -0.9, -1.0, 0.0),
        (0.0, -1.3, -1.0, 0.4),
    )
    parts = zip(tree.leaves, credit, ("0.0.1", "0.2", "0.1.0.0", "0.0.0.0"), strict=True)
    return replace(
        tree,
        leaves=tuple(
            replace(
                leaf,
                step_id=where,
                reward=r,
                is_correct=r > 0,
                advantage=a,
                outcome_advantage=own,
                retrieval_reward=z,
                answer="e3",
            )
            for leaf, (r, a, own, z), where in parts
        ),
    )


def test_ties_and_what_is_pushed_down_are_named(browser: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "credited", num_updates=1)
    write_trees(RunFolder(path).trees_path(1), [credited_tree()])
    with served(path) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 330})
        page.set_default_timeout(60_000)
        show(page, address, "#/r/credited/t/update-000001/0")
        said = [
            found.inner_text().strip() for found in page.query_selector_all(".findings button.said")
        ]
        assert said[:2] == ["2 of 4 right: leaves 0, 1", "1 truncated: leaf 3"]
        assert (
            said[-1]
            == "Advantage +0.90 on leaves 0, 1; lowest \u22121.30 on leaf 3 (\u00d7 1.30 for"
            " its retrieval reward +0.40)"
        )
        # A leaf without a graft is shifted too, for retrieval rewards are compared within the
        # group.
        words = (
            "+0.90 = +1.00 of the reward alone \u00d7 0.9: its retrieval reward 0.00 is below the"
            " group's mean, 0.10"
        )
        assert words in text(page, ".leaffacts")
        # A low window shows part of the drawing, and says so until one is there; the window itself
        # never scrolls.
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        page.click("button.more >> text=below")
        until(page, "document.querySelector('.more').hidden")
        page.click(".findings button >> text=Advantage")
        page.wait_for_selector(".pathpane[data-leaf='0']")
        page.close()


def test_a_deep_link_shows_its_step(page: Any, address: str) -> None:
    show(page, address, "#/r/first/t/update-000001/0?step=0.1.0&over=entropy")
    assert (
        page.get_attribute(".pathpane", "data-leaf") == "2"
        and page.locator("article.step.sel[data-step='0.1.0']").count() == 1
    )
    assert page.get_attribute("[data-overlay='entropy']", "aria-pressed") == "true"
    # The pane scrolls to the step, the page's own head stays.
    assert (
        page.evaluate("scrollY") == 0
        and page.evaluate("document.getElementById('bar').getBoundingClientRect().top") == 0
    )


def test_token_overlays_are_switched_and_hovering_is_exact(page: Any, address: str) -> None:
    show(page, address, "#/r/first/t/update-000001/0?leaf=0&mode=tokens")

    def classes() -> list[str]:
        spans = page.query_selector_all(".tok")
        return [span.get_attribute("class").split()[-1] for span in spans]

    def colour(name: str) -> None:
        page.click(f"[data-overlay='{name}']")

    # A right path is green where the policy wrote it.
    assert classes()[-2:] == ["g5", "g5"]
    colour("origin")
    # pppp ssstt rrrr ss
    assert (
        classes()[-15:]
        == ["o-prompt"] * 4
        + ["o-policy"] * 3
        + ["o-tool"] * 2
        + ["o-retrieved"] * 4
        + ["o-policy"] * 2
    )
    colour("loss")
    spans = page.query_selector_all(".tokenview .tok")
    assert [span.get_attribute("class").split()[-1] for span in spans].count("has-loss") == 5
    colour("advantage")
    assert (
        spans[4].get_attribute("class") == "tok p10"
        and spans[0].get_attribute("class") == "tok nothing"
    )
    colour("entropy")
    # Entropies 0.1, 0.2, 0.3 of at most 0.8.
    assert [span.get_attribute("class") for span in spans[4:7]] == ["tok s1", "tok s3", "tok s4"]
    page.keyboard.press("o")
    page.wait_for_selector(".tokenview .tok.p1, .tokenview .tok.p2")
    page.query_selector_all(".tokenview .tok")[5].hover()
    shown = text(page, "#tip")
    assert (
        "0.2" in shown
        and "1.2" in shown
        and "0.1823215567939546" in shown
        and "policy" in shown
        and "1.5" in shown
    )


def test_keys_themes_and_addresses_that_lead_nowhere(page: Any, address: str) -> None:
    show(page, address, "#/r/nobody")
    assert "There is no run" in text(page, "#page")
    # The theme is that of the system.
    shade = "getComputedStyle(document.documentElement).backgroundColor"
    shown = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        shown.append(page.evaluate(shade))
    assert shown == ["rgb(247, 248, 249)", "rgb(20, 23, 26)"]
    page.keyboard.press("?")
    assert "Esc\tone level up" in text(page, "#help").split("\n")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector("section.card")


def test_a_run_is_followed_while_it_writes(browser: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", num_updates=1)
    with served(path) as address:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        show(page, address, "")
        assert page.get_attribute(".cards", "data-points") == "2" and "running" in text(
            page, "#live"
        )
        write_update(path, 2)
        RunFolder(path).append_metrics(2, metrics_of(2))
        page.wait_for_selector(".cards[data-points='3']")
        show(page, address, "#/r/live")
        write_update(path, 3)
        RunFolder(path).append_metrics(3, metrics_of(3))
        until(page, "document.getElementById('updates').innerText.includes('update 3')")
        page.close()


def test_a_copied_folder_shows_ids(browser: Any, runs: tuple[Path, Path], tmp_path: Path) -> None:
    with served(copy_without_checkpoints(runs[0], tmp_path / "copy")) as address:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        show(page, address, "#/r/copy/t/update-000001/0?mode=tokens")
        assert "tokens are shown as ids" in text(page, ".pathpane") and re.match(
            r"#\d+", text(page, ".tokenview .tok")
        )
        page.close()


def hostile_tree() -> Tree:
    """Returns a tree whose every text is an injection, one leaf for each."""
    steps = [step("0", "pp", StepContent(thought=" ".join(INJECTIONS)), None)]
    leaves = []
    for n, foreign in enumerate(INJECTIONS):
        steps.append(
            step(f"0.{n}", "ss", StepContent(thought=foreign, answer=foreign), StartCause(), ids=n)
        )
        leaves.append(
            Leaf(
                step_id=f"0.{n}",
                status=Status.COMPLETED,
                reward=0.0,
                answer=foreign,
                is_correct=False,
                advantage=0.0,
                reward_parts={foreign: 0.0},
            )
        )
    task = Task(
        id=INJECTIONS[0],
        question=" ".join(INJECTIONS),
        reference=(INJECTIONS[1],),
        category=INJECTIONS[2],
    )
    return Tree(task=task, group_id=f"1/{INJECTIONS[0]}", steps=tuple(steps), leaves=tuple(leaves))


def test_what_models_write_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    assert len(INJECTIONS) >= 30
    path = write_run(tmp_path / "hostile", num_updates=1)
    write_trees(RunFolder(path).trees_path(1), [hostile_tree(), plain_tree(1, "t/2")])
    with served(path) as address:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        tree = "#/r/hostile/t/update-000001/0"
        for place in (
            "#/r/hostile/t/update-000001",
            tree,
            f"{tree}?mode=tokens",
            "#/r/hostile/t/update-000001?q=script",
            "#/<script>window.hacked=1</script>",
        ):
            show(page, address, place)
            assert page.evaluate("window.hacked") is None, place
            assert (
                page.locator(
                    "#page script, #page iframe, #page object, #page embed, #page style, #page"
                    " link, #page base"
                ).count()
                == 0
            )
            assert page.evaluate(
                "[...document.querySelectorAll('#page *')].every((e) => [...e.attributes].every((a)"
                " => !a.name.startsWith('on')))"
            )
        show(page, address, f"{tree}?leaf=0")
        page.keyboard.press("x")  # else equal tokens share a row
        for n, foreign in enumerate(INJECTIONS):
            page.wait_for_selector(f".pathpane[data-leaf='{n}']")
            shown = page.locator("article.step .part.answer pre").text_content()
            assert shown == foreign.replace("\u0000", "\u2400").replace("\u202e", "\ufffd")
            page.keyboard.press("j")
        assert page.evaluate("window.hacked") is None
        page.close()
