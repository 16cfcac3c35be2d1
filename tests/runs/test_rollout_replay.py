"""Groups of earlier updates beside fresh ones: which are drawn, with which loss, and after a
resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.policy.test_packed_equals_separate import trees_for
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.slow_learner import distance, gradient_of, make_learner, slow_loss
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.algo.losses import clipped_surrogate, engine_correction
from treegraft.core.types import Tree
from treegraft.runs import replay as replay_module
from treegraft.runs.record import RunFolder
from treegraft.runs.replay import Replay
from treegraft.runs.tree_files import write_trees
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.policy import LossSettings
from treegraft.train import train


def settings_of(fresh_frac: float = 0.5) -> Config:
    return load_config(
        {
            "run": {"tasks_per_update": 4},
            "replay": {"fresh_frac": fresh_frac},
            "loss": {"engine_ratio_cap": 1e9},
        }
    )


def group(update: int, task: str, *, varies: bool = True) -> Tree:
    part = Part.of("pp", Part("ss", reward=1.0), Part("sss", reward=0.0 if varies else 1.0))
    tree = assign_credit(build_tree(part, task_id=task, seed=update))
    steps = tuple(replace(step, policy_version=update - 1) for step in tree.steps)
    return replace(tree, group_id=f"{update}/{task}", steps=steps)


def learned(tree: Tree) -> Tree:
    """The tree with the learner's scores, where it teaches anything."""
    if not any(leaf.advantage for leaf in tree.leaves):
        return tree
    steps = (replace(step, old_logprobs=step.sampling_logprobs) for step in tree.steps)
    return replace(tree, steps=tuple(steps))


def record(folder: RunFolder, update: int, trees: list[Tree]) -> None:
    folder.trees_dir.mkdir(parents=True, exist_ok=True)
    write_trees(folder.trees_path(update), trees)


def run_updates(replay: Replay, folder: RunFolder, updates: range) -> list[list[str]]:
    """Each update samples what is not replayed, and one group more than it learns from; returns the
    groups learned from."""
    found = []
    for update in updates:
        # Task t/3 never varies, and tasks come again.
        names = [f"t/{(3 * update + n) % 7}" for n in range(4 - replay.num_due)]
        fresh = [group(update, name, varies=name != "t/3") for name in names]
        mixed = replay.mixed(update, fresh)
        found.append([tree.group_id for tree in mixed])
        fresh = replay.take_fresh(update, [learned(tree) for tree in mixed])
        record(folder, update, [*fresh, group(update, "t/dropped")])
    return found


def test_half_of_an_update_comes_from_earlier_ones(tmp_path: Path) -> None:
    replay = Replay(settings_of(), RunFolder(tmp_path), 0)
    folder = RunFolder(tmp_path)
    found = run_updates(replay, folder, range(1, 5))
    assert found[0] == ["1/t/3", "1/t/4", "1/t/5", "1/t/6"]
    for update, names in enumerate(found[1:], start=2):
        fresh = [name for name in names if name.startswith(f"{update}/")]
        assert len(names) == 4 and len(fresh) == 2
        assert not any(name.endswith("t/3") for name in names if name not in fresh)
        # One of each in either mini-batch.
        assert [name in fresh for name in names[:2]].count(True) == 1
    metrics = replay.take_metrics()
    assert metrics["replay/num_groups"] == 2 and metrics["replay/age_mean"] >= 1


@pytest.mark.parametrize("capacity", [2, 3, 512])
def test_a_resumed_run_draws_the_same_groups(
    tmp_path: Path, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "CAPACITY", capacity)
    config = settings_of()
    whole = Replay(config, RunFolder(tmp_path), 0)
    folder = RunFolder(tmp_path)
    run_updates(whole, folder, range(1, 4))
    resumed = Replay(config, folder, 3)
    assert list(resumed._groups.values()) == list(whole._groups.values())
    assert len(resumed._groups) <= capacity
    for one, two in zip(
        run_updates(whole, folder, range(4, 7)),
        run_updates(resumed, folder, range(4, 7)),
        strict=True,
    ):
        assert one == two


def test_groups_that_teach_by_steps_alone_are_replayed(tmp_path: Path) -> None:
    """APPO's branches teach the steps above them; no leaf needs an advantage of its own."""
    tree = group(1, "t/1")
    leaves = tuple(replace(leaf, advantage=0.0) for leaf in tree.leaves)
    steps = tuple(replace(step, advantage=0.5 * any(step.loss_mask)) for step in tree.steps)
    own = replace(
        tree, leaves=leaves, steps=tuple(replace(one, old_logprobs=None) for one in steps)
    )
    scored = tuple(replace(step, old_logprobs=step.sampling_logprobs) for step in steps)
    replay = Replay(settings_of(), RunFolder(tmp_path), 0)
    replay.take_fresh(1, [replace(own, steps=scored)])
    assert replay.num_due == 1
    # One that the learner passed over is not.
    replay = Replay(settings_of(), RunFolder(tmp_path), 0)
    replay.take_fresh(1, [own])
    assert replay.num_due == 0


def test_the_files_of_the_groups_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    few, all_of_them = (Replay(settings_of(), folder, 0) for _ in range(2))
    monkeypatch.setattr(replay_module, "CAPACITY", 2)
    run_updates(few, folder, range(1, 6))
    names = few.labels()
    kept = {int(tree.group_id.split("/")[0]) for tree in few._groups.values()}
    assert names == [f"trees/update-{n:06d}" for n in range(min(kept), 6)] and min(kept) > 1
    monkeypatch.setattr(replay_module, "CAPACITY", 512)
    assert len(all_of_them.labels()) == 5
    assert Replay(settings_of(1.0), folder, 5).labels() == ()


def test_law_16_trees_that_a_resume_replays_do_not_change_unseen(tmp_path: Path) -> None:
    settings = tiny(
        run={"num_updates": 1, "dir": str(tmp_path), "name": "a"},
        replay={"fresh_frac": 0.5},
        loss={"engine_ratio_cap": 1e9},
        eval={"every": 0, "at_start": False, "at_end": False},
    )
    run = train(settings).run_dir
    longer = json.loads((run / "config.json").read_text())
    longer["run"]["num_updates"] = 2
    trees = run / "trees" / "update-000001.jsonl.zst"
    data = bytearray(trees.read_bytes())
    data[-1] ^= 1
    trees.write_bytes(data)
    with raises_code("inputs-changed"):
        train(longer, resume=run)
    trees.unlink()
    with raises_code("inputs-changed"):
        train(longer, resume=run)
    train(longer, resume=run, accepts_changes=True)


def test_without_the_setting_nothing_is_kept(tmp_path: Path) -> None:
    replay = Replay(settings_of(1.0), RunFolder(tmp_path), 5)
    fresh = [group(6, "t/1")]
    assert replay.num_due == 0 and replay.mixed(6, fresh) == fresh
    assert replay.take_fresh(6, fresh) == fresh and replay.take_metrics() == {}


@pytest.mark.parametrize(
    ("data", "about"),
    [
        ({"replay": {"fresh_frac": 0.5}}, "loss.engine_ratio_cap"),
        (
            {
                "replay": {"fresh_frac": 0.5},
                "loss": {"old_logprobs": "engine"},
                "track": {"record_trees": False},
            },
            "track.record_trees",
        ),
    ],
)
def test_settings_that_replay_needs(data: dict[str, Any], about: str) -> None:
    with raises_code("settings-contradict", about):
        load_config(data)


def test_rolloutreplays_loss_by_hand() -> None:
    """max(-r A, -clip(r, r_old (1 - e), r_old (1 + e)) A), r = π/μ, r_old = π_old/μ."""
    new, old, mu = (torch.tensor(column).log() for column in ([0.6, 0.2], [0.4, 0.4], [0.1, 0.8]))
    advantages = torch.tensor([1.0, -1.0])
    terms = clipped_surrogate(new, old, advantages, clip_low=0.2, clip_high=0.2)
    weights, _ = engine_correction(old - mu, 1e9)
    # r = 6 is clipped at 4 · 1.2; r = .25 at .5 · .8.
    assert (terms.losses * weights).tolist() == pytest.approx([-4.8, 0.4])


def test_law_1_with_a_replayed_group() -> None:
    """Ratios to the policy that sampled; the engine's gap is that of the fresh group alone."""
    loss = LossSettings(aggregation="token-mean", engine_ratio_cap=1e9)
    model = build_model("llama")
    twin = build_model("llama")
    old = group(1, "t/1")
    new = group(5, "t/2")
    (new,) = trees_for(replace_ratio(loss), model, [new])
    learner, descent = make_learner(model, loss)
    _, metrics = learner.learn([old, new])
    slow_loss(twin, [old, new], loss, 7.0).backward()
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
    # Within .4 nats by construction; the old group's are random, some nats away.
    assert 0 < metrics["learn/engine_gap"] < 0.4


def test_where_replayed_groups_alone_teach_no_gap_is_reported() -> None:
    """Law 7: 0.0 would end the breaches in a row."""
    fresh = group(5, "t/2", varies=False)
    learner, _ = make_learner(build_model("llama"), LossSettings(engine_ratio_cap=1e9))
    _, metrics = learner.learn([group(1, "t/1"), fresh])
    assert metrics["learn/num_optimiser_steps"] == 1 and "learn/engine_gap" not in metrics


def replace_ratio(loss: LossSettings) -> LossSettings:
    return loss.model_copy(update={"engine_ratio": "sequence"})
