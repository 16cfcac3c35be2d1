"""Codes of errors: each place has one, a code has one class, and tests go by codes."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from error_codes import raises_code
from test_architecture import builder
from treegraft.core.errors import EngineError, SettingError, TreegraftError, about
from treegraft.core.plugin import load_object

TESTS = Path(__file__).parent
RAISED = builder().raised()
CODES = {one.code for one in RAISED}
KINDS = {one.kind for one in RAISED} | {"TreegraftError"}

READ: dict[str, tuple[str, ...]] = {}
"""Tests that also read messages, by file: of each part some sentences."""


def test_every_error_has_a_code() -> None:
    shape = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
    assert len(RAISED) > 600
    assert [one.place for one in RAISED if not shape.fullmatch(one.code)] == []


def test_a_code_belongs_to_one_class() -> None:
    kinds: dict[str, set[str]] = {}
    for one in RAISED:
        kinds.setdefault(one.code, set()).add(one.kind)
    assert {code: names for code, names in kinds.items() if len(names) > 1} == {}


def expectations() -> Iterator[tuple[str, str, ast.Call]]:
    """Yields file, test or function, and each call of `pytest.raises` and `raises_code`."""
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for top in tree.body:
            for call in ast.walk(top):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in (
                    "pytest.raises",
                    "raises_code",
                ):
                    name = str(path.relative_to(TESTS))
                    yield name, getattr(top, "name", ""), call


def test_tests_go_by_codes() -> None:
    """English can be edited: messages of ours are read in the tests that `READ` lists alone."""
    reading, unknown = [], []
    for file, test, call in expectations():
        first = call.args[0] if call.args else None
        of_ours = ast.unparse(call.func) == "raises_code"
        if of_ours and isinstance(first, ast.Constant) and first.value not in CODES:
            unknown.append(f"{file}::{test}: {first.value}")
        if first is not None and not of_ours:
            of_ours = bool(KINDS & {ast.unparse(one) for one in ast.walk(first)})
        has_text = any(one.arg == "match" for one in call.keywords)
        if of_ours and has_text and test not in READ.get(file, ()):
            reading.append(f"{file}::{test}")
    assert unknown == []
    assert reading == [], "name its code, or list it in READ"


def test_what_is_expected_is_told_where_it_does_not_come() -> None:
    with pytest.raises(AssertionError, match="expected the code b, got a: text"), raises_code("b"):
        raise SettingError("text", code="a")
    with pytest.raises(AssertionError, match="are not in"), raises_code("a", "run.seed"):
        raise SettingError("text", code="a", settings=["run.dir"])
    with raises_code("a", "run.seed", match="^te"):
        raise SettingError("text", code="a", settings=["run.seed", "run.dir"])


def test_an_error_keeps_its_code_between_processes() -> None:
    made = EngineError("text", code="engine-died", settings=["engine.kind"])
    found = pickle.loads(pickle.dumps(made))
    assert (type(found), str(found)) == (EngineError, "text")
    assert (found.code, found.settings) == ("engine-died", ("engine.kind",))
    with pytest.raises(TreegraftError) as caught, about("run.seed"):
        raise SettingError("text", code="port-unusable")
    assert (caught.value.code, caught.value.settings) == ("port-unusable", ("run.seed",))


def test_an_error_of_a_cluster_s_actor_keeps_its_code() -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    reply = load_object("treegraft.extras.ray.actors:error_reply")
    value_of = load_object("treegraft.extras.ray.actors:value_of")
    text = reply(EngineError("text", code="engine-died"))
    assert json.loads(text) == {"error": "EngineError", "code": "engine-died", "text": "text"}
    with raises_code("engine-died", kind=EngineError, match="^text$"):
        value_of(text)


def test_the_page_of_codes_has_them_all() -> None:
    page = builder().errors_page()
    assert {code for code in CODES if f"| `{code}` |" not in page} == set()
