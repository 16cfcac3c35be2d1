"""Seeded Sokoban boards by the length of their shortest solution, and a solver with faults.

Every board is searched breadth-first from all its solved states, so the distance to the solution is
known in every state, and where there is none the state is dead. Layouts (walls and goals) of
training, evaluation and warm-up never meet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any, Final

from treegraft import SettingError, StepContent, Task
from treegraft.extras.environments.sokoban.environment import (
    DIRECTIONS,
    SOLVED,
    Board,
    Square,
    State,
    read_question,
)
from treegraft.extras.environments.sokoban.plugin import SokobanSettings
from treegraft.parts import ToolCall, interfaces, keyed

GIVEN_UP: Final = "stuck"
"""The answer of an expert that has lost a board."""
_PURPOSES: Final = ("train", "eval", "warmup")
_NUM_WARMUP_LAYOUTS: Final = 512
"""A search takes milliseconds, and a warm-up shows thousands of boards."""
_MAX_DRAWS: Final = 2000
_OPPOSITE: Final = {"up": "down", "down": "up", "left": "right", "right": "left"}


@lru_cache(maxsize=1024)
def distances(board: Board, num_boxes: int) -> Mapping[State, int]:
    """Returns for each state the fewest moves that solve the board; dead states are missing.

    V*(s) = γ^distance(s) for a reward of 1 at the end and the discount γ, 0 where s is missing.
    """
    squares = [(column, row) for row in range(board.size) for column in range(board.size)]
    free = [square for square in squares if board.is_open(square)]
    before: dict[State, list[State]] = {}
    found: dict[State, int] = {}
    for placed in combinations(free, num_boxes):
        boxes = frozenset(placed)
        if boxes >= board.goals:
            found |= {(player, boxes): 0 for player in free if player not in boxes}
            continue  # a solved game is over
        for player in free:
            if player not in boxes:
                for direction in DIRECTIONS:
                    after = board.moved((player, boxes), direction)
                    before.setdefault(after, []).append((player, boxes))
    edge = list(found)
    while edge:
        reached: list[State] = []
        for state in edge:
            for earlier in before.get(state, ()):
                if earlier not in found:
                    found[earlier] = found[state] + 1
                    reached.append(earlier)
        edge = reached
    return found


@lru_cache(maxsize=1024)
def _states_at(board: Board, num_boxes: int) -> Mapping[int, Sequence[State]]:
    """The states by their distance, in an order that does not depend on the process."""
    found: dict[int, list[State]] = {}
    for state, distance in distances(board, num_boxes).items():
        found.setdefault(distance, []).append(state)
    return {
        distance: sorted(states, key=lambda state: (state[0], sorted(state[1])))
        for distance, states in found.items()
    }


@dataclass(frozen=True, slots=True)
class Solver:
    """The exact values of one task's board."""

    board: Board
    start: State

    @classmethod
    def of(cls, task: Task) -> Solver:
        """Returns the solver of a task.

        Raises:
            SettingError: its question is not a board.
        """
        found = read_question(task.question.partition("\n")[0])
        if found is None:
            raise SettingError(
                f"task '{task.id}': '{task.question:.80}' is not a board of Sokoban; name the"
                " source that made it, or leave it out",
                code="foreign-question",
            )
        return cls(*found)

    def distance(self, state: State) -> int | None:
        """Returns the fewest moves to a solved board; None for a dead state."""
        return distances(self.board, len(state[1])).get(state)

    def states(self, directions: Sequence[str]) -> Iterator[State]:
        """Yields the start and the state after each move; unknown directions change nothing."""
        state = self.start
        yield state
        for direction in directions:
            if direction in DIRECTIONS and not self.board.is_solved(state):
                state = self.board.moved(state, direction)
            yield state

    def best_moves(self, state: State) -> list[str]:
        """Returns the moves that shorten the distance; none for a solved or dead state."""
        now = self.distance(state)
        if not now:
            return []
        moves = {name: self.distance(self.board.moved(state, name)) for name in DIRECTIONS}
        return [name for name, distance in moves.items() if distance == now - 1]


class SokobanTasks:
    """Boards in equal shares by the length of their shortest solution. Their environment is
    `environment.kind = "sokoban"`."""

    def __init__(
        self, settings: SokobanSettings, *, seed: int, num_train: int, num_eval: int
    ) -> None:
        self._settings, self._seed = settings, seed
        self._num_train, self._num_eval = num_train, num_eval

    def train_tasks(self) -> Sequence[Task]:
        """Returns the training boards."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the held-out boards."""
        return self._eval

    def tools(self) -> Sequence[interfaces.Tool]:
        """Returns none: the environment brings the move."""
        return ()

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...]:
        """Returns a shortest solution and the answer, unless the settings make the expert
        imperfect.

        Then the trace is a function of (task, seed), and in each state of a training board, drawn
        independently:

        * with probability detour_prob the player first walks a square away and back;
        * with probability error_prob the move is one that changes the board and is not a shortest
          one, where there is such a move. The solver goes on from where that leads; on a dead board
          it gives up, with a wrong answer and reward 0.

        Where several moves are right, the key chooses.

        Raises:
            SettingError: the task is not a board.
        """
        solver = Solver.of(task)
        is_fallible = task.id.startswith(self._id("train", ""))
        state, moves = solver.start, list[str]()
        while best := solver.best_moves(state):
            key = ("expert", task.id, seed, len(moves))
            if is_fallible and keyed.keyed_unit(*key, "detour") < self._settings.detour_prob:
                moves += _detour(solver.board, state, key)
            if is_fallible and keyed.keyed_unit(*key, "error") < self._settings.error_prob:
                best = _changes(solver.board, state, but=best) or best
            moves.append(keyed.keyed_choice(best, *key, "move"))
            state = solver.board.moved(state, moves[-1])
        answer = SOLVED if solver.board.is_solved(state) else GIVEN_UP
        steps = [StepContent(calls=(ToolCall("move", name),)) for name in moves]
        return (*steps, StepContent(answer=answer))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        """Returns that it gives up."""
        return GIVEN_UP

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns boards of layouts that are neither trained nor evaluated on."""
        return tuple(
            self._task("warmup", n, keyed.keyed_int("layout", seed, n) % _NUM_WARMUP_LAYOUTS, seed)
            for n in range(num)
        )

    def vocabulary(self) -> Sequence[str]:
        """Returns every word of boards, moves, results and answers."""
        empty = Board(self._settings.size, frozenset(), frozenset())
        return (*empty.vocabulary(), GIVEN_UP)

    def report(self) -> Sequence[str]:
        """Returns nothing: boards that cannot be solved are not drawn."""
        return ()

    @cached_property
    def _train(self) -> tuple[Task, ...]:
        return tuple(self._task("train", n, n) for n in range(self._num_train))

    @cached_property
    def _eval(self) -> tuple[Task, ...]:
        return tuple(self._task("eval", n, n) for n in range(self._num_eval))

    def _id(self, purpose: str, number: object) -> str:
        return f"sokoban/{purpose}/{number}"

    def _task(self, purpose: str, number: int, layout: int, seed: int = 0) -> Task:
        lengths, num_boxes = self._settings.moves, self._settings.num_boxes
        length = lengths[number % len(lengths)]
        # A layout without a state of that length gives way to another draw.
        for draw in range(_MAX_DRAWS):
            board = self._layout(purpose, layout, draw)
            if board is not None and (states := _states_at(board, num_boxes).get(length)):
                start = keyed.keyed_choice(states, "start", self._seed, purpose, seed, number)
                name = f"{seed}-{number}" if purpose == "warmup" else number
                return Task(
                    id=self._id(purpose, name),
                    question=board.question(start),
                    reference=(),
                    category="1 move" if length == 1 else f"{length} moves",
                    columns={"moves": length},
                )
        raise SettingError(
            f"tasks.sokoban.moves: no board of size {self._settings.size} with {num_boxes} boxes"
            f" and {self._settings.num_walls} walls found whose shortest solution has {length}"
            " moves; lower it, or raise tasks.sokoban.size",
            code="board-not-found",
        )

    def _layout(self, purpose: str, number: int, draw: int) -> Board | None:
        """A keyed layout; None for one of another purpose."""
        settings = self._settings
        left = [(column, row) for row in range(settings.size) for column in range(settings.size)]
        taken: list[Square] = []
        for place in range(settings.num_walls + settings.num_boxes):
            key = keyed.keyed_int("layout", self._seed, purpose, number, draw, place)
            taken.append(left.pop(key % len(left)))
        goals = frozenset(taken[: settings.num_boxes])
        walls = frozenset(taken[settings.num_boxes :])
        board = Board(settings.size, walls, goals)
        lane = keyed.keyed_int("lane", self._seed, f"{sorted(walls)} {sorted(goals)}") % len(
            _PURPOSES
        )
        return board if _PURPOSES[lane] == purpose else None


def _changes(board: Board, state: State, but: Collection[str]) -> list[str]:
    """The moves that change the board, less some."""
    return [name for name in DIRECTIONS if name not in but and board.moved(state, name) != state]


def _detour(board: Board, state: State, key: tuple[int | str, ...]) -> list[str]:
    """A walk to a free neighbour and back; nothing where there is none."""
    free = [
        name
        for name in DIRECTIONS
        if (after := board.moved(state, name)) != state and after[1] == state[1]
    ]
    if not free:
        return []
    there = keyed.keyed_choice(free, *key, "where")
    return [there, _OPPOSITE[there]]


def sokoban_tasks(settings: Any, seed: int) -> SokobanTasks:
    """Returns the boards of a table [tasks]."""
    return SokobanTasks(
        settings.sokoban, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    )
