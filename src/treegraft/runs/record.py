"""The run folder: written, read back, and cut to a checkpoint when a run resumes.

    runs/NAME/
      config.json                       resolved settings
      metrics.jsonl                     one line per update
      trees/update-000012.jsonl.zst     whole trees, advantages and ratios included (`tree_files`)
      trees/eval-000010-greedy.jsonl.zst    the same of an evaluation
      checkpoints/update-000010/        a folder that transformers loads, and treegraft/ in it

metrics.jsonl grows; every other file is written whole under another name and then renamed, so that
no reader finds half of one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from treegraft.core.errors import CheckpointError, DataError, nearest
from treegraft.core.files import (
    LineFile,
    free_name,
    leads_outside,
    open_own,
    parse_json,
    storage_fault,
    write_atomically,
)
from treegraft.core.text import plain
from treegraft.core.types import Tree
from treegraft.runs.tree_files import cut_parts, find_part, parts_in
from treegraft.runs.trust import remember


def read_trees(path: Path | str) -> list[Tree]:
    """Returns the trees of all updates of a run folder in order, of one update or evaluation
    (RUN/trees/update-000012), or of a file.

    Raises:
        DataError: there is nothing of that name, or a tree is damaged, by number.
    """
    place = Path(path)
    if place.is_dir():
        # A folder of trees alone is read too, as somebody may have copied it.
        folder = place / "trees" if (place / "trees").is_dir() else place
        parts = parts_in(folder, "update")
    elif part := find_part(place):
        parts = [part]
    else:
        raise DataError(
            f"trees '{path}': there is nothing of that name; expected a run folder, a part of it"
            " such as RUN/trees/update-000012, or a .jsonl file of trees",
            code="trees-missing",
        )
    return [tree for part in parts for tree in part.trees()]


# ---------------------------------------------------------------------- the folder


def runs_beside(path: Path) -> str:
    """Returns a sentence that names the runs where `path` was looked for, the nearest or the newest
    ones; "" where there are none."""
    home = path.parent if any(path.parent.glob("*/metrics.jsonl")) else Path("runs")
    found = {str(one.parent): one.stat().st_mtime for one in home.glob("*/metrics.jsonl")}
    newest = sorted(found, key=lambda name: -found[name])
    close = nearest(str(home / path.name), newest)
    return close or (f" There are {', '.join(newest[:5])}." if newest else "")


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.warmup_path = path / "warmup.jsonl"
        self.trees_dir = path / "trees"
        self.checkpoints_dir = path / "checkpoints"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config_json: str, *, is_named: bool = True) -> RunFolder:
        """Returns a new folder with the resolved settings in it.

        Args:
            is_named: whether the user chose the name; another one gets a number where it is taken.

        Raises:
            CheckpointError: the folder exists.
        """
        if is_named:
            cls.refuse_unusable(path)
        # Made aside, each process its own, and renamed: a killed process leaves no folder that
        # looks like a run, and of several that want one name only one can get it.
        partial = path.with_name(f".{secrets.token_hex(8)}.partial")
        try:
            for folder in ("trees", "checkpoints"):
                (partial / folder).mkdir(parents=True)
            write_atomically(partial / "config.json", config_json)
            remember(partial / "config.json")
            partial.rename(path)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            # Another process may have taken the name meanwhile.
            if os.path.lexists(path) and not is_named:
                return cls.create(free_name(path), config_json, is_named=False)
            cls.refuse_unusable(path)
            raise CheckpointError(
                f"run folder '{path}' could not be made ({storage_fault(error) or error}); expected"
                " a folder that can be written to and has room. Choose another run.dir.",
                code="run-not-made",
            ) from error
        return cls(path)

    @staticmethod
    def refuse_unusable(path: Path) -> None:
        """Raises CheckpointError if no folder can be made at `path`, or something is there."""
        if os.path.lexists(path):
            raise CheckpointError(
                f"run folder '{path}' exists; expected a new name. Choose another run.name, or"
                f" continue that run with: treegraft train --resume {path}",
                code="run-exists",
            )
        above = next(one for one in path.absolute().parents if os.path.lexists(one))
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise CheckpointError(
                f"run folder '{path}' cannot be made: '{above}' is not a folder that can be written"
                " to. Choose another run.dir.",
                code="run-not-made",
            )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Returns an existing folder.

        Raises:
            CheckpointError: it is not a run folder.
        """
        if not (path / "config.json").exists():
            fault = "there is no such folder"
            if path.exists():
                fault = "it has no config.json" if path.is_dir() else "it is a file"
            raise CheckpointError(
                f"'{path}' is not a run folder: {fault}; expected one that `treegraft train` made,"
                f" e.g. runs/NAME.{runs_beside(path)}",
                code="not-a-run",
            )
        return cls(path)

    def refuse_foreign(self) -> None:
        """Raises CheckpointError for a link that leads out of the folder, where going on with the
        run would write and remove, and for a pipe or device, whose reader would wait."""
        for place in (*self.path.glob("*"), *self.path.glob("buffer/*")):
            if place.is_symlink() and leads_outside(place, self.path):
                fault = f"a link to '{os.path.realpath(place)}'"
            elif place.exists() and not (place.is_file() or place.is_dir()):
                fault = "a pipe, socket or device"
            else:
                continue
            raise CheckpointError(
                f"run folder '{self.path}': {place.relative_to(self.path)} is {fault}; expected"
                " files and folders of its own alone, since a resumed run writes and removes there."
                " Put what a link leads to in its place, and remove anything else. To keep a run on"
                " another disk, move the whole folder and link that.",
                code="run-entry-foreign",
            )

    def claim(self) -> None:
        """Locks the run for this process until `release` or the end of the process.

        Raises:
            CheckpointError: another process is at work in it.
        """
        try:
            import fcntl
        except ImportError:  # not a Unix: no protection there
            return
        try:
            # The system frees the lock of a process that was killed.
            lock = open_own(self.path / ".lock")
        except OSError as error:
            raise CheckpointError(
                f"run folder '{self.path}' cannot be worked in ({storage_fault(error) or error});"
                " expected a folder that can be written to, with a file .lock or none in it.",
                code="run-unwritable",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise CheckpointError(
                f"run folder '{self.path}': another process is at work in it; expected none. "
                "Wait for its end, or stop it with Ctrl-C.",
                code="run-in-use",
            ) from error
        self._lock = lock

    def release(self) -> None:
        """Lets other processes work in this run."""
        if self._lock is not None:
            self._lock.close()

    def refuse_removed(self) -> None:
        """Raises CheckpointError if the folder was removed, which a writer would make again."""
        if not (self.path / "config.json").exists():
            raise CheckpointError(
                f"run folder '{self.path}' was removed or moved while the run was at work; expected"
                " it to stay. Put it back, or start a new run.",
                code="run-removed",
            )

    def append_metrics(self, update: int, metrics: Mapping[str, float]) -> None:
        """Adds one line to metrics.jsonl. Raises CheckpointError if the folder was removed."""
        # Else the append would make a folder of one file, which looks like a run.
        self.refuse_removed()
        line = json.dumps({"update": update, **dict(sorted(metrics.items()))})
        LineFile(self.metrics_path).append(line)

    def append_warmup(self, metrics: Mapping[str, float]) -> None:
        """Adds one line, that of an evaluation during the warm-up, to warmup.jsonl."""
        line = json.dumps({"update": 0, **dict(sorted(metrics.items()))})
        LineFile(self.warmup_path).append(line)

    def cut_warmup(self, num_steps: int) -> None:
        """Removes the evaluations from so many warm-up steps on, which come again."""
        if self.warmup_path.exists():
            lines = read_metrics(self.path, self.warmup_path.name)
            kept = [line for line in lines if line.get("warmup/num_steps", 0) < num_steps]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            write_atomically(self.warmup_path, text)

    def metrics_size(self) -> int:
        """Returns the length of metrics.jsonl in bytes."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def trees_path(self, update: int, kind: str = "") -> Path:
        """Returns what `read_trees` and `write_trees` call an update's trees, or (kind "greedy",
        "sampled") those of an evaluation after it."""
        return self.trees_dir / (f"eval-{update:06d}-{kind}" if kind else f"update-{update:06d}")

    def cut_before(self, update: int) -> None:
        """Removes the metrics and trees of `update` and of later ones."""
        self.refuse_foreign()
        size = 0
        if self.metrics_path.exists():
            lines = read_metrics(self.path)
            num_kept = sum(line["update"] < update for line in lines)
            texts = self.metrics_path.read_bytes().split(b"\n")[:num_kept]
            size = sum(len(text) + 1 for text in texts)
        self.cut_to(update - 1, size)

    def cut_to(self, update: int, metrics_size: int, *, is_closed: bool = True) -> None:
        """Removes all metrics and trees written after the checkpoint of `update`, which was written
        before its evaluation unless it is closed."""
        if self.metrics_path.exists():
            with open_own(self.metrics_path, "ab") as metrics:
                metrics.truncate(metrics_size)
        cut_parts(self.trees_dir, update, is_closed=is_closed)


def read_metrics(run_dir: Path | str, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """Returns the lines of a run's metrics.jsonl, without a last one that is being written; or of
    its warmup.jsonl, which has the evaluations during the warm-up.

    Raises:
        DataError: there is no such file, or a line is not one of metrics.
    """
    path = Path(run_dir) / name
    if not path.exists():
        if (Path(run_dir) / "config.json").exists():
            raise DataError(
                f"run '{run_dir}' recorded no metrics yet; wait for its first line",
                code="no-metrics-yet",
            )
        raise DataError(f"'{run_dir}' has no {name}; expected a run folder", code="metrics-missing")
    try:
        # What follows the last line break is a line that is being written.
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DataError(
            f"'{path}' could not be read ({storage_fault(error) or error})", code="file-unreadable"
        ) from error
    return [_metrics_line(line, f"'{path}', line {n}") for n, line in enumerate(lines, start=1)]


def _metrics_line(line: bytes, where: str) -> dict[str, float]:
    try:
        found: dict[str, float] = parse_json(line)
        for key, value in found.items():
            if not isinstance(value, int | float):
                raise ValueError(f"{key} is not a number")
            float(value)  # refuses integers beyond a float's range
        # Neither NaN nor infinite.
        if not 0 <= found["update"] < 1 << 53:
            raise ValueError("its update is out of range")
        return found
    except (ValueError, OverflowError, AttributeError, KeyError) as error:
        raise DataError(
            f"{where}: not a line of metrics ({plain(repr(error), 200)}); the file was damaged or"
            " changed by hand. Put back a copy of it, or remove the line to look at the rest",
            code="metrics-line-invalid",
        ) from error
