"""GRPO, ARPO, RAPO, their compositions and imitation of the buffer, side by side on three worlds;
one resumable command.

    python benchmarks/methods.py --budget-minutes 60   trains the missing runs, prints the tables
    python benchmarks/methods.py --table               prints the tables of the finished runs
    python benchmarks/methods.py --ablations           RAPO's ablations: three seeds, boundary world

What a finished run found goes to `benchmarks/methods.jsonl`, one line a run, so that the command
goes on where it stopped, on another machine too; delete a line to run it again.

All runs are `recipes/demo.toml` with the overrides below, a harder task than the recipe's own and
RAPO as the paper has it: 40 updates of 12 trees with 16 leaves,
held-out questions without retrieval or branching every 5 updates. Seeds are paired: a seed fixes
training world, questions, held-out questions and noise for every method; its warm-up is one of
three. Runs are started seed by seed, so a budget that ends early leaves complete pairs.
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
from typing import Any

from treegraft.core.types import Origin, StepContent
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo.toml"
RESULTS = Path(__file__).with_suffix(".jsonl")
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
NUM_WARMUP_STEPS = 300

BOUNDARY = ("tasks.search_world.hops=[1, 3, 4, 5]", "warmup.continue_prob=[0.15]")
WORLDS: Mapping[str, Sequence[str]] = {
    "boundary": BOUNDARY,
    "short": ("tasks.search_world.hops=[1, 2, 3]", "warmup.continue_prob=[0.05]"),
    "imperfect": BOUNDARY,
}
"""World -> overrides. "imperfect" is "boundary" with a buffer of imperfect traces."""
IMPERFECT = ("tasks.search_world.detour_prob=0.4", "tasks.search_world.error_prob=0.3")
"""The expert that fills the buffer of "imperfect": 16 attempts a question, of which the 5 best by
reward are kept."""

GRAFT = 'explore.explorers=["graft"]'
PAPER = ("explore.graft.probability=0.5", "loss.graft_coef=0")
"""The paper's values, which methods with grafts have unless they name others."""
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
        return "".join(
            c if c.isalnum() else "-" for c in f"{self.world}-{self.method}-{self.seed}".lower()
        )


# ---------------------------------------------------------------------- running


def warmup_name(world: str, number: int) -> str:
    return f"warmup-{'boundary' if world == 'imperfect' else world}-{number}"


def as_in_the_paper(overrides: Sequence[str]) -> Sequence[str]:
    """Returns those of PAPER that the overrides leave alone; none without grafts, where they would
    have no effect and be refused."""
    if "graft" not in "".join(overrides):
        return ()
    named = {text.partition("=")[0] for text in overrides}
    return [text for text in PAPER if text.partition("=")[0] not in named]


def settings(world: str, overrides: Sequence[str], out: Path, name: str, seed: int) -> list[str]:
    return [
        *COMMON,
        *WORLDS[world],
        *overrides,
        *as_in_the_paper(overrides),
        f"run.dir={out}",
        f"run.name={name}",
        f"run.seed={seed}",
    ]


def run_warmup(world: str, number: int, out: Path) -> None:
    """Trains a warm-up, unless it is there."""
    from treegraft.train import sft

    place = out / warmup_name(world, number)
    if (place / "metrics.jsonl").exists():
        return
    if place.exists():
        sft(None, resume=place)
    else:
        steps = f"warmup.num_steps={NUM_WARMUP_STEPS}"
        sft(load_config(RECIPE, settings(world, (steps,), out, place.name, number)))


def run_job(job: Job, out: Path) -> None:
    """Makes or continues one run, unless it is finished."""
    import logging

    from treegraft.runs.checkpoint import latest_checkpoint
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
    typed = [
        *settings(job.world, method, out, job.name, seed),
        f"model.path={warmup}",
        "warmup.num_steps=0",
    ]
    # The warm-up table is a preset here, and typed overrides of presets are refused.
    typed = [text for text in typed if not text.startswith("warmup.continue_prob")]
    if job.world == "imperfect" and uses_buffer(job.method):
        typed.append(f"buffer.path={imperfect_buffer(out, seed)}")
    if job.method == SFT:
        imitate(load_config(RECIPE, [*typed, GRAFT]), place)
    else:
        train(load_config(RECIPE, typed))


def imperfect_buffer(out: Path, seed: int) -> Path:
    """Returns the buffer of imperfect traces of this seed's training questions, built first where
    there is none."""
    from treegraft.assemble import assemble
    from treegraft.traces.agents import ScriptedAgent
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.collect import build_traces

    place = out / f"buffer-imperfect-{seed}.sqlite"
    if place.exists():
        return place
    config = load_config(RECIPE, [*WORLDS["imperfect"], *IMPERFECT, f"run.seed={seed}"])
    partial = place.with_suffix(f".{os.getpid()}.partial")

    async def build() -> None:
        async with assemble(config) as parts:
            with TraceBuffer(partial, config.buffer.encoder) as buffer:
                agent = ScriptedAgent(parts.source, seed=seed)
                await build_traces(
                    parts.train_tasks, agent, parts.scorer, parts.format, buffer, seed=seed
                )

    asyncio.run(build())
    partial.rename(place)
    return place


def imitate(config: Config, place: Path) -> None:
    """Supervised fine-tuning on the buffer's trajectories: as many optimiser steps and evaluations
    as the other methods."""
    from treegraft.assemble import assemble_training
    from treegraft.core.keyed import keyed_int
    from treegraft.evals.evaluate import evaluate
    from treegraft.policy.learn.sft import demonstration_tree
    from treegraft.tasks.build import build_tasks
    from treegraft.traces.run_buffer import RunBuffer

    lines: list[dict[str, float]] = []

    async def run() -> None:
        place.mkdir(parents=True, exist_ok=True)
        source = build_tasks(config.tasks, config.run.seed)
        async with assemble_training(config, source=source) as parts:
            tasks = {task.id: task for task in parts.train_tasks}
            held = RunBuffer(config, source, place)
            async with held.opened(0, parts.scorer, parts.format):
                assert held.buffer is not None
                trees = [
                    demonstration_tree(
                        parts.format,
                        tasks[steps[0].task_id],
                        [step.value for step in steps if isinstance(step.value, StepContent)],
                    )
                    for steps in held.buffer.trajectories()
                ]
            for update in range(NUM_UPDATES + 1):
                began = time.process_time()
                if update:
                    for half in range(config.learn.num_minibatches):
                        keys = [
                            (config.run.seed, "sft", update, half, n)
                            for n in range(config.warmup.batch_size)
                        ]
                        batch = [trees[keyed_int(*key) % len(trees)] for key in keys]
                        parts.learner.imitate(batch, config.learn.lr)
                line = {"update": float(update), "time/cpu_s": time.process_time() - began}
                if update % EVERY == 0:
                    await parts.engine.publish(parts.learner.weights(), update)
                    line |= (await evaluate(parts, parts.eval_tasks, update)).metrics
                lines.append(line)

    asyncio.run(run())
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_all(jobs: Sequence[Job], out: Path, *, budget_s: float, workers: int) -> None:
    """Runs what is missing, in order, until the budget for starting runs is used up."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        known = results()
        waiting = [job for job in jobs if job not in known]
        numbers = [(job.world, job.seed % NUM_WARMUPS) for job in waiting]
        warmups = {warmup_name(world, number): (world, number) for world, number in numbers}
        for future in [pool.submit(run_warmup, *arguments, out) for arguments in warmups.values()]:
            future.result()
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
                keep(job, out)
                print(f"{time.monotonic() - began:6.0f} s  {job.name}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- what a run found


CALLS, TOKENS, SECONDS = "rollout/num_tool_calls", "rollout/num_sampled_tokens", "time/cpu_s"
Line = dict[str, Any]


def is_done(job: Job, out: Path) -> bool:
    """Returns whether the run has come to its end in `out`."""
    lines = metrics_of(job, out)
    return bool(lines) and lines[-1]["update"] == NUM_UPDATES


def metrics_of(job: Job, out: Path) -> list[dict[str, float]]:
    path = out / job.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told_apart(job: Job) -> Line:
    """Returns the settings in which the runs differ, by dotted name: what `treegraft report`
    compares them by."""
    from treegraft.settings.config import known_settings
    from treegraft.settings.load import load_config

    is_flawed = job.world == "imperfect" and uses_buffer(job.method)
    every = [*METHODS.values(), *ABLATIONS.values(), *WORLDS.values(), IMPERFECT]
    method = {**METHODS, **ABLATIONS}[job.method]
    typed = [
        *WORLDS[job.world],
        *method,
        *as_in_the_paper(method),
        *(IMPERFECT if is_flawed else ()),
    ]
    whole = load_config(RECIPE, typed).model_dump(mode="json")
    names = sorted(
        {text.partition("=")[0] for one in every for text in one} & set(known_settings())
    )
    found: Line = {"study.imitates": job.method == SFT}
    if "graft" not in "".join(method):
        # The recipe's value has no effect there.
        whole["loss"]["graft_coef"] = 0.0
    for name in names:
        value: Any = whole
        for part in name.split("."):
            value = value[part]
        found[name] = value
    return found


def uses_buffer(method: str) -> bool:
    """Returns whether the expert's steps reach the agent."""
    return method == SFT or "graft" in "".join({**METHODS, **ABLATIONS}[method])


def found_by(job: Job, out: Path) -> Line:
    """Returns a finished run in short: at each evaluation the accuracy and what was spent so far;
    how its trees branched."""
    lines = metrics_of(job, out)
    found: Line = {
        "world": job.world,
        "method": job.method,
        "seed": job.seed,
        "date": time.strftime("%Y-%m-%d"),
    }
    found |= {"num_eval": NUM_EVAL, "settings": told_apart(job)}
    spent = dict.fromkeys((CALLS, TOKENS, SECONDS), 0.0)
    found["curve"] = []
    for line in lines:
        spent = {cost: total + line.get(cost, 0.0) for cost, total in spent.items()}
        if "eval/accuracy_sampled" in line:
            found["curve"].append(
                {"update": line["update"], "accuracy": line["eval/accuracy_sampled"]} | spent
            )
    if "entropy" in "".join({**METHODS, **ABLATIONS}[job.method]):
        found["branching"] = branching(out / job.name)
    return found


def branching(run_dir: Path) -> dict[str, float]:
    """Returns how a run's trees branched: branches, their calls before, leaves, calls of all leaves
    and calls that were run."""
    from treegraft.core.types import BranchCause
    from treegraft.runs.record import read_trees

    counts = dict.fromkeys(
        ("branches", "calls_before", "leaves", "calls_of_leaves", "calls_run"), 0.0
    )
    for tree in read_trees(run_dir):
        counts["calls_run"] += tree.budget.num_tool_calls
        for path in tree.trajectories():
            counts["leaves"] += 1
            counts["calls_of_leaves"] += path.num_tool_calls
        for step in tree.steps:
            if isinstance(step.cause, BranchCause):
                counts["branches"] += 1
                above = tree.path(step.id)[:-1]
                counts["calls_before"] += sum(
                    len(s.content.observations) for s in above if s.origin is Origin.POLICY
                )
    return counts


def keep(job: Job, out: Path) -> None:
    """Adds a finished run to the results."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found_by(job, out)) + "\n")


def collect(jobs: Sequence[Job], out: Path) -> None:
    """Adds runs that came to their end while nobody noted it."""
    known = results()
    for job in jobs:
        if job not in known and is_done(job, out):
            keep(job, out)


def results() -> dict[Job, Line]:
    """Returns what is known so far."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {
        Job(line["world"], line["method"], line["seed"]): line for line in map(json.loads, lines)
    }


def curve(found: Line, cost: str) -> tuple[list[float], list[float]]:
    """Returns the cost so far and the accuracy at each evaluation."""
    return [point[cost] for point in found["curve"]], [
        point["accuracy"] for point in found["curve"]
    ]


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


def table(world: str, methods: Sequence[str], num_seeds: int, baseline: str) -> list[str]:
    """Returns one world's table in Markdown, over the seeds that all methods have finished."""
    known = results()
    seeds = [s for s in range(num_seeds) if all(Job(world, m, s) in known for m in methods)]
    if not seeds:
        return [f"**{world}**: no seed is complete for all methods yet.", ""]
    runs = {(m, s): known[Job(world, m, s)] for m in methods for s in seeds}
    grown = [m for m in methods if m != SFT]
    floor = {
        (cost, s): min(curve(runs[m, s], cost)[0][-1] for m in grown)
        for cost in (CALLS, SECONDS)
        for s in seeds
    }
    rows = [
        f"**{world}**, {len(seeds)} paired seeds",
        "",
        (
            f"| method | held out | less {baseline} | per seed | calls | tokens | CPU s | at equal"
            " calls | at equal CPU s |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for m in methods:
        final = [curve(runs[m, s], CALLS)[1][-1] for s in seeds]
        gains = [
            a - curve(runs[baseline, s], CALLS)[1][-1] for a, s in zip(final, seeds, strict=True)
        ]
        totals = [
            statistics.fmean(curve(runs[m, s], cost)[0][-1] for s in seeds)
            for cost in (CALLS, TOKENS, SECONDS)
        ]
        equal = {
            cost: statistics.fmean(
                interpolated(*curve(runs[m, s], cost), floor[cost, s]) for s in seeds
            )
            for cost in (CALLS, SECONDS)
        }
        rows.append(
            f"| {m} | {mean_ci(final)} | {'' if m == baseline else mean_ci(gains)} |"
            f" {' '.join(f'{a:.2f}' for a in final)} | {totals[0]:.0f} | {totals[1] / 1000:.0f}k |"
            f" {totals[2]:.0f} | {'-' if m == SFT else f'{equal[CALLS]:.2f}'} |"
            f" {equal[SECONDS]:.2f} |"
        )
    return [*rows, ""]


def branching_costs(num_seeds: int) -> list[str]:
    """Returns ARPO's tool calls against what its budget predicts, on the boundary world."""
    known, lines = results(), []
    for method in ("ARPO", "ARPO (Bernoulli)"):
        found = [
            known[job]["branching"]
            for s in range(num_seeds)
            if (job := Job("boundary", method, s)) in known
        ]
        total = {name: sum(counts[name] for counts in found) for name in found[0]} if found else {}
        if not total.get("calls_of_leaves"):
            continue
        d, t = (
            total["calls_before"] / max(1.0, total["branches"]),
            total["calls_of_leaves"] / total["leaves"],
        )
        share = total["branches"] / total["leaves"]
        lines.append(
            f"{method}: d = {d:.2f} calls before a branch, T = {t:.2f} a trajectory; calls run per"
            f" call of its trajectories {total['calls_run'] / total['calls_of_leaves']:.3f}; 1 - (M"
            f" - N) d / (M T) = {1 - 0.5 * d / t:.3f} for the whole budget, {1 - share * d / t:.3f}"
            f" for the {share:.2f} of its leaves that were branches."
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs") / "methods")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument(
        "--budget-minutes", type=float, default=math.inf, help="start no run after this time"
    )
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.ablations:
        jobs = [
            Job("boundary", m, s)
            for s in range(NUM_ABLATION_SEEDS)
            for m in ("GRPO", "RAPO", *ABLATIONS)
        ]
    else:
        jobs = [Job(w, m, s) for s in range(options.seeds) for w in options.worlds for m in METHODS]
    collect(jobs, out)
    if not options.table:
        run_all(jobs, out, budget_s=options.budget_minutes * 60, workers=options.jobs)
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()},"
        f" {os.cpu_count()} cores, one thread a run\n"
    )
    if options.ablations:
        print(
            "\n".join(table("boundary", ["GRPO", "RAPO", *ABLATIONS], NUM_ABLATION_SEEDS, "RAPO"))
        )
        return
    for world in options.worlds:
        print("\n".join(table(world, list(METHODS), options.seeds, "GRPO")))
    print("\n".join(branching_costs(options.seeds)))


if __name__ == "__main__":
    main()
