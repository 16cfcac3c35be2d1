"""Codes of errors: each place has one, and a code has one class."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.pages import builder

from treegraft.core.errors import EngineError, SettingError, TreegraftError, about

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def raised() -> list[Any]:
    """Every place where an error of ours is made. Here and not at import: reading the package takes
    seconds, in each process that collects the tests."""
    return builder().raised()


def test_every_error_has_a_code(raised: list[Any]) -> None:
    shape = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
    assert raised
    assert [one.place for one in raised if not shape.fullmatch(one.code)] == []


def test_a_code_belongs_to_one_class(raised: list[Any]) -> None:
    kinds: dict[str, set[str]] = {}
    for one in raised:
        kinds.setdefault(one.code, set()).add(one.kind)
    assert {code: names for code, names in kinds.items() if len(names) > 1} == {}


def test_codes_that_tests_expect_exist(raised: list[Any]) -> None:
    codes = {one.code for one in raised}
    for path in (TESTS.parent / "studies").rglob("*.py"):
        codes |= set(re.findall(r"code=\"([^\"]+)", path.read_text(encoding="utf-8")))
    unknown = []
    for path in sorted({*TESTS.rglob("*.py")} - {Path(__file__)}):
        for code in re.findall(r"raises_code\(\s*\"([^\"]+)", path.read_text(encoding="utf-8")):
            if code not in codes:
                unknown.append(f"{path.name}: {code}")
    assert unknown == []


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


def test_the_page_of_codes_has_them_all(raised: list[Any]) -> None:
    page = builder().errors_page()
    assert {one.code for one in raised if f"| `{one.code}` |" not in page} == set()
