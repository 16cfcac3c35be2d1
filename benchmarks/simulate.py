"""What an update of ARPO costs on 8 to 1024 GPUs, and where more of them stop helping: arithmetic
on the constants of `benchmarks.costs`, nothing of it was run. `python -m benchmarks.simulate`

With `--streamed` it compares both with a third way, which is not built: in turn, with servers and
ranks on GPUs of their own, each optimiser step begins as soon as its trees are there.

With `--check` a model of the same form predicts updates of this machine with one and two ranks from
constants measured on smaller updates, and compares them with measured ones.

In turn, an update takes the sum of its phases. Overlapped with staleness s, servers and ranks have
GPUs of their own: trees of update m begin at the publish of m - 1 - s, so with R seconds of
sampling and L of everything else

    publish(m) = max(publish(m - 1), publish(m - 1 - s) + R) + L
    seconds an update = max(L, (R + L) / (s + 1)).

Three walls: R has the longest path in it, which is sequential; the trees of an optimiser step are
all that its ranks can share; and rank 0 hands all trees to the others on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.costs import (
    BFLOAT16,
    COPY_BYTES_S,
    EIGHT_H100,
    READ_BYTES_S,
    Machine,
    Way,
    Work,
    expected_busiest,
    sampling_s,
    tree_flops,
)

GPUS_A_HOST = 8
FABRIC_BYTES_S = 300e9
"""Assumed: bytes a second that a GPU gathers within its host."""
NETWORK_BYTES_S = 40e9
"""Assumed: bytes a second of a GPU to another host, 400 Gbit/s less a fifth."""
PARALLEL_SHARE = 0.9
"""Assumed: share of a pass's speed that is left where ranks share it (learn.sequence_parallel)."""
PASS_TOKENS = 32_768
STEPS_S, HANDED_S, PACKS_S = 0.11e-6, 0.53e-6, 0.22e-6
"""CPU seconds of Python a token, see `costs.DRIVER_S`: making steps, which growers share; handing
trees from rank 0 to the others, which nobody shares; packing, which ranks share."""
GROWER_GPUS = 16
"""GPUs whose trees one grower grows."""
OURS = Way(layout="packed", num_parts=4, skips_flat=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs and what they work on."""

    num_gpus: int
    num_tasks: int
    sequence_parallel: int = 1
    max_staleness: int = 0
    """0: in turn, every GPU holding a rank and a server; else some hold ranks, the others
    servers."""


class Seconds(NamedTuple):
    """Seconds of the phases of an update."""

    rollout: float
    old: float
    """Old log-probabilities."""
    learn: float
    publish: float
    driver: float
    """Python that nothing runs beside."""
    update: float


@cache
def learning_s(
    work: Work, machine: Machine, way: Way, num_gpus: int, sequence_parallel: int
) -> tuple[float, float]:
    """Returns the seconds of old log-probabilities, and of forward and backward passes with their
    exchange of weights and gradients."""
    num_groups = num_gpus // sequence_parallel
    trees = expected_busiest(work, way, num_groups)
    share = PARALLEL_SHARE if sequence_parallel > 1 else 1.0
    flops = trees * tree_flops(work, machine.shape, way) / (sequence_parallel * share)
    forward = flops / machine.card.flops
    num_passes = max(1.0, trees * work.num_tokens("packed") / work.num_tasks / PASS_TOKENS)
    weights = machine.shape.num_weights
    # Gathered beside the passes, once forward and once backward.
    gathered = num_passes * BFLOAT16 * weights / FABRIC_BYTES_S
    # Each GPU's rows of the float32 gradients, there and back.
    is_alone = num_gpus <= GPUS_A_HOST
    reduced = 0.0 if is_alone else 2 * 4 * weights / GPUS_A_HOST / NETWORK_BYTES_S
    steps = work.num_optimiser_steps
    old = max(forward / machine.forward_share, gathered)
    step = max(3 * forward / machine.learn_share, 2 * gathered) + reduced
    return (steps - 1) * old if way.scores_old else 0.0, steps * step


def phases(cluster: Cluster, num_servers: int, num_ranks: int, num_live: float = 1.0) -> Seconds:
    """Returns the seconds of an update whose phases follow each other.

    Args:
        num_servers, num_ranks: GPUs of each kind.
        num_live: updates whose trees grow at once.
    """
    work, machine = Work(num_tasks=cluster.num_tasks), replace(EIGHT_H100, num_gpus=num_servers)
    growing = replace(work, num_tasks=round(work.num_tasks * num_live))
    rollout = sampling_s(growing, machine)
    old, learn = learning_s(work, machine, OURS, num_ranks, cluster.sequence_parallel)
    weights = machine.shape.num_weights * BFLOAT16
    publish = weights / COPY_BYTES_S + weights / READ_BYTES_S
    if cluster.num_gpus > GPUS_A_HOST:
        publish += weights / NETWORK_BYTES_S
    num_growers = -(-cluster.num_gpus // GROWER_GPUS)
    tokens = work.num_tokens("packed")
    driver = tokens * (STEPS_S / num_growers + HANDED_S + PACKS_S / num_ranks)
    return Seconds(rollout, old, learn, publish, driver, rollout + old + learn + publish + driver)


def period(rollout: float, rest: float, max_staleness: int) -> float:
    """Returns the seconds from publish to publish, where an update's trees may begin so many
    publishes early."""
    return max(rest, (rollout + rest) / (max_staleness + 1))


def overlapped(cluster: Cluster, num_servers: int) -> Seconds:
    """Returns the seconds of an update with so many GPUs of servers and ranks on the others."""
    num_live, found = 1.0, phases(cluster, num_servers, cluster.num_gpus - num_servers)
    # More trees at once slow each other down, which in turn leaves more of them growing.
    for _ in range(20):
        rest = found.old + found.learn + found.publish + found.driver
        update = period(found.rollout, rest, cluster.max_staleness)
        num_live = (num_live + max(1.0, found.rollout / update)) / 2
        found = phases(cluster, num_servers, cluster.num_gpus - num_servers, num_live)
    return found._replace(update=update)


def last_of(arrivals: Iterable[float], step_s: float) -> float:
    """Returns when the last of several steps has ended, each of which begins when its trees are
    there and the step before it has ended."""
    ended = 0.0
    for arrived in arrivals:
        ended = max(arrived, ended) + step_s
    return ended


def streamed_s(cluster: Cluster, num_servers: int) -> float:
    """Returns the seconds of an update, at best, whose optimiser steps begin when their trees are
    there, with so many GPUs of servers.

    At best, since servers take the trees of the first steps first and lose nothing by it: those of
    the first j of k steps are there as early as if there were no others.
    """
    found = phases(cluster, num_servers, cluster.num_gpus - num_servers)
    work, machine = Work(num_tasks=cluster.num_tasks), replace(EIGHT_H100, num_gpus=num_servers)
    steps = work.num_optimiser_steps
    sizes = [round(work.num_tasks * step / steps) for step in range(1, steps + 1)]
    arrivals = [sampling_s(replace(work, num_tasks=size), machine) for size in sizes]
    step_s = (found.old + found.learn + found.driver) / steps
    return last_of(arrivals, step_s) + found.publish


def divisions(cluster: Cluster) -> list[int]:
    """Returns the numbers of GPUs that may serve while the others learn, in eighths."""
    found = [cluster.num_gpus * part // 8 for part in range(1, 8)]
    return [num for num in found if (cluster.num_gpus - num) % cluster.sequence_parallel == 0]


def best_of(cluster: Cluster) -> tuple[Seconds, int]:
    """Returns the seconds of an update and the GPUs of servers, by the best division in eighths;
    in turn all of them serve."""
    if not cluster.max_staleness:
        return phases(cluster, cluster.num_gpus, cluster.num_gpus), cluster.num_gpus
    found = ((overlapped(cluster, num), num) for num in divisions(cluster))
    return min(found, key=lambda pair: pair[0].update)


def rate(cluster: Cluster) -> float:
    """Returns the trees a second of each GPU."""
    return cluster.num_tasks / best_of(cluster)[0].update / cluster.num_gpus


FIRST = Cluster(num_gpus=8, num_tasks=128)
CLUSTERS: Sequence[Cluster] = (
    FIRST,
    Cluster(num_gpus=16, num_tasks=128),
    Cluster(num_gpus=64, num_tasks=128),
    Cluster(num_gpus=64, num_tasks=128, sequence_parallel=4),
    Cluster(num_gpus=64, num_tasks=128, sequence_parallel=4, max_staleness=1),
    Cluster(num_gpus=64, num_tasks=1024),
    Cluster(num_gpus=64, num_tasks=1024, max_staleness=1),
    Cluster(num_gpus=512, num_tasks=1024, sequence_parallel=4),
    Cluster(num_gpus=512, num_tasks=1024, sequence_parallel=4, max_staleness=1),
    Cluster(num_gpus=512, num_tasks=8192),
    Cluster(num_gpus=512, num_tasks=8192, max_staleness=1),
    Cluster(num_gpus=1024, num_tasks=1024, sequence_parallel=4),
    Cluster(num_gpus=1024, num_tasks=8192),
    Cluster(num_gpus=1024, num_tasks=8192, max_staleness=1),
    Cluster(num_gpus=1024, num_tasks=8192, max_staleness=2),
)


def table() -> Iterator[str]:
    """Yields the lines of a Markdown table in seconds; efficiency is trees a second and GPU, over
    those of the first row."""
    heads = "rollout | old | learn | publish | driver | update | efficiency"
    yield f"| GPUs | prompts | sequence parallel | staleness | servers | {heads} |"
    yield "|" + "---:|" * 12
    first = rate(FIRST)
    for one in CLUSTERS:
        seconds, num_servers = best_of(one)
        division = "all" if not one.max_staleness else f"{num_servers}"
        numbers = " | ".join(f"{value:.0f}" for value in seconds)
        shown = f"{one.num_gpus} | {one.num_tasks} | {one.sequence_parallel} | {one.max_staleness}"
        yield f"| {shown} | {division} | {numbers} | {rate(one) / first:.2f} |"


def streamed_table() -> Iterator[str]:
    """Yields the lines of a Markdown table: seconds of an update in turn, streamed at best, and
    overlapped."""
    yield "| GPUs | prompts | in turn, all GPUs for both | streamed, at best | staleness 1 |"
    yield "|" + "---:|" * 5
    for one in CLUSTERS:
        if one.max_staleness or one.sequence_parallel > 1:
            continue
        least = min(streamed_s(one, num) for num in divisions(one))
        others = [best_of(replace(one, max_staleness=staleness))[0].update for staleness in (0, 1)]
        seconds = " | ".join(f"{value:.0f}" for value in (others[0], least, others[1]))
        yield f"| {one.num_gpus} | {one.num_tasks} | {seconds} |"


# --- the check ------------------------------------------------------------------------------------


class Update(NamedTuple):
    """An update of a small run on this machine."""

    rollout: float
    learn: float
    publish: float
    sampled: float
    unique: float
    steps: float


SMALL = (
    *("warmup.num_steps=20", "eval.every=0", "eval.at_start=false", "eval.at_end=false"),
    *("explore.num_leaves=8", "learn.max_pack_tokens=400", "tasks.num_eval=4", "loss.kl_coef=0.01"),
    *("run.num_updates=16", "run.name=run", "run.dir=.", "health.symptoms_every=0"),
)
"""Small packs, so that every rank has many; with a KL term no group is skipped."""


def measured(num_tasks: int, num_ranks: int) -> Update:
    """Returns the median tokens of an update of `treegraft train demo` with so many ranks, and the
    least seconds for them: whatever else the machine does only adds to the others."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m"]
        command = [sys.executable, "-m", *(launch if num_ranks > 1 else ())]
        command += ["treegraft", "train", "demo", *SMALL, f"run.tasks_per_update={num_tasks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, timeout=900
        )
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # The first update compiles and allocates.
    rows = [json.loads(line) for line in lines if json.loads(line)["update"] > 1]

    def of(key: str) -> float:
        return float(median(row[key] for row in rows))

    def least(seconds: str, tokens: str) -> float:
        return of(tokens) * float(min(row[seconds] / row[tokens] for row in rows))

    sampled, unique = "rollout/num_sampled_tokens", "learn/num_unique_tokens"
    return Update(
        least("time/rollout_s", sampled),
        least("time/learn_s", unique),
        min(row["time/publish_s"] for row in rows),
        of(sampled),
        of(unique),
        of("learn/num_optimiser_steps"),
    )


def predicted(work: Update, small: Update, large: Update, ranks: Update, num_ranks: int) -> float:
    """Returns the seconds of an update with the tokens of `work`.

    The cost of a token and of a rollout's token are those between two sizes measured with one rank;
    what an optimiser step costs besides is what is left of the smaller size, with as many ranks.

    Args:
        small, large: with one rank.
        ranks: of the smaller size with `num_ranks`.
    """
    token = (large.learn - small.learn) / (large.unique - small.unique)
    sampled = (large.rollout - small.rollout) / (large.sampled - small.sampled)
    left = ranks.learn - token * ranks.unique / num_ranks
    rest = ranks.rollout - sampled * ranks.sampled
    learn = left * work.steps / ranks.steps + token * work.unique / num_ranks
    return rest + sampled * work.sampled + learn + ranks.publish


def check() -> bool:
    """Prints predictions beside measured seconds; returns whether they agree within 20 %."""
    small, large = measured(8, 1), measured(24, 1)
    agrees = True
    for num_ranks in (1, 2):
        ranks = small if num_ranks == 1 else measured(8, 2)
        found = measured(48, num_ranks)
        real = found.rollout + found.learn + found.publish
        model = predicted(found, small, large, ranks, num_ranks)
        agrees &= abs(model / real - 1) <= 0.2
        print(
            f"{num_ranks} ranks: predicted {model:.2f} s, measured {real:.2f} s, {model / real:.2f}"
        )
    return agrees


def main() -> None:
    """Prints the table, or compares the model with this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="one and two ranks on this machine")
    parser.add_argument("--streamed", action="store_true", help="the way that is not built")
    options = parser.parse_args()
    if options.check:
        sys.exit(0 if check() else 1)
    print("\n".join(streamed_table() if options.streamed else table()))


if __name__ == "__main__":
    main()
