"""Sokoban: rules, exact distances, boards that never meet, solvers right and wrong, a training."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.core.types import Task
from treegraft.extras.environments.sokoban.environment import (
    DIRECTIONS,
    SOLVED,
    Board,
    Sokoban,
    read_question,
)
from treegraft.extras.environments.sokoban.plugin import SokobanSettings
from treegraft.extras.environments.sokoban.tasks import GIVEN_UP, SokobanTasks, Solver, distances
from treegraft.runs.record import read_trees
from treegraft.settings.load import load_config
from treegraft.train import train

SMALL = {"size": 4, "num_walls": 2, "moves": [2, 4]}


def make_source(seed: int = 0, **options: object) -> SokobanTasks:
    own = SokobanSettings.model_validate(SMALL | options)
    return SokobanTasks(own, seed=seed, num_train=30, num_eval=20)


def moves_of(source: SokobanTasks, task: Task, seed: int = 0) -> list[str]:
    return [step.calls[0].body for step in source.expert(task, seed) if step.calls]


def played(question: str, *moves: str) -> Sokoban:
    game = Sokoban()
    game.reset(question)
    for move in moves:
        game.move(move)
    return game


def test_a_box_is_pushed_and_not_pulled_and_not_into_a_wall_or_another_box() -> None:
    game = played("4x4 player a2 boxes b2 c3 goals d1 d2 walls d3")
    assert game.move("right") == "player b2 boxes c2 c3"
    assert game.move("left") == "player a2 boxes c2 c3"
    # Below c2 stands the other box, and beside that a wall.
    assert game.move("down") == "player a3 boxes c2 c3"
    assert game.move("right") == "player b3 boxes c2 c3"
    assert game.move(" Right ") == "player b3 boxes c2 c3"
    assert [game.move(name) for name in ("up", "up", "right", "down")][-1] == (
        "player c1 boxes c2 c3"
    )
    assert not game.done and game.get_reward() == 0.0
    with raises_code("query-unknown", match="write up , down , left or right"):
        game.move("north")


def test_the_game_ends_when_every_goal_has_its_box() -> None:
    game = played("3x3 player a2 boxes b2 goals c2")
    copy = game.fork()
    assert game.move("right") == f"player b2 boxes c2 {SOLVED}"
    assert game.done and game.get_reward() == 1.0
    assert copy.get_reward() == 0.0 and copy.state != game.state
    with pytest.raises(ValueError, match="expected a board such as"):
        played("2 + 2 = ?")


def test_distances_on_paper() -> None:
    board = Board(3, frozenset(), frozenset({(2, 1)}))
    known = distances(board, 1)
    assert known[(0, 1), frozenset({(1, 1)})] == 1
    # Around the box to its left: up, left, left, down, and then the push.
    assert known[(2, 1), frozenset({(1, 1)})] == 5
    # In a corner, and on the edge opposite the goal.
    dead = frozenset({(0, 0)}), frozenset({(0, 1)})
    assert not [state for state in known if state[1] in dead]


@given(st.integers(0, 2**32), st.integers(1, 2))
@settings(max_examples=5, deadline=None)
def test_distances_obey_bellman(seed: int, num_boxes: int) -> None:
    task = make_source(seed, num_boxes=num_boxes).train_tasks()[seed % 30]
    solver = Solver.of(task)
    for state, distance in distances(solver.board, num_boxes).items():
        after = [solver.distance(solver.board.moved(state, name)) for name in DIRECTIONS]
        known = [one for one in after if one is not None]
        assert distance == (0 if solver.board.is_solved(state) else 1 + min(known))
    assert solver.distance(solver.start) == task.columns["moves"]


@given(st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_the_solver_solves_in_the_fewest_moves_and_purposes_share_no_layout(seed: int) -> None:
    source = make_source(seed)
    sets = (source.train_tasks(), source.eval_tasks(), source.warmup_tasks(20, seed))
    layouts = []
    for tasks in sets:
        for task in tasks:
            moves = moves_of(source, task)
            assert len(moves) == task.columns["moves"]
            assert played(task.question, *moves).get_reward() == 1.0
            assert source.expert(task, 0)[-1].answer == SOLVED
        layouts.append({Solver.of(task).board for task in tasks})
    assert not any(layouts[a] & layouts[b] for a, b in ((0, 1), (0, 2), (1, 2)))
    assert source.train_tasks() == make_source(seed).train_tasks()


def test_an_imperfect_solver_walks_to_and_fro_or_loses_the_board() -> None:
    detours, errors = make_source(detour_prob=0.5), make_source(error_prob=0.5)
    num_extra, answers, marks = 0, set(), list[bool]()
    for task in detours.train_tasks():
        moves = moves_of(detours, task)
        num_extra += len(moves) - task.columns["moves"]
        assert played(task.question, *moves).get_reward() == 1.0
        *wrong, last = errors.expert(task, 0)
        answers.add(last.answer)
        end = played(task.question, *(step.calls[0].body for step in wrong))
        assert (last.answer == SOLVED) == (end.get_reward() == 1.0)
        assert last.answer == SOLVED or Solver.of(task).distance(end.state) is None
        solver = Solver.of(task)
        bodies = [step.calls[0].body for step in wrong]
        states = [*solver.states(bodies)][:-1]
        marks += [b in solver.best_moves(state) for state, b in zip(states, bodies, strict=True)]
    # 90 moves with a detour of two before every second one: 90, with a standard error of 9.5; a
    # detour finds a free neighbour almost always.
    assert 60 < num_extra < 120
    assert answers == {SOLVED, GIVEN_UP}
    # Half of the moves are wrong, less those in corners where every move is right; drawn from
    # all moves that change the board, three quarters of the moves are right.
    assert 0.35 < sum(marks) / len(marks) < 0.62
    for task in [*errors.eval_tasks(), *errors.warmup_tasks(10, 0)]:
        assert len(moves_of(errors, task)) == task.columns["moves"]


def test_the_vocabulary_holds_every_word() -> None:
    source = make_source(num_boxes=2)
    words = set(source.vocabulary())
    for task in source.train_tasks():
        game = played(task.question)
        told = [game.move(move) for move in moves_of(source, task)]
        assert set(" ".join([task.question, *told]).split()) <= words
        assert read_question(task.question) == (Solver.of(task).board, Solver.of(task).start)


def test_what_is_refused() -> None:
    with raises_code("settings-contradict", "environment.kind"):
        load_config({"tasks": {"kind": "sokoban"}})
    with raises_code("settings-contradict", "tasks.sokoban.num_walls"):
        load_config("sokoban", ["tasks.sokoban.size=3", "tasks.sokoban.num_walls=8"])
    with raises_code("board-not-found"):
        make_source(size=3, num_walls=0, moves=[40]).train_tasks()
    with raises_code("foreign-question"):
        Solver.of(Task(id="x", question="2 + 2", reference=()))


def test_the_recipe_trains(tmp_path: Path) -> None:
    own = [f"run.dir={tmp_path}", "explorers=['entropy', 'graft']"]
    config = load_config("sokoban", own, smoke=True)
    result = train(config, recipe="sokoban")
    (tree, _) = read_trees(result.run_dir)
    assert len(tree.leaves) == 4
    for path in tree.trajectories():
        solver = Solver.of(path.task)
        calls = [call.body for content in path.contents for call in content.calls]
        *_, end = solver.states(calls)
        assert path.leaf.environment_reward == float(solver.board.is_solved(end))
