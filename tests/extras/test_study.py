"""Studies: files refused before any work, runs in pairs, kills and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies.controls import shuffled, swapped
from tests.support.error_codes import raises_code

from treegraft.cli import main as cli
from treegraft.core.types import StepContent, ToolCall, Trace
from treegraft.extras.lab.study.file import read_study
from treegraft.extras.lab.study.plan import make_plan
from treegraft.extras.lab.study.results import (
    CALLS,
    REPLAYED,
    SECONDS,
    add_results,
    curve,
    known_runs,
    mixed_pairs,
    read_results,
    repair,
)
from treegraft.extras.lab.study.runner import commit_of, locked, run_study
from treegraft.extras.lab.study.tables import Question, Runs, markdown, rows
from treegraft.extras.lab.study.tables import tests as primary_tests
from treegraft.extras.lab.study.work import carry_out
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import split_steps

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "studies").glob("*.toml"))
NEEDS = {"published": ("minigrid", "textworld")}
"""Packages of extras that are not everywhere, by study."""

SMALL = """
recipe = "demo"
pairs = 2
settings.run = { num_updates = 1, tasks_per_update = 2 }
settings.tasks = { num_train = 8, num_eval = 4 }
settings.eval = { every = 1, greedy = false }
settings.track.record_trees = false
settings.explore = { num_leaves = 4, graft.num_hybrid = 2, entropy.num_starts = 2 }
settings.warmup = { num_steps = 2, batch_size = 2 }
settings.model.tiny = { hidden_size = 16, num_layers = 1, num_heads = 2 }
warmups.one = {}
buffers.raw = { samples = 2, keep = 1 }
worlds.perfect = {}
worlds.flawed.settings.tasks.search_world.error_prob = 0.5
arms.GRPO = {}
arms.RAPO = { buffer = "raw", settings.explore.explorers = ["graft"] }
"""


def written(folder: Path, text: str, name: str = "study.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_of_the_repository_are_right(path: Path) -> None:
    assert make_plan(path).runs
    small = make_plan(path, smoke=True)
    assert small.study.pairs == 2


def test_runs_stand_pair_after_pair_with_their_own_seeds(tmp_path: Path) -> None:
    plan = make_plan(written(tmp_path, SMALL))
    assert [run.key for run in plan.runs] == [
        (world, arm, pair)
        for pair in (0, 1)
        for world in ("perfect", "flawed")
        for arm in ("GRPO", "RAPO")
    ]
    seeds = {(run.pair, run.config.run.seed) for run in plan.runs}
    assert seeds == {(0, 100), (1, 101)}
    warm = {(run.pair, run.warmup.config.run.seed) for run in plan.runs if run.warmup}
    assert warm == {(0, 0), (1, 1)}
    # The recipe's warm-up is the study's; what a run would warm up further starts at none.
    assert all(run.config.warmup.num_steps == 0 for run in plan.runs)


def test_runs_that_differ_in_nothing_are_one(tmp_path: Path) -> None:
    """The worlds differ in the expert alone, whom GRPO never meets."""
    runs = {run.key: run for run in make_plan(written(tmp_path, SMALL)).runs}
    assert runs["perfect", "GRPO", 0].fingerprint == runs["flawed", "GRPO", 0].fingerprint
    assert len({run.fingerprint for run in runs.values()}) == 2 + 4


def test_a_later_default_does_not_make_runs_others(tmp_path: Path) -> None:
    """A setting at its default tells nothing."""
    text = SMALL + "arms.same = { base = 'RAPO', settings.buffer.terminal = 'skip' }\n"
    runs = {run.key: run for run in make_plan(written(tmp_path, text)).runs}
    assert runs["flawed", "same", 1].fingerprint == runs["flawed", "RAPO", 1].fingerprint


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("arms.x.bufer = 'raw'", "unknown-setting"),
        ("par = 3", "unknown-setting"),
        ("arms.x.buffer = 'rwa'", "study-invalid"),
        ("arms.x.base = 'x'", "study-invalid"),
        ("arms.x.command = 'trian'", "study-invalid"),
        ("pairs = 0", "study-invalid"),
        ("baseline = 'PPO'", "study-invalid"),
        ("results = 'study.toml'", "study-invalid"),
        ("arms.x.settings.learn.lrr = 1", "study-invalid"),
        ("arms.x.settings.learn.lr = 'big'", "study-invalid"),
        (
            "arms.x.settings.explore.graft.probability = 0.5",
            "override-idle",
        ),
        ("recipe = 'demmo'", "study-recipe-invalid"),
        ("warmups.two = {}", "study-invalid"),
        ("warmups.one.settings.warmup.num_steps = 0", "nothing-to-imitate"),
        ("smoke.arms.x.bufer = 'raw'", "unknown-setting"),
    ],
)
def test_faults_are_found_before_any_work(tmp_path: Path, more: str, code: str) -> None:
    given = more.partition(" = ")[0]
    lines = [line for line in SMALL.splitlines() if not line.startswith(f"{given} =")]
    if given.startswith("warmups.one"):
        lines.remove("warmups.one = {}")
    with raises_code(code):
        make_plan(written(tmp_path, "\n".join([*lines, more])))


def test_smoke_needs_its_table(tmp_path: Path) -> None:
    with raises_code("no-smoke-table"):
        read_study(written(tmp_path, SMALL), smoke=True)


def test_only_names_what_is_there(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    assert {run.key[:2] for run in make_plan(path, only=["RAPO", "flawed"]).runs} == {
        ("flawed", "RAPO")
    }
    for near in ("RAPPO", "rapo"):
        with raises_code("unknown-arm"):
            make_plan(path, only=[near])
    with raises_code("unknown-arm"):
        make_plan(path, only=["x"])
    assert {run.pair for run in make_plan(path, pairs=1).runs} == {0}
    with raises_code("pairs-too-many"):
        make_plan(path, pairs=3)
    # Of the kind that the command does not name, what the study names.
    path = written(tmp_path, "only = ['perfect', 'RAPO']\n" + SMALL)
    assert {run.key[:2] for run in make_plan(path, only=["flawed"]).runs} == {("flawed", "RAPO")}
    assert {run.key[:2] for run in make_plan(path, only=["GRPO"]).runs} == {("perfect", "GRPO")}


def test_costs_add_up_to_each_evaluation() -> None:
    """Update 1 is not evaluated; a replayed call counts as executed."""
    lines = [
        {"update": 0, "eval/accuracy_sampled": 0.25, "eval/accuracy": 0.5},
        {"update": 1, CALLS: 10.0, SECONDS: 1.0},
        {"update": 2, CALLS: 5.0, SECONDS: 2.0, "eval/accuracy": 0.75, REPLAYED: 4.0},
    ]
    first, second = curve(lines)
    assert first["accuracy"] == 0.25 and first["eval/accuracy"] == 0.5 and first[CALLS] == 0
    assert second["accuracy"] == 0.75 and second["update"] == 2
    assert (second[CALLS], second[SECONDS]) == (19, 3)
    with raises_code("no-evaluation"):
        curve(lines[1:2])


def test_imitation_before_the_first_update_counts() -> None:
    warmup = [
        {"update": 0, "eval/accuracy": 0.25},
        {"update": 0, "eval/accuracy": 0.5, "warmup/num_steps": 4, "time/warmup_cpu_s": 3.0},
        {"update": 0, "eval/accuracy": 0.75, "warmup/num_steps": 6, "time/warmup_cpu_s": 5.0},
    ]
    alone = curve([{"update": 0, "time/warmup_cpu_s": 5.0}], warmup)
    assert [(one["update"], one["accuracy"], one[SECONDS]) for one in alone] == [
        (-6, 0.25, 0),
        (-2, 0.5, 3),
        (0, 0.75, 5),
    ]
    lines = [
        {"update": 0, "eval/accuracy": 0.75, "time/warmup_cpu_s": 5.0},
        {"update": 1, "eval/accuracy": 1.0, SECONDS: 2.0, CALLS: 7.0},
    ]
    after = curve(lines, warmup)
    assert [one["update"] for one in after] == [-6, -2, 0, 1]
    assert [one[SECONDS] for one in after] == [0, 3, 5, 7] and after[-1][CALLS] == 7


def test_results_survive_a_cut_line_and_equal_runs_get_their_own(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    runs = make_plan(written(tmp_path, SMALL)).runs
    found = {"curve": [{"update": 0, "accuracy": 0.5}]}
    add_results(path, runs[:1], found)
    with path.open("a") as file:
        file.write('{"world": "perf')
    repair(path, runs)
    known, num_others = known_runs(path, runs)
    assert set(known) == {("perfect", "GRPO", 0), ("flawed", "GRPO", 0)} and num_others == 0
    assert known["flawed", "GRPO", 0]["curve"] == found["curve"]
    repair(path, runs)
    assert len(read_results(path)) == 2
    # With other settings they are other runs.
    others = make_plan(written(tmp_path, SMALL.replace("num_updates = 1", "num_updates = 3"))).runs
    assert known_runs(path, others) == ({}, 2)
    path.write_text('{"world": 1}\n')
    with raises_code("study-line-invalid"):
        read_results(path)
    path.write_bytes(b'{"defaults_of": "a"}\n{"world": "\xff"}\n')
    with raises_code("study-line-invalid"):
        read_results(path)


def test_two_studies_do_not_share_results(tmp_path: Path) -> None:
    file = tmp_path / "a" / "results.jsonl"
    with locked(file), raises_code("study-in-use"), locked(file):
        pass
    with locked(file):
        pass


def test_a_change_anywhere_in_the_package_is_a_dirty_commit(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    package = tmp_path / "src" / "treegraft"
    names = ("src/treegraft/algo/a.py", "recipes/demo.toml", "studies/s.toml", "studies/s.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert commit_of(package)["is_dirty"] is False
    for name in names:
        (tmp_path / name).write_text("2\n")
        # Results are written while a study runs.
        assert commit_of(package)["is_dirty"] is not name.endswith(".jsonl")
        (tmp_path / name).write_text("1\n")
    other = tmp_path / "venv" / "treegraft"
    other.mkdir(parents=True)
    assert commit_of(other) == {"commit": None, "is_dirty": None}


def test_what_cannot_matter_makes_no_other_buffer_or_warm_up(tmp_path: Path) -> None:
    def needs(text: str) -> tuple[str, ...]:
        run = make_plan(written(tmp_path, text)).runs[1]
        return tuple(one.fingerprint for one in run.needs)

    warmup, buffer = needs(SMALL)
    for old, new in (("num_updates = 1", "num_updates = 3"), ("every = 1", "every = 2")):
        assert needs(SMALL.replace(old, new)) == (warmup, buffer)
    more_tasks = needs(SMALL.replace("num_train = 8", "num_train = 9"))
    assert more_tasks[0] != warmup and more_tasks[1] != buffer
    longer = needs(SMALL.replace("num_steps = 2", "num_steps = 3"))
    assert longer[0] != warmup and longer[1] == buffer


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    """Its imitation is to take one trajectory of each task from a buffer without any."""
    text = SMALL.replace("pairs = 2", "pairs = 1\nonly = ['flawed', 'SFT']") + (
        "buffers.empty = { samples = 1, min_reward = 9.0 }\n"
        "arms.SFT = { command = 'sft', buffer = 'empty',"
        " settings.warmup = { num_steps = 1, traces = 'buffer' } }\n"
    )
    plan = make_plan(written(tmp_path, text))
    out = tmp_path / "out"
    said: list[str] = []
    done = run_study(plan, out, out / "results.jsonl", workers=1, say=said.append)
    ((key, error),) = done.failures.items()
    assert key == ("flawed", "SFT", 0) and error and error in said[-1] and done.num_left == 1


def ran(path: Path, out: Path, **options: Any) -> list[str]:
    """Runs a study in this process's workers; returns what it said."""
    said: list[str] = []
    plan = make_plan(path, only=options.pop("only", ()))
    found = run_study(plan, out, out / "results.jsonl", workers=1, say=said.append, **options)
    assert not found.failures, found.failures
    assert found.num_done + found.num_left == len(plan.runs)
    assert found.num_left == 0 or "minutes" in options
    return said


@pytest.mark.smoke
def test_a_study_is_run_and_finds_itself_done(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL.replace("pairs = 2", "pairs = 1"))
    assert len(ran(path, tmp_path / "out", minutes=0)) == 0
    said = ran(path, tmp_path / "out", only=["perfect"])
    assert [line.partition("s  ")[2].partition(":")[0] for line in said] == [
        "warm-up one, pair 0",
        "GRPO, perfect, pair 0",
        "buffer raw, perfect, pair 0",
        "RAPO, perfect, pair 0",
    ]
    lines = read_results(tmp_path / "out" / "results.jsonl")
    assert [(line["method"], line["run_seed"], line["warmup_seed"]) for line in lines] == [
        ("GRPO", 100, 0),
        ("RAPO", 100, 0),
    ]
    assert all(len(line["curve"]) == 2 and line["calibration_s"] > 0 for line in lines)
    assert lines[0]["weights"] == lines[1]["weights"] and re.fullmatch(
        "[0-9a-f]{16}", lines[0]["weights"]
    )
    # Eight tasks of one or four hops, two attempts of a perfect expert, the best of each kept; what
    # is not kept was called for too.
    made = lines[1]["buffer"]
    assert (made["trajectories"], made["attempts"], made["calls"]) == (8, 16, 2 * (4 * 1 + 4 * 4))
    # Without imports, the model and the encoder.
    assert 0 < made["cpu_s"] < 60 and lines[1]["warmup"]["cpu_s"] > 0
    # keep = "none": the run's folder goes when its line is there.
    assert not any((tmp_path / "out" / "runs").iterdir())
    assert ran(path, tmp_path / "out", only=["perfect"]) == []


@pytest.mark.slow
def test_a_killed_study_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """SIGKILL in the middle of runs, and a line that was cut off; the results are those of an
    undisturbed study."""
    path = written(tmp_path, SMALL.replace("num_updates = 1", "num_updates = 3"))
    ran(path, tmp_path / "whole")
    out = tmp_path / "killed"
    results = out / "results.jsonl"
    command = [sys.executable, "-m", "treegraft", "study", str(path), "--out", str(out)]
    for num_lines in (0, 3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            runs = list((out / "runs").glob("*/metrics.jsonl")) if out.exists() else []
            size = len(read_results(results))
            if size >= num_lines and runs and runs[-1].stat().st_size:
                process.kill()
                break
            time.sleep(0.05)
        process.wait()
    with results.open("a") as file:
        file.write('{"world": "perf')
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    found, expected = (
        {(line["world"], line["method"], line["seed"]): line for line in read_results(place)}
        for place in (results, tmp_path / "whole" / "results.jsonl")
    )
    assert len(read_results(results)) == len(found) == 8
    for key, line in expected.items():
        for ours, theirs in zip(found[key]["curve"], line["curve"], strict=True):
            assert ours.pop(SECONDS) >= 0 and theirs.pop(SECONDS) >= 0
            assert ours == theirs


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_says_how_to_go_on(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    command = [sys.executable, "-m", "treegraft", "study", str(path), "--out", str(tmp_path / "o")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "o" / "warmups").exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert "stopping; " in errors and "Traceback" not in errors


def test_tables_of_results_by_hand(tmp_path: Path) -> None:
    """Two pairs; the buffer of B has 10 calls and took 1 s, on a machine twice as slow."""

    def line(arm: str, pair: int, points: list[tuple[float, float, float]]) -> dict[str, Any]:
        made = [
            {"update": n, "accuracy": accuracy, CALLS: calls, SECONDS: seconds}
            for n, (accuracy, calls, seconds) in enumerate(points)
        ]
        return {"world": "w", "method": arm, "seed": pair, "curve": made, "calibration_s": 1.0}

    lines = [
        line("A", 0, [(0.0, 0, 0), (0.4, 100, 10)]),
        line("A", 1, [(0.0, 0, 0), (0.6, 100, 10)]),
        line("B", 0, [(0.0, 0, 0), (0.8, 200, 20)]),
        line("B", 1, [(0.0, 0, 0), (1.0, 200, 20)]) | {"buffer": {"calls": 10, "cpu_s": 1.0}},
        line("B", 2, [(0.0, 0, 0), (1.0, 200, 20)]),
    ]
    runs = Runs(lines)
    assert runs.pairs("w") == [0, 1]
    a, b = rows(runs, "w", Question(baseline="A", primary=["B"]))
    assert (a.last, b.last) == ([0.4, 0.6], [0.8, 1.0])
    assert b.at["at equal calls"] == pytest.approx([0.4, 0.5])
    # 100 calls buy B 90 of its own in pair 1, after the buffer's 10.
    assert b.at["at equal calls with the buffer's"] == pytest.approx([0.4, 0.45])
    assert b.at["at equal CPU s"] == pytest.approx([0.4, 0.45])
    assert (b.of_buffer("calls"), b.of_buffer("cpu_s")) == (5, 0.5)
    at_150 = Question(baseline="A", primary=["B"], at={CALLS: [150]})
    (fixed, _) = rows(runs, "w", at_150)
    assert fixed.at["at 150 calls"] == [None, None]
    # A's runs end at 100 calls, where B has .4 and .5: no run counts beyond its end.
    short = next(
        one for one in primary_tests(runs, "w", at_150, "B") if one.column == "at 150 calls"
    )
    assert (short.num_short, short.place) == (2, 100)
    assert short.differences == pytest.approx([0.0, -0.1])
    assert "| - (0 of 2) |" in markdown(runs, at_150)
    tests = primary_tests(runs, "w", Question(baseline="A"), "B")
    assert tests[0].column == "last" and tests[0].differences == pytest.approx([0.4, 0.4])
    # Both signs of two equal differences: 2 of 4 are as extreme.
    assert tests[0].p == tests[0].p_holm == 0.5
    text = markdown(runs, Question(baseline="A", primary=["B"]))
    assert "| at the end | this arm minus A at the end | left the start, after calls |" in text
    assert "| column | other arm | pairs | B minus the other | p | p (Holm) |" in text
    assert "| last | A | 2 | 0.40 [0.40, 0.40] | 0.5000 | 0.5000 |" in text
    assert "| arm | calls | CPU s, buffer included | buffer's attempts |" in text
    assert "Pairs that are not there: A: 2." in text
    assert "| 0.90 [0.80, 1.00] | 0.40 [0.40, 0.40] | 2 of 2, 200 |" in text
    both = markdown(runs, Question(baseline="A", primary=["A", "B"]))
    assert "A minus the other" in both and "B minus the other" in both
    # A machine on which the calibration takes twice as long counts half.
    slow = Runs([one | {"calibration_s": 2.0 if one["method"] == "B" else 1.0} for one in lines])
    assert slow.curve(lines[2] | {"calibration_s": 3.0}, SECONDS)[0][-1] == pytest.approx(40 / 3)


def test_the_brief_table_by_hand() -> None:
    """At 10 calls A stands at .5 + 10/20 of .2 = .6; B, which ended with 5 calls, nowhere."""

    def line(arm: str, pair: int, points: list[tuple[float, float]]) -> dict[str, Any]:
        curve = [
            {"update": n, "accuracy": value, CALLS: calls, SECONDS: 2 * calls}
            for n, (calls, value) in enumerate(points)
        ]
        return {"world": "w", "method": arm, "seed": pair, "curve": curve}

    a = [(0.0, 0.5), (20.0, 0.7)]
    b = [(0.0, 0.5), (5.0, 0.8)]
    runs = Runs([line(arm, pair, of) for arm, of in (("A", a), ("B", b)) for pair in (0, 1)])
    at = {CALLS: [10.0], SECONDS: [40.0]}
    text = markdown(runs, Question(baseline="A", primary=["B"], at=at), is_brief=True)
    assert text.splitlines() == [
        "**w**, 2 pairs",
        "",
        "| arm | at 10 calls | B minus this arm | at the end |"
        " left the start, after calls | calls |",
        "| --- | --- | --- | --- | --- | --- |",
        "| A | 0.60 | 0.25 [0.25, 0.25], p 0.500 (at 5) | 0.70 [0.70, 0.70] | 2 of 2, 20 | 20 |",
        "| B | - (0 of 2) |  | 0.80 [0.80, 0.80] | 2 of 2, 5 | 5 |",
    ]
    # Without a primary arm, differences to the baseline at the end.
    assert markdown(runs, Question(baseline="B", at=at), is_brief=True).splitlines()[2:] == [
        "| arm | at 10 calls | at the end | this arm minus B at the end |"
        " left the start, after calls | calls |",
        "| --- | --- | --- | --- | --- | --- |",
        "| A | 0.60 | 0.70 [0.70, 0.70] | -0.10 [-0.10, -0.10] | 2 of 2, 20 | 20 |",
        "| B | - (0 of 2) | 0.80 [0.80, 0.80] |  | 2 of 2, 5 | 5 |",
    ]
    # With both where a baseline is asked for; one that the world lacks is its first arm, not the
    # first row.
    question = Question(baseline="C", primary=["B"], at=at)
    header, _, other, best = markdown(
        runs, question, with_baseline=True, is_brief=True
    ).splitlines()[2:]
    assert "| B minus this arm |" in header
    assert "| this arm minus A at the end |" in header
    assert "| 0.80 [0.80, 0.80] | 0.10 [0.10, 0.10] | 2 of 2, 5 |" in best
    assert "| 0.70 [0.70, 0.70] |  | 2 of 2, 20 |" in other
    # An arm that was tuned with fewer runs than another is marked.
    tuned = [line("A", 0, a) | {"tuning": {"runs": 8, "calls": 9.0}}, line("B", 0, b)]
    text = markdown(Runs(tuned), Question(baseline="A", at=at), is_brief=True)
    assert "| A | 0.60 |" in text and "| B (0 of 8 tuning runs) | - (0 of 1) |" in text
    # The calls of a buffer's attempts stand behind a plus.
    bought = [line("A", 0, a) | {"buffer": {"calls": 1000}}]
    assert markdown(Runs(bought), Question(baseline="A", at=at), is_brief=True).endswith(
        "| 20 + 1,000 |\n"
    )


def test_pairs_that_began_with_different_weights_are_named() -> None:
    """A warm-up of one name and seed that ended with several weights, on several machines."""

    def line(pair: int, weights: str, warmup: str = "x", arm: str = "A") -> dict[str, Any]:
        curve = [{"update": 0, "accuracy": 0.5, CALLS: 1.0, SECONDS: 1.0}]
        own = {"world": "w", "method": arm, "seed": pair, "curve": curve, "weights": weights}
        return own | {"warmup": {"fingerprint": warmup, "cpu_s": 1.0, "calibration_s": 1.0}}

    assert mixed_pairs([line(0, "1"), line(0, "1"), line(1, "1"), line(1, "2")]) == [1]
    assert mixed_pairs([line(0, "1"), line(0, "2", "y")]) == []
    # Without a warm-up all begin with the recipe's model.
    assert mixed_pairs([line(4, "1") | {"warmup": None}, line(4, "2") | {"warmup": None}]) == []
    question = Question(baseline="A")
    assert "weights" not in markdown(Runs([line(3, "1"), line(3, "1", arm="B")]), question)
    text = markdown(Runs([line(3, "1"), line(3, "2", arm="B")]), question, is_brief=True)
    assert "Not all arms began with the same weights in pairs 3:" in text


def test_runs_that_are_missing_are_named() -> None:
    """Pair 1 is left out of the table of both arms, since A's run is not there; C has none."""
    curve = [{"update": 0, "accuracy": 0.5, CALLS: 1.0, SECONDS: 1.0}]
    lines = [
        {"world": "w", "method": arm, "seed": pair, "curve": curve}
        for arm, pair in (("A", 0), ("B", 0), ("B", 1))
    ]
    planned = [("w", arm, pair) for pair in (0, 1) for arm in ("A", "B", "C")]
    runs = Runs(lines, planned)
    assert list(runs.missing("w")) == ["A: 1", "C: all"]
    for text in (
        markdown(runs, Question(baseline="A")),
        markdown(runs, Question(baseline="A"), is_brief=True),
    ):
        assert "**w**, 1 pair\n" in text
        assert "Pairs that are not there: A: 1. C: all." in text
    begun = markdown(Runs([lines[0], lines[2]], planned), Question(baseline="A"), is_brief=True)
    assert "no pair is complete" in begun and "A: 1. B: 0. C: all." in begun


def test_both_tables_say_when_and_where_runs_were_made() -> None:
    curve = [{"update": 0, "accuracy": 0.5, CALLS: 1.0, SECONDS: 1.0}]
    made = {"world": "w", "method": "A", "curve": curve, "machine": {"cpu": "EPYC"}}
    lines = [
        made | {"seed": 0, "date": "2026-01-02", "commit": "abcdefghi", "calibration_s": 1.0},
        made | {"seed": 1, "date": "2026-01-03", "commit": "abcdefghi", "calibration_s": 2.0},
    ]
    for is_brief in (True, False):
        text = markdown(Runs(lines), Question(baseline="A"), is_brief=is_brief)
        assert text.startswith("2026-01-02 to 2026-01-03, EPYC, commit abcdefg.\nThe calibration")


def test_the_study_of_the_docs_is_right(tmp_path: Path) -> None:
    path = written(tmp_path, (ROOT / "examples" / "study.toml").read_text(encoding="utf-8"))
    runs = {run.key: run for run in make_plan(path).runs}
    assert len(runs) == 10 * 4
    pruned = runs["short", "RAPO, pruned", 0]
    assert pruned.config.explore.explorers == ["graft"] and pruned.buffer is not None
    source, warmup = pruned.buffer.needs
    assert source == runs["short", "RAPO", 0].buffer and warmup == pruned.warmup
    assert runs["short", "SFT", 0].own.command == "sft"
    assert len(make_plan(path, smoke=True).runs) == 2 * 4


def test_a_pruned_buffer_is_made_of_one_that_is_built(tmp_path: Path) -> None:
    for more, code in (
        ("source = 'raw', maker = 'm:f', samples = 3", "study-invalid"),
        ("source = 'rwa', maker = 'm:f'", "study-invalid"),
        ("source = 'x', maker = 'm:f'", "study-invalid"),
        ("source = 'raw'", "study-invalid"),
    ):
        with raises_code(code):
            make_plan(written(tmp_path, SMALL + f"buffers.x = {{ {more} }}\n"))


PATHS = [("a", "0", 4), ("a", "1", 1), ("b", "0", 4), ("b", "1", 1), ("c", "", 2)]
"""Task, name, and steps before the answer."""
STORED = [
    tuple(
        split_steps(
            task,
            f"{task} ?",
            [
                *(StepContent(calls=(ToolCall("search", f"{task} {n}"),)) for n in range(num)),
                StepContent(answer=task),
            ],
            reward=1.0,
            source="expert",
            trajectory=name,
        )
    )
    for task, name, num in PATHS
]


@given(st.integers(0, 10**6))
def test_shuffled_steps_stand_under_other_histories(seed: int) -> None:
    mixed = list(shuffled(STORED, seed))
    before = [trace for traces in STORED for trace in traces]
    assert [one.key for one in mixed] == [one.key for one in before]
    for traces in STORED:
        own = [one for one in mixed if one.key in {trace.key for trace in traces}]
        own = [one for one in own if one.trajectory == traces[0].trajectory]
        steps = [one.value for one in traces]
        values = [one.value for one in own]
        assert values[-1] == steps[-1] and own[-1].terminal
        assert sorted(map(repr, values)) == sorted(map(repr, steps))
        moved = zip(values[:-1], steps[:-1], strict=True)
        assert len(steps) == 2 or all(ours != theirs for ours, theirs in moved)


@given(st.integers(0, 10**6))
def test_swapped_steps_are_those_of_another_task(seed: int) -> None:
    mixed = list(swapped(STORED, seed))
    # c has no other trajectory of three steps.
    kept = [trace for traces in STORED[:4] for trace in traces]
    assert sorted(one.key for one in mixed) == sorted(one.key for one in kept)
    of = {"a": "b", "b": "a"}
    by_place = {(one.task_id, one.trajectory, one.position): one.value for one in kept}
    for one in mixed:
        assert one.value == by_place[of[one.task_id], one.trajectory, one.position]


def test_controls_are_made_of_other_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their histories and costs, with other steps."""
    text = SMALL.replace("worlds.perfect = {}", "") + (
        "buffers.x = { source = 'raw', maker = 'studies.controls:shuffle' }\n"
        "buffers.y = { source = 'raw', maker = 'studies.controls:swap' }\n"
        "arms.x = { base = 'RAPO', buffer = 'x' }\narms.y = { base = 'RAPO', buffer = 'y' }\n"
    )
    monkeypatch.setattr("logging.disable", lambda level: None)
    found: dict[str, list[tuple[Trace, ...]]] = {}
    costs: dict[str, Any] = {}
    for run in make_plan(written(tmp_path, text), only=["RAPO", "x", "y"]).runs[:3]:
        made = run.buffer
        assert made is not None
        name = made.title.split()[1].rstrip(",")
        costs[name] = carry_out(made, tmp_path)
        with TraceBuffer.open_as_built(tmp_path / made.place) as buffer:
            found[name] = list(buffer.trajectories())
    for name in ("x", "y"):
        pairs = list(zip(found["raw"], found[name], strict=True))
        assert all([a.key for a in ours] == [b.key for b in own] for ours, own in pairs)
        assert all([a.reward for a in ours] == [b.reward for b in own] for ours, own in pairs)
        assert found[name] != found["raw"]
        assert costs[name]["cpu_s"] == costs["raw"]["cpu_s"] > 0
        assert costs[name]["calls"] == costs["raw"]["calls"] > 0


def test_a_study_builds_on_another_file(tmp_path: Path) -> None:
    written(tmp_path, SMALL, "shared.toml")
    path = written(tmp_path, "base = 'shared.toml'\npairs = 1\nonly = ['RAPO']\n")
    assert [run.key for run in make_plan(path).runs] == [
        ("perfect", "RAPO", 0),
        ("flawed", "RAPO", 0),
    ]
    with raises_code("base-missing", match="'base': got 'sharde"):
        make_plan(written(tmp_path, "base = 'sharde.toml'\n", "wrong.toml"))


def test_studies_share_a_file_of_results(tmp_path: Path) -> None:
    """A run that another study has made, under whichever name, is not made again."""
    first = make_plan(written(tmp_path, SMALL)).runs
    renamed = SMALL.replace("arms.GRPO", "arms.plain").replace("arms.RAPO", "arms.other")
    second = make_plan(written(tmp_path, renamed)).runs
    path = tmp_path / "results.jsonl"
    add_results(path, first[:1], {"curve": [{"update": 0, "accuracy": 0.5}]})
    repair(path, second)
    known, num_others = known_runs(path, second)
    assert set(known) == {("perfect", "plain", 0), ("flawed", "plain", 0)} and num_others == 0
    # Lines of arms that a study does not have are not its own with other settings.
    assert known_runs(path, first[1:2]) == ({}, 0)


@pytest.fixture
def study(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str]]:
    """`treegraft study` with these words: what it prints, and its error as one line."""

    def called(*words: str | Path) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["treegraft", "study", *map(str, words)])
        with pytest.raises(SystemExit):
            cli.main()
        said = capsys.readouterr()
        return said.out, said.err

    return called


Command = Callable[..., tuple[str, str]]


def test_the_command_puts_results_where_the_study_says(tmp_path: Path, study: Command) -> None:
    path = written(tmp_path, "results = 'shared.jsonl'\n" + SMALL)
    plan = make_plan(path)
    add_results(
        tmp_path / "shared.jsonl", plan.runs[:1], {"curve": [{"update": 0, "accuracy": 0.5}]}
    )
    # GRPO's line in one world stands for the other one, too, and so it is with pair 1.
    said, _ = study(path, "--check")
    assert "8 runs in 2 pairs; done: 2, to be made: 6, 5 of them different\n" in said
    assert (
        "1 run in 1 pair; done: 1, to be made: 0\n"
        in (study(path, "--check", "--pairs", "1", "--only", "GRPO", "--only", "perfect")[0])
    )
    # Under the name of another study's arm it is done, too.
    other = written(tmp_path, path.read_text().replace("GRPO", "plain"), "other.toml")
    assert "done: 2, to be made: 6" in study(other, "--check")[0]


def test_what_is_no_study_and_no_result_is_said(
    tmp_path: Path, study: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "", "pyproject.toml")
    assert (
        "study 'nothere.toml' does not exist; expected a .toml or .json file. Studies"
        in (study("nothere.toml")[1])
    )
    assert "study 'exploratoin' does not exist" in (said := study("exploratoin")[1])
    assert "Did you mean 'exploration'?" in said and "ecipe" not in said
    # A name is looked up as a recipe's is.
    assert f"{ROOT}/studies/exploration.toml: " in study("exploration", "--check")[0]
    written(tmp_path, "[broken", "broken.toml")
    assert "study 'broken.toml' is not valid TOML" in study("broken.toml")[1]
    assert "no run is finished" in study(str(written(tmp_path, SMALL)), "--table")[1]


def test_a_baseline_that_is_asked_for_is_shown_beside_primary_arms(
    tmp_path: Path, study: Command
) -> None:
    path = written(tmp_path, "primary = 'RAPO'\n" + SMALL)
    point = {"update": 0, "accuracy": 0.5, CALLS: 1.0, SECONDS: 1.0}
    add_results(tmp_path / "study.jsonl", make_plan(path).runs, {"curve": [point]})
    assert "minus GRPO at the end" not in study(path, "--table", "--brief")[0]
    error = "there are 'GRPO', 'RAPO'. Did you mean 'GRPO'?"
    assert error in study(path, "--table", "--baseline", "grpo")[1]
    said, _ = study(path, "--table", "--brief", "--baseline", "GRPO")
    assert "RAPO minus this arm" in said and "this arm minus GRPO at the end" in said


def test_runs_of_removed_arms_stay_in_the_tables(tmp_path: Path, study: Command) -> None:
    """With the settings of then, which this version may not know. Nothing makes them again."""
    point = {"update": 0, "accuracy": 0.5, CALLS: 1.0, SECONDS: 1.0}
    path = written(tmp_path, SMALL)
    add_results(tmp_path / "study.jsonl", make_plan(path).runs, {"curve": [point]})
    before, _ = study(path, "--table")
    kept = [line for line in SMALL.splitlines() if not line.startswith("arms.RAPO")]
    written(tmp_path, "\n".join(["removed = ['RAPO']", *kept]))
    after, _ = study(path, "--table")
    assert "RAPO (removed since)" in after
    assert after.replace("RAPO (removed since)", "RAPO") == before
    assert "4 runs in 2 pairs" in study(path, "--check")[0]
    assert "removed" not in study(path, "--table", "--only", "GRPO")[0]


def test_lines_have_the_settings_that_this_study_names(tmp_path: Path, study: Command) -> None:
    """Another study that shares the file may have named others for an equal run."""
    path = written(tmp_path, SMALL)
    shared = tmp_path / "study.jsonl"
    point = {"update": 0, "accuracy": 0.5, CALLS: 1.0, SECONDS: 1.0}
    plan = make_plan(path)
    add_results(shared, plan.runs[1:], {"curve": [point]})
    lines = [json.loads(line) for line in shared.read_text(encoding="utf-8").splitlines()]
    shared.write_text(
        "".join(json.dumps({**line, "settings": {}}) + "\n" for line in lines if "method" in line)
    )
    told = [json.loads(line) for line in study(path, "--lines")[0].splitlines()]
    assert [(line["world"], line["method"], line["seed"]) for line in told] == [
        run.key for run in plan.runs[1:]
    ]
    assert [line["settings"] for line in told] == [
        json.loads(json.dumps(dict(run.shown))) for run in plan.runs[1:]
    ]
    assert any(line["settings"] for line in told)
    error = study(path, "--lines", "--table")[1]
    assert "--table would have no effect with --lines" in error


@pytest.mark.smoke
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_smoke_test_of_each_study_runs(path: Path, tmp_path: Path) -> None:
    """Every kind of job: warm-ups, buffers built and pruned, training, imitation, one after the
    other."""
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    plan = make_plan(path, smoke=True)
    results = tmp_path / "results.jsonl"
    done = run_study(plan, tmp_path, results, workers=2, say=lambda text: None)
    assert not done.failures, done.failures
    assert done.num_left == 0
    lines = read_results(results)
    assert len(lines) == len(plan.runs)
    for line in lines:
        costs = [point[SECONDS] for point in line["curve"]]
        assert costs == sorted(costs) and costs[-1] > 0
    question = Question(baseline=lines[0]["method"], primary=[lines[-1]["method"]])
    assert markdown(Runs(lines), question)
