"""The folder of an evaluation, from which it resumes after Ctrl-C or a crash.

    DIR/
      eval.json            the request: checkpoint, settings, sets
      trees/NAME.jsonl     a scored tree of each item, in the order of their ends
      judge.jsonl          verdicts of the judge
      report.json          the numbers

A line is on the disk before its item counts as done. A line that a crash cut off is dropped, and
its item runs again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treegraft import DataError, Status, Tree
from treegraft.extras.suites.sets import EvalSet
from treegraft.parts import errors, files, measuring

FORMAT_VERSION = 1


class EvalFolder:
    """The files of one evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report_path = path / "report.json"
        self.judge_path = path / "judge.jsonl"
        self._asked_path = path / "eval.json"
        self._lock = measuring.RunFolder(path)

    @classmethod
    def open(cls, path: Path, asked: Mapping[str, Any], sets: Sequence[EvalSet]) -> EvalFolder:
        """Returns a new folder, or one in which an earlier evaluation with the same settings goes
        on.

        Args:
            asked: settings by dotted name, plain JSON values. Sets may be added to a folder, not
                changed.

        Raises:
            CheckpointError: the folder is something else, was made with other settings, or another
                process is at work in it.
        """
        folder = cls(path)
        wanted: dict[str, dict[str, Any]] = {}
        for one in sets:
            wanted[one.name] = {
                "digest": one.digest,
                "num": len(one.tasks),
                "source": one.source,
            }
        held: dict[str, Any] = {}
        # Hidden files, such as a lock, are no evaluation.
        if path.is_dir() and any(not one.name.startswith(".") for one in path.iterdir()):
            found = folder.asked()
            held = found["sets"]
            # Before anything is written, so that a refused call leaves the folder as it was.
            folder._refuse_changed(found["asked"], asked)
            for name in held.keys() & wanted.keys():
                # Where a set was read from may change, its items may not.
                items = [
                    f"{one['num']} items, {one['digest']}" for one in (held[name], wanted[name])
                ]
                folder._refuse_changed({f"set {name}": items[0]}, {f"set {name}": items[1]})
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.CheckpointError(
                f"evaluation '{path}' cannot be made ({files.storage_fault(error) or error}). Name"
                " another folder with --into.",
                code="evaluation-not-made",
            ) from error
        # Two processes would run the same items and mix their lines.
        folder._lock.claim()
        try:
            # Only after the lock: another process may be writing that very line.
            for lines in (folder.judge_path, *map(folder.trees_path, wanted)):
                files.LineFile(lines).drop_cut()
            # Sets of earlier calls stay in the list, with their trees.
            data = {"format_version": FORMAT_VERSION, "asked": asked, "sets": held | wanted}
            files.write_atomically(
                folder._asked_path,
                json.dumps(data, indent=1, ensure_ascii=False, sort_keys=True) + "\n",
            )
        except BaseException:
            folder.close()
            raise
        return folder

    def _refuse_changed(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = []
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                changed.append(f"{name} was {before.get(name)!r} and is now {now.get(name)!r}")
        if changed:
            more = [f"and {len(changed) - 5} more"] if len(changed) > 5 else []
            raise errors.CheckpointError(
                f"evaluation '{self.path}' was begun with other settings:"
                f" {'; '.join([*changed[:5], *more])}. Numbers of two settings cannot be mixed:"
                " give the same ones to go on, or name another folder with --into.",
                code="evaluation-other-settings",
            )

    def asked(self) -> dict[str, Any]:
        """Returns the two tables of eval.json, "asked" and "sets".

        Raises:
            CheckpointError: the folder is no evaluation.
        """
        try:
            data = files.parse_json(self._asked_path.read_bytes())
            if data["format_version"] != FORMAT_VERSION:
                raise ValueError(
                    f"format version {data['format_version']}, expected {FORMAT_VERSION}"
                )
            # A folder of an earlier version has settings that no longer count.
            asked = measuring.Subject.that_count(data["asked"])
            for one in data["sets"].values():
                one["digest"], int(one["num"]), one["source"]
            return {"asked": asked, "sets": data["sets"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = "it has no eval.json" if isinstance(error, FileNotFoundError) else str(error)
            raise errors.CheckpointError(
                f"'{self.path}' is not the folder of an evaluation ({reason}); expected one"
                " that `treegraft eval suite ... --into FOLDER` made.",
                code="evaluation-folder-invalid",
            ) from error

    # ------------------------------------------------------------------ trees

    def trees_path(self, name: str) -> Path:
        """Returns where the trees of a set lie."""
        return self.path / "trees" / f"{name}.jsonl"

    def trees(self, name: str) -> dict[str, Tree]:
        """Returns the trees of a set by task id, those that were run again as they last ended.

        Raises:
            DataError: a line, other than a last one that was cut off, is not a tree.
        """
        found: dict[str, Tree] = {}
        path = self.trees_path(name)
        for number, line in self._lines(path):
            try:
                tree = measuring.parse_tree(
                    line.encode("utf-8", "surrogatepass"), f"'{path}', line {number}"
                )
            except DataError as error:
                raise DataError(
                    f"{error}; expected one that this evaluation wrote. Remove the line, and its"
                    " item runs again.",
                    code="evaluation-line-invalid",
                ) from error
            found[tree.task.id] = tree
        return found

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        try:
            yield from files.LineFile(path).lines()
        except (OSError, ValueError) as error:
            raise DataError(
                f"'{path}' could not be read ({files.storage_fault(error) or error}); put back a"
                " copy of it, or remove it: its items run again.",
                code="file-unreadable",
            ) from error

    def add_tree(self, name: str, tree: Tree) -> None:
        """Writes a tree; it is on the disk when this returns."""
        files.LineFile(self.trees_path(name)).append(measuring.tree_to_json(tree))

    # ------------------------------------------------------------------ verdicts

    def verdicts(self) -> dict[str, str]:
        """Returns the judge's verdicts by key."""
        found: dict[str, str] = {}
        for number, line in self._lines(self.judge_path):
            try:
                row = files.parse_json(line)
                found[str(row["key"])] = str(row["verdict"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"'{self.judge_path}', line {number}: not a verdict ({error!r}). Remove the"
                    " line, and its answer is judged again.",
                    code="verdict-invalid",
                ) from error
        return found

    def judge_model(self) -> str | None:
        """Returns the judge that the folder's report was made with; None without one.

        Raises:
            CheckpointError: the report is damaged.
        """
        # An evaluation that was never finished has been judged by nobody.
        if not self.report_path.exists():
            return None
        try:
            model: str | None = files.parse_json(self.report_path.read_bytes()).get("judge_model")
        except (OSError, ValueError, AttributeError) as error:
            raise errors.CheckpointError(
                f"'{self.report_path}' could not be read ({files.storage_fault(error) or error})."
                " The command that made this evaluation writes it again.",
                code="evaluation-unreadable",
            ) from error
        return model

    def add_verdict(self, row: Mapping[str, str]) -> None:
        """Writes a verdict: "key", "verdict", and question, answer and reply for people."""
        files.LineFile(self.judge_path).append(json.dumps(row, ensure_ascii=True))

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Writes report.json."""
        files.write_atomically(
            self.report_path, json.dumps(report, indent=1, ensure_ascii=True) + "\n"
        )

    def close(self) -> None:
        """Lets other processes work here."""
        self._lock.release()


def is_finished(tree: Tree | None) -> bool:
    """Returns whether an item needs no further run: it has a tree, of which no trajectory was lost
    to a failure of ours."""
    return tree is not None and all(leaf.status is not Status.FAILED for leaf in tree.leaves)
