"""Run folders as the viewer reads them: metrics as they grow, and an index of where in its files
each tree begins.

Nothing is parsed before it is asked for. Opening a run lists its files; a page of one update reads
that update's file; a search through all updates looks at the bytes of a line before it parses it.
What is kept in memory is the place of each line and the summaries of the last few files.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import DataError
from treegraft.runs.record import RunFolder
from treegraft.view.shapes import ids_above, summarise
from treegraft.view.stepindex import StepIndex, parse_indexed, read_steps

FILE_NAME = re.compile(r"(update|eval)-(\d{6,})(?:-([a-z]+))?")
"""The stem of a file of trees; nothing else is served."""
_HEAD = re.compile(rb'\{"group_id":("(?:[^"\\]|\\.)*")')
_LIVE_S = 600.0
"""A run that wrote within this time and has updates left counts as running."""
_KEPT_FILES = 24
"""Files whose summaries stay in memory."""
_KEPT_TREES = 16
"""Trees of which the places of their steps stay in memory."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file of trees/."""

    name: str
    """Without the suffix, e.g. "update-000012" or "eval-000010-greedy"."""
    kind: str
    """"update", or the kind of evaluation: "greedy" or "sampled"."""
    update: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class _Lines:
    stamp: tuple[int, int]
    starts: array[int]
    """Where each line begins, and the end of the file."""
    tasks: tuple[str, ...]
    """Task id of each line."""


class Run:
    """One run folder, finished or being written. Every method may be called from any thread."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Raises CheckpointError: not a run folder."""
        self.folder = RunFolder.open(path)
        self.path = path.resolve()
        self.name = name or self.path.name
        self._lock = threading.Lock()
        self._metrics: list[dict[str, Any]] = []
        self._read_to, self._era = 0, 0
        self._lines: dict[str, _Lines] = {}
        self._summaries: OrderedDict[tuple[str, int, int], list[dict[str, Any]]] = OrderedDict()
        self._steps: OrderedDict[tuple[str, int, int, int], StepIndex] = OrderedDict()

    def config(self) -> dict[str, Any]:
        """Returns the resolved settings. Raises DataError: config.json is damaged."""
        try:
            found: dict[str, Any] = json.loads(
                (self.path / "config.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"'{self.path}/config.json' cannot be read ({error}); expected the settings of"
                " a run"
            ) from error
        return found

    # ------------------------------------------------------------------ metrics

    def metrics(self) -> tuple[int, list[dict[str, Any]]]:
        """Returns the era and all whole lines of metrics.jsonl so far.

        The era grows when the file was cut or replaced (a resume), so that what was read before no
        longer holds.
        """
        path = self.folder.metrics_path
        with self._lock:
            size = path.stat().st_size if path.exists() else 0
            if size < self._read_to:
                self._metrics, self._read_to, self._era = [], 0, self._era + 1
            if size > self._read_to:
                with path.open("rb") as file:
                    file.seek(self._read_to)
                    data = file.read(size - self._read_to)
                # A line that is being written is left for the next time.
                whole = data[: data.rfind(b"\n") + 1]
                self._read_to += len(whole)
                self._metrics += [
                    line for raw in whole.splitlines() if (line := _metrics_line(raw)) is not None
                ]
            return self._era, list(self._metrics)

    def state(self) -> dict[str, Any]:
        """Returns what changes when the run has written: cheap, for asking again and again."""
        metrics = self.folder.metrics_path
        stat = metrics.stat() if metrics.exists() else None
        files = self.files()
        era, lines = self.metrics()
        newest = max(
            [file.mtime_ns for file in files] + ([stat.st_mtime_ns] if stat else []), default=0
        )
        total = self.config().get("run", {}).get("num_updates", 0)
        done = int(lines[-1].get("update") or 0) if lines else 0
        is_live = done < total and time.time() - newest / 1e9 < _LIVE_S
        return {
            "era": era,
            "num_lines": len(lines),
            "num_files": len(files),
            "newest": newest,
            "update": done,
            "num_updates": total,
            "is_live": is_live,
        }

    # ------------------------------------------------------------------ files of trees

    def files(self) -> list[TreeFile]:
        """Returns the files of trees, updates and evaluations in order."""
        found = []
        folder = self.path / "trees"
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = FILE_NAME.fullmatch(entry.stem)
            if match is None or entry.suffix != ".jsonl" or not self._is_inside(entry):
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:  # a resume has just cut it away
                continue
            kind = "update" if match[1] == "update" else match[3] or "eval"
            found.append(TreeFile(entry.stem, kind, int(match[2]), stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda file: (file.update, file.kind != "update", file.name))

    def _is_inside(self, path: Path) -> bool:
        """A link may lead out of the run folder; what lies there is not served."""
        return not path.is_symlink() or path.resolve().is_relative_to(self.path)

    def _path(self, name: str) -> Path:
        path = self.path / "trees" / f"{name}.jsonl"
        if FILE_NAME.fullmatch(name) is None or not path.is_file() or not self._is_inside(path):
            raise DataError(
                f"run '{self.name}' has no trees '{name}'; expected a name such as update-000001"
            )
        return path

    def _index(self, name: str) -> _Lines:
        """Where the lines of a file are; read once and again when the file has changed."""
        path = self._path(name)
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        with self._lock:
            known = self._lines.get(name)
        if known is not None and known.stamp == stamp:
            return known
        starts, tasks, place = array("Q", [0]), list[str](), 0
        with path.open("rb") as file:
            for line in file:
                place += len(line)
                starts.append(place)
                tasks.append(_task_of(line))
        made = _Lines(stamp, starts, tuple(tasks))
        with self._lock:
            self._lines[name] = made
        return made

    def num_trees(self, name: str) -> int:
        """Returns how many trees a file holds."""
        return len(self._index(name).tasks)

    def _span(self, name: str, number: int) -> tuple[_Lines, int, int]:
        """The index of a file, and where one of its lines begins and ends."""
        lines = self._index(name)
        if not 0 <= number < len(lines.tasks):
            raise DataError(
                f"'{name}' of run '{self.name}' holds {len(lines.tasks)} trees; there is no number"
                f" {number}"
            )
        return lines, lines.starts[number], lines.starts[number + 1]

    def line(self, name: str, number: int) -> bytes:
        """Returns one tree as it was written. Raises DataError: there is no such file or tree."""
        _, begin, end = self._span(name, number)
        return self._read(name, begin, end)

    def _read(self, name: str, begin: int, end: int) -> bytes:
        with self._path(name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def _load(self, name: str, number: int) -> tuple[dict[str, Any], StepIndex, int]:
        """One tree parsed, the places of its steps, and where its line begins."""
        lines, begin, end = self._span(name, number)
        tree, index = _parsed(self._read(name, begin, end), name, number)
        with self._lock:
            self._steps[name, number, *lines.stamp] = index
            while len(self._steps) > _KEPT_TREES:
                self._steps.popitem(last=False)
        return tree, index, begin

    def tree(self, name: str, number: int) -> dict[str, Any]:
        """Returns one tree parsed. Raises DataError: there is none, or it is damaged."""
        return self._load(name, number)[0]

    def path_of(self, name: str, number: int, leaf: int) -> dict[str, Any]:
        """Returns one tree with the steps of one leaf's path alone; the first time the whole line
        is parsed, then that path only.

        Raises:
            DataError: there is no such tree or leaf, or it is damaged.
        """
        lines, begin, _ = self._span(name, number)
        with self._lock:
            index = self._steps.get((name, number, *lines.stamp))
        if index is None:
            _, index, begin = self._load(name, number)
        leaves = index.head["leaves"]
        if not 0 <= leaf < len(leaves):
            raise DataError(
                f"'{name}', tree {number} has {len(leaves)} leaves; there is no leaf {leaf}"
            )
        try:
            return read_steps(
                index,
                ids_above(leaves[leaf]["step_id"]),
                lambda first, last: self._read(name, begin + first, begin + last),
            )
        except ValueError as error:
            raise DataError(
                f"'{name}' of run '{self.name}' has just been written anew; load the page again"
            ) from error

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Returns a summary of each tree of a file, in order."""
        stamp = self._index(name).stamp
        key = (name, *stamp)
        with self._lock:
            if key in self._summaries:
                self._summaries.move_to_end(key)
                return self._summaries[key]
        with self._path(name).open("rb") as file:
            made = [
                summarise(_parsed(line, name, number)[0]) | {"file": name, "n": number}
                for number, line in enumerate(file)
            ]
        with self._lock:
            self._summaries[key] = made
            while len(self._summaries) > _KEPT_FILES:
                self._summaries.popitem(last=False)
        return made

    def raw_lines(self, name: str, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Returns the lines of a file with their numbers, from `first` on."""
        lines = self._index(name)
        with self._path(name).open("rb") as file:
            file.seek(lines.starts[min(first, len(lines.tasks))])
            yield from enumerate(file, start=first)

    def with_task(self, task_id: str) -> list[tuple[TreeFile, int]]:
        """Returns every tree of a task: its file and number, in order of updates."""
        return [
            (file, n)
            for file in self.files()
            for n, task in enumerate(self._index(file.name).tasks)
            if task == task_id
        ]


def _metrics_line(raw: bytes) -> dict[str, Any] | None:
    """Returns a line with numbers that are none (a loss that blew up) as text; None for a damaged
    one."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }


def _task_of(line: bytes) -> str:
    """A group is named "update/task"; it stands at the head of its line, so that nothing need be
    parsed."""
    match = _HEAD.match(line)
    if match is None:
        return ""
    group: str = json.loads(match[1])
    return group.partition("/")[2]


def _parsed(line: bytes, name: str, number: int) -> tuple[dict[str, Any], StepIndex]:
    try:
        tree, index = parse_indexed(line)
    except ValueError as error:
        raise DataError(f"'{name}', line {number + 1}: not a recorded tree ({error})") from error
    if "steps" not in tree:
        raise DataError(f"'{name}', line {number + 1}: not a recorded tree (it has no steps)")
    return tree, index


def open_runs(paths: Sequence[Path]) -> dict[str, Run]:
    """Returns the runs by name; two folders of one name get numbers.

    Raises:
        CheckpointError: one of them is no run folder.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        base = path.resolve().name
        number, name = 2, base
        while name in runs:
            if runs[name].path == path.resolve():
                break
            name, number = f"{base}-{number}", number + 1
        else:
            runs[name] = Run(path, name)
    return runs


__all__ = ["FILE_NAME", "Run", "TreeFile", "open_runs"]
