"""Bad inputs and damaged run folders, each given to the command line: how does it end?

    python -m benchmarks.fuzz FOLDER [--inputs 1000] [--folders 500] [--seed 0]

Inputs are recipes, lines of tasks, data files, checkpoints and buffers with bytes cut, flipped or
replaced, or with another value somewhere in their JSON. Each has to end in one of our errors (one
paragraph, exit codes 1 to 3), or to be accepted for what it is: a resumed run that says nothing of
a damage leaves what an undisturbed one does. A traceback, an end by time or by a signal, and a
silent difference are wrong. Each input meets a forked child of one process that has everything
loaded and has read the undamaged files. A line for each goes to FOLDER/fuzz.jsonl, and what was
stopped goes on behind the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.runs.test_fuzzed_folders import (
    RUN_FILES,
    SHAPES,
    VALUES,
    WHOLES,
    command,
    commands_for,
    damage,
    make_material,
)
from tests.support.tiny import differing

from treegraft.core.files import LineFile

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 300
"""Of one command, on a busy machine."""
JUNK = ("[", "]", "=", '"', "\n", "\0", "\ufeff", "[run]\n", "a." * 900, "9" * 5000, "inf", "{}")
BUFFER = ("a/buffer/traces.sqlite",)
DATA = ("rows.jsonl", "rows.json", "rows.parquet")
CHECKPOINT = tuple(name for name in RUN_FILES if "checkpoints" in name)
FOLDER = tuple(name for name in RUN_FILES if name not in (*CHECKPOINT, *BUFFER))
NO_TOOLS = {"max_tool_calls": 0}
"""The world's tool answers no questions of a file."""
DRAWN_EVERY = 10
"""Damaged folders for each whose report draws its figures."""
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    how: str
    """"refused", "accepted", "failed" or "wrong"."""
    said: str


def drawn(draw: random.Random, name: str) -> tuple[Any, ...]:
    """Returns what becomes of a file, as `damage` takes it."""
    kinds = ["cut", "flip", "whole", "gone", "folder", "loop"]
    if name.endswith((".json", ".jsonl")):
        kinds += ["value"] * 5
    kind = draw.choice(kinds)
    if kind == "whole":
        return kind, draw.choice(WHOLES)
    places = [draw.randrange(10**6) for _ in range(draw.randint(1, 6))]
    return kind, places, draw.choice(VALUES)


def ended(*arguments: str) -> Ended:
    """Runs a command."""
    code, printed = command(*arguments)
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    is_told = not code or len(errors) == 1
    if "Traceback" in printed or code not in (0, 1, 2, 3) or not is_told:
        return Ended("wrong", f"exit code {code}: {printed[-1500:]}")
    if code:
        return Ended("failed" if code == 1 else "refused", (errors or [""])[0][:300])
    warned = [line for line in printed.splitlines() if "warning: " in line]
    return Ended("accepted", " ".join(warned)[:300])


# ---------------------------------------------------------------------- inputs


def recipe(draw: random.Random, folder: Path, _: Path) -> Ended:
    """One of ours with parts left out and others put in, or with any bytes."""
    path = folder / "r.toml"
    text = draw.choice(RECIPES).read_text(encoding="utf-8")
    for _change in range(draw.randint(1, 4)):
        start = draw.randint(0, len(text))
        text = text[:start] + draw.choice(JUNK) + text[start + draw.randint(0, 200) :]
    path.write_bytes(text.encode() if draw.random() < 0.9 else draw.randbytes(200))
    return ended("config", str(path))


def tasks(draw: random.Random, folder: Path, _: Path) -> Ended:
    """Lines of tasks, which are trained on: no update, but all prompts are measured."""
    path = folder / "rows.jsonl"
    recipe = folder / "r.json"
    damage(path, drawn(draw, path.name))
    tables = {**SHAPES, "run": {"name": "t", "dir": str(folder), "num_updates": 0}}
    tables["tasks"] = {"kind": "dataset", "num_eval": 2, "dataset": {"train": [str(path)]}}
    tables |= {"buffer": {}, "explore": {"num_leaves": 2}, "warmup": {"num_steps": 0}}
    tables["rollout"] = {**SHAPES["rollout"], **NO_TOOLS}
    tables["model"] = {"path": str(folder / "a" / "checkpoints" / "update-000001")}
    recipe.write_text(json.dumps(tables), encoding="utf-8")
    return ended("train", str(recipe))


def data(draw: random.Random, folder: Path, _: Path) -> Ended:
    """A data file that an agent is measured on."""
    name = draw.choice(DATA)
    damage(folder / name, drawn(draw, name))
    settings = [f"rollout.{key}={value}" for key, value in NO_TOOLS.items()]
    settings += ["tasks.kind=dataset", f'tasks.dataset.eval=["{folder / name}"]']
    return ended("eval", str(folder / "a"), *settings)


def of_run(names: tuple[str, ...]) -> Callable[[random.Random, Path, Path], Ended]:
    """A damaged file of a run that is then resumed."""

    def resumed(draw: random.Random, folder: Path, undisturbed: Path) -> Ended:
        name = draw.choice(names)
        what = drawn(draw, name)
        damage(folder / name, what)
        found = ended("train", "--resume", str(folder / "a"), *draw.choice(([], ["--trust"])))
        if found.how != "accepted" or found.said:
            return found
        # The damaged file itself may stay as it is where nothing depends on it.
        unlike = [one for one in differing(undisturbed / "a", folder / "a") if f"a/{one}" != name]
        if unlike:
            return Ended("wrong", f"accepted without a word, and other bytes in {unlike}")
        return found

    return resumed


KINDS: dict[str, Callable[[random.Random, Path, Path], Ended]] = {
    "recipe": recipe,
    "tasks": tasks,
    "data file": data,
    "checkpoint": of_run(CHECKPOINT),
    "buffer": of_run(BUFFER),
}


def read_all(draw: random.Random, folder: Path, undisturbed: Path) -> Ended:
    """A damaged run folder, which is shown, compared, reported and resumed."""
    name = draw.choice(RUN_FILES)
    what = drawn(draw, name)
    run = str(folder / "a")
    damage(folder / name, what)
    # Figures take most of the time; a report without one still reads the whole run.
    figures = [] if draw.random() <= 1 / DRAWN_EVERY else ["--only", "sweep"]
    for arguments in (
        ["view", run, "--text", "newest"],
        ["compare", run, run],
        ["report", run, "--out", f"{run}-r", *figures],
    ):
        if (found := ended(*arguments)).how == "wrong":
            return Ended("wrong", f"{arguments[0]}: {found.said}")
    return ended("train", "--resume", run)


# ---------------------------------------------------------------------- the campaign


def met(kind: str, number: int, seed: int, material: Path, undisturbed: Path) -> Ended:
    """Gives one input to the commands."""
    draw = random.Random(f"{seed}/{kind}/{number}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "m"
        shutil.copytree(material, folder)
        try:
            make = read_all if kind == "folder" else KINDS[kind]
            return make(draw, folder, undisturbed)
        except Exception as error:
            return Ended("wrong", repr(error)[:1500])


def one(kind: str, number: int, *rest: Any) -> dict[str, Any]:
    """Returns the line of one input, which a forked child meets."""
    began = time.monotonic()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reading)
        signal.alarm(LONGEST_S)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(asdict(met(kind, number, *rest))))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        said = json.dumps(asdict(Ended("wrong", f"its process ended with {status}")))
    found = Ended(**json.loads(said))
    took = round(time.monotonic() - began, 1)
    return {"kind": kind, "number": number, "end": found.how, "said": found.said, "s": took}


def main() -> None:
    """Goes on with the campaign and prints its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--folders", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    results = LineFile(asked.folder / "fuzz.jsonl")
    lines = [json.loads(line) for _, line in results.lines()]
    done = {(line["kind"], line["number"]) for line in lines}
    kinds = list(KINDS)
    wanted = [(kinds[n % len(kinds)], n) for n in range(asked.inputs)]
    wanted += [("folder", n) for n in range(asked.folders)]
    # Spread, so that a part of the campaign is a part of each kind.
    random.Random(asked.seed).shuffle(wanted)
    with tempfile.TemporaryDirectory() as place:
        material = Path(place) / "material"
        undisturbed = Path(place) / "undisturbed"
        make_material(material)
        shutil.copytree(material, undisturbed)
        assert ended("train", "--resume", str(undisturbed / "a")).how == "accepted"
        for name in (*DATA, "a/metrics.jsonl"):
            # Refused undamaged is refused however damaged; and what is needed is loaded.
            for arguments in commands_for(name, undisturbed):
                assert ended(*arguments).how == "accepted", arguments
        for kind, number in wanted:
            if (kind, number) not in done:
                line = one(kind, number, asked.seed, material, undisturbed)
                results.append(json.dumps(line))
                lines.append(line)
    counts = Counter((line["kind"], line["end"]) for line in lines)
    print("| kind | inputs | refused | accepted | failed at work | wrong |")
    print(f"|{'---|' * 6}")
    for kind in (*KINDS, "folder"):
        row = [counts[kind, end] for end in ("refused", "accepted", "failed", "wrong")]
        print(f"| {kind} | {sum(row)} | {' | '.join(map(str, row))} |")
    for line in lines:
        if line["end"] == "wrong":
            print(f"wrong: {line['kind']} {line['number']}: {line['said'][-700:]}")


if __name__ == "__main__":
    main()
