"""The papers' figures and tables by name, drawn from the lines of a study."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from treegraft.extras.lab.report.command import Report, write_report
from treegraft.extras.lab.study.results import CALLS, SECONDS, TOKENS, Line

PER_UPDATE = (
    ("time/rollout_s", "rollout s"),
    ("time/learn_s", "learning s"),
    (SECONDS, "CPU s"),
    (CALLS, "calls"),
    (TOKENS, "tokens"),
)
"""What an update costs, by the metric, with its column."""


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
    "rapo-4": PaperFigure("RAPO, figure 4: diversity of rollouts", "diversity"),
    "rapo-ablations": PaperFigure("RAPO, tables 3 to 5: ablations", "final-accuracy"),
    "rapo-8": PaperFigure("RAPO, figure 8: m, a and N_hybrid", "sweep"),
    "rapo-10": PaperFigure("RAPO, figure 10: entropy and tokens", "entropy-and-tokens"),
    "rapo-11": PaperFigure("RAPO, figure 11: efficiency in detail", "efficiency", has_costs=True),
    "arpo-7": PaperFigure("ARPO, figure 7: tool calls", "accuracy-against-cost", has_costs=True),
    "arpo-8": PaperFigure("ARPO, figure 8: beta, N and M", "sweep"),
}
"""By the paper and the number."""


def draw(name: str, lines: Sequence[Line], out: Path, baseline: str | None) -> Report:
    """Writes a figure of `PAPERS` from lines of a study, as SVG, PNG and CSV below out/figures.

    Args:
        lines: finished runs.
        out: a folder, made where it is missing.
        baseline: the arm that others are compared with, where its lines are there.

    Raises:
        SettingError: matplotlib is missing.
    """
    arms = {line["method"] for line in lines}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_text("".join(json.dumps(one, default=str) + "\n" for one in lines), "utf-8")
        return write_report(
            [str(path)],
            out=out,
            baseline=baseline if baseline in arms else None,
            only=[PAPERS[name].drawn],
        )


def costs(lines: Sequence[Line], baseline: str | None) -> list[tuple[str, ...]]:
    """Returns what an update of each arm costs on average, over its runs in all worlds, and how
    often that is the baseline's: a row of headings, then one for each arm; "" where it was not
    recorded."""
    arms = list(dict.fromkeys(str(line["method"]) for line in lines))
    found = {
        arm: {key: _mean_of(arm, key, lines) for key, _ in PER_UPDATE}
        for arm in sorted(arms, key=lambda arm: arm != baseline)
    }
    rows = [("arm", *(title for _, title in PER_UPDATE))]
    for arm, own in found.items():
        cells = []
        for key, _ in PER_UPDATE:
            value, base = own[key], found.get(baseline or "", {}).get(key)
            ratio = f" ({value / base:.2f} x)" if value is not None and base else ""
            cells.append("" if value is None else f"{_shown(value)}{ratio}")
        rows.append((arm, *cells))
    return rows


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _mean_of(arm: str, key: str, lines: Sequence[Line]) -> float | None:
    values = [_per_update(line, key) for line in lines if line["method"] == arm]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _per_update(line: Line, key: str) -> float | None:
    column = [one for one in (line.get("updates") or {}).get(key, ()) if one is not None]
    if column:
        return fmean(column)
    last = line["curve"][-1]
    return last[key] / last["update"] if key in last and last["update"] > 0 else None
