"""Runs as records: of run folders, and of studies, whose lines are finished runs in short.

A study is a .jsonl file of `treegraft study`, such as `studies/methods.jsonl`: one object a
run, with "method" (its label), "seed", "world" (only runs of one world are compared; optional),
"settings" (by dotted name, those in which runs differ; optional), "num_eval" (held-out tasks;
optional), "curve": at each evaluation {"update": n, "accuracy": share, "eval/...": as measured,
any other metric summed so far ...}, and "updates": {"update": [n, ...], a metric: [of each update,
...], ...} (optional).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treegraft import DataError
from treegraft.parts import RunReader, errors, metrics, recipe

MetricsLine = Mapping[str, float]
SAMPLED = "eval/accuracy_sampled"
LABELS = ("run.name", "run.dir", "run.seed")
"""Settings that tell runs apart which are one method all the same."""
_CURVE_ONLY = ("update", "accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run, of a folder or of a study's line: Record(name="first", seed=0, lines=({"update": 1,
    "reward/mean": 0.5},))"""

    name: str
    label: str | None = None
    """The name of its method by the user or the study; None: named by the settings that differ."""
    world: str | None = None
    """Only runs of one world are compared; None leaves that to the settings of the tasks."""
    seed: int | None = None
    """None: not recorded."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """By dotted name, without those that only name a run."""
    lines: Sequence[MetricsLine] = ()
    """One line of metrics an update, in order, numbers only; costs are those since the line
    before, and calls are executed calls."""
    num_eval: int | None = None
    """Held-out tasks; None: not known."""
    run: RunReader | None = None
    """The folder, None for a line of a study."""
    state: str = "finished"
    """"finished", "running", or "stopped at update N of M"."""
    notes: Sequence[str] = ()
    """Remarks for readers of its numbers."""


def read_records(paths: Sequence[str]) -> list[Record]:
    """Returns the runs of folders and of studies, each PATH or LABEL=PATH, which gives its runs
    that label.

    A path that is given twice counts once, and so does a run that stands in two studies.

    Raises:
        CheckpointError: neither a run folder nor a study.
        DataError: a study that cannot be read, or a folder with damaged settings.
    """
    records: list[Record] = []
    seen: set[tuple[Path, str | None]] = set()
    for typed in paths:
        label, path = split_label(typed)
        if (path.resolve(), label) in seen:
            continue
        seen.add((path.resolve(), label))
        if any(path.resolve() == known for known, other in seen if other != label):
            raise DataError(
                f"'{path}' is given with two labels; a run belongs to one. Give it once.",
                code="two-labels",
            )
        found = list(read_study(path, label)) if path.is_file() else [read_run(path, label)]
        records += [record for record in found if record.run is not None or record not in records]
    counts = Counter[str]()
    for place, record in enumerate(records):
        counts[record.name] += 1
        if counts[record.name] > 1:
            records[place] = replace(record, name=f"{record.name} ({counts[record.name]})")
    return records


def split_label(typed: str) -> tuple[str | None, Path]:
    """Returns label and path of LABEL=PATH, (None, path) where the whole is a path."""
    label, sign, rest = typed.partition("=")
    if not sign or not label.strip() or Path(typed).exists():
        return None, Path(typed)
    return label.strip(), Path(rest)


# ---------------------------------------------------------------------- run folders


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
    said = "running" if state["is_live"] else "stopped"
    said += f" at update {state['update']} of {state['num_updates']}"
    return Record(
        name=run.name,
        label=label,
        seed=settings.get("run.seed"),
        settings={name: value for name, value in settings.items() if name not in LABELS},
        lines=[_with_repeated(line) for line in lines],
        num_eval=_num_eval(run, settings),
        run=run,
        state="finished" if state["is_over"] else said,
        notes=notes,
    )


def _with_repeated(line: MetricsLine) -> MetricsLine:
    """The line with the calls that its environments repeated counted as tool calls."""
    own, repeated = metrics.CALLS
    return {**line, own: line[own] + line[repeated]} if own in line and repeated in line else line


def _num_eval(run: RunReader, settings: Mapping[str, Any]) -> int | None:
    evaluated = [file for file in run.files() if file.kind != "update"]
    found = run.num_trees(evaluated[0].name) if evaluated else settings.get("tasks.num_eval")
    return found if isinstance(found, int) and found > 0 else None


# ---------------------------------------------------------------------- studies


def read_study(path: Path, label: str | None = None) -> Iterator[Record]:
    """Yields the runs of a study, in order; one that stands there twice counts once, as it stands
    last.

    Raises:
        DataError: it is not UTF-8, or a line is no run.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"'{path}' cannot be read as a study ({error}); expected .jsonl, one run a line",
            code="study-unreadable",
        ) from error
    found: dict[tuple[Any, ...], Record] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        record = _study_line(line, f"'{path}', line {number}", label) if line.strip() else None
        if record is not None:
            found[(record.world, record.label, record.seed)] = record
    if not found:
        raise DataError(
            f"'{path}' holds no run; expected one a line, as `treegraft study` writes them",
            code="study-empty",
        )
    yield from found.values()


def _study_line(line: str, where: str, label: str | None) -> Record | None:
    """A run; None for the line of one that failed, or of the defaults."""
    try:
        data = json.loads(line)
        if "error" in data or "defaults_of" in data:
            return None
        curve = [{key: float(value) for key, value in point.items()} for point in data["curve"]]
        method, settings = str(data["method"]), dict(data.get("settings") or {})
        seed, num_eval = data.get("seed"), data.get("num_eval")
        accuracies = [(int(point["update"]), point["accuracy"]) for point in curve]
        columns = {
            str(key): [None if value is None else float(value) for value in column]
            for key, column in dict(data.get("updates") or {}).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{where} is not a run ({type(error).__name__}: {error}); expected an object with"
            ' method, seed and curve, a list of {"update": n, "accuracy": share}',
            code="study-line-invalid",
        ) from error
    measured = {key for point in curve for key in point if key.startswith("eval/")}
    costs = {key for point in curve for key in point} - {*_CURVE_ONLY, *measured, *columns}
    lines, before = [], dict.fromkeys(costs, 0.0)
    for (update, accuracy), point in zip(accuracies, curve, strict=True):
        spent = {cost: point[cost] - before[cost] for cost in costs if cost in point}
        before |= {cost: point[cost] for cost in costs if cost in point}
        also = {key: point[key] for key in measured if key in point}
        lines.append({"update": float(update), SAMPLED: accuracy} | also | spent)
    lines = _with_columns(lines, columns)
    world = data.get("world")
    return Record(
        name=f"{method}, seed {seed}" + (f", {world}" if world is not None else ""),
        label=label or method,
        world=None if world is None else str(world),
        seed=seed if isinstance(seed, int) else None,
        settings=settings,
        lines=lines,
        num_eval=num_eval if isinstance(num_eval, int) and num_eval > 0 else None,
    )


def _with_columns(
    lines: list[dict[str, float]], columns: Mapping[str, Sequence[float | None]]
) -> list[dict[str, float]]:
    """Lines with the metrics of each update, by columns; those of the curve are at evaluations."""
    found = {line["update"]: line for line in lines}
    for key in columns:
        for update, value in zip(columns.get("update", ()), columns[key], strict=False):
            if update is not None and value is not None:
                found.setdefault(update, {"update": update})[key] = value
    return [found[update] for update in sorted(found)]
