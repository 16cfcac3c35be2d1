"""The documentation's site: it builds without a warning and fetches nothing, and its pages tell the
truth about the code."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.pages import DOCS, PAGES, ROOT, messages
from tests.support.pages import builder as load_builder

SOURCE = ROOT / "src" / "treegraft"
LOADS = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "use": "href",
}
"""What a browser fetches by itself; a link is fetched where somebody follows it."""


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return load_builder()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, in a folder of its own."""
    pytest.importorskip(
        "zensical", reason="zensical is not installed: pip install 'treegraft[docs]'"
    )
    folder = tmp_path_factory.mktemp("site") / "docs"
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "build.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "issues found" not in (done.stdout + done.stderr).replace("No issues found", "")
    return folder / "site"


TELEPHONE = 390
"""Pixels of a narrow screen."""
WIDE = """() => {
  const right = e => e.getBoundingClientRect().right;
  const column = right(document.querySelector('.md-content__inner')) + 1;
  const parts = document.querySelectorAll('table, pre, svg');
  const inside = [...parts].filter(e => e.closest('.md-content'));
  return inside.filter(e => right(e) > column).map(e => e.textContent.slice(0, 60));
}"""
"""The tables, blocks and drawings of a page that reach beyond its column."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, *arguments: object) -> None: ...


class Fetched(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if value and name == LOADS.get(tag)]


@pytest.mark.smoke  # two minutes
def test_tables_of_studies_are_those_of_their_runs(builder: ModuleType) -> None:
    with_tables = [page for page in PAGES.values() if "<!-- table: " in page]
    assert with_tables
    for page in with_tables:
        assert builder.with_tables(page) == page, "run: python docs/build.py --tables"


@pytest.mark.smoke
def test_every_page_is_built_and_fetches_nothing(site: Path, builder: ModuleType) -> None:
    names = {"index.html"} | {path.name.replace(".md", ".html") for path in DOCS}
    names |= {f"reference/{name}.html" for name in builder.references()}
    assert {str(path.relative_to(site)) for path in site.rglob("*.html")} == names | {"404.html"}
    for path in site.rglob("*.html"):
        page = Fetched()
        page.feed(path.read_text(encoding="utf-8"))
        assert [
            address for address in page.found if "//" in address and not address.startswith("data:")
        ] == [], path.name
    for style in site.rglob("*.css"):
        assert not re.search(
            r"url\(['\"]?(?:https?:)?//|@import", style.read_text(encoding="utf-8")
        ), style.name


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_pages_in_a_browser(site: Path) -> None:
    """Each page in both themes: nothing is asked of another host, nothing fails, nothing is wider
    than its column; on a telephone no page is wider than the screen."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    asked_for: list[str] = []
    errors: list[str] = []
    too_wide: list[str] = []
    try:
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=180_000
            )
            for scheme, width in (("light", 1280), ("dark", 1280), ("light", TELEPHONE)):
                page = browser.new_context(
                    viewport={"width": width, "height": 900}, color_scheme=scheme
                ).new_page()
                page.on("request", lambda asked: asked_for.append(asked.url))
                page.on(
                    "console",
                    lambda said: errors.append(said.text) if said.type == "error" else None,
                )
                for path in sorted(site.rglob("*.html")):
                    page.goto(f"{home}{path.relative_to(site)}")
                    if width == TELEPHONE:  # blocks of code reach to the edges there, and scroll
                        taken = page.evaluate("() => document.documentElement.scrollWidth")
                        too_wide += [f"{path.name}: {taken} px"] if taken > TELEPHONE else []
                    else:
                        wide = page.evaluate(WIDE)
                        too_wide += [f"{scheme} {path.name}: {text}" for text in wide]
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
    assert errors == []
    assert "\n".join(too_wide) == ""
    assert (
        len(asked_for) > 100
        and [url for url in asked_for if not url.startswith((home, "data:", "blob:"))] == []
    )


@pytest.mark.smoke
def test_a_bad_link_fails_the_build(builder: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip(
        "zensical", reason="zensical is not installed: pip install 'treegraft[docs]'"
    )
    builder.stage(tmp_path / "docs")
    start = tmp_path / "docs" / "docs" / "start.md"
    start.write_text(
        start.read_text(encoding="utf-8") + "\n[nowhere](nowhere.md)\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path / "docs",
        capture_output=True,
        timeout=300,
    )
    assert done.returncode != 0


def test_every_page_has_its_place(builder: ModuleType) -> None:
    listed = re.findall(
        r'"([\w/-]+\.md)"', (ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8")
    )
    assert sorted(listed) == sorted(
        ["index.md", *(path.name for path in DOCS)]
        + [f"reference/{name}.md" for name in builder.references()]
    )


def test_references_of_a_clone_are_up_to_date(builder: ModuleType) -> None:
    pages = builder.references()
    folder = ROOT / "docs" / "reference"
    assert {path.stem for path in folder.iterdir()} == set(builder.KEPT)
    for name in builder.KEPT:
        written = (folder / f"{name}.md").read_text(encoding="utf-8")
        assert written == pages[name], "run: python docs/build.py --reference"


def test_references_hold_everything(builder: ModuleType) -> None:
    from treegraft.runs.metrics import METRICS
    from treegraft.settings.config import known_settings

    pages = builder.references()
    for name in known_settings():
        table, _, last = name.rpartition(".")
        section = pages["settings"].split(f"## [{table}]\n")[1].split("\n## ")[0]
        assert f"| `{last}` |" in section
    assert [key for key in METRICS if f"| `{key}` |" not in pages["metrics"]] == []
    for answer in builder.all_answers():
        for name in (*answer.trl, *answer.verl):
            [line] = re.findall(rf"^\| `{re.escape(name)}` \| .*", pages["names"], re.M)
            assert all(f"`{ours}`" in line for ours in answer.here) and (
                answer.here or "none" in line
            )
    for command in ("train", "eval", "view", "buffer build", "data check", "serve search"):
        assert f"## treegraft {command}\n" in pages["commands"]
    assert (
        "| `--resume RUN_DIR` | Run folder to continue from its latest checkpoint. |"
        in pages["commands"]
    )


def test_types_are_said_in_plain_words(builder: ModuleType) -> None:
    from treegraft.settings.config import known_settings

    fields = known_settings()
    said = {
        name: builder.type_name(fields[name].field.annotation)
        for name in ("run.name", "model.dtype", "learn.betas", "reward.weights")
    }
    assert said == {
        "run.name": "text or none",
        "model.dtype": '"float32" or "bfloat16"',
        "learn.betas": "tuple[number, number]",
        "reward.weights": "list[number] or none",
    }
    assert builder.cell("a|b  *c* `x|y`\nd") == "a\\|b \\*c\\* `x|y` d"


def templates() -> str:
    """Returns every text of the package with … where something is filled in."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_are_those_of_the_code() -> None:
    said = templates()
    quoted = messages()
    assert quoted
    wrong = [f"{page}: {text}" for page, text in quoted if text not in said]
    assert wrong == []


def test_tables_are_whole() -> None:
    """A row behind a blank line would be shown as text."""
    for name, page in PAGES.items():
        for above, row in re.findall(r"\n\n(\|.*)\n(.*)", page):
            assert row.startswith("|") and not row.strip("|-: "), f"{name}: {above}"


def test_functions_named_on_the_pages_exist() -> None:
    """`algo/rapo.py`: `retrieval_reward`, `shaping_factor` - the file is there and defines them."""
    is_found = False
    for name, page in PAGES.items():
        for path, names in re.findall(r"`((?:\w+/)+\w+\.py)`((?:[:,]? `\w+(?:\.\w+)?`,?)*)", page):
            place = next((base / path for base in (SOURCE, ROOT) if (base / path).exists()), None)
            assert place is not None, f"{name}: {path}"
            tree = ast.parse(place.read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
            for one in re.findall(r"`(\w+(?:\.\w+)?)`", names):
                assert set(one.split(".")) <= defined, f"{name}: {path} has no {one}"
                is_found = True
    assert is_found


def test_drawings_say_what_they_show() -> None:
    for path in (ROOT / "docs" / "assets").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert 'role="img" aria-label="' in text and "http" not in text.replace(
            'xmlns="http://www.w3.org/2000/svg"', ""
        )


def test_the_contents_of_the_log_lead_to_its_entries(builder: ModuleType) -> None:
    log = (ROOT / "LOG.md").read_text(encoding="utf-8")
    anchors = {builder.anchor(title) for title in re.findall(r"^## (.+)$", log, re.M)}
    listed = re.findall(r"^\* \[.+\]\(#(.+)\)$", log, re.M)
    assert listed and set(listed) <= anchors, "run: python docs/build.py --log"
