"""Recorded trees of a report's runs, read once for all figures that count in them.

One tree is in memory at a time, and long runs are read in `MOST_FILES` updates spread evenly, so
that neither time nor memory grows with the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from treegraft import DataError, Tree
from treegraft.parts import RunReader

MOST_FILES = 24
"""Updates of a run whose trees are read."""


class Counts(Protocol):
    """What a figure counts in a run's trees."""

    def add(self, update: int, tree: Tree) -> None:
        """Counts one tree."""


C = TypeVar("C", bound=Counts)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was counted in one run, and a line for each file that cannot be read."""

    counts: Sequence[Counts]
    notes: Sequence[str]

    def of(self, kind: type[C]) -> C:
        """Returns the counts of this kind."""
        return next(one for one in self.counts if isinstance(one, kind))


class TreeReader:
    """Reads the trees of a run when they are first asked for, and keeps what was counted."""

    def __init__(self, kinds: Sequence[type[Counts]]) -> None:
        self._kinds = kinds
        self._read: dict[str, Reading] = {}

    def of(self, run: RunReader) -> Reading:
        """Returns what was counted in a run, of every kind."""
        key = str(run.path)
        if key not in self._read:
            notes = list[str]()
            counts = [kind() for kind in self._kinds]
            for update, tree in read_updates(run, notes):
                for one in counts:
                    one.add(update, tree)
            self._read[key] = Reading(counts, notes)
        return self._read[key]


def spread(total: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers 0 .. total - 1, evenly spread, first and last included
    (the last alone where `most` is 1)."""
    if total <= most:
        return list(range(total))
    if most == 1:
        return [total - 1]
    return sorted({round(n * (total - 1) / (most - 1)) for n in range(most)})


def read_updates(run: RunReader, notes: list[str]) -> Iterator[tuple[int, Tree]]:
    """Yields update and tree of the updates looked at, in order; `notes` gets a line for each file
    that cannot be read."""
    files = [file for file in run.files() if file.kind == "update"]
    for file in (files[place] for place in spread(len(files), MOST_FILES)):
        damaged = 0
        try:
            for number in range(run.num_trees(file.name)):
                try:
                    tree = run.tree(file.name, number)
                except DataError:
                    damaged += 1
                    continue
                yield file.update, tree
        except (OSError, DataError) as error:  # a resume has just cut it away
            notes.append(f"{run.name}: {file.name} cannot be read ({error})")
        if damaged:
            notes.append(
                f"{run.name}: {file.name} has {damaged} lines that are no tree; they were left out"
            )
