"""BabyAI and TextWorld: worlds by number, experts that win, replays, copies, words, a training."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.core.errors import ToolError
from treegraft.core.types import Task
from treegraft.extras.environments import drawn
from treegraft.extras.environments.babyai.environment import BabyAI, babyai_environments
from treegraft.extras.environments.babyai.plugin import BabyAISettings
from treegraft.extras.environments.babyai.tasks import BabyAITasks
from treegraft.extras.environments.drawn import DONE, NUM_WARMUP_WORLDS, DrawnTasks
from treegraft.extras.environments.textworld.environment import (
    TextWorld,
    textworld_environments,
)
from treegraft.extras.environments.textworld.environment import drawn as drawn_game
from treegraft.extras.environments.textworld.plugin import TextWorldSettings
from treegraft.extras.environments.textworld.tasks import TextWorldTasks
from treegraft.runs.record import read_trees
from treegraft.settings.load import load_config
from treegraft.settings.tools import EnvironmentSettings
from treegraft.train import train

PACKAGES = {"babyai": "minigrid", "textworld": "textworld"}
LEVELS: dict[str, list[Any]] = {
    "babyai": ["GoToObjS6", "GoToLocalS6N3", "PickupLoc", "OpenDoor", "PutNextLocalS5N3"],
    "textworld": [1, 4, 7, 12],
}
real = {
    family: pytest.mark.skipif(
        find_spec(package) is None,
        reason=f"needs {package}: pip install 'treegraft[{family}]'",
    )
    for family, package in PACKAGES.items()
}
both = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=real[family]) for family in PACKAGES]
)
# Both packages, and what they import, warn of what is to come in numpy and Python.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def make_source(family: str, seed: int = 0, num: int = 20) -> DrawnTasks:
    made = BabyAITasks if family == "babyai" else TextWorldTasks
    return made(LEVELS[family], seed=seed, num_train=num, num_eval=num)


def begun(task: Task) -> tuple[Any, str]:
    world: Any = BabyAI() if task.id.startswith("babyai") else TextWorld()
    return world, world.reset(**task.columns)


def actions_of(source: DrawnTasks, task: Task) -> list[str]:
    steps = source.expert(task, 0)
    assert steps is not None and steps[-1].answer == DONE
    return [step.calls[0].body for step in steps[:-1]]


def told_by(task: Task, actions: list[str]) -> list[str]:
    world, first = begun(task)
    return [first, *(world.act(action) for action in actions)]


@both
def test_the_expert_wins_in_known_words_and_only_at_its_last_action(family: str) -> None:
    source = make_source(family)
    words = set(source.vocabulary())
    for task in [*source.train_tasks()[:10], *source.eval_tasks()[:5]]:
        actions = actions_of(source, task)
        world, first = begun(task)
        told = [task.question, first]
        for action in actions:
            assert not world.done and world.get_reward() == 0.0
            told.append(world.act(action))
        assert world.done and world.get_reward() == 1.0
        assert set(" ".join([*told, *actions]).split()) <= words


@both
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 20), data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_replayed_prefix_and_a_copy_go_on_alike(
    family: str, seed: int, cut: int, data: st.DataObject
) -> None:
    """Two objects after equal actions, and a copy made on the way, tell the same from there on,
    and what is done to the copy leaves the first as it was."""
    source = make_source(family, seed, num=4)
    task = data.draw(st.sampled_from(source.train_tasks()))
    actions = actions_of(source, task)
    cut = min(cut, len(actions) - 1)
    first, again = begun(task)[0], begun(task)[0]
    for action in actions[:cut]:
        assert first.act(action) == again.act(action)
    copy = first.fork()
    rest = [copy.act(action) for action in actions[cut:]]
    assert copy.done and not first.done and first.get_reward() == 0.0
    for world in (again, first):
        assert [world.act(action) for action in actions[cut:]] == rest
        assert world.get_reward() == copy.get_reward() == 1.0


@both
def test_training_evaluation_and_warmup_share_no_world(family: str) -> None:
    source = make_source(family, num=60)
    sets = [source.train_tasks(), source.eval_tasks(), source.warmup_tasks(400, 3)]
    worlds = [{task.columns["world"] for task in tasks} for tasks in sets]
    assert [len(one) for one in worlds[:2]] == [60, 60]
    assert 100 < len(worlds[2]) <= NUM_WARMUP_WORLDS
    assert not (worlds[0] & worlds[1] or worlds[0] & worlds[2] or worlds[1] & worlds[2])
    assert [task.columns["level"] for task in sets[0][:3]] == LEVELS[family][:3]
    other = make_source(family, seed=1, num=60)
    assert not worlds[0] & {task.columns["world"] for task in other.train_tasks()}
    assert source.expert(Task(id="x", question="2 + 2", reference=()), 0) is None


@both
def test_a_world_is_the_same_in_another_process(family: str) -> None:
    task = make_source(family).train_tasks()[2]
    actions = actions_of(make_source(family), task)
    code = (
        "import json, sys\n"
        "from tests.extras.test_drawn_worlds import make_source, told_by, actions_of\n"
        f"source = make_source('{family}')\n"
        "task = source.train_tasks()[2]\n"
        "print(json.dumps(told_by(task, actions_of(source, task))))\n"
    )
    # Sets of texts have another order there.
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(said.splitlines()[-1]) == told_by(task, actions)


@both
def test_an_unknown_action_is_an_error_that_changes_nothing(family: str) -> None:
    source = make_source(family)
    task = source.train_tasks()[1]
    world, _ = begun(task)
    with raises_code("query-unknown"):
        world.act("take off")
    assert [world.act(action) for action in actions_of(source, task)] and world.done


@real["textworld"]
def test_the_wrong_thing_loses_and_games_are_those_of_the_package() -> None:
    from textworld import GameOptions
    from textworld.challenges.tw_treasure_hunter import treasure_hunter

    for level in (1, 2, 7, 13):
        options = GameOptions()
        options.seeds = 11
        theirs, ours = treasure_hunter.make({"level": level}, options), drawn_game(level, 11)
        assert theirs.metadata["uuid"] == ours.metadata["uuid"]
        assert theirs.objective == ours.objective and theirs.walkthrough == ours.walkthrough
    for task in make_source("textworld", num=40).train_tasks():
        world, first = begun(task)
        wanted = first.removeprefix("find ").partition(" ;")[0]
        takes = [name for name in world._commands if name.startswith("take ")]
        wrong = [name for name in takes if name.removeprefix("take ") != wanted]
        if wrong and task.columns["level"] < 11:
            assert world.act(wrong[0]).endswith(" lost")
            assert world.done and world.get_reward() == 0.0
            return
    raise AssertionError("no world begins beside the wrong thing")


@real["babyai"]
def test_what_is_seen_stands_where_it_is() -> None:
    """Turning left moves what is ahead to the right; a step brings it nearer by one."""
    for task in make_source("babyai", num=60).train_tasks():
        world, first = begun(task)
        if (
            task.category == "GoToObjS6"
            and "forward 2 wall" in first
            and "left 2 wall" not in first
        ):
            break
    thing = first.partition("see ")[2].partition(" forward 2")[0]
    if {"left", "right"} & set(thing.split()):
        return
    copy = world.fork()
    assert f"{thing} right 2" in copy.act("left")
    near = world.act("forward")
    assert f"{thing} forward 1" in near and near.endswith(" success") and world.done


@real["babyai"]
def test_a_mission_ends_without_success_when_actions_run_out() -> None:
    world, _ = begun(make_source("babyai").train_tasks()[0])
    told = ""
    for _ in range(10_000):
        if world.done:
            break
        told = world.act("drop")
    assert told.endswith(" no actions left") and world.get_reward() == 0.0


@real["textworld"]
def test_a_house_of_like_things_is_drawn_without_a_warning() -> None:
    """The package warns authors of grammars if two things need an adjective, as in this world."""
    from textworld import GenerationWarning  # the import sets a filter of its own

    with warnings.catch_warnings():
        warnings.simplefilter("error", GenerationWarning)
        assert drawn_game(11, 408352656).objective


@real["babyai"]
def test_an_unknown_level_is_refused() -> None:
    with raises_code("unknown-game"):
        BabyAI().reset("GoToObjS7", 0)


def test_what_is_missing_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in PACKAGES:
        with raises_code("settings-contradict", "environment.kind"):
            load_config({"tasks": {"kind": family}})
    monkeypatch.setattr(drawn, "find_spec", lambda name: None)
    makers: dict[str, Callable[[EnvironmentSettings], object]] = {
        "babyai": babyai_environments,
        "textworld": textworld_environments,
    }
    for family, make in makers.items():
        with raises_code("package-missing", match=rf"pip install 'treegraft\[{family}\]'"):
            make(EnvironmentSettings(kind=family))
    assert BabyAISettings().levels and max(TextWorldSettings().levels) <= 20


@both
@pytest.mark.smoke
def test_the_recipe_trains(family: str, tmp_path: Path) -> None:
    own = [f"run.dir={tmp_path}", "explorers=['entropy', 'graft']"]
    result = train(load_config(family, own, smoke=True), recipe=family)
    (tree, _) = read_trees(result.run_dir)
    assert len(tree.leaves) == 4
    for path in tree.trajectories():
        world, _ = begun(path.task)
        for call in (call for content in path.contents for call in content.calls):
            if not world.done:
                try:
                    world.act(call.body)
                except ToolError:
                    continue
        assert path.leaf.environment_reward == world.get_reward()
