"""Reports: bands and groups by hand, what is read of runs and studies, figures' tables, the papers'
figures, foreign text."""

from __future__ import annotations

import csv
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed: pip install 'treegraft[reports]'"
)

from tests.support.error_codes import raises_code
from tests.support.viewed import write_run

from treegraft.cli import main as cli
from treegraft.extras.lab.report.command import (
    Report,
    as_csv,
    report_folder,
    write_report,
)
from treegraft.extras.lab.report.figures import FIGURES, cost_curve
from treegraft.extras.lab.report.groups import Group, differing, group, notes_on
from treegraft.extras.lab.report.records import (
    Record,
    read_records,
    read_run,
    records_of,
    split_label,
)
from treegraft.runs.record import RunFolder
from treegraft.view.metrics import clean_lines

ACCURACY = "eval/accuracy_sampled"
CALLS = "rollout/num_tool_calls"
TOKENS = "rollout/num_sampled_tokens"


def record(
    name: str, seed: int = 0, lines: list[dict[str, float]] | None = None, **more: Any
) -> Record:
    """Returns a record with settings that differ as given."""
    return Record(name=name, seed=seed, lines=lines or [], **more)


def accuracies(*values: float) -> list[dict[str, float]]:
    """Returns lines with an evaluation at updates 0, 10, 20, ..."""
    return [{"update": 10.0 * n, ACCURACY: value} for n, value in enumerate(values)]


def made_run(path: Path, settings: Mapping[str, Any], lines: list[dict[str, Any]]) -> Path:
    """Writes a run folder with these settings and lines of metrics."""
    folder = RunFolder.create(path, json.dumps({"run": {"num_updates": 4}} | dict(settings)))
    folder.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def study_line(method: str, seed: int, end: float, world: str = "w", **settings: Any) -> str:
    """Returns a line of results with two evaluations."""
    curve = [
        {"update": 0, "accuracy": 0.2, CALLS: 0.0},
        {"update": 10, "accuracy": end, CALLS: 100.0},
    ]
    named = {name.replace("__", "."): value for name, value in settings.items()}
    line = {"world": world, "method": method, "seed": seed, "num_eval": 100, "curve": curve}
    return json.dumps(line | {"settings": named}) + "\n"


def reported(paths: list[str], out: Path, **options: Any) -> Report:
    return write_report(read_records(paths), out, **options)


def table(folder: Path, name: str) -> list[dict[str, str]]:
    """Returns the CSV beside a figure."""
    with (folder / "figures" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------- groups


def test_a_band_goes_as_far_as_all_its_runs() -> None:
    key = "reward/mean"
    first = record("a", lines=[{"update": float(n), key: float(n > 1)} for n in (1, 2, 3)])
    second = record("b", lines=[{"update": 1.0, key: 1.0}, {"update": 2.0, key: 1.0}])
    never = record("c", lines=[{"update": 1.0, "other": 1.0}])
    points = Group("g", "", (first, second, never)).band(key)
    assert [(point.x, point.mean, point.num) for point in points] == [(1, 0.5, 2), (2, 1.0, 2)]
    # Two runs: s = 0.7071, t(1) = 12.706, so half = 12.706 * 0.7071 / 1.4142 = 6.353.
    assert points[0].bounds[1] == pytest.approx(0.5 + 6.353, abs=1e-3)


def test_one_run_has_wilsons_band_and_several_have_students() -> None:
    one = record("a", lines=accuracies(0.5), num_eval=10)
    (alone,) = Group("g", "", (one,)).band(ACCURACY, is_accuracy=True)
    assert alone.bounds[0] == pytest.approx(0.2366, abs=1e-4)
    (unknown,) = Group("g", "", (replace(one, num_eval=None),)).band(ACCURACY, is_accuracy=True)
    assert unknown.interval is None
    (two,) = Group("g", "", (one, one)).band(ACCURACY, is_accuracy=True)
    assert (two.interval, two.num) == ((0.5, 0.5), 2)
    # Ends are cut at 0 and 1.
    end = Group("g", "", (record("a", lines=accuracies(1.0), num_eval=300),)).final(ACCURACY)
    assert end is not None and end.bounds[1] == pytest.approx(1.0)
    assert end.whiskers[1] == 0.0


def test_costs_add_up() -> None:
    def run(calls: float) -> Record:
        last = {"update": 1.0, CALLS: calls, ACCURACY: 0.5}
        return record("a", lines=[{"update": 0.0, ACCURACY: 0.0}, last])

    assert run(10.0).spent(CALLS) == {0: 0.0, 1: 10.0}
    curve = cost_curve(Group("g", "", (run(10.0), run(30.0))), CALLS, ACCURACY)
    assert [(point.x, point.mean) for point in curve] == [(0.0, 0.0), (20.0, 0.5)]


def test_differences_are_paired_by_seed_at_the_last_shared_update() -> None:
    base = [record("a", 0, accuracies(0.1, 0.2)), record("b", 1, accuracies(0.1, 0.4))]
    own = [
        record("c", 1, accuracies(0.1, 0.5, 0.9)),
        record("d", 0, accuracies(0.3)),
        record("e", 7, accuracies(1.0)),
    ]
    found = Group("own", "", tuple(own)).gains(Group("base", "", tuple(base)), ACCURACY)
    assert found == [pytest.approx(0.1), pytest.approx(0.2)]


def test_runs_with_equal_settings_are_one_group() -> None:
    base = {"learn.lr": 0.1, "loss.clip_low": 0.2}
    records = [
        record(f"demo-seed{n}-20260101-00000{n}", n, settings=base | more)
        for n, more in enumerate(({}, {}, {"learn.lr": 0.2}))
    ]
    found = group(records)
    # What runs get for a name without one is their recipe's, their seed and the time.
    assert [(one.label, len(one.records)) for one in found] == [("demo", 2), ("demo (2)", 1)]
    assert differing(records) == ["learn.lr"] and differing(records[:2]) == []


def test_a_label_pools_and_says_so() -> None:
    records = [
        record("a", 0, label="mine", settings={"model.path": "x"}),
        record("b", 0, label="mine", settings={}, notes=["stopped at update 1 of 2"]),
    ]
    (one,) = group(records)
    assert one.label == "mine"
    first, second, third = notes_on([one])
    assert "differ in model.path" in first and "seed 0 comes more than once" in second
    assert third == "b: stopped at update 1 of 2."


# ---------------------------------------------------------------------- reading


def test_a_resumed_or_broken_record_is_read_as_far_as_it_goes() -> None:
    raw = [
        {"update": 2, "a": 1.0},
        {"update": 1, "a": 0.5},
        {"update": 2, "a": 3.0},
        {"update": 3, "a": float("nan")},
    ]
    lines, notes = clean_lines(raw)
    assert lines == [{"update": 1.0, "a": 0.5}, {"update": 2.0, "a": 3.0}, {"update": 3.0}]
    assert notes == ["left out: a of update 3 is nan"]


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    path = made_run(tmp_path / "live", {}, [{"update": 0}, {"update": 1, "reward/mean": 0.5}])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "rewa')
    found = read_run(path)
    assert [line["update"] for line in found.lines] == [0, 1]
    assert "running at update 1 of 4" in found.notes


def test_calls_of_a_run_include_those_that_an_environment_repeats(tmp_path: Path) -> None:
    lines = [{"update": 1, CALLS: 5, "environment/num_replayed_calls": 4}, {"update": 2, CALLS: 7}]
    path = made_run(tmp_path / "own", {"run": {"num_updates": 10, "max_calls": 16}}, lines)
    found = read_run(path)
    assert [line[CALLS] for line in found.lines] == [9, 7] and not found.notes


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
    "curve",
    ["{}", "[]", '[{"update": 0}]', '[{"update": "x", "accuracy": 0.5}]'],
)
def test_a_damaged_study_is_refused(tmp_path: Path, curve: str) -> None:
    study = tmp_path / "study.jsonl"
    line = f'{{"world": "w", "method": "b", "seed": 0, "curve": {curve}}}\n'
    study.write_text(study_line("a\u2028b", 0, 0.5) + line, encoding="utf-8")
    with raises_code("study-line-invalid"):
        read_records([str(study)])
    study.write_text(study_line("a\u2028b", 0, 0.5), encoding="utf-8")
    assert len(read_records([str(study)])) == 1
    study.write_text("")
    with raises_code("study-empty"):
        read_records([str(study)])


def test_a_studys_costs_are_sums_so_far_and_its_updates_take_their_place() -> None:
    curve = [
        {"update": n, "accuracy": n / 20, CALLS: calls, TOKENS: 10.0 * n}
        for n, calls in ((0, 0.0), (5, 50.0), (10, 90.0))
    ]
    line = {"world": "w", "method": "m", "seed": 3, "num_eval": 40, "settings": {"a.b": 1}}
    (found,) = records_of([{**line, "curve": curve}])
    assert found.values(CALLS) == {0: 0.0, 5: 50.0, 10: 40.0}
    assert found.values(ACCURACY) == {0: 0.0, 5: 0.25, 10: 0.5}
    assert (found.label, found.world, found.seed, found.num_eval, found.settings) == (
        "m",
        "w",
        3,
        40,
        {"a.b": 1},
    )
    updates = {"update": [1, 2], CALLS: [4, 5], "learn/entropy": [0.5, None]}
    (found,) = records_of([{**line, "curve": curve, "updates": updates}], "other")
    assert found.label == "other" and found.values(CALLS) == {1: 4.0, 2: 5.0}
    assert found.values("learn/entropy") == {1: 0.5}
    assert found.values(TOKENS) == {0: 0.0, 5: 50.0, 10: 50.0}


# ---------------------------------------------------------------------- whole reports


def test_tables_hold_no_formulas() -> None:
    assert as_csv(("a", "b"), [("=1+1", None), ("-x", 2.5)]) == "a,b\n'=1+1,\n'-x,2.5\n"


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

    runs = [
        made_run(tmp_path / f"a{n}", {"run": {"seed": n, "num_updates": 2}}, lines(0.2 * n))
        for n in range(2)
    ]
    other = {"run": {"seed": 0, "num_updates": 2}, "explore": {"explorers": ["graft"]}}
    runs.append(made_run(tmp_path / "b0", other, lines(0.0)))
    paths = [f"A={runs[0]}", f"A={runs[1]}", f"B={runs[2]}"]
    written = reported(paths, tmp_path / "out", baseline="B")
    assert written.folder == tmp_path / "out" / "figures" and set(written.figures) <= set(FIGURES)

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

    assert written.left_out == ()


def test_a_report_lies_in_the_run_and_is_the_same_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")

    def made() -> dict[str, bytes]:
        written = reported([str(run)], report_folder([str(run)], None))
        assert written.folder == run / "figures"
        assert any("first: stopped at" in n or "first: running at" in n for n in written.notes)
        files = [*written.folder.iterdir()]
        assert len(files) == 3 * len(written.figures)
        return {path.name: path.read_bytes() for path in files}

    assert made() == made()


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = str(write_run(tmp_path / "first"))
    reported([run], out)
    (out / "figures" / "mine.svg").write_text("mine")
    bare = made_run(tmp_path / "bare", {}, [{"update": 1, "reward/mean": 1.0}])
    written = reported([str(bare)], out)
    assert written.figures == ("training-dynamics",)
    left_out = [line.partition(":")[0].removeprefix("no ") for line in written.left_out]
    assert left_out == list(FIGURES)[1:]
    assert {path.stem for path in (out / "figures").iterdir()} == {*written.figures, "mine"}
    assert "no run was evaluated" in written.left_out[0]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    run = str(made_run(tmp_path / "run", {}, [{"update": 1, "reward/mean": 1.0}]))
    out = tmp_path / "out"
    with raises_code("unknown-group"):
        reported([run], out, baseline="runn")
    with raises_code("no-metrics-yet", match="recorded no metrics yet"):
        reported([str(made_run(tmp_path / "quiet", {}, []))], out)
    assert not out.exists()
    study = tmp_path / "study.jsonl"
    study.write_text(study_line("a", 0, 0.5))
    with raises_code("report-folder-taken"):
        report_folder([run], study)
    assert report_folder([str(study)], None) == Path("report")


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


def write_hostile(tmp_path: Path) -> list[str]:
    """Returns what to report on: a study and run folders whose names and settings are hostile."""
    texts = [" ".join(HOSTILE[n::3]) for n in range(3)]
    lines = []
    for text in texts:
        lines += [study_line(text, seed, 0.5, texts[0], buffer__path=text) for seed in range(2)]
    (tmp_path / "study.jsonl").write_text("".join(lines), encoding="utf-8")
    paths = [str(tmp_path / "study.jsonl")]
    for n, text in enumerate(texts):
        name = f"run{n}" + "".join(c for c in text if c not in "/\x00\ud800")[:60]
        settings = {"buffer": {"path": text}, "explore": {"explorers": ["graft", text]}}
        first = {"update": 1, "reward/mean": 0.5, ACCURACY: 0.5, CALLS: 3, text: 1.0}
        paths.append(str(made_run(tmp_path / name, settings, [first | {"learn/loss": "nan"}])))
    return paths


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = reported(write_hostile(tmp_path), out, baseline=" ".join(HOSTILE[::3]))
    assert "final-accuracy" in written.figures
    for figure in (out / "figures").glob("*.svg"):
        elements = [one.tag for one in ElementTree.parse(figure).iter() if isinstance(one.tag, str)]
        names = {tag.rpartition("}")[2] for tag in elements}
        assert not {"script", "foreignObject", "a"} & names, figure.name


# ---------------------------------------------------------------------- the command


def treegraft(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Runs the command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["treegraft", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def test_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert treegraft(monkeypatch, "report", write_run(tmp_path / "first"), "--out", out) == 0
    said = capsys.readouterr().out
    assert f"{out / 'figures'}: 2 figures (training-dynamics, final-accuracy)" in said
    assert "no accuracy-against-cost: no run has recorded" in said


@pytest.mark.parametrize(
    ("what", "code"), [("nowhere", 3), ("empty", 3), ("quiet", 2), ("damaged", 2)]
)
def test_exit_codes(
    what: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    made_run(tmp_path / "quiet", {}, [])
    (tmp_path / "damaged").write_text("no study\n")
    assert treegraft(monkeypatch, "report", tmp_path / what, "--out", tmp_path / "out") == code
    assert "error: " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert treegraft(monkeypatch, "report", write_run(tmp_path / "first")) == 2
    assert "pip install 'treegraft[reports]'" in " ".join(capsys.readouterr().err.split())
