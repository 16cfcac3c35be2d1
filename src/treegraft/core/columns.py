"""The tokens of a step in memory: packed columns, each read as the tuple that it was made of.

A token id takes two or four bytes; a score four where float32 holds it exactly, else eight, and
nothing where the token was not sampled. As tuples of objects a token took 200 bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from enum import IntEnum
from functools import lru_cache
from itertools import compress, islice
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Origin(IntEnum):
    """Who wrote a token. Recorded where the token is appended, never inferred."""

    PROMPT = 0
    """The task's prompt."""
    POLICY = 1
    """Sampled by the policy being trained; the only origin that may carry loss."""
    TOOL = 2
    """A tool's result with the markup around it."""
    RETRIEVED = 3
    """A step of another agent, grafted from the Step-Trace Buffer."""
    FORCED = 4
    """Anything else that we append: scaffold, injected ends."""


Runs = tuple[tuple[Origin, int], ...]
"""Origins as (origin, number of tokens), in the order of the tokens."""
FILLERS = {
    "sampling_logprobs": 0.0,
    "entropies": 0.0,
    "old_logprobs": 0.0,
    "ratios": 1.0,
    "credit_factors": 1.0,
}
"""The columns of scores, with the value of a token that was not sampled."""
_ORIGINS = tuple(Origin)
_SLOTS: dict[str, Any] = {}
"""Where a step keeps its fields."""


def kept(step: Any, name: str) -> Any:
    """Returns what a step keeps of a column: `Runs` for its origins, packed numbers for ids and
    scores, None where it has no such column."""
    return _SLOTS[name].__get__(step)


def numbers(packed: bytes) -> Any:
    """Returns packed numbers as a memoryview, of int16, int32, int64, float32 or float64."""
    return memoryview(packed)[:-1].cast(cast(Any, chr(packed[-1])))


def pack_ids(ids: Iterable[int]) -> bytes:
    """Returns ids in the fewest bytes that hold all of them."""
    for code in "Hi":
        with suppress(OverflowError):
            return array(code, ids).tobytes() + code.encode()
    return array("q", ids).tobytes() + b"q"


def pack_scores(values: Sequence[float]) -> bytes:
    """Returns scores in float32 where that changes none of them, else in float64."""
    kind = f"{len(values)}f"
    with suppress(OverflowError):
        short = struct.pack(kind, *values)
        if struct.unpack(kind, short) == tuple(values):
            return short + b"f"
    return struct.pack(f"{len(values)}d", *values) + b"d"


def mask_of(runs: Runs) -> tuple[bool, ...]:
    """Returns [tokens] True where the policy sampled the token."""
    return sum(((origin is Origin.POLICY,) * count for origin, count in runs), ())


def sampled_scores(step: Any, name: str) -> list[float] | None:
    """Returns one of the `FILLERS` columns for sampled tokens alone; None without the column."""
    if (packed := kept(step, name)) is None:
        return None
    found, runs = numbers(packed).tolist(), kept(step, "origins")
    is_whole = len(found) != num_sampled(runs)
    return [*compress(found, mask_of(runs))] if is_whole else found


def loss_of_sampled(step: Any) -> bytes:
    """Returns the loss mask of the sampled tokens, 1 or 0 for each."""
    found, runs = kept(step, "loss_mask"), kept(step, "origins")
    return b"\1" * num_sampled(runs) if found is True else bytes(compress(found, mask_of(runs)))


def num_sampled(runs: Runs) -> int:
    """Returns how many tokens the policy sampled."""
    return sum(count for origin, count in runs if origin is Origin.POLICY)


class _Ids:
    """A field of a step that is set and read as a tuple, and kept in less: ids."""

    def __init__(self, name: str) -> None:
        self.name, self.slot = name, _SLOTS[name]

    def __get__(self, step: Any, owner: Any = None) -> Any:
        return self if step is None else self.read(step, self.slot.__get__(step))

    def __set__(self, step: Any, column: Any) -> None:
        self.slot.__set__(step, None if column is None else self.pack(step, tuple(column)))

    def read(self, step: Any, found: Any) -> Any:
        """Returns the tuple."""
        return tuple(numbers(found).tolist())

    def pack(self, step: Any, column: tuple[Any, ...]) -> Any:
        """Returns what is kept of it."""
        return pack_ids(column)


class _Origins(_Ids):
    """A column with one entry for each of `token_ids`; here the origins, kept as `Runs`."""

    def __set__(self, step: Any, column: Any) -> None:
        if column is not None and len(column) != step.num_tokens:
            raise ValueError(
                f"step '{step.id}': {self.name} has {len(column)} entries, token_ids has"
                f" {step.num_tokens}; each holds one entry per token of the step"
            )
        super().__set__(step, column)

    def read(self, step: Any, found: Any) -> Any:
        return sum(((origin,) * count for origin, count in found), ())

    def pack(self, step: Any, column: tuple[Any, ...]) -> Any:
        return _runs_of(bytes(column))


@lru_cache(1024)
def _runs_of(origins: bytes) -> Runs:
    # Steps whose origins are alike share them.
    runs = []
    while origins:
        rest = origins.lstrip(origins[:1])
        runs.append((_ORIGINS[origins[0]], len(origins) - len(rest)))
        origins = rest
    return tuple(runs)


class _Mask(_Origins):
    """True stands for the mask of the sampled tokens."""

    def read(self, step: Any, found: Any) -> Any:
        return mask_of(kept(step, "origins")) if found is True else tuple(map(bool, found))

    def pack(self, step: Any, column: tuple[Any, ...]) -> Any:
        if column == mask_of(kept(step, "origins")):
            return True
        # Checked here and not in the learner alone: a user's part that builds steps must fail at
        # the step, not as a policy that slowly learns to imitate its tools.
        for position, (carries, origin) in enumerate(zip(column, step.origins, strict=True)):
            if carries and origin is not Origin.POLICY:
                raise ValueError(
                    f"step '{step.id}', token {position}: loss on a token of origin"
                    f" {origin.name.lower()}; only tokens that the policy sampled may carry loss"
                )
        return bytes(map(bool, column))


class _Scores(_Origins):
    """Without the tokens that were not sampled, where these have the filler."""

    def read(self, step: Any, found: Any) -> Any:
        if found is None:
            return None
        values, runs = tuple(numbers(found).tolist()), kept(step, "origins")
        return filled(values, runs, self.name) if len(values) == num_sampled(runs) else values

    def pack(self, step: Any, column: tuple[Any, ...]) -> Any:
        own, end, filler = tuple[float, ...](), 0, FILLERS[self.name]
        for origin, count in kept(step, "origins"):
            begin, end = end, end + count
            if origin is Origin.POLICY:
                own += column[begin:end]
            elif column[begin:end].count(filler) != count:
                return pack_scores(column)
        return pack_scores(own)


def filled(values: Iterable[float], runs: Runs, name: str) -> tuple[float, ...]:
    """Returns one of the `FILLERS` columns for all tokens from its values for sampled ones."""
    found, rest, filler = tuple[float, ...](), iter(values), FILLERS[name]
    for origin, count in runs:
        found += tuple(islice(rest, count)) if origin is Origin.POLICY else (filler,) * count
    return found


def copied(step: T, changes: Mapping[str, Any]) -> T:
    """Returns a copy of a step with other values in some fields."""
    found = object.__new__(type(step))
    for slot in _SLOTS.values():
        slot.__set__(found, slot.__get__(step))
    for name, value in changes.items():
        object.__setattr__(found, name, value)
    return found


def packed(kind: type[T]) -> type[T]:
    """Makes the columns of a step's class packed ones; for a dataclass with slots."""
    columns = {"token_ids": _Ids, "lesson_ids": _Ids, "origins": _Origins, "loss_mask": _Mask}
    _SLOTS.update({one.name: kind.__dict__[one.name] for one in fields(cast(Any, kind))})
    for name, column in (columns | dict.fromkeys(FILLERS, _Scores)).items():
        setattr(kind, name, column(name))
    return kind
