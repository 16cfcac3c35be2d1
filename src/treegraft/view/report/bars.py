"""Bars: what an update costs, where methods ended, and studies of one setting (noise rate,
off-policy source)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treegraft.runs.metrics import meaning
from treegraft.settings.config import settings_with
from treegraft.view.report.bands import last_accuracy, paired, student, values_at, wilson
from treegraft.view.report.groups import EXPERT, Group, show, vary
from treegraft.view.report.pieces import (
    Bar,
    Scene,
    as_percent,
    draw_bars,
    fits_direct,
    how_many,
    label_ends,
)
from treegraft.view.report.records import Record
from treegraft.view.report.shape import Cell, LeftOut, Made, Table, number
from treegraft.view.report.style import legend_above, legend_height, looks, new_figure, printable

EFFICIENCY, FINAL, NOISE, OFF_POLICY = (
    "efficiency",
    "final-accuracy",
    "noise-rate",
    "off-policy-source",
)
_PER_UPDATE = (
    ("time/rollout_s", "rollout time per update (s)"),
    ("time/learn_s", "learning time per update (s)"),
    ("rollout/num_sampled_tokens", "sampled tokens per update"),
    ("rollout/num_tool_calls", "tool calls per update"),
    ("time/cpu_s", "processor time per update (s)"),
)
_RANDOM = "buffer.random_prob"
_BAR = 0.235
"""Inches of a bar."""


# ---------------------------------------------------------------------- efficiency


def per_update(record: Record, key: str) -> float | None:
    """Returns the mean of a cost over a run's updates (0, the state before the first, left out);
    None where it has none."""
    found = {update: value for update, value in values_at(record.lines, key).items() if update > 0}
    if not found:
        return None
    # A study's line sums the updates since the one before it.
    num = len(found) if record.run is not None else max(found)
    return sum(found.values()) / num


def efficiency(scene: Scene) -> Made | LeftOut:
    """Returns what a mean update costs: rollout and learning time, sampled tokens, tool calls."""
    title = "Efficiency: what an update costs"
    rows, cells = list[tuple[Cell, ...]](), dict[tuple[str, str], list[Bar]]()
    for panel in scene.panels:
        for key, _ in _PER_UPDATE:
            bars = _cost_bars(scene, panel, key)
            rows += [
                (panel, key, bar.label, len(bar.dots), bar.value, bar.low, bar.high) for bar in bars
            ]
            if any(bar.value > 0 for bar in bars):
                cells[panel, key] = bars
    keys = [(key, name) for key, name in _PER_UPDATE if any(found == key for _, found in cells)]
    # The processor's time stands in for the two clocks where a study has none.
    keys = [
        (key, name)
        for key, name in keys
        if key != "time/cpu_s" or "time/rollout_s" not in dict(keys)
    ]
    if not keys:
        return LeftOut(
            EFFICIENCY,
            title,
            "no run has recorded times, sampled tokens or tool calls of an update yet.",
        )
    figure = _draw_costs(
        [
            (panel, [(name, cells.get((panel, key), [])) for key, name in keys])
            for panel in scene.panels
        ]
    )
    caption = (
        f"Mean over a run's updates, then over the runs of a group. {how_many(scene.groups)} Dots:"
        " single runs. Seconds are those of the machines that made the runs, other work on them"
        " included."
    )
    return Made(
        EFFICIENCY,
        title,
        caption,
        Table(("panel", "metric", "group", "n", "mean", "low", "high"), rows),
        figure,
    )


def _cost_bars(scene: Scene, panel: str, key: str) -> list[Bar]:
    bars = []
    for group in scene.of_panel(panel):
        values = [
            value for record in group.records if (value := per_update(record, key)) is not None
        ]
        if values:
            bars.append(Bar(group.label, *student(values), values, scene.look(group.label)))
    return bars


def _draw_costs(rows: Sequence[tuple[str, Sequence[tuple[str, list[Bar]]]]]) -> Any:
    """A row for each panel of the scene, or, of one panel with four costs, two rows of two."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    cells = [
        (panel if not place else "", name, bars)
        for panel, costs in rows
        for place, (name, bars) in enumerate(costs)
    ]
    columns = 2 if len(rows) == 1 and len(cells) == 4 else len(rows[0][1])
    num_rows = -(-len(cells) // columns)
    ratios = [
        0.6 + _BAR * max(len(bars) for *_, bars in cells[n * columns : (n + 1) * columns])
        for n in range(num_rows)
    ]
    figure, axes = new_figure(num_rows, columns, sum(ratios))
    axes[0].get_gridspec().set_height_ratios(ratios)
    for place, (one, (title, name, bars)) in enumerate(zip(axes, cells, strict=True)):
        if not bars:
            one.set_axis_off()
            continue
        before = cells[place - 1][2]
        draw_bars(
            one,
            bars,
            shows_names=place % columns == 0
            or [bar.label for bar in bars] != [bar.label for bar in before],
        )
        one.set_title(printable(title, 44))
        one.set_xlabel(name)
        one.xaxis.set_major_locator(MaxNLocator(nbins=5))
        one.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return figure


# ---------------------------------------------------------------------- where methods ended


def final_bar(group: Group, key: str, look: int | None = 0) -> Bar | None:
    """Returns a group's last accuracy with its interval, None where no run was evaluated."""
    found = [
        (record, value)
        for record in group.records
        if (value := last_accuracy(record, key)) is not None
    ]
    if not found:
        return None
    values = [value for _, value in found]
    mean, low, high = student(values)
    if len(values) == 1 and found[0][0].num_eval:
        low, high = wilson(mean, int(found[0][0].num_eval or 0))
    return Bar(group.label, mean, low, high, values, look)


def final_accuracy(scene: Scene) -> Made | LeftOut:
    """Returns bars of the last evaluations and, with a baseline, of the paired differences to it:
    the ablation figure."""
    title = "Held-out accuracy at the end" + (
        f", and the difference to {scene.baseline}" if scene.baseline else ""
    )
    key = scene.accuracy
    if key is None:
        return LeftOut(FINAL, title, "no run was evaluated.")
    cells, rows, notes = (
        list[tuple[str, list[Bar], list[Bar]]](),
        list[tuple[Cell, ...]](),
        list[str](),
    )
    for panel in scene.panels:
        groups = scene.of_panel(panel)
        base = next((group for group in groups if group.label == scene.baseline), None)
        bars, gaps = [], []
        for group in groups:
            look = scene.look(group.label)
            bar = final_bar(group, key, look)
            if bar is None:
                notes.append(f"{group.label}: not evaluated.")
                continue
            gap = (
                paired(group.records, base.records, key)
                if base is not None and group is not base
                else []
            )
            middle = student(gap) if gap else (None, None, None)
            bars.append(bar)
            gaps.append(Bar(group.label, middle[0] or 0.0, middle[1], middle[2], gap, look))
            seeds = " ".join(number(value) for value in bar.dots)
            rows.append(
                (
                    panel,
                    group.label,
                    len(bar.dots),
                    bar.value,
                    bar.low,
                    bar.high,
                    seeds,
                    len(gap),
                    *middle,
                )
            )
            ends = sorted(
                {max(found) for record in group.records if (found := values_at(record.lines, key))}
            )
            notes += (
                [f"{group.label}: its runs end at updates {', '.join(map(str, ends))}."]
                if len(ends) > 1
                else []
            )
        if scene.baseline and base is None:
            notes.append(f"Panel '{panel}' has no group {scene.baseline}, so no differences.")
        cells.append((panel, bars, gaps if base is not None else []))
    caption = (
        f"The last evaluation of each run. {how_many(scene.groups, is_accuracy=True)} Dots: single"
        f" runs; intervals are cut at 0 and 100 %. {key}: {meaning(key)}."
    )
    if scene.baseline:
        caption += (
            f" Right: difference to {scene.baseline} in percentage points at the last update that"
            " both evaluated, paired by seed; n there is the number of shared seeds, in the table."
        )
    columns = (
        "panel",
        "group",
        "n",
        "mean",
        "low",
        "high",
        "runs",
        "pairs",
        "difference",
        "difference low",
        "difference high",
    )
    figure = _draw_final([cell for cell in cells if cell[1]])
    return Made(FINAL, title, caption, Table(columns, rows), figure, notes)


def _draw_final(cells: Sequence[tuple[str, list[Bar], list[Bar]]]) -> Any:
    has_gaps = any(gaps for *_, gaps in cells)
    ratios = [0.75 + _BAR * len(bars) for _, bars, _ in cells]
    figure, axes = new_figure(len(cells), 2 if has_gaps else 1, sum(ratios))
    axes[0].get_gridspec().set_height_ratios(ratios)
    for row, (panel, bars, gaps) in enumerate(cells):
        left = axes[row * (2 if has_gaps else 1)]
        draw_bars(left, bars, shows_names=True, said=lambda value: f"{100 * value:.1f} %", most=1.0)
        left.set_xlim(0, 1.24)
        left.set_xticks([0, 0.25, 0.5, 0.75, 1])
        as_percent(left, "x")
        left.set_title(printable(panel, 44))
        left.set_xlabel("held-out accuracy (%)")
        if has_gaps:
            right = axes[2 * row + 1]
            if not any(gap.dots for gap in gaps):
                right.set_axis_off()
                continue
            _draw_gaps(right, gaps)
    return figure


def _draw_gaps(axes: Any, gaps: Sequence[Bar]) -> None:
    """Differences as points with whiskers about a line at 0: bars would hide their sign."""
    for place, gap in enumerate(gaps):
        if not gap.dots:
            axes.text(
                0,
                place,
                " baseline ",
                va="center",
                ha="center",
                fontsize=7.5,
                color="#555555",
                backgroundcolor="white",
            )
            continue
        look = {"color": "#666666", "marker": "o"} if gap.look is None else looks(gap.look)
        error = (
            None
            if gap.low is None or gap.high is None
            else [[100 * (gap.value - gap.low)], [100 * (gap.high - gap.value)]]
        )
        axes.plot([100 * dot for dot in gap.dots], [place] * len(gap.dots), "o", color="white", markeredgecolor="#777777",
                  markersize=3, markeredgewidth=0.6, linestyle="none")  # fmt: skip
        axes.errorbar(
            100 * gap.value,
            place,
            xerr=error,
            color=look["color"],
            marker=look["marker"],
            capsize=2.5,
            linewidth=1.2,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, -100), min(high, 100))
    axes.set_ylim(len(gaps) - 0.45, -0.55)
    axes.set_yticks(range(len(gaps)), [""] * len(gaps))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("difference (percentage points)")


# ---------------------------------------------------------------------- studies of one setting


def noise_rate(scene: Scene) -> Made | LeftOut:
    """Returns accuracy against the probability that a retrieval gives a random trace (RAPO's noise
    rate)."""
    title = "Noise rate: random traces in place of the nearest"
    key, sets = scene.accuracy, vary(scene.groups, (_RANDOM,))
    if key is None or not sets:
        why = (
            "no run was evaluated." if key is None else f"no two groups differ in {_RANDOM} alone."
        )
        return LeftOut(NOISE, title, why)
    rows, lines = list[tuple[Cell, ...]](), list[tuple[str, list[tuple[float, Bar]]]]()
    for found in sets:
        points = [
            (float(group.records[0].settings.get(_RANDOM, 0.0)), group, final_bar(group, key))
            for group in found
        ]
        kept = sorted(
            ((p, group, bar) for p, group, bar in points if bar is not None), key=lambda one: one[0]
        )
        name = kept[0][1].label + (f" ({kept[0][1].panel})" if len(scene.panels) > 1 else "")
        rows += [
            (name, p, group.label, len(bar.dots), bar.value, bar.low, bar.high)
            for p, group, bar in kept
        ]
        lines.append((name, [(p, bar) for p, _, bar in kept]))
    names = [printable(name, 40) for name, _ in lines]
    is_direct = fits_direct(names)
    figure, (axes,) = new_figure(
        1, 1, 2.4, top=0.0 if is_direct else legend_height(names), width=4.6
    )
    for place, (name, points_of) in enumerate(lines):
        look = looks(place) | (
            {} if len(points_of) > 2 else {"linestyle": (0, (1, 2)), "linewidth": 1}
        )
        means = [bar.value for _, bar in points_of]
        below = [bar.value - (bar.value if bar.low is None else bar.low) for _, bar in points_of]
        above = [(bar.value if bar.high is None else bar.high) - bar.value for _, bar in points_of]
        axes.errorbar(
            [p for p, _ in points_of],
            means,
            yerr=[below, above],
            capsize=3,
            label=printable(name, 40),
            **look,
        )
    axes.set_xlabel("probability that a retrieved step is a random one")
    axes.set_ylabel("held-out accuracy (%)")
    as_percent(axes)
    axes.set_ylim(-0.02, 1.05)
    figure.canvas.draw()
    if is_direct:
        label_ends(
            axes,
            [
                (pts[-1][0], pts[-1][1].value, names[n], looks(n)["color"])
                for n, (_, pts) in enumerate(lines)
            ],
        )
    else:
        legend_above(figure, [axes])
    involved = [group for found in sets for group in found]
    caption = (
        f"Last evaluation of runs that differ in {_RANDOM} alone."
        f" {how_many(involved, is_accuracy=True)} "
    )
    caption += (
        f"Lines join what was measured; between two values nothing was. {key}: {meaning(key)}."
    )
    table = Table(("method", _RANDOM, "group", "n", "mean", "low", "high"), rows)
    return Made(NOISE, title, caption, table, figure)


def source_name(settings: Mapping[str, Any]) -> str:
    """Returns whose steps a run retrieves, in words."""
    path = settings.get("buffer.path")
    flaws = [(name.rpartition(".")[2].removesuffix("_prob"), settings.get(name)) for name in EXPERT]
    said = [f"{name}s {show(value)}" for name, value in flaws if value]
    if path in (None, "expert"):
        return f"expert with {', '.join(said)}" if said else "flawless expert"
    return show(path) + (f" ({', '.join(said)})" if said else "")


def off_policy_source(scene: Scene) -> Made | LeftOut:
    """Returns accuracy by whose steps are retrieved."""
    title = "Off-policy source: whose steps are retrieved"
    key, sets = (
        scene.accuracy,
        [
            found
            for found in vary(scene.groups, settings_with("retrieval_source"))
            if any(_retrieves(group) for group in found)
        ],
    )
    if key is None or not sets:
        why = (
            "no run was evaluated."
            if key is None
            else "no two groups that retrieve differ in their buffer or its expert alone."
        )
        return LeftOut(OFF_POLICY, title, why)
    sources = list(
        dict.fromkeys(source_name(group.records[0].settings) for found in sets for group in found)
    )
    cells, rows = [], list[tuple[Cell, ...]]()
    for found in sets:
        bars = []
        for group in found:
            source = source_name(group.records[0].settings)
            bar = final_bar(group, key, sources.index(source))
            if bar is not None:
                bars.append(Bar(source, bar.value, bar.low, bar.high, bar.dots, bar.look))
                rows.append(
                    (
                        found[0].label,
                        source,
                        group.panel,
                        len(bar.dots),
                        bar.value,
                        bar.low,
                        bar.high,
                    )
                )
        cells.append((found[0].label, bars))
    cells = [cell for cell in cells if cell[1]]
    columns = 1 if len(cells) == 1 else 2
    num_rows = -(-len(cells) // columns)
    figure, axes = new_figure(
        num_rows, columns, num_rows * (0.7 + _BAR * max(len(bars) for _, bars in cells))
    )
    for place, one in enumerate(axes):
        if place >= len(cells):
            one.set_axis_off()
            continue
        draw_bars(
            one,
            cells[place][1],
            shows_names=place % columns == 0,
            said=lambda value: f"{100 * value:.1f} %",
            most=1.0,
        )
        one.set_xlim(0, 1.27)
        one.set_xticks([0, 0.25, 0.5, 0.75, 1])
        as_percent(one, "x")
        one.set_title(printable(cells[place][0], 44))
        one.set_xlabel("held-out accuracy (%)")
    involved = [group for found in sets for group in found]
    caption = (
        "Last evaluation of runs that differ in the off-policy agent alone."
        f" {how_many(involved, is_accuracy=True)}"
    )
    return Made(
        OFF_POLICY,
        title,
        caption,
        Table(("method", "source", "panel", "n", "mean", "low", "high"), rows),
        figure,
    )


def _retrieves(group: Group) -> bool:
    settings = group.records[0].settings
    return "graft" in (settings.get("explore.explorers") or ()) or bool(
        settings.get("study.imitates")
    )
