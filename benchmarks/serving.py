"""The native engine against a vLLM server on the same trees: `python benchmarks/serving.py`.

Trains the same updates with both engines, one after the other, and compares what metrics.jsonl
says: sampled tokens a second, seconds an update, and what publishing takes. Needs the environment
of `make vllm-env`. Times of a machine that does other work too are of use as ratios alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.load import load_config
from treegraft.train import train

ROWS = (
    ("sampled tokens a second", "rollout/num_sampled_tokens", "time/rollout_s"),
    ("seconds of sampling an update", "time/rollout_s", ""),
    ("seconds of learning an update", "time/learn_s", ""),
    ("seconds of a publish", "time/publish_s", ""),
    ("bytes of a publish", "time/publish_bytes", ""),
)
"""Name, metric, and the metric to divide by."""


def main() -> None:
    """Runs both and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="recipes/demo.toml")
    parser.add_argument("overrides", nargs="*", help="settings of both runs")
    parser.add_argument("--updates", type=int, default=4, help="the first one is not counted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for kind in ("native", "vllm"):
            own = [f"run.dir={folder}", f"run.name={kind}", f"engine.kind={kind}"]
            own += [f"run.num_updates={options.updates}", "eval.every=0", "eval.at_start=false"]
            own += ["eval.at_end=false", *options.overrides]
            if kind == "native":
                own = [one for one in own if not one.startswith("engine.vllm.")]
            train(load_config(options.recipe, own))
            found[kind] = Path(folder) / kind
        report(found["native"], found["vllm"])


def report(native: Path, served: Path) -> None:
    """Prints the table, and how many trees of the two runs differ."""
    columns = [medians(read_metrics(one)) for one in (native, served)]
    print(f"\n{'':32}{'native':>14}{'vllm':>14}{'vllm/native':>14}")
    for (name, *_), ours, theirs in zip(ROWS, *columns, strict=True):
        ratio = f"{theirs / ours:14.3g}" if ours else f"{'-':>14}"
        print(f"{name:32}{ours:14.4g}{theirs:14.4g}{ratio}")
    print(f"trees that differ: {num_different(native, served)}")


def medians(lines: Sequence[dict[str, float]]) -> list[float]:
    """Returns the medians of ROWS over updates, the first left out: servers warm up in it."""
    counted = [line for line in lines if line.get("update", 0) > 1]
    return [
        median(line.get(name, 0.0) / (line[over] if over else 1.0) for line in counted)
        for _, name, over in ROWS
    ]


def num_different(one: Path, other: Path) -> int:
    """Returns how many trees of two runs have other tokens."""
    count = 0
    for file in sorted((one / "trees").glob("update-*.jsonl")):
        pairs = zip(read_trees(file), read_trees(other / "trees" / file.name), strict=True)
        for first, second in pairs:
            tokens = ([step.token_ids for step in tree.steps] for tree in (first, second))
            count += next(tokens) != next(tokens)
    return count


if __name__ == "__main__":
    main()
