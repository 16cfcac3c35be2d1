"""Runs with environments, from recipe to record: training, evaluation, resume, and what is refused
before it begins."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import differing, tiny
from tests.support.worlds import KeyDoor

from treegraft.assemble import Parts
from treegraft.core.interfaces import Engine
from treegraft.core.types import Status
from treegraft.evals.agent import answer_question
from treegraft.evals.evaluate import evaluate_checkpoint
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.load import load_config
from treegraft.tools.environments.own import EnvironmentTool
from treegraft.train import train


class Dice:
    """Asynchronous, random by its seed, slow by chance: the sum must reach what the task asks
    for."""

    capability = "replay"

    async def reset(self, seed: int, question: str) -> str:
        self.die = random.Random(seed)
        self.total = 0
        self.wanted = len(question)
        await asyncio.sleep(random.random() / 200)
        return f"e{self.die.randrange(8)}"

    async def roll(self) -> str:
        """Rolls a die and adds it up."""
        await asyncio.sleep(random.random() / 200)
        self.total += self.die.randrange(4)
        return f"e{min(7, self.total)}"

    def get_reward(self) -> float:
        return float(self.total > 2)


def make_engine(*, tokenizer: Any, **_: Any) -> ScriptedEngine:
    """Agents that roll once or more, by what they see; unsure after a first result."""

    def agent(path: str) -> str:
        num = path.count("</result>")
        last = path.split("</result>")[-2].split()[-1] if num else "e9"
        return (
            "<roll> </roll>" if num < 1 + int(last[1:]) % 3 else "<answer> \\boxed{ e1 } </answer>"
        )

    return ScriptedEngine(
        agent,
        tokenizer,
        entropy=lambda path: float("</result>" in path),
        latency_s=lambda: random.random() / 200,
    )


SETTINGS = tiny(
    run={"num_updates": 2},
    environment={"kind": "tests.tools.test_environment_runs:Dice"},
    engine={"kind": "tests.tools.test_environment_runs:make_engine"},
    explore={
        "explorers": ["entropy"],
        "num_leaves": 4,
        "entropy": {"num_starts": 2, "probe_tokens": 2},
    },
    reward={"funcs": ["environment"]},
    eval={"num_samples": 2},
    warmup={"num_steps": 0},
)
del SETTINGS["reward"]["accuracy"]


def run(folder: Path, name: str, **changes: Any) -> Path:
    return train(
        {**SETTINGS, "run": {**SETTINGS["run"], "dir": str(folder), "name": name}, **changes}
    ).run_dir


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs"), "first")


def test_training_and_evaluation_with_an_environment(done: Path) -> None:
    trees = read_trees(done)
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    assert len(leaves) == 24 and all(leaf.status is Status.COMPLETED for leaf in leaves)
    assert {leaf.reward for leaf in leaves} == {0.0, 1.0}
    assert all(
        leaf.reward == leaf.environment_reward == leaf.reward_parts["environment"]
        for leaf in leaves
    )
    assert all("\n" in tree.task.question for tree in trees), (
        "the first observation stands in the prompt"
    )
    last = read_metrics(done)[-1]
    assert last["environment/num_replays"] == last["branch/num_branches"] > 0
    assert last["environment/num_opened"] > last["environment/num_replays"]
    assert (
        last["environment/num_mismatches"]
        == last["environment/num_failures"]
        == last["rollout/failed_frac"]
        == 0
    )
    assert 0 <= last["eval/environment_reward"] <= 1
    # A hop question of search_world has a reference, and that decides what is correct.
    assert all(
        leaf.is_correct is False or tree.task.reference[0] == "e1"
        for tree in trees
        for leaf in tree.leaves
    )


def test_siblings_agree_on_all_that_they_share(done: Path) -> None:
    """Replays saw what the tree shows: a die that went on otherwise would give other sums below one
    step."""
    for tree in read_trees(done):
        for path in tree.trajectories():
            sums = [int(one.text[1:]) for content in path.contents for one in content.observations]
            die = Dice()
            seed = EnvironmentTool.reset_arguments(path.task)["seed"]
            asyncio.run(die.reset(seed, ""))
            assert sums == [int(asyncio.run(die.roll())[1:]) for _ in sums]


def test_two_runs_are_one_whatever_the_latencies(done: Path, tmp_path: Path) -> None:
    again = run(tmp_path, "first")
    assert differing(done, again) == []


def test_stopped_and_resumed_is_as_if_nothing_had_happened(done: Path, tmp_path: Path) -> None:
    half = run(
        tmp_path,
        "first",
        run={**SETTINGS["run"], "num_updates": 1, "dir": str(tmp_path), "name": "first"},
    )
    train(load_config(half / "config.json", ["run.num_updates=2"]), resume=half)
    # Where the first part ended, its metrics hold the gain up to there, and a best checkpoint names
    # its settings.
    assert [
        name
        for name in differing(done, half)
        if not name.endswith(("state.json", "config.json", "metrics.jsonl"))
    ] == []


@pytest.mark.smoke
def test_eval_and_run_open_environments_of_their_own(done: Path) -> None:
    result = evaluate_checkpoint(done)
    assert result.metrics["eval/failed_frac"] == 0 and "eval/environment_reward" in result.metrics
    trajectory, _ = answer_question(done, "r2 of e3 ?")
    assert trajectory.leaf.environment_reward in (0.0, 1.0) and trajectory.task.question.startswith(
        "r2 of e3 ?\ne"
    )


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"environment": {"kind": "tests.support.worlds:LockedKeyDoor"}}, "settings-contradict"),
        (
            {"environment": {"kind": "tests.support.worlds:ReplayedKeyDoor", "capability": "none"}},
            "settings-contradict",
        ),
        ({"environment": {}}, "settings-contradict"),
        (
            {"environment": {"kind": "tests.tools.test_environment_runs:Unrewarded"}},
            "settings-contradict",
        ),
        ({"environment": {"kind": "world"}}, "settings-contradict"),
        (
            {"environment": {"kind": "tests.tools.test_environment_runs:Searching"}},
            "tools-same-name",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_run(
    changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    with raises_code(code):
        run(tmp_path, "refused", **changes)
    assert not (tmp_path / "refused").exists() and KeyDoor.live == []


def test_grafts_need_an_environment_that_can_be_tried() -> None:
    config = load_config(
        tiny(
            environment={"kind": "tests.support.worlds:LockedKeyDoor"},
            explore={"explorers": ["graft"], "graft": {"num_hybrid": 2}},
            buffer={"path": "expert"},
        )
    )
    with raises_code("settings-contradict", "explore.explorers"):
        asyncio.run(Parts.build(config).__aenter__())


def test_an_environment_without_branches_needs_no_capability(tmp_path: Path) -> None:
    path = run(
        tmp_path,
        "plain",
        environment={"kind": "tests.support.worlds:LockedKeyDoor"},
        explore={"num_leaves": 2},
    )
    assert all(leaf.environment_reward == 0.0 for tree in read_trees(path) for leaf in tree.leaves)
    assert KeyDoor.live == []


class Unrewarded:
    """Gives nothing."""

    capability = "fork"

    def reset(self) -> None: ...

    def look(self) -> str:
        """Looks."""
        return ""


class Searching(Unrewarded):
    """Has a tool that the tasks have as well."""

    def get_reward(self) -> float:
        return 0.0

    def search(self, query: str) -> str:
        """Searches."""
        return query


def handed_over(**given: Any) -> ScriptedEngine:
    assert sorted(given) == ["model_path", "settings", "tokenizer"]
    return ScriptedEngine([], given["tokenizer"])


def test_an_engine_of_your_own_gets_settings_and_a_path_but_no_model() -> None:
    config = load_config(tiny(engine={"kind": "tests.tools.test_environment_runs:handed_over"}))

    async def engine() -> Engine:
        async with Parts.build(config) as parts:
            return parts.engine

    assert type(asyncio.run(engine())) is ScriptedEngine
