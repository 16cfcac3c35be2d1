"""What an update of ARPO costs on several GPUs, learned from packed trees and learned from the same
trajectories as rows: arithmetic, nothing of it was run. `python -m benchmarks.costs`

With `--python`, the seconds that Python takes a token on this machine, which enter the sum.

A tree has S starts of R tokens behind a prompt of P, and L - S branches, each of which adds the
last share b of a path:

    packed   P + (S + b (L - S)) R        tokens, each computed once
    rows     L (P + R)                    the same trajectories apart, without padding
    padded   L (P + longest)

Sampling takes as long as its longest path: the starts write alone up to where the branches begin,
then all leaves together. A decoding step reads the weights and every row's keys and values once.
A step of the optimiser takes as long as the busiest rank, which is dealt parts of trees.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from treegraft.core.types import ROOT_ID, Leaf, Origin, Status, Step, Task, Tree
from treegraft.extras.lab.roofline import CARDS, Card, decode_bytes, forward_flops
from treegraft.extras.lab.shape import num_shape_weights
from treegraft.extras.lab.sizing import (
    BRANCH_FRAC,
    DECODE_SHARE,
    FORWARD_SHARE,
    LEARN_SHARE,
    SAMPLED_FRAC,
)
from treegraft.policy.learn.pack import num_tree_tokens, pack_trees
from treegraft.policy.learn.sent_trees import packed, unpacked
from treegraft.policy.shapes import ModelShape, published_shape

Layout = Literal["packed", "rows", "padded"]
BFLOAT16 = 2


class Segment(NamedTuple):
    """Stretches of tokens that are computed alike."""

    num: int
    first: float
    """Tokens before it on its path."""
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An update. The defaults are ARPO's tree with paths of up to 4k tokens behind the prompt."""

    num_tasks: int = 128
    num_leaves: int = 16
    num_starts: int = 8
    num_optimiser_steps: int = 8
    prompt: float = 600.0
    """Tokens, as the next two."""
    mean: float = 3400.0
    """Of a path behind its prompt."""
    longest: float = 4096.0
    sampled_frac: float = SAMPLED_FRAC
    branch_frac: float = BRANCH_FRAC
    flat_frac: float = 0.4
    """Share of groups without variance."""
    tools_s: float = 3.0
    """Seconds of tools on the longest path: three calls of a second."""

    def segments(self, layout: Layout) -> list[Segment]:
        """Returns what is computed of one tree."""
        if layout != "packed":
            rest = self.mean if layout == "rows" else self.longest
            return [Segment(self.num_leaves, 0.0, self.prompt + rest)]
        branched = self.branch_frac * self.mean
        return [
            Segment(1, 0.0, self.prompt),
            Segment(self.num_starts, self.prompt, self.mean),
            Segment(
                self.num_leaves - self.num_starts,
                self.prompt + self.mean - branched,
                branched,
            ),
        ]

    def num_tokens(self, layout: Layout) -> float:
        """Returns the tokens of all trees that one pass computes."""
        return self.num_tasks * sum(part.num * part.length for part in self.segments(layout))

    @property
    def num_sampled(self) -> float:
        unique = self.num_tokens("packed") - self.num_tasks * self.prompt
        return self.sampled_frac * unique


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs that each hold a rank of the learner and a server."""

    shape: ModelShape
    card: Card
    num_gpus: int = 8
    decode_share: float = DECODE_SHARE
    """Share of the card's bandwidth in sampling, 0..1."""
    forward_share: float = FORWARD_SHARE
    """Share of its operations in passes without gradients, 0..1."""
    learn_share: float = LEARN_SHARE
    """The same with gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How an update is learned, and what it costs besides sampling and passes."""

    layout: Layout
    num_parts: int = 1
    """Parts that each tree is cut into, between its starts; each computes the prompt again."""
    scores_old: bool = True
    """Whether old log-probabilities are computed by the learner, not taken from the servers."""
    skips_flat: bool = False
    publish_s: float = 0.0
    driver_s: float = 0.0
    """Seconds of Python on one thread, per token of the trees."""


def tree_flops(work: Work, shape: ModelShape, way: Way) -> float:
    """Returns the operations of one forward pass over a tree."""
    total = 0.0
    for count, first, length in work.segments(way.layout):
        again = way.num_parts - 1 if way.layout == "packed" and not first else 0
        each = forward_flops(shape, first + length / 2, work.sampled_frac)
        total += (count + again) * length * each
    return total


def busiest(num_trees: int, num_parts: int, num_ranks: int) -> float:
    """Returns the work of the busiest of several ranks in trees, all parts being equal: 10 trees of
    one part on 8 ranks take as long as two trees, those of four parts as long as 5 parts."""
    return math.ceil(num_trees * num_parts / num_ranks) / num_parts


def expected_busiest(work: Work, way: Way, num_ranks: int) -> float:
    """Returns the work of the busiest rank in an optimiser step in trees, on average over which
    groups are flat. Rows are dealt without any rest."""
    trees = work.num_tasks // work.num_optimiser_steps
    kept = 1.0 - work.flat_frac if way.skips_flat else 1.0
    if way.layout != "packed":
        return kept * trees / num_ranks
    return sum(
        math.comb(trees, count)
        * kept**count
        * (1.0 - kept) ** (trees - count)
        * busiest(count, way.num_parts, num_ranks)
        for count in range(trees + 1)
    )


def sampling_s(work: Work, machine: Machine) -> float:
    """Returns the seconds until the longest path has ended, all trees at once."""
    steps = work.sampled_frac * work.longest
    alone = 1.0 - work.branch_frac
    phases = (
        (alone, work.num_starts, alone / 2),
        (work.branch_frac, work.num_leaves, 1.0 - work.branch_frac / 2),
    )
    seconds = work.tools_s
    for share, rows, middle in phases:
        rows_each = math.ceil(work.num_tasks * rows / machine.num_gpus)
        tokens = work.prompt + middle * work.mean
        read = decode_bytes(machine.shape, rows_each, tokens, BFLOAT16)
        seconds += share * steps * read / (machine.card.bandwidth * machine.decode_share)
    return seconds


def phases(work: Work, machine: Machine, way: Way) -> dict[str, float]:
    """Returns the seconds of each phase of an update."""
    steps = work.num_optimiser_steps
    forward = (
        tree_flops(work, machine.shape, way)
        / machine.card.flops
        * expected_busiest(work, way, machine.num_gpus)
    )
    # All but the first optimiser step's trees are scored before it.
    scored = (steps - 1) * forward / machine.forward_share if way.scores_old else 0.0
    return {
        "sampling": sampling_s(work, machine),
        "old log-probabilities": scored,
        "forward and backward": steps * 3 * forward / machine.learn_share,
        "publish": way.publish_s,
        "driver": way.driver_s * work.num_tokens("packed"),
    }


EIGHT_H100 = Machine(
    shape=ModelShape.of_config(
        published_shape("shape:qwen2.5-7b"), num_shape_weights(published_shape("shape:qwen2.5-7b"))
    ),
    card=CARDS["H100"],
)
COPY_BYTES_S, READ_BYTES_S = 5e9, 25e9
"""Assumed: bytes a second that one thread writes to shared memory, and that a GPU reads from it
while seven others do."""
DRIVER_S = 0.7e-6
"""CPU seconds a token on one thread of an AMD EPYC, 23 November 2026, by `--python`: steps .11,
to the ranks .26, from rank 0 .27, packs .22 on each of eight ranks, in microseconds."""


def ways(machine: Machine) -> dict[str, Way]:
    """Returns the ways of the table; the first is what the others are compared with.

    The rows' publish and Python count as nothing, and their ranks as evenly loaded.
    """
    weights = machine.shape.num_weights * BFLOAT16
    ours = Way(
        layout="packed",
        num_parts=4,
        publish_s=weights / COPY_BYTES_S + weights / READ_BYTES_S,
        driver_s=DRIVER_S,
    )
    skipping = replace(ours, skips_flat=True)
    return {
        "rows without padding": Way(layout="rows"),
        "padded rows": Way(layout="padded"),
        "rows, flat groups skipped": Way(layout="rows", skips_flat=True),
        "rows, both": Way(layout="rows", skips_flat=True, scores_old=False),
        "packed, whole trees": replace(ours, num_parts=1),
        "packed, 4 parts a tree": ours,
        "4 parts, the servers' log-probabilities": replace(ours, scores_old=False),
        "whole trees, flat groups skipped": replace(skipping, num_parts=1),
        "4 parts, flat groups skipped": skipping,
        "4 parts, both": replace(skipping, scores_old=False),
    }


def table(work: Work, machine: Machine) -> Iterator[str]:
    """Yields the lines of a Markdown table of seconds; the last column is how many times the
    first way's update takes."""
    found = {name: phases(work, machine, way) for name, way in ways(machine).items()}
    names: Sequence[str] = list(next(iter(found.values())))
    first = sum(next(iter(found.values())).values())
    yield f"| | {' | '.join(names)} | update | times as fast |"
    yield "|---|" + "---:|" * (len(names) + 2)
    for name, seconds in found.items():
        total = sum(seconds.values())
        cells = [f"{seconds[one]:.0f}" for one in names]
        yield f"| {name} | {' | '.join(cells)} | {total:.0f} | {first / total:.2f} |"


def example_steps(work: Work) -> list[dict[str, Any]]:
    """Returns the fields of a tree's steps, those of `Work.segments`, in depth-first order."""
    draw, found = random.Random(0), []

    def add(name: str, parent: str | None, length: float) -> None:
        origin, count = Origin.PROMPT if parent is None else Origin.POLICY, round(length)
        found.append(
            {
                "id": name,
                "parent": parent,
                "depth": name.count("."),
                "token_ids": tuple(draw.randrange(150_000) for _ in range(count)),
                "origins": (origin,) * count,
                "loss_mask": (parent is not None,) * count,
                "sampling_logprobs": tuple(-draw.random() for _ in range(count)),
                "entropies": tuple(draw.random() for _ in range(count)),
            }
        )

    branched = work.branch_frac * work.mean
    add(ROOT_ID, None, work.prompt)
    for start in range(work.num_starts):
        name, branches = f"{ROOT_ID}.{start}", work.num_leaves // work.num_starts - 1
        add(name, ROOT_ID, work.mean - branched)
        for child in range(1 + branches):
            add(f"{name}.{child}", name, branched)
    return found


def python_seconds(work: Work) -> dict[str, float]:
    """Returns the CPU seconds a token of what Python does with a tree between sampling and the
    passes, the least of five runs."""
    fields = example_steps(work)
    parents = {one["parent"] for one in fields}
    leaves = [
        Leaf(step_id=one["id"], status=Status.COMPLETED)
        for one in fields
        if one["id"] not in parents
    ]
    task = Task(id="t", question="", reference=())

    def tree() -> Tree:
        steps = tuple(Step(**one) for one in fields)
        return Tree(task=task, group_id="t", steps=steps, leaves=tuple(leaves))

    def handed() -> tuple[str, Any]:
        texts, columns = packed([whole])
        return json.dumps(texts), columns

    whole = tree()
    text, columns = handed()
    actions: dict[str, Callable[[], object]] = {
        "steps": tree,
        "to the ranks": handed,
        "from rank 0": lambda: unpacked(json.loads(text), columns),
        "packs, shared by the ranks": lambda: pack_trees([whole]),
    }
    return {name: _least(action) / num_tree_tokens(whole) for name, action in actions.items()}


def _least(action: Callable[[], object]) -> float:
    found = []
    for _ in range(5):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return min(found)


def main() -> None:
    """Prints the table for eight H100, or what Python takes here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="store_true", help="microseconds a token, measured here")
    work = Work()
    if parser.parse_args().python:
        for name, seconds in python_seconds(work).items():
            print(f"{name}: {1e6 * seconds:.2f} us a token")
        return
    sizes = {layout: work.num_tokens(layout) for layout in ("packed", "rows", "padded")}
    told = ", ".join(f"{name} {size / 1e6:.2f} M" for name, size in sizes.items())
    print(f"tokens: {told}; sampled {work.num_sampled / 1e6:.2f} M\n")
    print("\n".join(table(work, EIGHT_H100)))


if __name__ == "__main__":
    main()
