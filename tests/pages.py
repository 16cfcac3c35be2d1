"""What is written for users: README, CONTRIBUTING and docs/, cut into what tests look at."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (README, *DOCS)}
"""Name -> text of every page that shows how to use the library."""

_SECTION = re.compile(r"^##? (.+?)\n(.*?)(?=^##? |\Z)", re.M | re.S)
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_RUNNABLE = re.compile(r"<!-- runnable -->\n```(\w+)\n(.*?)```", re.S)
_MESSAGE = re.compile(r"<!-- message -->\n```text\n(.*?)\n```", re.S)
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)


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
    """Returns the error messages that pages quote, with the page's name."""
    return [(name, text) for name, page in PAGES.items() for text in _MESSAGE.findall(page)]


def commands() -> list[tuple[str, str]]:
    """Returns the lines of shell blocks that call treegraft, with the page's name."""
    lines = [
        (name, line)
        for name, page in PAGES.items()
        for block in _SHELL.findall(page)
        for line in block.splitlines()
    ]
    return [(name, line) for name, line in lines if line.startswith("treegraft ")]
