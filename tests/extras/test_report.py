"""Reports: arithmetic of bands, grouping, what is read of runs and trees, figures' tables by hand,
escaping, missing data."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.viewed import as_lines, grown_tree, write_run

pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed: pip install 'treegraft[reports]'"
)

from tests.support.error_codes import raises_code

from treegraft.core.types import Tree
from treegraft.extras.lab.report.bands import accuracy_band, band, paired, spent, student, wilson
from treegraft.extras.lab.report.command import FIGURES, write_report
from treegraft.extras.lab.report.curves import cost_curve
from treegraft.extras.lab.report.figure import Table, number
from treegraft.extras.lab.report.groups import Group, group, pooled_differences, short, show, vary
from treegraft.extras.lab.report.hybrid import TreeMeans
from treegraft.extras.lab.report.page import group_notes, inline
from treegraft.extras.lab.report.records import (
    Record,
    read_records,
    read_run,
    split_label,
)
from treegraft.extras.lab.report.trees import read_updates, spread
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees
from treegraft.settings.recipe import flatten
from treegraft.view.metrics import clean_lines
from treegraft.view.runs import RunReader

ACCURACY = "eval/accuracy_sampled"
CALLS = "rollout/num_tool_calls"


def record(
    name: str, seed: int = 0, lines: list[dict[str, float]] | None = None, **more: Any
) -> Record:
    """Returns a record with settings that differ as given."""
    return Record(name=name, seed=seed, lines=lines or [], **more)


def accuracies(*values: float) -> list[dict[str, float]]:
    """Returns lines with an evaluation at updates 0, 10, 20, ..."""
    return [{"update": 10.0 * n, ACCURACY: value} for n, value in enumerate(values)]


def made_run(
    path: Path,
    settings: Mapping[str, Any],
    lines: list[dict[str, Any]],
    trees: Mapping[int, list[Tree]] | None = None,
) -> Path:
    """Writes a run folder with these settings, lines of metrics and trees by update."""
    folder = RunFolder.create(path, json.dumps({"run": {"num_updates": 4}} | dict(settings)))
    folder.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for update, grown in (trees or {}).items():
        write_trees(folder.trees_path(update), grown)
    return path


def table(folder: Path, name: str) -> list[dict[str, str]]:
    """Returns the CSV beside a figure."""
    with (folder / "figures" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------- bands


def test_students_interval_by_hand() -> None:
    # mean 2, s = 1, n = 3; t(2, 0.975) = 4.3027 (any table), 4.3027 / sqrt(3) = 2.4841.
    mean, low, high = student([1.0, 2.0, 3.0])
    assert (mean, low, high) == (
        pytest.approx(2),
        pytest.approx(2 - 2.4841, abs=1e-4),
        pytest.approx(2 + 2.4841, abs=1e-4),
    )
    assert student([0.7]) == (0.7, None, None)
    assert student([0.5, 0.5]) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no values"):
        student([])


def test_wilsons_interval_by_hand() -> None:
    # 5 of 10: centre 1/2; z = 1.95996; half = z sqrt(1/40 + z²/400) / (1 + z²/10) = 0.2634.
    assert wilson(0.5, 10) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    # None of n: from 0 to z² / (n + z²).
    low, high = wilson(0.0, 20)
    assert low == 0 and high == pytest.approx(3.8415 / 23.8415, abs=1e-4)


@given(st.integers(0, 400), st.integers(1, 400))
def test_wilsons_interval_holds_its_share_and_mirrors(right: int, num: int) -> None:
    share = min(right, num) / num
    low, high = wilson(share, num)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    mirrored = wilson(1 - share, num)
    assert (1 - mirrored[1], 1 - mirrored[0]) == (
        pytest.approx(low, abs=1e-9),
        pytest.approx(high, abs=1e-9),
    )


def test_a_band_goes_as_far_as_all_its_runs() -> None:
    key = "reward/mean"
    first = record(
        "a", lines=[{"update": 1.0, key: 0.0}, {"update": 2.0, key: 1.0}, {"update": 3.0, key: 1.0}]
    )
    second = record("b", lines=[{"update": 1.0, key: 1.0}, {"update": 2.0, key: 1.0}])
    never = record("c", lines=[{"update": 1.0, "other": 1.0}])
    points = band([first, second, never], key)
    assert [(point.x, point.mean, point.num) for point in points] == [(1, 0.5, 2), (2, 1.0, 2)]
    # Two runs: s = 0.7071, t(1) = 12.706, so half = 12.706 * 0.7071 / 1.4142 = 6.353.
    assert points[0].high == pytest.approx(0.5 + 6.353, abs=1e-3)


def test_one_run_has_wilsons_band_and_several_have_students() -> None:
    one = record("a", lines=accuracies(0.5), num_eval=10)
    assert accuracy_band([one], ACCURACY)[0].low == pytest.approx(0.2366, abs=1e-4)
    assert accuracy_band([record("a", lines=accuracies(0.5))], ACCURACY)[0].low is None
    two = accuracy_band([one, record("b", lines=accuracies(0.5), num_eval=10)], ACCURACY)[0]
    assert (two.low, two.high, two.num) == (0.5, 0.5, 2)


def test_costs_add_up() -> None:
    lines = [{"update": 0.0}, {"update": 1.0, CALLS: 10.0}, {"update": 2.0, CALLS: 5.0}]
    assert spent(lines, CALLS) == {0: 0.0, 1: 10.0, 2: 15.0}
    both = [
        record(
            "a", 0, [{"update": 0.0, ACCURACY: 0.0}, {"update": 1.0, CALLS: 10.0, ACCURACY: 0.5}]
        ),
        record(
            "b", 1, [{"update": 0.0, ACCURACY: 0.0}, {"update": 1.0, CALLS: 30.0, ACCURACY: 0.5}]
        ),
    ]
    curve = cost_curve(Group("g", "", tuple(both)), CALLS, ACCURACY)
    assert [(x, point.mean) for x, point in curve] == [(0.0, 0.0), (20.0, 0.5)]


def test_differences_are_paired_by_seed_at_the_last_shared_update() -> None:
    base = [record("a", 0, accuracies(0.1, 0.2)), record("b", 1, accuracies(0.1, 0.4))]
    own = [
        record("c", 1, accuracies(0.1, 0.5, 0.9)),
        record("d", 0, accuracies(0.3)),
        record("e", 7, accuracies(1.0)),
    ]
    assert paired(own, base, ACCURACY) == [pytest.approx(0.1), pytest.approx(0.2)]


# ---------------------------------------------------------------------- reading


def test_a_resumed_or_broken_record_is_read_as_far_as_it_goes() -> None:
    raw = [
        {"update": 2, "a": 1.0},
        {"update": 1, "a": 0.5},
        {"update": 2, "a": 3.0},
        {"no": "update"},
        {"update": 3, "a": "nan"},
    ]
    lines, notes = clean_lines(raw)
    assert lines == [{"update": 1.0, "a": 0.5}, {"update": 2.0, "a": 3.0}, {"update": 3.0}]
    assert [note.split(" ")[0] for note in notes] == ["a", "1", "left"]
    assert "a of update 3 is nan" in notes[2]


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    path = made_run(tmp_path / "live", {}, [{"update": 0}, {"update": 1, "reward/mean": 0.5}])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "rewa')
    found = read_run(path)
    assert [line["update"] for line in found.lines] == [
        0,
        1,
    ] and found.state == "running at update 1 of 4"


def test_calls_of_a_run_include_those_that_an_environment_repeats(tmp_path: Path) -> None:
    lines = [{"update": 1, CALLS: 5, "environment/num_replayed_calls": 4}, {"update": 2, CALLS: 7}]
    path = made_run(tmp_path / "own", {"run": {"num_updates": 10, "max_calls": 16}}, lines)
    found = read_run(path)
    assert [line[CALLS] for line in found.lines] == [9, 7] and found.state == "finished"


def test_settings_are_flat() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [1]}, "e": {}}) == {"a.b.c": 1, "a.d": [1], "e": {}}


def test_labels_stand_before_paths(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert split_label(str(odd)) == (None, odd)
    assert split_label("GRPO=runs/a=b") == ("GRPO", Path("runs/a=b"))
    assert split_label("=runs/a")[0] is None


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with raises_code("not-a-run"):
        read_records([str(tmp_path / "empty")])
    with raises_code("not-a-run"):
        read_records([str(tmp_path / "nowhere")])
    run = made_run(tmp_path / "run", {}, [{"update": 1, "reward/mean": 1.0}])
    with raises_code("two-labels"):
        read_records([f"A={run}", f"B={run}"])
    assert len(read_records([str(run), str(run)])) == 1
    (run / "config.json").write_text("{")
    with raises_code("run-settings-unreadable"):
        read_records([str(run)])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"method": "a"}',
        '{"method": "a", "curve": [{"update": 0}]}',
        '{"method":1,"curve":{}}',
    ],
)
def test_a_damaged_study_names_its_line(tmp_path: Path, line: str) -> None:
    study = tmp_path / "study.jsonl"
    whole = '{"method": "a\u2028b", "seed": 0, "curve": [{"update": 0, "accuracy": 0.5}]}'
    study.write_text(f"{whole}\n{line}\n", encoding="utf-8")
    if line == '{"method":1,"curve":{}}':
        # A curve without a point is a run that was never evaluated.
        assert len(read_records([str(study)])) == 2
    else:
        with raises_code("study-line-invalid"):
            read_records([str(study)])


def test_a_studys_costs_are_sums_so_far(tmp_path: Path) -> None:
    study = tmp_path / "study.jsonl"
    points = [
        {"update": 0, "accuracy": 0.1, CALLS: 0.0},
        {"update": 5, "accuracy": 0.2, CALLS: 50.0},
        {"update": 10, "accuracy": 0.4, CALLS: 90.0},
    ]
    study.write_text(
        json.dumps(
            {
                "world": "w",
                "method": "m",
                "seed": 3,
                "num_eval": 40,
                "settings": {"a.b": 1},
                "curve": points,
            }
        )
    )
    (found,) = read_records([str(study)])
    assert [line.get(CALLS) for line in found.lines] == [0.0, 50.0, 40.0]
    assert (found.label, found.world, found.seed, found.num_eval, found.settings) == (
        "m",
        "w",
        3,
        40,
        {"a.b": 1},
    )
    assert read_records([f"other={study}"])[0].label == "other"


# ---------------------------------------------------------------------- groups


def test_seeds_are_one_group_and_settings_name_the_others() -> None:
    base = {"learn.lr": 0.1, "explore.explorers": ["independent"], "loss.clip_low": 0.2}
    records = [
        record(f"r{n}", n % 2, settings=base | more)
        for n, more in enumerate(({}, {}, {"learn.lr": 0.2}, {"loss.clip_low": None}))
    ]
    found = group(records)
    assert [(one.label, len(one.records)) for one in found] == [("r", 2), ("r2", 1), ("r3", 1)]
    # Runs that were not named have names that differ in seed and time alone.
    unnamed = [replace(one, name=f"demo-seed0-20260101-00000{n}") for n, one in enumerate(records)]
    found = group(unnamed)
    assert [(one.label, len(one.records)) for one in found] == [
        ("common settings", 2),
        ("lr = 0.2", 1),
        ("clip_low = none", 1),
    ]
    both = base | {"explore.explorers": ["entropy", "graft"]}
    two = [record("a", settings=base), record("b", settings=both)]
    assert [one.label for one in group(two)] == ["a", "b"]
    two = [replace(one, name="a") for one in two]
    assert [one.label for one in group(two)] == [
        "explorers = independent",
        "explorers = entropy + graft",
    ]
    assert [one.label for one in group(records[:1])] == ["r0"]
    assert [one.label for one in group(records[:2])] == ["r"]
    seeds = [record(f"rapo-seed{n}", n, settings=base) for n in (1, 2)]
    assert [one.label for one in group(seeds)] == ["rapo"]
    assert [one.label for one in group([replace(seeds[0], name=n) for n in "xy"])] == [
        "equal settings"
    ]


def test_other_tasks_are_other_panels_but_the_expert_is_not() -> None:
    name = "tasks.search_world.hops"
    records = [record("a", settings={name: [1, 2]}), record("b", settings={name: [3]})]
    assert [(one.panel, one.label) for one in group(records)] == [
        ("hops = 1 + 2", "a"),
        ("hops = 3", "b"),
    ]
    flawed = "tasks.search_world.error_prob"
    records = [record("a", settings={flawed: 0.0}), record("b", settings={flawed: 0.3})]
    assert [(one.panel, one.label) for one in group(records)] == [
        ("", "a"),
        ("", "b"),
    ]
    alike = [replace(one, name="run") for one in records]
    assert [one.label for one in group(alike)] == ["error_prob = 0", "error_prob = 0.3"]


def test_a_label_pools_and_says_so() -> None:
    records = [
        record("a", 0, label="mine", settings={"model.path": "x"}),
        record("b", 0, label="mine", settings={"model.path": "y"}),
    ]
    (one,) = group(records)
    assert one.label == "mine" and pooled_differences(one) == ["model.path"]
    notes = group_notes([one])
    assert any("differ in model.path" in note for note in notes) and any(
        "seed 0 comes more than once" in note for note in notes
    )


def test_names_and_values_in_labels() -> None:
    assert short("learn.lr", ["learn.lr", "loss.clip"]) == "lr"
    assert short("learn.lr", ["learn.lr", "warmup.lr"]) == "learn.lr"
    assert [show(value) for value in (True, 0.25, ["a", "b"], None, "/x/y.sqlite", "expert")] == [
        "yes",
        "0.25",
        "a + b",
        "none",
        "y.sqlite",
        "expert",
    ]
    long = group([record("n", settings={"a": n * 80}) for n in "xy"])
    assert all(len(one.label) <= 60 for one in long)
    assert [len(one.label) for one in group([record("n" * 80)])] == [60]
    alike = group([record("n", settings={"a": "x" * 80 + n}) for n in "xy"])
    assert len({one.label for one in alike}) == 2


def test_sets_that_differ_in_one_thing_alone() -> None:
    def one(label: str, **settings: Any) -> Group:
        return Group(
            label,
            "",
            (
                record(
                    label,
                    settings={name.replace("__", "."): value for name, value in settings.items()},
                ),
            ),
        )

    groups = [
        one("a", p=0.0, q=1),
        one("b", p=0.5, q=1),
        one("c", p=1.0, q=2),
        one("d", p=1.0, q=1),
        one("e", q=1),
    ]
    assert [[g.label for g in found] for found in vary(groups, ("p",))] == [["a", "b", "d"]]
    warmed = [
        Group(
            label,
            "",
            tuple(
                record(f"{label}{n}", n, settings={"p": p, "model.path": f"warmup-{n}"})
                for n in range(2)
            ),
        )
        for label, p in (("a", 0.0), ("b", 1.0))
    ]
    assert [[g.label for g in found] for found in vary(warmed, ("p",))] == [["a", "b"]]
    assert vary(warmed, ("model.path",)) == []


# ---------------------------------------------------------------------- trees


def test_trajectories_of_a_tree_by_hand(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", {}, [], {3: [grown_tree(3, "t/1", note="hm")]})
    notes: list[str] = []
    ((update, tree),) = read_updates(RunReader(path), notes)
    means = TreeMeans()
    means.add(update, tree)
    # Paths: ssstt rrrr ss; ssstt sss; ssstt sstt s; ssssssss. The graft's call is not the policy's.
    assert means.values == {
        ("reward", "hybrid"): {3: [1.0]},
        ("num_sampled", "hybrid"): {3: [5]},
        ("num_calls", "hybrid"): {3: [1]},
        ("reward", "on-policy"): {3: [0.0, 0.0, 0.0]},
        ("num_sampled", "on-policy"): {3: [6, 6, 8]},
        ("num_calls", "on-policy"): {3: [1, 2, 0]},
        ("reward, hybrid less on-policy of the same tree", "gap"): {3: [1.0]},
    }
    assert means.has_hybrid and not notes


def test_damaged_trees_are_left_out_and_said(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", {}, [], {1: [grown_tree(1, "t/1")]})
    with as_lines(path).open("a") as file:
        file.write('{"group_id":"1/t/2"}\nnonsense\n')
    notes: list[str] = []
    assert len(list(read_updates(RunReader(path), notes))) == 1
    assert notes == ["run: update-000001 has 2 lines that are no tree; they were left out"]


@given(st.integers(0, 3000), st.integers(1, 40))
def test_updates_are_looked_at_evenly(total: int, most: int) -> None:
    found = spread(total, most)
    assert (
        len(found) == min(total, most)
        and found == sorted(set(found))
        and all(0 <= n < total for n in found)
    )
    assert not found or (found[-1] == total - 1 and (most == 1 < total or found[0] == 0))


def test_numbers_as_they_are_shown() -> None:
    assert [number(n) for n in (None, 3.0, 12345.6, 0.12345, 1234567)] == [
        "-",
        "3",
        "12,346",
        "0.1235",
        "1,234,567",
    ]


def test_tables_hold_no_formulas() -> None:
    assert Table(("a", "b"), [("=1+1", None), ("-x", 2.5)]).as_csv() == "a,b\n'=1+1,\n'-x,2.5\n"


# ---------------------------------------------------------------------- whole reports


def test_the_numbers_of_a_report_by_hand(tmp_path: Path) -> None:
    def lines(shift: float) -> list[dict[str, Any]]:
        first = {"update": 0, "eval/accuracy": 0.25}
        second = {
            "update": 1,
            "reward/mean": 0.2 + shift,
            "learn/entropy": 0.5,
            CALLS: 10,
            "time/rollout_s": 2.0,
            "time/learn_s": 1.0,
        }
        third = {
            "update": 2,
            "reward/mean": 0.4 + shift,
            "learn/entropy": 0.3,
            CALLS: 20,
            "time/rollout_s": 4.0,
            "eval/accuracy": 0.5 + shift,
        }
        return [first, second, third]

    grown = {1: [grown_tree(1, "t/1")], 2: [grown_tree(2, "t/1")]}
    runs = [
        made_run(tmp_path / f"a{n}", {"run": {"seed": n, "num_updates": 2}}, lines(0.2 * n), grown)
        for n in range(2)
    ]
    other = {"run": {"seed": 0, "num_updates": 2}, "explore": {"explorers": ["graft"]}}
    runs.append(made_run(tmp_path / "b0", other, lines(0.0)))
    written = write_report(
        [f"A={runs[0]}", f"A={runs[1]}", f"B={runs[2]}"], out=tmp_path / "out", baseline="B"
    )
    assert written.page == tmp_path / "out" / "report.html" and set(written.figures) <= set(FIGURES)

    rows = table(tmp_path / "out", "training-dynamics")
    reward = [row for row in rows if row["metric"] == "reward/mean" and row["group"] == "A"]
    # 0.2 and 0.4, then 0.4 and 0.6: s = 0.1414, half = 12.7062 * 0.1414 / sqrt(2) = 1.27062.
    assert [(row["update"], row["n"], float(row["mean"])) for row in reward] == [
        ("1", "2", pytest.approx(0.3)),
        ("2", "2", pytest.approx(0.5)),
    ]
    assert float(reward[0]["low"]) == pytest.approx(0.3 - 1.27062, abs=1e-4)

    against = [
        row for row in table(tmp_path / "out", "accuracy-against-cost") if row["group"] == "B"
    ]
    assert [
        (float(row["spent"]), float(row["accuracy"])) for row in against if row["cost"] == CALLS
    ] == [(0.0, 0.25), (30.0, 0.5)]

    final = {row["group"]: row for row in table(tmp_path / "out", "final-accuracy")}
    # A ends at 0.5 and 0.7; only its seed 0 has a partner, with the same accuracy.
    assert (
        float(final["A"]["mean"]) == pytest.approx(0.6)
        and final["A"]["pairs"] == "1"
        and float(final["A"]["difference"]) == 0.0
    )
    assert final["B"]["pairs"] == "0" and final["B"]["difference"] == ""

    page = written.page.read_text()
    # A: 0.5 and 0.7, with half = 12.7062 * 0.1414 / sqrt(2) = 1.27, cut at 0 and 1; 30 calls each.
    # B: one run of 0.5 without known tasks.
    assert "<td>60.0 % [0.0, 100.0]</td>" in page and "<td>50.0 %</td>" in page
    assert '<td class="n">30</td>' in page
    # What is not the same in all runs, by group; seeds and names are not settings of a method.
    assert "<tr><td>explore.explorers</td><td>-</td><td>graft</td></tr>" in page
    assert "run.seed</td>" not in page

    hybrid = [
        row for row in table(tmp_path / "out", "on-policy-against-hybrid") if row["update"] == "1"
    ]
    # Of each tree one hybrid leaf with reward 1 and 5 sampled tokens; three others with reward 0
    # and 6, 6, 8 tokens.
    assert {(row["measure"], row["kind"]): float(row["mean"]) for row in hybrid} == {
        ("reward, hybrid less on-policy of the same tree", "gap"): 1.0,
        ("reward", "hybrid"): 1.0,
        ("reward", "on-policy"): 0.0,
        ("num_sampled", "hybrid"): 5.0,
        ("num_sampled", "on-policy"): pytest.approx(20 / 3),
        ("num_calls", "hybrid"): 1.0,
        ("num_calls", "on-policy"): 1.0,
    }
    assert written.left_out == (
        "no diversity: no run has recorded diversity.",
        "no sweep: no two groups differ in one numeric setting, or in the off-policy source,"
        " alone.",
    )


def test_a_report_lies_in_the_run_and_is_the_same_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    first = write_report([str(run)])
    assert first.page == run / "report.html"
    files = {path.name: path.read_bytes() for path in (run / "figures").iterdir()} | {
        "page": first.page.read_bytes()
    }
    assert len(files) == 3 * len(first.figures) + 1
    write_report([str(run)])
    assert files == {path.name: path.read_bytes() for path in (run / "figures").iterdir()} | {
        "page": first.page.read_bytes()
    }
    assert any("first stopped at" in note or "first running at" in note for note in first.notes)


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    out = tmp_path / "out"
    write_report([str(run)], out=out)
    own = out / "figures" / "mine.svg"
    own.write_text("mine")
    bare = made_run(tmp_path / "bare", {}, [{"update": 1, "reward/mean": 1.0}])
    written = write_report([str(bare)], out=out)
    assert {path.stem for path in (out / "figures").iterdir()} == {*written.figures, "mine"}
    only = write_report([str(run)], out=out, only=["final-accuracy"])
    assert (
        only.figures == ("final-accuracy",) and (out / "figures" / "training-dynamics.svg").exists()
    )


def test_what_the_data_cannot_give_is_left_out_with_a_line(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {}, [{"update": 1, "reward/mean": 1.0}])
    written = write_report([str(run)])
    assert written.figures == ("training-dynamics",)
    left_out = [line.partition(":")[0].removeprefix("no ") for line in written.left_out]
    assert left_out == list(FIGURES)[1:]
    assert any("No held-out accuracy" in note for note in written.notes)
    page = written.page.read_text()
    assert page.count("<svg") == 1 and "no run was evaluated" in page


def test_runs_without_metrics_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {}, [])
    with raises_code("no-metrics-yet", match="recorded no metrics yet"):
        write_report([str(run)])
    assert not (run / "report.html").exists() and not (run / "figures").exists()


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", {}, [{"update": 1, "reward/mean": 1.0}])
    with raises_code("unknown-group"):
        write_report([str(run)], baseline="runn")
    with raises_code("unknown-figure"):
        write_report([str(run)], only=["final-acuracy"])
    (tmp_path / "file").write_text("")
    with raises_code("report-folder-taken"):
        write_report([str(run)], out=tmp_path / "file")
    study = tmp_path / "study.jsonl"
    study.write_text('{"method": "a", "seed": 0, "curve": [{"update": 0, "accuracy": 0.5}]}\n')
    with raises_code("report-without-folder"):
        write_report([str(study)])


def study_line(method: str, seed: int, end: float, world: str = "w", **settings: Any) -> str:
    curve = [
        {"update": 0, "accuracy": 0.2, CALLS: 0.0},
        {"update": 10, "accuracy": end, CALLS: 100.0},
    ]
    named = {"explore.explorers": ["graft"]} | {
        name.replace("__", "."): value for name, value in settings.items()
    }
    return (
        json.dumps(
            {
                "world": world,
                "method": method,
                "seed": seed,
                "num_eval": 100,
                "settings": named,
                "curve": curve,
            }
        )
        + "\n"
    )


def test_sweeps_of_a_study(tmp_path: Path) -> None:
    error = "tasks.search_world.error_prob"
    lines = [
        study_line("near", seed, 0.8 + 0.02 * seed, **{"buffer__random_prob": 0.0, error: 0.0})
        for seed in range(2)
    ]
    lines += [study_line("random", 0, 0.3, **{"buffer__random_prob": 1.0, error: 0.0})]
    lines += [study_line("half", 0, 0.5, **{"buffer__random_prob": 0.5, error: 0.0})]
    lines += [
        study_line("near", seed, 0.6, "flawed", **{"buffer__random_prob": 0.0, error: 0.3})
        for seed in range(2)
    ]
    # A flag and a text are no numbers; both at once are not one setting.
    lines += [study_line("flag", 0, 0.1, **{"buffer__random_prob": True, error: 0.0})]
    lines += [study_line("both", 0, 0.1, **{"buffer__random_prob": 0.5, error: 0.3})]
    (tmp_path / "study.jsonl").write_text("".join(lines))
    written = write_report([str(tmp_path / "study.jsonl")], out=tmp_path / "out", baseline="near")
    assert {"sweep", "final-accuracy"} <= set(written.figures)
    rows = table(tmp_path / "out", "sweep")
    found: dict[str, list[tuple[str, str, float]]] = {}
    for row in rows:
        found.setdefault(f"{row['setting']} {row['method']}", []).append(
            (row["value"], row["n"], pytest.approx(float(row["mean"])))
        )
    assert found == {
        "buffer.random_prob near (w)": [("0.0", "2", 0.81), ("0.5", "1", 0.5), ("1.0", "1", 0.3)],
        "buffer.random_prob near (flawed)": [("0.0", "2", 0.6), ("0.5", "1", 0.1)],
        f"{error} near (w)": [("0.0", "2", 0.81), ("0.3", "2", 0.6)],
        f"{error} half (w)": [("0.0", "1", 0.5), ("0.3", "1", 0.1)],
    }
    # One run: Wilson for 50 of 100 tasks, 0.5 ± 0.0962.
    half = next(row for row in rows if row["value"] == "0.5" and row["group"] == "half")
    assert float(half["low"]) == pytest.approx(0.4038, abs=1e-4)
    final = {(row["panel"], row["group"]): row for row in table(tmp_path / "out", "final-accuracy")}
    assert (
        float(final["w", "half"]["difference"]) == pytest.approx(-0.3)
        and final["w", "half"]["pairs"] == "1"
    )


def test_a_sweep_of_the_off_policy_source(tmp_path: Path) -> None:
    """Runs that retrieve from another file, or from an expert with two flaws, and are otherwise
    equal."""
    error, detour = "tasks.search_world.error_prob", "tasks.search_world.detour_prob"
    flawless = {"buffer__path": "expert", error: 0.0, detour: 0.0}
    lines = [study_line("a", 0, 0.8, **flawless)]
    lines += [study_line("b", 0, 0.6, **flawless | {error: 0.3, detour: 0.4})]
    lines += [study_line("c", 0, 0.7, **flawless | {"buffer__path": "own.sqlite"})]
    (tmp_path / "study.jsonl").write_text("".join(lines))
    write_report([str(tmp_path / "study.jsonl")], out=tmp_path / "out")
    found = {
        (row["setting"], row["value"]): float(row["mean"])
        for row in table(tmp_path / "out", "sweep")
    }
    assert found == {
        ("off-policy source", "expert"): 0.8,
        ("off-policy source", "expert, detour_prob 0.4, error_prob 0.3"): 0.6,
        ("off-policy source", "own.sqlite"): 0.7,
    }


def test_shares_of_0_and_1_are_drawn(tmp_path: Path) -> None:
    """Rounding puts Wilson's bounds of 0 and of 1 a little beyond them."""
    lines = [study_line(name, 0, end, p=p) for name, end, p in (("a", 0.0, 0.1), ("b", 1.0, 0.2))]
    (tmp_path / "study.jsonl").write_text(
        "".join(lines).replace('"num_eval": 100', '"num_eval": 300')
    )
    written = write_report([str(tmp_path / "study.jsonl")], out=tmp_path / "out")
    assert {"final-accuracy", "sweep"} <= set(written.figures)


def test_many_groups_are_drawn_as_far_as_they_can_be_told_apart(tmp_path: Path) -> None:
    lines = [study_line(f"m{n}", seed, 0.5) for n in range(9) for seed in range(3 if n > 4 else 2)]
    (tmp_path / "study.jsonl").write_text("".join(lines))
    written = write_report([str(tmp_path / "study.jsonl")], out=tmp_path / "out")
    assert any("For want of room no curve in panel w of: m3, m4" in note for note in written.notes)
    assert {row["group"] for row in table(tmp_path / "out", "training-dynamics")} == {
        f"m{n}" for n in range(9)
    }


# ---------------------------------------------------------------------- foreign text

HOSTILE = [
    "<script>window.hacked=1</script>",
    "</title><script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "--><script>window.hacked=1</script><!--",
    "]]><script>window.hacked=1</script>",
    "</svg></style><script>window.hacked=1</script>",
    "$\\frac{1}{$ $x$ \\includegraphics{/etc/passwd}",
    "a\u0000b\u001b[31m\u202ec\ud800",
    "漢字 🙂 &amp; &#60;b&#62;",
]


class Tags(HTMLParser):
    """Collects the elements and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.handlers += [name] if name.startswith("on") else []
            self.links += [value or ""] if name in ("href", "src", "xlink:href") else []


def write_hostile(tmp_path: Path) -> list[str]:
    """Returns what to report on: a study and run folders whose names, settings, tasks and steps are
    hostile."""
    texts = [" ".join(HOSTILE[n::3]) for n in range(3)]
    lines = [
        study_line(text, seed, 0.5, world=texts[0], buffer__path=text)
        for text in texts
        for seed in range(2)
    ]
    (tmp_path / "study.jsonl").write_text("".join(lines), encoding="utf-8")
    paths = [str(tmp_path / "study.jsonl")]
    for n, text in enumerate(texts):
        tree = grown_tree(1, "t/1", question=text, answer=text, note=text)
        tree = replace(tree, task=replace(tree.task, id=text))
        name = f"run{n}" + "".join(c for c in text if c not in "/\x00\ud800")[:60]
        settings = {
            "buffer": {"path": text},
            "tasks": {"kind": texts[1]},
            "explore": {"explorers": ["graft", text]},
        }
        lines_of = [
            {
                "update": 1,
                "reward/mean": 0.5,
                ACCURACY: 0.5,
                CALLS: 3,
                text: 1.0,
                "learn/loss": "nan",
            }
        ]
        paths.append(str(made_run(tmp_path / name, settings, lines_of, {1: [tree] * 20})))
    return paths


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    written = write_report(
        write_hostile(tmp_path), out=tmp_path / "out", baseline=" ".join(HOSTILE[::3])
    )
    assert {"final-accuracy", "on-policy-against-hybrid"} <= set(written.figures)
    page = written.page.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert (
        not {"script", "img", "iframe", "object", "embed", "base", "form", "link"} & tags.tags
        and tags.handlers == []
    )
    assert all(link.startswith(("#", "figures/", "data:image/png;base64,")) for link in tags.links)
    assert "Content-Security-Policy" in page and "&lt;script&gt;window.hacked=1" in page
    for figure in (tmp_path / "out" / "figures").glob("*.svg"):
        names = {
            element.tag.rpartition("}")[2]
            for element in ElementTree.parse(figure).iter()
            if isinstance(element.tag, str)
        }
        assert not {"script", "foreignObject", "a"} & names, figure.name


def test_a_figures_ids_are_its_own_in_the_page() -> None:
    svg = (
        '<?xml version="1.0"?><svg xmlns="x"><path id="p1"/><use xlink:href="#p1"/><g'
        ' clip-path="url(#c)" href="#c"/></svg>'
    )
    found = inline(svg, "one", 'a "title"')
    assert (
        'id="one-p1"' in found
        and 'xlink:href="#one-p1"' in found
        and "url(#one-c)" in found
        and ' href="#one-c"' in found
    )
    assert found.startswith('<svg role="img" aria-label="a &quot;title&quot;"')
