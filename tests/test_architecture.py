"""Arrows and circles of the package, torch's place, and whether its pages tell the truth about its
files.

Contracts in pyproject.toml say who may import whom; an import counts wherever it stands: at the
top of a module, inside a function, or for types only.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.house import text_of
from tests.support.pages import builder

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "treegraft"
BORDER = "treegraft.extras"
"""What nothing below imports: it is found by name, in `core.registry`."""

PLACES = {
    # Where tensors live, and extensions.
    "torch": (
        "policy",
        "algo.loss",
        "algo.losses",
        "algo.objectives",
        "tools.search.encoders",
        "extras",
    ),
    "torch.distributed": ("policy.learn", "extras.ray.rank"),
    "vllm": ("extras.entropies.kernel", "policy.engine.vllm.plugin"),
    "ray": ("extras.ray", "extras.verl"),
}
"""Packages that only these modules and folders import."""
NO_TORCH = ("policy.engine.scripted", "policy.engine.stops", "policy.kernels.compiler")
"""What must answer without torch all the same."""


def under(module: str, parents: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{parent}.") for parent in parents)


def module_name(path: Path) -> str:
    """Returns "rollout.loop" for src/treegraft/rollout/loop.py, "" for the package itself."""
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Returns the full name of everything that a module imports, "package.module.name" for what
    follows `from`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
TEXTS = {name: text_of(path) for name, path in FILES.items()}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in TEXTS.items()}


def is_core(module: str) -> bool:
    return not under(module, ("extras",))


def test_contracts_of_imports_hold() -> None:
    reason = "import-linter is not installed: pip install 'treegraft[dev]'"
    linter = pytest.importorskip("importlinter.cli", reason=reason)
    assert linter.lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_core_names_the_border_in_one_place() -> None:
    named = [
        module
        for module, path in FILES.items()
        if not module.startswith("extras") and BORDER in path.read_text(encoding="utf-8")
    ]
    assert named == ["core.registry"], "the core imports no extension; it finds them by name"


def test_no_name_stands_in_both_public_modules() -> None:
    import treegraft
    import treegraft.parts

    assert not {*treegraft.parts.__all__} & {*treegraft.__all__}


def test_packages_are_imported_in_their_places_alone() -> None:
    wrong = []
    for module, tree in trees().items():
        for name in imports(tree):
            for package, places in PLACES.items():
                if under(name, (package,)) and not under(module, places):
                    wrong.append(f"{module} imports {name}")
            if under(name, ("torch",)) and under(module, NO_TORCH):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


PICKLING = {"torch.load", "torch.save", "broadcast_object_list", "scatter_object_list"}
PICKLING |= {"all_gather_object", "gather_object", "send_object_list", "recv_object_list"}


def test_nothing_is_pickled() -> None:
    for module, tree in trees().items():
        names = {ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
        # An error of somebody else's that is caught.
        names |= set(imports(tree)) - {"pickle.UnpicklingError"}
        found = {
            name
            for name in names
            if name in PICKLING
            or name.rpartition(".")[2] in PICKLING
            or name.partition(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal")
        }
        assert not found, f"{module} uses {', '.join(sorted(found))}"


FLOATS = {f"torch.{name}" for name in ("empty", "full", "ones", "rand", "randn", "zeros")}
"""What makes tensors of torch's default type, which another thread may change at any time."""


def test_new_tensors_have_a_type_of_their_own() -> None:
    for module, tree in trees().items():
        for one in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            is_untyped = not {"dtype", "out"} & {keyword.arg for keyword in one.keywords}
            assert not (is_untyped and ast.unparse(one.func) in FLOATS), (
                f"{module}, line {one.lineno}: no dtype"
            )


def test_the_root_is_only_asked_for_the_version() -> None:
    """It loads every name from its home, and is a way in, never a way between modules."""
    for module, tree in trees().items():
        asked = {name for name in imports(tree) if name.count(".") == 1 and is_core(module)}
        for name in asked if module else ():
            is_module = name.removeprefix("treegraft.") in FILES
            is_ours = name.startswith("treegraft.") and not is_module
            assert not is_ours or name == "treegraft.__version__", f"{module} takes {name}"


def code_lines(text: str, tree: ast.AST) -> set[int]:
    """Returns the numbers of the lines that hold code: no blank line, comment or docstring."""
    lines = text.splitlines()
    found = {n for n, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for member in body if isinstance(body, list) else []:
            value = member.value if isinstance(member, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found -= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return found


def test_functions_are_short() -> None:
    long = []
    for module, tree in trees().items():
        code = code_lines(TEXTS[module], tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                if len(own) > 60:
                    long.append(f"{module}.{node.name} has {len(own)} lines of code")
    assert long == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not {name.rpartition(".")[2] for name in FILES} & {"utils", "helpers", "common", "misc"}


def test_the_list_of_files_is_that_of_the_files() -> None:
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert page.count("<!-- files -->") == 1
    assert builder().with_files(page) == page, "run: python docs/build.py --files"
