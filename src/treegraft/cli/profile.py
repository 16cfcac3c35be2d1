"""Where every second of an update went.

Phases (rollout, learning, publish, record, checkpoint) are timed exactly, by wrappers around the
calls that begin and end them. What happens inside is sampled: a thread looks every few milliseconds
at what the engine's thread and the learner are doing, and at what trajectories wait for when the
engine has nothing to do. A phase's seconds are shared out by these looks, so the table sums to the
wall time. Looks come late while Python code holds the interpreter's lock, by a millisecond at
most.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import json
import linecache
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from treegraft.cli.machine import load_average, machine, number
from treegraft.core.files import write_atomically
from treegraft.policy.learn.learner import Learner
from treegraft.policy.publish import Publisher
from treegraft.rollout.loop import Grower, Watch
from treegraft.runs.record import RunFolder, read_metrics
from treegraft.runs.run import Run
from treegraft.settings.config import Config
from treegraft.traces.run_buffer import RunBuffer

story: Any = importlib.import_module("treegraft.train")
"""The module; the package's attribute of this name is the function."""
INTERVAL_S = 0.002
"""Between two looks."""
_SWITCH_S = 0.001
"""How long Python code may keep the interpreter's lock while a look is due."""
ENGINE_THREAD = "treegraft-engine"

ROLLOUT, LEARNING, OTHER = "rollout", "learning", "other"
_WAITS = ("tool", "retrieval", "rewards")
_IDLE = {
    "tool": "engine idle, waiting for tools",
    "retrieval": "engine idle, waiting for retrieval",
    "rewards": "engine idle, waiting for scoring",
    "loop": "engine idle, steps parsed and trees grown",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    what: str
    """A phase, and after a colon what happens in it."""
    seconds: float
    share: float
    """Of the wall time, 0..1."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile found."""

    wall_s: float
    """From the first rollout to the end of the run."""
    idle_s: float
    """Seconds of rollouts in which the engine had nothing to do."""
    num_updates: int
    lines: tuple[Line, ...]
    """They sum to `wall_s`."""
    beside: Mapping[str, float]
    """Seconds that ran beside the engine, by name, summed over updates: tools (all calls) and
    retrieval."""


@dataclass(slots=True)
class Recorder:
    """Exact seconds by phase, and looks inside each."""

    seconds: dict[str, float] = field(default_factory=dict)
    looks: dict[str, Counter[str]] = field(default_factory=dict)
    watch: Watch | None = None
    began: float | None = None
    """When the first rollout began; None before it."""
    _phases: list[str] = field(default_factory=lambda: [OTHER])
    _since: float = 0.0
    _thread: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block as this phase, and no longer as the one around it."""
        self._turn(lambda: self._phases.append(name), begins=name == ROLLOUT)
        try:
            yield
        finally:
            self._turn(self._phases.pop)

    def _turn(self, change: Callable[[], object], *, begins: bool = False) -> None:
        with self._lock:
            now = time.perf_counter()
            self._thread = threading.get_ident()
            if self.began is not None:
                phase = self._phases[-1]
                self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
            elif begins:
                self.began = now
            self._since = now
            change()

    def finish(self) -> float:
        """Returns the wall time since the first rollout; the time of the present phase is
        counted."""
        self._turn(lambda: None)
        return 0.0 if self.began is None else self._since - self.began

    def look(self) -> None:
        """Notes what is being done right now."""
        with self._lock:
            if self.began is None:
                return
            phase, frames = self._phases[-1], sys._current_frames()
            if phase == ROLLOUT:
                what = self._in_rollout(frames)
            elif phase == LEARNING:
                what = learning_part(frames.get(self._thread))
            else:
                return
            self.looks.setdefault(phase, Counter())[what] += 1

    def _in_rollout(self, frames: Mapping[int, FrameType]) -> str:
        engine = next(
            (thread.ident for thread in threading.enumerate() if thread.name == ENGINE_THREAD), None
        )
        what = None if engine is None else engine_part(frames.get(engine))
        if what is not None:
            return what
        waits = Counter[str]() if self.watch is None else self.watch.waits
        waited = {owner.split(" ")[0] for owner, count in list(waits.items()) if count}
        kind = next((name for name in _WAITS if name in waited), "loop")
        return "another engine" if engine is None and kind == "loop" else _IDLE[kind]

    def lines(self, wall_s: float) -> Iterator[Line]:
        """Gives the table: phases by their order of first appearance, each shared out by its
        looks."""
        for phase, seconds in self.seconds.items():
            looks = self.looks.get(phase, Counter())
            total = looks.total()
            if not total:
                yield Line(phase, seconds, seconds / wall_s)
                continue
            for what, count in looks.most_common():
                part = seconds * count / total
                yield Line(f"{phase}: {what}", part, part / wall_s)


# ---------------------------------------------------------------------- what a stack says


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, str, FrameType]]:
    """Gives (file, function, frame) from the innermost call on."""
    while frame is not None:
        yield frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name, frame
        frame = frame.f_back


def engine_part(frame: FrameType | None) -> str | None:
    """Returns what the engine's thread is doing; None where it waits for work."""
    stack = list(_outwards(frame))
    if not stack:
        return None
    file, _, innermost = stack[0]
    line = linecache.getline(
        file, innermost.f_lineno or 0
    )  # a frame that has just begun has no line yet
    if any(call in line for call in ("inbox.get(", ".wait(", "queue.get(")):
        return None
    for file, name, _ in stack:
        if (
            file.endswith("engine/sampling.py")
            or name.startswith(("sample", "_sample"))
            or name == "blocks"
        ):
            return "engine, sampling"
        if (
            file.endswith(("engine/packed.py", "modules/linear.py"))
            or "product" in name
            or "linear" in name
        ):
            return "engine, matrix products"
        if (
            name.lstrip("_").startswith("attend")
            or "attention" in name
            or file.endswith("policy/hook.py")
        ):
            return "engine, attention"
        if "/transformers/" in file or file.endswith(("kernels/engine.py", "engine/forward.py")):
            return "engine, rest of the forward pass"
    return "engine, batches put together and results handed out"


def learning_part(frame: FrameType | None) -> str:
    """Returns what the learner is doing."""
    stack = list(_outwards(frame))
    if any(name == "backward" and "/torch/" in file for file, name, _ in stack):
        return "backward, logits made anew included"
    if any(file.endswith("learn/optimiser.py") for file, _, _ in stack):
        return "optimiser"
    if any(file.endswith(("learn/scores.py", "learn/tree_attention.py")) for file, _, _ in stack):
        return "forward"
    return "packing, credit and the rest"


# ---------------------------------------------------------------------- around the calls that are p


def _phases() -> list[tuple[Any, str, str]]:
    """Returns (owner, name of the call, phase) of each call that is timed."""
    return [
        (Grower, "grow_all", ROLLOUT),
        (Learner, "learn", LEARNING),
        (Learner, "with_exact_entropies", LEARNING),
        (story, "credit_trees", LEARNING),
        (story, "warm_up", "warm-up"),
        (story, "save_checkpoint", "checkpoint"),
        (story, "evaluate", "evaluation"),
        (Publisher, "publish", "publish"),
        (Run, "record", "record"),
        (RunFolder, "append_metrics", "record"),
        (RunBuffer, "grow", "record"),
    ]


@contextmanager
def _wrapped(recorder: Recorder) -> Iterator[None]:
    replaced: list[tuple[Any, str, Any]] = []
    for owner, name, phase in _phases():
        original = getattr(owner, name)
        replaced.append((owner, name, original))
        setattr(owner, name, _in_phase(original, phase, recorder))
    try:
        yield
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


def _in_phase(original: Callable[..., Any], phase: str, recorder: Recorder) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def waits(*arguments: Any, **options: Any) -> Any:
            if arguments and isinstance(arguments[0], Grower):
                recorder.watch = arguments[0].watch
                # An evaluation's rollouts belong to the evaluation.
                if not str(options.get("noise_key", ("", "train"))[1]).startswith("train"):
                    return await original(*arguments, **options)
            with recorder.phase(phase):
                return await original(*arguments, **options)

        return waits

    @functools.wraps(original)
    def works(*arguments: Any, **options: Any) -> Any:
        with recorder.phase(phase):
            return original(*arguments, **options)

    return works


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection begins in the block.

    In CPython 3.11 one that begins while frames of another thread are listed or walked lets that
    thread run and take them away: before 3.11.9 the process can hang for good
    (python/cpython#106883), and a frame's caller can turn out to be any object.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _looking(recorder: Recorder) -> Iterator[None]:
    over = threading.Event()

    def work() -> None:
        while not over.wait(INTERVAL_S):
            with _uncollected():
                recorder.look()

    before, thread = (
        sys.getswitchinterval(),
        threading.Thread(target=work, name="treegraft-profile", daemon=True),
    )
    sys.setswitchinterval(_SWITCH_S)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


# ---------------------------------------------------------------------- a run


def profile(config: Config, num_updates: int) -> Profile:
    """Returns where the time of the first updates of a recipe went; the run itself goes to a
    temporary folder.

    Evaluations are left out, and so is all that comes before the first rollout (loading, warm-up,
    making a buffer).
    """
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="treegraft-profile-") as folder:
        run = config.run.model_copy(
            update={"num_updates": num_updates, "dir": folder, "name": "profile"}
        )
        rated = config.eval.model_copy(update={"every": 0, "at_start": False, "at_end": False})
        with _wrapped(recorder), _looking(recorder):
            result = story.train(config.model_copy(update={"run": run, "eval": rated}))
            wall_s = recorder.finish()
        metrics = read_metrics(result.run_dir)
    lines = tuple(recorder.lines(wall_s))
    idle_s = sum(line.seconds for line in lines if "engine idle" in line.what)
    return Profile(wall_s, idle_s, num_updates, lines, _beside(metrics))


def _beside(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            name = key.removeprefix("time/tool_").removesuffix("_s")
            if key.startswith("time/tool_") and key.endswith("_s"):
                spent = value * row.get(f"tools/{name}_calls", 0.0)
                found[f"tool {name}"] = found.get(f"tool {name}", 0.0) + spent
            elif key == "time/retrieve_s":
                found["retrieval"] = found.get("retrieval", 0.0) + value
    return found


def print_profile(config: Config, num_updates: int, json_file: Path | None) -> None:
    """Runs some updates and prints where the time went; writes the same as JSON where a file is
    named."""
    where = machine(config.run.num_threads or torch.get_num_threads())
    found = profile(config, num_updates)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in where.items()))
    console.print("| what | seconds | share |\n|---|---|---|")
    for line in found.lines:
        console.print(f"| {line.what} | {line.seconds:.2f} | {line.share:.1%} |")
    console.print(f"| all of {num_updates} updates | {found.wall_s:.2f} | 100% |")
    console.print(
        f"idle: the engine had nothing to do for {found.idle_s:.2f} s,"
        f" {found.idle_s / found.wall_s:.1%} of the wall time"
    )
    for name, seconds in found.beside.items():
        console.print(f"beside the engine: {name} {number(seconds)} s, summed over calls")
    if json_file is not None:
        content = {
            "machine": where | {"load_average_end": load_average()},
            "num_updates": num_updates,
            "wall_s": found.wall_s,
            "idle_s": found.idle_s,
            "rows": [asdict(line) for line in found.lines],
            "beside": found.beside,
        }
        write_atomically(json_file, json.dumps(content, indent=1) + "\n")
