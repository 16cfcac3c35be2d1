"""`treegraft report`: from run folders and studies to a page, figures and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treegraft import DataError, SettingError
from treegraft.extras.lab.report.bars import final_accuracy, sweep
from treegraft.extras.lab.report.curves import (
    against_cost,
    diversity,
    dynamics,
    efficiency,
    entropy_and_tokens,
)
from treegraft.extras.lab.report.drawing import save, styled
from treegraft.extras.lab.report.figure import MissingFigure, ReportFigure
from treegraft.extras.lab.report.groups import ReportData, group
from treegraft.extras.lab.report.hybrid import TreeMeans, hybrid
from treegraft.extras.lab.report.page import group_notes, page
from treegraft.extras.lab.report.positions import PositionMeans, by_position
from treegraft.extras.lab.report.records import Record, read_records, split_label
from treegraft.extras.lab.report.trees import TreeReader
from treegraft.extras.lab.text import quoted
from treegraft.parts import errors, files

ACCURACIES = ("eval/accuracy_sampled", "eval/accuracy")
"""Accuracies that figures can show: the one that most runs recorded, of equals the first."""
FIGURES: Mapping[str, Callable[[ReportData], ReportFigure | MissingFigure]] = {
    "training-dynamics": dynamics,
    "efficiency": efficiency,
    "entropy-and-tokens": entropy_and_tokens,
    "accuracy-against-cost": against_cost,
    "final-accuracy": final_accuracy,
    "on-policy-against-hybrid": hybrid,
    "entropy-by-position": by_position,
    "diversity": diversity,
    "sweep": sweep,
}
"""Figures by name, in the order of the page."""


@dataclass(frozen=True, slots=True)
class Report:
    """The files of a report: Report(page=Path("runs/a/report.html"), figures=("final-accuracy",),
    left_out=("no ...",), notes=())"""

    page: Path
    figures: tuple[str, ...]
    left_out: tuple[str, ...]
    """A line for each figure that there is no data for."""
    notes: tuple[str, ...]


def write_report(
    paths: Sequence[str],
    *,
    out: Path | None = None,
    baseline: str | None = None,
    only: Sequence[str] = (),
    beside: Mapping[str, str] | None = None,
) -> Report:
    """Writes report.html and, beside it, figures/NAME.svg, .png and .csv.

    Args:
        paths: run folders and studies, each PATH or LABEL=PATH.
        out: the folder; None takes that of the first run.
        baseline: label of the group that others are compared with.
        only: names of figures; empty for all.
        beside: titles of further pages, by file, that the caller puts beside it.

    Raises:
        CheckpointError: a path is neither a run folder nor a study.
        DataError: a study or settings that cannot be read, or runs that recorded nothing yet.
        SettingError: no such baseline or figure, no place to write to, or no matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SettingError(
            f"reports need the package '{error.name}', which is not installed; run: pip install"
            " 'treegraft[reports]'",
            code="package-missing",
        ) from error
    for name in only:
        if name not in FIGURES:
            raise SettingError(
                f"--only '{name}' is not a figure.{errors.nearest(name, FIGURES)} There are:"
                f" {', '.join(FIGURES)}",
                code="unknown-figure",
            )
    place = _place(paths, out)
    records = read_records(paths)
    if not any(record.lines for record in records):
        names = ", ".join(record.name for record in records[:3])
        raise DataError(
            f"nothing to report: {names} recorded no metrics yet; expected lines in metrics.jsonl."
            " Wait for an update.",
            code="no-metrics-yet",
        )
    groups = group(records)
    labels = list(dict.fromkeys(one.label for one in groups))
    if baseline is not None and baseline not in labels:
        raise SettingError(
            f"--baseline '{baseline}' is not a group.{errors.nearest(baseline, labels)} There are:"
            f" {quoted(labels)}",
            code="unknown-group",
        )
    trees = TreeReader((TreeMeans, PositionMeans))
    data = ReportData(groups, _accuracy(records), baseline, trees)
    notes, folder = group_notes(groups), place / "figures"
    figures = _draw(data, only, folder)
    drawn = {name: one for name, one in figures.items() if isinstance(one, ReportFigure)}
    title = f"Report on {records[0].name if len(records) == 1 else f'{len(records)} runs'}"
    files.write_atomically(
        place / "report.html", page(groups, figures, folder, notes, title, beside or {})
    )
    return Report(
        page=place / "report.html",
        figures=tuple(drawn),
        left_out=tuple(
            f"no {name}: {one.reason}"
            for name, one in figures.items()
            if isinstance(one, MissingFigure)
        ),
        notes=(*notes, *(f"{name}: {note}" for name, one in drawn.items() for note in one.notes)),
    )


def _draw(
    data: ReportData, only: Sequence[str], folder: Path
) -> dict[str, ReportFigure | MissingFigure]:
    """Writes the figures that are asked for into a folder; returns them by name."""
    with styled():
        figures = {name: FIGURES[name](data) for name in FIGURES if not only or name in only}
        folder.mkdir(parents=True, exist_ok=True)
        for name, one in figures.items():
            # A figure of an earlier report that has no data any more must not stay beside the page.
            for kind in ("svg", "png", "csv"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
            if isinstance(one, ReportFigure):
                save(one.figure, folder / name)
                files.write_atomically(folder / f"{name}.csv", one.table.as_csv())
    return figures


def _place(paths: Sequence[str], out: Path | None) -> Path:
    if out is not None:
        if out.exists() and not out.is_dir():
            raise SettingError(
                f"--out {out}: there is a file of that name; expected a folder, or a name that is"
                " free",
                code="report-folder-taken",
            )
        return out
    places = [path for _, path in map(split_label, paths)]
    if all(path.is_file() for path in places):
        raise SettingError(
            "a study has no folder of its own; say with --out DIR where the report goes",
            code="report-without-folder",
        )
    # A path that is not there is reported when it is read.
    return next((path for path in places if path.is_dir()), Path())


def _accuracy(records: Sequence[Record]) -> str | None:
    counts = Counter(
        key for record in records for key in ACCURACIES if any(key in line for line in record.lines)
    )
    return max(ACCURACIES, key=lambda key: counts[key]) if counts else None
