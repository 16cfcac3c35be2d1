"""Sokoban in words, with a solver as expert: a player pushes a box onto a goal.

    treegraft train sokoban --smoke

    question   5x5 player b2 boxes c3 goals d4 walls a1 e5
    move       right         ->  player c2 boxes c3
    move       down          ->  player c3 boxes c4
    ...                      ->  player d3 boxes d4 solved

Squares are named as in chess, by column and row; row 1 is the top. The reward is 1 for a solved
board and 0 for any other. A box in a corner stays there, and nothing tells the agent that a board
can no longer be solved.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from treegraft import SettingError, StepContent, Task, ToolError
from treegraft.parts import OpenTasks, ToolCall, keyed

DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
UNKNOWN = "unknown direction ; write up , down , left or right"
SOLVED = "solved"
GIVEN_UP = "stuck"
"""The answer of a solver that has lost its board."""
QUESTION = re.compile(r"(\d)x\1 player (\S+) boxes (\S+) goals (\S+)(?: walls (.+))?")
PURPOSES = ("train", "eval", "warmup")
NUM_WARMUP_LAYOUTS = 512
"""A warm-up shows thousands of boards; to search a new one takes milliseconds."""
MAX_DRAWS = 2000

Square = tuple[int, int]
"""Column and row, from 0."""
State = tuple[Square, Square]
"""The squares of the player and of the box."""


@dataclass(frozen=True)
class Board:
    """Board(5, walls=frozenset({(0, 0)}), goal=(3, 3)): the parts that never move."""

    size: int
    walls: frozenset[Square]
    goal: Square

    def squares(self) -> list[Square]:
        """Returns all squares, row by row."""
        return [(column, row) for row in range(self.size) for column in range(self.size)]

    def is_open(self, square: Square) -> bool:
        """Returns whether the square lies on the board and holds no wall."""
        return all(0 <= part < self.size for part in square) and square not in self.walls

    def is_solved(self, state: State) -> bool:
        """Returns whether the box stands on the goal."""
        return state[1] == self.goal

    def moved(self, state: State, direction: str) -> State:
        """Returns the state after a move, the same one if something is in the way."""
        player, box = state
        right, down = DIRECTIONS[direction]
        ahead = (player[0] + right, player[1] + down)
        behind = (player[0] + 2 * right, player[1] + 2 * down)
        if not self.is_open(ahead):
            return state
        if ahead != box:
            return ahead, box
        return (ahead, behind) if self.is_open(behind) else state

    def shown(self, state: State) -> str:
        """Returns what has moved, as after a move."""
        return f"player {names([state[0]])} boxes {names([state[1]])}"

    def question(self, state: State) -> str:
        """Returns the whole board, as before the first move."""
        walls = f" walls {names(self.walls)}" if self.walls else ""
        return f"{self.size}x{self.size} {self.shown(state)} goals {names([self.goal])}{walls}"


def names(squares: Iterable[Square]) -> str:
    """Returns the names of squares, "b2" for (1, 1)."""
    return " ".join(f"{chr(ord('a') + column)}{row + 1}" for column, row in sorted(squares))


def read_question(text: str) -> tuple[Board, State]:
    """Returns the board of a question, and its state. Raises `ValueError` for another text."""
    found = QUESTION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"got the question {text[:80]!r}; expected a board such as"
            " '5x5 player b2 boxes c3 goals d4 walls a1 e5'"
        )
    size, player, box, goal, walls = found.groups(default="")

    def square(name: str) -> Square:
        return ord(name[0]) - ord("a"), int(name[1]) - 1

    board = Board(int(size), frozenset(map(square, walls.split())), square(goal))
    return board, (square(player), square(box))


class Sokoban:
    """One game. Its public method `move` is the agent's tool."""

    capability = "fork"  # a branch goes on in a copy of the object
    is_blocking = False  # no method waits, so none needs a thread

    def reset(self, question: str) -> None:
        """Begins the game that the question describes, which shows all there is to see."""
        self.board, self.state = read_question(question)
        self.done = self.board.is_solved(self.state)

    def move(self, direction: str) -> str:
        """Moves the player one square: up, down, left or right. A box ahead is pushed if the square
        behind it is free. Squares are columns a, b, ... and rows 1, 2, ... from the top."""
        direction = direction.strip().lower()
        if direction not in DIRECTIONS:
            raise ToolError(UNKNOWN)
        self.state = self.board.moved(self.state, direction)
        self.done = self.board.is_solved(self.state)
        shown = self.board.shown(self.state)
        return f"{shown} {SOLVED}" if self.done else shown

    def get_reward(self) -> float:
        """Returns 1 for a solved board, else 0."""
        return float(self.done)


@lru_cache(maxsize=2048)
def distances(board: Board) -> dict[State, int]:
    """Returns for each state the fewest moves that solve the board; lost states are missing."""
    squares = [square for square in board.squares() if board.is_open(square)]
    before: dict[State, list[State]] = {}
    for box in squares:
        if box == board.goal:
            continue  # a solved game is over
        for player in squares:
            if player == box:
                continue
            for direction in DIRECTIONS:
                after = board.moved((player, box), direction)
                before.setdefault(after, []).append((player, box))
    found = {(player, board.goal): 0 for player in squares if player != board.goal}
    edge = deque(found)
    while edge:
        state = edge.popleft()
        for earlier in before.get(state, ()):
            if earlier not in found:
                found[earlier] = found[state] + 1
                edge.append(earlier)
    return found


def best_moves(board: Board, state: State) -> list[str]:
    """Returns the moves that shorten the distance; none for a solved or lost state."""
    known = distances(board)
    if state not in known:
        return []
    nearer = known[state] - 1
    return [name for name in DIRECTIONS if known.get(board.moved(state, name)) == nearer]


class SokobanTasks(OpenTasks):
    """Boards in equal shares by the length of their shortest solution, and a solver with faults.

    Layouts (walls and goal) of training, evaluation and warm-up never meet.
    """

    def __init__(
        self,
        *,
        seed: int,
        num_train: int,
        num_eval: int,
        size: int = 5,
        num_walls: int = 3,
        moves: Sequence[int] = (2, 3, 4, 5, 6, 7, 8),
        detour_prob: float = 0.0,
        error_prob: float = 0.0,
    ) -> None:
        """Args:
        size: rows and columns, up to 9.
        moves: lengths of the shortest solution.
        detour_prob: how often the solver walks to a neighbouring square and back before a
            move, on training boards alone.
        error_prob: how often it makes another move than a shortest one, there too; it goes
            on from where that leads, and gives up on a board that it has lost.
        """
        self._seed = seed
        self._num_train = num_train
        self._num_eval = num_eval
        self._size = size
        self._num_walls = num_walls
        self._moves = moves
        self._detour_prob = detour_prob
        self._error_prob = error_prob

    def train_tasks(self) -> Sequence[Task]:
        return [self._task("train", number, number) for number in range(self._num_train)]

    def eval_tasks(self) -> Sequence[Task]:
        return [self._task("eval", number, number) for number in range(self._num_eval)]

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        tasks = []
        for number in range(num):
            layout = keyed.keyed_int("layout", seed, number) % NUM_WARMUP_LAYOUTS
            tasks.append(self._task("warmup", number, layout, seed))
        return tasks

    def _task(self, purpose: str, number: int, layout: int, seed: int = 0) -> Task:
        length = self._moves[number % len(self._moves)]
        # A layout without a state of that length gives way to another draw.
        for draw in range(MAX_DRAWS):
            board = self._layout(purpose, layout, draw)
            if board is None:
                continue
            states = sorted(state for state, moves in distances(board).items() if moves == length)
            if states:
                start = keyed.keyed_choice(states, "start", self._seed, purpose, seed, number)
                name = f"{seed}-{number}" if purpose == "warmup" else str(number)
                return Task(
                    id=f"sokoban/{purpose}/{name}",
                    question=board.question(start),
                    reference=(),  # the environment gives the reward
                    category="1 move" if length == 1 else f"{length} moves",
                    columns={"moves": length},
                )
        raise SettingError(
            f"tasks.options: found no board of size {self._size} with {self._num_walls} walls whose"
            f" shortest solution has {length} moves; lower `moves`, or raise `size`."
        )

    def _layout(self, purpose: str, number: int, draw: int) -> Board | None:
        """A keyed layout; None for one of another purpose."""
        left = Board(self._size, frozenset(), (0, 0)).squares()
        drawn = []
        for place in range(1 + self._num_walls):
            key = keyed.keyed_int("layout", self._seed, purpose, number, draw, place)
            drawn.append(left.pop(key % len(left)))
        goal = drawn[0]
        walls = drawn[1:]
        # Each layout has one purpose, whoever draws it.
        owner = keyed.keyed_choice(PURPOSES, "lane", self._seed, f"{sorted(walls)} {[goal]}")
        return Board(self._size, frozenset(walls), goal) if owner == purpose else None

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...]:
        """Returns a shortest solution and the answer, with faults as the options say. The key
        chooses between moves that are equally right."""
        # Recorded questions may have a first observation below the board.
        board, state = read_question(task.question.partition("\n")[0])
        errs = task.id.startswith("sokoban/train/")
        moves: list[str] = []
        while best := best_moves(board, state):
            key = ("expert", task.id, seed, len(moves))
            if errs and keyed.keyed_unit(*key, "detour") < self._detour_prob:
                moves += _detour(board, state, key)
            if errs and keyed.keyed_unit(*key, "error") < self._error_prob:
                others = [name for name in DIRECTIONS if name not in best]
                best = [name for name in others if board.moved(state, name) != state] or best
            moves.append(keyed.keyed_choice(best, *key, "move"))
            state = board.moved(state, moves[-1])
        answer = SOLVED if board.is_solved(state) else GIVEN_UP
        steps = [StepContent(calls=(ToolCall("move", name),)) for name in moves]
        return (*steps, StepContent(answer=answer))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str:
        """Returns that it gives up, which a warm-up may teach at any move."""
        return GIVEN_UP

    def vocabulary(self) -> Sequence[str]:
        """Returns every word that the tiny model can read and write."""
        squares = [names([one]) for one in Board(self._size, frozenset(), (0, 0)).squares()]
        words = f"player boxes goals walls {SOLVED} {UNKNOWN} {GIVEN_UP}".split()
        return (f"{self._size}x{self._size}", *squares, *DIRECTIONS, *words)


def _detour(board: Board, state: State, key: tuple[int | str, ...]) -> list[str]:
    """A walk to a free neighbour and back; nothing if there is none."""
    free = []
    for name in DIRECTIONS:
        player, box = board.moved(state, name)
        if player != state[0] and box == state[1]:
            free.append(name)
    if not free:
        return []
    there = keyed.keyed_choice(free, *key, "where")
    return [there, OPPOSITE[there]]
