"""Where every second of an update went.

Phases (rollout, learning, publish, record, checkpoint) are timed exactly, by the spans of the
run. What happens inside is sampled: a thread looks every few milliseconds
at what the engine's thread and the learner are doing, and at what trajectories wait for when the
engine has nothing to do. A phase's seconds are shared out by these looks, so the table sums to the
wall time. Looks come late while Python code holds the interpreter's lock, by a millisecond at
most.
"""

from __future__ import annotations

import gc
import json
import linecache
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from treegraft import Config, train
from treegraft.extras.lab.machine import load_average, machine, number
from treegraft.parts import RunReader, files, spans

INTERVAL_S = 0.002
"""Between two looks."""
_SWITCH_S = 0.001
"""How long Python code may keep the interpreter's lock while a look is due."""
ENGINE_THREAD = "treegraft-engine"

ROLLOUT, LEARNING, OTHER = "rollout", "learning", "other"
PHASES: Mapping[str, str] = {
    "rollout": ROLLOUT,
    "credit": LEARNING,
    "learn": LEARNING,
    "symptoms": LEARNING,
    "publish": "publish",
    "record": "record",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
}
"""The phase of each span that is one; the other spans are what trajectories wait for."""
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
    """A phase, and after a colon the work in it."""
    seconds: float
    share: float
    """Of the wall time, 0..1."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of `profile`."""

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
    waits: Counter[str] = field(default_factory=Counter)
    """Waits under way, by whom they wait for."""
    began: float | None = None
    """When the first rollout began; None before it."""
    _phases: list[str] = field(default_factory=lambda: [OTHER])
    _since: float = 0.0
    _thread: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Counts the time of a span of the run."""
        if name in PHASES:
            with self.phase(PHASES[name]):
                yield
            return
        owner = name.split(" ")[0]
        self.waits[owner] += 1
        try:
            yield
        finally:
            self.waits[owner] -= 1

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
        """Counts the work that is under way right now."""
        with self._lock:
            if self.began is None or self._phases[-1] not in (ROLLOUT, LEARNING):
                return
            phase, frames = self._phases[-1], sys._current_frames()
            if phase == ROLLOUT:
                part = self._in_rollout(frames)
            else:
                part = learning_part(frames.get(self._thread))
            self.looks.setdefault(phase, Counter())[part] += 1

    def _in_rollout(self, frames: Mapping[int, FrameType]) -> str:
        names = {thread.name: thread.ident for thread in threading.enumerate()}
        engine = names.get(ENGINE_THREAD)
        part = None if engine is None else engine_part(frames.get(engine))
        if part is not None:
            return part
        kind = next((name for name in _WAITS if self.waits[name]), "loop")
        return "another engine" if engine is None and kind == "loop" else _IDLE[kind]

    def lines(self, wall_s: float) -> Iterator[Line]:
        """Yields the table: phases by their order of first appearance, each shared out by its
        looks."""
        for phase, seconds in self.seconds.items():
            looks = self.looks.get(phase, Counter())
            if not looks:
                yield Line(phase, seconds, seconds / wall_s)
            for part, count in looks.most_common():
                spent = seconds * count / looks.total()
                yield Line(f"{phase}: {part}", spent, spent / wall_s)


# ---------------------------------------------------------------------- reading a stack


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yields (file, function) from the innermost call on."""
    while frame is not None:
        yield frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        frame = frame.f_back


def engine_part(frame: FrameType | None) -> str | None:
    """Returns the work of the engine's thread; None where it waits for some."""
    if frame is None:
        return None
    # A frame that has just begun has no line yet.
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
    if any(call in line for call in ("inbox.get(", ".wait(", "queue.get(")):
        return None
    # The innermost call that is known decides: attention is called by the forward pass, and
    # products by both.
    for file, name in _outwards(frame):
        is_sampling = name.startswith(("sample", "_sample")) or name == "blocks"
        if is_sampling or file.endswith("engine/sampling.py"):
            return "engine, sampling"
        is_product = "product" in name or "linear" in name
        if is_product or file.endswith(("engine/packed.py", "modules/linear.py")):
            return "engine, matrix products"
        is_attention = name.lstrip("_").startswith("attend") or "attention" in name
        if is_attention or file.endswith("policy/attention_hook.py"):
            return "engine, attention"
        if "/transformers/" in file or file.endswith(("kernels/engine.py", "engine/forward.py")):
            return "engine, rest of the forward pass"
    return "engine, batches put together and results handed out"


def learning_part(frame: FrameType | None) -> str:
    """Returns the part of learning that is under way."""
    stack = list(_outwards(frame))
    # Before the forward pass, which checkpointing repeats inside the backward one.
    if any(name == "backward" and "/torch/" in file for file, name in stack):
        return "backward, logits made anew included"
    if any(file.endswith("learn/optimiser.py") for file, _ in stack):
        return "optimiser"
    if any(file.endswith(("learn/scores.py", "learn/tree_attention.py")) for file, _ in stack):
        return "forward"
    return "packing, credit and the rest"


# ---------------------------------------------------------------------- timing a run


@contextmanager
def _looking(recorder: Recorder) -> Iterator[None]:
    """Looks from a thread of its own, in the block."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(INTERVAL_S):
            # In CPython 3.11 a collection that begins while frames of another thread are listed or
            # walked lets that thread run and take them away: before 3.11.9 the process can hang for
            # good (python/cpython#106883), and a frame's caller can turn out to be any object.
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                recorder.look()
            finally:
                if was_enabled:
                    gc.enable()

    before = sys.getswitchinterval()
    thread = threading.Thread(target=work, name="treegraft-profile", daemon=True)
    sys.setswitchinterval(_SWITCH_S)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def profile(config: Config, num_updates: int) -> Profile:
    """Returns where the time of the first updates of a recipe went; the run itself goes to a
    temporary folder.

    Evaluations are left out, and so is all that comes before the first rollout (loading, warm-up,
    making a buffer).
    """
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="treegraft-profile-") as folder:
        short = {"num_updates": num_updates, "dir": folder, "name": "profile"}
        run = config.run.model_copy(update=short)
        never = {"every": 0, "at_start": False, "at_end": False}
        changes = {
            "run": run,
            "eval": config.eval.model_copy(update=never),
            "track": config.track.model_copy(update={"spans": None}),
        }
        with spans.heard(recorder.span), _looking(recorder):
            result = train(config.model_copy(update=changes))
            wall_s = recorder.finish()
        metrics, _ = RunReader(result.run_dir).clean_metrics()
    lines = tuple(recorder.lines(wall_s))
    idle_s = sum(line.seconds for line in lines if "engine idle" in line.what)
    beside: dict[str, float] = defaultdict(float)
    for row in metrics:
        for key, value in row.items():
            if key.startswith("time/tool_") and key.endswith("_s"):
                # The metric is the mean of a call.
                name = key.removeprefix("time/tool_").removesuffix("_s")
                beside[f"tool {name}"] += value * row.get(f"tools/{name}_calls", 0.0)
            elif key == "time/retrieve_s":
                beside["retrieval"] += value
    return Profile(wall_s, idle_s, num_updates, lines, beside)


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
        files.write_atomically(json_file, json.dumps(content, indent=1) + "\n")
