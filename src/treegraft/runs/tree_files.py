"""Files of trees: a hundred updates in one, each tree compressed by itself.

    trees/updates-000100.jsonl.zst    updates 100 to 199, as they came
    trees/evals-000100.jsonl.zst      evaluations after these

`zstdcat` makes lines of it, one tree each. A part, the trees of one update or evaluation, is a head
in a skippable frame of zstd (RFC 8878, section 3.1.2) and a frame for each tree:

    NAME BYTES CHECKSUM [["TASK", BYTES], ...]    of its frames together, and of each

Tasks with names of more than a megabyte together are "" there.

Parts are appended. One that a crash cut off is none, and a resume removes it. Before 0.8 a part was
a file of lines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from treegraft.core.errors import DataError
from treegraft.core.files import (
    append_whole,
    checksum,
    free_name,
    leads_outside,
    open_inside,
    open_own,
    parse_json,
    write_atomically,
)
from treegraft.core.types import Tree
from treegraft.runs.tree_json import DAMAGE, parse_tree, tree_to_json

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PART_NAME = re.compile(r"(update|eval)-([0-9]{6,12})(?:-([a-z]{1,20}))?")
_ENDING = ".jsonl.zst"
_NUM_IN_FILE = 100
_OPENING = b"\x5e\x2a\x4d\x18"
_HEAD = re.compile(
    re.escape(_OPENING) + rb"(.{4})((?:update|eval)-[0-9a-z-]{6,34}) ([0-9]{1,15}) ([0-9a-f]{32}) ",
    re.DOTALL,
)
_READ = 4096
"""Bytes read at a head."""
_LONGEST_START = 128
"""Bytes of a head before its index."""
_MOST_HEAD = 1 << 20
_MOST_HOPS = 1000
"""From head to head in a file, which a stranger may have written."""
_MOST_LINE = 1 << 28
"""Longest tree in bytes."""
_MOST_GROWN = 1000
"""Bytes of a tree, beyond 4 MB, for each of its frame: a small one can hold zeros without end, and
equal trajectories pack to a few hundredths."""
_MOST_LISTS = 1 << 22
"""Lists and objects of a tree: two letters of JSON become sixty-four bytes of memory."""
_TASK = re.compile(rb'\{"group_id":"(?:[^"\\]|\\.)*","task":\{"id":("(?:[^"\\]|\\.)*")')
"""How a line begins: ten thousand files are not parsed for the ids of their tasks."""
_OPTIONS: Mapping[int, int] = {
    zstd.CompressionParameter.compression_level: 6,
    zstd.CompressionParameter.checksum_flag: 1,
}


@dataclass(frozen=True, slots=True)
class TreePart:
    """The trees of one update or evaluation."""

    name: str
    """Such as "update-000012" and "eval-000010-greedy"."""
    path: Path
    within: Path
    """The folder that no link may lead out of."""
    begin: int
    body: int
    """Where the first tree begins."""
    end: int
    checksum: str
    """Of the name and what follows the checksum; empty for a file of lines."""
    mtime_ns: int = field(compare=False)
    """Of its file, to which others may have been added."""
    index: bytes = field(compare=False, repr=False, default=b"")
    """What its head says of each tree, as JSON."""

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
    def size(self) -> int:
        """Its bytes."""
        return self.end - self.begin

    @property
    def key(self) -> tuple[TreePart, int]:
        """What differs once it has changed."""
        return self, 0 if self.checksum else self.mtime_ns

    @property
    def label(self) -> str:
        """Its name in the run folder."""
        return f"trees/{self.name}" if self.checksum else f"trees/{self.path.name}"

    def places(self) -> list[tuple[str, int, int]]:
        """Returns task, begin and end of each tree; the task is "" for a damaged line, and if the
        head has no room for it. Raises DataError for a damaged head."""
        sizes: list[tuple[str, int]] = []
        with self._reading():
            if self.checksum:
                sizes = [(str(task), int(size)) for task, size in parse_json(self.index)]
                if self.body + sum(size for _, size in sizes) != self.end:
                    raise ValueError("the sizes of its trees are others")
            else:
                with open_inside(self.path, self.within) as file:
                    for line in file:
                        task = _TASK.match(line)
                        sizes.append((str(json.loads(task[1])) if task else "", len(line)))
        found = []
        begin = self.body
        for name, size in sizes:
            found.append((name, begin, begin + size))
            begin += size
        return found

    def lines(self, first: int = 0, num: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yields the texts of trees with their numbers from `first` on, `num` of them; None for
        all. Raises DataError for a damaged one."""
        chosen = slice(first, None if num is None else first + num)
        with open_inside(self.path, self.within) as file:
            for number, (_, begin, end) in enumerate(self.places()[chosen], start=first):
                file.seek(begin)
                data = file.read(end - begin)
                if self.checksum:
                    with self._reading(f", line {number + 1}"):
                        data = _unpacked(data)
                yield number, data

    @contextmanager
    def _reading(self, where: str = "") -> Iterator[None]:
        try:
            yield
        except (*DAMAGE, zstd.ZstdError) as error:
            raise DataError(
                f"'{self.label}'{where}: not a recorded tree ({error})", code="tree-unreadable"
            ) from error

    def trees(self) -> Iterator[Tree]:
        """Yields the trees. Raises DataError for a damaged one."""
        where = self.label if self.checksum else self.path
        for number, line in self.lines():
            yield parse_tree(line, f"trees '{where}', line {number + 1}")

    def data(self) -> bytes:
        """Returns its bytes."""
        with open_inside(self.path, self.within) as file:
            file.seek(self.begin)
            return file.read(self.size)

    def sum_here(self) -> str:
        """Returns the checksum of what is there: `checksum`, if that is what was written."""
        data = self.data()
        head = _HEAD.match(data)
        return checksum(self.name.encode() + data[head.end() if head else 0 :])


def _unpacked(frame: bytes) -> bytes:
    """The line in a frame. Raises ValueError or ZstdError: it is damaged, or would fill the
    memory."""
    most = min(_MOST_LINE, (1 << 22) + _MOST_GROWN * len(frame))
    reader = zstd.ZstdDecompressor()
    line = reader.decompress(frame, max_length=most)
    if not reader.eof:
        raise ValueError(f"cut off, or over {most >> 20} MB")
    if line.count(b"[") + line.count(b"{") > _MOST_LISTS:
        raise ValueError(f"over {_MOST_LISTS:,} lists")
    return line


def pack_of(path: Path) -> Path | None:
    """Returns the file that holds `trees/update-000012`; None for what is not named like that."""
    found = PART_NAME.fullmatch(path.name.removesuffix(".jsonl"))
    if found is None or path.parent.name != "trees":
        return None
    return path.with_name(f"{found[1]}s-{int(found[2]) // _NUM_IN_FILE * 100:06d}{_ENDING}")


def write_trees(path: Path, trees: Iterable[Tree]) -> None:
    """Adds the part `path` to its file, so that it is there whole or not at all; outside a run
    folder writes a file of lines."""
    trees = list(trees)
    lines = [f"{tree_to_json(tree)}\n".encode() for tree in trees]
    if (pack := pack_of(path)) is None:
        write_atomically(path, b"".join(lines))
        return
    frames = [zstd.compress(line, options=_OPTIONS) for line in lines]
    sizes = [(tree.task.id, len(frame)) for tree, frame in zip(trees, frames, strict=True)]
    index = json.dumps(sizes, separators=(",", ":")).encode()
    if len(index) > _MOST_HEAD - _READ:
        index = json.dumps([("", size) for _, size in sizes], separators=(",", ":")).encode()
    body = index + b"".join(frames)
    name = path.name.removesuffix(".jsonl")
    head = f"{name} {len(body) - len(index)} {checksum(name.encode() + body)} ".encode()
    append_whole(pack, _OPENING + struct.pack("<I", len(head) + len(index)) + head + body)


def parts_of(path: Path, within: Path | None = None) -> list[TreePart]:
    """Returns the parts of a file that are whole, in order. Behind a damaged head it looks for the
    next one.

    Args:
        within: the folder that no link may lead out of; None for the file's own.

    Raises:
        OSError: it cannot be read.
    """
    within = within or path.parent
    found = []
    begin = 0
    with open_inside(path, within) as file:
        stat = os.fstat(file.fileno())
        if not path.name.endswith(_ENDING):
            return [TreePart(path.stem, path, within, 0, 0, stat.st_size, "", stat.st_mtime_ns)]
        for _ in range(_MOST_HOPS):
            if (place := _next_head(file, begin)) is None:
                break
            begin, head = place
            length = 8 + int.from_bytes(head[1], "little")
            body = begin + length
            end = body + int(head[3])
            name = head[2].decode()
            if length > _MOST_HEAD or end > stat.st_size or not PART_NAME.fullmatch(name):
                begin += 1
                continue
            file.seek(begin + len(head[0]))
            index = file.read(length - len(head[0]))
            part = (name, path, within, begin, body, end, head[4].decode(), stat.st_mtime_ns, index)
            found.append(TreePart(*part))
            begin = end
    return found


def _next_head(file: BinaryIO, begin: int) -> tuple[int, re.Match[bytes]] | None:
    """Where the next head begins, at `begin` or behind it, and its start."""
    while True:
        file.seek(begin)
        data = file.read(_READ)
        if head := _HEAD.search(data):
            return begin + head.start(), head
        if len(data) < _READ:
            return None
        begin += _READ - _LONGEST_START


def files_in(folder: Path) -> list[Path]:
    """Returns the files of trees of a folder, without links that lead out of it."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        stem = path.name.removesuffix(".zst").removesuffix(".jsonl")
        is_pack = path.name.endswith(_ENDING) and re.fullmatch("(update|eval)s-[0-9]{6,12}", stem)
        is_part = path.name.endswith(".jsonl") and PART_NAME.fullmatch(stem)
        if (is_pack or is_part) and not (path.is_symlink() and leads_outside(path, folder)):
            found.append(path)
    return found


def in_order(parts: Iterable[TreePart]) -> list[TreePart]:
    """Returns parts by number, each update before its evaluations; of one name the last."""
    found = {part.name: part for part in parts}.values()
    return sorted(found, key=lambda one: (one.update, one.kind != "update", one.name))


def parts_in(folder: Path, kind: str = "") -> list[TreePart]:
    """Returns all parts in a folder of trees, in order; `kind` chooses."""
    found = in_order(part for path in sorted(files_in(folder)) for part in parts_of(path))
    return [part for part in found if kind in ("", part.kind)]


def find_part(path: Path) -> TreePart | None:
    """Returns the part `path`, such as trees/update-000012, or the file of lines at this path; None
    where there is none."""
    path = path.absolute()
    if path.parent.name != "trees" and path.is_file():
        return parts_of(path.resolve())[0]
    for place in (path, path.with_name(f"{path.name}.jsonl"), pack_of(path)):
        if place is not None and place.is_file():
            name = path.name.removesuffix(".jsonl")
            if found := [part for part in parts_of(place) if part.name == name]:
                return found[-1]
    return None


def cut_parts(folder: Path, update: int, *, is_closed: bool = True) -> None:
    """Removes what was written after an update, which is evaluated unless it is not closed.

    A file of which something that cannot be read would go, other than the end of a later write that
    a crash cut off, is first copied to NAME.damaged.
    """

    def is_kept(part: TreePart) -> bool:
        is_closed_part = is_closed or part.kind == "update"
        return part.update < update or (part.update == update and is_closed_part)

    for path in files_in(folder):
        parts = parts_of(path)
        size = path.stat().st_size
        end = max((part.end for part in parts if is_kept(part)), default=0)
        num_known = sum(part.size for part in parts if part.begin >= end)
        last = parts[-1].end if parts else 0
        torn = _torn(path, last)
        if size - last < _LONGEST_START or (torn is not None and not is_kept(torn)):
            num_known += size - last
        if num_known < size - end:
            shutil.copyfile(path, free_name(path.with_name(f"{path.name}.damaged")))
        if not end:
            path.unlink()
        elif end < size:
            with open_own(path, "ab") as file:
                file.truncate(end)


def _torn(path: Path, begin: int) -> TreePart | None:
    """The part whose head is at this place, behind the last one that is whole."""
    with path.open("rb") as file:
        file.seek(begin)
        head = _HEAD.match(file.read(_LONGEST_START))
    return head and TreePart(head[2].decode(), path, path.parent, begin, begin, begin, "", 0)


def drop_parts(folder: Path, update: int) -> None:
    """Removes the trees of an update and of earlier ones; those of evaluations stay, and what
    cannot be read behind the last of them."""
    for path in files_in(folder):
        parts = [part for part in parts_of(path) if part.kind == "update" and part.update <= update]
        if parts:
            left = path.read_bytes()[parts[-1].end :]
            if left:
                write_atomically(path, left)
            else:
                path.unlink()
