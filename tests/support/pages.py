"""What is written for users: README, CONTRIBUTING and docs/, cut into what tests look at."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (README, *DOCS)}
"""Name -> text of every page that shows how to use the library."""

_SECTION = re.compile(r"^##? (.+?)\n(.*?)(?=^##? |\Z)", re.M | re.S)
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_RUNNABLE = re.compile(r"<!-- runnable -->\n```(\w+)\n(.*?)```", re.S)
_MESSAGE = re.compile(r"<!-- message -->\n```text\n(.*?)\n```", re.S)
_MESSAGES = re.compile(r"<!-- messages -->\n((?:\|.*\n)+)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$")
_COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:treegraft|make|torchrun|python|sh) (?!is )|pytest\b|\.ci/run\b)"
)


def builder() -> ModuleType:
    """Returns docs/build.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runnable() -> dict[str, list[tuple[str, str]]]:
    """Returns the runnable blocks (language, text) of each section that has any, by "PAGE:
    SECTION"."""
    found = {}
    for name, page in PAGES.items():
        # A comment in a block of code is no heading.
        plain = _FENCE.sub(lambda block: block[0].replace("\n#", "\n\0"), page)
        for title, text in _SECTION.findall(plain):
            blocks = _RUNNABLE.findall(text.replace("\n\0", "\n#"))
            if blocks:
                found[f"{name}: {title}"] = blocks
    return found


def file_name(block: str) -> str | None:
    """Returns the file that a block says it is."""
    found = re.match(r"# (\w+\.(?:py|toml))\n", block)
    return found[1] if found else None


def messages() -> list[tuple[str, str]]:
    """Returns the error messages that pages quote in blocks and first cells of marked tables, with
    the page's name."""
    found = [(name, text) for name, page in PAGES.items() for text in _MESSAGE.findall(page)]
    for name, page in PAGES.items():
        for table in _MESSAGES.findall(page):
            found += [(name, text) for text in re.findall(r"^\| `([^`]+)` \|", table, re.M)]
    return found


class Printed(NamedTuple):
    """A command as a reader of a page types it."""

    page: str
    line: str
    """Without comment and prompt, on one line."""
    is_mention: bool
    """Whether it stands in a sentence."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words that a shell makes of it."""
        return tuple(shlex.split(self.line))


def printed() -> list[Printed]:
    """Returns each distinct command of README, CONTRIBUTING and docs, where it stands first."""
    found: dict[tuple[str, ...], Printed] = {}
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, page in {**PAGES, "CONTRIBUTING.md": contributing}.items():
        for is_mention, line in [*_typed(page), *_mentioned(page)]:
            if _COMMAND.match(line):
                one = Printed(name, line, is_mention)
                found.setdefault(one.words, one)
    return list(found.values())


def _typed(page: str) -> Iterator[tuple[bool, str]]:
    for language, block in _BLOCK.findall(page):
        for line in block.replace("\\\n", " ").splitlines():
            if language == "sh" or line.startswith("$ "):
                yield False, _COMMENT.sub("", line.removeprefix("$ ")).strip()


def _mentioned(page: str) -> Iterator[tuple[bool, str]]:
    for text in _INLINE.findall(_FENCE.sub("", page)):
        yield True, " ".join(text.split())
