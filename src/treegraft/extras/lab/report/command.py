"""`treegraft report`: from run folders and studies to a page, figures and tables; and the papers'
figures, which `treegraft study --figure` draws from a study's lines."""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from treegraft import DataError, SettingError
from treegraft.extras.lab.report.figures import FIGURES, STYLE, Cell, Data, Figure, NoData
from treegraft.extras.lab.report.groups import group, notes_on
from treegraft.extras.lab.report.page import page
from treegraft.extras.lab.report.records import GREEDY, SAMPLED, Record, split_label
from treegraft.extras.lab.study.results import CALLS, SECONDS, TOKENS, Line
from treegraft.extras.lab.text import quoted
from treegraft.parts import errors, files


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
    records: Sequence[Record], out: Path, *, baseline: str | None = None, only: Sequence[str] = ()
) -> Report:
    """Writes report.html and, beside it, figures/NAME.svg, .png and .csv.

    Args:
        out: the folder, made if it is missing.
        baseline: label of the group that others are compared with.
        only: names of figures; empty for all.

    Raises:
        DataError: runs that recorded nothing yet.
        SettingError: no such baseline or figure, or no matplotlib.
    """
    _refuse(records, only)
    groups = group(records)
    labels = list(dict.fromkeys(one.label for one in groups))
    if baseline is not None and baseline not in labels:
        raise SettingError(
            f"--baseline '{baseline}' is not a group.{errors.nearest(baseline, labels)} There are:"
            f" {quoted(labels)}",
            code="unknown-group",
        )
    data = Data(groups, _accuracy(records), baseline)
    folder = out / "figures"
    drawn, missing = _draw(data, only or list(FIGURES), folder)
    notes = notes_on(groups)
    title = f"Report on {records[0].name if len(records) == 1 else f'{len(records)} runs'}"
    place = out / "report.html"
    files.write_atomically(place, page(title, groups, drawn, missing, notes, folder))
    return Report(place, tuple(drawn), tuple(missing), tuple(notes))


def _refuse(records: Sequence[Record], only: Sequence[str]) -> None:
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
    if not any(record.lines for record in records):
        names = ", ".join(record.name for record in records[:3])
        raise DataError(
            f"nothing to report: {names} recorded no metrics yet; expected lines in metrics.jsonl."
            " Wait for an update.",
            code="no-metrics-yet",
        )


def _accuracy(records: Sequence[Record]) -> str | None:
    """The accuracy that most runs recorded, of equals the sampled one."""
    counts = Counter(key for one in records for key in (SAMPLED, GREEDY) if one.values(key))
    return max((SAMPLED, GREEDY), key=lambda key: counts[key]) if counts else None


def _draw(data: Data, names: Sequence[str], folder: Path) -> tuple[dict[str, Figure], list[str]]:
    """Writes figures into a folder; returns them by name, and why others are missing."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure] = {}
    missing = []
    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        # A name in a script that the font does not have is drawn as boxes; the tables have it
        # whole.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        for name, (_, draw) in FIGURES.items():
            if name not in names:
                continue
            # A figure of an earlier report that has no data any more must not stay.
            for old in folder.glob(f"{name}.*"):
                old.unlink()
            try:
                one = drawn[name] = draw(data)
            except NoData as error:
                missing.append(f"no {name}: {error}")
                continue
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


# ---------------------------------------------------------------------- the papers' figures


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure or table of a paper: PaperFigure("RAPO, figure 8: ...", "sweep")"""

    title: str
    drawn: str
    """The figure of a report that shows it."""
    has_costs: bool = False
    """Whether a table of what an update costs is printed beside it."""


PAPERS: Mapping[str, PaperFigure] = {
    "rapo-3": PaperFigure("RAPO, figure 3: efficiency", "efficiency", has_costs=True),
    "rapo-ablations": PaperFigure("RAPO, tables 3 to 5: ablations", "final-accuracy"),
    "rapo-8": PaperFigure("RAPO, figure 8: m, a and N_hybrid", "sweep"),
    "rapo-10": PaperFigure("RAPO, figure 10: entropy and tokens", "entropy-and-tokens"),
    "rapo-11": PaperFigure("RAPO, figure 11: efficiency in detail", "efficiency", has_costs=True),
    "arpo-7": PaperFigure("ARPO, figure 7: tool calls", "accuracy-against-cost", has_costs=True),
    "arpo-8": PaperFigure("ARPO, figure 8: beta, N and M", "sweep"),
}
"""By the paper and the number."""
PER_UPDATE: Mapping[str, str] = {
    "time/rollout_s": "rollout s",
    "time/learn_s": "learning s",
    SECONDS: "CPU s",
    CALLS: "calls",
    TOKENS: "tokens",
}
"""What an update costs, by the metric, with its column."""


def costs(lines: Sequence[Line], baseline: str | None) -> list[list[str]]:
    """Returns what an update of each arm costs on average, over its runs in all worlds, and how
    often that is the baseline's: a row of headings, then one for each arm; "" if it was not
    recorded."""
    arms = list(dict.fromkeys(str(line["method"]) for line in lines))
    arms.sort(key=lambda arm: arm != baseline)
    rows = [["arm", *PER_UPDATE.values()]]
    for arm in arms:
        cells = [arm]
        for key in PER_UPDATE:
            value = _mean_of(arm, key, lines)
            base = _mean_of(baseline, key, lines)
            shown = "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            cells.append(f"{shown} ({value / base:.2f} x)" if value is not None and base else shown)
        rows.append(cells)
    return rows


def _mean_of(arm: str | None, key: str, lines: Sequence[Line]) -> float | None:
    values = [_per_update(line, key) for line in lines if line["method"] == arm]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _per_update(line: Line, key: str) -> float | None:
    column = [one for one in (line.get("updates") or {}).get(key, ()) if one is not None]
    if column:
        return fmean(column)
    last = line["curve"][-1]
    return last[key] / last["update"] if key in last and last["update"] > 0 else None
