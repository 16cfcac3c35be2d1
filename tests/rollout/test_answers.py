"""Answers read off what the agent wrote: ten turns by hand, numbers in any text, each rule."""

from __future__ import annotations

import functools
import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.rollout.test_format_chat import CALL, TOOLS, ends_of, ids_of, tokenizer_of
from tests.support.error_codes import raises_code

from treegraft.core.demonstration import Written, tree_of_paths
from treegraft.core.types import StepContent, Task
from treegraft.rollout.formats.answers import AnswerRule, last_number
from treegraft.rollout.formats.build import build_format
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.runs.transcript import transcript
from treegraft.settings.load import load_config
from treegraft.settings.tasks import FormatSettings
from treegraft.tasks.scoring import is_correct


@functools.cache
def form_with(**settings: object) -> ChatFormat:
    """A format as the recipe builds it, with the settings that it resolves to."""
    config = load_config({"model": {"path": "a/b"}, "format": {"kind": "chat", **settings}})
    built = build_format(config.format, tokenizer_of("qwen25"), TOOLS, end_ids=ends_of("qwen25"))
    assert isinstance(built, ChatFormat)
    return built


def read(turn: str, *reference: str, **settings: object) -> str | None:
    form = form_with(**settings)
    parsed = form.parse_step(ids_of("qwen25", f"{turn}<|im_end|>"))
    assert parsed.violation is None, parsed.violation
    return form.answer_of(parsed.content, Task(id="t", question="?", reference=reference))


@pytest.mark.parametrize(
    ("turn", "reference", "answer", "correct"),
    [
        ("So, 23 * 2 = 46 dollars.", "46", "46", True),
        ("She pays $1,046.50 in all.", "1046.5", "1046.50", True),
        ("<think>\n20 + 6 = 26\n</think>\n\nShe has 26 apples and 3 pears.", "26", "3", False),
        ("Of 100 apples \\boxed{46} are left, 54 are not.", "46", "46", True),
        ("That is one half: \\frac{1}{2}.", "0.5", "1/2", True),
        ("\\boxed{\\sqrt{4}}", "2", "\\sqrt{4}", True),
        ("40 + 6", "46", "40 + 6", True),
        ("Paris", "Paris", "Paris", True),
        ("The capital is Paris.", "Paris", "The capital is Paris.", False),
        ("I do not know.", "46", "I do not know.", False),
    ],
)
def test_ten_turns_by_hand(turn: str, reference: str, answer: str, correct: bool) -> None:
    assert read(turn, reference) == answer
    assert is_correct(answer, (reference,)) is correct


def test_without_a_reference_the_turn_is_the_answer() -> None:
    assert read("So, 23 * 2 = 46 dollars.") == "So, 23 * 2 = 46 dollars."


@pytest.mark.parametrize(
    ("settings", "turn", "answer"),
    [
        ({"answer": "last_number"}, "46 of \\boxed{100}", "100"),
        ({"answer": "last_number"}, "none", None),
        ({"answer": "whole"}, "It is \\boxed{46}", "It is \\boxed{46}"),
        ({"answer": "boxed"}, "It is \\boxed{46} dollars", "46"),
        ({"answer": "boxed"}, "It is 46 dollars", ""),
        ({"answer": "regex", "answer_pattern": "#### (.*)"}, "#### 4\n#### 46\nDone", "46"),
        ({"answer": "regex", "answer_pattern": "[A-D]"}, "A or B", "B"),
        ({"answer": "regex", "answer_pattern": "#### (.*)"}, "46", None),
    ],
)
def test_each_rule(settings: dict[str, str], turn: str, answer: str | None) -> None:
    assert read(turn, "46", **settings) == answer


@pytest.mark.parametrize("answer", ["46", "Paris", "x^2 + 1"])
@pytest.mark.parametrize("kind", ["auto", "boxed", "whole"])
def test_a_demonstrated_answer_is_read_back(kind: str, answer: str) -> None:
    form = form_with(answer=kind)
    content = StepContent(thought="so", answer=answer)
    parsed = form.parse_step(form.render_step(content)[0][0])
    task = Task(id="t", question="?", reference=(answer,))
    # Without a box or think tags, the thought is part of the whole.
    expected = f"so\n\n{answer}" if kind == "whole" else answer
    assert form.answer_of(parsed.content, task) == expected
    # A call is not an answer.
    call = form.parse_step(ids_of("qwen25", f"{CALL}<|im_end|>"))
    assert form.answer_of(call.content, task) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("about 1,000 km.", "1000"),
        ("R2 and 7 of 9e3", "9e3"),
        ("-5", "-5"),
        ("10-4", "4"),
        ("3 / 4 of it", "3/4"),
        ("0.50, then .5", ".5"),
        ("(12,15)", "15"),
        ("\N{MINUS SIGN}3 degrees", "-3"),
        ("**46**", "46"),
        ("2nd", "2"),
        ("R2", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_any_number_is_found_in_a_sentence(value: object) -> None:
    assert last_number(f"Of 7 things it is {value} dollars.") == str(value)
    assert last_number(f"It costs ${value:,}.") == str(value)


@given(st.text())
def test_no_text_stops_a_rule(text: str) -> None:
    for kind in ("auto", "last_number", "whole", "boxed"):
        assert isinstance(AnswerRule(kind, finds_numbers=True).read(text, ("1",)), str | None)


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"answer": "regex"}, "format.answer_pattern"),
        ({"answer": "regex", "answer_pattern": "("}, "format.answer_pattern"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], about: str) -> None:
    with raises_code("settings-contradict", about):
        load_config({"model": {"path": "a/b"}, "format": settings})


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [("46", "correct, read as 46"), (None, "wrong, no answer found in it")],
)
def test_the_viewer_s_text_says_what_was_read(answer: str | None, outcome: str) -> None:
    task = Task(id="t", question="?", reference=("46",))
    form = form_with()
    (ids, origin), *_ = form.render_step(StepContent(answer="46"))
    path = [Written(StepContent(answer="So it is 46 dollars."), [(ids, origin)])]
    tree = tree_of_paths(task, "g", form.prompt_ids(task), [path], answer_of=lambda *_: answer)
    leaf = replace(tree.leaves[0], reward=1.0, is_correct=answer is not None)
    (trajectory,) = replace(tree, leaves=(leaf,)).trajectories()
    printed = io.StringIO()
    Console(file=printed, width=100).print(transcript(trajectory))
    assert outcome in printed.getvalue()


@pytest.mark.parametrize(("kind", "written"), [("auto", "\\boxed{46}"), ("whole", "46")])
def test_an_answer_is_boxed_only_if_the_rule_reads_boxes(kind: str, written: str) -> None:
    ids, _ = form_with(answer=kind).render_step(StepContent(answer="46"))[0]
    assert tokenizer_of("qwen25").decode(ids) == f"{written}<|im_end|>"


def test_a_format_of_ones_own_is_found_by_its_import_path() -> None:
    settings = FormatSettings(kind="treegraft.rollout.formats.tags:TagsFormat")
    assert isinstance(build_format(settings, tokenizer_of("qwen25"), TOOLS), TagsFormat)


def test_in_tags_the_answer_is_the_papers() -> None:
    assert AnswerRule().read("So it is 46 dollars", ("46",)) == "So it is 46 dollars"
    assert FormatSettings().answer == "auto"
