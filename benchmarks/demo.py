"""The outcome of `make demo` over ten seeds; one resumable command.

    python benchmarks/demo.py            trains the missing runs, prints the table
    python benchmarks/demo.py --table    prints the table of the finished runs
    python benchmarks/demo.py --range    prints the range of their accuracy, as `make demo` does

Each run is one of the two commands of `make demo` with `run.seed` of 0 to 9, or the second without
loss on grafts. All methods of a seed start from one warm-up, as those commands do, and only the
last evaluation is made: neither changes the outcome. What a finished run found goes to
`benchmarks/demo.jsonl`, one line a run; delete a line to run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo.toml"
RESULTS = Path(__file__).with_suffix(".jsonl")
METHODS: Mapping[str, Sequence[str]] = {
    "GRPO": (),
    "RAPO": ('explorers=["graft"]', "loss.graft_coef=0"),
    "RAPO + learning from grafts": ('explorers=["graft"]',),
}
"""Method -> overrides of the recipe. The Makefile has the first and the last; the paper's RAPO has
no loss on grafts."""
NUM_SEEDS = 10
ACCURACY = "eval/accuracy_sampled"
GREEDY = "eval/accuracy"
CALLS = "rollout/num_tool_calls"
TOKENS = "rollout/num_sampled_tokens"
SECONDS = "time/cpu_s"
LAST_ONLY = ("eval.every=0", "eval.at_start=false")
Line = dict[str, Any]


def run_seed(seed: int, methods: Sequence[str], out: Path) -> list[Line]:
    """Trains a seed's missing methods from one warm-up and returns what they found."""
    import logging

    from treegraft.runs.checkpoint import latest_checkpoint
    from treegraft.settings.load import load_config
    from treegraft.train import sft, train

    logging.disable(logging.WARNING)
    place = out / f"warmup-{seed}"
    common = [f"run.dir={out}", f"run.seed={seed}"]
    if place.exists():
        sft(None, resume=place)
    else:
        sft(load_config(RECIPE, [*common, f"run.name={place.name}"]))
    begin = [f"model.path={latest_checkpoint(place / 'checkpoints')}", "warmup.num_steps=0"]
    found: list[Line] = []
    for method in methods:
        run = out / f"{method.lower().replace(' ', '-')}-{seed}"
        if run.exists():
            train(None, resume=run)
        else:
            name = f"run.name={run.name}"
            train(load_config(RECIPE, [*common, *begin, *LAST_ONLY, *METHODS[method], name]))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        line: Line = {"method": method, "seed": seed, "date": time.strftime("%Y-%m-%d")}
        line |= {key: lines[-1][key] for key in (GREEDY, ACCURACY)}
        line |= {key: sum(one.get(key, 0) for one in lines) for key in (CALLS, TOKENS, SECONDS)}
        found.append(line)
    return found


def results() -> dict[tuple[str, int], Line]:
    """Returns what is known so far, by method and seed."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {(line["method"], line["seed"]): line for line in map(json.loads, lines)}


def runs_of(method: str) -> list[Line]:
    """Returns a method's finished runs, by seed."""
    return [line for (name, _), line in sorted(results().items()) if name == method]


def run_all(seeds: int, workers: int, out: Path) -> None:
    """Trains what is missing, `workers` seeds at once."""
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    missing = {
        seed: [method for method in METHODS if (method, seed) not in results()]
        for seed in range(seeds)
    }
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run_seed, seed, todo, out) for seed, todo in missing.items() if todo]
        for job in jobs:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in job.result())


def table() -> Iterator[str]:
    """Yields the table in Markdown, over the finished runs."""
    yield "| method | sampled | per seed | greedy | calls, tokens | CPU s |"
    yield "|---|---|---|---|---|---|"
    for method in METHODS:
        runs = runs_of(method)
        if not runs:
            continue
        sampled, greedy, calls, tokens, seconds = (
            [line[key] for line in runs] for key in (ACCURACY, GREEDY, CALLS, TOKENS, SECONDS)
        )
        yield (
            f"| {method} | {min(sampled):.2f} to {max(sampled):.2f} |"
            f" {' '.join(f'{one:.2f}' for one in sampled)} |"
            f" {min(greedy):.2f} to {max(greedy):.2f} |"
            f" {statistics.fmean(calls):.0f}, {statistics.fmean(tokens) / 1000:.0f}k |"
            f" {statistics.fmean(seconds):.0f} |"
        )


def ranges() -> Iterator[str]:
    """Yields the lowest and the highest accuracy of each method, in words."""
    runs = {method: runs_of(method) for method in METHODS}
    num = min(map(len, runs.values()))
    if not num:
        return
    last = max(line["date"] for lines in runs.values() for line in lines)
    yield "The runs above have one seed. Processors round differently, so one may end outside"
    yield f"these ranges. Sampled accuracy at the end of {num} seeds, {last}:"
    for method, lines in runs.items():
        found = [100 * line[ACCURACY] for line in lines]
        yield f"  {method:<{max(map(len, METHODS))}}   {min(found):.0f} to {max(found):.0f} %"


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs") / "demo-seeds")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at once, one thread each")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--range", action="store_true", help="run nothing, print the range")
    options = parser.parse_args()
    if not options.table and not options.range:
        run_all(options.seeds, options.jobs, options.out.resolve())
    print("\n".join(ranges() if options.range else table()))


if __name__ == "__main__":
    main()
