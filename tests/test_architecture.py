"""Arrows and circles of the package, and whether its pages tell the truth about its files.

An import counts wherever it stands: at the top of a module, inside a function, or for types
only.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.house import text_of
from tests.support.pages import builder
from tests.test_exports import is_overload

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "treegraft"

ROOMS = {
    "core": (),
    # The examples as modules; none of their code is in the package.
    "examples": ("core",),
    "algo": ("core",),
    "settings": ("core",),
    "explore": ("core", "algo", "settings"),
    "tools": ("core", "settings"),
    "runs": ("core", "settings"),
    "rollout": ("core", "settings", "explore"),
    "policy": ("core", "settings", "algo", "runs"),
    "tasks": ("core", "settings", "tools"),
    "assemble": (
        *("core", "settings", "explore", "tools", "runs"),
        *("rollout", "policy", "tasks"),
    ),
    "traces": (
        *("core", "settings", "explore", "tools", "runs", "rollout", "policy", "tasks"),
        "assemble",
    ),
    "evals": (
        *("core", "settings", "explore", "tools", "runs", "rollout", "policy", "tasks"),
        *("assemble", "traces"),
    ),
    # It reads what a run has written; the buffer's file is read by its own layout.
    "view": ("core", "settings", "runs", "tools.search", "traces.store", "traces.rows"),
    "session": (
        *("core", "settings", "explore", "tools", "runs", "rollout", "policy", "tasks"),
        *("assemble", "traces", "evals"),
    ),
    # A session's shadow in another process, with the learner alone.
    "follower": ("core", "settings", "runs", "rollout", "policy"),
    # It begins a run, and knows nothing of what a session does.
    "launch": (
        *("core", "settings", "runs", "rollout", "policy.learn.torchrun", "policy.learn.ranks"),
        *("session", "follower"),
    ),
    # The loop: all work is the session's, all records are the run's.
    "train": ("core", "settings", "runs", "session", "launch"),
    "cli": (
        *("core", "settings", "algo", "explore", "tools", "runs", "rollout", "policy", "tasks"),
        *("assemble", "traces", "evals", "view", "train"),
    ),
    # Another process of a training.
    "rank": ("settings", "policy.learn.torchrun", "train"),
    "__main__": ("cli",),
    # The public module for extensions; it loads every name from its home.
    "parts": (
        *("core", "settings", "algo", "explore", "tools", "runs", "rollout", "policy", "tasks"),
        *("assemble", "traces", "evals", "view", "session", "launch", "train", "cli"),
    ),
    # Each extension is written against the public face alone.
    "extras": ("parts",),
}
"""Every entry of the package, from the bottom up, and which others it may import."""

SHARED = ("extras.hosts", "extras.chat", "extras.statistics")
"""What adapters of several trainers share, requests to chat models, and statistics; like an
extension, each imports the public face alone. The core has no word for them."""
BORDER = "treegraft.extras"
"""What nothing below imports: it is found by name, in `core.registry`."""

NEVER = {
    "policy.engine": ("policy.learn",),
    "policy.learn": ("policy.engine",),
    "policy.kernels": ("policy.engine", "policy.learn"),
    "tools.search": ("tools.environments",),
}
"""What a folder must not import of its neighbours."""

TORCH = (
    "policy",
    "algo.loss",
    "algo.losses",
    "algo.objectives",
    "tools.search.encoders",
    "extras",
)
"""Where tensors live, and extensions."""

NO_TORCH = ("policy.engine.scripted", "policy.engine.stops", "policy.kernels.compiler")
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
            # The function of the root, not the module of its name.
            if base == "treegraft" and module.startswith("extras."):
                base = "treegraft.__init__"
            yield from (f"{base}.{alias.name}" for alias in node.names)


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
TEXTS = {name: text_of(path) for name, path in FILES.items()}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in TEXTS.items()}


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


@functools.cache
def edges() -> dict[str, set[str]]:
    drawn: dict[str, set[str]] = {}
    for module, tree in trees().items():
        found = imports(tree, module, FILES[module].name == "__init__.py")
        targets = {target for name in found if (target := home(name)) is not None}
        drawn[module] = targets - {module}
    return drawn


def test_imports_of_all_kinds_are_seen() -> None:
    source = """
import os, treegraft.core.types
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from treegraft.settings.config import Config
def lazy():
    import torch.nn
    from . import budget
    from ..core.errors import SettingError
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


def folder(module: str) -> str:
    """Returns the folder that a module stands in, the module itself at the package's root."""
    return module if FILES[module].name == "__init__.py" else module.rpartition(".")[0] or module


def test_every_entry_of_the_root_is_a_room() -> None:
    entries = {module.partition(".")[0] for module in FILES} - {""}
    assert entries == set(ROOMS)


def test_arrows() -> None:
    wrong = []
    for module, targets in edges().items():
        room = module.partition(".")[0]
        for target in sorted(targets):
            # The root package re-exports and is a way in, never a way between modules;
            # `test_the_root...` watches it.
            if not target or not room:
                continue
            if not under(target, (room, *ROOMS[room])):
                wrong.append(f"{module} imports {target}; {room} may import {ROOMS[room]}")
            if under(target, NEVER.get(folder(module), ())):
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_an_extension_imports_the_public_face_and_itself_alone() -> None:
    """Extensions do not know each other: each folder could be a package of its own, with a copy of
    what some share."""
    wrong = []
    for module, targets in edges().items():
        own = ".".join(module.split(".")[:2])
        if module.startswith("extras."):
            known = ("", "parts", *SHARED)
            others = {one for one in targets if one not in known and not under(one, (own,))}
            wrong += [f"{module} imports {one}" for one in sorted(others)]
    assert wrong == []


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


def test_the_table_of_rooms_has_no_circle() -> None:
    graph = {room: {name.partition(".")[0] for name in below} for room, below in ROOMS.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_torch_stays_where_tensors_live() -> None:
    users = [
        module
        for module, tree in trees().items()
        if any(name.split(".")[0] == "torch" for name in imports(tree, module))
    ]
    assert [one for one in users if not under(one, TORCH) or under(one, NO_TORCH)] == [], (
        "torch is imported where no tensors live"
    )


def test_vllm_is_imported_in_its_plugin_alone() -> None:
    users = [
        module
        for module, tree in trees().items()
        if any(name.split(".")[0] == "vllm" for name in imports(tree, module))
    ]
    assert users == ["extras.entropies.kernel", "policy.engine.vllm.plugin"]


def test_ray_is_imported_in_the_cluster_and_inside_verl_alone() -> None:
    for module, tree in trees().items():
        uses = any(name.split(".")[0] == "ray" for name in imports(tree, module))
        is_allowed = under(module, ("extras.ray", "extras.verl"))
        assert not uses or is_allowed, f"{module} imports ray"


def test_torch_distributed_is_imported_where_ranks_learn_alone() -> None:
    for module, tree in trees().items():
        uses = any(name.startswith("torch.distributed") for name in imports(tree, module))
        is_allowed = under(module, ("policy.learn", "extras.ray.rank", "extras.memory"))
        assert not uses or is_allowed, f"{module} imports torch.distributed"


PICKLING = {"torch.load", "torch.save", "broadcast_object_list", "scatter_object_list"}
PICKLING |= {"all_gather_object", "gather_object", "send_object_list", "recv_object_list"}


def test_nothing_is_pickled() -> None:
    for module, tree in trees().items():
        names = {ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
        # An error of somebody else's that is caught.
        names |= set(imports(tree, module)) - {"pickle.UnpicklingError"}
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
    for module, tree in trees().items():
        if module.startswith("extras"):
            continue
        for name in imports(tree, module, FILES[module].name == "__init__.py"):
            parts = name.split(".")
            if module and parts[0] == "treegraft" and len(parts) == 2 and home(name) == "":
                assert name == "treegraft.__version__", (
                    f"{module} takes {name} from the root package"
                )


def circle(graph: dict[str, set[str]]) -> str:
    """Returns one circle of a graph in words, "" where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(error.args[1])
    return ""


def entries(edges: dict[str, set[str]], place: tuple[str, ...]) -> dict[str, set[str]]:
    """Returns how the entries of a folder, files and folders alike, import each other."""
    depth = len(place)
    graph: dict[str, set[str]] = {}
    for module, targets in edges.items():
        for target in targets:
            ends = [name.split(".") for name in (module, target)]
            if all(tuple(end[:depth]) == place and len(end) > depth and end[0] for end in ends):
                own, other = (end[depth] for end in ends)
                if own != other:
                    graph.setdefault(own, set()).add(other)
    return graph


def test_no_circle_of_files() -> None:
    assert circle({module: targets - {""} for module, targets in edges().items() if module}) == ""


PLACES = sorted({tuple(name.split(".")[:n]) for name in FILES for n in range(name.count(".") + 1)})


def test_no_circle_of_folders() -> None:
    assert [found for place in PLACES if (found := circle(entries(edges(), place)))] == []


def test_a_circle_of_folders_is_seen() -> None:
    """Two files of each folder, which import each other crosswise: no circle of files."""
    drawn = {"tools.cache": {"traces.rows"}, "traces.keys": {"tools.build"}}
    assert circle(drawn) == ""
    assert set(circle(entries(drawn, ())).split(" -> ")) == {"tools", "traces"}
    nested = {"view.a.x": {"view.b.y"}, "view.b.z": {"view.a.w"}}
    assert circle(entries(nested, ())) == ""
    assert set(circle(entries(nested, ("view",))).split(" -> ")) == {"a", "b"}


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


def test_lines_of_code_are_counted_without_docstrings() -> None:
    source = '"""Head.\n\nMore."""\n\n# why\nx = 1\n"""Of x."""\n'
    source += '\n\ndef f():\n    """Of f."""\n    return x\n'
    assert code_lines(source, ast.parse(source)) == {6, 10, 12}


def is_core(module: str) -> bool:
    return not under(module, ("extras",))


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


def test_modules_and_public_functions_are_described() -> None:
    missing = []
    for module, tree in trees().items():
        is_described = ast.get_docstring(tree) is not None
        if (FILES[module].name != "__init__.py" or tree.body) and not is_described:
            missing.append(module)
        for node in tree.body:
            is_public = isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ) and not node.name.startswith("_")
            is_public = is_public and not is_overload(node)
            # The tables of settings say what they are by their fields.
            is_table = isinstance(node, ast.ClassDef) and node.name.endswith("Settings")
            is_public = is_public and not module.startswith("settings.") and not is_table
            if is_public and not node.name.startswith("__") and not ast.get_docstring(node):
                missing.append(f"{module}.{node.name}")
    assert missing == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not {name.rpartition(".")[2] for name in FILES} & {"utils", "helpers", "common", "misc"}


def test_the_list_of_files_is_that_of_the_files() -> None:
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert page.count("<!-- files -->") == 1
    assert builder().with_files(page) == page, "run: python docs/build.py --files"
