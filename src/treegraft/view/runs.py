"""Run folders as the viewer reads them: metrics as they grow, and trees one at a time.

Nothing is parsed before it is asked for. Opening a run lists its files; a page of one update reads
that update's file; a search through all updates looks at the bytes of a line before it parses it.
The places of trees and the summaries of the last few files stay in memory.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar

from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.files import leads_outside, open_inside, parse_json, read_inside
from treegraft.core.types import Trajectory, Tree
from treegraft.runs.checkpoint import latest_checkpoint
from treegraft.runs.metrics import meaning
from treegraft.runs.record import (
    RunFolder,
    TreePlace,
    read_metrics,
    read_places,
    read_trajectory,
    runs_beside,
)
from treegraft.runs.roles import Role, read_roles, roles_line
from treegraft.runs.tree_json import parse_tree
from treegraft.view.metrics import MAX_COUNT, MetricsTable, clean_lines
from treegraft.view.pages import draw, spell_unread, summarise
from treegraft.view.tokens import TokenTexts

T = TypeVar("T")
FILE_NAME = re.compile(r"(update|eval)-([0-9]{6,12})(?:-([a-z]{1,20}))?")
"""The stem of a file of trees; nothing else is served."""
LAST = ("reward/mean", "eval/accuracy", "eval/accuracy_sampled")
"""Metrics whose last values stand in the list of runs."""
_LIVE_S = 600.0
"""A run that wrote within this time and has updates left counts as running."""
_LOOK_S = 5.0
"""Seconds between two looks for new runs in a folder of runs."""
_DEEPEST = 4
"""Folders below a folder of runs in which runs are looked for."""
_KEPT_FILES = 24
"""Files whose places and summaries stay in memory."""


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


class RunReader:
    """One run folder, finished or being written. Every method may be called from any thread."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Raises CheckpointError: not a run folder."""
        self.folder = RunFolder.open(path)
        self.path = path.resolve()
        self.name = name or self.path.name
        self.tokens = TokenTexts(self.path)
        """The texts of its tokens, where it has a checkpoint."""
        self._lock = threading.Lock()
        self._metrics = MetricsTable()
        self._state: tuple[Any, dict[str, Any]] | None = None
        self._places: OrderedDict[tuple[str, int, int], list[TreePlace]] = OrderedDict()
        self._summaries: OrderedDict[tuple[str, int, int], list[dict[str, Any]]] = OrderedDict()

    def config(self) -> dict[str, Any]:
        """Returns the resolved settings.

        Raises:
            DataError: config.json is damaged, or a link that leads out of the run folder.
        """
        path = self._inside("config.json")
        try:
            found = parse_json(read_inside(path, self.path))
        except (OSError, ValueError) as error:
            raise DataError(
                f"'{path}' cannot be read ({error}); expected the settings of a run",
                code="run-settings-unreadable",
            ) from error
        if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
            raise DataError(
                f"'{path}' does not hold the settings of a run: expected named tables",
                code="run-settings-invalid",
            )
        return found

    def setting(self, table: str, name: str) -> int | None:
        """Returns a whole number among the settings; None where there is none."""
        found = self.config().get(table, {}).get(name)
        return found if isinstance(found, int) and abs(found) <= MAX_COUNT else None

    def _inside(self, name: str) -> Path:
        path = self.path / name
        if leads_outside(path, self.path):
            raise DataError(
                f"'{path}' is a link that leads out of the run folder; such files are not shown",
                code="link-leads-out",
            )
        return path

    # ------------------------------------------------------------------ metrics

    def table(self, *, waits: bool = False) -> tuple[MetricsTable, float]:
        """Returns the metrics so far, and the share of their file that has been read; `waits` reads
        all of it first."""
        return self._metrics, self._metrics.refresh(self._inside("metrics.jsonl"), waits=waits)

    def metrics(self) -> tuple[int, list[dict[str, Any]]]:
        """Returns the era and all whole lines of metrics.jsonl so far."""
        table, _ = self.table(waits=True)
        return table.era, table.lines(range(table.num_lines))

    def clean_metrics(self) -> tuple[list[dict[str, float]], list[str]]:
        """Returns one line of numbers an update, in order, and notes on what was left out of
        metrics.jsonl."""
        lines, notes = clean_lines(self.metrics()[1])
        if num_damaged := self.table()[0].num_damaged:
            notes.append(f"damaged lines of metrics.jsonl were left out: {num_damaged}")
        return lines, notes

    def warmup_metrics(self) -> list[dict[str, float]]:
        """Returns the evaluations during its warm-up, in order; empty for a run without one."""
        name = "warmup.jsonl"
        return read_metrics(self.path, name) if self._inside(name).is_file() else []

    @staticmethod
    def beside(path: Path) -> str:
        """Returns a sentence that names the runs where `path` was looked for; "" where there are
        none."""
        return runs_beside(path)

    @staticmethod
    def meaning(key: str) -> str:
        """Returns what a metric means; raises KeyError, naming the nearest one, for an unknown
        one."""
        return meaning(key)

    def roles(self) -> list[Role]:
        """Returns the actors of its cluster; none where there are none at present."""
        return read_roles(self.path / "roles.json")

    def latest_checkpoint(self) -> Path | None:
        """Returns the newest checkpoint, None where there is none yet."""
        return latest_checkpoint(self.folder.checkpoints_dir)

    def state(self) -> dict[str, Any]:
        """Returns the numbers that change when the run has written; cheap enough to be polled."""
        metrics = self._inside("metrics.jsonl")
        stats = [path.stat() if path.exists() else None for path in (metrics, self.path / "trees")]
        key = [(stat.st_mtime_ns, stat.st_size) if stat else None for stat in stats]
        # A folder of many finished runs is not read again for each question.
        if self._state and self._state[0] == key and not self._state[1]["is_live"]:
            return self._state[1]
        state = self._read_state(metrics)
        self._state = (key, state) if state["read_frac"] == 1.0 else None
        return state

    def _read_state(self, metrics: Path) -> dict[str, Any]:
        files = self.files()
        table, read_frac = self.table()
        times = [file.mtime_ns for file in files]
        newest = max([*times, metrics.stat().st_mtime_ns if metrics.exists() else 0])
        total = self.setting("run", "num_updates") or 0
        done = table.last_update()
        # By time rather than by the lock, which says nothing of a run on another machine.
        is_live = done < total and time.time() - newest / 1e9 < _LIVE_S
        return {
            "era": table.era,
            "num_lines": table.num_lines,
            "read_frac": read_frac,
            "num_files": len(files),
            "newest": newest,
            "update": done,
            "num_updates": total,
            "is_live": is_live,
            "roles": roles_line(self.path / "roles.json") if is_live else "",
            "last": table.last(LAST),
            "sums": {axis: values[0] for axis, values in table.axes([-1]).items()}
            if table.num_lines
            else {},
            **self._named_by(),
        }

    def _named_by(self) -> dict[str, str]:
        """The settings by which a list of runs tells them apart, as text."""
        config = self.config()
        explorers = config.get("explore", {}).get("explorers")
        return {
            "explorers": " + ".join(map(str, explorers)) if isinstance(explorers, list) else "",
            "model": str(config.get("model", {}).get("path", ""))[-80:],
            "seed": str(config.get("run", {}).get("seed", ""))[:20],
        }

    # ------------------------------------------------------------------ files of trees

    def files(self) -> list[TreeFile]:
        """Returns the files of trees, updates and evaluations in order."""
        found = []
        folder = self.path / "trees"
        if not folder.is_dir() or leads_outside(folder, self.path):
            return []
        for entry in os.scandir(folder):
            stem, _, ending = entry.name.rpartition(".")
            match = FILE_NAME.fullmatch(stem)
            # Of ten thousand files only the links are followed.
            if match is None or ending != "jsonl":
                continue
            if entry.is_symlink() and leads_outside(Path(entry.path), self.path):
                continue
            try:
                stat = entry.stat()
            except OSError:  # a resume has just cut it away, or a link points to itself
                continue
            kind = "update" if match[1] == "update" else match[3] or "eval"
            found.append(TreeFile(stem, kind, int(match[2]), stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda file: (file.update, file.kind != "update", file.name))

    def _path(self, name: str) -> Path:
        path = self.path / "trees" / f"{name}.jsonl"
        # The name is checked first: a long one would be an error of the file system.
        if (
            FILE_NAME.fullmatch(name) is None
            or leads_outside(path, self.path)
            or not path.is_file()
        ):
            raise DataError(
                f"run '{self.name}' has no trees '{name:.80}'; expected a name such as"
                " update-000001",
                code="trees-missing",
            )
        return path

    def _kept(
        self,
        name: str,
        kept: OrderedDict[tuple[str, int, int], list[T]],
        read: Callable[[Path], list[T]],
    ) -> list[T]:
        """What was read from a file of trees, read again when the file has changed."""
        path = self._path(name)
        stat = path.stat()
        key = (name, stat.st_mtime_ns, stat.st_size)
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        # Read without the lock: a large file must not stop the answers to other pages.
        found = read(path)
        with self._lock:
            kept[key] = found
            while len(kept) > _KEPT_FILES:
                kept.popitem(last=False)
        return found

    def _places_of(self, name: str) -> list[TreePlace]:
        return self._kept(name, self._places, read_places)

    def num_trees(self, name: str) -> int:
        """Returns the number of trees in a file."""
        return len(self._places_of(name))

    def _place(self, name: str, number: int) -> TreePlace:
        places = self._places_of(name)
        if not 0 <= number < len(places):
            raise DataError(
                f"'{name}' of run '{self.name}' holds {len(places)} trees; there is no number"
                f" {number}, expected 0 to {len(places) - 1}",
                code="no-such-tree",
            )
        return places[number]

    def tree(self, name: str, number: int) -> Tree:
        """Returns one tree. Raises DataError: there is none, or it is damaged."""
        place = self._place(name, number)
        with open_inside(self._path(name), self.path) as file:
            file.seek(place.begin)
            line = file.read(place.end - place.begin)
        return parse_tree(line, f"'{name}', line {number + 1}")

    def drawn(self, name: str, number: int) -> dict[str, Any]:
        """Returns one tree as pages show it: steps without their tokens, leaves with their rewards,
        for each graft its effect and its peers. Raises DataError: there is none, or it is
        damaged."""
        tree = self.tree(name, number)
        try:
            config = self.config()
        except DataError:  # damaged settings must not hide the trees
            config = {}
        found = draw(tree, config)
        spell_unread(found, tree, self.tokens.decode)
        return found

    def path_of(self, name: str, number: int, leaf: int) -> Trajectory:
        """Returns one trajectory, without parsing the others where the file has an index.

        Raises:
            DataError: there is no such tree or leaf, or it is damaged.
        """
        place = self._place(name, number)
        return read_trajectory(self._path(name), place, leaf, f"'{name}', tree {number}")

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Returns a summary of each tree of a file, in order."""

        def read(path: Path) -> list[dict[str, Any]]:
            with open_inside(path, self.path) as file:
                return [
                    summarise(parse_tree(line, f"'{name}', line {number + 1}"))
                    | {"file": name, "n": number}
                    for number, line in enumerate(file)
                ]

        return self._kept(name, self._summaries, read)

    def raw_lines(self, name: str, first: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of a file with their numbers, from `first` on."""
        with open_inside(self._path(name), self.path) as file:
            yield from islice(enumerate(file), first, None)

    def with_task(self, task_id: str) -> list[tuple[TreeFile, int]]:
        """Returns every tree of a task: its file and number, in order of updates."""
        needle = json.dumps(task_id).encode()
        return [
            (file, number)
            for file in self.files()
            if self._may_hold(file, needle)
            for number, place in enumerate(self._places_of(file.name))
            if place.task_id == task_id
        ]

    def _may_hold(self, file: TreeFile, needle: bytes) -> bool:
        """Whether a file's index, unread, may name a task; True where it has none that fits."""
        index = self.path / "trees-index" / f"{file.name}.json"
        try:
            data = index.read_bytes()
        except OSError:
            return True
        return needle in data or not data.startswith(b'{"size":%d,' % file.size)


class RunSet(Mapping[str, RunReader]):
    """The runs that were named, by name, and those below folders that were named. New runs of such
    a folder appear as it is asked for them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises CheckpointError: a path is neither a run folder nor a folder with runs in it."""
        self._lock = threading.Lock()
        self._runs: dict[str, RunReader] = {}
        self._known: set[Path] = set()
        self._homes = [
            path for path in paths if path.is_dir() and not (path / "config.json").exists()
        ]
        self._looked = 0.0
        for path in paths:
            if path not in self._homes:
                self._add(path)
            elif not self._look(path):
                raise CheckpointError(
                    f"'{path}' is neither a run folder nor a folder with runs in it: no"
                    f" config.json was found there or up to {_DEEPEST} folders below; expected one"
                    f" that `treegraft train` made, e.g. runs/NAME.{runs_beside(path)}",
                    code="not-a-run",
                )
        self._looked = time.monotonic()

    def refresh(self) -> None:
        """Looks for new runs, unless that was done a moment ago."""
        with self._lock:
            if not self._homes or time.monotonic() - self._looked < _LOOK_S:
                return
            for home in self._homes:
                self._look(home)
            self._looked = time.monotonic()

    def folder_of(self, name: str) -> str:
        """Returns the folder of a run below the folder that was named; "" where it lies directly
        in it, and for a run that was named itself."""
        path = self._runs[name].path.parent
        for home in self._homes:
            if path.is_relative_to(home.resolve()):
                return str(path.relative_to(home.resolve())).removeprefix(".")
        return ""

    def _look(self, home: Path) -> int:
        """Adds the new runs below a folder; returns how many runs it has."""
        found = 0
        for folder, below, files in os.walk(home):
            path = Path(folder)
            if "config.json" in files and _is_run(path):
                self._add(path)
                found += 1
            # A run holds no other runs, and its checkpoints are folders with a config.json too.
            if "config.json" in files or len(path.relative_to(home).parts) >= _DEEPEST:
                below.clear()
            below[:] = sorted(name for name in below if not name.startswith("."))
        return found

    def _add(self, path: Path) -> None:
        place = path.resolve()
        if place in self._known:
            return
        numbered = (f"{place.name}-{number}" for number in count(2))
        name = next(one for one in chain([place.name], numbered) if one not in self._runs)
        self._runs = {**self._runs, name: RunReader(path, name)}
        self._known.add(place)

    def __getitem__(self, name: str) -> RunReader:
        return self._runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


def _is_run(path: Path) -> bool:
    # The config.json of a model lies in a folder without metrics or trees; that of a run which has
    # just begun holds the settings of runs.
    if (path / "metrics.jsonl").exists() or (path / "trees").is_dir():
        return (path / "config.json").exists()
    try:
        found = parse_json(read_inside(path / "config.json", path))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and isinstance(found.get("run"), dict)


def open_runs(paths: Sequence[Path]) -> RunSet:
    """Returns the runs by name; two folders of one name get numbers, a folder that is named twice
    is one run.

    Raises:
        CheckpointError: a path is neither a run folder nor a folder with runs in it.
    """
    return RunSet(paths)
