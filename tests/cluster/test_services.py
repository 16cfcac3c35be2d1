"""Grafts and tool calls of a run on a cluster, against the same run in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.nodes import TOKEN
from tests.cluster.parts import needs_ray

from treegraft import train
from treegraft.core.types import GraftCause
from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.load import load_config

pytestmark = [needs_ray, pytest.mark.slow]
SMALL = (
    # Evaluations of the warm-up publish version 0 again and again, with other weights each time.
    "warmup.num_steps=120",
    "warmup.eval_every=60",
    "tasks.num_train=40",
    "tasks.num_eval=4",
    "run.num_updates=3",
    "tasks.search_world.hops=[1,2]",
    "run.tasks_per_update=4",
    "explore.num_leaves=4",
    "eval.at_start=false",
    "eval.at_end=false",
    "eval.every=0",
    "explore.explorers=['graft']",
    "explore.graft.num_hybrid=3",
    "buffer.path=expert",
    "buffer.encoder=hashing",
    "buffer.grow.num_best=2",
    "tools.use=['tests.cluster.parts:Odd']",
    "buffer.random_prob=0.2",
)


def trees_of(run_dir: Path) -> list[Any]:
    """Each tree's steps: place, tokens, cause; its rewards."""
    return [
        (
            [
                (step.id, step.token_ids.tolist(), step.cause, step.content.calls)
                for step in tree.steps
            ],
            [leaf.reward for leaf in tree.leaves],
        )
        for tree in read_trees(run_dir)
    ]


def test_grafts_and_calls_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)

    def config(name: str) -> Any:
        own = (f"run.dir={tmp_path}", f"run.name={name}")
        return load_config("demo", [*SMALL, *own, "cluster.engines=2"])

    train(config("alone"), display=False)
    train(config("spread"), display=False, placement="ray")
    found = trees_of(tmp_path / "spread")
    assert found == trees_of(tmp_path / "alone") and len(found) == 12
    causes = [cause for steps, _ in found for _, _, cause, _ in steps]
    assert any(isinstance(cause, GraftCause) for cause in causes)
    spread, alone = (read_metrics(tmp_path / name) for name in ("spread", "alone"))
    names = ("retrieve/num_asked", "retrieve/nothing_frac", "buffer/num_own", "tools/odd_calls")
    for mine, other in zip(spread, alone, strict=True):
        assert {name: mine.get(name) for name in names} == {name: other.get(name) for name in names}
    assert max(line.get("retrieve/num_asked", 0.0) for line in spread) > 0
    assert not list((tmp_path / "spread" / "buffer" / "states").iterdir())
    assert json.loads((tmp_path / "spread" / "config.json").read_text())["run"]["name"] == "spread"
    growing = {
        one["resource"]["attributes"]["treegraft.role"]
        for one in found.values()
        if one["name"] == "grow"
    }
    assert growing == {"engine 0", "engine 1"}
