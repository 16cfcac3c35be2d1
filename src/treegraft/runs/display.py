"""The progress display: live in a terminal, plain lines in a pipe.

Text from models, tools and data is shown as it is: never read as markup, and with control
characters made visible, so that it cannot move the cursor or recolour the screen.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Display
from treegraft.core.text import plain
from treegraft.core.types import Trajectory, Tree
from treegraft.runs.transcript import Decoder, outcome, pick_sample, transcript, unread

COLUMNS: Sequence[tuple[str, str, str]] = (
    ("reward", "reward/mean", "{:.3f}"),
    ("correct", "rollout/accuracy", "{:.0%}"),
    ("calls", "rollout/tool_calls_mean", "{:.2f}"),
    ("violated", "rollout/violation_frac", "{:.0%}"),
    ("entropy", "learn/entropy", "{:.3f}"),
    ("grad", "learn/grad_norm", "{:.2f}"),
    ("unique", "learn/unique_frac", "{:.0%}"),
    ("time", "time/update_s", "{:.1f}s"),
)
"""The numbers that matter: heading, metric, how it is written."""
ASKED_FOR: Sequence[tuple[str, str, str, str]] = (
    ("branches", "branch/num_branches", "{:.0f}", "branch/unused_frac"),
    ("grafts", "graft/num_grafts", "{:.0f}", "graft/unused_frac"),
)
"""The same for what some recipes ask for, each with the metric that only those have."""
_INTERVAL = ("", "_low", "_high")
"""Endings of the metrics of a gain and its 95 % interval."""
_MAX_CATEGORIES = 6
"""More would push the other numbers of an evaluation off the screen."""

_OVER_S, _MOST_OVER = 0.5, 110
"""Seconds between two states of a line that is written over, and its letters at most."""

# --- numbers --------------------------------------------------------------------------------------


def _standing_warnings(metrics: Mapping[str, float]) -> str:
    """Returns the names of the warnings that stand after an update, with commas; "" for none."""
    names = [key.removeprefix("health/") for key in metrics if key.startswith("health/")]
    return ", ".join(map(plain, names))


def _by_category(metrics: Mapping[str, float], name: str) -> str:
    """Returns " (1_hop 60%, 2_hops 31%)", or an empty string without categories."""
    start = f"eval/{name}_"
    # "accuracy_sampled" begins like a category of "accuracy".
    other = "eval/accuracy_sampled" if name == "accuracy" else "-"
    parts = [
        f"{plain(key.removeprefix(start))} {value:.0%}"
        for key, value in metrics.items()
        if key.startswith(start) and not key.startswith(other)
    ]
    if more := len(parts[_MAX_CATEGORIES:]):
        parts[_MAX_CATEGORIES:] = [f"{more} more"]
    return f" ({', '.join(parts)})" if parts else ""


def evaluation_line(metrics: Mapping[str, float], *, is_brief: bool = False) -> str:
    """Returns the evaluation among `metrics` on one line, in an order of its own; `is_brief` leaves
    categories and pass@k out.

    "accuracy 41.5% greedy (1_hop 60%, 2_hops 23%), 38.0% sampled, pass@4 72.0%, gain +0.25 greedy
    (95 %: +0.18 to +0.32)"
    """
    parts = []
    # Greedy accuracy is the main number where there is one; the sampled one stands in for it else.
    main = "accuracy" if "eval/accuracy" in metrics else "accuracy_sampled"
    for name, decoding in (("accuracy", "greedy"), ("accuracy_sampled", "sampled")):
        if f"eval/{name}" in metrics:
            categories = "" if is_brief or name != main else _by_category(metrics, name)
            label = "accuracy " if name == main else ""
            parts.append(f"{label}{metrics[f'eval/{name}']:.1%} {decoding}{categories}")
    if not is_brief:
        prefix = "eval/pass_at_"
        ks = sorted(int(key.removeprefix(prefix)) for key in metrics if key.startswith(prefix))
        parts += [f"pass@{k} {metrics[f'{prefix}{k}']:.1%}" for k in ks]
    for key, decoding in (("eval/gain", "greedy"), ("eval/gain_sampled", "sampled")):
        if f"{key}_high" in metrics:
            # Adding 0.0 turns a rounded -0.0 into 0.0.
            gain, low, high = (round(metrics[f"{key}{end}"], 2) + 0.0 for end in _INTERVAL)
            parts.append(f"gain {gain:+.2f} {decoding} (95 %: {low:+.2f} to {high:+.2f})")
    if metrics.get("eval/failed_frac", 0.0) > 0:
        parts.append(f"failed {metrics['eval/failed_frac']:.1%}")
    return ", ".join(parts)


def _columns(rows: Iterable[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """The numbers that matter in some updates, the time last."""
    asked = [one[:3] for one in ASKED_FOR if any(one[3] in metrics for metrics in rows)]
    return [*COLUMNS[:-1], *asked, COLUMNS[-1]]


def _numbers(
    metrics: Mapping[str, float], columns: Sequence[tuple[str, str, str]] | None = None
) -> list[tuple[str, str]]:
    """Returns heading and text of each number of an update, "-" for one that it does not have."""
    # Without a token to learn from there is no share of unique tokens.
    absent = {"learn/unique_frac"} if not metrics.get("learn/unique_frac") else set()
    return [
        (name, form.format(metrics[key]) if key in metrics and key not in absent else "-")
        for name, key, form in (columns or _columns([metrics]))
    ]


def _short_transcript(
    trajectory: Trajectory, tokenizer: Decoder | None, limit: int = 160
) -> list[str]:
    """Returns a trajectory as a few plain lines: the question, a line per step, how it ended."""

    def flat(text: str) -> str:
        return plain(" ".join(text.split()), limit)

    lines = [f"  a trajectory: {flat(trajectory.task.question)}"]
    for step in trajectory.steps[1:]:
        content = step.content
        parts = [f"<think> {flat(content.thought)} </think>"] if content.thought.strip() else []
        for call, seen in zip_longest(content.calls, content.observations[: len(content.calls)]):
            parts.append(f"<{plain(call.name)}> {flat(call.body)} </{plain(call.name)}>")
            # A call that ended the trajectory has no result.
            parts += [] if seen is None else [f"-> {flat(seen.text)}"]
        if content.answer is not None:
            parts.append(f"<answer> {flat(content.answer)} </answer>")
        if step.violation is not None:
            parts.append(f"violation: {plain(step.violation)}")
        if written := unread(step, tokenizer):
            parts.append(f"wrote: {flat(written)}")
        lines.append("    " + "  ".join(parts))
    return [*lines, f"    {outcome(trajectory).plain}"]


# --- displays -------------------------------------------------------------------------------------


def _short_question(text: str, limit: int = 160) -> str:
    """Returns a question for one line of a command: of a long one the first paragraph, which leaves
    out what an environment shows behind it, cut between two words."""
    whole = " ".join(text.split())
    if len(whole) > limit:
        whole = " ".join(text.strip().partition("\n\n")[0].split())
    return plain(textwrap.shorten(whole, limit, placeholder=" ..."))


class _Lines(ABC):
    """The lines that both displays print."""

    tokenizer: Decoder | None = None
    """Shows what the format could not read; None shows its length."""
    _sample: Trajectory | None = None

    @abstractmethod
    def _say(self, text: str, style: str = "") -> None:
        """Prints a line."""

    @abstractmethod
    def close(self) -> None: ...

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
        places: dict[str, Path | str] = {
            "metrics": run_dir / "metrics.jsonl",
            "trees": run_dir / "trees",
        }
        if checkpoint_dir is not None:
            places["checkpoint"] = str(checkpoint_dir)
            if self._sample is not None:
                # A command to copy: a question of many lines would not survive that.
                asked = shlex.quote(_short_question(self._sample.task.question))
                places["ask it"] = f"treegraft run {shlex.quote(str(checkpoint_dir))} {asked}"
        for name, place in places.items():
            self._say(f"  {name:<11}{place}")

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        self.close()
        saved = " and saved" if is_saved else ""
        self._say(f"interrupted{saved}; go on with: {resume_command}", "bold yellow")


class PlainDisplay(_Lines):
    """Plain lines for a pipe or a log file: one for each update, evaluation and slow phase, and a
    trajectory now and then."""

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        every_s: float = 10.0,
        sample_every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file if file is not None else sys.stdout
        self._every_s, self._sample_every_s, self._clock = every_s, sample_every_s, clock
        self._last_phase_s, self._last_sample_s = clock(), float("-inf")

    def _say(self, text: str, style: str = "") -> None:
        # Flushed, so that a log file can be followed.
        print(plain(text), file=self._file, flush=True)

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        self._say(f"run {run_dir}: {title}, {num_updates} updates")

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        # Only what takes long is worth a line; the first report of a phase that ends soon would be
        # noise.
        if self._clock() - self._last_phase_s < self._every_s:
            return
        self._last_phase_s = self._clock()
        count = f"{done}/{total}" if total else f"{done}"
        self._say(f"  {name} {count}{f': {plain(detail, 200)}' if detail else ''}")

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        now = self._last_phase_s = self._clock()
        numbers = "  ".join(f"{name} {text}" for name, text in _numbers(metrics) if text != "-")
        standing = _standing_warnings(metrics)
        self._say(
            f"update {update}/{num_updates}  {numbers}{f'  ! {standing}' if standing else ''}"
        )
        if self._sample is not None and now - self._last_sample_s >= self._sample_every_s:
            self._last_sample_s = now
            for line in _short_transcript(self._sample, self.tokenizer):
                self._say(line)

    def evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        self._last_phase_s = self._clock()
        self._say(f"evaluated {name}: {evaluation_line(metrics)}")

    def close(self) -> None:
        self._file.flush()


class NotebookDisplay(PlainDisplay):
    """A line that is written over while the run goes on, for the output of a notebook's cell; lines
    that stay for evaluations, warnings and the end."""

    _head = ""
    _run_dir: Path | None = None
    _num_letters = 0
    """Of the line that is written over."""

    def _over(self, text: str) -> None:
        text = text[:_MOST_OVER]
        if not text and not self._num_letters:
            return
        print(f"\r{' ' * self._num_letters}\r{text}", end="", file=self._file, flush=True)
        self._num_letters = len(text)

    def _say(self, text: str, style: str = "") -> None:
        self._over("")
        super()._say(text, style)

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        super().started(run_dir, title, num_updates)
        self._run_dir = run_dir

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        # A cell's output is sent to a browser: not more often than anyone can read.
        if self._clock() - self._last_phase_s >= _OVER_S:
            self._last_phase_s = self._clock()
            self._over(f"{self._head}{name} {done}{f'/{total}' if total else ''}")

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        numbers = "  ".join(f"{name} {text}" for name, text in _numbers(metrics)[:3])
        self._head = f"update {update}/{num_updates}  {numbers}  | "
        self._over(self._head)

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        super().interrupted(resume_command, is_saved)
        if self._run_dir is not None:
            self._say(f"or in Python: train(resume={str(self._run_dir)!r})")


class RichDisplay(_Lines):
    """A live display: the work under way, the numbers of the latest updates, and one trajectory."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        num_rows: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console if console is not None else Console()
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=num_rows)
        self._clock, self._started_s = clock, clock()
        self._updates = (0, 0)
        self._phase: tuple[str, int, int, str] | None = None
        self._evaluation = ""
        self._live: Live | None = None

    def _refresh(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=4,
                # The final state is printed apart, where it cannot be cropped.
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()

    def _say(self, text: str, style: str = "") -> None:
        # Unwrapped, so that paths and commands can be copied; above a live display a line too long
        # would spoil the picture.
        self._console.print(Text(plain(text), style), soft_wrap=self._live is None)

    def _head(self) -> RenderableType:
        update, num_updates = self._updates
        minutes, seconds = divmod(int(self._clock() - self._started_s), 60)
        hours, rest = divmod(minutes, 60)
        elapsed = f"{hours}h{rest:02d}m" if hours else f"{minutes}m{seconds:02d}s"
        # The last column takes what the others leave, so that a long text never squeezes the bars.
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, None, 1):
            grid.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
        bar = ProgressBar(total=max(num_updates, 1), completed=update, width=20)
        grid.add_row("updates", bar, f"{update}/{num_updates}  {elapsed}")
        if self._phase is not None:
            name, done, count, detail = self._phase
            bar = ProgressBar(total=max(count, 1), completed=done, width=20)
            counted = Text(f"{done}/{count}" if count else str(done or ""))
            grid.add_row(Text(name), bar, counted + Text(f"  {plain(detail, 100)}", "dim"))
        if self._rows and (standing := _standing_warnings(self._rows[-1][1])):
            grid.add_row("warnings", "", Text(standing, style="yellow"))
        if self._evaluation:
            grid.add_row("eval", "", Text(self._evaluation, style="bold"))
        return grid

    def render(self) -> RenderableType:
        """Returns the display as it stands."""
        parts: list[RenderableType] = [self._head()]
        if self._rows:
            numbers = Table(box=None, header_style="dim", padding=(0, 1))
            columns = _columns([metrics for _, metrics in self._rows])
            for name in ("update", *(name for name, _, _ in columns)):
                numbers.add_column(name, justify="right", no_wrap=True)
            for update, metrics in self._rows:
                numbers.add_row(str(update), *(text for _, text in _numbers(metrics, columns)))
            parts.append(numbers)
        if self._sample is not None:
            text = transcript(self._sample, self.tokenizer, limit=240)
            parts.append(Panel(text, title="a trajectory", border_style="dim", title_align="left"))
        return Group(*parts)

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        self._started_s = self._clock()
        self._updates, self._phase = (0, num_updates), None
        self.close()
        self._say(f"run {run_dir}: {title}", "bold")
        self._refresh()

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        self._phase = (name, done, total, detail)
        self._refresh()

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        self._updates, self._phase = (update, num_updates), None
        self._rows.append((update, metrics))
        self._refresh()

    def evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        self._phase = None
        self._evaluation = f"{plain(name)}: {evaluation_line(metrics, is_brief=True)}"
        self._say(f"evaluated {name}: {evaluation_line(metrics)}")

    def finished(
        self, run_dir: Path, checkpoint_dir: Path | None, metrics: Mapping[str, float]
    ) -> None:
        self._phase, self._evaluation = None, ""
        final = self.render()
        self.close()
        self._console.print(final)
        super().finished(run_dir, checkpoint_dir, metrics)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class NoDisplay:
    """Shows nothing. Displays that want a few events derive from it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method that does nothing; every method of a display returns nothing."""
        return lambda *_, **__: None


def make_display(file: TextIO | None = None) -> Display:
    """Returns the display that suits `file` (standard output when None): live in a terminal, one
    line in a notebook, plain lines elsewhere."""
    stream = file if file is not None else sys.stdout
    if stream is None:
        # A program without standard output, such as a service.
        return cast("Display", NoDisplay())
    if file is None and Console().is_jupyter:
        return NotebookDisplay()
    return RichDisplay(Console(file=stream)) if stream.isatty() else PlainDisplay(stream)


@contextmanager
def display_on(file: TextIO | None) -> Iterator[Display]:
    """Holds the progress display on a stream, None for standard output, and gives the terminal back
    whatever happens, so that an error is readable."""
    display = make_display(file)
    try:
        yield display
    finally:
        display.close()


def show_texts(display: Display, tokenizer: Decoder) -> None:
    """Lets a display of ours show what agents wrote where the format cannot read it."""
    inner = getattr(display, "inner", display)
    if isinstance(inner, _Lines):
        inner.tokenizer = tokenizer


@contextmanager
def shown(display: Display | bool | None) -> Iterator[Display]:
    """Holds the display that a caller from Python asks for.

    Args:
        display: True shows progress on standard output, False nothing, None progress where that is
            a terminal or a notebook. A display of the caller's own is left open.
    """
    is_notebook = Console().is_jupyter
    if is_notebook:
        # Of tqdm, as libraries import it; progress here needs no widgets.
        warnings.filterwarnings("ignore", message="IProgress not found")
    if display is None:
        display = is_notebook or (sys.stdout is not None and sys.stdout.isatty())
    if isinstance(display, bool):
        with display_on(None) if display else nullcontext(NoDisplay()) as made:
            yield made
    elif not hasattr(display, "phase"):
        raise SettingError(
            f"display: got {display!r:.80}; expected True, False, None, or an object that derives"
            " from treegraft.parts.NoDisplay.",
            code="display-invalid",
        )
    else:
        yield display
