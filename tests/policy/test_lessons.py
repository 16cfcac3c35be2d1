"""Lessons without rollouts: which are chosen with which weight, and their gradient."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.slow_learner import example_trees, gradient_of, make_learner
from tests.support.tiny import differing, tiny
from tests.support.trees import Part, build_tree

from treegraft.cli.doctor import missing_files
from treegraft.core.registry import CORE_NAMES, registered
from treegraft.core.types import StepContent, Tree
from treegraft.policy.learn.lessons import Lesson, LessonBook, shared_out, weight_of
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.scores import token_scores
from treegraft.runs.record import read_metrics
from treegraft.settings.load import load_config
from treegraft.settings.policy import LearnSettings, LossSettings
from treegraft.tasks.build import build_tasks
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import split_steps
from treegraft.traces.rollout_buffer import RolloutBuffer, own_traces
from treegraft.train import train


def lesson(name: str, marks: str = "pp", *, seed: int = 0) -> Tree:
    return build_tree(Part.of(marks, Part.of("sst", Part("ss"))), task_id=name, seed=seed)


def group(name: str, *rewards: float) -> Tree:
    return build_tree(Part.of("p", *(Part("s", reward=one) for one in rewards)), task_id=name)


def book(rewards: dict[str, float], **options: Any) -> LessonBook:
    found = LessonBook(**{"num_earlier": 0, "seed": 7} | options)
    for name, reward in rewards.items():
        found.add(Lesson(lesson(name), reward))
    return found


def weights(lessons: list[Tree]) -> dict[str, float]:
    return {tree.task.id: weight_of(tree) for tree in lessons}


def test_weights_by_hand() -> None:
    """Two tasks with means .5 and 1 after S, N = 1, 2: S = .5 + 1.5 = 2, N = 1 + 2 = 3, V = 2/3.
    Lessons of 1 weigh 1/3; one of .8 at the task where the agent earns 1 weighs 0."""
    trees = [group("a", 0.0, 1.0), group("b", 1.0, 1.0), group("unknown", 0.5)]
    trees = trees[:2]
    given = book({"a": 1.0, "b": 0.8, "z": 1.0}).choose(trees, ["z"], 3, (1.0, 2.0))
    assert given.value == (2.0, 3.0)
    assert weights(given.trees) == {"a": pytest.approx(1 / 3), "b": 0.0}
    assert given.metrics == {
        "lesson/num_lessons": 2.0,
        "lesson/num_earlier": 0.0,
        "lesson/weight_mean": pytest.approx(1 / 6),
        "lesson/value": pytest.approx(2 / 3),
    }
    # A task without a lesson counts in the value; a reward of 3 weighs at most 1.
    given = book({"a": 3.0}).choose([*trees, group("c", 0.0)], [], 3, (0.0, 0.0))
    assert given.value == (1.5, 3.0) and weights(given.trees) == {"a": 1.0}


def test_earlier_lessons_are_keyed_draws_without_doubles() -> None:
    names = [f"t{n}" for n in range(8)]
    stored = book(dict.fromkeys(names, 1.0), num_earlier=4)
    trees = [group("t0", 0.0, 1.0)]
    given = stored.choose(trees, names[:6], 5, (0.0, 0.0))
    drawn = [tree.task.id for tree in given.trees[1:]]
    assert given.trees[0].task.id == "t0"
    assert 1 <= len(drawn) <= 4 and set(drawn) <= set(names[1:6]) and len(set(drawn)) == len(drawn)
    assert given.metrics["lesson/num_earlier"] == len(drawn)
    assert stored.choose(trees, names[:6], 5, (0.0, 0.0)) == given
    others = [stored.choose(trees, names[:6], n, (0.0, 0.0)).trees for n in range(6, 12)]
    assert any([tree.task.id for tree in one[1:]] != drawn for one in others)
    # From the second epoch on tasks come again.
    assert stored.choose(trees, names[:6] * 3, 5, (0.0, 0.0)) == given
    assert stored.choose(trees, [], 5, (0.0, 0.0)).metrics["lesson/num_earlier"] == 0


def test_lessons_are_spread_over_the_mini_batches_that_hold_trees() -> None:
    lessons = [lesson(str(n)) for n in range(5)]
    shares = shared_out(lessons, [(0, 1), (), (2,)])
    assert {part: len(own) for part, own in shares.items()} == {(0, 1): 2, (2,): 3}


def test_law_1_the_gradient_is_that_of_lessons_learned_one_by_one() -> None:
    """c / |Z| · Σ w / n Σ log π, whatever shares a pack; the lesson of weight 0 counts in |Z|."""
    shown = [(lesson(str(n), "p" * (34 + n), seed=n), w) for n, w in enumerate((0.5, 0.0, 1.0))]
    lessons = [replace(tree, leaves=(replace(tree.leaves[0], advantage=w),)) for tree, w in shown]
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, LossSettings(lesson_coef=2.0))
    # Trees of one reward teach nothing, so the gradient is the lessons' alone.
    flat = [
        replace(tree, leaves=tuple(replace(leaf, advantage=0.0) for leaf in tree.leaves))
        for tree in example_trees(1)
    ]
    _, metrics = learner.learn(flat, lessons)
    expected = torch.zeros(())
    for tree, w in shown:
        batch = pack_trees([tree])
        logprobs = token_scores(twin, batch)[0]
        expected = expected - 2.0 / 3 * w * logprobs.mean()
    expected.backward()
    theirs = gradient_of(twin)
    assert float((descent.gradients[0] - theirs).norm() / theirs.norm()) < 1e-5
    assert metrics["learn/loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert metrics["learn/num_optimiser_steps"] == 1


LESSONS: dict[str, Any] = {
    "buffer": {"path": "expert", "encoder": "hashing"},
    "explore": {"num_leaves": 4, "num_first": 2, "fill_from": -0.5},
    "loss": {"lesson_coef": 2.0},
    "learn": {"num_lessons": 4},
    "warmup": {"num_steps": 4},
    "eval": {"every": 0, "at_start": False, "at_end": False},
}


def settings(folder: Path, name: str, num_updates: int = 3, **tables: Any) -> dict[str, Any]:
    own = {"num_updates": num_updates, "dir": str(folder), "name": name}
    return tiny(**{**LESSONS, "run": own, **tables})


def test_a_run_with_lessons_resumes_to_the_same(tmp_path: Path) -> None:
    def told(folder: Path) -> list[dict[str, float]]:
        return [
            {key: value for key, value in line.items() if not key.startswith(("time/", "tools/"))}
            for line in read_metrics(folder)
        ]

    whole = told(train(settings(tmp_path, "whole")).run_dir)
    assert whole[1]["lesson/num_lessons"] == 3 and whole[1]["lesson/num_earlier"] == 0
    assert whole[2]["lesson/num_earlier"] > 0
    half = train(settings(tmp_path, "half", 1)).run_dir
    state = json.loads(next(half.glob("checkpoints/*1/treegraft/state.json")).read_text())
    assert state["lesson_value"][1] == 3
    train(settings(tmp_path, "half"), resume=half)
    assert told(half) == whole


def test_own_lessons_are_the_same_after_a_resume(tmp_path: Path) -> None:
    """Law 6: of equally good trajectories the first one stays the lesson, also past the tenth
    update."""
    tables = {
        "buffer": {"path": "self", "encoder": "hashing", "grow": {"num_best": 2}},
        "tasks": {"num_train": 3, "search_world": {"hops": [2]}},
        "learn": {"lr": 1e-2, "num_lessons": 4},
        "warmup": {"num_steps": 64},
        "checkpoint": {"keep": 20},
    }
    whole = train(settings(tmp_path, "whole", 12, **tables)).run_dir
    lines = read_metrics(whole)
    assert lines[1]["lesson/num_lessons"] == 0 and lines[12]["lesson/num_lessons"] > 1
    # As it is after a kill in the last update.
    killed = Path(shutil.copytree(whole, tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoints" / "update-000012")
    train(None, resume=killed)
    assert differing(whole, killed) == []


def test_nothing_of_a_trajectory_of_others_is_an_own_trace() -> None:
    tree = answered(build_tree(Part.of("p", Part("r", reward=1.0), Part("s", reward=1.0))), "a")
    (own,) = own_traces([tree], num_best=2, min_reward=1.0, update=3)
    assert [trace.trajectory for trace in own] == ["3/0.1"]


def test_an_answer_of_no_letters_is_no_own_trace() -> None:
    """A judge may accept it; the buffer refuses such a step, which ended the run."""
    tree = build_tree(Part.of("p", Part("s", reward=1.0)))
    assert own_traces([answered(tree, "")], num_best=1, min_reward=1.0, update=3) == []
    assert len(own_traces([answered(tree, "a")], num_best=1, min_reward=1.0, update=3)) == 1


def answered(tree: Tree, answer: str) -> Tree:
    """The tree, with this answer in every step."""
    content = StepContent(answer=answer)
    return replace(tree, steps=tuple(replace(step, content=content) for step in tree.steps))


def test_own_lessons_fit_the_other_settings(tmp_path: Path) -> None:
    own = load_config(settings(tmp_path, "r", buffer={"path": "self"}))
    assert own.buffer.grow.num_best == 1
    # No file is sought under the name "self".
    assert [one.name for one in missing_files(own)] == []


def test_lessons_need_successes_in_a_buffer(tmp_path: Path) -> None:
    with raises_code("settings-contradict", "loss.lesson_coef"):
        load_config(tiny(loss={"lesson_coef": 1.0}))
    with raises_code("override-idle"):
        load_config("recipes/demo.toml", ["learn.num_lessons=3"])

    path = tmp_path / "b"
    with TraceBuffer(path, "hashing") as buffer:
        steps = [StepContent(answer="e1")]
        buffer.add(split_steps("x", "q ?", steps, reward=1.0, source="s", trajectory="0"))
    with raises_code("no-lesson"):
        train(settings(tmp_path, "r", buffer={"path": str(path), "encoder": "hashing"}))
    # Before the warm-up and before anything is written.
    assert not (tmp_path / "r").exists()
    assert LearnSettings().num_lessons == 0


def test_lessons_need_no_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by task; only a search embeds its key."""
    path = tmp_path / "b"
    with TraceBuffer(path, "hashing") as buffer:
        steps = [StepContent(answer="e1")]
        buffer.add(split_steps("x", "q ?", steps, reward=1.0, source="s", trajectory="0"))
    monkeypatch.setattr(TraceBuffer, "load_encoder", lambda _: pytest.fail("loaded"))
    stored = {"path": str(path), "encoder": "hashing"}
    own = load_config(settings(tmp_path, "r", buffer=stored))
    source = build_tasks(own.tasks, own.run.seed)
    assert RolloutBuffer(own, source, tmp_path / "r").is_due
    grafts = tiny(explore={"explorers": ["graft"]}, buffer=stored)
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        RolloutBuffer(load_config(grafts), source, tmp_path / "r")


@pytest.mark.parametrize("name", [*CORE_NAMES["explorer"], *registered("explorer")])
def test_own_lessons_go_with_every_explorer(name: str) -> None:
    """Settings that contradict each other would be refused here."""
    own = ["buffer.path=self", "loss.lesson_coef=2", "learn.num_lessons=36"]
    config = load_config("demo", [f'explorers=["{name}"]', *own])
    assert config.buffer.path == "self" and config.loss.lesson_coef == 2
