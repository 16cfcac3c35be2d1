"""Whether two versions of the code give the same runs: trees byte for byte, metrics number for
number.

    python -m benchmarks.same_runs --before 61c8e94 [--work-dir FOLDER] [--after SETTING]

Trains recipes/demo.toml for three updates as GRPO, RAPO, ARPO, both together, commit branching,
Tree-GRPO and with own lessons (imitation from a buffer that the run itself fills), once with the
code of this working tree and once with that of a commit, which is checked out into a worktree of
its own; --only NAME takes one of these methods. Both sides run in the same environment and each
reads its own recipe. `time/*` is left out of the comparison, and metrics that one side alone has
are listed; everything else has to be equal. Ends with exit code 1 where something differs.
With --timed ROUNDS both sides run so many times more, in turn, and the ratio of the medians of the
seconds of sampling and of learning is printed: above 1, this tree is slower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from treegraft.runs import tree_files

ROOT = Path(__file__).resolve().parents[1]
METHODS = {
    "grpo": ['explorers=["independent"]'],
    "rapo": ['explorers=["graft"]'],
    "arpo": ['explorers=["entropy"]'],
    "both": ['explorers=["entropy", "graft"]'],
    "commit": ['explorers=["commit"]'],
    "tree_search": ['explorers=["tree_search"]'],
    "own_lessons": [
        'explorers=["independent"]',
        "buffer.path=self",
        "buffer.grow.num_best=1",
        "loss.lesson_coef=2",
        "learn.num_lessons=12",
    ],
}
"""The settings of each method."""


def run_method(code: Path, method: str, folder: Path, options: list[str]) -> None:
    """Trains with the code in `code` unless the folder holds a finished run."""
    if (folder / "finished").exists():
        return
    command = [sys.executable, "-m", "treegraft", "train", str(code / "recipes" / "demo.toml")]
    settings = [*METHODS[method], f"run.dir={folder.parent}", f"run.name={folder.name}"]
    environment = {**os.environ, "PYTHONPATH": str(code / "src")}
    subprocess.run([*command, *settings, *options], env=environment, cwd=code, check=True)
    (folder / "finished").touch()


def worktree(commit: str, folder: Path) -> Path:
    """Returns a checkout of the commit."""
    if not folder.exists():
        command = ["git", "worktree", "add", "--quiet", "--detach", str(folder), commit]
        subprocess.run(command, cwd=ROOT, check=True)
    return folder


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Returns the lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "time/" not in key} for line in lines]


def trees_of(run: Path) -> dict[str, list[bytes]]:
    """Returns the lines of trees of each update and evaluation, however a version's files divide
    them."""
    found: dict[str, list[bytes]] = {}
    for path in sorted((run / "trees").glob("*.zst")):
        text = tree_files.zstd.decompress(path.read_bytes())  # type: ignore[attr-defined]
        for line in text.splitlines():
            name = str(json.loads(line)["group_id"]).partition("/")[0]
            found.setdefault(name, []).append(line)
    return found


def is_same(one: float, other: float) -> bool:
    """Whether two numbers are equal; NaN is equal to itself."""
    return one == other or (math.isnan(one) and math.isnan(other))


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yields a sentence for each difference between two runs."""
    old_trees = trees_of(before)
    new_trees = trees_of(after)
    if sorted(old_trees) != sorted(new_trees):
        yield f"trees: {sorted(old_trees)} before, {sorted(new_trees)} after"
    for name in sorted(old_trees.keys() & new_trees.keys()):
        if old_trees[name] != new_trees[name]:
            yield f"trees of {name} differ"
    lines = metrics_of(before), metrics_of(after)
    if len(lines[0]) != len(lines[1]):
        yield f"metrics.jsonl: {len(lines[0])} lines before, {len(lines[1])} after"
    for old, new in zip(*lines, strict=False):
        for key in sorted(old.keys() & new.keys()):
            if not is_same(old[key], new[key]):
                yield f"update {old['update']:g}: {key} was {old[key]}, now {new[key]}"


def of_one_side(before: Path, after: Path) -> Iterator[str]:
    """Yields the metrics that one side alone has, which are no difference: versions add and remove
    some."""
    names: list[set[str]] = []
    for run in (before, after):
        names.append({key for line in metrics_of(run) for key in line})
    for side, own in (("before", names[0] - names[1]), ("after", names[1] - names[0])):
        if own:
            yield f"only {side}: {', '.join(sorted(own))}"


def seconds_of(run: Path, part: str) -> float:
    """Returns the seconds of a part of the last update, such as "rollout"; credit was once counted
    as learning, so it is added there."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    added = last.get("time/credit_s", 0.0) if part == "learn" else 0.0
    return float(last[f"time/{part}_s"]) + added


def speed(
    sides: Sequence[tuple[Path, str]], method: str, options: list[str], rounds: int, work: Path
) -> Iterator[str]:
    """Yields the ratio of seconds, after to before, of sampling and of learning."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for code, side in sides if number % 2 else reversed(sides):
            with tempfile.TemporaryDirectory(prefix="timed-", dir=work) as folder:
                run = Path(folder) / "run"
                run_method(code, method, run, options)
                for part in ("rollout", "learn"):
                    found.setdefault((part, side), []).append(seconds_of(run, part))
    for part in ("rollout", "learn"):
        before, after = (found[part, side] for _, side in sides)
        ratio = statistics.median(after) / statistics.median(before)
        spread = [b / a for a, b in zip(before, after, strict=True)]
        yield f"{part} {ratio:.2f} ({min(spread):.2f} to {max(spread):.2f} in {rounds} rounds)"


def main() -> int:
    """Reads the options, compares, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the other version")
    parser.add_argument(
        "--work-dir",
        type=Path,
        help="keeps worktree and runs of the commit for later calls, and the other runs to read",
    )
    parser.add_argument(
        "--only", choices=METHODS, action="append", help="this method alone; may be repeated"
    )
    parser.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="SETTING",
        help="a setting of this side alone",
    )
    parser.add_argument(
        "--timed", type=int, default=0, metavar="ROUNDS", help="also compare the speed"
    )
    parser.add_argument(
        "options", nargs="*", help="further settings of both sides, such as warmup.num_steps=50"
    )
    asked = parser.parse_args()
    options = ["run.num_updates=3", *asked.options]
    if asked.work_dir:
        asked.work_dir.mkdir(parents=True, exist_ok=True)
        return compare(asked, options, asked.work_dir.resolve())
    # Runs take gigabytes: nothing stays of a call that named no folder for them.
    with tempfile.TemporaryDirectory(prefix="same-runs-") as folder:
        work = Path(folder).resolve()
        try:
            return compare(asked, options, work)
        finally:
            removal = ["git", "worktree", "remove", "--force", str(work / "before")]
            subprocess.run(removal, cwd=ROOT, check=False, capture_output=True)


def compare(asked: argparse.Namespace, options: list[str], work: Path) -> int:
    """Runs both sides in a folder and prints what differs."""
    code = worktree(asked.before, work / "before")
    after = Path(tempfile.mkdtemp(prefix="after-", dir=work)).resolve()
    num_different = 0
    for method in asked.only or METHODS:
        old = work / f"runs-{asked.before}" / method
        new = after / method
        run_method(code, method, old, options)
        run_method(ROOT, method, new, options + asked.after)
        found = list(differences(old, new))
        num_files = len(list((new / "trees").iterdir()))
        print(
            f"{method}: {num_files} files of trees, {len(metrics_of(new))} lines of metrics", end=""
        )
        print(": equal" if not found else "".join(f"\n  {line}" for line in found), flush=True)
        for line in of_one_side(old, new):
            print(f"  {line}", flush=True)
        num_different += bool(found)
        if asked.timed:
            sides = ((code, "before"), (ROOT, "after"))
            for line in speed(sides, method, options, asked.timed, after):
                print(f"  {line}", flush=True)
    return min(num_different, 1)


if __name__ == "__main__":
    sys.exit(main())
