"""Tests of the tool, the reward and the recipe: pytest"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from my_reward import one_call
from my_tool import calculate

from treegraft import load_config, read_trees, train


def test_the_tool_calculates() -> None:
    assert calculate(" 3 + 4 * 5 ") == "23"
    with pytest.raises(ValueError, match="whole numbers"):
        calculate("3 / 4")


def test_the_reward_asks_for_one_call() -> None:
    trajectories = [SimpleNamespace(num_tool_calls=number) for number in (0, 1, 2)]
    assert one_call(trajectories=trajectories) == [0.0, 1.0, 0.0]  # type: ignore[arg-type]


def test_one_update(tmp_path: Path) -> None:
    """Every trajectory gets both rewards; `run.num_updates=1` and the like keep this short."""
    overrides = [
        *(f"run.dir={tmp_path}", "run.num_updates=1", "run.tasks_per_update=2"),
        *("warmup.num_steps=0", "eval.at_start=false", "eval.at_end=false"),
    ]
    (tree, _) = read_trees(train(load_config("recipe.toml", overrides), display=False).run_dir)
    for leaf in tree.leaves:
        assert set(leaf.reward_parts) == {"math", "my_reward:one_call"}
