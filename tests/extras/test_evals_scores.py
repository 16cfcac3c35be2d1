"""Scores of evaluations: pairs judged by hand, the published cases of math-verify and SQuAD,
intervals, pass@k."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.answer_pairs import COMPUTATION, FROM_DATA, KNOWLEDGE, LIMITS, WEB, Pair
from tests.support.corpus import DATA
from tests.support.examples import at_most

from treegraft.extras.suites.numbers import Interval
from treegraft.extras.suites.sets import SETS, read_set
from treegraft.rollout.measure import pass_at_k
from treegraft.tasks.scoring import exact_match_squad, f1, f1_characters, is_correct

BY_HAND = (*COMPUTATION, *KNOWLEDGE, *WEB)
needs_data = pytest.mark.skipif(
    not (DATA / "benchmarks").is_dir(), reason=f"no evaluation sets in {DATA}"
)


def wrong(pairs: tuple[Pair, ...]) -> list[str]:
    """Returns the pairs on which the rule says something else."""
    found = []
    for name, reference, answer, is_right, why in pairs:
        assert not isinstance(reference, int)
        if is_correct(answer, reference) is not is_right:
            found.append(f"{name}: {answer!r} for {reference!r} ({why})")
    return found


def test_pairs_judged_by_hand() -> None:
    assert {name for name, *_ in (*BY_HAND, *FROM_DATA)} == set(SETS)
    assert len({(name, str(reference), answer) for name, reference, answer, *_ in BY_HAND}) == len(
        BY_HAND
    )
    assert wrong(BY_HAND) == []


@needs_data
def test_pairs_with_references_of_the_sets_themselves() -> None:
    tasks = {
        task.id: task
        for name in sorted({name for name, *_ in FROM_DATA})
        for task in read_set(name, str(DATA / "benchmarks" / f"{name}.jsonl")).tasks
    }
    pairs = tuple((name, tasks[f"{name}/{row}"].reference, *rest) for name, row, *rest in FROM_DATA)
    assert wrong(pairs) == []  # type: ignore[arg-type]


def test_what_the_rule_cannot_see_is_known() -> None:
    """Each of these is right to a person; a pair that the rule learns moves to the others."""
    assert len(wrong(LIMITS)) == len(LIMITS)


# Of math-verify's own tests (0.9.0, tests/test_all.py): those where gold and answer are bare
# expressions, with their verdicts.
MATH_VERIFY = [
    ("-5", "-5", True),
    ("7425000", "7,425,000", True),
    ("1000", "1000.0", True),
    ("1000.0", "1,000.0", True),
    ("0.4", ".4", True),
    ("1000.99", "1,000.99", True),
    ("1000.99", "$1,000.99", True),
    ("10/9", "\\frac{10}{9}", True),
    ("-10/9", "-\\frac{10}{9}", True),
    ("$[0,1)$", "$[0,1)$", True),
    ("$[0,9)$", "$[0,1)$", False),
    ("$(0,9)$", "$[0,9)$", False),
    ("$1$", "$-[0,1)$", False),
    ("$1/3$", "$\\frac13 $", True),
    ("$1$", "$\\frac3{3} $", True),
    ("$\\sqrt{3}$", "$\\sqrt3 $", True),
    ("$1/3$", "$\\cfrac{1}{3} $", True),
    ("$1/3$", "$\\tfrac{1}{3} $", True),
    ("$1/3$", "$\\left( \\frac{1}{3} \\right)$", True),
    ("$1/3$", "$\\boxed{\\frac{1}{3}}$", True),
    ("$1/3$", "$\\frac{1}{3} \\text{meters}$", True),
    ("$1/3$", "$k = \\frac{1}{3}$", True),
    ("$0.28$", "28", False),
    ("$28/100$", "28", False),
    ("$28$", "28/100", False),
    ("$\\frac{28}{100}$", "28", False),
    ("$\\frac{9}{4}\\pi$", "\\frac94\\pi", True),
    ("$\\sqrt{2}+\\sqrt{5}$", "\\sqrt 2+\\sqrt 5", True),
    ("$x > 5$", "$x < 5$", False),
    ("$x \\leq 5$", "$5 \\geq x$", True),
    ("$x \\geq 5$", "$5 \\leq x$", True),
    ("$7 = 11a+c$", "$11a+c$", False),
    ("$11$", "$x=11$", True),
    ("$x < 1$", "$-x > -1$", True),
    ("$x < 1$", "$x > -1$", False),
    ("$x <= 1$", "$-x >= -1$", True),
    ("$2x+4y-3=0$", "$y=-\\frac{1}{2}x+\\frac{3}{4}$", True),
    ("$x^2/4 + y^2/3 = 1$", "$x^2/16 + y^2/12 = 1/4$", True),
    (
        r"$\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}$",
        r"$\begin{pmatrix}1 & 2 \\ 3 & 5\end{pmatrix}$",
        False,
    ),
    ("$\\frac{1}{12}$", "$0.0833333333333333$", True),
    ("$(1,\\frac{9}{2})$", "$(1,4.5)$", True),
    ("$\\frac{x+2}{7}$", "$\\frac{x}{7}+\\frac{2}{7}$", True),
    ("$\\tan^2(y)+1$", "$\\sec^2(y)$", True),
    ("$34x+45y-20z+100=0$", "$-34x-45y+20z-100=0$", True),
    ("$(a+5)(b+2)$", "$(+5)(b+2)$", False),
    ("$2$", "$\\frac{1+\\sqrt{5}}{2}$", False),
    ("$1\\sqrt{19}$", "$1$", False),
    ("$x+2n+1$", "$x+1$", False),
]


def test_mathematics_agrees_with_math_verifys_own_cases() -> None:
    different = [
        (gold, answer)
        for gold, answer, verdict in MATH_VERIFY
        if is_correct(answer, gold) is not verdict
    ]
    assert different == []


@pytest.mark.parametrize(
    ("answer", "references", "em", "score"),
    [
        # The examples of the metric card of Hugging Face's wrapper of the SQuAD v1.1 script.
        ("1976", ["1976"], 1.0, 1.0),
        ("1999", ["1976"], 0.0, 0.0),
        ("Beyonce", ["Beyoncé and Bruno Mars"], 0.0, 0.0),
        ("climate change", ["climate change"], 1.0, 1.0),
        # By the definition (arXiv 1606.05250, sec. 6.1): 2 common words of 2 and of 3, F1 = 2
        # (1)(2/3) / (5/3) = 4/5.
        ("New York", ["New York City"], 0.0, 0.8),
        ("the   New, York!", ["new york"], 1.0, 1.0),
        ("rock", ["rock n roll"], 0.0, 0.5),
        ("Paris", ["London", "Paris, France"], 0.0, 2 / 3),
        ("", ["a"], 1.0, 0.0),
        # Articles go as words only, and punctuation goes before them: "a.n." is "an".
        ("theatre", ["the atre"], 0.0, 0.0),
        ("a.n.", ["x"], 0.0, 0.0),
        ("-5", ["5"], 1.0, 1.0),
    ],
)
def test_squads_scores(answer: str, references: list[str], em: float, score: float) -> None:
    assert exact_match_squad(answer, references) == em
    assert f1(answer, references) == pytest.approx(score)
    assert f1_characters(answer, references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        (
            "陈俊亮",
            "陈俊亮和王莉",
            2 * (3 / 3) * (3 / 6) / (3 / 3 + 3 / 6),
        ),  # 3 characters of 3 and of 6
        ("王莉和陈俊亮", "陈俊亮和王莉", 1.0),  # a bag has no order
        ("《梦想世界3》", "梦想世界3", 1.0),
        ("何凯明", "何恺明", 2 / 3),
        (
            "Bill McColl教授",
            "Bill McColl",
            2 * (2 / 4) * 1 / (2 / 4 + 1),
        ),  # two words and two characters
        ("没有", "肖亮", 0.0),
    ],
)
def test_f1_of_chinese_counts_characters(answer: str, reference: str, score: float) -> None:
    assert f1_characters(answer, reference) == pytest.approx(score)


@given(
    st.text(st.characters(max_codepoint=0x2FF), max_size=20),
    st.text(st.characters(max_codepoint=0x2FF), max_size=20),
)
@at_most(60)
def test_without_chinese_f1_is_squads(one: str, other: str) -> None:
    assert f1_characters(one, other) == f1(one, other)


# ---------------------------------------------------------------------- intervals


def test_bootstrap_of_a_coin_by_hand() -> None:
    """100 items, 40 of them right: the standard error is sqrt(0.4 * 0.6 / 100) = 0.049, so about
    0.4 +- 1.96 * 0.049."""
    found = Interval.over([1.0] * 40 + [0.0] * 60)
    error = 1.96 * math.sqrt(0.4 * 0.6 / 100)
    assert found.mean == pytest.approx(0.4)
    assert found.low == pytest.approx(0.4 - error, abs=0.015) and found.high == pytest.approx(
        0.4 + error, abs=0.015
    )
    assert Interval.over([0.25] * 7) == Interval.over([0.25]) == Interval(0.25, 0.25, 0.25)
    assert found == Interval.over([1.0] * 40 + [0.0] * 60)


def test_scores_that_are_all_right_or_all_wrong_have_wilsons_interval() -> None:
    # z² = 3.8415: 5 of 5 are from 5 / 8.8415 to 1, none of 3 from 0 to 3.8415 / 6.8415.
    found = Interval.of_scores([1.0] * 5)
    assert (found.mean, found.low, found.high) == (1.0, pytest.approx(0.5655, abs=1e-4), 1.0)
    found = Interval.of_scores([0.0] * 3)
    assert (found.mean, found.high) == (0.0, pytest.approx(0.5615, abs=1e-4))
    assert found.low == pytest.approx(0.0, abs=1e-12)
    assert Interval.of_scores([0.0, 1.0]) == Interval.over([0.0, 1.0])
    assert Interval.of_scores([0.5] * 4) == Interval.over([0.5] * 4)


def test_the_mean_over_sets_weighs_them_equally() -> None:
    found = Interval.over([1.0] * 10, [0.0] * 1000)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    # Half of the first set is right: only its part of the mean varies, by half of its standard
    # error of sqrt(.25 / 100) = .05.
    mixed = Interval.over([1.0, 0.0] * 50, [0.0] * 10)
    assert mixed.mean == 0.25 and mixed.high - mixed.low == pytest.approx(
        2 * 1.96 * 0.05 / 2, abs=0.01
    )


@given(st.integers(1, 7), st.data())
@at_most(40)
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(num: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, num))
    k = data.draw(st.integers(1, num))
    choices = list(itertools.combinations(range(num), k))
    assert pass_at_k(num, right, k) == pytest.approx(
        sum(min(choice) < right for choice in choices) / len(choices)
    )
