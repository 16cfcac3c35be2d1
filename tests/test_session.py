"""A session in a loop of one's own: stopped and gone on with, it equals a loop that never stopped,
and `train`, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import is_timing, tiny

from treegraft import Session, Tree, read_trees, train
from treegraft.runs.checkpoint import read_state
from treegraft.runs.record import read_metrics
from treegraft.traces.buffer import TraceBuffer

# peft uses names that transformers is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

NUM_UPDATES = 4
STOPPED = 2
"""The update after which a loop is saved and another one goes on."""


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward by which rollouts of random weights differ."""
    return [float(len(text) % 7) / 6 for text in completions]


GRAFTED: dict[str, Any] = {
    "explore": {"explorers": ["graft"], "graft": {"num_hybrid": 2, "probability": 0.9}},
    "buffer": {"path": "expert", "encoder": "hashing", "grow": {"num_best": 1}},
}
LESSONS: dict[str, Any] = {
    "buffer": {"path": "self", "encoder": "hashing", "grow": {"num_best": 1}},
    "loss": {"lesson_coef": 0.5},
    "learn": {"num_lessons": 2},
}
LOOPS: dict[str, dict[str, Any]] = {
    "full weights": {},
    "adapters": {"model": {"lora": {"rank": 4, "alpha": 8}}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "adapters in bfloat16": {"model": {"dtype": "bfloat16", "lora": {"rank": 4}}},
    "gradient checkpointing": {
        "learn": {"num_epochs": 2},
        "model": {"gradient_checkpointing": True},
    },
    "a reference": {"loss": {"kl_coef": 0.5}},
    "a falling learning rate": {"learn": {"schedule": "linear"}},
    "a growing buffer": GRAFTED,
    "own lessons": LESSONS,
    "a sampler that learns": {"sampler": {"kind": "difficulty"}},
    "a sampler with references": {
        "sampler": {"kind": "difficulty", "num_references": 2, "encoder": "hashing"}
    },
    "rounds": {"rollout": {"max_rounds": 3}},
    "replayed groups": {"replay": {"fresh_frac": 0.7}, "loss": {"engine_ratio_cap": 1e9}},
    "all at once": {
        **GRAFTED,
        "model": {"lora": {"rank": 4, "alpha": 8}},
        "loss": {"kl_coef": 0.5, "lesson_coef": 0.5},
        "learn": {"schedule": "cosine"},
        "sampler": {"kind": "difficulty"},
    },
}
HAPPENED = {
    "a reference": "learn/kl",
    "a growing buffer": "buffer/num_own",
    "own lessons": "lesson/num_lessons",
    "replayed groups": "replay/num_groups",
    "all at once": "lesson/num_lessons",
}
"""A metric above 0 in the last update, which shows that a loop does what it is named after."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny agent that has seen demonstrations, so that some of its trajectories are grafted onto
    and stored."""
    with Session(tiny(warmup={"num_steps": 60, "graft_prob": 0.3})) as session:
        assert len([*session.warm_up()]) == 60
        session.save(folder := tmp_path_factory.mktemp("start") / "agent")
    return folder


def tables_of(kind: str, model: Path | str, **more: Any) -> dict[str, Any]:
    own = tiny(
        run={"num_updates": NUM_UPDATES},
        model={"path": str(model)},
        reward={"funcs": ["tests.test_session:length"]},
        warmup={"num_steps": 0},
        eval={"every": 0, "at_start": False, "at_end": False},
    )
    for tables in (LOOPS[kind], more):
        for name, table in tables.items():
            own[name] = {**own.get(name, {}), **table}
    return own


def make(session: Session, numbers: Sequence[int]) -> Iterator[tuple[list[Tree], dict[str, float]]]:
    """Makes updates; yields the trees and the metrics of each."""
    for update in numbers:
        trees = session.sample(update)
        trees = session.credit(trees)
        trees = session.learn(trees, update)
        session.sync_weights(update)
        metrics = session.pop_metrics()
        yield (
            trees.recorded,
            {key: value for key, value in metrics.items() if not is_timing(key)},
        )


def saved(folder: Path) -> dict[str, Any]:
    """Returns what a checkpoint holds, by file: of a buffer its traces, of the state all but
    checksums, of other files their bytes."""
    found: dict[str, Any] = {}
    for file in folder.rglob("*"):
        name = file.relative_to(folder).as_posix()
        if file.name == "state.json":
            # Less what only a run counts.
            found[name] = replace(read_state(folder), metrics_size=0, beside={}, spent=(0, 0))

        elif file.suffix == ".sqlite":
            found[name] = traces_of(file)
        elif file.is_file():
            found[name] = file.read_bytes()
    return found


def traces_of(file: Path) -> list[str]:
    with TraceBuffer(file, None, is_frozen=True) as buffer:
        return sorted(map(repr, buffer.trajectories()))


def differing(ours: Path, theirs: Path) -> list[str]:
    """Returns the files in which two checkpoints differ."""
    found = saved(ours)
    expected = saved(theirs)
    return sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_that_stops_and_goes_on_is_one_that_never_stopped(
    kind: str, start: Path, tmp_path: Path
) -> None:
    tables, [half, ours, theirs] = tables_of(kind, start), [tmp_path / name for name in "abc"]
    with Session(tables) as session:
        first = [*make(session, range(1, STOPPED + 1))]
        session.save(half)
        later = [*make(session, range(STOPPED + 1, NUM_UPDATES + 1))]
        session.save(theirs)
    with Session(tables, checkpoint=half) as session:
        assert session.update == STOPPED
        again = [*make(session, range(session.update + 1, NUM_UPDATES + 1))]
        session.save(ours)
    for (trees, metrics), (other_trees, other_metrics) in zip(again, later, strict=True):
        assert metrics == other_metrics
        assert trees == other_trees
    assert differing(ours, theirs) == []
    assert "treegraft/optimiser.safetensors" in differing(half, ours)
    assert all(metrics["learn/grad_norm"] > 0 for _, metrics in [*first, *again])
    if kind in HAPPENED:
        assert again[-1][1][HAPPENED[kind]] > 0


def test_a_loop_is_train(start: Path, tmp_path: Path) -> None:
    """Trees, metrics and checkpoints of the same settings, with the warm-up; and a loop goes on
    from a checkpoint of a run, also from an earlier one."""
    more = {"warmup": {"num_steps": 3}, "checkpoint": {"every": 1, "keep": 9}}
    tables = tables_of("all at once", start, **more)
    tables["run"] |= {"dir": str(tmp_path), "name": "run"}
    run = train(tables, display=False).run_dir
    lines = {line["update"]: line for line in read_metrics(run)}

    def check(update: int, trees: list[Tree], metrics: dict[str, float]) -> None:
        assert trees == read_trees(run / "trees" / f"update-{update:06d}")
        theirs = {key: value for key, value in lines[update].items() if not is_timing(key)}
        only_of_runs = ("update", "policy_version", "health/", "eval/", "warmup/")
        assert metrics == {
            key: value for key, value in theirs.items() if not key.startswith(only_of_runs)
        }

    with Session(tables) as session:
        assert [step.num_steps for step in session.warm_up()] == [1, 2, 3]
        for update, made in enumerate(make(session, range(1, NUM_UPDATES + 1)), 1):
            check(update, *made)
        session.save(tmp_path / "whole")
    checkpoints = run / "checkpoints"
    beside = ["treegraft/buffer/traces.sqlite", "treegraft/reference/reference.safetensors"]
    assert differing(tmp_path / "whole", checkpoints / f"update-{NUM_UPDATES:06d}") == beside
    ours = saved(tmp_path / "whole")
    assert ours[beside[1]] == (run / "reference" / "reference.safetensors").read_bytes()
    assert ours[beside[0]] == traces_of(run / "buffer" / "traces.sqlite")

    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with Session(tables, checkpoint=checkpoints / f"update-{STOPPED:06d}") as session:
        assert session.update == STOPPED and [*session.warm_up()] == []
        later = range(STOPPED + 1, NUM_UPDATES + 1)
        for update, made in zip(later, make(session, later), strict=True):
            check(update, *made)
        session.save(tmp_path / "again")
    assert differing(tmp_path / "again", tmp_path / "whole") == []
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_warm_up_that_stops_goes_on(tmp_path: Path) -> None:
    tables = tables_of("full weights", "tiny", warmup={"num_steps": 6})
    with Session(tables) as session:
        whole = [dict(step.metrics) for step in session.warm_up()]
        expected = [*make(session, [1])]
        session.save(tmp_path / "whole")
    with Session(tables) as session:
        for step in session.warm_up():
            if step.num_steps == 4:
                break
        session.save(tmp_path / "half")
    with Session(tables, checkpoint=tmp_path / "half") as session:
        assert (session.num_warm_up_steps, session.update) == (4, 0)
        assert [dict(step.metrics) for step in session.warm_up()] == whole[4:]
        assert [*make(session, [1])] == expected
        session.save(tmp_path / "again")
    assert differing(tmp_path / "again", tmp_path / "whole") == []


def test_a_checkpoint_that_is_saved_again_is_the_same(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a name without a folder above it."""
    monkeypatch.chdir(tmp_path)
    tables = tables_of("all at once", start)
    with Session(tables) as session:
        _ = [*make(session, [1, 2])]
        session.save("agent")
    with Session(tables, checkpoint="agent") as session:
        session.save("again")
    assert differing(Path("again"), Path("agent")) == []


def test_an_awaited_loop_is_the_same(start: Path) -> None:
    tables = tables_of("full weights", start, eval={"num_samples": 1})

    async def awaited() -> Any:
        async with Session(tables) as session:
            own = session.tasks[2:4]
            trees = session.learn(session.credit(await session.asample(1, own)), 1)
            await session.async_weights(1)
            return trees, await session.aevaluate()

    with Session(tables) as session:
        own = session.tasks[2:4]
        trees = session.learn(session.credit(session.sample(1, own)), 1)
        session.sync_weights(1)
        evaluation = session.evaluate()
    found = asyncio.run(awaited())
    assert evaluation is not None and [tree.task.id for tree in trees] == [one.id for one in own]
    assert found[0] == trees and found[1].passes == evaluation.passes
