"""reasoning-gym's questions, and an expert whose arithmetic the generators confirm."""

from __future__ import annotations

import contextlib
import io

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import table_class

from treegraft.core.types import Task
from treegraft.extras.tasks.arithmetic import ReasoningGym, find_expression
from treegraft.extras.tasks.plugin import ReasoningGymSettings
from treegraft.tasks.build import build_tasks
from treegraft.tasks.scoring import is_correct


def make_source(
    generator: str = "chain_sum",
    seed: int = 0,
    num_train: int = 40,
    num_eval: int = 20,
    **params: object,
) -> ReasoningGym:
    settings = ReasoningGymSettings(generator=generator, params=params)
    return ReasoningGym(settings, seed=seed, num_train=num_train, num_eval=num_eval)


@pytest.mark.parametrize(
    "generator",
    ["chain_sum", "basic_arithmetic", "products", "decimal_chain_sum", "decimal_arithmetic"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_expert_is_right_and_its_program_prints_what_it_shows(
    generator: str, seed: int
) -> None:
    source = make_source(generator, seed, num_train=150)
    for task in source.train_tasks():
        steps = source.expert(task, seed)
        assert steps is not None, task.question
        call, last = steps
        assert last.answer is not None and is_correct(last.answer, task.reference), task
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(call.calls[0].body, {})
        assert printed.getvalue().strip() == call.observations[0].text == last.answer
        assert call.thought and last.answer in last.thought


def test_an_expression_by_hand() -> None:
    source = make_source()
    task = Task(id="t", question="12 + 30 =", reference=("42",), columns={"expression": "12 + 30"})
    call, last = source.expert(task, 0) or ()
    assert call.calls[0].body == "print(12 + 30)"
    assert (call.observations[0].text, last.answer) == ("42", "42")
    wrong = Task(id="t", question="12 + 30 =", reference=("41",), columns={"expression": "12 + 30"})
    assert source.expert(wrong, 0) is None


def test_the_wording_depends_on_the_seed() -> None:
    source = make_source()
    task = source.train_tasks()[0]
    thoughts = {
        (steps[0].thought, steps[1].thought)
        for seed in range(40)
        if (steps := source.expert(task, seed))
    }
    assert 5 < len(thoughts) <= 25
    assert source.expert(task, 3) == source.expert(task, 3)


@pytest.mark.parametrize(
    ("question", "metadata", "expression"),
    [
        ("Calculate 2 * 3.", {"expression": "2 * 3"}, "2 * 3"),
        ("Solve.\n(1.5+2.5)*2 = ?", {}, "(1.5+2.5)*2"),
        ("Reach 10 with 2 and 5.", {"expression": "2 * 5"}, None),
        ("Calculate 1 / 0.", {"expression": "1 / 0"}, None),
        ("Calculate 1 << 99999.", {"expression": "1 << 99999"}, None),
        ("Calculate open('x').", {"expression": "open('x')"}, None),
        ("What is 7?", {"expression": "7"}, None),
        ("Who?", {}, None),
    ],
)
def test_expressions_are_arithmetic_that_the_question_shows(
    question: str, metadata: dict[str, str], expression: str | None
) -> None:
    assert find_expression(question, metadata) == expression


def test_parts_share_no_question() -> None:
    # 1-digit sums of two terms: 10 * 10 * 2 signs = 200 questions, fewer than the 60 + 100 + 100
    # asked for.
    source = make_source(num_train=100, num_eval=60, min_terms=2, max_terms=2, max_digits=1)
    parts = [source.train_tasks(), source.eval_tasks(), source.warmup_tasks(100, 0)]
    questions = [task.question for part in parts for task in part]
    assert len(questions) == len(set(questions)) <= 200
    assert (len(parts[0]), len(parts[1])) == (100, 60)
    assert 0 < len(parts[2]) <= 40


def test_too_few_questions_are_reported_and_none_is_an_error() -> None:
    params = {"min_terms": 1, "max_terms": 1, "max_digits": 1}  # the digits: ten questions
    source = make_source(num_train=20, num_eval=4, **params)
    assert len(source.train_tasks()) == 6
    (sentence,) = source.report()
    assert "6 different training questions instead of 20" in sentence
    with raises_code("questions-spent"):
        make_source(num_train=20, num_eval=10, **params).train_tasks()


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    first = make_source(seed=3)
    again = make_source(seed=3)
    other = make_source(seed=4)
    assert first.train_tasks() == again.train_tasks()
    assert first.warmup_tasks(10, 1) == again.warmup_tasks(10, 1)
    assert first.warmup_tasks(10, 1) != first.warmup_tasks(10, 2)
    assert first.train_tasks() != other.train_tasks()


def test_a_generator_without_expressions_has_no_expert() -> None:
    source = make_source("leg_counting", num_train=3, num_eval=2)
    assert [source.expert(task, 0) for task in source.train_tasks()] == [None, None, None]
    assert source.warmup_tasks(5, 0) == ()
    assert source.early_answer(source.train_tasks()[0], ()) is None
    assert source.vocabulary() == () and source.tools() == () and source.report() == ()


@pytest.mark.parametrize(
    ("generator", "params", "code"),
    [
        ("chain_sums", {}, "unknown-generator"),
        ("chain_sum", {"max_term": 3}, "unknown-parameter"),
        ("chain_sum", {"size": 3}, "generator-own-setting"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "generator-refuses"),
    ],
)
def test_bad_settings(generator: str, params: dict[str, object], code: str) -> None:
    with raises_code(code):
        make_source(generator, **params)


def test_source_by_name() -> None:
    source = build_tasks(table_class("tasks")(kind="arithmetic", num_train=2, num_eval=1), seed=0)
    assert [task.id for task in source.train_tasks()] == ["chain_sum/train/0", "chain_sum/train/1"]
