"""Studies: files refused before any work, runs in pairs, kills and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from treegraft.core.errors import DataError, SettingError, StorageError
from treegraft.study.file import read_study
from treegraft.study.plan import make_plan
from treegraft.study.results import add_results, known_runs, read_results, repair
from treegraft.study.runner import locked
from treegraft.study.work import CALLS, SECONDS, SHOWN, curve

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted((ROOT / "studies").glob("*.toml"))

SMALL = """
recipe = "demo"
pairs = 2
settings.run = { num_updates = 1, tasks_per_update = 2 }
settings.tasks = { num_train = 8, num_eval = 4 }
settings.eval = { every = 1, greedy = false }
settings.track.record_trees = false
settings.explore = { num_leaves = 4, graft.num_hybrid = 2, entropy.num_starts = 2 }
settings.warmup = { num_steps = 2, batch_size = 2 }
settings.model.tiny = { hidden_size = 16, num_layers = 1, num_heads = 2, num_kv_heads = 1 }
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
    ("more", "expected"),
    [
        ("arms.x.bufer = 'raw'", "unknown key 'arms.x.bufer'.*Did you mean 'buffer'"),
        ("par = 3", "unknown key 'par'.*Did you mean 'pairs'"),
        ("arms.x.buffer = 'rwa'", r"'arms.x.buffer': got 'rwa'; \[buffers\] has raw. Did you"),
        ("arms.x.worlds = ['perfekt']", "'arms.x.worlds'.*Did you mean 'perfect'"),
        ("arms.x.base = 'x'", "bases in a circle: x -> x"),
        ("arms.x.command = 'trian'", "'arms.x.command': got 'trian'"),
        ("pairs = 0", "'pairs': got 0"),
        ("baseline = 'PPO'", "'baseline': got 'PPO'"),
        ("arms.x.settings.learn.lrr = 1", "arm 'x' in world 'perfect': unknown setting"),
        ("arms.x.settings.learn.lr = 'big'", "arm 'x' in world 'perfect': setting 'learn.lr'"),
        (
            "arms.x.settings.explore.graft.probability = 0.5",
            "arm 'x' in world 'perfect': 'explore.graft.probability' would have no effect",
        ),
        ("recipe = 'demmo'", "'recipe'.*demmo"),
        ("warmups.two = {}", "'worlds.perfect.warmup' is missing"),
        ("warmups.one.settings.warmup.num_steps = 0", "warm-up 'one': warmup.num_steps is 0"),
        ("smoke.arms.x.bufer = 'raw'", "unknown key 'arms.x.bufer'"),
    ],
)
def test_faults_are_found_before_any_work(tmp_path: Path, more: str, expected: str) -> None:
    given = more.partition(" = ")[0]
    lines = [line for line in SMALL.splitlines() if not line.startswith(f"{given} =")]
    if given.startswith("warmups.one"):
        lines.remove("warmups.one = {}")
    with pytest.raises(SettingError, match=expected):
        make_plan(written(tmp_path, "\n".join([*lines, more])))


def test_smoke_needs_its_table(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"no table \[smoke\]"):
        read_study(written(tmp_path, SMALL), smoke=True)


def test_only_names_what_is_there(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    assert {run.key[:2] for run in make_plan(path, only=["RAPO", "flawed"]).runs} == {
        ("flawed", "RAPO")
    }
    with pytest.raises(SettingError, match="Did you mean 'RAPO'"):
        make_plan(path, only=["RAPPO"])


def test_costs_add_up_to_each_evaluation() -> None:
    """Update 1 is not evaluated; a graft is shown and not executed."""
    lines = [
        {"update": 0, "eval/accuracy_sampled": 0.25, "eval/accuracy": 0.5},
        {"update": 1, CALLS: 10.0, SECONDS: 1.0, "graft/num_grafts": 3.0},
        {"update": 2, CALLS: 5.0, SECONDS: 2.0, "eval/accuracy": 0.75},
    ]
    first, second = curve(lines)
    assert first["accuracy"] == 0.25 and first["eval/accuracy"] == 0.5 and first[CALLS] == 0
    assert second["accuracy"] == 0.75 and second["update"] == 2
    assert (second[CALLS], second[SHOWN], second[SECONDS]) == (15, 18, 3)
    with pytest.raises(DataError, match="no evaluation"):
        curve(lines[1:2])


def test_results_survive_a_cut_line_and_equal_runs_get_their_own(tmp_path: Path) -> None:
    path, runs = tmp_path / "results.jsonl", make_plan(written(tmp_path, SMALL)).runs
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
    with pytest.raises(DataError, match="line 1: not a run of a study"):
        read_results(path)


def test_two_studies_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StorageError, match="another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
