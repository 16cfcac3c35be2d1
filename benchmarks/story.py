"""How a training is orchestrated, in numbers: the table of `python -m benchmarks.house --story`.

* A file *orchestrates* if a class in it holds three or more objects of the package, or if one of
  its functions or classes takes such an object or the whole settings (`Config`). Annotations tell.
  The files of `TRUSTED`, `TOPICS` and `LEARNER` are left out, as are the command line, the viewer
  and the extensions.
* A *long-lived object* exists at the end of the first update and still at the end of the last one.
  Its class is defined in a file that orchestrates, or outside `TRUSTED`, `TOPICS` and
  `policy.learn`. Frozen dataclasses are values and not counted. The recipe is the demo in
  miniature, with two updates.
* A *stay* of the walk is a function and a parameter of it that receives `run` or a part of it;
  a *room* is a file with a stay. `benchmarks/walk.py` says how it is followed. It goes no further
  in the files of `TRUSTED`.
* A file is *executed* in an update if one of its functions is called or resumed between the end of
  the first update and the end of the second, in any thread of this process. The evaluation of the
  second update belongs to it.
* A *reader opens* those of them that are neither in `TRUSTED` nor in `TOPICS`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.walk import Code, Place, stays_of

TRUSTED = (
    "core",
    "policy.engine",
    "policy.kernels",
    "policy.attention_hook",
    "policy.load",
    "policy.noise",
    "policy.output_head",
    "policy.shapes",
    "policy.shards",
    "policy.tiny",
    "policy.weights",
    "rollout.formats",
    "traces",
    "runs.tree_files",
    "runs.tree_json",
)
"""Modules and packages that a reader of the story takes on trust: engine and kernels, with the
model's own files, formats, stores and the ground floor."""
OPENED = ("traces.rollout_buffer", "traces.run_buffer")
"""Modules below `TRUSTED` that are not: the buffer of a run, which is filled and grown by it."""
TOPICS = ("settings", "tasks", "tools", "algo", "explore", "cli", "view", "extras")
"""Packages that are each read for themselves."""
LEARNER = (
    "policy.learn.credit",
    "policy.learn.learner",
    "policy.learn.rows",
    "policy.learn.sharded",
)
"""The learner's mathematics. What brings several processes together is not part of it."""
SETTINGS = ("settings.config", "Config")
NUM_HELD = 3
"""Objects that a class holds to be one that carries others."""
STARTS = (("train", "story"), ("train", "train"))
"""Functions with a parameter or local name `run`; the first one that a tree has is the start."""
RECIPE = """
base = {base}
run = {{ num_updates = 2, tasks_per_update = 2, dir = {folder} }}
model.tiny = {{ hidden_size = 32, intermediate_size = 64 }}
explore.num_leaves = 4
rollout.max_completion_tokens = 64
warmup = {{ num_steps = 2, batch_size = 4, lr_warmup_steps = 0 }}
tasks = {{ num_train = 24, num_eval = 4 }}
"""
PROBE = """
import gc, json, sys, threading
from pathlib import Path
import treegraft
from treegraft.train import train

files, alive, is_second = set(), [], False

def trace(frame, event, argument):
    if is_second:
        files.add(frame.f_code.co_filename)

def is_value(kind):
    return getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)

def objects():
    gc.collect()
    kinds = {id(one): type(one) for one in gc.get_objects()}
    own = {key: kind for key, kind in kinds.items() if str(kind.__module__)[:10] == "treegraft."}
    return {(key, kind) for key, kind in own.items() if not is_value(kind)}

def after_update(update, metrics):
    global is_second
    alive.append(objects())
    is_second = update == 1

threading.settrace(trace)
sys.settrace(trace)
train(sys.argv[1], display=False, callbacks=[after_update])
sys.settrace(None)
home = Path(treegraft.__file__).parent
below = [Path(name).relative_to(home) for name in files if Path(name).is_relative_to(home)]
kept = [(kind.__module__[10:], kind.__qualname__) for _, kind in alive[0] & alive[1]]
print(json.dumps({"files": [path.as_posix() for path in below], "objects": kept}))
"""


def is_below(module: str, packages: Sequence[str]) -> bool:
    """Whether a module is one of the packages or lies in one of them."""
    return any(module == one or module.startswith(f"{one}.") for one in packages)


def is_trusted(module: str) -> bool:
    """Whether a reader of the story takes a module on trust."""
    return is_below(module, TRUSTED) and module not in OPENED


def orchestrators(code: Code) -> list[str]:
    """Returns the modules that orchestrate a training."""
    read = [
        module
        for module in code.trees
        if module and not is_trusted(module) and not is_below(module, (*TOPICS, *LEARNER))
    ]
    carriers = {SETTINGS} | {
        place for place in code.classes if place[0] in read and _num_held(code, place) >= NUM_HELD
    }
    homes = {module for module, _ in carriers}
    return [one for one in read if one in homes or carriers & set(_annotations(code, one))]


def _num_held(code: Code, place: Place) -> int:
    """Returns the number of objects, other than settings, that an object of a class holds."""
    return sum(not is_below(kind[0], ("settings",)) for kind in code.held(place).values())


def _annotations(code: Code, module: str) -> Iterator[Place]:
    """Yields the classes of the package that parameters and fields of a module are annotated
    with."""
    for node in ast.walk(code.trees[module]):
        told = node.annotation if isinstance(node, ast.arg | ast.AnnAssign) else None
        if isinstance(told, ast.Constant) and isinstance(told.value, str):
            told = ast.parse(told.value, mode="eval").body
        for part in ast.walk(told) if told is not None else ():
            place = code.find(module, part.id) if isinstance(part, ast.Name) else None
            if place is not None:
                yield place


def trained(tree: Path) -> dict[str, Any]:
    """Returns what a tiny training of two updates says, made by the tree's own code: "files" that
    the second update executes and (module, class) of the "objects" that outlive an update."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.toml"
        base = json.dumps(str(tree.resolve() / "recipes" / "demo.toml"))
        recipe.write_text(RECIPE.format(base=base, folder=json.dumps(folder)), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(recipe)],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(tree.resolve() / "src")},
        )
    if done.returncode:
        raise RuntimeError(f"{tree}: the training failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def story(tree: Path, modules: Mapping[str, str]) -> dict[str, str]:
    """Returns the rows of the table for one tree of files, whose modules have these texts."""
    code = Code({name: text for name, text in modules.items() if not is_below(name, ("extras",))})
    orchestrating = orchestrators(code)
    num_lines = sum(len(modules[name].splitlines()) for name in orchestrating)
    start = next(one for one in STARTS if one in code.functions)
    stays = stays_of(code, (start, "run"), is_trusted)
    seen = trained(tree)
    others = (*TOPICS, "policy.learn")
    lasting = [
        module
        for module, _ in seen["objects"]
        if module in orchestrating or not (is_trusted(module) or is_below(module, others))
    ]
    executed = [name.removesuffix(".py").replace("/", ".") for name in seen["files"]]
    opened = [one for one in executed if not (is_trusted(one) or is_below(one, TOPICS))]
    rooms = {module for (module, _), _ in stays}
    return {
        "files that orchestrate, their lines": f"{len(orchestrating)}, {num_lines:,}",
        "long-lived objects": str(len(lasting)),
        "walk of `run`: stays, rooms": f"{len(stays)}, {len(rooms)} (from {'.'.join(start)})",
        "files executed in one update": str(len(executed)),
        "files that a reader opens to follow one update": str(len(opened)),
    }
