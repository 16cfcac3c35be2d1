"""The public names: they are there, take what they say they take, and are described."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import Forked
from tests.support.pages import builder

import treegraft

SOURCE = Path(treegraft.__file__).parent

NAMES = (
    *("Task", "Step", "Tree", "Trajectory", "Origin", "Status", "Trace", "StepContent"),
    *("retrieval_reward", "combined_advantages", "shaping_factor"),
    *("entropy_change", "branch_probability", "shared_advantages"),
    *("TraceBuffer", "pack_trees", "TreeBatch", "token_scores", "group_advantages"),
    *(
        "exact_match",
        "f1",
        "math_equal",
        "read_trees",
        "ScriptedEngine",
        "train",
        "sft",
        "RunResult",
    ),
    "trust",
    "Session",
    *("Config", "load_config", "evaluate_checkpoint", "answer_question"),
    *("TreegraftError", "SettingError", "DataError", "ToolError", "ToolUnavailable"),
)

SIGNATURES = {
    "pack_trees": ["trees", "*device", "*takes_imitated"],
    "token_scores": ["model", "batch", "*vocab_chunk"],
    "group_advantages": ["rewards", "*scale='std'", "*eps=1e-06"],
    "retrieval_reward": ["entropy_before", "entropy_after", "*variant='paper'"],
    "combined_advantages": [
        "outcome_advantages",
        "retrieval_rewards",
        "weight=0.2",
        "eps=1e-06",
    ],
    "shaping_factor": ["retrieved_frac", "weight=0.05"],
    "entropy_change": ["current", "initial", "normaliser"],
    "branch_probability": ["change", "base=0.5", "weight=0.2"],
    "shared_advantages": ["advantages", "descendants"],
    "Trace": [
        *(
            "key",
            "value",
            "reward",
            "source",
            "task_id",
            "position",
            "terminal",
            "trajectory=''",
            "policy_version=None",
            "question=''",
        ),
    ],
    "TraceBuffer": ["path", "encoder='minilm'", "*is_frozen"],
    "exact_match": ["prediction", "reference"],
    "f1": ["prediction", "reference"],
    "math_equal": ["prediction", "reference", "*deadline_s"],
    "read_trees": ["path"],
    "Tree.trajectories": ["self"],
    "TreeBatch.per_trajectory": ["self", "values"],
    "ScriptedEngine": [
        "replies",
        "tokenizer",
        "*logprob",
        "*entropy",
        "*latency_s",
    ],
    "train": [
        *("config", "*recipe", "*resume", "*accepts_changes", "*display", "*placement"),
        *("*callbacks", "**objects"),
    ],
}
"""Parameters in order; a star marks those that only a keyword reaches, "=" a default that is
promised."""


def find(path: str) -> Any:
    """Returns what the path of attributes from the package's root leads to."""
    found: Any = treegraft
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_the_public_names_are_these() -> None:
    assert sorted((*NAMES, "__version__")) == treegraft.__all__
    for name in NAMES:
        assert find(name).__doc__


ORDERS = (
    "from treegraft import train; from treegraft.train import train as other",
    "from treegraft.train import train as other; from treegraft import train",
    "import treegraft.train; from treegraft import train; other = treegraft.train",
    "import treegraft; train = treegraft.train; import treegraft.train; other = treegraft.train",
)


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


def test_train_is_the_function_and_its_module_is_there() -> None:
    """Both ways in this process, whatever was imported before."""
    from treegraft import train
    from treegraft.train import train as other

    assert train is other is treegraft.train
    assert importlib.import_module("treegraft.train").train is train
    assert (
        "torch"
        not in subprocess.run(
            [sys.executable, "-c", "import sys, treegraft; print(*sys.modules)"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
    )


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    parameters = inspect.signature(find(path)).parameters
    promised = [text.lstrip("*").partition("=") for text in SIGNATURES[path]]
    assert [name for name, *_ in promised] == list(parameters)
    for text, (name, _, default) in zip(SIGNATURES[path], promised, strict=True):
        parameter = parameters[name]
        kinds = [inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD]
        stars = len(text) - len(text.lstrip("*"))
        assert (parameter.kind is kinds[stars - 1]) if stars else parameter.kind not in kinds
        if default:
            assert repr(parameter.default) == default
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert parameter.default is not inspect.Parameter.empty


def test_a_trajectory_has_the_flat_lists() -> None:
    from treegraft.core.types import Trajectory

    for name in (
        "token_ids",
        "sampled_mask",
        "loss_mask",
        "logprobs",
        "entropies",
        "reward",
        "status",
    ):
        assert isinstance(inspect.getattr_static(Trajectory, name), property)


def test_a_run_says_where_its_results_are() -> None:
    from treegraft.train import RunResult

    assert [field.name for field in fields(RunResult)] == [
        "run_dir",
        "checkpoint_dir",
        "metrics",
        "given",
    ]


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


def test_scores_of_packed_trees_come_per_trajectory() -> None:
    """The names above, used together: two leaves share a step, whose token is scored once and given
    to both."""
    import torch

    from treegraft.core.types import Leaf, Origin, Status, Step, Task, Tree
    from treegraft.policy.learn.pack import pack_trees
    from treegraft.policy.learn.scores import token_scores
    from treegraft.policy.tiny import build_tiny_model
    from treegraft.settings.policy import TinySettings

    def step(name: str, parent: str | None, tokens: tuple[int, ...], origin: Origin) -> Step:
        count = len(tokens)
        return Step(
            id=name,
            parent=parent,
            depth=name.count("."),
            token_ids=tokens,
            origins=(origin,) * count,
            loss_mask=(origin is Origin.POLICY,) * count,
            sampling_logprobs=(0.0,) * count,
            entropies=(0.0,) * count,
        )

    tree = Tree(
        task=Task(id="t", question="?", reference=()),
        group_id="g",
        steps=(
            step("0", None, (3, 4), Origin.PROMPT),
            step("0.0", "0", (5,), Origin.POLICY),
            step("0.0.0", "0.0", (6,), Origin.POLICY),
            step("0.0.1", "0.0", (7, 8), Origin.POLICY),
        ),
        leaves=tuple(Leaf(step_id=name, status=Status.COMPLETED) for name in ("0.0.0", "0.0.1")),
    )
    model = build_tiny_model(
        TinySettings(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1), 16, 1, 0, 0
    ).eval()
    batch = pack_trees([tree])
    with torch.no_grad():
        logprobs, entropies = token_scores(model, batch)
        assert logprobs.shape == entropies.shape == (4,)
        for path, values in zip(tree.trajectories(), batch.per_trajectory(logprobs), strict=True):
            ids = torch.tensor([path.token_ids])
            plain = torch.log_softmax(model(ids).logits[0, 1:-1].float(), -1)
            expected = plain.gather(1, ids[0, 2:, None])[:, 0]
            torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def definitions(
    tree: ast.Module,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        is_named = isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("_")
        if is_named and not is_overload(node):
            yield node


def is_overload(node: ast.AST) -> bool:
    """Whether this is one of a function's signatures; the function itself comes last."""
    return any(
        ast.unparse(decorator) == "overload" for decorator in getattr(node, "decorator_list", ())
    )


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_public_function_and_class_is_described() -> None:
    missing = []
    for path in FILES:
        for node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            # A table of settings is described field by field; test_config.py sees to it.
            is_table = isinstance(node, ast.ClassDef) and (
                path.parent.name == "settings" or node.name.endswith("Settings")
            )
            if not ast.get_docstring(node) and not is_table:
                missing.append(f"{path.relative_to(SOURCE)}: {node.name}")
            if isinstance(node, ast.ClassDef) and not is_protocol(node):
                missing += [
                    f"{path.relative_to(SOURCE)}: {node.name}.{m.name}"
                    for m in methods(node)
                    if needs_words(m)
                ]
    assert missing == []


def is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@functools.cache
def promised() -> set[str]:
    """Methods that a protocol describes, once for all that have it."""
    found = (one for f in FILES for one in definitions(ast.parse(f.read_text("utf-8"))))
    protocols = [one for one in found if isinstance(one, ast.ClassDef) and is_protocol(one)]
    return {method.name for node in protocols for method in methods(node)}


def needs_words(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a public method says neither itself nor through a protocol what it does; a property
    names itself."""
    is_property = any(
        isinstance(mark, ast.Name) and mark.id == "property" for mark in method.decorator_list
    )
    is_known = method.name.startswith("_") or is_property or method.name in promised()
    return not is_known and not ast.get_docstring(method)


SOURCE_LINE = re.compile(
    r"arXiv[: ]\d{4}\.\d{5}|\b[A-Z]\w+ (?:et al\.|& [A-Z]\w+)?,? ?.*\b(?:19|20)\d\d\b"
)
"""An arXiv number, or an author with a year."""


def test_every_equation_names_its_source() -> None:
    missing = []
    for path in sorted((SOURCE / "algo").glob("*.py")):
        for node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) or ""
            is_sourced = SOURCE_LINE.search(text) or "Ours:" in text
            if isinstance(node, ast.FunctionDef) and not is_sourced:
                missing.append(f"{path.name}: {node.name}")
    assert missing == [], "name the paper (arXiv number, or author and year), or begin with Ours:"


def test_pages_and_examples_import_the_public_names_alone() -> None:
    """`treegraft` and `treegraft.parts`: what stands in them is promised."""
    import treegraft.parts

    known = {"treegraft": treegraft.__all__, "treegraft.parts": treegraft.parts.__all__}
    known["treegraft.extras.trl"] = ["TreeGRPOTrainer", "grpo_config"]
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
def test_every_name_is_described_and_stands_in_an_example_that_runs(module: str, page: str) -> None:
    """tests/project/test_readme.py and tests/test_public_names.py run them."""
    public = importlib.import_module(module)
    root = SOURCE.parents[1]
    text = (root / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", text, re.S)
    blocks.append((root / "tests" / "test_public_names.py").read_text(encoding="utf-8"))
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
