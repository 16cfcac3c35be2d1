"""Samplers of training tasks: estimates and chances by hand, what a cut run deals, and costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import table_class, tiny
from tests.support.trees import Part, build_tree

from treegraft.core.types import ROOT_ID, Status, StoredCause, Task, Tree
from treegraft.extras.methods.dots import sampler as dots
from treegraft.extras.methods.dots.sampler import Difficulty, keyed_order, predicted_rates
from treegraft.rollout.measure import rollout_metrics
from treegraft.settings.load import load_config
from treegraft.tasks.sampler import Epochs, build_sampler, draw_tasks

SHOWN: dict[str, Any] = {"kind": "difficulty"}
REFERS: dict[str, Any] = {
    "kind": "difficulty",
    "encoder": "hashing",
    "num_references": 4,
}

SamplerSettings = table_class("sampler")


def tasks_of(names: str) -> list[Task]:
    return [Task(id=name, question=f"what of {name} ?", reference=()) for name in names]


def sampler_of(names: str, **settings: Any) -> Difficulty:
    return Difficulty(tasks_of(names), 0, SamplerSettings(**{**SHOWN, **settings}))


def tree_of(name: str, rewards: Sequence[float]) -> Tree:
    leaves = tuple(Part("s", reward=reward) for reward in rewards)
    return build_tree(Part("p", leaves), task_id=name)


def names(tasks: Sequence[Task]) -> str:
    return "".join(task.id for task in tasks)


# --- estimates and chances ------------------------------------------------------------------------


def test_rates_of_tasks_like_it_by_hand() -> None:
    """exp(cosine / t) is 4 for a task with itself and 1 for the other reference."""
    half = 0.5**0.5
    vectors = np.array([[1.0, 0.0], [0.0, 1.0], [half, half]])
    rates = np.array([1.0, 0.0])
    weights = np.array([3.0, 1.0])
    found = predicted_rates(vectors, [0, 1], rates, weights, 1 / np.log(4))
    # p = 12/13, 3/7 and 3/4; the line through the first two and their rates has 0.65 at 3/4.
    assert found == pytest.approx([1.0, 0.0, 0.65])


def test_the_line_is_that_of_least_squares_and_ends_at_0_and_1() -> None:
    """With exp(cosine / t) = 2 for a task with itself and 1 for others, p = (2 + y) / 4 of each of
    three references with rates 1, 1 and 0: 3/4, 3/4 and 1/2."""
    rates = np.array([1.0, 1.0, 0.0])
    vectors = np.vstack([np.eye(4), [0.0, 0.0, -1.0, 0.0]])
    found = predicted_rates(vectors, [0, 1, 2], rates, np.ones(3), 1 / np.log(2))
    # The fourth is like none: p = 2/3, on the line y = 4 p - 2. The last is least like the third,
    # which weighs 1/2: p = 4/5, for which the line has 6/5.
    assert found == pytest.approx([1.0, 1.0, 0.0, 2 / 3, 1.0])
    # Alike, they say the same, and no line can be laid.
    same = predicted_rates(np.ones((2, 1)), [0, 1], np.array([1.0, 0.5]), np.ones(2), 0.2)
    assert same == pytest.approx([0.75, 0.75])


def test_draws_without_replacement_have_the_chances() -> None:
    """1/8, 2/8 and 5/8 at first; of what a first draw of the last leaves, 1/3 and 2/3."""
    logits = np.log([1.0, 2.0, 5.0])
    orders = [keyed_order(logits, *((seed, n) for n in range(3))) for seed in range(4000)]
    first = Counter(order[0] for order in orders)
    # Two standard deviations are 0.015.
    assert [first[n] / 4000 for n in range(3)] == pytest.approx([0.125, 0.25, 0.625], abs=0.02)
    second = Counter(order[1] for order in orders if order[0] == 2)
    assert second[1] / second.total() == pytest.approx(2 / 3, abs=0.03)


def test_own_rollouts_with_a_prior_by_hand() -> None:
    """m = 2 rollouts of the prior at the mean rate, 6 of 16."""
    sampler = sampler_of("abc")
    assert sampler.estimates(1) is None
    sampler.restore({"seen": {"a": [6.0, 8.0, 2], "b": [0.0, 8.0, 2]}, "dealt": {}})
    assert sampler.estimates(2) == pytest.approx([0.675, 0.075, 0.375])


def test_the_success_of_a_task_is_that_of_its_unaided_rollouts() -> None:
    sampler = sampler_of("a")
    helped = Part.of("r", Part("s", reward=1.0))
    tree = build_tree(
        Part.of(
            "p",
            *(Part("s", reward=reward) for reward in (1.1, 0.5, -1.0)),
            helped,
            Part("s", status=Status.FAILED),
        ),
        task_id="a",
    )
    sampler.take(1, [tree])
    assert sampler.state["seen"] == {"a": [1.5, 3.0, 1]}
    stored = tree_of("a", [1.0, 0.0])
    steps = [
        replace(step, cause=StoredCause(source="expert", reward=1.0)) if step.id == "0.0" else step
        for step in stored.steps
    ]
    assert stored.steps[0].id == ROOT_ID
    sampler.restore({})
    sampler.take(1, [replace(stored, steps=tuple(steps))])
    assert sampler.state["seen"] == {"a": [0.0, 1.0, 1]}


# --- what is dealt --------------------------------------------------------------------------------


def test_the_nearest_to_the_target_are_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dots, "DECAY", 1.0)
    sampler = sampler_of("abcdef")
    rates = {"a": 0.0, "b": 1.0, "c": 0.5, "d": 0.25, "e": 0.875}
    sampler.take(1, [tree_of(name, [rate] * 8) for name, rate in rates.items()])
    # Of f the mean is expected, 0.525, and the prior draws the others to it: distances to 1/2 are
    # 0.005 of c, 0.025 of f, 0.195 of d, 0.305 of e, 0.395 of a and 0.405 of b.
    assert names(sampler.draw(2, 5, size=4)) == "cfde"
    assert set(names(sampler.draw(2, 5, size=4, without={"c", "f"}))) == set("deab")
    assert names(sampler.draw(2, 5, size=9, without=set("abcdef"))) == ""
    sampler.take(2, [tree_of("c", [1.0] * 8)])
    expected = {"num_known": 5.0, "rate_mean": 0.505, "error_mean": 0.495}
    assert sampler.take_metrics() == {
        f"sampler/{name}": pytest.approx(value) for name, value in expected.items()
    }


def test_a_reference_set_serves_some_updates() -> None:
    sampler = sampler_of("abcdefgh", **REFERS)
    asked = [names(sampler.references(number)) for number in range(1, 60)]
    assert all(len(set(one)) == (4 if n % 2 == 0 else 0) for n, one in enumerate(asked))
    assert set("".join(asked)) == set("abcdefgh")
    sampler.label(1, [tree_of(name, [1.0, 0.0]) for name in asked[0]])
    first = sampler.draw(1, 0, size=3)
    # What training shows is nothing to this estimate, and no task comes twice in the two updates.
    before = sampler.estimates(1)
    sampler.take(1, [tree_of(task.id, [0.0, 0.0]) for task in first])
    assert sampler.estimates(2) == pytest.approx(before)
    second = sampler.draw(2, 3, size=3)
    assert len({*names(first), *names(second)}) == 6
    sampler.take(2, [tree_of(task.id, [0.0, 0.0]) for task in second])
    assert set(sampler.drawn(6)) == {*names(first), *names(second)}
    # The next set takes the place of this one.
    sampler.label(3, [tree_of("a", [1.0, 1.0, 1.0, 0.0])])
    assert sampler.state["seen"] == {"a": [3.0, 4.0, 3]}
    assert sampler.take_metrics()["sampler/reference_rate"] == 0.75


@pytest.mark.parametrize("settings", [SHOWN, {**SHOWN, "encoder": "hashing"}, REFERS])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_resumed_run_deals_the_same(settings: dict[str, Any], cut: int) -> None:
    letters = "abcdefghijklmnop"

    def go_on(sampler: Difficulty, updates: range) -> list[str]:
        found = []
        for number in updates:
            references = sampler.references(number)
            if references:
                sampler.label(number, [rolled_out(task, -number) for task in references])
            dealt: list[Task] = []
            for _ in range(2):
                without = {task.id for task in dealt}
                dealt += sampler.draw(number, 0, size=2, without=without)
            sampler.take(number, [rolled_out(task, number) for task in dealt])
            found.append(names(references) + " " + names(dealt))
        return found

    def rolled_out(task: Task, number: int) -> Tree:
        rewards = [float((ord(task.id) * n + number) % 3 == 0) for n in range(4)]
        return tree_of(task.id, rewards)

    whole, first, second = (sampler_of(letters, **settings) for _ in range(3))
    expected = go_on(whole, range(1, 6))
    begun = go_on(first, range(1, cut + 1))
    second.restore(json.loads(json.dumps(first.state)))
    assert begun + go_on(second, range(cut + 1, 6)) == expected
    assert second.state == whole.state and len(set(expected)) > 2


def test_epochs_are_what_they_were() -> None:
    tasks = tasks_of("abcdef")
    sampler = build_sampler(SamplerSettings(), tasks, 3)
    assert isinstance(sampler, Epochs) and not sampler.state and not sampler.references(1)
    drawn = sampler.draw(9, 4, size=3, without={"b"})
    assert drawn == draw_tasks(tasks, 4, size=3, seed=3, without={"b"})
    assert sampler.drawn(6) == [task.id for task in draw_tasks(tasks, 0, size=6, seed=3)]
    assert sampler.take_metrics() == {}


# --- settings, costs, runs ------------------------------------------------------------------------


class Backwards(Epochs):
    """Deals the tasks from the last one on."""

    def __init__(self, tasks: Sequence[Task], seed: int, skip: int = 0) -> None:
        super().__init__(tasks[::-1][skip:], seed)

    def draw(self, number: int, first: int, *, size: int, without: Any = ()) -> Sequence[Task]:
        return self._tasks[first : first + size]


class Undecided:
    """Deals nothing."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None: ...


def test_a_sampler_of_your_own() -> None:
    settings = SamplerSettings(kind="tests.tasks.test_sampler:Backwards", options={"skip": 1})
    assert names(build_sampler(settings, tasks_of("abcd"), 0).draw(1, 0, size=2)) == "cb"
    with raises_code("members-missing", match=r"sampler\.kind: .* gives a Undecided without draw"):
        build_sampler(SamplerSettings(kind="tests.tasks.test_sampler:Undecided"), tasks_of("ab"), 0)


class Odd(Epochs):
    """Answers as it is told to."""

    def __init__(
        self, tasks: Sequence[Task], seed: int, *, dealt: str = "ab", kept: Any = None
    ) -> None:
        super().__init__(tasks, seed)
        self._dealt = dealt
        self._kept = {} if kept is None else kept

    @property
    def state(self) -> Any:
        return {"kept": np.float32(1)} if self._kept == "numpy" else self._kept

    def draw(self, number: int, first: int, *, size: int, without: Any = ()) -> Any:
        every = tasks_of("abcdef")
        return [every["abcdef".index(name)] if name != "!" else name for name in self._dealt]


@pytest.mark.parametrize(
    ("dealt", "code"),
    [
        ("", "sampler-invalid"),
        ("aa", "sampler-invalid"),
        ("abc", "sampler-invalid"),
        ("af", "sampler-invalid"),
        ("a!", "sampler-invalid"),
        ("d", "sampler-invalid"),
        ("z", "own-code-raised"),
    ],
)
def test_what_your_own_sampler_deals_is_checked(dealt: str, code: str) -> None:
    settings = SamplerSettings(kind="tests.tasks.test_sampler:Odd", options={"dealt": dealt})
    sampler = build_sampler(settings, tasks_of("abcd"), 0)
    with raises_code(code) as caught:
        sampler.draw(1, 0, size=2, without=["d"] if dealt == "d" else [])
    assert "'tests.tasks.test_sampler:Odd'" in str(caught.value)


def test_what_your_own_sampler_keeps_is_json() -> None:
    def made(kept: Any) -> Any:
        settings = SamplerSettings(kind="tests.tasks.test_sampler:Odd", options={"kept": kept})
        return build_sampler(settings, tasks_of("ab"), 0)

    assert made({"a": [1]}).state == {"a": [1]}
    for kept in ("numpy", [1]):
        with raises_code("own-code-raised"):
            made(kept)


@pytest.mark.parametrize(
    ("sampler", "more", "about"),
    [
        ({"kind": "hard"}, {}, "sampler.kind"),
        ({**SHOWN, "num_references": 4}, {}, "sampler.encoder"),
    ],
)
def test_settings_that_do_not_fit(sampler: Any, more: dict[str, Any], about: str) -> None:
    with raises_code("settings-contradict", about):
        load_config(tiny(sampler=sampler, **more))


def test_references_count_as_rollouts_and_in_no_mean() -> None:
    learned = tree_of("a", [1.0, 0.0])
    reference = tree_of("b", [0.0, 0.0, 0.0])
    alone = rollout_metrics([learned])
    both = rollout_metrics([learned], [reference])
    assert both["rollout/num_trajectories"] == 5
    assert {key for key in alone if alone[key] != both[key]} == {"rollout/num_trajectories"}
