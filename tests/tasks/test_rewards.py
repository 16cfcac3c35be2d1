"""Rewards on trees written by hand, and every way in which a reward function can fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.error_codes import raises_code

from treegraft.core.types import (
    Leaf,
    Observation,
    Origin,
    Status,
    Step,
    StepContent,
    Task,
    ToolCall,
    Tree,
)
from treegraft.settings.load import load_config
from treegraft.settings.tasks import RewardSettings
from treegraft.tasks.rewards import (
    RewardScorer,
    build_rewards,
    exact_match_reward,
    f1_reward,
    hierarchical_reward,
    math_reward,
)


def make_step(step_id: str, content: StepContent, origin: Origin = Origin.POLICY) -> Step:
    return Step(
        id=step_id,
        parent=step_id.rpartition(".")[0] or None,
        depth=step_id.count("."),
        token_ids=(1, 2),
        origins=(origin, origin),
        loss_mask=(False, False),
        sampling_logprobs=(0.0, 0.0),
        entropies=(0.0, 0.0),
        content=content,
    )


SEARCH = StepContent(
    thought="look", calls=(ToolCall("search", "q"),), observations=(Observation(text="</python>"),)
)
PYTHON = StepContent(calls=(ToolCall("python", "print(1)"),), observations=(Observation(text="1"),))

Path = tuple[Sequence[tuple[StepContent, Origin]], Status]


def make_tree(
    *paths: Path, reference: tuple[str, ...] = ("New York City",), **columns: Any
) -> Tree:
    """One start for each path; the answer is its last step's."""
    root = make_step("0", StepContent(thought="where?"), Origin.PROMPT)
    steps = [root]
    leaves = []
    for ordinal, (contents, status) in enumerate(paths):
        step_id = f"0.{ordinal}"
        for content, origin in contents:
            steps.append(make_step(step_id, content, origin))
            step_id += ".0"
        leaves.append(Leaf(step_id=steps[-1].id, status=status, answer=steps[-1].content.answer))
    task = Task(id="t/1", question="where?", reference=reference, columns=columns)
    return Tree(task=task, group_id="0/t/1", steps=tuple(steps), leaves=tuple(leaves))


def path(
    *contents: StepContent, answer: str | None = None, status: Status = Status.COMPLETED
) -> Path:
    steps = [*contents] if answer is None else [*contents, StepContent(answer=answer)]
    return [(content, Origin.POLICY) for content in steps], status


def written_text(token_ids: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in token_ids)


def score(tree: Tree, function: Callable[..., Any], *, deadline_s: float = 10.0) -> Tree:
    scorer = RewardScorer(
        [("mine", function, 1.0)], written_text=written_text, deadline_s=deadline_s
    )
    return asyncio.run(scorer(tree))


def test_plain_rewards() -> None:
    tree = make_tree(
        path(answer="new york city"),
        path(answer="New York"),
        path(SEARCH, status=Status.TRUNCATED),
        path(answer="New York City", status=Status.FORMAT_VIOLATION),
    )
    trajectories = tree.trajectories()
    assert exact_match_reward(trajectories=trajectories) == [1.0, 0.0, 0.0, 0.0]
    assert f1_reward(trajectories=trajectories) == [1.0, pytest.approx(0.8), 0.0, 0.0]
    assert math_reward(trajectories=trajectories) == [1.0, 0.0, 0.0, 0.0]


def test_without_a_reference_no_reward_applies() -> None:
    trajectories = make_tree(path(answer="x"), reference=()).trajectories()
    for function in (exact_match_reward, f1_reward, math_reward, hierarchical_reward):
        assert function(trajectories=trajectories) == [None]


def test_hierarchical_reward_is_equation_8() -> None:
    tree = make_tree(
        path(answer="Paris"),
        path(answer="New York"),
        path(SEARCH, answer="New York City"),
        path(SEARCH, PYTHON, answer="New York City"),
        path(SEARCH, PYTHON, answer="Paris"),
        path(SEARCH, PYTHON, status=Status.TRUNCATED),
        path(answer="New York City", status=Status.FORMAT_VIOLATION),
    )
    # Acc; Acc + 0.1 with both tools; 0 when wrong, bonus or not; -1 without a well-formed answer.
    expected = [0.0, pytest.approx(0.8), 1.0, pytest.approx(1.1), 0.0, -1.0, -1.0]
    assert hierarchical_reward(trajectories=tree.trajectories()) == expected


def test_the_bonus_counts_what_the_agent_wrote_alone() -> None:
    grafted: Path = (
        [
            (PYTHON, Origin.RETRIEVED),
            (SEARCH, Origin.POLICY),
            (StepContent(answer="New York City"), Origin.POLICY),
        ],
        Status.COMPLETED,
    )
    # The result of SEARCH holds a python tag, and python was called by another agent.
    assert hierarchical_reward(trajectories=make_tree(grafted).trajectories()) == [1.0]


def test_accuracy_follows_the_reference() -> None:
    trajectories = make_tree(path(answer="-0.5"), reference=("0.5",)).trajectories()
    assert hierarchical_reward(trajectories=trajectories) == [0.0]
    assert hierarchical_reward(trajectories=trajectories, accuracy="f1") == [
        1.0
    ]  # as released: signs are lost
    trajectories = make_tree(path(answer="\\frac{1}{2}"), reference=("0.5",)).trajectories()
    assert hierarchical_reward(trajectories=trajectories) == [1.0]
    assert hierarchical_reward(trajectories=trajectories, accuracy="exact_match") == [0.0]
    assert hierarchical_reward(trajectories=trajectories, accuracy="math") == [1.0]
    trajectories = make_tree(path(answer="a"), reference=("A",)).trajectories()
    assert hierarchical_reward(trajectories=trajectories) == [1.0]
    assert hierarchical_reward(trajectories=trajectories, accuracy="f1") == [0.0]


def test_scorer_fills_the_leaves() -> None:
    tree = make_tree(
        path(SEARCH, PYTHON, answer="New York City"),
        path(answer="New York"),
        path(SEARCH, status=Status.TRUNCATED),
        path(SEARCH, status=Status.FAILED),
    )
    settings = RewardSettings(funcs=["hierarchical", "exact_match"], weights=[1.0, 2.0])
    scorer = RewardScorer(build_rewards(settings), written_text=written_text)
    leaves = asyncio.run(scorer(tree)).leaves
    assert [leaf.reward for leaf in leaves] == [
        pytest.approx(1.1 + 2.0),
        pytest.approx(0.8),
        -1.0,
        None,
    ]
    assert leaves[0].reward_parts == {"hierarchical": pytest.approx(1.1), "exact_match": 1.0}
    assert [leaf.is_correct for leaf in leaves] == [True, False, False, None]
    assert [leaf.status for leaf in leaves] == [leaf.status for leaf in tree.leaves]


def test_a_function_without_kwargs_gets_what_it_names() -> None:
    def by_length(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    assert score(make_tree(path(answer="four")), by_length).leaves[0].reward == 5.0


def explode(**_: Any) -> list[float]:
    raise KeyError("gone")


def quit_early(**_: Any) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (explode, "KeyError"),
        (quit_early, "SystemExit"),
        (lambda **_: [1.0], "it returned [1.0], expected a list"),
        (lambda **_: 1.0, "it returned 1.0, expected a list"),
        (lambda **_: [float("nan"), float("nan")], "finite"),
        (lambda **_: ["good", "bad"], "'good'"),
        (lambda **_: [None, None], "applies"),
    ],
)
def test_a_failing_function_fails_the_leaves_and_nothing_else(
    function: Callable[..., Any], message: str
) -> None:
    for leaf in score(make_tree(path(answer="x"), path(answer="y")), function).leaves:
        assert leaf.status is Status.FAILED
        assert leaf.reward is None and leaf.is_correct is None and not leaf.has_loss
        assert leaf.error is not None and "t/1" in leaf.error
        assert message in leaf.error or "'bad'" in leaf.error
        assert "mine" in leaf.error or message == "applies"


def test_a_bad_number_fails_its_own_leaf() -> None:
    leaves = score(
        make_tree(path(answer="x"), path(answer="y")), lambda **_: [float("inf"), 1]
    ).leaves
    assert [leaf.status for leaf in leaves] == [Status.FAILED, Status.COMPLETED]
    assert leaves[1].reward == 1.0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hanging_function_meets_the_deadline(is_async: bool) -> None:
    def hang(**_: Any) -> list[float]:
        time.sleep(30)
        return [1.0]

    async def hang_async(**_: Any) -> list[float]:
        await asyncio.sleep(60)
        return [1.0]

    start = time.monotonic()
    (leaf,) = score(
        make_tree(path(answer="x")), hang_async if is_async else hang, deadline_s=0.2
    ).leaves
    assert time.monotonic() - start < 15
    assert leaf.status is Status.FAILED
    assert leaf.error is not None and "reward.deadline_s = 0.2" in leaf.error


def test_names_and_import_paths() -> None:
    ((name, function, weight),) = build_rewards(
        RewardSettings(funcs=["treegraft.tasks.rewards:f1_reward"])
    )
    assert (name, function, weight) == ("treegraft.tasks.rewards:f1_reward", f1_reward, 1.0)
    ((_, function, _),) = build_rewards(RewardSettings(accuracy="f1"))
    assert function(trajectories=make_tree(path(answer="-5"), reference=("5",)).trajectories()) == [
        1.0
    ]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"funcs": ["exact_mach"]}, "unknown-name"),
        ({"funcs": ["treegraft.core.types:ROOT_ID"]}, "reward-signature"),
        ({"funcs": ["treegraft.core.types:nothing_of_the_kind"]}, "import-name-missing"),
    ],
)
def test_bad_settings(settings: dict[str, Any], code: str) -> None:
    with raises_code(code):
        build_rewards(RewardSettings(**settings))


def test_a_recipe_without_reward_functions_is_refused() -> None:
    with raises_code("invalid-setting"):
        load_config({"reward": {"funcs": []}})
