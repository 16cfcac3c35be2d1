"""Runs as records: of run folders, and of studies' files of results, whose lines are finished runs
in short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from treegraft import DataError
from treegraft.extras.lab.study.plan import LABELS
from treegraft.extras.lab.study.results import CALLS, REPLAYED, Line, key_of, read_results
from treegraft.parts import RunReader, errors, recipe

MetricsLine = Mapping[str, float]
SAMPLED = "eval/accuracy_sampled"
GREEDY = "eval/accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run, of a folder or of a study's line: Record(name="first", seed=0, lines=({"update": 1,
    "reward/mean": 0.5},))"""

    name: str
    label: str | None = None
    """The name of its method by the user or the study."""
    world: str = ""
    """Only runs of one world are compared; "" for run folders."""
    seed: int | None = None
    """None if it was not recorded."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """By dotted name, without those that only name a run; of a study those in which its runs
    differ."""
    lines: Sequence[MetricsLine] = ()
    """One line of metrics an update, in order, numbers only; costs are those since the line
    before, and calls are executed calls."""
    num_eval: int | None = None
    """Held-out tasks; None if it is not known."""
    notes: Sequence[str] = ()
    """Remarks for readers of its numbers."""

    def values(self, key: str) -> dict[int, float]:
        """Returns the values of a metric by update, for updates that recorded it."""
        return {int(line["update"]): line[key] for line in self.lines if key in line}

    def spent(self, cost: str) -> dict[int, float]:
        """Returns by update the sum of a cost until then; lines without it count as 0."""
        # Figures show what was spent until a point, and lines hold what each update took.
        totals = accumulate(line.get(cost, 0.0) for line in self.lines)
        return {int(line["update"]): sum for line, sum in zip(self.lines, totals, strict=True)}


def read_records(paths: Sequence[str]) -> list[Record]:
    """Returns the runs of folders and of studies, each PATH or LABEL=PATH, which gives its runs
    that label. A path that is named twice counts once.

    Raises:
        CheckpointError: neither a run folder nor a study.
        DataError: a study that cannot be read, or a folder with damaged settings.
    """
    labels: dict[Path, str | None] = {}
    for typed in paths:
        label, path = split_label(typed)
        # By the real path: a link is the same run.
        if labels.setdefault(path.resolve(), label) != label:
            raise DataError(
                f"'{path}' is given with two labels; a run belongs to one. Give it once.",
                code="two-labels",
            )
    records = []
    for path, label in labels.items():
        records += read_study(path, label) if path.is_file() else [read_run(path, label)]
    return records


def split_label(typed: str) -> tuple[str | None, Path]:
    """Returns label and path of LABEL=PATH, (None, path) if the whole is a path."""
    label, sign, rest = typed.partition("=")
    # A folder may have "=" in its name.
    if not sign or not label.strip() or Path(typed).exists():
        return None, Path(typed)
    return label.strip(), Path(rest)


def read_run(path: Path, label: str | None = None) -> Record:
    """Returns a run folder as it is now; a line that is being written is left out.

    Raises:
        CheckpointError: not a run folder.
        DataError: config.json is damaged.
    """
    if not path.is_dir():
        raise errors.CheckpointError(
            f"'{path}' is not there; expected a run folder, e.g. runs/NAME, or a study, e.g."
            f" studies/methods.jsonl.{RunReader.beside(path)}",
            code="not-a-run",
        )
    run = RunReader(path)
    settings = recipe.flatten(run.config())
    lines, notes = run.clean_metrics()
    state = run.state()
    if not state["is_over"]:
        said = "running" if state["is_live"] else "stopped"
        notes = [*notes, f"{said} at update {state['update']} of {state['num_updates']}"]
    num_eval = settings.get("tasks.num_eval")
    return Record(
        name=run.name,
        label=label,
        seed=settings.get("run.seed"),
        settings={name: value for name, value in settings.items() if name not in LABELS},
        lines=[_with_repeated(line) for line in lines],
        # Wilson's interval needs the number of tasks.
        num_eval=num_eval if isinstance(num_eval, int) and num_eval > 0 else None,
        notes=notes,
    )


def _with_repeated(line: MetricsLine) -> MetricsLine:
    """The line with the calls that its environments repeated counted as tool calls."""
    if CALLS not in line or REPLAYED not in line:
        return line
    return {**line, CALLS: line[CALLS] + line[REPLAYED]}


def read_study(path: Path, label: str | None = None) -> list[Record]:
    """Returns the finished runs of a study's file of results; of one that is there twice
    the last.

    Raises:
        DataError: a line is no run, or there is none.
    """
    found = {key_of(line): line for line in read_results(path)}
    if not found:
        raise DataError(
            f"'{path}' holds no run; expected one a line, as `treegraft study` writes them",
            code="study-empty",
        )
    return records_of(found.values(), label)


def records_of(lines: Iterable[Line], label: str | None = None) -> list[Record]:
    """Returns lines of a study as records."""
    found = []
    for line in lines:
        method = str(line["method"])
        found.append(
            Record(
                name=f"{method}, seed {line['seed']}, {line['world']}",
                label=label or method,
                world=str(line["world"]),
                seed=line["seed"],
                settings=dict(line.get("settings") or {}),
                lines=_metrics_of(line),
                num_eval=line.get("num_eval"),
            )
        )
    return found


def _metrics_of(line: Line) -> list[MetricsLine]:
    """Metrics of each update, of its curve, which has sums, and of its columns."""
    columns = dict(line.get("updates") or {})
    before: dict[str, float] = {}
    found: dict[float, dict[str, float]] = {}
    for point in line["curve"]:
        values = {key: float(value) for key, value in point.items()}
        own = found[values["update"]] = {SAMPLED: values.pop("accuracy")}
        for key, value in values.items():
            if key == "update" or key.startswith("eval/"):
                own[key] = value
            elif key not in columns:
                # Costs of a curve are sums so far; a record has those of each update.
                own[key] = value - before.get(key, 0.0)
                before[key] = value
    for key, column in columns.items():
        for update, value in zip(columns.get("update", ()), column, strict=False):
            if value is not None:
                found.setdefault(float(update), {})[key] = float(value)
    return [found[update] for update in sorted(found)]
