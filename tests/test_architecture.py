"""Arrows, cycles and sizes of the package, and whether its pages tell the truth about its files.

An import counts wherever it stands: at the top of a module, inside a function, or for types
only.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.test_exports import is_overload

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "treegraft"

ONLY = {
    "kernels": ("kernels", "errors"),
    "algo": ("algo", "types", "errors"),
    "explore": ("explore", "types", "errors", "keyed", "interfaces", "algo.arpo"),
    # The buffer's file is read by its own layout and searched with its own encoder; both are found
    # where they are defined.
    "view": (
        *("view", "types", "errors", "record", "metrics", "config", "recipe", "interfaces"),
        *("terminal", "traces.store", "traces.embed", "health", "settings_health"),
    ),
    # It reads what the viewer reads; trajectories are embedded with the encoders of the buffer.
    "report": (
        "report",
        "types",
        "errors",
        "record",
        "metrics",
        "terminal",
        "traces.embed",
        "view.runs",
    ),
    "types": ("causes",),
    "causes": (),
    "errors": (),
    "config": ("errors", "settings", "settings_search", "settings_environment", "settings_health"),
    "settings": (),
    "settings_search": ("settings",),
    "settings_environment": ("settings",),
    "settings_health": ("settings",),
    "health": ("health_rules", "settings_health"),
    "health_rules": ("settings_health",),
    "metrics": ("errors",),
    "interfaces": ("types", "explore.proposals"),
    "keyed": (),
}
"""What a module or package may import of ours; anything else is a wrong arrow."""

NEVER = {
    "rollout": (
        "engine",
        "tasks",
        "tools",
        "learn",
        "models",
        "checkpoint",
        "traces",
        "train",
        "evaluate",
        "cli",
    ),
    "engine": ("rollout", "learn", "tasks", "tools", "train", "evaluate", "cli"),
    "tasks": ("engine", "learn", "train", "evaluate", "cli"),
    "tools": ("engine", "learn", "rollout", "train", "evaluate", "cli"),
    "learn": ("engine", "tasks", "tools", "train", "evaluate", "cli"),
}
"""What a package must not import of ours."""

BESIDES = {("rollout", "tools.toolbox"), ("rollout", "tools.sessions")}
"""The tool box runs calls for any tool, in sessions with or without an environment: they are no
kinds."""

TORCH = (
    *(
        "models",
        "attention",
        "engine",
        "learn",
        "kernels",
        "checkpoint",
        "algo.losses",
        "traces.embed",
        "track.tensorboard",
    ),
    "bench",
)
"""Where tensors live, the tracker whose SummaryWriter torch brings, and what measures all that."""

NO_TORCH = ("engine.scripted", "engine.vllm", "engine.stops", "kernels.compiler")
"""Exceptions from the above: what must answer without torch."""


def under(module: str, parents: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{parent}.") for parent in parents)


def module_name(path: Path) -> str:
    """Returns "rollout.loop" for src/treegraft/rollout/loop.py, "" for the package itself."""
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[str]:
    """Returns the full name of everything that a module imports, "package.module.name" for what
    follows `from`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["treegraft", *([part for part in module.split(".") if part])]
                keep = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def home(name: str) -> str | None:
    """Returns the module of ours that an imported name belongs to, None for foreign ones."""
    parts = name.split(".")
    if parts[0] != "treegraft":
        return None
    for end in range(len(parts), 0, -1):
        candidate = ".".join(parts[1:end])
        if candidate in FILES:
            return candidate
    return ""


def edges() -> dict[str, set[str]]:
    drawn: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        found = imports(tree, module, FILES[module].name == "__init__.py")
        targets = {target for name in found if (target := home(name)) is not None}
        drawn[module] = targets - {module}
    return drawn


EDGES = edges()


def test_imports_of_all_kinds_are_seen() -> None:
    source = """
import os, treegraft.core.types
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from treegraft.settings.config import Config
def lazy():
    import torch.nn
    from . import budget
    from ..errors import SettingError
"""
    found = set(imports(ast.parse(source), "explore.entropy"))
    assert found == {
        *(
            "os",
            "treegraft.core.types",
            "typing.TYPE_CHECKING",
            "treegraft.settings.config.Config",
            "torch.nn",
        ),
        *("treegraft.explore.budget", "treegraft.core.errors.SettingError"),
    }
    assert set(imports(ast.parse("from .loop import run"), "rollout", is_package=True)) == {
        "treegraft.rollout.loop.run"
    }


@pytest.mark.parametrize("module", sorted(FILES))
def test_arrows(module: str) -> None:
    top = module.partition(".")[0]
    for target in sorted(EDGES[module]):
        # The root package re-exports and is a way in, never a way between modules;
        # `test_the_root...` watches it.
        if target == "":
            continue
        if top in ONLY:
            assert under(target, ONLY[top]), (
                f"{module} imports {target}; {top} may import {', '.join(ONLY[top])} only"
            )
        is_allowed = any(top == a and under(target, (b,)) for a, b in BESIDES)
        assert is_allowed or not under(target, NEVER.get(top, ())), (
            f"{module} imports {target}, which {top} must not know"
        )


@pytest.mark.parametrize("module", sorted(FILES))
def test_torch_stays_where_tensors_live(module: str) -> None:
    uses = any(name.split(".")[0] == "torch" for name in imports(TREES[module], module))
    assert not uses or (under(module, TORCH) and not under(module, NO_TORCH)), (
        f"{module} imports torch"
    )


def test_the_root_is_only_asked_for_the_version() -> None:
    for module, tree in TREES.items():
        for name in imports(tree, module, FILES[module].name == "__init__.py"):
            parts = name.split(".")
            if module and parts[0] == "treegraft" and len(parts) == 2 and home(name) == "":
                assert name == "treegraft.__version__", (
                    f"{module} takes {name} from the root package"
                )


def test_no_cycle() -> None:
    graph = {module: targets - {""} for module, targets in EDGES.items() if module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", sorted(FILES))
def test_sizes(module: str) -> None:
    num_lines = len(FILES[module].read_text(encoding="utf-8").splitlines())
    assert num_lines <= 500, f"{module} has {num_lines} lines; split it by idea"
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{module}.{node.name} has {length} lines; at most 80"


@pytest.mark.parametrize("module", sorted(FILES))
def test_modules_and_public_functions_are_described(module: str) -> None:
    tree = TREES[module]
    if FILES[module].name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), f"{module} has no docstring"
    for node in tree.body:
        is_public = isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("_")
        is_public = is_public and not is_overload(node)
        # The tables of settings say what they are by their fields.
        if is_public and module != "config" and not node.name.startswith("__"):
            assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not {name.rpartition(".")[2] for name in FILES} & {"utils", "helpers", "common", "misc"}


def tree_paths(block: str) -> Iterator[str]:
    """Returns the paths of an indented file tree, one per line, folders ending with a slash."""
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        if not line.strip():
            continue
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        while folders and folders[-1][0] >= indent:
            folders.pop()
        path = (folders[-1][1] if folders else "") + name
        if name.endswith("/"):
            folders.append((indent, path))
        yield path


def test_file_trees_are_read_right() -> None:
    assert list(tree_paths("a/\n  b.py  text\n  c/  text\n    d.py\n  e.py\nf")) == [
        "a/",
        "a/b.py",
        "a/c/",
        "a/c/d.py",
        "a/e.py",
        "f",
    ]


def test_the_list_of_files_is_that_of_the_files() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"^## Files\n.*?```text\n(.*?)```", page, re.S | re.M)
    assert block is not None
    listed = set(tree_paths(block[1]))
    assert [path for path in sorted(listed) if not (ROOT / path).exists()] == []
    ours = {
        str(path.relative_to(ROOT)) for path in FILES.values() if not path.name.startswith("__")
    }
    covered = {
        path
        for path in listed
        if path.endswith("/") and not any(o != path and o.startswith(path) for o in listed)
    }
    missing = [
        path
        for path in sorted(ours)
        if path not in listed and not any(path.startswith(f) for f in covered)
    ]
    assert missing == [], "give each a line in CONTRIBUTING.md"
