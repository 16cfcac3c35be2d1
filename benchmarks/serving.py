"""The same updates by one process, by two ranks, and with a vLLM server: `python
benchmarks/serving.py`.

Trains each in turn and compares what metrics.jsonl says: sampled tokens a second, seconds an
update, and what publishing takes. Needs the environment of `make vllm-env`. Every process has one
thread unless the overrides say otherwise. Times of a machine that does other work too are of use as
ratios alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from treegraft.runs.record import read_metrics, read_trees
from treegraft.runs.tree_files import parts_in

ROWS = (
    ("sampled tokens a second", "rollout/num_sampled_tokens", "time/rollout_s"),
    ("seconds of an update", "time/update_s", ""),
    ("seconds of sampling an update", "time/rollout_s", ""),
    ("seconds of learning an update", "time/learn_s", ""),
    ("seconds of a publish", "time/publish_s", ""),
    ("bytes of a publish", "time/publish_bytes", ""),
)
"""Name, metric, and the metric to divide by."""
WAYS: Mapping[str, tuple[str, int]] = {
    "native": ("native", 1),
    "native-2-ranks": ("native", 2),
    "vllm": ("vllm", 1),
    "vllm-2-ranks": ("vllm", 2),
}
"""Engine and ranks of the learner; all are compared with the first."""


def main() -> None:
    """Runs them and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="recipes/demo.toml")
    parser.add_argument("overrides", nargs="*", help="settings of all runs")
    parser.add_argument("--updates", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--rounds", type=int, default=1, help="each way in turn, so many times")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:3])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[Path]] = {name: [] for name in options.ways}
        for turn in range(options.rounds):
            # The other way round every second time, so that no way always comes first.
            for name in options.ways[:: -1 if turn % 2 else 1]:
                kind, num_ranks = WAYS[name]
                place = Path(folder) / f"{name}-{turn}"
                own = [f"run.dir={folder}", f"run.name={place.name}", f"engine.kind={kind}"]
                own += ["run.num_threads=1", f"run.num_updates={options.updates}", "eval.every=0"]
                own += ["eval.at_start=false", "eval.at_end=false", *options.overrides]
                if kind == "native":
                    own = [one for one in own if not one.startswith("engine.vllm.")]
                run(options.recipe, own, num_ranks)
                found[name].append(place)
        for line in table(found):
            print(line)


def run(recipe: str, overrides: Sequence[str], num_ranks: int) -> None:
    """Trains in so many processes; raises CalledProcessError where that fails."""
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "treegraft", "train", recipe, *overrides]
    # torchrun's own default for ranks; for one process the same.
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def table(folders: Mapping[str, Sequence[Path]]) -> list[str]:
    """Returns the lines of a Markdown table: medians of each way's runs, how many times the first
    way's they are; and how many trees differ."""
    columns = {name: medians([*map(read_metrics, own)]) for name, own in folders.items()}
    first = next(iter(columns))
    names = [first, *(part for name in list(columns)[1:] for part in (name, "ratio"))]
    lines = [f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for n, (row, *_) in enumerate(ROWS):
        cells = []
        for name, values in columns.items():
            cells.append(f"{values[n]:.4g}" if values[n] else "-")
            if name != first:
                base = columns[first][n]
                cells.append(f"{values[n] / base:.3g}" if base and values[n] else "-")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    for name in list(folders)[1:]:
        pairs = zip(folders[first], folders[name], strict=True)
        different, count = map(sum, zip(*(num_different(*pair) for pair in pairs), strict=True))
        lines.append(f"{name}: {different} of {count} trees differ")
    return lines


def medians(runs: Sequence[Sequence[Mapping[str, float]]]) -> list[float]:
    """Returns the medians of ROWS over the updates of all runs, the first of each left out: servers
    warm up in it."""
    counted = [line for lines in runs for line in lines if line.get("update", 0) > 1]
    return [
        median(line.get(name, 0.0) / (line[over] if over else 1.0) for line in counted)
        for _, name, over in ROWS
    ]


def num_different(one: Path, other: Path) -> tuple[int, int]:
    """Returns how many trees of two runs have other tokens, and the number of trees."""
    different = count = 0
    for part in parts_in(one / "trees", "update"):
        pairs = zip(part.trees(), read_trees(other / "trees" / part.name), strict=True)
        for first, second in pairs:
            tokens = ([step.token_ids.tolist() for step in tree.steps] for tree in (first, second))
            different += next(tokens) != next(tokens)
            count += 1
    return different, count


if __name__ == "__main__":
    main()
