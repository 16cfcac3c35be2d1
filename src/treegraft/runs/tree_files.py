"""Files of trees: one for each update and evaluation, each tree compressed by itself.

    trees/update-000012.jsonl.zst         the trees of update 12
    trees/eval-000010-greedy.jsonl.zst    those of an evaluation after update 10

`zstdcat` makes lines of it, one tree each. A file with the ending .jsonl has the lines themselves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import DataError
from treegraft.core.files import checksum, leads_outside, open_inside, write_atomically
from treegraft.core.types import Tree
from treegraft.runs.tree_json import parse_tree, tree_to_json

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PART_NAME = re.compile(r"(update|eval)-([0-9]{6,12})(?:-([a-z]{1,20}))?")
_LINES = ".jsonl"
_PACKED = ".jsonl.zst"
_MOST_LINE = 1 << 28
"""Longest tree in bytes."""
_MOST_GROWN = 1000
"""Bytes of a tree, beyond 4 MB, for each of its frame: a small one can hold zeros without end, and
equal trajectories pack to a few hundredths."""
_OPTIONS: Mapping[int, int] = {
    # Higher levels save a few hundredths of the room and take several times as long.
    zstd.CompressionParameter.compression_level: 6,
    zstd.CompressionParameter.checksum_flag: 1,
}


@dataclass(frozen=True, slots=True)
class TreePart:
    """The file of one update or evaluation."""

    name: str
    """Such as "update-000012" and "eval-000010-greedy"."""
    path: Path
    within: Path
    """The folder that no link may lead out of."""
    size: int
    """Its bytes."""
    mtime_ns: int
    """Its time, which differs once it has changed."""

    @property
    def kind(self) -> str:
        """ "update", or the kind of evaluation: "greedy" or "sampled"."""
        found = PART_NAME.fullmatch(self.name)
        return found[3] or found[1] if found else "update"

    @property
    def update(self) -> int:
        """The update, or the one after which was evaluated; 0 for a file of another name."""
        found = PART_NAME.fullmatch(self.name)
        return int(found[2]) if found else 0

    @property
    def label(self) -> str:
        """Its name in the run folder."""
        return f"trees/{self.name}"

    def data(self) -> bytes:
        """Returns its bytes."""
        with open_inside(self.path, self.within) as file:
            return file.read()

    def checksum(self) -> str:
        """Returns the checksum of its bytes."""
        return checksum(self.data())

    def texts(self) -> Sequence[bytes | memoryview]:
        """Returns the text of each tree as it is stored. Raises DataError for a damaged file."""
        data = self.data()
        if self.path.suffix == _LINES:
            return data.splitlines(keepends=True)
        found: list[bytes | memoryview] = []
        left = memoryview(data)
        while left:
            # The size of a frame is known without unpacking it, so a page of one tree is fast.
            with self._reading(len(found)):
                size = zstd.get_frame_size(left)
            found.append(left[:size])
            left = left[size:]
        return found

    def lines(self, first: int = 0, num: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of trees with their numbers from `first` on, `num` of them; None for
        all. Raises DataError for a damaged one."""
        last = None if num is None else first + num
        for number, text in enumerate(self.texts()[first:last], start=first):
            if isinstance(text, bytes):
                yield number, text
                continue
            with self._reading(number):
                line = _unpacked(text)
            yield number, line

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        try:
            yield
        except (ValueError, zstd.ZstdError) as error:
            raise DataError(
                f"'{self.path}', line {number + 1}: not a recorded tree ({error})",
                code="tree-unreadable",
            ) from error

    def trees(self) -> Iterator[Tree]:
        """Yields the trees. Raises DataError for a damaged one."""
        for number, line in self.lines():
            yield parse_tree(line, f"trees '{self.path}', line {number + 1}")


def _unpacked(frame: memoryview) -> bytes:
    """The line in a frame. Raises ValueError or ZstdError for one that is damaged or too long."""
    reader = zstd.ZstdDecompressor()
    most = min(_MOST_LINE, (1 << 22) + _MOST_GROWN * len(frame))
    line = reader.decompress(frame, max_length=most)
    if not reader.eof:
        raise ValueError(f"cut off, or over {most >> 20} MB")
    return line


def write_trees(path: Path, trees: Iterable[Tree]) -> None:
    """Writes the trees of an update or evaluation, such as `trees/update-000012`, so that its file
    is there whole or not at all; under any other name a file of lines."""
    lines = [f"{tree_to_json(tree)}\n".encode() for tree in trees]
    if PART_NAME.fullmatch(path.name):
        path = path.with_name(f"{path.name}{_PACKED}")
        # A frame for each tree takes a quarter more room than one, and is read alone.
        lines = [zstd.compress(line, options=_OPTIONS) for line in lines]
    # A viewer of a live run must never read half of an update.
    write_atomically(path, b"".join(lines))


def part_of(path: Path) -> TreePart:
    """Returns the file at a path as a part. Raises OSError if it cannot be read."""
    facts = path.stat()
    name = path.name.removesuffix(".zst").removesuffix(_LINES)
    return TreePart(name, path, path.parent, facts.st_size, facts.st_mtime_ns)


def find_part(path: Path) -> TreePart | None:
    """Returns the part `path`, such as trees/update-000012, or the file of lines at this path; None
    if there is none."""
    path = path.absolute()
    # Runs of 0.7 had files of lines, whose names are in people's scripts.
    name = path.name.removesuffix(_LINES)
    for place in (path, path.with_name(name + _PACKED), path.with_name(name + _LINES)):
        if place.is_file():
            # A user's own link may lead anywhere; those in a run folder may not.
            return part_of(place if place.parent.name == "trees" else place.resolve())
    return None


def parts_in(folder: Path, kind: str = "") -> list[TreePart]:
    """Returns the parts in a folder of trees by number, each update before its evaluations, without
    links that lead out of it; `kind` chooses."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        # A resume may have just removed one, and a link may point to itself.
        with suppress(OSError):
            if path.name.endswith((_LINES, _PACKED)) and not leads_outside(path, folder):
                part = part_of(path)
                if PART_NAME.fullmatch(part.name) and kind in ("", part.kind):
                    found.append(part)
    return sorted(found, key=lambda one: (one.update, one.kind != "update", one.name))


def cut_parts(folder: Path, update: int, *, is_closed: bool = True) -> None:
    """Removes what was written after an update, which is evaluated unless it is not closed."""
    for part in parts_in(folder):
        is_repeated = part.update == update and part.kind != "update" and not is_closed
        if part.update > update or is_repeated:
            part.path.unlink()


def drop_parts(folder: Path, update: int) -> None:
    """Removes the trees of an update and of earlier ones; those of evaluations stay."""
    for part in parts_in(folder, "update"):
        if part.update <= update:
            part.path.unlink()
