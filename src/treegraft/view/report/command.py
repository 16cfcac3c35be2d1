"""`treegraft report`: from run folders and studies to a page, figures and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import DataError, SettingError, nearest
from treegraft.core.files import write_atomically
from treegraft.view.report.groups import group
from treegraft.view.report.page import group_notes, page
from treegraft.view.report.pieces import Scene
from treegraft.view.report.records import Record, read_records, split_label
from treegraft.view.report.shape import LeftOut, Made

ACCURACIES = ("eval/accuracy_sampled", "eval/accuracy")
"""Which accuracy is drawn: the one that most runs recorded, of equals the first."""
FIGURES = (
    *(
        "training-dynamics",
        "efficiency",
        "accuracy-against-cost",
        "final-accuracy",
        "on-policy-against-hybrid",
    ),
    *("semantic-diversity", "trajectory-map", "noise-rate", "off-policy-source"),
)
"""Names of figures, in the order of the page."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a report wrote: Written(page=Path("runs/a/report.html"), figures=("efficiency",),
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
    encoder: str = "hashing",
    only: Sequence[str] = (),
) -> Written:
    """Writes report.html and, beside it, figures/NAME.svg, .png and .csv.

    Args:
        paths: run folders and studies, each PATH or LABEL=PATH.
        out: the folder; None takes that of the first run.
        baseline: label of the group that others are compared with.
        encoder: what turns trajectories into vectors.
        only: names of figures; empty for all.

    Raises:
        CheckpointError: a path is neither a run folder nor a study.
        DataError: a study or settings that cannot be read, or runs that recorded nothing yet.
        SettingError: no such baseline, figure or encoder, no place to write to, or no matplotlib.
        ModelError: the encoder cannot be loaded.
    """
    _check_installed()
    _check_names(only)
    place = _place(paths, out)
    records = read_records(paths)
    if not any(record.lines for record in records):
        names = ", ".join(record.name for record in records[:3])
        raise DataError(
            f"nothing to report: {names} recorded no metrics yet; expected lines in metrics.jsonl."
            " Wait for an update."
        )
    groups = group(records)
    labels = list(dict.fromkeys(one.label for one in groups))
    if baseline is not None and baseline not in labels:
        raise SettingError(
            f"--baseline '{baseline}' is no group.{nearest(baseline, labels)} There are:"
            f" {', '.join(labels)}"
        )
    scene = Scene(groups, _accuracy(records), baseline, encoder)
    notes = group_notes(groups)
    made = _draw(scene, notes, only, place / "figures")
    html = page(groups, made, place / "figures", notes, _title(records))
    write_atomically(place / "report.html", html)
    return Written(
        page=place / "report.html",
        figures=tuple(one.name for one in made if isinstance(one, Made)),
        left_out=tuple(f"no {one.name}: {one.reason}" for one in made if isinstance(one, LeftOut)),
        notes=(
            *notes,
            *(f"{one.name}: {note}" for one in made if isinstance(one, Made) for note in one.notes),
        ),
    )


def _check_installed() -> None:
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        raise SettingError(
            f"reports need the package '{error.name}', which is not installed; run: pip install"
            " 'treegraft[report]'"
        ) from error


def _check_names(only: Sequence[str]) -> None:
    for name in only:
        if name not in FIGURES:
            raise SettingError(
                f"--only '{name}' is no figure.{nearest(name, FIGURES)} There are:"
                f" {', '.join(FIGURES)}"
            )


def _place(paths: Sequence[str], out: Path | None) -> Path:
    if out is not None:
        if out.exists() and not out.is_dir():
            raise SettingError(
                f"--out {out}: there is a file of that name; expected a folder, or a name that is"
                " free"
            )
        return out
    folder = next((path for _, path in map(split_label, paths) if path.is_dir()), None)
    if folder is None and all(path.is_file() for _, path in map(split_label, paths)):
        raise SettingError(
            "a study has no folder of its own; say with --out DIR where the report goes"
        )
    return folder or Path()


def _accuracy(records: Sequence[Record]) -> str | None:
    counts = Counter(
        key for record in records for key in ACCURACIES if any(key in line for line in record.lines)
    )
    return max(ACCURACIES, key=lambda key: counts[key]) if counts else None


def _title(records: Sequence[Record]) -> str:
    return f"Report on {records[0].name}" if len(records) == 1 else f"Report on {len(records)} runs"


def _draw(
    scene: Scene, notes: list[str], only: Sequence[str], folder: Path
) -> list[Made | LeftOut]:
    """Draws and writes the figures; of an earlier report only those stay that are written again."""
    from treegraft.view.report.bars import efficiency, final_accuracy, noise_rate, off_policy_source
    from treegraft.view.report.curves import against_cost, dynamics
    from treegraft.view.report.hybrid import diversity, hybrid, scan
    from treegraft.view.report.style import save, styled

    wanted = [name for name in FIGURES if not only or name in only]
    with styled():
        makers = (dynamics, efficiency, against_cost, final_accuracy)
        made = [
            maker(scene) for maker, name in zip(makers, FIGURES, strict=False) if name in wanted
        ]
        if set(wanted) & set(FIGURES[4:7]):
            scans = scan(scene.groups, notes)
            made += [hybrid(scene, scans)] if FIGURES[4] in wanted else []
            made += (
                [one for one in diversity(scene, scans) if one.name in wanted]
                if set(wanted) & set(FIGURES[5:7])
                else []
            )
        made += [
            maker(scene)
            for maker, name in ((noise_rate, FIGURES[7]), (off_policy_source, FIGURES[8]))
            if name in wanted
        ]
        folder.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            for kind in ("svg", "png", "csv"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
        for one in made:
            if isinstance(one, Made):
                save(one.figure, folder / one.name)
                write_atomically(folder / f"{one.name}.csv", one.table.as_csv())
    return made
