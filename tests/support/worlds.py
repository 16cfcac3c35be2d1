"""Small environments for tests: what each does can be told on paper."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any, ClassVar


class KeyDoor:
    """A hall with a key and a locked room: take the key, unlock the door, go in. Says how many
    moves were made."""

    capability = "fork"
    live: ClassVar[list[KeyDoor]] = []
    """Every object that was made and not closed."""

    def __init__(self, *, steps_allowed: int = 9) -> None:
        self.steps_allowed = steps_allowed
        self.moves = []
        KeyDoor.live.append(self)

    def reset(self, key: str = "w3", **row: Any) -> str:
        self.key = key
        self.row = row
        self.has_key = self.is_open = self.is_inside = False
        return f"{key}"

    def take(self, thing: str) -> str:
        """Takes a thing."""
        self.moves.append(f"take {thing}")
        if thing != self.key:
            raise ValueError(f"no {thing} here")
        self.has_key = True
        return f"w1 {len(self.moves)}"

    def unlock(self, door: str) -> str:
        """Unlocks a door."""
        self.moves.append(f"unlock {door}")
        self.is_open = self.is_open or self.has_key
        return f"{'w1' if self.is_open else 'w2'} {len(self.moves)}"

    def enter(self, door: str) -> str:
        """Goes through a door."""
        self.moves.append(f"enter {door}")
        self.is_inside = self.is_open
        return f"{'w1' if self.is_inside else 'w2'} {len(self.moves)}"

    def get_reward(self) -> float:
        return 1.0 if self.is_inside else 0.5 if self.is_open else 0.0

    def fork(self) -> KeyDoor:
        copy = KeyDoor(steps_allowed=self.steps_allowed)
        vars(copy).update({**vars(self), "moves": list(self.moves)})
        return copy

    def close(self) -> None:
        KeyDoor.live.remove(self)


class ReplayedKeyDoor(KeyDoor):
    """The same, without copies."""

    capability = "replay"
    fork = None  # type: ignore[assignment]


class LockedKeyDoor(ReplayedKeyDoor):
    """The same, neither copied nor repeated."""

    capability = "none"


class CopiedKeyDoor(ReplayedKeyDoor):
    """Copied by a deep copy."""

    capability = "fork"

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedKeyDoor:
        copy = CopiedKeyDoor(steps_allowed=self.steps_allowed)
        vars(copy).update({**vars(self), "moves": list(self.moves)})
        return copy


class Counter:
    """Adds up, asynchronously, with a die that depends on the seed; blocks nothing."""

    def __init__(self) -> None:
        self.total = 0

    async def reset(self, seed: int) -> None:
        self.die = random.Random(seed)

    async def add(self, number: int) -> str:
        """Adds a number and what the die shows."""
        await asyncio.sleep(self.die.random() / 1000)
        self.total += number + self.die.randrange(6)
        return f"{self.total}"

    async def double(self) -> str:
        """Doubles the sum."""
        self.total *= 2
        return f"{self.total}"

    async def get_reward(self) -> float:
        return float(self.total)


class Forgetful(ReplayedKeyDoor):
    """Answers otherwise each time: no replay finds what was seen."""

    num_calls: ClassVar[int] = 0

    def unlock(self, door: str) -> str:
        """Unlocks a door."""
        Forgetful.num_calls += 1
        return f"w{Forgetful.num_calls}"


class Hanging:
    """Hangs where it is told to, until released."""

    released: ClassVar[threading.Event] = threading.Event()

    def __init__(self, *, where: str) -> None:
        self.where = where

    def _maybe(self, place: str) -> None:
        if self.where == place:
            Hanging.released.wait(20)

    def reset(self, **row: Any) -> None:
        self._maybe("reset")

    def look(self) -> str:
        """Looks around."""
        self._maybe("look")
        return "w1"

    def get_reward(self) -> float:
        self._maybe("get_reward")
        if self.where == "nan":
            return float("nan")
        if self.where == "raise":
            raise OSError("the judge is away")
        return 1.0

    def fork(self) -> Hanging:
        self._maybe("fork")
        return Hanging(where="")


class OneThread:
    """Minds in which thread it is used, as a database connection does."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def reset(self) -> str:
        return self.ask("w1")

    def ask(self, what: str) -> str:
        """Answers."""
        assert threading.get_ident() == self.thread
        time.sleep(0.001)
        return what

    def get_reward(self) -> float:
        return float(len(self.ask("w2")))
