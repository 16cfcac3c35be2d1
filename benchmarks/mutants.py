"""Whether the tests notice a changed line of the mathematics, the rollout or the learner.

    python -m benchmarks.mutants [--only NUMBER] [--results FILE]

Sixty places are drawn by a fixed seed, twenty in each of algo, rollout and policy/learn. One by one
a comparison, a sign or a condition is changed in a copy of the package, and the tests of that room
run until one fails. Prints each mutation with the test that noticed it. Mutations that change
nothing a test could see are listed in EQUIVALENT with the reason. Ends with exit code 1 where
another one survives. Takes about an hour; --results keeps what is done, so that a later call goes
on.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "treegraft"
SEED = 30
NUM_EACH = 20
DEADLINE_S = 600
# The first that fails ends a mutant's tests, so those that are fast and near come first.
TESTS = {
    "algo": (
        "algo/test_advantages.py algo/test_rapo.py algo/test_arpo.py algo/test_losses.py"
        " policy/test_loss_weights.py algo/test_objectives.py policy/test_credit.py"
        " extras/test_gigpo.py extras/test_aepo.py extras/test_appo.py"
        " policy/test_token_scores.py policy/test_optimiser_steps.py"
        " policy/test_packed_equals_separate.py test_train.py"
    ),
    "rollout": (
        "rollout/test_growth.py rollout/test_loop.py explore/test_explore.py"
        " rollout/test_rounds.py explore/test_stages.py rollout/test_format_tags.py"
        " rollout/test_format_chat.py rollout/test_templates.py policy/test_filters.py"
        " traces/test_remote_trees.py extras/test_retries.py extras/test_restart.py"
        " extras/test_commit.py extras/test_tree_grpo.py tools/test_environments.py"
        " test_grafted_runs.py tools/test_environment_runs.py test_train.py"
    ),
    "policy/learn": (
        "policy/test_pack.py algo/test_losses.py policy/test_lessons.py"
        " policy/test_mixed_trees.py policy/test_optimiser_steps.py policy/test_loss_weights.py"
        " policy/test_imitation.py policy/test_credit.py"
        " policy/test_flex.py policy/test_packed_equals_separate.py policy/test_shapes_only.py"
        " distributed/test_plan.py distributed/test_laws.py algo/test_rapo.py test_train.py"
        " cli/test_bad_input.py test_resume.py"
    ),
}
EQUIVALENT: dict[str, str] = {}
"""Mutations by file, line's text and change, with the reason why no test can see them."""
_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


@dataclass(frozen=True)
class Mutation:
    """One changed place: the number of the node in the walk over its file, and what it becomes."""

    file: str
    node: int
    line: int
    was: str
    now: str

    @property
    def name(self) -> str:
        """What it is called in EQUIVALENT: not the line's number, which moves."""
        return f"{self.file}: {self.was} -> {self.now}"


def mutated(node: ast.AST) -> ast.AST | None:
    """Returns the changed node; None for one that is left alone."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in _COMPARED:
        new.ops[0] = _COMPARED[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp) and type(new.op) in _COMPUTED:
        # Texts and paths are no numbers: the change would only raise.
        if any(isinstance(one, ast.JoinedStr) or _is_text(one) for one in (new.left, new.right)):
            return None
        new.op = _COMPUTED[type(new.op)]()
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
    elif (isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not)) or (
        isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.USub)
    ):
        return new.operand
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
    elif isinstance(new, ast.If):
        new.test = ast.Constant(value=False)
    else:
        return None
    return new


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(node)
    )


def _is_code(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a test can see the node: it is in no annotation and in no message of an error."""
    while node in parents:
        above = parents[node]
        if isinstance(above, ast.Raise | ast.JoinedStr | ast.Assert):
            return False
        if isinstance(above, ast.AnnAssign) and node is above.annotation:
            return False
        if isinstance(above, ast.arg) or (
            isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef) and node is above.returns
        ):
            return False
        node = above
    return True


def mutations(path: Path) -> Iterator[Mutation]:
    """Yields every mutation of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for number, node in enumerate(ast.walk(tree)):
        new = mutated(node)
        if new is None or not _is_code(node, parents):
            continue
        # Nothing runs below TYPE_CHECKING, and without a GPU nothing below a test for CUDA.
        if "TYPE_CHECKING" in ast.unparse(node) or "cuda" in ast.unparse(node):
            continue
        was = ast.unparse(node)
        now = ast.unparse(new)
        if isinstance(node, ast.If):
            # A guard that refuses bad input is a test of messages.
            was = f"if {ast.unparse(node.test)}:"
            now = "if False:"
            if all(isinstance(one, ast.Raise) for one in node.body):
                continue
        file = path.relative_to(PACKAGE).as_posix()
        yield Mutation(file, number, node.lineno, was, now)  # type: ignore[attr-defined]


def drawn() -> list[Mutation]:
    """Returns the sixty mutations of this commit, always the same."""
    chosen: list[Mutation] = []
    for room in TESTS:
        found = [one for path in sorted((PACKAGE / room).rglob("*.py")) for one in mutations(path)]
        chosen += random.Random(f"{SEED} {room}").sample(found, NUM_EACH)
    return chosen


def write(mutation: Mutation, package: Path) -> None:
    """Writes the mutated file into a copy of the package."""
    tree = ast.parse((PACKAGE / mutation.file).read_text(encoding="utf-8"))
    target = list(ast.walk(tree))[mutation.node]

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return mutated(node) if node is target else self.generic_visit(node)

    changed: ast.AST = ast.fix_missing_locations(Change().visit(tree))
    (package / mutation.file).write_text(ast.unparse(changed), encoding="utf-8")


def tests_of(mutation: Mutation) -> list[str]:
    """Returns the test files of a mutation's room, those that name its module first."""
    [room] = [one for one in TESTS if mutation.file.startswith(f"{one}/")]
    module = "treegraft." + mutation.file.removesuffix(".py").replace("/", ".")
    files = [ROOT / "tests" / name for name in TESTS[room].split()]
    there = [path for path in files if path.exists()]
    own = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if module in _text(path)]
    fast = [path for path in own if "distributed" not in path.parts and "serving" not in path.parts]
    chosen = dict.fromkeys([*(one for one in fast if one in there), *fast, *there])
    return [str(path.relative_to(ROOT)) for path in chosen]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def fate(mutation: Mutation) -> str:
    """Returns the name of the test that fails with the mutation, or "survived"."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / "treegraft"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        write(mutation, package)
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        command = [sys.executable, "-m", "pytest", *options, *tests_of(mutation)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            return "it hangs"
    if done.returncode == 0:
        return "survived"
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return said[0].split(" - ")[0] if said else done.stdout[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=int, help="this mutation alone, from 1")
    parser.add_argument("--results", type=Path, help="a JSONL file of what is done already")
    asked = parser.parse_args()
    known: dict[str, str] = {}
    if asked.results and asked.results.exists():
        rows = [json.loads(line) for line in asked.results.read_text().splitlines()]
        known = {row["name"]: row["fate"] for row in rows}
    unseen = 0
    for number, mutation in enumerate(drawn(), 1):
        if asked.only and number != asked.only:
            continue
        if mutation.name not in known:
            known[mutation.name] = fate(mutation)
            if asked.results:
                asked.results.parent.mkdir(parents=True, exist_ok=True)
                with asked.results.open("a") as file:
                    file.write(
                        json.dumps({"name": mutation.name, "fate": known[mutation.name]}) + "\n"
                    )
        said = known[mutation.name]
        excuse = EQUIVALENT.get(mutation.name)
        if said == "survived" and excuse:
            said = f"survived, equivalent: {excuse}"
        unseen += said == "survived"
        print(f"{number:2} {mutation.file}:{mutation.line} {mutation.was!r} -> {mutation.now!r}")
        print(f"   {said}", flush=True)
    print(f"{unseen} survived that are not known to be equivalent")
    return min(unseen, 1)


if __name__ == "__main__":
    sys.exit(main())
