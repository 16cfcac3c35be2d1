"""The public names: they are there, take what they promise to take, and are described."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.forked import Forked
from tests.support.pages import builder

import treegraft

SOURCE = Path(treegraft.__file__).parent


SIGNATURES = {
    "pack_trees": "(trees, *, device='cpu', takes_imitated=False)",
    "token_scores": "(model, batch, *, vocab_chunk=2048)",
    "group_advantages": "(rewards, *, scale='std', eps=1e-06)",
    "retrieval_reward": "(entropy_before, entropy_after, *, variant='paper')",
    "combined_advantages": "(outcome_advantages, retrieval_rewards, weight=0.2, eps=1e-06)",
    "shaping_factor": "(retrieved_frac, weight=0.05)",
    "entropy_change": "(current, initial, normaliser)",
    "branch_probability": "(change, base=0.5, weight=0.2)",
    "shared_advantages": "(advantages, descendants)",
    "Trace": "(key, value, reward, source, task_id, position, terminal, "
    "trajectory='', policy_version=None, question='')",
    "TraceBuffer": "(path, encoder='minilm', *, is_frozen=False)",
    "exact_match": "(prediction, reference)",
    "f1": "(prediction, reference)",
    "math_equal": "(prediction, reference, *, deadline_s=5.0)",
    "read_trees": "(path)",
    "Tree.trajectories": "(self)",
    "TreeBatch.per_trajectory": "(self, values)",
    "ScriptedEngine": "(replies, tokenizer, *, logprob=-0.5, entropy=0.5, latency_s=None)",
    "train": "(config=None, *, recipe=None, resume=None, accepts_changes=False, "
    "display=None, placement=None, callbacks=(), **objects)",
}
"""Parameters in order with their defaults, by which users call them."""


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    found = inspect.signature(operator.attrgetter(path)(treegraft))
    plain = [one.replace(annotation=one.empty) for one in found.parameters.values()]
    promised = found.replace(parameters=plain, return_annotation=found.empty)
    assert str(promised) == SIGNATURES[path]


ORDERS = (
    "from treegraft import train; from treegraft.train import train as other",
    "from treegraft.train import train as other; from treegraft import train",
    "import treegraft.train; from treegraft import train; other = treegraft.train",
    "import treegraft; train = treegraft.train; import treegraft.train; other = treegraft.train",
)


@pytest.mark.smoke
def test_train_is_the_function_in_any_import_order(tmp_path: Path) -> None:
    """Each order after the package has been forgotten; torch stays loaded."""
    code = "import sys\n"
    for order in ORDERS:
        code += (
            f"{order}; assert train is other and train.__name__ == 'train' and callable(train)\n"
        )
        code += (
            "for name in [one for one in sys.modules if one.partition('.')[0] == 'treegraft']:\n"
        )
        code += "    del sys.modules[name]\n"
    one = subprocess.STDOUT
    with Forked(["-c", code], cwd=tmp_path, stderr=one, is_fresh=True) as process:
        said, _ = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "")


def test_the_root_package_lists_what_it_has() -> None:
    assert dir(treegraft) == sorted(treegraft.__all__)
    for name in treegraft.__all__:
        assert getattr(treegraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = treegraft.nothing


def test_the_page_of_public_names_lists_them() -> None:
    page = (SOURCE.parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert sorted(listed) == sorted(set(treegraft.__all__) - {"__version__"})


SOURCE_LINE = re.compile(
    r"arXiv[: ]\d{4}\.\d{5}|\b[A-Z]\w+ (?:et al\.|& [A-Z]\w+)?,? ?.*\b(?:19|20)\d\d\b"
)
"""An arXiv number, or an author with a year."""


def test_every_equation_names_its_source() -> None:
    missing = []
    for path in sorted((SOURCE / "algo").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                # An overload has none.
                text = ast.get_docstring(node) or "Ours:"
                if not SOURCE_LINE.search(text) and "Ours:" not in text:
                    missing.append(f"{path.name}: {node.name}")
    assert missing == [], "name the paper (arXiv number, or author and year), or begin with Ours:"


def test_pages_and_examples_import_the_public_names_alone() -> None:
    """`treegraft` and `treegraft.parts`: what stands in them is promised."""
    import treegraft.parts

    known = {"treegraft": treegraft.__all__, "treegraft.parts": treegraft.parts.__all__}
    known["treegraft.extras.trl"] = ["TreeGRPOTrainer", "grpo_config"]
    # An example's own neighbour.
    known["treegraft.examples.agent"] = ["agent"]
    root = SOURCE.parents[1]
    wrong = []
    for path in [
        *(root / "docs").glob("*.md"),
        root / "README.md",
        *(root / "examples").rglob("*"),
    ]:
        if path.suffix not in (".md", ".py"):
            continue
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(
            r"^ *from (treegraft[\w.]*) import (\([^)]*\)|[^\n]*)", text, re.M
        ):
            for name in re.findall(r"\w+", re.sub("#.*", "", names)):
                if name not in known.get(module, ()):
                    wrong.append(f"{path.name}: {module}.{name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "page"), [("treegraft", "api.md"), ("treegraft.parts", "parts.md")]
)
def test_every_name_is_described_and_stands_in_an_example(module: str, page: str) -> None:
    """tests/project/test_readme.py and tests/test_public_names.py run them; mypy reads a user's
    script."""
    public = importlib.import_module(module)
    root = SOURCE.parents[1]
    text = (root / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", text, re.S)
    for name in ("test_public_names.py", "support/typed_use.py"):
        blocks.append((root / "tests" / name).read_text(encoding="utf-8"))
    used = {
        name
        for block in blocks
        for node in ast.walk(ast.parse(block))
        for name in [getattr(node, "id", ""), getattr(node, "attr", "")]
    }
    assert set(public.__all__) <= used
    for name in public.__all__:
        found = getattr(public, name)
        assert not callable(found) or found.__doc__, f"{name} has no docstring"


def test_the_table_of_names_is_that_of_the_docstrings() -> None:
    page = (SOURCE.parents[1] / "docs" / "parts.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert listed == sorted(importlib.import_module("treegraft.parts").__all__)
    assert builder().with_names(page) == page, "run: python docs/build.py --names"


def test_the_package_alone_loads_no_torch() -> None:
    code = "import sys, treegraft; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
