"""The progress display: lines, and a bar below them in a terminal.

Text from models, tools and data is shown as it is: never read as markup, and with control
characters made visible, so that it cannot move the cursor or recolour the screen.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Display
from treegraft.core.text import plain
from treegraft.core.types import Trajectory, Tree
from treegraft.runs.transcript import pick_sample, transcript

_NUMBERS: Mapping[str, tuple[str, str]] = {
    "reward": ("reward/mean", "{:.3f}"),
    "correct": ("rollout/accuracy", "{:.0%}"),
    "calls": ("rollout/tool_calls_mean", "{:.2f}"),
    "violated": ("rollout/violation_frac", "{:.0%}"),
    "entropy": ("learn/entropy", "{:.3f}"),
    "grad": ("learn/grad_norm", "{:.2f}"),
    "unique": ("learn/unique_frac", "{:.0%}"),
    "branches": ("branch/num_branches", "{:.0f}"),
    "grafts": ("graft/num_grafts", "{:.0f}"),
    "time": ("time/update_s", "{:.1f}s"),
}
"""The numbers of an update that matter: heading, metric, how it is written."""
_PHASE_EVERY_S = 10.0
"""Seconds between two lines of a phase, where there is no bar."""
_SAMPLE_EVERY_S = 60.0
"""Seconds between two trajectories."""

# --- numbers --------------------------------------------------------------------------------------


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    """Returns heading and value of each number that an update has."""
    found = []
    for name, (key, form) in _NUMBERS.items():
        # Without a token to learn from there is no share of unique tokens, and a recipe without
        # branches or grafts has none.
        is_zero_absent = name in ("unique", "branches", "grafts")
        if key in metrics and (metrics[key] or not is_zero_absent):
            found.append(f"{name} {form.format(metrics[key])}")
    return found


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """Returns the evaluation among `metrics` on one line.

    "accuracy 0.415, accuracy_sampled 0.38, pass_at_4 0.7"
    """
    parts = []
    for key, value in sorted(metrics.items()):
        name = key.removeprefix("eval/")
        is_shown = re.fullmatch(r"accuracy|accuracy_sampled|pass_at_\d+", name)
        # A share of failures is worth a word only if there are any.
        if key != name and (is_shown or (name == "failed_frac" and value)):
            parts.append(f"{name} {value:.3g}")
    return ", ".join(parts)


# --- displays -------------------------------------------------------------------------------------


class PlainDisplay:
    """A line for each update, evaluation and slow phase, and a trajectory now and then. In a
    terminal a bar below them shows the phase, and the time since the last line."""

    _sample: Trajectory | None = None

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, force_jupyter=False)
        self._bar = Progress(
            BarColumn(20),
            TimeElapsedColumn(),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            ),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._bar.add_task("")
        self._last_phase_s = time.monotonic()
        self._last_sample_s = float("-inf")

    def _say(self, text: str, style: str = "") -> None:
        self._last_phase_s = time.monotonic()
        self._bar.reset(self._task)
        # Unwrapped, so that paths and commands can be copied. A run does not end because its
        # terminal was closed, or a log's disk is full.
        with suppress(OSError):
            self._console.print(Text(plain(text), style), soft_wrap=True)

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        self._say(f"run {run_dir}: {title}, {num_updates} updates", "bold")

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        count = f" {done}/{total}" if total else f" {done}" if done else ""
        text = f"{name}{count}{f': {plain(detail, 200)}' if detail else ''}"
        if self._console.is_terminal:
            # Without a total the bar pulses.
            self._bar.update(
                self._task, description=plain(text), completed=done, total=total or None
            )
            with suppress(OSError):
                self._bar.start()
        # Only what takes long is worth a line; that of a phase that ends soon would be noise.
        elif time.monotonic() - self._last_phase_s >= _PHASE_EVERY_S:
            self._say(f"  {text}")

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        line = f"update {update}/{num_updates}  {'  '.join(_numbers(metrics))}"
        names = [key.removeprefix("health/") for key in metrics if key.startswith("health/")]
        if names:
            line += f"  ! {', '.join(names)}"
        self._say(line)
        now = time.monotonic()
        if self._sample and now - self._last_sample_s >= _SAMPLE_EVERY_S:
            self._last_sample_s = now
            text = transcript(self._sample, limit=160)
            with suppress(OSError):
                self._console.print(Padding.indent(text, 4))

    def evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        self._say(f"evaluated {name}: {evaluation_line(metrics)}")

    def sample(self, tree: Tree) -> None:
        self._sample = pick_sample(tree)

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}", "yellow")

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def finished(
        self, run_dir: Path, checkpoint_dir: Path | None, metrics: Mapping[str, float]
    ) -> None:
        result = evaluation_line(metrics)
        self._say(f"finished {run_dir}{f': {result}' if result else ''}", "bold green")
        self._say(f"  metrics    {run_dir / 'metrics.jsonl'}")
        self._say(f"  trees      {run_dir / 'trees'}")
        if checkpoint_dir is not None:
            self._say(f"  checkpoint {checkpoint_dir}")
            self._say(f"  ask it     treegraft run {shlex.quote(str(checkpoint_dir))} QUESTION")

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        saved = " and saved" if is_saved else ""
        self._say(f"interrupted{saved}; go on with: {resume_command}", "bold yellow")

    def close(self) -> None:
        """Gives the terminal back; may be called twice."""
        # Elsewhere rich would end with an empty line.
        if self._bar.live.is_started:
            with suppress(OSError):
                self._bar.stop()


class NoDisplay:
    """Shows nothing. Displays that want a few events derive from it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method that does nothing; every method of a display returns nothing."""
        return lambda *_, **__: None


@contextmanager
def display_on(file: TextIO | None) -> Iterator[Display]:
    """Holds the progress display on a stream, None for standard output, and gives the terminal back
    whatever happens, so that an error is readable."""
    stream = file if file is not None else sys.stdout
    # A program without standard output, such as a service.
    display: Any = NoDisplay() if stream is None else PlainDisplay(stream)
    try:
        yield display
    finally:
        display.close()


@contextmanager
def shown(display: Display | bool | None) -> Iterator[Display]:
    """Holds the display that a caller from Python asks for.

    Args:
        display: True shows progress on standard output, False nothing, None progress in a terminal
            or a notebook. A display of the caller's own is left open.
    """
    is_notebook = Console().is_jupyter
    if is_notebook:
        # Of tqdm, as libraries import it; progress here needs no widgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
    if display is None:
        display = is_notebook or (sys.stdout is not None and sys.stdout.isatty())
    if display is True:
        with display_on(None) as made:
            yield made
    elif display is False:
        yield cast("Display", NoDisplay())
    elif hasattr(display, "phase"):
        yield display
    else:
        raise SettingError(
            f"display: got {display!r:.80}; expected True, False, None, or an object that derives"
            " from treegraft.parts.NoDisplay.",
            code="display-invalid",
        )
