"""The example environments: equal worlds everywhere, experts that win in known words, tasks that
never meet, branches, and their recipes; then what each world alone has."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft import load_config, read_trees, train
from treegraft.core.errors import SettingError, ToolError, ToolUnavailable
from treegraft.core.types import Task

PACKAGES = {
    "sokoban": "",
    "babyai": "minigrid",
    "textworld": "textworld",
    "scienceworld": "scienceworld",
}
CLASSES = {
    "sokoban": "Sokoban",
    "babyai": "BabyAI",
    "textworld": "TextWorld",
    "scienceworld": "ScienceWorld",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sokoban": {"size": 4, "num_walls": 2, "moves": [2, 4]},
    "babyai": {"levels": ["GoToObjS6", "GoToLocalS6N3", "PickupLoc", "OpenDoor"]},
    "textworld": {"levels": [1, 4, 7]},
    "scienceworld": {"games": ["lifespan-longest-lived"], "num_warmup": 4},
}


def missing(name: str) -> str:
    """What the world needs and this machine lacks; "" if all is there."""
    package = PACKAGES[name]
    if package and find_spec(package) is None:
        return f"the package {package}"
    return "Java" if name == "scienceworld" and shutil.which("java") is None else ""


real = {
    name: pytest.mark.skipif(bool(missing(name)), reason=f"needs {missing(name)}")
    for name in PACKAGES
}
every = pytest.mark.parametrize("name", [pytest.param(one, marks=real[one]) for one in PACKAGES])
# The packages, and what they import, warn of what is to come in numpy and Python.
pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def module(name: str) -> Any:
    return importlib.import_module(f"treegraft.examples.environments.{name}")


def make_source(name: str, seed: int = 0, num: int = 20, **options: Any) -> Any:
    made = getattr(module(name), f"{CLASSES[name]}Tasks")
    return made(seed=seed, num_train=num, num_eval=num, **OPTIONS[name] | options)


def begun(name: str, task: Task) -> tuple[Any, str]:
    """A fresh world of a task, and what is seen first."""
    world = getattr(module(name), CLASSES[name])()
    if name == "sokoban":
        return world, world.reset(task.question) or ""
    return world, world.reset(**task.columns)


def act(world: Any, action: str) -> str:
    return str((world.move if hasattr(world, "move") else world.act)(action))


def actions_of(source: Any, task: Task, seed: int = 0) -> list[str]:
    return [step.calls[0].body for step in source.expert(task, seed)[:-1]]


def told_by(name: str, task: Task, actions: Sequence[str]) -> list[str]:
    world, first = begun(name, task)
    return [first, *(act(world, action) for action in actions)]


# ---------------------------------------------------------------------- all worlds


@every
def test_the_expert_wins_in_known_words_and_only_at_its_last_action(name: str) -> None:
    source = make_source(name)
    words = set(source.vocabulary())
    num = 2 if name == "scienceworld" else 10
    for task in [*source.train_tasks()[:num], *source.eval_tasks()[:1]]:
        actions = actions_of(source, task)
        world, first = begun(name, task)
        told = [task.question, first]
        for action in actions:
            assert not world.done and world.get_reward() < 1.0
            told.append(act(world, action))
        assert world.done and world.get_reward() == 1.0
        assert set(" ".join([*told, *actions]).split()) <= words


@every
def test_training_evaluation_and_warmup_share_no_world(name: str) -> None:
    source = make_source(name, num=40)
    sets = [source.train_tasks(), source.eval_tasks(), source.warmup_tasks(40, 3)]
    if name == "sokoban":
        read = module(name).read_question
        worlds = [{read(task.question)[0] for task in tasks} for tasks in sets]
    else:
        worlds = [{json.dumps(task.columns) for task in tasks} for tasks in sets]
    assert all(len(one) > 3 for one in worlds)
    assert not (worlds[0] & worlds[1] or worlds[0] & worlds[2] or worlds[1] & worlds[2])
    assert sets[0] == make_source(name, num=40).train_tasks() != make_source(name, 1, 40)


@every
def test_a_world_is_the_same_in_another_process(name: str) -> None:
    """Sets of texts have another order there."""
    task = make_source(name).train_tasks()[0]
    actions = actions_of(make_source(name), task)
    code = (
        "import json\n"
        "from tests.project.test_example_environments import make_source, told_by, actions_of\n"
        f"source = make_source('{name}')\n"
        "task = source.train_tasks()[0]\n"
        f"print(json.dumps(told_by('{name}', task, actions_of(source, task))))\n"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(said.splitlines()[-1]) == told_by(name, task, actions)


@every
def test_a_branch_goes_on_as_its_trunk_does(name: str) -> None:
    """A copy made on the way, or a replay of the actions so far, tells the same from there on, and
    leaves the first world as it was."""
    from copy import deepcopy

    source = make_source(name)
    for task in source.train_tasks()[:1]:
        actions = actions_of(source, task)
        cut = len(actions) // 2
        trunk = begun(name, task)[0]
        for action in actions[:cut]:
            act(trunk, action)
        if trunk.capability == "replay":
            branch = begun(name, task)[0]
            for action in actions[:cut]:
                act(branch, action)
        else:
            branch = trunk.fork() if hasattr(trunk, "fork") else deepcopy(trunk)
        rest = [act(branch, action) for action in actions[cut:]]
        assert branch.done and not trunk.done
        assert [act(trunk, action) for action in actions[cut:]] == rest


@every
@pytest.mark.smoke
def test_the_recipe_trains(name: str, tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}", "explorers=['entropy', 'graft']"]
    result = train(load_config(name, overrides, smoke=True), recipe=name)
    tree = read_trees(result.run_dir)[0]
    assert len(tree.leaves) == 4
    for path in tree.trajectories():
        world = begun(name, path.task)[0]
        for call in (call for content in path.contents for call in content.calls):
            if not world.done:
                try:
                    act(world, call.body)
                except ToolError:
                    continue
        assert path.leaf.environment_reward == world.get_reward()


@pytest.mark.parametrize("name", PACKAGES)
def test_the_former_names_say_where_it_is(name: str) -> None:
    for setting in ("tasks", "environment"):
        with raises_code("settings-contradict", match=f"treegraft.examples.environments.{name}:"):
            load_config({setting: {"kind": name}})
    with raises_code("unknown-setting", match=f"{CLASSES[name]} is an example"):
        load_config({"tasks": {name: {"levels": [1]}}})


# ---------------------------------------------------------------------- Sokoban


def played(question: str, *moves: str) -> Any:
    game = module("sokoban").Sokoban()
    game.reset(question)
    for move in moves:
        game.move(move)
    return game


def test_a_box_is_pushed_and_not_pulled_and_not_into_a_wall() -> None:
    game = played("4x4 player a2 boxes b2 goals d1 walls d2")
    assert game.move("right") == "player b2 boxes c2"
    assert game.move("left") == "player a2 boxes c2"
    assert [game.move(" Right ") for _ in range(2)] == ["player b2 boxes c2"] * 2
    assert not game.done and game.get_reward() == 0.0
    solved = played("3x3 player a2 boxes b2 goals c2")
    assert solved.move("right") == "player b2 boxes c2 solved" and solved.get_reward() == 1.0
    with pytest.raises(ValueError, match="expected a board such as"):
        played("2 + 2 = ?")


def test_distances_on_paper() -> None:
    sokoban = module("sokoban")
    known = sokoban.distances(sokoban.Board(3, frozenset(), (2, 1)))
    assert known[(0, 1), (1, 1)] == 1
    # Around the box to its left: up, left, left, down, and then the push.
    assert known[(2, 1), (1, 1)] == 5
    # In a corner, and on the edge opposite the goal.
    assert not [box for _, box in known if box in ((0, 0), (0, 1))]


@given(st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_distances_obey_bellman(seed: int) -> None:
    sokoban = module("sokoban")
    task = make_source("sokoban", seed).train_tasks()[seed % 20]
    board, start = sokoban.read_question(task.question)
    known = sokoban.distances(board)
    for state, distance in known.items():
        after = [known.get(board.moved(state, name)) for name in sokoban.DIRECTIONS]
        nearest = min(one for one in after if one is not None)
        assert distance == (0 if board.is_solved(state) else 1 + nearest)
    assert known[start] == task.columns["moves"]


def test_an_imperfect_solver_walks_to_and_fro_or_loses_the_board() -> None:
    sokoban = module("sokoban")
    detours = make_source("sokoban", num=30, detour_prob=0.5)
    errs = make_source("sokoban", num=30, error_prob=0.5)
    num_extra = 0
    num_moves = 0
    num_best = 0
    answers = set()
    for task in detours.train_tasks():
        moves = actions_of(detours, task)
        num_extra += len(moves) - task.columns["moves"]
        assert played(task.question, *moves).get_reward() == 1.0
        board, state = sokoban.read_question(task.question)
        for move in actions_of(errs, task):
            num_moves += 1
            num_best += move in sokoban.best_moves(board, state)
            state = board.moved(state, move)
        answer = errs.expert(task, 0)[-1].answer
        answers.add(answer)
        assert (answer == "solved") == board.is_solved(state)
        assert answer == "solved" or state not in sokoban.distances(board)
    # 90 moves with a detour of two before every second one: 90, with a standard error of 9.5.
    assert 60 < num_extra < 120
    assert answers == {"solved", "stuck"}
    # Half of the moves are wrong, but for those in states where every move is right.
    assert 0.35 < num_best / num_moves < 0.62
    for task in errs.eval_tasks():
        assert len(actions_of(errs, task)) == task.columns["moves"]


# ---------------------------------------------------------------------- BabyAI and TextWorld


@real["babyai"]
def test_a_mission_ends_without_success_when_actions_run_out() -> None:
    world, _ = begun("babyai", make_source("babyai").train_tasks()[0])
    told = ""
    while not world.done:
        told = world.act("drop")
    assert told.endswith(" no actions left") and world.get_reward() == 0.0
    with pytest.raises(SettingError):
        make_source("babyai", levels=["GoToObjS7"])


@real["textworld"]
def test_the_wrong_thing_loses_and_games_are_those_of_the_package() -> None:
    from textworld import GameOptions
    from textworld.challenges.tw_treasure_hunter import treasure_hunter

    for level in (1, 2, 7):
        options = GameOptions()
        options.seeds = 11
        theirs = treasure_hunter.make({"level": level}, options)
        ours = module("textworld").game_of(level, 11)
        assert theirs.metadata["uuid"] == ours.metadata["uuid"]
        assert theirs.objective == ours.objective and theirs.walkthrough == ours.walkthrough
    for task in make_source("textworld", num=40).train_tasks():
        world, first = begun("textworld", task)
        wanted = first.removeprefix("find ").partition(" ;")[0]
        takes = [name for name in world._commands() if name.startswith("take ")]
        if wrong := [name for name in takes if name.removeprefix("take ") != wanted]:
            assert world.act(wrong[0]).endswith(" lost")
            assert world.done and world.get_reward() == 0.0
            return
    raise AssertionError("no world begins beside the wrong thing")


# ---------------------------------------------------------------------- ScienceWorld


@real["scienceworld"]
def test_the_expert_looks_before_it_focuses() -> None:
    path = ("go to kitchen", "focus on lamp", "focus on cup", "go to hallway", "look around")
    assert module("scienceworld").with_looks((*path, "focus on pen")) == [
        "go to kitchen",
        "look around",
        "focus on lamp",
        "focus on cup",
        "go to hallway",
        "look around",
        "focus on pen",
    ]


@real["scienceworld"]
def test_ends_and_their_reasons() -> None:
    world = module("scienceworld").ScienceWorld()
    world.reset("lifespan-longest-lived", 0, max_actions=2)
    assert world.act("no such action") and not world.done
    assert world.act("wait1").endswith("no actions left") and world.done
    world.reset("lifespan-longest-lived", 0, max_actions=30)
    world.act("teleport to outside")
    assert world.act("focus on axe").endswith("task failed") and world.get_reward() == -1.0


@real["scienceworld"]
def test_worlds_are_lost_with_their_process_and_later_ones_get_another() -> None:
    scienceworld = module("scienceworld")
    world = scienceworld.ScienceWorld()
    world.reset("lifespan-longest-lived", 0, max_actions=9)
    os.kill(scienceworld.simulator_of(os.getpid()).process.pid, signal.SIGKILL)
    with pytest.raises(ToolUnavailable):
        world.act("wait")
    assert "hallway" in world.reset("lifespan-longest-lived", 0, max_actions=9)
