"""The documentation's site: it builds without a warning and fetches nothing, and its pages tell the
truth about the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from html.parser import HTMLParser
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
