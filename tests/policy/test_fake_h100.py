"""What only a GPU runs, as far as it can be had without one: the programs that are compiled for it,
and the list of all places where something is.

The cases that compile need triton and g++; they launch nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest
from tests.support.fake_h100.programs import NAMES, cases_of, compiled, is_backward

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "treegraft"
SITES = {
    ("policy/learn/flex.py", "compiled_flex"): "tests.support.fake_h100.flex",
    ("extras/entropies/kernel.py", "the module"): "tests.support.fake_h100.entropies",
}
"""Every place that has something compiled for a GPU, and the program here that compiles it."""
SHARED = 232_448
SPILLED = 1024
"""Bytes a thread, of the backward program for heads of 128; by torch's own tiles up to 8,816."""


def compiles(node: ast.AST) -> bool:
    """Whether a node is `torch.compile`, or an import of Triton."""
    if isinstance(node, ast.Attribute) and node.attr == "compile":
        return isinstance(node.value, ast.Name) and node.value.id == "torch"
    names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names += [node.module or "", *(one.name for one in node.names)]
    return any(name.partition(".")[0] == "triton" for name in names)


def test_every_program_for_a_gpu_is_in_the_list() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "torch.compile" not in text and "triton" not in text:
            continue
        tree = ast.parse(text)
        places = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
        for node in filter(compiles, ast.walk(tree)):
            line = node.lineno  # type: ignore[attr-defined]
            around = [one for one in places if one.lineno <= line <= (one.end_lineno or 0)]
            name = max(around, key=lambda one: one.lineno).name if around else "the module"
            found.add((str(path.relative_to(SOURCE)), name))
    assert found == SITES.keys()


QUICK = [(90, case) for name in NAMES for case in cases_of(name)]
"""Fifteen seconds of CPU time each."""
CASES = [
    *(pytest.param(*case, marks=pytest.mark.smoke) for case in QUICK),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *((90, case) for case in cases_of("qwen3-8b", window=512)),
            *((100, case) for name in NAMES for case in cases_of(name)),
        )
    ),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(("capability", "case"), CASES)
def test_attention_compiles_for_a_card(
    capability: int, case: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Forward and backward: every program fits into shared memory and spills no more than the page
    says, and packs of other lengths take the programs of the first one."""
    program = SITES["policy/learn/flex.py", "compiled_flex"]
    (found,) = compiled(tmp_path_factory.getbasetemp(), capability, [case], program)
    programs = found["programs"]
    assert {is_backward(one) for one in programs} == {False, True}
    assert not [one for one in programs if "fault" in one]
    assert max(one["shared"] for one in programs) <= SHARED
    assert max(one["spilled"] for one in programs) <= SPILLED
    # For a B200 the forward program spills up to 272 bytes by triton 3.6, and none by 3.9.
    if capability == 90:
        assert not [one for one in programs if one["spilled"] and not is_backward(one)]
    assert len(set(found["graphs"])) == 1


@pytest.mark.smoke
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("capability", [90, 100])
def test_entropies_compile_for_a_card(
    capability: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of both types of logits, at vocabularies that are multiples of 16 and are not."""
    program = SITES["extras/entropies/kernel.py", "the module"]
    cases = ["bfloat16:151936", "float32:151936", "float32:49152", "bfloat16:32003"]
    found = [*compiled(tmp_path_factory.getbasetemp(), capability, cases, program)]
    assert [one["case"] for one in found] == cases
    for one in found:
        (needs,) = one["programs"]
        print(one["case"], needs)
        assert needs["shared"] <= SHARED and not needs["spilled"]
