"""Trees in TRL's trainer beside TRL alone and beside our learner, on a CPU.

    python -m benchmarks.trl seconds --rounds 5           # one update, in turns in one process
    python -m benchmarks.trl learning                     # GRPO, ARPO and RAPO, three seeds
    python -m benchmarks.trl learning --table             # of the runs that are in trl.jsonl

The task is the demo's, from agents that are warmed up in FOLDER. `learning` writes a line for each
run into benchmarks/trl.jsonl and leaves out those that are there, so it goes on after an end; at
its end it prints the table. Delete a line to make its run again.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from treegraft import Config, Session, evaluate_checkpoint, load_config, train
from treegraft.extras.trl import TreeGRPOTrainer, grpo_config
from treegraft.parts import files

METHODS = {
    "grpo": ["explore.explorers=['independent']"],
    "arpo": [
        "explore.explorers=['entropy']",
        "explore.entropy.num_starts=4",
        "credit.attribution=hard",
    ],
    "rapo": ["explore.explorers=['graft']", "explore.graft.num_hybrid=4"],
}
SEEDS = (0, 1, 2)
ONE_STEP = ["learn.num_minibatches=1", "eval.every=0", "eval.at_start=false", "eval.at_end=false"]
"""What TRL has no word for."""
SMALL = ["run.tasks_per_update=4", "explore.num_leaves=8", "tasks.num_eval=100"]
BRIEF = ["warmup.num_steps=80", "warmup.batch_size=24", "warmup.lr_warmup_steps=10"]
LEARNING = [*SMALL, "learn.lr=1e-3"]
"""Few trees and large steps, so that something is learned within minutes."""
WARM = [
    "warmup.num_steps=200",
    "warmup.batch_size=32",
    "warmup.lr_warmup_steps=20",
    # The demo's 0.1 is so seldom that GRPO never meets a search that pays.
    "warmup.continue_prob=[0.5]",
]
RESULTS = Path(__file__).with_suffix(".jsonl")
QUIET = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
QUIET |= {"logging_strategy": "no"}
app = typer.Typer(add_completion=False)
Folder = Annotated[Path, typer.Option(help="The warmed-up agent, and the results.")]


def warmed_up(folder: Path, name: str, *overrides: str) -> Path:
    """Returns the folder of an agent that runs begin with."""
    place = folder / name
    if not (place / "checkpoint").exists():
        run = ["run.num_updates=0", f"run.name={name}", f"run.dir={json.dumps(str(folder))}"]
        config = load_config("demo", [*ONE_STEP, *run, *overrides])
        (place / "checkpoint").symlink_to(train(config, display=False).checkpoint_dir.resolve())
    return (place / "checkpoint").resolve()


def config_of(method: str, base: Path, *overrides: str) -> Config:
    """Returns the recipe of one run."""
    own = [f"model.path={json.dumps(str(base))}", "warmup.num_steps=0", *overrides]
    return load_config("demo", [*ONE_STEP, *METHODS[method], *own])


# ---------------------------------------------------------------------- seconds


class Turns(TrainerCallback):
    """Lets an optimiser step of TRL's loop begin when it is its turn."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.done = threading.Semaphore(0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.may.acquire()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.done.release()


def counting(kind: Any, tokens: list[tuple[int, int]]) -> Any:
    """A trainer's class that notes (tokens, tokens with padding) of each generation."""

    class Counting(kind):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            masks = [output["prompt_mask"], output["completion_mask"]]
            tokens.append((sum(int(one.sum()) for one in masks), sum(one.numel() for one in masks)))
            return output

    return Counting


def in_turns(trainer: Any, turns: Turns) -> Callable[[], None]:
    """What makes one optimiser step of a trainer, which runs in a thread of its own."""
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        turns.may.release()
        turns.done.acquire()

    return step


@app.command()
def seconds(folder: Folder = Path("trl-bench"), rounds: int = 5, method: str = "arpo") -> None:
    """Seconds and tokens of an update, in turns; medians, and the range of ratios."""
    torch.set_num_threads(1)
    base = warmed_up(folder, "base", *SMALL, *BRIEF)
    config = config_of(method, base, *SMALL, "run.num_updates=1000")
    alone_tokens, tree_tokens, our_tokens = (list[tuple[int, int]]() for _ in range(3))
    turns = Turns(), Turns()
    own = {**QUIET, "output_dir": str(folder / "out")}
    with_trees = counting(TreeGRPOTrainer, tree_tokens)(
        None, config, grpo_config(config, **own), callbacks=[turns[0]]
    )
    with Session(config) as ours:
        prompts = [{"prompt": task.question} for task in ours.tasks]
        alone = counting(GRPOTrainer, alone_tokens)(
            model=str(base),
            reward_funcs=lambda completions, **_: [float(len(one) % 7) for one in completions],
            args=GRPOConfig(
                **own,
                bf16=False,
                max_steps=1000,
                num_generations=config.explore.num_leaves,
                per_device_train_batch_size=config.explore.num_leaves,
                gradient_accumulation_steps=config.run.tasks_per_update,
                max_completion_length=config.rollout.max_completion_tokens,
                learning_rate=config.learn.lr,
            ),
            train_dataset=Dataset.from_list(prompts),
            callbacks=[turns[1]],
        )
        number = 0

        def our_step() -> None:
            nonlocal number
            number += 1
            size = config.run.tasks_per_update
            own = ours.tasks[number * size : (number + 1) * size]
            trees = ours.learn(ours.credit(ours.sample(number, own)), number)
            ours.sync_weights(number)
            count = sum(len(step.token_ids) for tree in trees for step in tree.steps)
            our_tokens.append((count, count))

        sides = {
            "TRL alone": (in_turns(alone, turns[1]), alone_tokens),
            "TRL with trees": (in_turns(with_trees, turns[0]), tree_tokens),
            "ours": (our_step, our_tokens),
        }
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds + 1):
            for name, (step, _) in sides.items():
                began = time.process_time()
                step()
                taken[name].append(time.process_time() - began)
    for name, (_, tokens) in sides.items():
        real, padded = (int(statistics.median(column)) for column in zip(*tokens, strict=True))
        # The first round warms caches up.
        ratios = [a / b for a, b in zip(taken[name][1:], taken["ours"][1:], strict=True)]
        print(
            f"{name}: {statistics.median(taken[name][1:]):.2f} CPU s an update,"
            f" {statistics.median(ratios):.2f} times ours [{min(ratios):.2f}, {max(ratios):.2f}];"
            f" {real} tokens, {padded} with padding"
        )
    with_trees.close()


# ---------------------------------------------------------------------- learning


SIDES = ("TRL", "ours")
BEFORE = ("", "before")
MEASURED = ("eval/accuracy_sampled", "eval/accuracy")
Key = tuple[int, str, str, int]


@app.command()
def learning(
    folder: Folder = Path("trl-bench"),
    updates: int = 30,
    only_table: Annotated[bool, typer.Option("--table", help="Trains nothing.")] = False,
) -> None:
    """Accuracy after some updates in TRL and by our learner, from the same weights."""
    torch.set_num_threads(1)
    results = files.LineFile(RESULTS)
    known: dict[Any, dict[str, Any]] = {}
    for _, text in results.lines() if RESULTS.exists() else ():
        line = json.loads(text)
        known[tuple(line["run"])] = line
    runs: list[Key] = [
        (seed, method, side, updates if method else 0)
        for seed in SEEDS
        for method, side in (BEFORE, *itertools.product(METHODS, SIDES))
    ]
    for run in runs:
        if run not in known and not only_table:
            known[run] = one_run(folder, *run)
            results.append(json.dumps(known[run]))
    print("\n".join(table(known, updates)))


def one_run(folder: Path, seed: int, method: str, side: str, updates: int) -> dict[str, Any]:
    """Trains, and returns the line of what came out; an empty method trains nothing."""
    base = warmed_up(folder, "warmup", *SMALL, *WARM)
    name = f"{side}-{method}-{seed}-{updates}"
    named = (f"run.name={json.dumps(name)}", f"run.dir={json.dumps(str(folder))}")
    size = (f"run.seed={seed}", f"run.num_updates={updates}")
    config = config_of(method or "grpo", base, *LEARNING, *size, *named)
    # A run that was cut off has left its beginning.
    shutil.rmtree(folder / name, ignore_errors=True)
    began = time.process_time()
    if not method:
        trained = base
    elif side == "ours":
        trained = train(config, display=False).checkpoint_dir
    else:
        trained = folder / name / "agent"
        trainer = TreeGRPOTrainer(
            None, config, grpo_config(config, output_dir=str(folder / name), **QUIET)
        )
        trainer.train()
        trainer.save_model(str(trained))
    line = {"run": [seed, method, side, updates], "seconds": round(time.process_time() - began, 1)}
    found = evaluate_checkpoint(trained, config, display=False).metrics
    return line | {name: round(float(found[name]), 4) for name in MEASURED}


def table(lines: Mapping[Key, Mapping[str, Any]], updates: int) -> Iterator[str]:
    """Yields the table in Markdown: each seed's numbers, of the seeds that are there."""
    yield "| method | by | accuracy, sampled | greedy | CPU seconds |"
    yield "|---|---|---|---|---|"
    for method, side in (BEFORE, *itertools.product(METHODS, SIDES)):
        keys = [(seed, method, side, updates if method else 0) for seed in SEEDS]
        own = [lines[key] for key in keys if key in lines]
        cells = [" ".join(f"{one[name]:.2f}" for one in own) for name in MEASURED]
        seconds = " ".join(f"{one['seconds']:.0f}" for one in own) if method else ""
        yield f"| {method.upper()} | {side} | {cells[0]} | {cells[1]} | {seconds} |"


if __name__ == "__main__":
    app()
