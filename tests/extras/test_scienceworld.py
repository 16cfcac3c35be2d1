"""ScienceWorld: gold paths, equal worlds everywhere, ends and their reasons, replays, and a Java
process that ends with ours."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.error_codes import raises_code

from treegraft.core.types import Task, ToolCall
from treegraft.extras.environments.scienceworld import java as scienceworld_java
from treegraft.extras.environments.scienceworld.environment import (
    COMPLETED,
    FAILED,
    NO_ACTIONS_LEFT,
    Game,
    ScienceWorld,
    playing,
    scienceworld_environments,
    splits_of,
    with_looks,
)
from treegraft.extras.environments.scienceworld.java import why_missing
from treegraft.extras.environments.scienceworld.plugin import ScienceWorldSettings
from treegraft.extras.environments.scienceworld.tasks import DONE, ScienceWorldTasks
from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.load import load_config
from treegraft.settings.tools import EnvironmentSettings, ToolsSettings
from treegraft.tools.environments.sessions import Environments
from treegraft.tools.toolbox import Toolbox
from treegraft.train import train

real = pytest.mark.skipif(bool(why_missing()), reason=f"needs {why_missing()}")
LONGEST = Game("lifespan-longest-lived", 0, "easy")
SOME = ("go to kitchen", "look around", "nonsense", "go to outside", "look around", "wait")


@pytest.fixture(scope="module", autouse=True)
def ended_java() -> Iterator[None]:
    """Java's second compiler takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield
    scienceworld_java.close()


def make_source(*games: str, num_train: int = 40, num_eval: int = 20) -> ScienceWorldTasks:
    own = ScienceWorldSettings(games=list(games or (LONGEST.name,)), num_warmup=4)
    return ScienceWorldTasks(own, seed=0, num_train=num_train, num_eval=num_eval)


def actions_of(source: ScienceWorldTasks, task: Task) -> list[str]:
    *steps, last = source.expert(task, 0) or ()
    assert last.answer == DONE
    return [step.calls[0].body for step in steps]


def begun(max_actions: int = 30) -> ScienceWorld:
    world = ScienceWorld()
    world.reset(*LONGEST, max_actions)
    return world


def told(game: Game, actions: Sequence[str]) -> list[str]:
    with playing(game) as played:
        return [played.begun(), *map(played.act, actions)]


# ---------------------------------------------------------------------- without Java


def test_the_expert_looks_before_it_focuses() -> None:
    path = ("go to kitchen", "focus on lamp", "focus on cup", "go to hallway", "look around")
    assert with_looks(
        (*path, "pick up pen", "focus on pen", "teleport to attic", "focus on hat")
    ) == (
        *("go to kitchen", "look around", "focus on lamp", "focus on cup", "go to hallway"),
        *("look around", "pick up pen", "focus on pen"),
        *("teleport to attic", "look around", "focus on hat"),
    )


def test_what_is_missing_is_told_in_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    expected = (
        r"needs .*Java; run: pip install 'treegraft\[environments\]', and for Java, .*apt-get"
    )
    with raises_code("package-missing", match=f"^tasks.kind: ScienceWorld {expected}"):
        make_source()
    with raises_code("package-missing", match=f"^environment.kind: ScienceWorld {expected}"):
        scienceworld_environments(EnvironmentSettings(kind="scienceworld"))


def test_tasks_without_their_environment_are_refused() -> None:
    with raises_code("settings-contradict", "environment.kind"):
        load_config("scienceworld", ["environment.kind="])


# ---------------------------------------------------------------------- tasks


@real
@pytest.mark.smoke
def test_training_warmup_and_evaluation_share_no_world() -> None:
    source = make_source(LONGEST.name, "find-plant")
    sets = [source.train_tasks(), source.warmup_tasks(60, 0), source.eval_tasks()]
    worlds = [{(task.category, task.columns["variation"]) for task in tasks} for tasks in sets]
    assert not (worlds[0] & worlds[1] or worlds[0] & worlds[2] or worlds[1] & worlds[2])
    assert [len(tasks) for tasks in sets] == [40, 60, 20] and len(worlds[1]) == 8
    assert [task.category for task in sets[0][:3]] == [LONGEST.name, "find-plant", LONGEST.name]
    splits = splits_of(LONGEST.name, "easy")
    # Of 125 variations half, a quarter and a quarter, as the paper has it.
    assert tuple(map(len, splits)) == (62, 31, 32)
    assert {number for name, number in worlds[2] if name == LONGEST.name} <= {*splits.dev}
    # What there is: 62 variations less 4.
    assert len(make_source(num_train=600).train_tasks()) == 58


@real
def test_what_is_refused() -> None:
    with raises_code("unknown-game"):
        make_source("find-plants")
    own = ScienceWorldSettings(games=["power-component"], simplifications=["noElectricalAction"])
    with raises_code("game-needs-electricity"):
        ScienceWorldTasks(own, seed=0, num_train=1, num_eval=1)


@real
def test_gold_paths_complete_their_tasks_in_known_words() -> None:
    source = make_source(LONGEST.name, "lifespan-shortest-lived")
    words = set(source.vocabulary())
    for task in source.train_tasks()[:2]:
        actions = actions_of(source, task)
        focus = next(n for n, action in enumerate(actions) if action.startswith("focus"))
        assert "look around" in actions[:focus]
        world = ScienceWorld()
        first = world.reset(**task.columns)
        results = [world.act(action) for action in actions]
        assert world.done and world.get_reward() == 1.0 and results[-1].endswith(COMPLETED)
        assert set(" ".join([task.question, first, *actions, *results]).split()) <= words
        world.close()
    assert source.expert(Task(id="other", question="?", reference=()), 0) is None


# ---------------------------------------------------------------------- worlds


@real
@pytest.mark.smoke
def test_equal_actions_have_equal_results_beside_other_games_and_in_other_processes() -> None:
    alone = told(LONGEST, SOME)
    with playing(LONGEST) as one, playing(Game("find-plant", 3, "easy")) as other:
        mixed = [one.begun()]
        for action in SOME:
            other.act("wait")
            mixed.append(one.act(action))
    assert mixed == alone
    assert "No known action matches that input." in alone[3]
    script = (
        "from treegraft.extras.environments.scienceworld.environment import Game, playing\n"
        f"with playing(Game(*{tuple(LONGEST)!r})) as one:\n"
        f"    print([one.begun(), *map(one.act, {SOME!r})])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert answer.stdout.decode().strip() == str(alone)


@real
def test_ends_and_their_reasons() -> None:
    world = begun(max_actions=2)
    assert world.act("no such action") and not world.done
    assert world.act("wait1").endswith(NO_ACTIONS_LEFT) and world.done
    assert 0.0 <= world.get_reward() < 1.0
    world.close()
    wrong = begun()
    for action in ("teleport to outside", "focus on axe"):
        last = wrong.act(action)
    assert last.endswith(FAILED) and wrong.done and wrong.get_reward() == -1.0
    wrong.close()


@real
def test_a_branch_repeats_its_actions() -> None:
    source = make_source()
    task = source.train_tasks()[0]
    calls = [ToolCall("act", action) for action in actions_of(source, task)]
    settings = EnvironmentSettings(kind="scienceworld")
    worlds = Environments(scienceworld_environments(settings), settings)
    box = Toolbox(worlds.kind.tools, ToolsSettings(), environments=worlds)

    async def work() -> None:
        async with box.sessions(task) as sessions:
            assert "Your task is to find" in (await sessions.prepare(1)).question
            session = await sessions.start(0).open()
            for call in calls[:3]:
                await session.call(call)
            point = session.mark()
            point.reserve(1)
            branch = await point.open()
            for call in calls[3:]:
                assert (await session.call(call)).text == (await branch.call(call)).text
            assert await session.reward() == await branch.reward() == 1.0

    asyncio.run(work())
    counted = worlds.take_metrics()
    assert (counted["environment/num_replays"], counted["environment/num_replayed_calls"]) == (1, 3)
    assert counted["environment/num_mismatches"] == 0


# ---------------------------------------------------------------------- the process


@real
def test_worlds_are_lost_with_their_process_and_later_ones_get_another() -> None:
    with playing(LONGEST) as played:
        scienceworld_java.running().process.kill()
        with raises_code("java-silent"):
            played.act("wait")
    with playing(LONGEST) as played:
        assert "hallway" in played.begun()


@real
def test_a_game_that_is_refused_leaves_its_world_to_the_next() -> None:
    simulator = scienceworld_java.running()
    world = simulator.take()
    simulator.give_back(world)
    with raises_code("scienceworld-game-missing"):
        ScienceWorld().reset(LONGEST.name, 10**6, "easy", 3)
    assert simulator.take() is world
    simulator.give_back(world)


HOLDER = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
from treegraft.extras.environments.scienceworld.environment import Game, playing
from treegraft.extras.environments.scienceworld.java import running
with playing(Game("lifespan-longest-lived", 0, "easy")) as played:
    print(running().process.pid, flush=True)
    for line in sys.stdin:
        print(len(played.act("wait")) > 0, flush=True)
"""


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of its own group with a Java process, and that one's id."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def ends(number: int) -> bool:
    """Whether a process ends within a minute."""
    for _ in range(600):
        stat = Path(f"/proc/{number}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@real
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_java_process_outlives_ctrl_c_and_not_its_owner() -> None:
    with holder() as (process, number):
        assert process.stdin is not None and process.stdout is not None
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "asked\n"
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        process.kill()
        process.wait()
        assert ends(number)


# ---------------------------------------------------------------------- a training


@real
@pytest.mark.slow
def test_the_recipe_trains_on_gold_paths_and_branches_by_replay(tmp_path: Path) -> None:
    changes = [f"run.dir={tmp_path}", "run.name=small", "explore.explorers=['entropy']"]
    train(load_config("scienceworld", changes, smoke=True))
    folder = tmp_path / "small"
    (line,) = [one for one in read_metrics(folder) if "environment/num_opened" in one]
    assert line["environment/num_mismatches"] == line["environment/num_failures"] == 0
    trees = read_trees(folder / "trees" / "update-000001.jsonl")
    assert all("Your task is to find" in tree.task.question for tree in trees)
    assert all(-1.0 <= leaf.reward <= 1.0 for tree in trees for leaf in tree.leaves)
