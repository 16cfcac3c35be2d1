"""Sokoban in words: a player pushes boxes onto goals, and a box in a corner stays there.

    question   5x5 player b2 boxes c3 goals d4 walls a1 e5
    move       right         ->  player c2 boxes c3
    move       down          ->  player c3 boxes c4
    ...                      ->  player d3 boxes d4 solved

Squares are named as in chess, by column and row; row 1 is the top. Nothing lies outside the board.
The reward is 1 for a solved board and 0 for any other, and nothing tells the agent that a board can
no longer be solved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from treegraft import ToolError
from treegraft.parts import ClassEnvironments, EnvironmentSettings

DIRECTIONS: Final = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
UNKNOWN: Final = "unknown direction ; write up , down , left or right"
SOLVED: Final = "solved"
_QUESTION: Final = re.compile(
    r"(\d)x\1 player (\S+) boxes ((?:[a-i]\d ?)+)goals ((?:[a-i]\d ?)+)(?:walls ((?:[a-i]\d ?)+))?"
)

Square = tuple[int, int]
"""Column and row, from 0."""
State = tuple[Square, frozenset[Square]]
"""The player's square and those of the boxes."""


def name_of(square: Square) -> str:
    """Returns the name of a square, "b2" for (1, 1)."""
    return f"{chr(ord('a') + square[0])}{square[1] + 1}"


def _names(squares: Iterable[Square]) -> str:
    return " ".join(map(name_of, sorted(squares)))


def _squares(text: str) -> frozenset[Square]:
    return frozenset((ord(name[0]) - ord("a"), int(name[1]) - 1) for name in text.split())


@dataclass(frozen=True, slots=True)
class Board:
    """Board(5, walls=frozenset({(0, 0)}), goals=frozenset({(3, 3)})): the parts that never move."""

    size: int
    """Rows and columns, up to 9."""
    walls: frozenset[Square]
    goals: frozenset[Square]

    def moved(self, state: State, direction: str) -> State:
        """Returns the state after a move; the same one where a wall, the edge, or a box that cannot
        be pushed is in the way."""
        (column, row), boxes = state
        right, down = DIRECTIONS[direction]
        ahead, behind = (column + right, row + down), (column + 2 * right, row + 2 * down)
        if not self.is_open(ahead):
            return state
        if ahead not in boxes:
            return ahead, boxes
        if not self.is_open(behind) or behind in boxes:
            return state
        return ahead, boxes - {ahead} | {behind}

    def is_open(self, square: Square) -> bool:
        """Returns whether the square lies on the board and holds no wall."""
        return all(0 <= part < self.size for part in square) and square not in self.walls

    def is_solved(self, state: State) -> bool:
        """Returns whether a box stands on every goal."""
        return state[1] >= self.goals

    def question(self, state: State) -> str:
        """Returns the board as the agent is shown it before its first move."""
        walls = f" walls {_names(self.walls)}" if self.walls else ""
        return f"{self.size}x{self.size} {self.told(state)} goals {_names(self.goals)}{walls}"

    def told(self, state: State) -> str:
        """Returns what has moved, as after a move."""
        return f"player {name_of(state[0])} boxes {_names(state[1])}"

    def vocabulary(self) -> tuple[str, ...]:
        """Returns every word of questions and results on boards of this size."""
        squares = [(column, row) for row in range(self.size) for column in range(self.size)]
        words = f"player boxes goals walls {SOLVED} {UNKNOWN}".split()
        return (f"{self.size}x{self.size}", *map(name_of, squares), *DIRECTIONS, *words)


def read_question(text: str) -> tuple[Board, State] | None:
    """Returns the board and the state of a question, None for another text."""
    found = _QUESTION.fullmatch(text.strip())
    if found is None:
        return None
    (player,), boxes, goals, walls = (_squares(part or "") for part in found.groups()[1:])
    return Board(int(found[1]), walls, goals), (player, boxes)


class Sokoban:
    """One game, as an environment (`core.interfaces.Environment`)."""

    capability = "fork"
    is_blocking = False

    def reset(self, question: str) -> None:
        """Begins the game that the question describes; raises ValueError for another question."""
        found = read_question(question)
        if found is None:
            raise ValueError(
                f"got the question {question[:80]!r}; expected a board such as '5x5 player b2 boxes"
                " c3 goals d4 walls a1 e5'"
            )
        self.board, self.state = found
        self.done = self.board.is_solved(self.state)

    def move(self, direction: str) -> str:
        """Moves the player one square: up, down, left or right. A box ahead is pushed if the square
        behind it is free. Squares are columns a, b, ... and rows 1, 2, ... from the top."""
        direction = direction.strip().lower()
        if direction not in DIRECTIONS:
            raise ToolError(UNKNOWN, code="query-unknown")
        self.state = self.board.moved(self.state, direction)
        self.done = self.board.is_solved(self.state)
        told = self.board.told(self.state)
        return f"{told} {SOLVED}" if self.done else told

    def fork(self) -> Sokoban:
        """Returns a further game in the same state."""
        copy = Sokoban()
        # Nothing of it changes in place.
        copy.board, copy.state, copy.done = self.board, self.state, self.done
        return copy

    def get_reward(self) -> float:
        """Returns 1 for a solved board, else 0."""
        return float(self.board.is_solved(self.state))


def sokoban_environments(settings: EnvironmentSettings) -> ClassEnvironments:
    """Returns the environments of `environment.kind = "sokoban"`."""
    made: type[Any] = Sokoban
    return ClassEnvironments(made, settings.kind, settings)
