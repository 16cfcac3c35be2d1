"""`treegraft report`: from run folders and studies to figures and tables."""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treegraft import DataError, SettingError
from treegraft.extras.lab.report.figures import FIGURES, STYLE, Cell, Data, Figure, NoData
from treegraft.extras.lab.report.groups import group, notes_on
from treegraft.extras.lab.report.records import (
    GREEDY,
    SAMPLED,
    Record,
    read_records,
    split_label,
)
from treegraft.extras.lab.text import quoted
from treegraft.parts import errors, files, plain


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Run folders or studies (.jsonl), each as PATH or LABEL=PATH."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to write to. Default: the first run's folder, or report/ for studies.",
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Group that the others are compared with.")
    ] = None,
) -> None:
    """Write figures of runs, and their numbers as CSV, to figures/.

    Runs that differ only in name and seed form one group, drawn with 95 % intervals.
    """
    written = write_report(read_records(runs), report_folder(runs, out), baseline=baseline)
    for line in (*written.notes, *written.left_out):
        print(plain(line))
    names = f" ({', '.join(written.figures)})" if written.figures else ""
    print(plain(f"{written.folder}: {len(written.figures)} figures{names}"))


@dataclass(frozen=True, slots=True)
class Report:
    """The files of a report: Report(folder=Path("runs/a/figures"), figures=("final-accuracy",),
    left_out=("no ...",), notes=())"""

    folder: Path
    figures: tuple[str, ...]
    left_out: tuple[str, ...]
    """A line for each figure that there is no data for."""
    notes: tuple[str, ...]


def write_report(records: Sequence[Record], out: Path, *, baseline: str | None = None) -> Report:
    """Writes figures/NAME.svg, .png and .csv.

    Args:
        out: the folder, made if it is missing.
        baseline: label of the group that others are compared with.

    Raises:
        DataError: runs that recorded nothing yet.
        SettingError: no such baseline, or a package is missing.
    """
    try:
        data = data_of(records, baseline)
    except ImportError as error:
        raise SettingError(
            f"reports need the package '{error.name}', which is not installed; run: pip install"
            " 'treegraft[reports]'",
            code="package-missing",
        ) from error
    folder = out / "figures"
    drawn, missing = draw_figures(data, FIGURES, folder)
    return Report(folder, tuple(drawn), tuple(missing), tuple(notes_on(data.groups)))


def data_of(records: Sequence[Record], baseline: str | None) -> Data:
    """Returns what the figures of these runs are drawn from. Raises as `write_report` does."""
    # First, so that a missing package is reported before anything is written.
    import matplotlib  # noqa: F401

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
    # The accuracy that most runs recorded, of equals the sampled one.
    counts = Counter(key for one in records for key in (SAMPLED, GREEDY) if one.values(key))
    accuracy = max((SAMPLED, GREEDY), key=lambda key: counts[key]) if counts else None
    return Data(groups, accuracy, baseline)


def draw_figures(
    data: Data, figures: Mapping[str, Callable[[Data], Figure]], folder: Path
) -> tuple[dict[str, Figure], list[str]]:
    """Writes figures into a folder; returns them by name, and why others are missing."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure] = {}
    missing = []
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        # A name in a script that the font does not have is drawn as boxes; the tables have it
        # whole.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        for name, draw in figures.items():
            # A figure of an earlier report that has no data any more must not stay.
            for old in folder.glob(f"{name}.*"):
                old.unlink()
            try:
                one = drawn[name] = draw(data)
            except NoData as error:
                missing.append(f"no {name}: {error}")
                continue
            # Without the date the same runs give the same bytes.
            quiet = {"Date": None, "Creator": None}
            one.drawing.savefig(folder / f"{name}.svg", metadata=quiet)
            one.drawing.savefig(folder / f"{name}.png", metadata={"Software": None}, dpi=200)
            files.write_atomically(folder / f"{name}.csv", as_csv(one.columns, one.rows))
    return drawn, missing


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Returns a table as CSV, numbers in full; texts that a spreadsheet would take for formulas get
    a quote in front."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_safe(cell) if isinstance(cell, str) else cell for cell in row])
    return out.getvalue()


def _safe(text: str) -> str:
    clean = text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")
    return f"'{clean}" if clean.startswith(("=", "+", "-", "@", "\t", "\r")) else clean


def report_folder(paths: Sequence[str], out: Path | None) -> Path:
    """Returns the folder of a report on these runs and studies: the first run's without `out`.

    Raises:
        SettingError: there is no place to write to.
    """
    if out is not None:
        if out.is_file():
            raise SettingError(
                f"--out {out}: there is a file of that name; expected a folder, or a name that is"
                " free",
                code="report-folder-taken",
            )
        return out
    for _, path in map(split_label, paths):
        if path.is_dir():
            return path
    # Studies have no folder of their own, and a path that is not there is reported when it is read.
    return Path("report")
