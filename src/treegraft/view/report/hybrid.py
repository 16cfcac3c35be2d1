"""On-policy against hybrid trajectories: what they earn and cost, how different they are from each
other, and a map of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from treegraft.view.report.bands import Point, point
from treegraft.view.report.diversity import (
    PHASES,
    Clusters,
    Reservoir,
    choose_encoder,
    count,
    embed,
    phase_of,
    project,
    radius_of,
)
from treegraft.view.report.groups import Group
from treegraft.view.report.pieces import (
    Scene,
    draw_band,
    fit_y,
    how_many,
    label_ends,
    whole_updates,
)
from treegraft.view.report.records import Record
from treegraft.view.report.shape import Cell, LeftOut, Made, Table
from treegraft.view.report.style import legend_above, legend_height, looks, new_figure, printable
from treegraft.view.report.trees import MOST_FILES, Seen, read_trajectories

HYBRID, DIVERSITY, MAP = "on-policy-against-hybrid", "semantic-diversity", "trajectory-map"
_KINDS = ("on-policy", "hybrid")
_MEASURES = ("reward", "num_sampled", "num_calls")
_GAP = "reward, hybrid less on-policy of the same tree"
_DRAWN = (
    ("reward", "mean reward"),
    (_GAP, "reward gap within a tree"),
    ("num_sampled", "sampled tokens a trajectory"),
)
"""Tool calls stand in the table only."""
LEAST = 20
"""Trajectories that a set needs for its clusters to be counted."""
_MOST_ROWS, _MOST_MAPS, _MOST_DOTS = 3, 6, 100
_OWN = "hybrid, own steps"
_LOOKS = {"on-policy": looks(4), "hybrid": looks(5), "gap": looks(6)}
"""Other colours than the first groups have."""


@dataclass(slots=True)
class Scan:
    """What one pass over a run's trees found."""

    sums: dict[tuple[str, int], dict[str, list[float]]] = field(default_factory=dict)
    """(kind, update) -> measure -> [sum, count]."""
    samples: dict[tuple[str, int], Reservoir] = field(default_factory=dict)
    """(kind, third of the run) -> trajectories."""
    trees: dict[tuple[int, str], dict[str, list[float]]] = field(default_factory=dict)
    """(update, group id) -> kind -> rewards."""
    num_seen: int = 0

    def add(self, seen: Seen, num_updates: int) -> None:
        """Counts one trajectory; those lost to failures of ours count nowhere."""
        if seen.reward is None:
            return
        self.num_seen += 1
        kind = _KINDS[seen.is_hybrid]
        cell = self.sums.setdefault((kind, seen.update), {})
        self.trees.setdefault((seen.update, seen.group), {}).setdefault(kind, []).append(
            seen.reward
        )
        for measure in _MEASURES:
            total = cell.setdefault(measure, [0.0, 0.0])
            total[0] += float(getattr(seen, measure))
            total[1] += 1
        self.samples.setdefault((kind, phase_of(seen.update, num_updates)), Reservoir()).add(seen)

    def mean(self, kind: str, measure: str) -> dict[int, float]:
        """Returns the mean of a measure by update."""
        return {
            update: cell[measure][0] / cell[measure][1]
            for (k, update), cell in sorted(self.sums.items())
            if k == kind
        }

    def gaps(self) -> dict[int, float]:
        """Returns by update the mean over trees with both kinds of the hybrid trajectories' mean
        reward less the others'."""
        found: dict[int, list[float]] = {}
        for (update, _), rewards in sorted(self.trees.items()):
            if len(rewards) == len(_KINDS):
                found.setdefault(update, []).append(
                    fmean(rewards["hybrid"]) - fmean(rewards["on-policy"])
                )
        return {update: fmean(gaps) for update, gaps in found.items()}

    @property
    def has_hybrid(self) -> bool:
        """Returns whether any trajectory holds a graft."""
        return any(kind == "hybrid" for kind, _ in self.sums)


def scan(groups: Sequence[Group], notes: list[str]) -> dict[str, Scan]:
    """Returns what each run's trees hold, by the run's name; runs without trees are left out. One
    line is in memory at a time."""
    found = {}
    for record in (
        record for group in groups for record in group.records if record.run is not None
    ):
        one, last = Scan(), _last_update(record)
        for seen in read_trajectories(record.run, notes):  # type: ignore[arg-type]
            one.add(seen, last)
        if one.num_seen:
            found[record.name] = one
    return found


def _last_update(record: Record) -> int:
    updates = [file.update for file in record.run.files()] if record.run is not None else []
    return max(updates, default=1)


# ---------------------------------------------------------------------- what they earn and cost


def hybrid(scene: Scene, scans: Mapping[str, Scan]) -> Made | LeftOut:
    """Returns reward, reward within a tree, and sampled tokens of trajectories with a graft and
    without one."""
    title = "On-policy against hybrid trajectories"
    if not scans:
        return LeftOut(HYBRID, title, "no run folder with recorded trees was given.")
    grafted = [
        group
        for group in scene.groups
        if any(scans[r.name].has_hybrid for r in group.records if r.name in scans)
    ]
    if not grafted:
        return LeftOut(HYBRID, title, "no trajectory of these runs holds a retrieved step.")
    drawn = grafted[:_MOST_ROWS]
    figure, axes = new_figure(len(drawn), len(_DRAWN), 2.1 * len(drawn))
    rows, ends = list[tuple[Cell, ...]](), list[tuple[Any, list[tuple[float, float, str, str]]]]()
    for row, group in enumerate(grafted):
        bands = _bands(group, scans)
        for measure, curves in bands.items():
            head = (group.panel, group.label, measure)
            rows += [
                (*head, kind, int(p.x), p.num, p.mean, p.low, p.high)
                for kind, points in curves.items()
                for p in points
            ]
        for column, (measure, name) in enumerate(_DRAWN if row < len(drawn) else ()):
            one, curves = axes[row * len(_DRAWN) + column], bands[measure]
            _draw_kinds(one, curves, name, printable(group.label, 30) if column == 0 else "")
            if column == len(_DRAWN) - 1:
                ends.append(
                    (
                        one,
                        [
                            (c[-1].x, c[-1].mean, kind, _LOOKS[kind]["color"])
                            for kind, c in curves.items()
                            if c
                        ],
                    )
                )
    figure.canvas.draw()
    for one, found in ends:
        label_ends(one, found)
    caption = (
        "Means over the trajectories of an update; hybrid: holds at least one retrieved step,"
        " which counts neither as sampled tokens nor as calls. A trajectory that ends early has"
        " less occasion to be grafted, so the kinds differ in their questions; the gap is between"
        " trajectories of one tree, so of one question (hybrid less on-policy). At most"
        f" {MOST_FILES} updates of a run are read, spread evenly. {how_many(grafted)}"
    )
    notes = (
        [f"For want of room in the table only: {', '.join(g.label for g in grafted[_MOST_ROWS:])}."]
        if len(grafted) > _MOST_ROWS
        else []
    )
    columns = ("panel", "group", "measure", "kind", "update", "n", "mean", "low", "high")
    return Made(HYBRID, title, caption, Table(columns, rows), figure, notes)


def _bands(group: Group, scans: Mapping[str, Scan]) -> dict[str, dict[str, list[Point]]]:
    """Returns for each measure its curves by kind; the gap has one, of both."""
    own = [scans[record.name] for record in group.records if record.name in scans]
    found = {
        measure: {kind: _band([one.mean(kind, measure) for one in own]) for kind in _KINDS}
        for measure in _MEASURES
    }
    return found | {_GAP: {"gap": _band([one.gaps() for one in own])}}


def _band(series: Sequence[Mapping[int, float]]) -> list[Point]:
    """At the updates that all runs with any have."""
    recorded = [one for one in series if one]
    shared = sorted(set.intersection(*(set(one) for one in recorded))) if recorded else []
    return [point(update, [one[update] for one in recorded]) for update in shared]


def _draw_kinds(axes: Any, curves: Mapping[str, Sequence[Point]], name: str, title: str) -> None:
    for kind, points in curves.items():
        if points:
            draw_band(axes, points, kind, _LOOKS[kind])
    fit_y(axes, [one for points in curves.values() for one in points])
    if "gap" in curves:
        axes.axhline(0, color="black", linewidth=0.8)
    axes.set_title(title)
    axes.set_xlabel("update")
    axes.set_ylabel(name)
    whole_updates(axes)


# ---------------------------------------------------------------------- how different they are


@dataclass(frozen=True, slots=True)
class _Set:
    """Vectors of one kind of trajectories of one run in one third of it."""

    group: str
    """Its group's label, by which it gets its colour."""
    label: str
    """The same with the panel, where there are several."""
    kind: str
    phase: int
    record: str
    vectors: Any
    trees: tuple[str, ...]
    """Group id of each trajectory."""

    def first(self, num: int) -> _Set:
        """Returns the set cut to so many trajectories; they are in no order."""
        return replace(self, vectors=self.vectors[:num], trees=self.trees[:num])


def _sets(scene: Scene, scans: Mapping[str, Scan]) -> tuple[list[_Set], str]:
    """Embeds the samples; the second value says with what."""
    encoder, about = choose_encoder(scene.encoder)
    found = []
    for group in scene.groups:
        is_grafted = any(scans[r.name].has_hybrid for r in group.records if r.name in scans)
        label = f"{group.label} ({group.panel})" if group.panel else group.label
        for record in group.records:
            samples = scans[record.name].samples if record.name in scans else {}
            for (kind, phase), reservoir in sorted(
                samples.items(), key=lambda one: (_KINDS.index(one[0][0]), one[0][1])
            ):
                items = reservoir.items
                if len(items) < LEAST:
                    continue
                trees = tuple(seen.group for seen in items)
                shown, vectors = (
                    kind if is_grafted else "all",
                    embed(encoder, [seen.whole for seen in items]),
                )
                made = _Set(group.label, label, shown, phase, record.name, vectors, trees)
                found.append(made)
                if kind == "hybrid":
                    found.append(
                        replace(
                            made, kind=_OWN, vectors=embed(encoder, [seen.own for seen in items])
                        )
                    )
    return found, about


def diversity(scene: Scene, scans: Mapping[str, Scan]) -> list[Made | LeftOut]:
    """Returns the figure of clusters and distances, and the map; both left out where trees are too
    few."""
    titles = ((DIVERSITY, "Semantic diversity of trajectories"), (MAP, "Map of trajectories"))
    if not scans:
        return [
            LeftOut(name, title, "no run folder with recorded trees was given.")
            for name, title in titles
        ]
    sets, about = _sets(scene, scans)
    if not sets:
        why = f"no third of a run has {LEAST} trajectories of a kind in the updates looked at."
        return [LeftOut(name, title, why) for name, title in titles]
    num = min(len(one.vectors) for one in sets)
    sets = [one.first(num) for one in sets]
    return [_clusters(scene, sets, num, about), _map(scene, sets, about)]


def _named(one: _Set) -> str:
    return one.label if one.kind == "all" else f"{one.label}: {one.kind}"


def _clusters(scene: Scene, sets: Sequence[_Set], num: int, about: str) -> Made:
    radius = radius_of([one.vectors for one in sets if one.kind != _OWN])
    found: dict[tuple[str, int], list[Clusters]] = {}
    for one in sets:
        found.setdefault((_named(one), one.phase), []).append(count(one.vectors, one.trees, radius))
    names = {_named(one): _look(scene, one) for one in sets if one.kind != _OWN}
    drawn = {name: look for name, look in names.items() if look is not None}
    labels = [printable(name, 40) for name in drawn]
    figure, axes = new_figure(1, 2, 2.5, top=legend_height(labels))
    for column, (measure, y_label) in enumerate(
        (("clusters", "DBSCAN clusters"), ("within", "mean cosine distance within a task"))
    ):
        seen = [_phases(found, name, measure) for name in drawn]
        for number, (label, look, points) in enumerate(
            zip(labels, drawn.values(), seen, strict=True)
        ):
            _draw_phases(axes[column], points, label, look, 0.06 * (number - (len(labels) - 1) / 2))
        fit_y(axes[column], [one for points in seen for one in points])
        axes[column].set_xticks(range(len(PHASES)), PHASES)
        axes[column].set_xlim(-0.25, len(PHASES) - 0.75)
        axes[column].set_ylabel(y_label)
        axes[column].set_xlabel("part of the run's updates")
    legend_above(figure, axes[:1])
    rows: list[tuple[Cell, ...]] = []
    for (name, phase), several in found.items():
        for measure in ("clusters", "noise", "distance", "within"):
            mean = _point(several, phase, measure)
            if mean is not None:
                rows.append(
                    (name, PHASES[phase], measure, mean.num, num, mean.mean, mean.low, mean.high)
                )
    caption = (
        f"{num} trajectories of each kind, part and run, drawn at random from at most {MOST_FILES}"
        " updates of a run (more points make more clusters; other questions do too). Embedded"
        f" without the question, with {about}. Left: DBSCAN on cosine distances, radius"
        f" {radius:.3f} (the median distance to the second nearest), at least 3 in a cluster."
        " Right: two trajectories of one tree. In the table also: noise, the share in no cluster;"
        f" distance, of any two; '{_OWN}', the hybrid ones without their retrieved steps."
        f" {how_many(scene.groups)}"
    )
    left = [name for name in names if name not in drawn]
    notes = [f"In the table only: {', '.join(left)}."] if left else []
    columns = ("set", "part", "measure", "n", "trajectories", "mean", "low", "high")
    return Made(
        DIVERSITY,
        "Semantic diversity of trajectories",
        caption,
        Table(columns, rows),
        figure,
        notes,
    )


def _look(scene: Scene, one: _Set) -> dict[str, Any] | None:
    """The group's colour and marker; hybrid trajectories dotted and hollow beside the on-policy
    ones. None: it has no colour."""
    number = scene.look(one.group)
    if number is None:
        return None
    return looks(number) | (
        {"linestyle": (0, (1.2, 1.2)), "markerfacecolor": "white"} if one.kind == "hybrid" else {}
    )


def _phases(
    found: Mapping[tuple[str, int], Sequence[Clusters]], name: str, measure: str
) -> list[Point]:
    points = [_point(found.get((name, phase), ()), phase, measure) for phase in range(len(PHASES))]
    return [one for one in points if one is not None]


def _draw_phases(
    axes: Any, points: Sequence[Point], label: str, look: Mapping[str, Any], shift: float
) -> None:
    """Draws means with whiskers, moved aside so that those of several sets do not hide each
    other."""
    below = [0.0 if one.low is None else one.mean - one.low for one in points]
    above = [0.0 if one.high is None else one.high - one.mean for one in points]
    error = [below, above] if any(above) else None
    places = [one.x + shift for one in points]
    axes.errorbar(
        places,
        [one.mean for one in points],
        yerr=error,
        label=label,
        elinewidth=0.8,
        capsize=2,
        **look,
    )


def _point(several: Sequence[Clusters], phase: int, measure: str) -> Point | None:
    values = [float(value) for one in several if (value := getattr(one, measure)) is not None]
    return point(phase, values) if values else None


# ---------------------------------------------------------------------- the map


def _map(scene: Scene, sets: Sequence[_Set], about: str) -> Made | LeftOut:
    """One panel for each kind, all on the same axes, the others in grey behind."""
    title = "Map of trajectories"
    last: dict[str, _Set] = {}
    for one in sets:
        # The first run of a group stands for it: runs of one group on the same axes would hide each
        # other.
        if one.kind != _OWN and (_named(one) not in last or last[_named(one)].record == one.record):
            last[_named(one)] = one.first(_MOST_DOTS)
    places, shares = project({name: one.vectors for name, one in last.items()})
    if shares == (0.0, 0.0):
        return LeftOut(
            MAP, title, "all trajectories looked at are alike, so there is nothing to spread."
        )
    looked = [(name, look) for name, one in last.items() if (look := _look(scene, one)) is not None]
    figure = _draw_map(looked[:_MOST_MAPS], places, shares)
    num = len(next(iter(places.values())))
    caption = (
        f"First two principal components of the embeddings ({about}; the question left out) of"
        f" {num} trajectories of each kind, from the last part of a run and the first run of a"
        " group (see the table). Coloured: the kind named above; grey: all others. Components are"
        " of all panels together; in brackets their share of the variance."
    )
    rows = [
        (name, PHASES[one.phase], one.record, float(x), float(y))
        for name, one in last.items()
        for x, y in places[name]
    ]
    left = [name for name in last if name not in dict(looked[:_MOST_MAPS])]
    notes = [f"In the table only: {', '.join(left)}."] if left else []
    return Made(
        MAP,
        title,
        caption,
        Table(("set", "part", "run", "component 1", "component 2"), rows),
        figure,
        notes,
    )


def _draw_map(
    looked: Sequence[tuple[str, Mapping[str, Any]]],
    places: Mapping[str, Any],
    shares: tuple[float, float],
) -> Any:
    from matplotlib.ticker import MaxNLocator

    columns = len(looked) if len(looked) <= 4 else 3
    rows = -(-len(looked) // columns)
    figure, axes = new_figure(rows, columns, {1: 3.4, 2: 3.2, 3: 2.35, 4: 2.05}[columns] * rows)
    everything = np.concatenate(list(places.values()))
    for one in axes[len(looked) :]:
        one.set_axis_off()
    for number, (one, (name, look)) in enumerate(zip(axes, looked, strict=False)):
        dots = {
            "marker": look["marker"],
            "color": look["color"],
            "markerfacecolor": look.get("markerfacecolor", look["color"]),
        }
        one.plot(
            everything[:, 0],
            everything[:, 1],
            ".",
            color="#cccccc",
            markersize=2.5,
            linestyle="none",
            rasterized=True,
        )
        one.plot(
            places[name][:, 0],
            places[name][:, 1],
            markersize=3,
            alpha=0.75,
            linestyle="none",
            markeredgewidth=0.6,
            **dots,
        )
        one.set_title(printable(name, 26 if columns > 2 else 44))
        one.set_xlabel(f"1st component ({100 * shares[0]:.0f} %)")
        one.set_ylabel(f"2nd component ({100 * shares[1]:.0f} %)" if number % columns == 0 else "")
        one.set_aspect("equal", adjustable="datalim")
        for axis in (one.xaxis, one.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=4))
    return figure
