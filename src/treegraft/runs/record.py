"""The run folder: written, read back, and cut to a checkpoint when a run resumes.

    runs/NAME/
      config.json                       resolved settings
      objects.json                      the Python objects that they lead to, where there are any
      metrics.jsonl                     one line per update
      trees/update-000012.jsonl         whole trees, one per line, advantages and ratios included
      trees/eval-000010-greedy.jsonl    the same of an evaluation
      trees-index/update-000012.json    where trees/update-000012.jsonl has each tree and step
      checkpoints/update-000010/        a folder that transformers loads, and treegraft/ in it

Every file but metrics.jsonl is written whole under another name and then renamed, so that no
reader finds half of one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from treegraft.core.errors import CheckpointError, DataError, nearest
from treegraft.core.files import (
    LineFile,
    open_inside,
    open_own,
    parse_json,
    read_inside,
    storage_fault,
    write_atomically,
)
from treegraft.core.given import Record
from treegraft.core.text import plain
from treegraft.core.types import (
    Trajectory,
    Tree,
)
from treegraft.runs.tree_json import DAMAGE, parse_tree, tree_from_dict, tree_texts
from treegraft.runs.trust import RUN, mark

# ---------------------------------------------------------------------- the index of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlace:
    """Where a file has one tree: all places in bytes from its beginning."""

    task_id: str
    """Empty for a damaged line of which no index was written."""
    begin: int
    end: int
    """Behind the line break."""
    steps: Mapping[str, tuple[int, int]]
    """Step id -> where its object begins and ends; empty where no index was written."""


def _index_path(path: Path) -> Path | None:
    """None outside the trees/ folder of a run: elsewhere an index would be in the way."""
    if path.parent.name != "trees":
        return None
    return path.parent.with_name("trees-index") / f"{path.stem}.json"


def write_trees(path: Path, trees: Iterable[Tree]) -> None:
    """Writes trees to `path`, one per line, and in a run folder the index of the file."""
    lines, places, begin = list[str](), list[dict[str, Any]](), 0
    for tree in trees:
        head, texts = tree_texts(tree)
        end, steps = begin + len(head.encode()), {}
        for step, text in zip(tree.steps, texts, strict=True):
            first = end
            end += len(text.encode()) + 1  # a comma follows, or the bracket behind the last step
            steps[step.id] = (first, end - 1)
        lines.append(f"{head}{','.join(texts)}]}}\n")
        end += len("}\n")
        places.append({"task_id": tree.task.id, "begin": begin, "end": end, "steps": steps})
        begin = end
    index = _index_path(path)
    if index is not None:
        # An index of the file's earlier content must not be there beside the new one.
        index.unlink(missing_ok=True)
    write_atomically(path, "".join(lines))
    if index is not None:
        data = {"size": begin, "trees": places}
        write_atomically(index, json.dumps(data, separators=(",", ":")))


def read_places(path: Path) -> list[TreePlace]:
    """Returns where a file has each tree: by its index, or, where that is missing or was written
    for a file of another size, by parsing the file, then without the places of steps."""
    if (index := _index_path(path)) is not None:
        # Runs of 0.6 have no index, and one may be damaged: parsing is slow but always possible.
        with suppress(OSError, *DAMAGE):
            data = parse_json(read_inside(index, path.parents[1]))
            if data["size"] == path.stat().st_size:
                return [TreePlace(**place) for place in data["trees"]]
    places, end = list[TreePlace](), 0
    with open_inside(path, path.parents[1]) as file:
        for line in file:
            task_id = ""
            # A damaged line keeps its number, so that the trees behind it keep theirs.
            with suppress(*DAMAGE):
                task_id = str(parse_json(line)["task"]["id"])
            begin, end = end, end + len(line)
            places.append(TreePlace(task_id=task_id, begin=begin, end=end, steps={}))
    return places


def read_trajectory(path: Path, place: TreePlace, leaf: int, where: str) -> Trajectory:
    """Returns the trajectory of a leaf; of a tree with an index no other step is read.

    Raises:
        DataError: the tree is damaged or has no such leaf; the message begins with `where`.
    """
    with open_inside(path, path.parents[1]) as file:

        def part(begin: int, end: int) -> bytes:
            file.seek(begin)
            return file.read(end - begin)

        try:
            # With an index, only the head and the steps of one path are read: a line may be of
            # many megabytes, and a page shows one path.
            head_end = min((begin for begin, _ in place.steps.values()), default=place.end)
            data = parse_json(part(place.begin, head_end) + (b"]}" if place.steps else b""))
            if not 0 <= leaf < len(data["leaves"]):
                raise DataError(f"{where}: {len(data['leaves'])} leaves; there is no leaf {leaf}")
            chosen = data["leaves"][leaf]
            # Ids name their ancestors: "0.2.1" stands below "0.2" and "0".
            ids = accumulate(chosen["step_id"].split("."), "{}.{}".format)
            known = {step["id"]: step for step in data["steps"]}
            data["leaves"] = [chosen]
            data["steps"] = [
                parse_json(part(*place.steps[one])) if place.steps else known[one] for one in ids
            ]
            return tree_from_dict(data).trajectories()[0]
        except DAMAGE as error:
            raise DataError(f"{where}: not a recorded tree ({plain(repr(error), 200)})") from error


def read_trees(path: Path | str) -> list[Tree]:
    """Returns the trees of a file, or of all `update-*.jsonl` files of a folder in order.

    Raises:
        DataError: no such file, or a line that is not a tree, by number.
    """
    place = Path(path)
    if place.is_dir():
        folder = place / "trees" if (place / "trees").is_dir() else place
        return [tree for file in sorted(folder.glob("update-*.jsonl")) for tree in read_trees(file)]
    if not place.exists():
        raise DataError(
            f"trees '{path}': there is no such file; expected a .jsonl file from a run's trees/"
            " folder"
        )
    with place.open("rb") as file:
        return [
            parse_tree(line, f"trees '{path}', line {number}")
            for number, line in enumerate(file, start=1)
        ]


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
        self.index_dir = path / "trees-index"
        self.checkpoints_dir = path / "checkpoints"
        self.objects_path = path / "objects.json"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config_json: str) -> RunFolder:
        """Returns a new folder with the resolved settings in it.

        Raises:
            CheckpointError: the folder exists.
        """
        cls.refuse_unusable(path)
        # Made aside and renamed: a killed process leaves no folder that looks like a run.
        partial = path.with_name(f".{path.name}.partial")
        above = [one for one in path.parents if not one.exists()]
        try:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in ("trees", "checkpoints"):
                (partial / folder).mkdir(parents=True)
            write_atomically(partial / "config.json", config_json)
            mark(partial, RUN)
            partial.replace(path)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            for one in above:
                with suppress(OSError):
                    one.rmdir()
            raise CheckpointError(
                f"run folder '{path}' could not be made ({storage_fault(error) or error}); expected"
                " a folder that can be written to and has room. Choose another run.dir."
            ) from error
        return cls(path)

    @staticmethod
    def refuse_unusable(path: Path) -> None:
        """Raises CheckpointError where no folder can be made at `path`, or something is there."""
        fault = ""
        if os.path.lexists(path):
            raise CheckpointError(
                f"run folder '{path}' exists; expected a new name. Choose another run.name, or"
                f" continue that run with: treegraft train --resume {path}"
            )
        above = next(one for one in path.absolute().parents if os.path.lexists(one))
        if not above.is_dir():
            fault = f"'{above}' is not a folder"
        elif not os.access(above, os.W_OK | os.X_OK):
            fault = f"'{above}' cannot be written to"
        else:
            # ".NAME.partial" stands there while the folder is made.
            longest = os.pathconf(above, "PC_NAME_MAX") - len("..partial")
            if any(len(os.fsencode(part)) > longest for part in path.parts):
                fault = f"a name in it has more than {longest} bytes"
        if fault:
            raise CheckpointError(
                f"run folder '{path}' cannot be made: {fault}. Choose another run.dir or run.name."
            )

    def write_objects(self, records: Sequence[Record]) -> None:
        """Notes which Python objects the settings lead to, where there are any."""
        if records:
            text = json.dumps([asdict(one) for one in records], indent=2, ensure_ascii=False)
            write_atomically(self.objects_path, text + "\n")

    def read_objects(self) -> list[Record]:
        """Returns what `write_objects` noted. Raises `CheckpointError` for a damaged file."""
        if not self.objects_path.exists():
            return []
        try:
            return [Record(**one) for one in json.loads(self.objects_path.read_text("utf-8"))]
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"run folder '{self.path}': objects.json is damaged ({error}); expected the list"
                " that Treegraft wrote. Put it back from a copy."
            ) from error

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
                f" e.g. runs/NAME.{runs_beside(path)}"
            )
        return cls(path)

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
            lock = open_own(self.path / ".lock")
        except OSError as error:
            raise CheckpointError(
                f"run folder '{self.path}' cannot be worked in ({storage_fault(error) or error});"
                " expected a folder that can be written to, with a file .lock or none in it."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise CheckpointError(
                f"run folder '{self.path}': another process is at work in it; expected none. "
                "Wait for its end, or stop it with Ctrl-C."
            ) from error
        self._lock = lock

    def release(self) -> None:
        """Lets other processes work in this run."""
        if self._lock is not None:
            self._lock.close()

    def append_metrics(self, update: int, metrics: Mapping[str, float]) -> None:
        """Adds one line to metrics.jsonl."""
        line = json.dumps({"update": update, **dict(sorted(metrics.items()))})
        LineFile(self.metrics_path).append(line)

    def append_warmup(self, metrics: Mapping[str, float]) -> None:
        """Adds one line, that of an evaluation during the warm-up, to warmup.jsonl."""
        line = json.dumps({"update": 0, **dict(sorted(metrics.items()))})
        LineFile(self.warmup_path).append(line)

    def cut_warmup(self, num_steps: int) -> None:
        """Removes the evaluations after so many warm-up steps, which come again."""
        if self.warmup_path.exists():
            LineFile(self.warmup_path).drop_cut()
            lines = read_metrics(self.path, self.warmup_path.name)
            kept = [line for line in lines if line.get("warmup/num_steps", 0) <= num_steps]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            write_atomically(self.warmup_path, text)

    def metrics_size(self) -> int:
        """Returns the length of metrics.jsonl in bytes."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def trees_path(self, update: int, kind: str = "") -> Path:
        """Returns the path of an update's trees, or (kind "greedy", "sampled") of those of an
        evaluation after it."""
        name = f"eval-{update:06d}-{kind}" if kind else f"update-{update:06d}"
        return self.trees_dir / f"{name}.jsonl"

    def update_files(self) -> list[tuple[int, Path]]:
        """Returns (update, its trees) for each one recorded, in order."""
        files = self.trees_dir.glob("update-*.jsonl")
        return sorted((int(one.stem.removeprefix("update-")), one) for one in files)

    def cut_before(self, update: int) -> None:
        """Removes the metrics and trees of `update` and of later ones."""
        size = 0
        if self.metrics_path.exists():
            lines = read_metrics(self.path)
            num_kept = sum(line["update"] < update for line in lines)
            texts = self.metrics_path.read_bytes().split(b"\n")[:num_kept]
            size = sum(len(text) + 1 for text in texts)
        self.cut_to(update - 1, size)

    def cut_to(self, update: int, metrics_size: int) -> None:
        """Removes all metrics and trees written after the checkpoint of `update`."""
        if self.metrics_path.exists():
            with open_own(self.metrics_path, "ab") as metrics:
                metrics.truncate(metrics_size)
        for file in (*self.trees_dir.glob("*.jsonl"), *self.index_dir.glob("*.json")):
            number = re.search(r"-(\d{6,})", file.name)
            if number and int(number[1]) > update:
                file.unlink()


def read_metrics(run_dir: Path | str, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """Returns the lines of a run's metrics.jsonl, without a last one that is being written; or of
    its warmup.jsonl, which has the evaluations during the warm-up.

    Raises:
        DataError: there is no such file, or a line is not one of metrics.
    """
    path = Path(run_dir) / name
    if not path.exists():
        if (Path(run_dir) / "config.json").exists():
            raise DataError(f"run '{run_dir}' recorded no metrics yet; wait for its first line")
        raise DataError(f"'{run_dir}' has no {name}; expected a run folder")
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DataError(f"'{path}' could not be read ({storage_fault(error) or error})") from error
    return [_metrics_line(line, f"'{path}', line {n}") for n, line in enumerate(lines, start=1)]


def _metrics_line(line: bytes, where: str) -> dict[str, float]:
    try:
        found = parse_json(line)
        if not isinstance(found, dict) or not isinstance(found.get("update"), int | float):
            raise ValueError('expected an object with "update"')
        for key, value in found.items():
            if not isinstance(value, int | float):
                raise ValueError(f"{key} is not a number")
            float(value)  # refuses integers beyond a float's range
        # Neither NaN nor infinite.
        if not 0 <= found["update"] < 1 << 53:
            raise ValueError("its update is out of range")
        return found
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{where}: not a line of metrics ({plain(str(error), 200)}); the file was damaged or"
            " changed by hand. Put back a copy of it, or remove the line to look at the rest"
        ) from error
