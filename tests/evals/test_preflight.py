"""Checks before training: each defect that would make every reward alike is found without weights,
and a sound recipe passes without a word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.families import byte_model
from tests.support.tiny import tiny

from treegraft.assemble import Parts
from treegraft.core.finding import Finding
from treegraft.evals.preflight import Preflight
from treegraft.parts import NoDisplay
from treegraft.settings.load import load_config
from treegraft.train import train


def calc(expression: str) -> str:
    """Works out an expression."""
    return expression


def any_number(completions: Sequence[str], **_: Any) -> list[float]:
    """Rewards numbers, right or wrong."""
    return [float(any(one.isdigit() for one in text)) for text in completions]


def nothing(completions: Sequence[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def recipe(model: str, tmp_path: Path) -> dict[str, Any]:
    rows = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "run": {"dir": str(tmp_path / "runs"), "num_updates": 0},
        "model": {"path": model},
        "tasks": {"kind": "dataset", "num_eval": 4, "dataset": {"train": [str(path)]}},
        "format": {"kind": "chat"},
        "tools": {"use": ["tests.evals.test_preflight:calc"]},
        "reward": {"funcs": ["math"]},
    }


def checked(recipe: dict[str, Any], *overrides: str) -> tuple[list[Finding], dict[str, str]]:
    async def check() -> tuple[list[Finding], dict[str, str]]:
        async with Parts.build(load_config(recipe, overrides), needs="prompts") as setup:
            preflight = Preflight(setup)
            sample = preflight.sample()
            return await preflight.findings(), sample

    return asyncio.run(check())


def faults(recipe: dict[str, Any], *overrides: str) -> dict[str, Finding]:
    found, _ = checked(recipe, *overrides)
    return {one.name: one for one in found if one.is_doubtful or not one.is_good}


def test_a_sound_recipe_has_no_faults_and_shows_its_first_task(recipe: dict[str, Any]) -> None:
    found, sample = checked(recipe)
    assert [one.name for one in found if not one.is_good] == []
    by_name = {one.name: one for one in found}
    assert by_name["reward"].value == "the reference earns more than a wrong answer"
    assert by_name["call of calc"].value == "is written and read back"
    assert sample["prompt"].endswith("What is 0 + 1?<|end|>\n<|assistant|>\n")
    assert '{"name": "calc", "arguments": {"expression": "1 + 1"}}' in sample["call"]
    assert "(the tool's result)" in sample["result"]
    assert sample["answer"] == "I know.\n\n\\boxed{1}<|end|>"
    assert not faults(recipe)


@pytest.mark.parametrize(
    ("overrides", "name", "part"),
    [
        (["rollout.max_completion_tokens=10"], "rollout.max_completion_tokens", "not even"),
        (["rollout.max_completion_tokens=60"], "rollout.max_completion_tokens", "do not fit"),
        (
            ["format.require_boxed=true", "format.system_prompt=Be brief."],
            "format.require_boxed",
            "does not ask for \\boxed",
        ),
        (
            ["format.require_think=true", "format.system_prompt=Be brief."],
            "format.require_think",
            "does not ask for <think>",
        ),
        (["tasks.dataset.reference_column=question"], "reward", "no more than a wrong answer"),
        (
            ["format.answer=regex", "format.answer_pattern=#### (.*)"],
            "correctness",
            "read as None",
        ),
        (
            ['reward.funcs=["tests.evals.test_preflight:nothing"]'],
            "reward",
            "no more than a wrong answer",
        ),
    ],
)
def test_what_would_make_every_reward_alike(
    recipe: dict[str, Any], overrides: list[str], name: str, part: str
) -> None:
    if "reference_column" in overrides[0]:
        # Words that the reward for numbers does not count.
        overrides = [*overrides, 'reward.funcs=["tests.evals.test_preflight:nothing"]']
    found = faults(recipe, *overrides)
    assert part in str(found[name])


def test_a_reward_that_tells_right_from_wrong_by_form_alone_passes(recipe: dict[str, Any]) -> None:
    assert "reward" not in faults(recipe, 'reward.funcs=["tests.evals.test_preflight:any_number"]')


class Told(NoDisplay):
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, text: str) -> None:
        self.lines.append(text)

    note = warn


def test_train_says_it_before_anything_else(recipe: dict[str, Any]) -> None:
    told = Told()
    recipe["reward"] = {"funcs": ["tests.evals.test_preflight:nothing"]}
    recipe["eval"] = {"at_start": False, "at_end": False}
    train(load_config(recipe), display=told)
    said = "\n".join(told.lines)
    assert "Treegraft's own template 'plain' takes its place" in said
    assert "no more than a wrong answer" in said


def test_words_that_a_closed_vocabulary_lacks_are_counted() -> None:
    # "r2 of e1 ?" and four words, of which the vocabulary has "of".
    world = {"search_world": {"hops": [1]}}
    found = faults(tiny(tasks=world, format={"system_prompt": "Be brief of Be"}))
    assert list(found) == ["unknown words"]
    assert found["unknown words"].value == "3 of 8 tokens in the first prompt"
    assert "Add them to the task source's vocabulary()" in found["unknown words"].note


def test_the_tiny_agent_of_the_demo_gets_no_warning() -> None:
    found, sample = checked(tiny())
    assert [str(one) for one in found if one.is_doubtful or not one.is_good] == []
    # The expert's own call and result, in the agent's words.
    assert "<search>" in sample["call"] and "<result>" in sample["result"]


def test_random_weights_that_nothing_teaches_are_named() -> None:
    found = faults(tiny(warmup={"num_steps": 0}))
    assert list(found) == ["warm-up"]
    assert "Set warmup.num_steps" in found["warm-up"].note
