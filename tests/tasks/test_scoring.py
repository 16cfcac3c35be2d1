"""Exact match, F1 and mathematics on pairs small enough to judge by eye."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import at_most

from treegraft.tasks import math_pool, scoring
from treegraft.tasks.scoring import (
    exact_match,
    f1,
    f1_papers,
    is_correct,
    is_mathematical,
    math_equal,
)


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("204.0", "204"),
        ("1/2", "0.5"),
        ("3,000", "3000"),
        ("1e6", "1000000"),
        ("$18", "18"),
        ("\\$18", "18"),
        ("5.", "5"),
        ("0.333333", "1/3"),
        ("\\boxed{42}", "42"),
        ("$\\frac12$", "0.5"),
        ("\\frac{1}{2}", "1/2"),
        ("\\dfrac{3}{4}", "0.75"),
        ("\N{MINUS SIGN}5", "-5"),
        ("3\\sqrt{3}-6", "3\\sqrt{3} - 6"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x**2", "x^2"),
        ("2^-1", "0.5"),
        ("0.001", "10**-3"),
        ("x^-2", "1/x^2"),
        ("e^-x", "e^{-x}"),
        ("-2, 1", "1,-2"),
        ("x=5", "5"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("\\{a, b\\}", "\\{b, a\\}"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)"),
        ("\\text{Evelyn}", "Evelyn"),
        ("New  York", "new york"),
        ("10\\text{ cm}", "10"),
    ],
)
def test_equal_mathematics(prediction: str, reference: str) -> None:
    assert math_equal(prediction, reference) is True


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("-5", "5"),
        ("1.5", "15"),
        ("10", "1"),
        ("0.33", "1/3"),
        ("0.0000001", "0.0000002"),
        ("2x+1", "2x-1"),
        ("(3, 4)", "(4, 3)"),
        ("2^-1", "-2"),
        ("2^-12", "2^{-1}2"),
        ("[1,2]", "[1,2)"),
        ("1 2", "12"),
        ("", "5"),
        ("5", ""),
        ("", ""),
        ("1/0", "5"),
        ("listen", "silent"),
        ("no", "on"),
        ("York New", "New York"),
        ("e14", "e41"),
        ("I have 3 and 5", "5"),
        ("\\frac{", "5"),
        ("x" * 100_000, "5"),
        ("9" * 100_000, "9"),
    ],
)
def test_different_mathematics(prediction: str, reference: str) -> None:
    assert math_equal(prediction, reference) is False


def test_the_best_of_several_references_counts() -> None:
    assert math_equal("0.5", ["7", "1/2"]) is True
    assert exact_match("NYC", ("New York", "nyc")) == 1.0
    # "new york" against "new york city": 2 words in common, precision 1, recall 2/3, F1 = 2 (2/3) /
    # (5/3) = 0.8.
    assert f1("New York", ["Paris", "New York City"]) == pytest.approx(0.8)
    assert math_equal("5", []) is False
    assert exact_match("5", []) == f1("5", []) == 0.0


def test_f1_is_squads_to_the_letter() -> None:
    assert f1("The Eiffel Tower!", "eiffel tower") == 1.0
    assert f1("-5", "5") == 1.0  # punctuation goes, signs with it
    assert f1("A", "A") == 0.0  # articles go, and nothing has no word in common with nothing
    # Bags: "a b b" against "b b c" without the article: {b, b} and {b, b, c}; precision 1, recall
    # 2/3.
    assert f1("a b b", "b b c") == pytest.approx(0.8)
    assert f1("yes it is", "yes") == pytest.approx(0.5)


def test_the_papers_f1_takes_yes_and_no_exactly() -> None:
    assert f1_papers("yes it is", "yes") == 0.0
    assert f1_papers("no", "no way") == 0.0
    assert f1_papers("Yes.", "yes") == 1.0
    assert f1_papers("New York", "New York City") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The Cat!", "cat", 1.0),
        ("Washington, D.C.", "washington dc", 1.0),
        ("3,000", "3000", 1.0),
        (" 42 ", "42", 1.0),
        ("A", "a", 1.0),
        ("the", "A", 0.0),
        ("", "A", 0.0),
        ("-5", "5", 0.0),
        ("1.5", "15", 0.0),
        ("2x+1", "2x-1", 0.0),
        ("195 m", "1.95 m", 0.0),
        ("C#", "C", 0.0),
        ("C", "C#", 0.0),
        ("F minor", "F# minor", 0.0),
        ("the F# minor!", "f# minor", 1.0),
        ("Issue #1", "issue 1", 1.0),
        ("1.95 m.", "1.95 m", 1.0),
        ("C", "\\text{(C)}", 1.0),
        ("9" * 5000, "9" * 5000, 1.0),
    ],
)
def test_exact_match(prediction: str, reference: str, expected: float) -> None:
    assert exact_match(prediction, reference) == expected


def test_correct_is_exact_or_equal_but_never_a_share_of_words() -> None:
    assert is_correct("the cat", "Cat")
    assert is_correct("0.5", "\\frac{1}{2}")
    assert not is_correct("New York", "New York City")
    assert not is_correct("-5", "5")


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "-1,000",
        "50%",
        "$18",
        "1/2",
        "\\frac{1}{2}",
        "2x+1",
        "(3, 4)",
        "{a, b}",
        "x=5",
        "10\\%",
        "518,\\!400",
        "S_{20}",
        "10!",
    ],
)
def test_mathematical(text: str) -> None:
    assert is_mathematical(text)


@pytest.mark.parametrize(
    "text",
    ["", "Paris", "\\text{Paris}", "e41", "A", "2011-2012", "10:30", "May 5, 2020", "1.95 m"],
)
def test_not_mathematical(text: str) -> None:
    assert not is_mathematical(text)


@given(st.text(max_size=30), st.text(max_size=30))
@at_most(200)
def test_scores_of_any_text_stay_in_range(prediction: str, reference: str) -> None:
    assert exact_match(prediction, reference) in (0.0, 1.0)
    assert 0.0 <= f1_papers(prediction, reference) <= f1(prediction, reference) <= 1.0
    assert f1(prediction, reference) == pytest.approx(f1(reference, prediction))
    assert isinstance(is_mathematical(reference), bool)


@given(st.fractions(max_denominator=999))
@settings(deadline=None)
def test_a_fraction_equals_itself_as_latex_and_no_other_number(value: object) -> None:
    numerator, denominator = str(value).split("/") if "/" in str(value) else (str(value), "1")
    assert math_equal(f"{numerator}/{denominator}", str(value))
    assert not math_equal(str(value), str(int(numerator) + int(denominator)) + "/" + denominator)


def test_a_comparison_past_its_deadline_is_false_and_the_pool_recovers() -> None:
    start = time.monotonic()
    assert math_equal("9^{9^{9^{9}}}", "5", deadline_s=0.5) is False
    assert time.monotonic() - start < 30  # with the start of a worker on a busy machine
    assert math_equal("2^{10}", "1024") is True


def test_no_worker_outlives_its_process() -> None:
    code = (
        "from treegraft.tasks import math_pool, scoring\n"
        "assert scoring.math_equal('2^{3}', '8')\n"
        "print(next(iter(math_pool.shared_pool()._workers)).process.pid)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_plain_numbers_and_words_need_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> math_pool.MathPool:
        raise AssertionError("a worker was asked")

    monkeypatch.setattr(scoring, "shared_pool", refuse)
    assert math_equal("204.0", "204")
    assert not math_equal("-5", "5")
    assert not is_correct("e14", "e41")
    assert is_correct("\\frac{1}{2}", "\\dfrac12")
