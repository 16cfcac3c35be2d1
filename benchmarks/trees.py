"""What trees cost: bytes in memory and in records, and the time to make, read and pack them.

    python -m benchmarks.trees RUN [--copies 20] [--rounds 5] [--ids 151000] [--long 1]

Reads the trees of a run's updates and prints, for a unique token, the bytes that a tree takes in
memory (tracemalloc) and in its record (compressed and as text), and the microseconds of CPU that it
takes to make its steps, to read every column once, to write its line and to pack it. `--ids` draws
other token ids below a number, as a real vocabulary has; `--long` makes each step so many times
longer.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from treegraft.core.types import Step, Tree
from treegraft.policy.learn.pack import pack_trees
from treegraft.runs.tree_files import parts_in
from treegraft.runs.tree_json import parse_tree, tree_to_json

PER_TOKEN = (
    "token_ids",
    "origins",
    "loss_mask",
    "sampling_logprobs",
    "entropies",
    "old_logprobs",
    "ratios",
    "credit_factors",
)


def arguments(step: Step, ids: int, length: int) -> dict[str, Any]:
    """Returns the arguments of a step, its columns made anew and repeated `length` times."""
    found = {field.name: getattr(step, field.name) for field in fields(step)}
    for name in PER_TOKEN:
        if (column := found[name]) is not None:
            # As an engine gives them: numbers that no other step holds.
            found[name] = tuple(column.tolist() * length)
    if ids:
        draw = random.Random(step.id)
        found["token_ids"] = tuple(draw.randrange(ids) for _ in found["token_ids"])
    return found


def bytes_in_memory(lines: Sequence[bytes], ids: int, length: int) -> int:
    """Returns what the trees of `lines` take, in bytes."""
    gc.collect()
    tracemalloc.start()
    kept = []
    for line in lines:
        tree = parse_tree(line, "record")
        steps = tuple(Step(**arguments(step, ids, length)) for step in tree.steps)
        kept.append(replace(tree, steps=steps))
        del tree, steps
    gc.collect()
    found = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return found


def read(trees: Sequence[Tree]) -> int:
    """Reads every column of every step once."""
    columns = [getattr(s, name) for t in trees for s in t.steps for name in PER_TOKEN]
    return sum(len(column.tolist()) for column in columns if column is not None)


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> Iterator[tuple[str, float]]:
    """Yields the median CPU seconds of each call, the calls taking turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            found[name].append(time.process_time() - begin)
    yield from ((name, median(seconds)) for name, seconds in found.items())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--copies", type=int, default=1, help="times each tree is held")
    parser.add_argument("--rounds", type=int, default=5, help="of each timing; medians are printed")
    parser.add_argument("--ids", type=int, default=0, help="token ids drawn below this number")
    parser.add_argument("--long", type=int, default=1, help="times each step is repeated in itself")
    asked = parser.parse_args()
    parts = parts_in(asked.run / "trees", "update")
    lines = [line for part in parts for _, line in part.lines()] * asked.copies
    trees = [parse_tree(line, "record") for line in lines]
    given = [[arguments(s, asked.ids, asked.long) for s in tree.steps] for tree in trees]
    trees = [
        replace(tree, steps=tuple(Step(**one) for one in steps))
        for tree, steps in zip(trees, given, strict=True)
    ]
    num_steps = sum(len(tree.steps) for tree in trees)
    num_tokens = sum(len(step.token_ids) for tree in trees for step in tree.steps)
    print(f"{len(trees)} trees, {num_tokens / num_steps:.1f} tokens a step, {num_tokens} tokens")
    size = bytes_in_memory(lines, asked.ids, asked.long)
    print(f"memory {size / num_tokens:.0f} bytes a token, {size / num_steps:.0f} a step")
    if asked.long == 1 and not asked.ids:
        stored = sum(part.size for part in parts) * asked.copies / num_tokens
        text = sum(map(len, lines)) / num_tokens
        print(f"record {stored:.1f} bytes a token, {text:.0f} as text")
    calls: dict[str, Callable[[], object]] = {
        "make": lambda: [Step(**one) for steps in given for one in steps],
        "read": lambda: read(trees),
        "write": lambda: [tree_to_json(tree) for tree in trees],
        "pack": lambda: [pack_trees([tree]) for tree in trees],
    }
    for name, seconds in timed(calls, asked.rounds):
        print(f"{name} {seconds / num_tokens * 1e6:.3f} us a token")


if __name__ == "__main__":
    main()
