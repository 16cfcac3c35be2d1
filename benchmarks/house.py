"""The size of the house: lines of core and extensions, what hangs below `train.py`, and arrows.

    python -m benchmarks.house [--before COMMIT] [--story]

Prints one table for this working tree and, with --before, the same for a commit, which is read from
git without a checkout. An import counts wherever it stands. Settings are counted in a process that
imports the tree's own code. With --story the table says how a training is orchestrated, by the
definitions in `benchmarks/story.py`; it trains the demo in miniature.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from benchmarks.story import story

ROOT = Path(__file__).resolve().parents[1]
COUNT_SETTINGS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if {alone} and name.startswith("treegraft.extras"):
            raise ModuleNotFoundError(name, name="treegraft.extras")
sys.meta_path.insert(0, Blocked())
from treegraft.settings.config import known_settings
print(len(known_settings()))
"""


def num_code_lines(text: str) -> int:
    """Returns the lines of a module that hold code: no blank line, comment or docstring."""
    lines = text.splitlines()
    found = {n for n, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for member in body if isinstance(body, list) else []:
            value = member.value if isinstance(member, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found -= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return len(found)


def text_of(path: Path) -> str:
    """Returns the text of a module, with that of the stub beside it, which holds its imports."""
    parts = [one for one in (path, path.with_suffix(".pyi")) if one.exists()]
    return "\n".join(one.read_text(encoding="utf-8") for one in parts)


def modules_of(package: Path) -> dict[str, str]:
    """Returns the text of each module by its name below the package, "" for the package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = text_of(path)
    return found


def imports_of(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns which modules each module imports, the package itself left out."""
    drawn: dict[str, set[str]] = {}
    for module, text in modules.items():
        names: list[str] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        drawn[module] = set()
        for name in names:
            parts = name.split(".")
            if parts[0] != "treegraft":
                continue
            ends = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
            home = next((one for one in ends if one in modules), "")
            drawn[module] |= {home} - {"", module}
    return drawn


def below(module: str, drawn: Mapping[str, set[str]]) -> set[str]:
    """Returns a module and all that it imports, directly or not."""
    found = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += drawn.get(one, ())
    return found


def longest_chain(drawn: Mapping[str, set[str]]) -> int:
    """Returns the number of modules in the longest chain of imports."""
    lengths: dict[str, int] = {}

    def length(module: str) -> int:
        if module not in lengths:
            lengths[module] = 0  # a circle would not end
            lengths[module] = 1 + max((length(one) for one in drawn.get(module, ())), default=0)
        return lengths[module]

    return max(map(length, drawn))


def num_settings(tree: Path, *, alone: bool) -> str:
    """Returns the number of settings, with those of plugins or without any extension."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT_SETTINGS.format(alone=alone)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
    )
    return done.stdout.strip() or "-"


def measured(tree: Path) -> dict[str, str]:
    """Returns the rows of the table for one tree of files."""
    package = tree / "src" / "treegraft"
    modules = modules_of(package)
    core = {name: text for name, text in modules.items() if name.split(".")[0] != "extras"}
    extras = {name: text for name, text in modules.items() if name not in core}
    drawn = imports_of(modules)
    inner = {name: drawn[name] & core.keys() for name in core if name not in ("", "parts")}
    closure = below("train", drawn)
    rooms = {
        (one.split(".")[0], other.split(".")[0])
        for one, others in inner.items()
        for other in others
        if one.split(".")[0] != other.split(".")[0]
    }
    names = {name.split(".")[0] for name in core} - {"", "__main__"}
    names |= {"extras"} if extras else set()
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pages = list((tree / "docs").glob("*.md"))

    def lines(some: Mapping[str, str]) -> str:
        return f"{sum(len(text.splitlines()) for text in some.values()):,}"

    def code(some: Mapping[str, str]) -> str:
        return f"{sum(map(num_code_lines, some.values())):,}"

    return {
        "core: lines (code)": f"{lines(core)} ({code(core)})",
        "extras: lines (code)": f"{lines(extras)} ({code(extras)})",
        "below train.py: files, lines": f"{len(closure)},"
        f" {lines({name: modules[name] for name in closure})}",
        "entries in the root": str(len(names)),
        "train.py: lines, imports": f"{len(modules['train'].splitlines())}, {len(drawn['train'])}",
        "arrows between rooms of the core": str(len(rooms)),
        "longest chain of files": str(longest_chain(inner)),
        "settings, those of the core": f"{num_settings(tree, alone=False)},"
        f" {num_settings(tree, alone=True)}",
        "required dependencies": str(len(project["dependencies"])),
        "pages, their lines": f"{len(pages)},"
        f" {sum(len(page.read_text(encoding='utf-8').splitlines()) for page in pages):,}",
    }


def told(tree: Path) -> dict[str, str]:
    """Returns the rows of the table about orchestration for one tree of files."""
    return story(tree, modules_of(tree / "src" / "treegraft"))


def extract(commit: str, folder: Path) -> None:
    """Writes the files of a commit that are measured into a folder."""
    files = ["src", "docs", "recipes", "pyproject.toml"]
    packed = subprocess.run(
        ["git", "archive", commit, *files], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="COMMIT", help="also measure this commit")
    parser.add_argument("--story", action="store_true", help="how a training is orchestrated")
    asked = parser.parse_args()
    measure = told if asked.story else measured
    columns = {"now": measure(ROOT)}
    if asked.before:
        with tempfile.TemporaryDirectory() as folder:
            extract(asked.before, Path(folder))
            columns = {asked.before: measure(Path(folder)), **columns}
    print(f"| what | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for what in columns["now"]:
        print(f"| {what} | {' | '.join(rows[what] for rows in columns.values())} |")


if __name__ == "__main__":
    main()
