"""GRPO, ARPO, RAPO, their compositions and imitation of the buffer, side by side on three worlds; one resumable command.

    python benchmarks/methods.py --budget-minutes 60      runs what is missing, then prints the tables
    python benchmarks/methods.py --table                  prints the tables of what is there
    python benchmarks/methods.py --ablations              the ablations of RAPO instead (three seeds, boundary world)

All runs are `recipes/demo.toml` with the overrides below: 40 updates of 12 trees with 16 leaves, held-out questions without
retrieval or branching every 5 updates. Seeds are paired: a seed fixes training world, questions, held-out questions and noise for
every method; its warm-up is one of three. Runs are started seed by seed, so a budget that ends early leaves complete pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo.toml"
NUM_UPDATES, EVERY, NUM_EVAL = 40, 5, 300
COMMON = (
    f"run.num_updates={NUM_UPDATES}",
    f"tasks.num_eval={NUM_EVAL}",
    f"eval.every={EVERY}",
    "eval.greedy=false",
    "eval.num_samples=1",
    f"checkpoint.every={NUM_UPDATES}",
    "checkpoint.keep=1",
)
FIRST_SEED = 100
NUM_WARMUPS = 3

WORLDS: Mapping[str, Sequence[str]] = {
    "boundary": (),
    "short": ("tasks.search_world.hops=[1, 2, 3]", "warmup.continue_prob=[0.05]"),
    "imperfect": (),
}
"""World -> overrides. "imperfect" is "boundary" with a buffer of imperfect traces."""
IMPERFECT = ("tasks.search_world.detour_prob=0.4", "tasks.search_world.error_prob=0.3")
"""The expert that fills the buffer of "imperfect": 16 attempts a question, of which the 5 best by reward are kept."""

GRAFT = 'explore.explorers=["graft"]'
METHODS: Mapping[str, Sequence[str]] = {
    "GRPO": (),
    "RAPO": (GRAFT,),
    "ARPO": ('explore.explorers=["entropy"]',),
    "RAPO + learning from grafts": (GRAFT, "loss.graft_coef=1"),
    "ARPO + grafts": ('explore.explorers=["entropy", "graft"]',),
    "SFT on the buffer": (),
    "ARPO (Bernoulli)": (
        'explore.explorers=["entropy"]',
        "explore.entropy.rule=bernoulli",
        "explore.entropy.normaliser=log_vocabulary",
    ),
}
SFT = "SFT on the buffer"
ABLATIONS: Mapping[str, Sequence[str]] = {
    "no same-task traces": (GRAFT, "buffer.allow_same_task=false"),
    "random trace": (GRAFT, "buffer.random_prob=1"),
    "a = m = 0": (GRAFT, "credit.retrieval_weight=0", "loss.shaping_weight=0"),
    "terminal allowed": (GRAFT, "buffer.terminal=allow"),
    "all hybrid": (GRAFT, "explore.graft.num_hybrid=16"),
}
NUM_ABLATION_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """One run. Job("boundary", "RAPO", 0)"""

    world: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Folder name: letters and digits."""
        return "".join(c if c.isalnum() else "-" for c in f"{self.world}-{self.method}-{self.seed}".lower())


# ---------------------------------------------------------------------- running


def warmup_name(world: str, number: int) -> str:
    return f"warmup-{'boundary' if world == 'imperfect' else world}-{number}"


def settings(world: str, overrides: Sequence[str], out: Path, name: str, seed: int) -> list[str]:
    return [*COMMON, *WORLDS[world], *overrides, f"run.dir={out}", f"run.name={name}", f"run.seed={seed}"]


def run_warmup(world: str, number: int, out: Path) -> None:
    """Trains a warm-up, unless it is there."""
    from treegraft.recipe import load_config
    from treegraft.train import sft

    place = out / warmup_name(world, number)
    if (place / "metrics.jsonl").exists():
        return
    if place.exists():
        sft(None, resume=place)
    else:
        sft(load_config(RECIPE, settings(world, (), out, place.name, number)))


def run_job(job: Job, out: Path) -> None:
    """Makes or continues one run, unless it is finished."""
    import logging

    from treegraft.checkpoint import latest_checkpoint
    from treegraft.recipe import load_config
    from treegraft.train import train

    logging.disable(logging.WARNING)
    place = out / job.name
    if is_done(job, out):
        return
    if place.exists() and job.method != SFT:
        train(None, resume=place)
        return
    seed = FIRST_SEED + job.seed
    warmup = latest_checkpoint(out / warmup_name(job.world, job.seed % NUM_WARMUPS) / "checkpoints")
    method = {**METHODS, **ABLATIONS}[job.method]
    typed = [*settings(job.world, method, out, job.name, seed), f"model.path={warmup}", "warmup.num_steps=0"]
    # The warm-up table is a preset here, and typed overrides of presets are refused.
    typed = [text for text in typed if not text.startswith("warmup.continue_prob")]
    if job.world == "imperfect" and (GRAFT in method or "graft" in "".join(method) or job.method == SFT):
        typed.append(f"buffer.path={imperfect_buffer(out, seed)}")
    if job.method == SFT:
        imitate(load_config(RECIPE, [*typed, GRAFT]), place)
    else:
        train(load_config(RECIPE, typed))


def imperfect_buffer(out: Path, seed: int) -> Path:
    """Returns the buffer of imperfect traces of this seed's training questions, built first where there is none."""
    from treegraft.assemble import assemble
    from treegraft.recipe import load_config
    from treegraft.traces.agents import ScriptedAgent
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.build import build_traces

    place = out / f"buffer-imperfect-{seed}.sqlite"
    if place.exists():
        return place
    config = load_config(RECIPE, [*WORLDS["imperfect"], *IMPERFECT, f"run.seed={seed}"])
    parts = assemble(config)
    partial = place.with_suffix(f".{os.getpid()}.partial")

    async def build() -> None:
        try:
            with TraceBuffer(partial, config.buffer.encoder) as buffer:
                agent = ScriptedAgent(parts.source, seed=seed)
                await build_traces(parts.source.train_tasks(), agent, parts.scorer, parts.format, buffer, seed=seed)
        finally:
            await parts.close()

    asyncio.run(build())
    partial.rename(place)
    return place


def imitate(config: object, place: Path) -> None:
    """Supervised fine-tuning on the buffer's trajectories: as many optimiser steps and evaluations as the other methods."""
    from treegraft.assemble import assemble
    from treegraft.config import Config
    from treegraft.evaluate import evaluate
    from treegraft.keyed import keyed_int
    from treegraft.learn.learner import Learner
    from treegraft.learn.sft import demonstration_tree, imitation_step
    from treegraft.traces.supply import open_buffer

    assert isinstance(config, Config)
    parts = assemble(config)
    learner = Learner(parts.model, config.learn, config.loss, length_constant=1)
    tasks = {task.id: task for task in parts.source.train_tasks()}
    lines: list[dict[str, float]] = []

    async def run() -> None:
        place.mkdir(parents=True, exist_ok=True)
        buffer = await open_buffer(config, parts.source, parts.scorer, parts.format, place, 0)
        with buffer:
            found = [(tasks[steps[0].task_id], tuple(step.value for step in steps)) for steps in buffer.trajectories()]
        for update in range(NUM_UPDATES + 1):
            began = time.process_time()
            if update:
                for half in range(config.learn.num_minibatches):
                    keys = [(config.run.seed, "sft", update, half, n) for n in range(config.warmup.batch_size)]
                    picks = [keyed_int(*key) % len(found) for key in keys]
                    batch = [demonstration_tree(parts.format, *found[pick]) for pick in picks]  # type: ignore[arg-type]
                    imitation_step(learner, batch, config.learn.lr)
            line = {"update": float(update), "time/cpu_s": time.process_time() - began}
            if update % EVERY == 0:
                await parts.engine.publish(learner.export_weights(), update)
                line |= (await evaluate(parts, parts.source.eval_tasks(), update)).metrics
            lines.append(line)
        await parts.close()

    asyncio.run(run())
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_all(jobs: Sequence[Job], out: Path, *, budget_s: float, workers: int) -> None:
    """Runs what is missing, in order, until the budget for starting runs is used up."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=8) as pool:
        needed = dict.fromkeys((warmup_name(job.world, job.seed % NUM_WARMUPS), job.world, job.seed % NUM_WARMUPS) for job in jobs)
        warmups = {name: (world, number) for name, world, number in needed}
        for future in [pool.submit(run_warmup, *arguments, out) for arguments in warmups.values()]:
            future.result()
        waiting = [job for job in jobs if not is_done(job, out)]
        running: dict[Future[None], Job] = {}
        while waiting or running:
            while waiting and len(running) < workers and time.monotonic() - began < budget_s:
                job = waiting.pop(0)
                running[pool.submit(run_job, job, out)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                future.result()
                print(f"{time.monotonic() - began:6.0f} s  {job.name}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- reading


def read(job: Job, out: Path) -> list[dict[str, float]]:
    """Returns the run's lines, one per update; empty where it has none."""
    path = out / job.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_done(job: Job, out: Path) -> bool:
    lines = read(job, out)
    return bool(lines) and lines[-1]["update"] == NUM_UPDATES


def curve(lines: Sequence[Mapping[str, float]], cost: str) -> tuple[list[float], list[float]]:
    """Returns the cost so far and the accuracy at each evaluation."""
    costs, accuracies, total = [], [], 0.0
    for line in lines:
        total += line.get(cost, 0.0)
        if "eval/accuracy_sampled" in line:
            costs.append(total)
            accuracies.append(line["eval/accuracy_sampled"])
    return costs, accuracies


def interpolated(costs: Sequence[float], accuracies: Sequence[float], at: float) -> float:
    """Returns the accuracy at a cost, linear between evaluations, the last one from there on."""
    for (a, b), (x, y) in zip(pairwise(costs), pairwise(accuracies), strict=True):
        if at <= b:
            return x + (y - x) * (at - a) / max(b - a, 1e-12)
    return accuracies[-1]


T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}


def mean_ci(values: Sequence[float]) -> str:
    """Returns "mean ± half a 95 % interval" (Student's t over seeds)."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    half = T_975.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.2f} ± {half:.2f}"


CALLS, TOKENS, SECONDS = "rollout/num_tool_calls", "rollout/num_sampled_tokens", "time/cpu_s"


def table(world: str, methods: Sequence[str], num_seeds: int, out: Path, baseline: str) -> list[str]:
    """Returns one world's table in Markdown, over the seeds that all methods have finished."""
    seeds = [s for s in range(num_seeds) if all(is_done(Job(world, m, s), out) for m in methods)]
    if not seeds:
        return [f"**{world}**: no seed is complete for all methods yet.", ""]
    runs = {(m, s): read(Job(world, m, s), out) for m in methods for s in seeds}
    grown = [m for m in methods if m != SFT]
    floor = {(cost, s): min(curve(runs[m, s], cost)[0][-1] for m in grown) for cost in (CALLS, SECONDS) for s in seeds}
    rows = [
        f"**{world}**, {len(seeds)} paired seeds",
        "",
        f"| method | held out | less {baseline} | per seed | calls | tokens | CPU s | at equal calls | at equal CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for m in methods:
        final = [curve(runs[m, s], CALLS)[1][-1] for s in seeds]
        gains = [a - curve(runs[baseline, s], CALLS)[1][-1] for a, s in zip(final, seeds, strict=True)]
        totals = [statistics.fmean(curve(runs[m, s], cost)[0][-1] for s in seeds) for cost in (CALLS, TOKENS, SECONDS)]
        equal = {
            cost: statistics.fmean(interpolated(*curve(runs[m, s], cost), floor[cost, s]) for s in seeds)
            for cost in (CALLS, SECONDS)
        }
        rows.append(
            f"| {m} | {mean_ci(final)} | {'' if m == baseline else mean_ci(gains)} | {' '.join(f'{a:.2f}' for a in final)} | "
            f"{totals[0]:.0f} | {totals[1] / 1000:.0f}k | {totals[2]:.0f} | "
            f"{'-' if m == SFT else f'{equal[CALLS]:.2f}'} | {equal[SECONDS]:.2f} |"
        )
    return [*rows, ""]


def branching_costs(num_seeds: int, out: Path) -> list[str]:
    """Returns ARPO's tool calls against what its budget predicts, from the recorded trees of the boundary world."""
    from treegraft.record import read_trees
    from treegraft.types import BranchCause

    lines = []
    for method in ("ARPO", "ARPO (Bernoulli)"):
        depths, lengths, calls, unshared, starts = [], [], 0, 0, 0
        for seed in range(num_seeds):
            if not is_done(Job("boundary", method, seed), out):
                continue
            for tree in read_trees(out / Job("boundary", method, seed).name):
                starts += sum(step.depth == 1 for step in tree.steps)
                calls += tree.budget.num_tool_calls
                for step in tree.steps:
                    if isinstance(step.cause, BranchCause):
                        depths.append(sum(len(above.content.observations) for above in tree.path(step.id)[:-1]))
                for path in tree.trajectories():
                    lengths.append(path.num_tool_calls)
                    unshared += path.num_tool_calls
        if not lengths:
            continue
        d, t = statistics.fmean(depths), statistics.fmean(lengths)
        share = 1 - starts / len(lengths)
        lines += [
            f"{method}: d = {d:.2f} calls before a branch, T = {t:.2f} a trajectory; calls run per call of its trajectories "
            f"{calls / unshared:.3f}; 1 - (M - N) d / (M T) = {1 - 0.5 * d / t:.3f} for the full budget, and "
            f"{1 - share * d / t:.3f} for the {share:.2f} of its leaves that were branches."
        ]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs") / "methods")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--budget-minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.ablations:
        jobs = [Job("boundary", m, s) for s in range(NUM_ABLATION_SEEDS) for m in ("GRPO", "RAPO", *ABLATIONS)]
    else:
        jobs = [Job(w, m, s) for s in range(options.seeds) for w in options.worlds for m in METHODS]
    if not options.table:
        run_all(jobs, out, budget_s=options.budget_minutes * 60, workers=options.jobs)
    print(f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread a run\n")
    if options.ablations:
        print("\n".join(table("boundary", ["GRPO", "RAPO", *ABLATIONS], NUM_ABLATION_SEEDS, out, "RAPO")))
        return
    for world in options.worlds:
        print("\n".join(table(world, list(METHODS), options.seeds, out, "GRPO")))
    print("\n".join(branching_costs(options.seeds, out)))


if __name__ == "__main__":
    main()
