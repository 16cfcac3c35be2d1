"""A session in a loop of one's own: stopped and gone on with, it equals a loop that never stopped,
and `train`, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import is_timing, tiny

from treegraft import Session, Tree, read_trees, train
from treegraft.runs.checkpoint import read_state
from treegraft.runs.record import read_metrics
from treegraft.traces.buffer import FrozenBuffer

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
    # So few that some are evicted.
    "buffer": {"path": "expert", "encoder": "hashing", "grow": {"num_best": 1, "capacity": 4}},
}
LESSONS: dict[str, Any] = {
    "buffer": {"path": "self", "encoder": "hashing", "grow": {"num_best": 1}},
    "loss": {"lesson_coef": 0.5},
    "learn": {"num_lessons": 2},
}
LOOPS: dict[str, dict[str, Any]] = {
    "full weights": {},
    "adapters merged": {"model": {"lora": {"rank": 4, "alpha": 8, "merge": True}}},
    "adapters apart": {"model": {"lora": {"rank": 4, "alpha": 8, "merge": False}}},
    "a reference": {"loss": {"kl_coef": 0.5}},
    "a falling learning rate": {"learn": {"schedule": "linear"}},
    "a growing buffer": GRAFTED,
    "own lessons": LESSONS,
    "a sampler that learns": {"sampler": {"kind": "difficulty"}},
    "a sampler with references": {
        "sampler": {"kind": "difficulty", "num_references": 2, "every": 3, "encoder": "hashing"}
    },
    "rounds": {"rollout": {"max_rounds": 3}},
    "replayed groups": {"replay": {"fresh_frac": 0.7}},
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
    "all at once": "lesson/num_lessons",
}
"""A metric above 0 in the last update, which shows that a loop does what it is named after."""


def tables_of(kind: str, **more: Any) -> dict[str, Any]:
    own = tiny(
        run={"num_updates": NUM_UPDATES},
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
            found[name] = replace(read_state(folder), metrics_size=0, beside={}, best_accuracy=None)
        elif file.suffix == ".sqlite":
            with FrozenBuffer(file, None) as buffer:
                found[name] = sorted(map(repr, buffer.trajectories(with_evicted=True)))
        elif file.is_file() and file.name != ".trust":
            found[name] = file.read_bytes()
    return found


def differing(ours: Path, theirs: Path) -> list[str]:
    """Returns the files in which two checkpoints differ."""
    found, expected = saved(ours), saved(theirs)
    return sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_that_stops_and_goes_on_is_one_that_never_stopped(
    kind: str, tmp_path: Path
) -> None:
    tables, [half, ours, theirs] = tables_of(kind), [tmp_path / name for name in "abc"]
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
