"""Which steps pruning cuts, on traces whose faults are known, with weak and strong
agents.

    python -m studies.pruning.table --out FOLDER [--steps 50 100 300] [--margins 0 -5]

The traces are those of the search world's expert with detours (a useless search before 40 % of the
right ones) that end in the right answer; beside them the faultless ones with a first step that all
of them share and nothing after it uses, as a login would be. Agents are warm-ups of the demo's
recipe. Checkpoints and buffers stay in the folder, so that the same command goes on. The last
column is CPU seconds of all threads a trajectory, without loading the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from studies.pruning.notes import read_notes
from studies.pruning.work import BufferPruning, PruneChoice
from treegraft.core.types import Observation, StepContent, Task, ToolCall
from treegraft.runs.checkpoint import latest_checkpoint
from treegraft.runs.display import shown
from treegraft.settings.load import load_config
from treegraft.tasks.build import build_tasks
from treegraft.tasks.search_world import SearchWorld, World
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import split_steps
from treegraft.traces.store import TraceFile
from treegraft.train import sft

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo.toml"
HOPS = "tasks.search_world.hops=[1, 3, 4, 5]"
DETOURS = "tasks.search_world.detour_prob=0.4"
NUM_WARMUP_STEPS = (50, 100, 200, 300)
NUM_TASKS = 120
SEED = 101


def agent(num_steps: int, out: Path) -> Path:
    """Returns the checkpoint of a warm-up, which is made first."""
    place = out / f"warmup-{num_steps}"
    if not (place / "metrics.jsonl").exists():
        typed = [HOPS, "warmup.continue_prob=[0.15]", "run.seed=1", f"run.dir={out}"]
        typed += [f"run.name={place.name}", f"warmup.num_steps={num_steps}", "eval.at_start=false"]
        sft(None, resume=place) if place.exists() else sft(load_config(RECIPE, typed))
    found = latest_checkpoint(place / "checkpoints")
    assert found is not None
    return found


def right_searches(source: SearchWorld, task: Task) -> list[str]:
    """The calls that a question takes, in order."""
    world = World(task.columns["world"], 64, 8)
    relations, entity = world.wording.read_question(task.question) or ([], "")
    bodies = []
    for relation in relations:
        bodies.append(world.wording.query(entity, relation))
        entity = world.look_up(entity, relation)
    return bodies


def traces(source: SearchWorld, tasks: list[Task]) -> Iterator[tuple[str, Task, list[StepContent]]]:
    """Yields (kind, task, steps)."""
    for task in tasks:
        found = list(source.expert(task, SEED))
        yield "detours", task, found
        right = right_searches(source, task)
        faultless = [one for one in found if one.answer or one.calls[0].body in right]
        fact = World(task.columns["world"], 64, 8).fact("e0", "r0")
        login = StepContent(
            calls=(ToolCall("search", "e0 r0"),), observations=(Observation(text=fact),)
        )
        yield "login", task, [login, *faultless]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=NUM_WARMUP_STEPS)
    parser.add_argument("--margins", type=float, nargs="+", default=[0.0])
    parser.add_argument("--tasks", type=int, default=NUM_TASKS, help="questions; default: 120")
    given = parser.parse_args()
    out = given.out
    out.mkdir(parents=True, exist_ok=True)
    config = load_config(RECIPE, [HOPS, DETOURS, f"run.seed={SEED}"])
    source = build_tasks(config.tasks, config.run.seed)
    assert isinstance(source, SearchWorld)
    tasks = list(source.train_tasks())[: given.tasks]
    stored = {(task.id, kind): steps for kind, task, steps in traces(source, tasks)}
    full = out / "full.sqlite"
    with TraceBuffer(full, "hashing") as buffer:
        for (task_id, kind), steps in stored.items():
            task = next(one for one in tasks if one.id == task_id)
            buffer.add(
                split_steps(
                    task_id, task.question, steps, reward=1.0, source="expert", trajectory=kind
                )
            )
    right = {task.id: right_searches(source, task) for task in tasks}
    print("| warm-up steps | margin | faults cut | right steps lost | traces exactly right", end="")
    print(" | logins cut | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for num_steps in given.steps:
        for margin in given.margins:
            pruned = out / f"pruned-{num_steps}-{margin:g}.sqlite"
            cost = pruned.with_suffix(".json")
            if not cost.exists():
                # Complete, but ended before its cost was written.
                pruned.unlink(missing_ok=True)
                model = str(agent(num_steps, out))
                work = BufferPruning(
                    config, PruneChoice(model=model, buffer=full, out=pruned, margin=margin)
                )
                with shown(False) as display:
                    work.run(display=display)
                if work.is_stopped:
                    return
                cost.write_text(json.dumps(work.report.cpu_s / work.report.num_weighed))
            counts = row(pruned, stored, right)
            seconds = json.loads(cost.read_text())
            print(f"| {num_steps} | {margin:g} | {counts} | {seconds:.4f} |", flush=True)


def row(
    pruned: Path,
    stored: dict[tuple[str, str], list[StepContent]],
    right: dict[str, list[str]],
) -> str:
    """The counts of a line of the table."""
    counts = dict.fromkeys(("faults", "cut", "needed", "lost", "exact", "logins"), 0)
    with closing(TraceFile(pruned, create=False)) as file:
        notes = read_notes(file)
    for (_, task_id, kind), note in notes.items():
        cut = {step["position"] for step in note["steps"] if step["is_cut"]}
        if kind == "login":
            counts["logins"] += 0 in cut
            continue
        calls = [step.calls[0].body for step in stored[task_id, kind][:-1]]
        faults = {n for n, body in enumerate(calls) if body not in right[task_id]}
        counts["faults"] += len(faults)
        counts["cut"] += len(faults & cut)
        counts["needed"] += len(calls) - len(faults)
        counts["lost"] += len(cut - faults)
        counts["exact"] += cut == faults
    traces = len(notes) // 2
    return (
        f"{counts['cut']} of {counts['faults']} | {counts['lost']} of {counts['needed']}"
        f" | {counts['exact']} of {traces} | {counts['logins']} of {traces}"
    )


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")
