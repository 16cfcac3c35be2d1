"""Overlap of sampling and learning: how old a step may be, what a resume repeats, what is
refused."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.test_grafted_runs import BOTH
from tests.tiny import is_timing, tiny

from treegraft.core.errors import SettingError
from treegraft.core.threads import in_thread
from treegraft.core.types import Task, Tree
from treegraft.policy.learn.learner import Learner
from treegraft.rollout.ahead import Ahead, Grown
from treegraft.rollout.loop import Grower
from treegraft.rollout.measure import has_version, staleness_metrics
from treegraft.rollout.rounds import Sampled
from treegraft.runs.metrics import check_known
from treegraft.runs.record import read_metrics, read_trees
from treegraft.runs.run import Run, RunResult
from treegraft.settings.load import load_config
from treegraft.tasks.build import build_tasks
from treegraft.tasks.sampler import draw_tasks
from treegraft.train import train

STALE: dict[str, Any] = {"rollout": {"max_staleness": 1}, "loss": {"engine_ratio_cap": 2.0}}


# --- when an update's trees begin -----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    waits=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    is_known=st.booleans(),
)
def test_no_update_begins_before_its_policy_is_new_enough(
    max_staleness: int, waits: Sequence[int], is_known: bool
) -> None:
    begun: dict[int, tuple[int, int]] = {}
    """(version, tasks drawn before) at the beginning of each update, in order."""
    version = 0

    async def sample(number: int, num_drawn: int) -> Sampled:
        begun[number] = (version, num_drawn)
        for _ in range(waits[number - 1]):
            await asyncio.sleep(0)
        return Sampled(num_drawn=5 if is_known else 5 * number)

    async def main() -> list[Grown]:
        nonlocal version
        taken = []
        async with Ahead(
            sample,
            max_staleness=max_staleness,
            first=1,
            last=6,
            num_drawn=0,
            num_known=5 if is_known else None,
        ) as ahead:
            for number in range(1, 7):
                ahead.begin(version)
                taken.append(await ahead.take(number))
                if not max_staleness:
                    assert max(begun) == number
                version = number
                ahead.begin(version)
                await asyncio.sleep(0)
        return taken

    taken = asyncio.run(main())
    assert list(begun) == [1, 2, 3, 4, 5, 6]
    for number, (began_by, _) in begun.items():
        assert 0 <= number - 1 - began_by <= max_staleness
    drawn = [
        5 * number if is_known else sum(5 * n for n in range(number + 1)) for number in range(7)
    ]
    assert [before for _, before in begun.values()] == drawn[:6]
    assert [grown.num_drawn for grown in taken] == drawn[1:]


def test_what_grows_ahead_is_given_up_with_the_block() -> None:
    ended = []

    async def sample(number: int, num_drawn: int) -> Sampled:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)
        return Sampled()

    async def main() -> None:
        async with Ahead(
            sample, max_staleness=2, first=4, last=9, num_drawn=0, num_known=3
        ) as ahead:
            ahead.begin(3)
            await asyncio.sleep(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert ended == [4, 5, 6]


def test_work_in_a_thread_returns_and_raises_and_nobody_waits_for_a_cancelled_one() -> None:
    assert asyncio.run(in_thread(lambda: threading.current_thread().name, "here")) == "here"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 / 0, "fails"))
    go_on, is_done = threading.Event(), threading.Event()

    def slow() -> None:
        assert go_on.wait(30)
        is_done.set()

    async def main() -> None:
        async with asyncio.timeout(0.05):
            await in_thread(slow, "slow")

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert not is_done.is_set()
    go_on.set()
    assert is_done.wait(30)


# --- whole runs -----------------------------------------------------------------------------------


def start(folder: Path, name: str = "a", **tables: Any) -> RunResult:
    own = copy.deepcopy(tiny(**STALE) if tables.pop("overlaps", True) else tiny())
    for table, values in tables.items():
        own[table] = {**own.get(table, {}), **values}
    own["run"] |= {"num_updates": 4, "name": name, "dir": str(folder)}
    own["eval"] = {"every": 2, "num_samples": 0}
    return train(own, display=False)


def trees_of(run_dir: Path, update: int) -> list[Tree]:
    return read_trees(run_dir / "trees" / f"update-{update:06d}.jsonl")


def versions(trees: Sequence[Tree]) -> list[int]:
    return [step.policy_version for tree in trees for step in tree.steps if any(step.sampled_mask)]


def drawn(run_dir: Path) -> list[list[str]]:
    """Task ids of each update, as synchronous updates draw them."""
    config = load_config(run_dir / "config.json")
    tasks, size = build_tasks(config.tasks, config.run.seed).train_tasks(), 3
    return [
        [task.id for task in draw_tasks(tasks, size * n, size=size, seed=config.run.seed)]
        for n in range(4)
    ]


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first learning waits for a tree of the second update to end."""
    is_grown, has_waited = threading.Event(), []
    grow, learn = Grower.grow, Learner.learn

    async def noticed(self: Grower, task: Task, **options: Any) -> Tree:
        tree = await grow(self, task, **options)
        if tree.group_id.startswith("2/"):
            is_grown.set()
        return tree

    def waits(self: Learner, *trees: Any) -> Any:
        has_waited.append(is_grown.wait(60))
        return learn(self, *trees)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grower, "grow", noticed)
        patch.setattr(Learner, "learn", waits)
        run_dir = start(tmp_path_factory.mktemp("overlap")).run_dir
    assert has_waited == [True] * 4
    return run_dir


def test_trees_grow_while_others_are_learned_and_are_never_too_old(overlapped: Path) -> None:
    lines = read_metrics(overlapped)[1:]
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    for number, line in enumerate(lines, 1):
        check_known(line)
        ages = [number - 1 - version for version in versions(trees_of(overlapped, number))]
        assert set(ages) <= {0, 1}
        assert line["rollout/staleness_max"] == max(ages)
        assert line["rollout/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert line["time/overlap_s"] >= 0 and "learn/engine_capped_frac" in line
        # Compared only where weights are those that have sampled.
        assert ("learn/engine_gap" in line) <= (0 in ages)
    assert set(versions(trees_of(overlapped, 2))) >= {0}


def test_the_first_update_is_that_of_a_synchronous_run(overlapped: Path, tmp_path: Path) -> None:
    plain = start(tmp_path, overlaps=False).run_dir

    def tokens(run_dir: Path) -> list[tuple[int, ...]]:
        return [step.token_ids for tree in trees_of(run_dir, 1) for step in tree.steps]

    assert tokens(plain) == tokens(overlapped)
    for number, ids in enumerate(drawn(plain), 1):
        for run_dir in (plain, overlapped):
            assert [tree.task.id for tree in trees_of(run_dir, number)] == ids
    assert not any("staleness" in key or "overlap" in key for key in read_metrics(plain)[-1])


def test_only_the_age_of_trees_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no tree begins early, everything is what it is in turn."""
    cap = {"loss": {"engine_ratio_cap": 2.0}}
    plain = start(tmp_path, "plain", overlaps=False, **cap).run_dir
    monkeypatch.setattr(Ahead, "begin", lambda self, version: None)
    late = start(tmp_path, "late").run_dir
    for number in range(1, 5):
        assert trees_of(plain, number) == trees_of(late, number)
    for ours, theirs in zip(read_metrics(late), read_metrics(plain), strict=True):
        assert {key: ours[key] for key in theirs if not is_timing(key)} == {
            key: value for key, value in theirs.items() if not is_timing(key)
        }


def test_a_stopped_run_loses_nothing_and_learns_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Run.record_update

    def stops(self: Run, update: int, *more: Any) -> None:
        record(self, update, *more)
        if update == 2:
            self.stop.ask()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "record_update", stops)
        start(tmp_path, eval={"every": 0})
    run_dir = tmp_path / "a"
    assert [line["update"] for line in read_metrics(run_dir)[1:]] in ([1], [1, 2])
    train(None, resume=run_dir, display=True)
    assert "does not equal an undisturbed one bit for bit" in capsys.readouterr().out
    assert [line["update"] for line in read_metrics(run_dir)] == [0, 1, 2, 3, 4]
    for number, ids in enumerate(drawn(run_dir), 1):
        trees = trees_of(run_dir, number)
        assert [tree.group_id for tree in trees] == [f"{number}/{one}" for one in ids]
        assert {number - 1 - version for version in versions(trees)} <= {0, 1}


def test_rounds_grafts_lessons_and_a_reference_work_beside_it(tmp_path: Path) -> None:
    own = copy.deepcopy(tiny(**BOTH))
    own["explore"]["num_leaves"] = own["explore"]["entropy"]["num_starts"] = 3
    own["explore"]["graft"]["num_hybrid"] = 2
    own["rollout"] |= {"max_staleness": 2, "max_rounds": 2}
    own["loss"] |= {"engine_ratio_cap": 2.0, "kl_coef": 0.1, "lesson_coef": 0.1}
    own["loss"]["engine_ratio"] = "sequence"
    own["run"] |= {"name": "b", "dir": str(tmp_path), "num_updates": 3}
    own["eval"] = {"every": 0, "num_samples": 0, "at_start": False}
    run_dir = train(own, display=False).run_dir
    lines = read_metrics(run_dir)[1:]
    assert {"learn/kl", "lesson/num_lessons", "buffer/num_own"} <= lines[-1].keys()
    trees = [trees_of(run_dir, number) for number in (1, 2, 3)]
    ids = [[tree.task.id for tree in update] for update in trees]
    # The first update draws the first tasks, the next one those behind them, whatever its rounds.
    config = load_config(run_dir / "config.json")
    tasks, num_before = build_tasks(config.tasks, config.run.seed).train_tasks(), 0
    for line, names in zip(lines, ids, strict=True):
        first = draw_tasks(tasks, num_before, size=3, seed=config.run.seed)
        assert {task.id for task in first} <= set(names)
        num_before += 3 * int(line["rollout/num_rounds"])
    for number, update in enumerate(trees, 1):
        assert {number - 1 - version for version in versions(update)} <= {0, 1, 2}


# --- numbers, and what is refused -----------------------------------------------------------------


def test_staleness_counts_versions_of_sampled_steps(overlapped: Path) -> None:
    trees = trees_of(overlapped, 1)
    # All by version 0, learned by weights of version 3, say.
    assert staleness_metrics(trees, 3) == {
        "rollout/staleness_mean": 3.0,
        "rollout/staleness_max": 3.0,
    }
    assert has_version(trees, 0) and not has_version(trees, 1)
    assert staleness_metrics([], 3) == {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({}, "set loss.engine_ratio_cap (about 2)"),
        ({"loss": {"engine_ratio_cap": 2.0}, "replay": {"fresh_frac": 0.5}}, "replay.fresh_frac"),
    ],
)
def test_it_is_refused_where_it_would_be_wrong(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=r"rollout.max_staleness: got 1") as error:
        load_config(tiny(**tables, rollout={"max_staleness": 1}))
    assert said in str(error.value)
    load_config(tiny(rollout={"max_staleness": 1}, loss={"old_logprobs": "engine"}))
