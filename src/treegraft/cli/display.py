"""The progress display: live in a terminal, plain lines in a pipe.

Text from models, tools and data is shown as it is: never read as markup, and with control
characters made visible, so that it cannot move the cursor or recolour the screen.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from treegraft.core.interfaces import Display
from treegraft.core.text import plain
from treegraft.core.types import Trajectory, Tree
from treegraft.view.transcript import _outcome, pick_sample, transcript

# --- one trajectory as text -----------------------------------------------------------------------


# --- numbers --------------------------------------------------------------------------------------

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


def _cell(metrics: Mapping[str, float], key: str, form: str) -> str:
    return form.format(metrics[key]) if key in metrics else "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{rest:02d}s"


def standing_warnings(metrics: Mapping[str, float]) -> str:
    """Returns the names of the warnings that stand after an update, with commas; "" for none."""
    return ", ".join(
        plain(key.removeprefix("health/")) for key in metrics if key.startswith("health/")
    )


_MAX_CATEGORIES = 6


def _by_category(metrics: Mapping[str, float], name: str) -> str:
    """Returns " (1_hop 60%, 2_hops 31%)", or an empty string without categories."""
    start = f"eval/{name}_"
    other = "eval/accuracy_sampled"
    found = {
        key: value
        for key, value in metrics.items()
        if key.startswith(start) and (name != "accuracy" or not key.startswith(other))
    }
    parts = [f"{plain(key.removeprefix(start))} {value:.0%}" for key, value in found.items()]
    more = len(parts) - _MAX_CATEGORIES
    return (
        f" ({', '.join([*parts[:_MAX_CATEGORIES], *([f'{more} more'] if more > 0 else [])])})"
        if parts
        else ""
    )


def _gain(metrics: Mapping[str, float], key: str) -> str:
    return f"{metrics[key]:+.2f} [{metrics[f'{key}_low']:.2f}, {metrics[f'{key}_high']:.2f}]"


def evaluation_line(metrics: Mapping[str, float], *, is_brief: bool = False) -> str:
    """Returns the evaluation among `metrics` on one line, in an order of its own; `is_brief` leaves
    categories and pass@k out.

    "accuracy 41.5% (1_hop 60%, 2_hops 23%), sampled 38.0%, pass@4 72.0%, gain +0.25 [0.18,
    0.32]"
    """
    parts = []
    has_greedy = "eval/accuracy" in metrics
    for name, shown in (
        ("accuracy", "accuracy"),
        ("accuracy_sampled", "sampled" if has_greedy else "accuracy_sampled"),
    ):
        if f"eval/{name}" in metrics:
            is_split = not is_brief and (name == "accuracy" or not has_greedy)
            categories = _by_category(metrics, name) if is_split else ""
            parts.append(f"{shown} {metrics[f'eval/{name}']:.1%}{categories}")
    prefix = "eval/pass_at_"
    passes = sorted(
        (int(key.removeprefix(prefix)), value)
        for key, value in metrics.items()
        if key.startswith(prefix) and not is_brief
    )
    parts += [f"pass@{k} {value:.1%}" for k, value in passes]
    for key, shown in (("eval/gain", "gain"), ("eval/gain_sampled", "sampled gain")):
        if f"{key}_high" in metrics:
            parts.append(f"{shown} {_gain(metrics, key)}")
    if metrics.get("eval/failed_frac", 0.0) > 0:
        parts.append(f"failed {metrics['eval/failed_frac']:.1%}")
    return ", ".join(parts)


def _where_to_look(run_dir: Path, checkpoint_dir: Path | None, question: str | None) -> list[str]:
    """Returns what a finished run left behind, a line each."""
    places = [
        ("metrics", run_dir / "metrics.jsonl"),
        ("trees", run_dir / "trees"),
        ("checkpoint", checkpoint_dir),
    ]
    lines = [f"  {name:<11}{place}" for name, place in places if place is not None]
    if checkpoint_dir is not None:
        asked = (
            shlex.quote(plain(question))
            if question is not None and len(question) <= 80
            else '"question"'
        )
        lines.append(f"  {'ask it':<11}treegraft run {shlex.quote(str(checkpoint_dir))} {asked}")
    return lines


def _question(sample: Trajectory | None) -> str | None:
    return None if sample is None else sample.task.question


def _short_transcript(trajectory: Trajectory, limit: int = 160) -> list[str]:
    """Returns a trajectory as a few plain lines: the question, a line per step, how it ended."""

    def flat(text: str) -> str:
        return plain(" ".join(text.split()), limit)

    lines = [f"  a trajectory: {flat(trajectory.task.question)}"]
    for step in trajectory.steps[1:]:
        content = step.content
        parts = [f"<think> {flat(content.thought)} </think>"] if content.thought.strip() else []
        for place, call in enumerate(content.calls):
            parts.append(f"<{plain(call.name)}> {flat(call.body)} </{plain(call.name)}>")
            parts += [f"-> {flat(seen.text)}" for seen in content.observations[place : place + 1]]
        if content.answer is not None:
            parts.append(f"<answer> {flat(content.answer)} </answer>")
        if step.violation is not None:
            parts.append(f"violation: {plain(step.violation)}")
        lines.append(
            "    " + ("  ".join(parts) or f"{len(step.token_ids)} tokens, nothing the format knows")
        )
    return [*lines, f"    {_outcome(trajectory).plain}"]


class PlainDisplay:
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
        self._every_s = every_s
        self._clock = clock
        self._last_phase_s = clock()
        self._sample_every_s = sample_every_s
        self._last_sample_s = float("-inf")
        self._sample: Trajectory | None = None

    def _line(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        self._line(f"run {run_dir}: {title}, {num_updates} updates")

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        # Only what takes long is worth a line; the first report of a phase that ends soon would be
        # noise.
        if self._clock() - self._last_phase_s < self._every_s:
            return
        self._last_phase_s = self._clock()
        self._line(
            f"  {name}"
            f" {done}{f'/{total}' if total else ''}{f': {plain(detail, 200)}' if detail else ''}"
        )

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        self._last_phase_s = self._clock()
        numbers = "  ".join(
            f"{name} {_cell(metrics, key, form)}" for name, key, form in COLUMNS if key in metrics
        )
        standing = standing_warnings(metrics)
        self._line(
            f"update {update}/{num_updates}  {numbers}{f'  ! {standing}' if standing else ''}"
        )
        if self._sample is not None and self._clock() - self._last_sample_s >= self._sample_every_s:
            self._last_sample_s = self._clock()
            for line in _short_transcript(self._sample):
                self._line(line)

    def evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        self._last_phase_s = self._clock()
        self._line(f"evaluated {name}: {evaluation_line(metrics)}")

    def sample(self, tree: Tree) -> None:
        self._sample = pick_sample(tree)

    def warn(self, text: str) -> None:
        self._line(f"warning: {plain(text)}")

    def note(self, text: str) -> None:
        self._line(f"note: {plain(text)}")

    def finished(
        self, run_dir: Path, checkpoint_dir: Path | None, metrics: Mapping[str, float]
    ) -> None:
        result = evaluation_line(metrics)
        self._line(f"finished {run_dir}{f': {result}' if result else ''}")
        for line in _where_to_look(run_dir, checkpoint_dir, _question(self._sample)):
            self._line(line)

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        self._line(f"interrupted{' and saved' if is_saved else ''}; go on with: {resume_command}")

    def close(self) -> None:
        self._file.flush()


class RichDisplay:
    """A live display: what is under way, the numbers of the latest updates, and one trajectory."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        num_rows: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console if console is not None else Console()
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=num_rows)
        self._clock = clock
        self._started_s = clock()
        self._updates = (0, 0)
        self._phase: tuple[str, int, int, str] | None = None
        self._evaluation = ""
        self._sample: Trajectory | None = None
        self._live: Live | None = None

    def _refresh(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=4,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()

    def _say(self, text: Text) -> None:
        # Unwrapped, so that paths and commands can be copied; above a live display a line too long
        # would spoil the picture.
        self._console.print(text, soft_wrap=self._live is None)

    def _head(self) -> RenderableType:
        update, num_updates = self._updates
        # The last column takes what the others leave, so that a long text never squeezes the bars.
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, None, 1):
            grid.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
        total = max(num_updates, 1)
        grid.add_row(
            "updates",
            ProgressBar(total=total, completed=update, width=20),
            self._pace(update, num_updates),
        )
        if self._phase is not None:
            name, done, count, detail = self._phase
            bar = ProgressBar(total=max(count, 1), completed=done, width=20)
            grid.add_row(
                Text(name),
                bar,
                Text(f"{done}/{count}" if count else str(done or ""))
                + Text(f"  {plain(detail, 100)}", "dim"),
            )
        if self._rows and (standing := standing_warnings(self._rows[-1][1])):
            grid.add_row("warnings", "", Text(standing, style="yellow"))
        if self._evaluation:
            grid.add_row("eval", "", Text(self._evaluation, style="bold"))
        return grid

    def _pace(self, update: int, num_updates: int) -> str:
        elapsed = self._clock() - self._started_s
        return f"{update}/{num_updates}  {_duration(elapsed)}"

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        table.add_column("update", justify="right")
        for name, _, _ in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for update, metrics in self._rows:
            table.add_row(str(update), *(_cell(metrics, key, form) for _, key, form in COLUMNS))
        return table

    def render(self) -> RenderableType:
        """Returns the display as it stands."""
        parts: list[RenderableType] = [self._head()]
        if self._rows:
            parts.append(self._table())
        if self._sample is not None:
            parts.append(
                Panel(
                    transcript(self._sample, limit=240),
                    title="a trajectory",
                    border_style="dim",
                    title_align="left",
                )
            )
        return Group(*parts)

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        self._started_s = self._clock()
        self._updates = (0, num_updates)
        self._phase = None
        self.close()
        self._say(Text(f"run {run_dir}: {title}", style="bold"))
        self._refresh()

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        self._phase = (name, done, total, detail)
        self._refresh()

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        self._updates = (update, num_updates)
        self._phase = None
        self._rows.append((update, metrics))
        self._refresh()

    def evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        line = evaluation_line(metrics)
        self._phase = None
        self._evaluation = f"{plain(name)}: {evaluation_line(metrics, is_brief=True)}"
        self._say(Text(f"evaluated {plain(name)}: {line}"))

    def sample(self, tree: Tree) -> None:
        self._sample = pick_sample(tree)

    def warn(self, text: str) -> None:
        self._say(Text(f"warning: {plain(text)}", style="yellow"))

    def note(self, text: str) -> None:
        self._say(Text(f"note: {plain(text)}"))

    def finished(
        self, run_dir: Path, checkpoint_dir: Path | None, metrics: Mapping[str, float]
    ) -> None:
        self._phase, self._evaluation = None, ""
        final = self.render()
        self.close()
        self._console.print(final)
        result = evaluation_line(metrics)
        self._say(Text(f"finished {run_dir}{f': {result}' if result else ''}", style="bold green"))
        for line in _where_to_look(run_dir, checkpoint_dir, _question(self._sample)):
            self._say(Text(line))

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        self.close()
        self._say(
            Text(
                f"interrupted{' and saved' if is_saved else ''}; go on with: {resume_command}",
                style="bold yellow",
            )
        )

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def make_display(file: TextIO | None = None) -> Display:
    """Returns the display that suits `file` (standard output when None): live in a terminal, plain
    lines elsewhere."""
    stream = file if file is not None else sys.stdout
    if stream.isatty():
        return RichDisplay(Console(file=stream))
    return PlainDisplay(stream)
