"""Run folders as the viewer reads them: metrics as they grow, and trees one at a time.

Nothing is parsed before it is needed. Opening a run lists its updates; a page of one reads its
trees alone. The summaries of the last few updates stay in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.files import leads_outside, parse_json, read_inside
from treegraft.core.types import Trajectory, Tree
from treegraft.runs.checkpoint import latest_checkpoint
from treegraft.runs.metrics import meaning
from treegraft.runs.record import RunFolder, read_metrics, runs_beside
from treegraft.runs.tree_files import TreePart, parts_in
from treegraft.runs.tree_json import parse_tree
from treegraft.view.metrics import MAX_COUNT, MetricsTable, clean_lines
from treegraft.view.pages import draw, spell_unread, summarise
from treegraft.view.tokens import TokenTexts

LAST = ("reward/mean", "eval/accuracy", "eval/accuracy_sampled")
"""Metrics whose last values the list of runs has."""
_LIVE_S = 600.0
"""A run that wrote within this time and has updates left counts as running."""
_LOOK_S = 5.0
"""Seconds between two looks for new runs in a folder of runs."""
_DEEPEST = 3
"""Folders below a folder of runs in which runs are looked for."""
_KEPT_FILES = 24
"""Updates and evaluations whose summaries stay in memory."""
_KEPT_TREES = 4


class RunReader:
    """One run folder, finished or being written. Every method may be called from any thread."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Raises CheckpointError: not a run folder."""
        self.folder = RunFolder.open(path)
        self.path = path.resolve()
        self.name = name or self.path.name
        self.tokens = TokenTexts(self.path)
        """The texts of its tokens, if it has a checkpoint."""
        self._metrics = MetricsTable()
        self._state: tuple[Any, dict[str, Any]] | None = None
        # The page of a tree asks for one leaf after another.
        self._read_tree = lru_cache(_KEPT_TREES)(_read_tree)
        # By the part, which has the file's time: a file that changed is read again.
        self._read_groups = lru_cache(_KEPT_FILES)(_read_groups)

    def config(self) -> dict[str, Any]:
        """Returns the resolved settings.

        Raises:
            DataError: config.json is damaged, or a link that leads out of the run folder.
        """
        path = self._inside("config.json")
        try:
            found = parse_json(read_inside(path, self.path))
            if not all(isinstance(table, dict) for table in found.values()):
                raise ValueError("not every entry is a table")
        except (AttributeError, OSError, ValueError) as error:
            raise DataError(
                f"'{path}' cannot be read ({error}); expected the settings of a run, named tables",
                code="run-settings-unreadable",
            ) from error
        return dict(found)

    def setting(self, table: str, name: str) -> int | None:
        """Returns a whole number among the settings; None if there is none."""
        found = self.config().get(table, {}).get(name)
        return found if isinstance(found, int) and abs(found) <= MAX_COUNT else None

    def _inside(self, name: str) -> Path:
        path = self.path / name
        if leads_outside(path, self.path):
            raise DataError(
                f"'{path}' is a link that leads out of the run folder; such files are not read",
                code="link-leads-out",
            )
        return path

    # ------------------------------------------------------------------ metrics

    def table(self) -> MetricsTable:
        """Returns the metrics so far."""
        self._metrics.refresh(self._inside("metrics.jsonl"))
        return self._metrics

    def metrics(self) -> list[dict[str, Any]]:
        """Returns all whole lines of metrics.jsonl so far."""
        table = self.table()
        return table.lines(range(table.num_lines))

    def clean_metrics(self) -> tuple[list[dict[str, float]], list[str]]:
        """Returns one line of numbers an update, in order, and notes on what was left out of
        metrics.jsonl."""
        lines, notes = clean_lines(self.metrics())
        if num_damaged := self._metrics.num_damaged:
            notes.append(f"damaged lines of metrics.jsonl were left out: {num_damaged}")
        return lines, notes

    def warmup_metrics(self) -> list[dict[str, float]]:
        """Returns the evaluations during its warm-up, in order; empty for a run without one."""
        name = "warmup.jsonl"
        return read_metrics(self.path, name) if self._inside(name).is_file() else []

    @staticmethod
    def beside(path: Path) -> str:
        """Returns a sentence that names the runs in the folder of `path`; "" if there are none."""
        return runs_beside(path)

    @staticmethod
    def meaning(key: str) -> str:
        """Returns what a metric means; raises KeyError, naming the nearest one, for an unknown
        one."""
        return meaning(key)

    def latest_checkpoint(self) -> Path | None:
        """Returns the newest checkpoint, None if there is none yet."""
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
        self._state = (key, state)
        return state

    def _read_state(self, metrics: Path) -> dict[str, Any]:
        table = self.table()
        newest = 0
        # Each new file changes the time of its folder: a list of runs polls each run.
        for path in filter(Path.exists, [metrics, self.path / "trees"]):
            newest = max(newest, path.stat().st_mtime_ns)
        total = self.setting("run", "num_updates") or 0
        done = table.last_update()
        sums = table.axes([-1]) if table.num_lines else {}
        limits = {axis: self.setting("run", f"max_{axis}") for axis in ("calls", "tokens")}
        is_spent = any(most and sums.get(axis, [0.0])[-1] >= most for axis, most in limits.items())
        is_over = bool(table.num_lines) and (done >= total or is_spent)
        # By time rather than by the lock, which says nothing of a run on another machine.
        is_live = not is_over and time.time() - newest / 1e9 < _LIVE_S
        return {
            "num_lines": table.num_lines,
            "newest": newest,
            "update": done,
            "num_updates": total,
            "is_over": is_over,
            "is_live": is_live,
            "last": table.last(LAST),
            "sums": {axis: values[0] for axis, values in sums.items()},
            **self._named_by(),
        }

    def _named_by(self) -> dict[str, str]:
        """The settings that distinguish runs in a list, as text."""
        config = self.config()
        explorers = config.get("explore", {}).get("explorers")
        return {
            "explorers": " + ".join(map(str, explorers)) if isinstance(explorers, list) else "",
            "model": str(config.get("model", {}).get("path", ""))[-80:],
            "seed": str(config.get("run", {}).get("seed", ""))[:20],
        }

    # ------------------------------------------------------------------ files of trees

    def files(self) -> list[TreePart]:
        """Returns the updates and evaluations whose trees are recorded, in order."""
        folder = self.path / "trees"
        return [] if leads_outside(folder, self.path) else parts_in(folder)

    def _part(self, name: str) -> TreePart:
        # The name comes from a request, so it is compared and never made a path.
        for part in self.files():
            if part.name == name:
                return part
        raise DataError(
            f"run '{self.name}' has no trees '{name:.80}'; expected a name such as update-000001",
            code="trees-missing",
        )

    def num_trees(self, name: str) -> int:
        """Returns the number of trees of an update or evaluation."""
        return len(self._part(name).texts())

    def tree(self, name: str, number: int) -> Tree:
        """Returns one tree. Raises DataError: there is none, or it is damaged."""
        part = self._part(name)
        if not 0 <= number < (total := len(part.texts())):
            raise DataError(
                f"'{name}' of run '{self.name}' has {total} trees; there is no number"
                f" {number}, expected 0 to {total - 1}",
                code="no-such-tree",
            )
        return self._read_tree(part, number)

    def drawn(self, name: str, number: int) -> dict[str, Any]:
        """Returns one tree as pages show it: steps without their tokens, and leaves with their
        rewards and the effects of their grafts.

        Raises:
            DataError: there is none, or it is damaged.
        """
        tree = self.tree(name, number)
        found = draw(tree)
        spell_unread(found, tree, self.tokens.decode)
        return found

    def path_of(self, name: str, number: int, leaf: int) -> Trajectory:
        """Returns one trajectory.

        Raises:
            DataError: there is no such tree or leaf, or it is damaged.
        """
        tree = self.tree(name, number)
        if not 0 <= leaf < (total := len(tree.leaves)):
            raise DataError(
                f"tree {number} of '{name}' has {total} leaves, 0 to {total - 1}; there is no leaf"
                f" {leaf}",
                code="no-such-leaf",
            )
        return tree.trajectories()[leaf]

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Returns a summary of each tree of an update or evaluation, in order."""
        return self._read_groups(self._part(name))


def _read_tree(part: TreePart, number: int) -> Tree:
    ((_, line),) = part.lines(number, 1)
    return parse_tree(line, f"'{part.name}', line {number + 1}")


def _read_groups(part: TreePart) -> list[dict[str, Any]]:
    found = []
    for number, line in part.lines():
        tree = parse_tree(line, f"'{part.name}', line {number + 1}")
        found.append(summarise(tree) | {"file": part.name, "n": number})
    return found


class RunSet(Mapping[str, RunReader]):
    """The runs that were named, by name, and those below folders that were named. New runs of such
    a folder appear as it is asked for them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises CheckpointError: a path is neither a run folder nor a folder with runs in it."""
        self._lock = threading.Lock()
        self._runs: dict[str, RunReader] = {}
        self._known: set[Path] = set()
        self._folders: dict[str, str] = {}
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
        """Returns the folder of a run below the folder that was named; "" if it is directly
        in it, and for a run that was named itself."""
        return self._folders.get(name, "")

    def _look(self, home: Path) -> bool:
        """Adds the new runs below a folder; returns whether it has any."""
        has_runs = False
        for depth in range(1, _DEEPEST + 1):
            for config in sorted(home.glob("*/" * depth + "config.json")):
                path = config.parent
                place = path.relative_to(home)
                # Hidden folders are half-made runs.
                is_hidden = any(part.startswith(".") for part in place.parts)
                if not is_hidden and not leads_outside(path, home) and _is_run(path):
                    has_runs = True
                    self._add(path, str(place.parent).removeprefix("."))
        return has_runs

    def _add(self, path: Path, folder: str = "") -> None:
        # Two names of one folder, such as a link to it, are one run.
        place = path.resolve()
        if place in self._known:
            return
        numbered = (f"{place.name}-{number}" for number in count(2))
        name = next(one for one in chain([place.name], numbered) if one not in self._runs)
        self._runs = {**self._runs, name: RunReader(path, name)}
        self._folders[name] = folder
        self._known.add(place)

    def __getitem__(self, name: str) -> RunReader:
        return self._runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


def _is_run(path: Path) -> bool:
    # The folder of a model has a config.json too. A run that has just begun has neither metrics nor
    # trees, but its config.json has settings of runs.
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
