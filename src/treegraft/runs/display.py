"""The progress display: lines everywhere, with bars below them in a terminal and one line that is
written over in a notebook.

Text from models, tools and data is shown as it is: never read as markup, and with control
characters made visible, so that it cannot move the cursor or recolour the screen.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from treegraft.runs.transcript import Decoder, pick_sample, transcript

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
_ONLY_WITH: Mapping[str, str] = {
    "branches": "branch/unused_frac",
    "grafts": "graft/unused_frac",
}
"""Metrics that only recipes with branches and grafts have: in others these numbers are always 0."""
_MOST_CATEGORIES = 6
"""More would push the other numbers of an evaluation off the screen."""
_MOST_LETTERS = 110
"""Longest line that a notebook writes over: a longer one would be wrapped."""

# --- numbers --------------------------------------------------------------------------------------


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    """Returns heading and value of each number that an update has."""
    found = []
    for name, (key, form) in _NUMBERS.items():
        # Without a token to learn from there is no share of unique tokens.
        is_absent = key not in metrics or (name == "unique" and not metrics[key])
        if not is_absent and _ONLY_WITH.get(name, key) in metrics:
            found.append(f"{name} {form.format(metrics[key])}")
    return found


def _categories(metrics: Mapping[str, float], name: str) -> str:
    """Returns " (1_hop 60%, 2_hops 31%)", or an empty string without categories."""
    start = f"eval/{name}_"
    # "accuracy_sampled" begins like a category of "accuracy".
    other = "eval/accuracy_sampled" if name == "accuracy" else "-"
    parts = []
    for key, value in metrics.items():
        if key.startswith(start) and not key.startswith(other):
            parts.append(f"{plain(key.removeprefix(start))} {value:.0%}")
    if len(parts) > _MOST_CATEGORIES:
        parts[_MOST_CATEGORIES:] = [f"{len(parts) - _MOST_CATEGORIES} more"]
    return f" ({', '.join(parts)})" if parts else ""


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """Returns the evaluation among `metrics` on one line, in an order of its own.

    "accuracy 41.5% greedy (1_hop 60%, 2_hops 23%), 38.0% sampled, pass@4 72.0%, gain +0.25 greedy
    (95 %: +0.18 to +0.32)"
    """
    parts = []
    # Greedy accuracy is the main number; the sampled one takes its place if there is no other.
    main = "accuracy" if "eval/accuracy" in metrics else "accuracy_sampled"
    for name, decoding in (("accuracy", "greedy"), ("accuracy_sampled", "sampled")):
        if f"eval/{name}" in metrics:
            label = "accuracy " if name == main else ""
            categories = _categories(metrics, name) if name == main else ""
            parts.append(f"{label}{metrics[f'eval/{name}']:.1%} {decoding}{categories}")
    prefix = "eval/pass_at_"
    for k in sorted(int(key.removeprefix(prefix)) for key in metrics if key.startswith(prefix)):
        parts.append(f"pass@{k} {metrics[f'{prefix}{k}']:.1%}")
    for key, decoding in (("eval/gain", "greedy"), ("eval/gain_sampled", "sampled")):
        if f"{key}_high" in metrics:
            interval = (metrics[key], metrics[f"{key}_low"], metrics[f"{key}_high"])
            # Adding 0.0 turns a rounded -0.0 into 0.0.
            gain, low, high = (round(value, 2) + 0.0 for value in interval)
            parts.append(f"gain {gain:+.2f} {decoding} (95 %: {low:+.2f} to {high:+.2f})")
    if metrics.get("eval/failed_frac", 0.0) > 0:
        parts.append(f"failed {metrics['eval/failed_frac']:.1%}")
    return ", ".join(parts)


def _short_question(text: str, limit: int = 160) -> str:
    """Returns a question for one line of a command: of a long one the first paragraph, which leaves
    out what an environment shows behind it, cut between two words."""
    whole = " ".join(text.split())
    if len(whole) > limit:
        whole = " ".join(text.strip().partition("\n\n")[0].split())
    return plain(textwrap.shorten(whole, limit, placeholder=" ..."))


# --- displays -------------------------------------------------------------------------------------


class PlainDisplay:
    """Lines for a pipe or a log file: one for each update, evaluation and slow phase, and a
    trajectory now and then."""

    tokenizer: Decoder | None = None
    """Shows what the format could not read; None shows its length."""
    _every_s = 10.0
    """Seconds between two reports of a phase."""
    _run_dir: Path | None = None
    _sample: Trajectory | None = None

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        sample_every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(file=file, force_jupyter=False)
        self._sample_every_s = sample_every_s
        self._clock = clock
        self._last_phase_s = clock()
        self._last_sample_s = float("-inf")

    def _say(self, text: str, style: str = "") -> None:
        # Unwrapped, so that paths and commands can be copied.
        self._console.print(Text(plain(text), style), soft_wrap=True)

    def _report(self, text: str, done: int, total: int) -> None:
        """Shows how far a phase is."""
        self._say(f"  {text}")

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        self._run_dir = run_dir
        self._say(f"run {run_dir}: {title}, {num_updates} updates", "bold")

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        # Only what takes long is worth a report; that of a phase that ends soon would be noise.
        if self._clock() - self._last_phase_s >= self._every_s:
            self._last_phase_s = self._clock()
            count = f" {done}/{total}" if total else f" {done}" if done else ""
            more = f": {plain(detail, 200)}" if detail else ""
            self._report(f"{name}{count}{more}", done, total)

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        self._last_phase_s = self._clock()
        line = f"update {update}/{num_updates}  {'  '.join(_numbers(metrics))}"
        names = [key.removeprefix("health/") for key in metrics if key.startswith("health/")]
        if names:
            line += f"  ! {', '.join(names)}"
        self._say(line)
        if self._sample and self._clock() - self._last_sample_s >= self._sample_every_s:
            self._last_sample_s = self._clock()
            text = transcript(self._sample, self.tokenizer, limit=160)
            self._console.print(Padding.indent(text, 4))

    def evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        self._last_phase_s = self._clock()
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
            if self._sample is not None:
                # A command to copy: a question of many lines would not survive that.
                question = shlex.quote(_short_question(self._sample.task.question))
                place = shlex.quote(str(checkpoint_dir))
                self._say(f"  ask it     treegraft run {place} {question}")

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        saved = " and saved" if is_saved else ""
        self._say(f"interrupted{saved}; go on with: {resume_command}", "bold yellow")

    def close(self) -> None:
        """Gives the terminal back; may be called twice."""


class TerminalDisplay(PlainDisplay):
    """The same lines, and below them a bar that shows the phase and the time since the last
    line."""

    _every_s = 0.1
    _bar: Progress | None = None

    def _say(self, text: str, style: str = "") -> None:
        self.close()
        super()._say(text, style)

    def _report(self, text: str, done: int, total: int) -> None:
        if self._bar is None:
            cut = Column(no_wrap=True, overflow="ellipsis")
            text_column = TextColumn("{task.description}", markup=False, table_column=cut)
            columns = (BarColumn(20), TimeElapsedColumn(), text_column)
            self._bar = Progress(
                *columns, console=self._console, refresh_per_second=4, transient=True
            )
            self._bar.add_task("")
            self._bar.start()
        # Without a total the bar pulses.
        task = self._bar.task_ids[0]
        self._bar.update(task, description=text, completed=done, total=total or None)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


class NotebookDisplay(PlainDisplay):
    """A line that is written over while the run goes on, for the output of a notebook's cell; lines
    that stay for evaluations, warnings and the end. Rich's own bars would need widgets there."""

    # A cell's output is sent to a browser: not more often than anyone can read.
    _every_s = 0.5
    _head = ""
    _num_letters = 0
    """Length of the line that is written over."""

    def _over(self, text: str) -> None:
        text = plain(text)[:_MOST_LETTERS]
        if text or self._num_letters:
            file = self._console.file
            print(f"\r{' ' * self._num_letters}\r{text}", end="", file=file, flush=True)
            self._num_letters = len(text)

    def _say(self, text: str, style: str = "") -> None:
        self._over("")
        super()._say(text)

    def _report(self, text: str, done: int, total: int) -> None:
        self._over(f"{self._head}{text}")

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        self._head = f"update {update}/{num_updates}  {'  '.join(_numbers(metrics)[:3])}  | "
        self._over(self._head)

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        super().interrupted(resume_command, is_saved)
        if self._run_dir is not None:
            self._say(f"or in Python: train(resume={str(self._run_dir)!r})")


class NoDisplay:
    """Shows nothing. Displays that want a few events derive from it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method that does nothing; every method of a display returns nothing."""
        return lambda *_, **__: None


@contextmanager
def display_on(file: TextIO | None) -> Iterator[Display]:
    """Holds the progress display that suits a stream, None for standard output, and gives the
    terminal back whatever happens, so that an error is readable."""
    stream = file if file is not None else sys.stdout
    display: Any
    if stream is None:
        # A program without standard output, such as a service.
        display = NoDisplay()
    elif file is None and Console().is_jupyter:
        display = NotebookDisplay()
    else:
        display = TerminalDisplay(stream) if stream.isatty() else PlainDisplay(stream)
    try:
        yield display
    finally:
        display.close()


def show_texts(display: Display, tokenizer: Decoder) -> None:
    """Lets a display of ours show what agents wrote where the format cannot read it."""
    inner = getattr(display, "inner", display)
    if isinstance(inner, PlainDisplay):
        inner.tokenizer = tokenizer


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
