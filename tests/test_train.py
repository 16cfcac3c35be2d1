"""A whole run on a tiny model: what it writes, what its checkpoints are, and laws 7, 9 and 11."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.error_codes import raises_code
from tests.support.slow_learner import gradients_of
from tests.support.tiny import differing, tiny, write_recipe
from tests.support.tiny_parts import ANSWERS, ASKED, SlowSearch

from treegraft import session
from treegraft.core import interrupt
from treegraft.core.errors import EngineError
from treegraft.core.interfaces import WeightSource
from treegraft.core.types import BranchCause, Status, StepContent, Task, ToolCall, Tree
from treegraft.evals.agent import answer_question
from treegraft.evals.evaluate import evaluate_checkpoint
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.learn.sft import Demonstrations, demonstration_tree
from treegraft.policy.load import load_model
from treegraft.policy.publish import limit_for
from treegraft.policy.tiny import build_word_tokenizer
from treegraft.policy.weights import ModelWeights
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.runs.checkpoint import read_state
from treegraft.runs.metrics import meaning
from treegraft.runs.record import read_metrics, read_trees
from treegraft.runs.tree_files import parts_in
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.policy import ModelSettings, WarmupSettings
from treegraft.tasks.sampler import draw_tasks
from treegraft.tasks.search_world import SearchWorld, WorldSearch
from treegraft.traces.demonstrations import read_demonstrations
from treegraft.train import RunResult, train

# peft, and gradient checkpointing on older releases, use names that transformers is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Recorder:
    """A display that remembers what it was told."""

    warnings: list[str] = field(default_factory=list)
    told: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.told.append((name, arguments))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def start(folder: Path, name: str = "a", display: Any = None, **tables: Any) -> RunResult:
    settings = tiny(
        **{**tables, "run": {"name": name, "dir": str(folder), **tables.get("run", {})}}
    )
    return train(settings, display=display)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mode_without_gradients_around_a_training_is_no_matter(
    mode: Callable[[], Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "run": {"num_updates": 1},
        "warmup": {"num_steps": 2},
        "eval": {"every": 0},
        "rollout": {"max_completion_tokens": 12},
    }
    plain = start(tmp_path, "a", display=False, **options)
    with mode():
        other = start(tmp_path, "b", display=False, **options)
    assert not differing(plain.run_dir, other.run_dir)


# --- gradients that are not finite ----------------------------------------------------------------


NARROW: dict[str, Any] = {
    "eval": {"every": 0, "at_start": False, "at_end": False},
    "rollout": {"max_completion_tokens": 12},
    "learn": {"num_minibatches": 1},
    "reward": {"funcs": ["tests.support.tiny_parts:by_text"]},
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], set[int]]:
    """The warm-up's optimiser steps and the updates' whose gradient has a NaN."""
    in_warmup = set[int]()
    in_updates = set[int]()
    plain = MasterAdamW.step

    def step(optimiser: MasterAdamW, *args: Any) -> float:
        if optimiser.num_steps + 1 in (in_warmup if args else in_updates):
            for gradient in gradients_of(optimiser).values():
                gradient.view(-1)[0] = float("nan")
        return plain(optimiser, *args)

    monkeypatch.setattr(MasterAdamW, "step", step)
    return in_warmup, in_updates


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_costs_its_step_alone(
    dtype: str, poisoned: tuple[set[int], set[int]], tmp_path: Path
) -> None:
    poisoned[0].add(2)
    poisoned[1].add(7)
    tables = {**NARROW, "run": {"num_updates": 20}, "model": {"dtype": dtype}}
    tables |= {"warmup": {"num_steps": 4}, "checkpoint": {"keep": 20}}
    run = start(tmp_path, **tables)
    lines = read_metrics(run.run_dir)
    assert lines[0]["warmup/num_skipped_steps"] == 1
    skipped = [line["update"] for line in lines[1:] if line["learn/num_skipped_steps"]]
    assert skipped == [7] and lines[7]["learn/num_optimiser_steps"] == 0
    assert lines[7]["health/not_finite"] == 1 and "health/not_finite" not in lines[8]
    found = sorted((run.run_dir / "checkpoints").glob("update-*"))
    weights = [load_file(one / "model.safetensors") for one in found]
    assert len(weights) == 20 and all(x.isfinite().all() for one in weights for x in one.values())
    state = load_file(found[-1] / "treegraft" / "optimiser.safetensors")
    assert all(bool(x.isfinite().all()) for x in state.values())
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(weights)]
    assert same[5] and not any(same[:5] + same[6:]), "update 7 alone moves no weight"
    assert answer_question(found[-1], "e1 ?")[0].steps


def test_three_gradients_in_a_row_that_are_not_finite_end_the_run(
    poisoned: tuple[set[int], set[int]], tmp_path: Path
) -> None:
    """With a checkpoint after the second, from which a resumed run ends at the same place."""
    poisoned[1].update({2, 4, 5, 6})
    tables = {**NARROW, "run": {"num_updates": 8}, "warmup": {"num_steps": 2}}
    with raises_code("gradient-not-finite"):
        start(tmp_path, **tables)
    run = tmp_path / "a"
    assert [line["update"] for line in read_metrics(run)] == [0, 1, 2, 3, 4, 5]
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept[-1] == "update-000005"
    with raises_code("gradient-not-finite"):
        train(None, resume=run)
    poisoned[1].clear()
    train(None, resume=run)
    assert len(read_metrics(run)) == 9


# --- the run folder -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return start(tmp_path_factory.mktemp("run"))


def test_the_run_folder_holds_what_the_design_says(run: RunResult) -> None:
    folder = run.run_dir
    assert load_config(folder / "config.json").run.num_updates == 2
    parts = [part.name for part in parts_in(folder / "trees")]
    kinds = [
        [f"eval-00000{update}-{kind}" for kind in ("greedy", "sampled")] for update in (0, 1, 2)
    ]
    assert parts == [*kinds[0], "update-000001", *kinds[1], "update-000002", *kinds[2]]
    assert run.checkpoint_dir == folder / "checkpoints" / "update-000002"
    assert not [path for path in folder.rglob("*") if path.name.endswith(".partial")]


def test_every_metric_is_known_and_none_is_missing(run: RunResult) -> None:
    lines = read_metrics(run.run_dir)
    assert (
        [line["update"] for line in lines]
        == [line["policy_version"] for line in lines]
        == [0, 1, 2]
    )
    for line in lines:
        assert all(map(meaning, line))
    wanted = {
        "reward/mean",
        "reward/std",
        "reward/hierarchical",
        "eval/accuracy",
        "eval/accuracy_sampled",
        "eval/pass_at_2",
        "rollout/num_sampled_tokens",
        "rollout/num_tool_calls",
        "rollout/retrieved_frac",
        "branch/num_branches",
        "learn/unique_frac",
        "learn/clip_frac",
        "learn/entropy",
        "learn/engine_gap",
        "learn/grad_norm",
        "learn/loss",
        "time/rollout_s",
        "time/learn_s",
        "time/update_s",
        "time/eval_s",
        "eval/accuracy_1_hop",
        "tools/search_calls",
    }
    assert wanted <= lines[-1].keys()
    assert {"warmup/loss", "time/warmup_s", "eval/accuracy"} <= lines[0].keys()
    latest: dict[str, float] = {}
    for line in lines:
        latest = {
            key: value for key, value in latest.items() if not key.startswith("health/")
        } | line
    del latest["update"]
    assert run.metrics == latest


def test_trees_are_recorded_after_learning(run: RunResult) -> None:
    for update in (1, 2):
        trees = read_trees(run.run_dir / "trees" / f"update-00000{update}.jsonl")
        assert [tree.group_id.partition("/")[0] for tree in trees] == [str(update)] * 3
        for tree in trees:
            assert all(step.policy_version == update - 1 for step in tree.steps[1:])
            assert all(leaf.advantage is not None for leaf in tree.leaves) and len(tree.leaves) == 4
            rewards = [leaf.reward for leaf in tree.leaves]
            if len(set(rewards)) > 1:
                assert all(
                    step.ratios is not None and step.old_logprobs is not None
                    for step in tree.steps[1:]
                )
                assert sum(leaf.advantage or 0.0 for leaf in tree.leaves) == pytest.approx(
                    0.0, abs=1e-6
                )


# --- checkpoints ----------------------------------------------------------------------------------


def recorded_gap(model: Any, trees: Sequence[Tree]) -> float:
    """Returns the largest difference between recorded log-probabilities and those of a plain
    forward pass."""
    gaps = []
    for tree in trees:
        for path in tree.trajectories():
            ids = torch.tensor([path.token_ids])
            with torch.no_grad():
                scores = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
            for place in range(1, len(path.token_ids)):
                if path.sampled_mask[place]:
                    gaps.append(
                        abs(float(scores[place - 1, path.token_ids[place]]) - path.logprobs[place])
                    )
    assert len(gaps) > 20
    return max(gaps)


def final_trees(run: RunResult) -> list[Tree]:
    return read_trees(run.run_dir / "trees" / "eval-000002-sampled.jsonl")


def test_transformers_loads_the_checkpoint_and_scores_as_the_engine_did(run: RunResult) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.checkpoint_dir)
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint_dir)
    trees = final_trees(run)
    assert recorded_gap(model, trees) < 1e-4
    assert tokenizer.encode(trees[0].task.question) == list(trees[0].steps[0].token_ids)
    assert (
        tokenizer.decode(tokenizer.encode("<search> e1 r2 </search>")) == "<search> e1 r2 </search>"
    )


def test_a_checkpoint_is_evaluated_and_asked(run: RunResult, tmp_path: Path) -> None:
    found = evaluate_checkpoint(run.run_dir, out=tmp_path / "trees.jsonl")
    ours = {
        key: value
        for key, value in run.metrics.items()
        if key.startswith("eval/") and "gain" not in key
    }
    assert found.metrics == ours and found.num_tasks == 4
    assert len(read_trees(tmp_path / "trees.jsonl")) == 8
    question = final_trees(run)[0].task.question
    answer, tokenizer = answer_question(run.checkpoint_dir, question)
    assert answer.task.question == question and answer.reward is None and answer.leaf.error is None
    greedy = read_trees(run.run_dir / "trees" / "eval-000002-greedy.jsonl")[0].trajectories()[0]
    # The same tokens up to the first fact, which lies in another world than that of the held-out
    # task.
    assert tokenizer.decode(
        answer.token_ids[: answer.sampled_mask.index(True) + 1]
    ) in tokenizer.decode(greedy.token_ids)


def test_a_place_for_trees_is_looked_at_before_the_evaluation(tmp_path: Path) -> None:
    config = load_config(tiny(model={"path": str(tmp_path / "nowhere")}))
    with raises_code("out-is-folder"):
        evaluate_checkpoint(None, config, out=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        evaluate_checkpoint(None, config, out=tmp_path / "file" / "trees.jsonl")


def test_adapters_are_merged_into_checkpoints(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tables: dict[str, Any] = {
        "model": {"lora": {"rank": 4, "alpha": 8}},
        "warmup": {"num_steps": 8},
    }
    run = start(tmp_path, eval={"every": 0}, **tables)
    plain = AutoModelForCausalLM.from_pretrained(run.checkpoint_dir)
    assert recorded_gap(plain, final_trees(run)) < 1e-4
    found = evaluate_checkpoint(run.checkpoint_dir)
    assert found.metrics == {key: run.metrics[key] for key in found.metrics}


def test_adapters_apart_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with raises_code("adapters-apart"):
        load_model(ModelSettings(path=str(tmp_path)))


def test_updates_without_any_variance_take_no_step_and_copy_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version grows all the same, before and after a resume."""
    copied = []
    monkeypatch.setattr(
        "treegraft.policy.engine.native.load_weights", lambda *given: copied.append(given)
    )
    settings = {
        "reward": {"funcs": ["tests.support.tiny_parts:always_half"]},
        "eval": {"every": 0, "at_end": False},
        "warmup": {"num_steps": 0},
    }
    whole = start(tmp_path, "whole", **settings)
    start(tmp_path, "half", run={"num_updates": 1}, **settings)
    half = train(
        tiny(**settings, run={"name": "half", "dir": str(tmp_path)}), resume=tmp_path / "half"
    )
    others = ("config.json", "state.json")
    names = [name for name in differing(whole.run_dir, half.run_dir) if not name.endswith(others)]
    assert names == [] and copied == []
    assert whole.metrics["learn/skipped_groups_frac"] == 1.0
    assert whole.metrics["learn/num_optimiser_steps"] == whole.metrics["learn/grad_norm"] == 0.0
    assert whole.metrics["health/no_variance"] == 1.0
    for update in (1, 2):
        trees = read_trees(half.run_dir / "trees" / f"update-{update:06d}.jsonl")
        sampled = [step for tree in trees for step in tree.steps if step.parent is not None]
        assert {step.policy_version for step in sampled} == {update - 1}


def test_the_best_checkpoint_is_kept_beside_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = {0: 0.2, 1: 0.9, 2: 0.5, 3: 0.9}

    async def measured(parts: Any, tasks: Any, number: int, **_: Any) -> Any:
        accuracy = {"eval/accuracy": accuracies[number]}
        return SimpleNamespace(metrics=accuracy, passes={}, seconds=0.0)

    monkeypatch.setattr(session, "evaluate", measured)
    run = start(
        tmp_path,
        run={"num_updates": 3},
        checkpoint={"every": 2, "keep": 1},
        warmup={"num_steps": 1},
    )
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} == {
        "best",
        "update-000003",
    }
    assert read_state(run.run_dir / "checkpoints" / "best").update == 1
    assert read_state(run.checkpoint_dir).best_accuracy == 0.9


# --- ways in --------------------------------------------------------------------------------------


def test_settings_come_as_a_dict_a_path_or_an_object(tmp_path: Path) -> None:
    short: dict[str, Any] = {
        "run": {"num_updates": 1, "dir": str(tmp_path)},
        "warmup": {"num_steps": 1},
        "eval": {"every": 0},
    }
    settings = tiny(**short)
    path = write_recipe(tmp_path / "little.json", settings)
    runs = [
        train(settings),
        train(str(path)),
        train(path),
        train(Config.model_validate(settings)),
        train(path, recipe="x/y.toml"),
    ]
    assert [run.run_dir.name.split("-seed3-")[0] for run in runs] == [
        "run",
        "little",
        "little",
        "run",
        "y",
    ]
    assert len({run.run_dir for run in runs}) == 5
    assert all(differing(runs[0].run_dir, run.run_dir) == [] for run in runs[1:])


def test_a_run_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def notebook() -> RunResult:
        return start(tmp_path, warmup={"num_steps": 1}, run={"num_updates": 1}, eval={"every": 0})

    assert asyncio.run(notebook()).checkpoint_dir.is_dir()


def test_an_engine_by_import_path_earns_known_rewards(tmp_path: Path) -> None:
    from treegraft.tasks.build import build_tasks

    source = build_tasks(load_config(tiny()).tasks, 3)
    for task in (*source.train_tasks(), *source.eval_tasks()):
        ANSWERS[task.question] = task.reference[0]
    run = start(
        tmp_path,
        engine={"kind": "tests.support.tiny_parts:make_habits"},
        warmup={"num_steps": 0},
        run={"num_updates": 1},
    )
    # Three of four leaves are right: mean 0.75, sample standard deviation sqrt((0.75² + 3 · 0.25²)
    # / 3) = 0.5.
    assert run.metrics["reward/mean"] == 0.75 and run.metrics["reward/std"] == pytest.approx(0.5)
    assert run.metrics["eval/accuracy"] == run.metrics["eval/pass_at_2"] == 1.0
    for tree in read_trees(run.run_dir / "trees" / "update-000001.jsonl"):
        assert [leaf.reward for leaf in tree.leaves] == [0.0, 1.0, 1.0, 1.0]
        assert [leaf.advantage for leaf in tree.leaves] == pytest.approx(
            [-1.5, 0.5, 0.5, 0.5], abs=1e-5
        )
        assert all(leaf.status is Status.COMPLETED and leaf.weight == 0.25 for leaf in tree.leaves)


def test_tasks_come_in_shuffled_epochs() -> None:
    tasks = [Task(id=str(n), question="?", reference=()) for n in range(6)]

    def drawn(seed: int) -> list[str]:
        return [
            task.id
            for update in range(4)
            for task in draw_tasks(tasks, 3 * update, size=3, seed=seed)
        ]

    assert sorted(drawn(0)[:6]) == sorted(drawn(0)[6:]) == [task.id for task in tasks]
    assert drawn(0)[:6] != drawn(0)[6:] and drawn(0) != drawn(1)
    assert len(draw_tasks(tasks, 0, size=20, seed=0)) == 6
    rest = draw_tasks(tasks, 0, size=6, seed=0, without={"2", "5"})
    assert [task.id for task in rest] == [one for one in drawn(0)[:6] if one not in "25"]


# --- law 7: one policy ----------------------------------------------------------------------------


def test_a_skipped_publish_is_found_by_version_or_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = NativeEngine.publish

    async def skips_the_second(self: NativeEngine, source: WeightSource, version: int) -> None:
        if version != 1:
            await publish(self, source, version)

    async def keeps_old_weights(self: NativeEngine, source: WeightSource, version: int) -> None:
        await publish(self, ModelWeights(self.model.state_dict()), version)

    monkeypatch.setattr(NativeEngine, "publish", skips_the_second)
    with raises_code("version-drifts", match="policy version 0, expected 1"):
        start(tmp_path, "version", eval={"every": 0})
    monkeypatch.setattr(NativeEngine, "publish", keeps_old_weights)
    with raises_code("weights-drift", match="engine's weights have checksum"):
        start(tmp_path, "checksum", eval={"every": 0})


def test_the_limit_in_bfloat16_is_not_that_of_an_agent_without_doubt() -> None:
    """.0009 nats is the first gap of a warmed-up agent, .1 that of a model that is in doubt."""
    assert limit_for("bfloat16", 0.0009) == 0.04
    assert limit_for("bfloat16", 0.1) == 0.2
    assert limit_for("float32", 0.1) == 1e-4


def test_an_engine_that_ignores_weights_and_lies_is_found_by_the_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = NativeEngine.publish

    async def lies(self: NativeEngine, source: WeightSource, version: int) -> None:
        if version == 0:
            await publish(self, source, version)
        self.policy_version = version
        self.fingerprint = ""

    monkeypatch.setattr(NativeEngine, "publish", lies)
    display = Recorder()
    with raises_code("learner-drifts"):
        start(
            tmp_path, display=display, run={"num_updates": 9}, eval={"every": 0}, learn={"lr": 0.01}
        )
    # Said once, when it begins, and written into the line of each update in which it stands.
    assert [
        text.split(":")[0] for text in display.warnings if "engine_drift" in text.split(":")[0]
    ] == ["engine_drift at update 2"]
    lines = read_metrics(tmp_path / "a")
    assert [line["update"] for line in lines if "health/engine_drift" in line] == [2, 3] and lines[
        -1
    ]["update"] == 3
    assert (
        lines[2]["health/engine_drift"]
        == lines[2]["learn/engine_gap"]
        > lines[2]["learn/engine_gap_limit"]
        == 1e-4
    )
    assert any("once the cause is mended, go on" in text for text in display.warnings)


# --- law 9: waits ---------------------------------------------------------------------------------


def test_a_long_wait_says_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display = Recorder()

    def is_said() -> bool:
        waits = [text for text in display.warnings if text.startswith("not finished after")]
        return any("tool search (" in text for text in waits)

    gives_up = time.monotonic() + 60

    async def waits_until_it_is_said(self: SlowSearch, body: str, task: Task) -> str:
        while not is_said() and time.monotonic() < gives_up:
            await asyncio.sleep(0.01)
        return "nothing"

    monkeypatch.setattr(interrupt, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(SlowSearch, "__call__", waits_until_it_is_said)
    start(
        tmp_path,
        display=display,
        tasks={"kind": "tests.support.tiny_parts:SlowWorld"},
        run={"num_updates": 1},
    )
    assert is_said()


def test_a_dead_engine_ends_the_run_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = NativeEngine._step
    count = 0

    def dies(self: NativeEngine) -> None:
        nonlocal count
        count += 1
        if count == 60:
            raise RuntimeError("out of memory")
        step(self)

    whole = start(tmp_path, "whole")
    display = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "_step", dies)
        with raises_code("engine-died"):
            start(tmp_path, "a", display=display)
    assert f"treegraft train --resume {tmp_path / 'a'}" in display.warnings[-1]
    train(None, resume=tmp_path / "a")
    assert differing(whole.run_dir, tmp_path / "a") == []


def test_an_engine_that_dies_in_the_rollout_costs_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"checkpoint": {"every": 0}}
    whole = start(tmp_path, "whole", **settings)
    admit = NativeEngine._admit
    display = Recorder()

    def dies(self: NativeEngine) -> None:
        if self.policy_version == 1:
            raise RuntimeError("out of memory")
        admit(self)

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "_admit", dies)
        with raises_code("engine-died"):
            start(tmp_path, "a", display=display, **settings)
    assert (tmp_path / "a/checkpoints/update-000001").is_dir()
    assert "go on from its last checkpoint" in display.warnings[-1]
    train(None, resume=tmp_path / "a")
    apart = differing(whole.run_dir, tmp_path / "a")
    # The checkpoint that the failure made.
    assert [one for one in apart if "update-000001" not in one] == []


def test_a_run_that_fails_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the only one is that of the end, as `checkpoint.every` = 0 asks for."""
    settings = {
        "checkpoint": {"every": 0},
        "warmup": {"num_steps": 0},
        "eval": {"every": 0, "at_start": False, "at_end": False},
    }
    whole = start(tmp_path, "whole", **settings)
    assert [path.name for path in whole.checkpoint_dir.parent.iterdir()] == ["update-000002"]

    async def dies(self: NativeEngine, source: WeightSource, version: int) -> None:
        if version == 2:
            raise EngineError("out of memory")
        self.policy_version = version
        self.fingerprint = source.fingerprint

    display = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "publish", dies)
        with pytest.raises(EngineError, match="out of memory"):
            start(tmp_path, "a", display=display, **settings)
    assert f"begin anew with: treegraft train --resume {tmp_path / 'a'}" in display.warnings[-1]
    train(None, resume=tmp_path / "a")
    assert differing(whole.run_dir, tmp_path / "a") == []


# --- law 11: evaluation ---------------------------------------------------------------------------


def test_evaluation_has_independent_starts_whatever_the_explorer(tmp_path: Path) -> None:
    ASKED.clear()
    run = start(
        tmp_path,
        explore={"explorers": ["tests.support.tiny_parts:OneByOne"]},
        run={"num_updates": 1},
        eval={"num_samples": 3},
    )
    assert ASKED and not [group for group in ASKED if group.startswith("eval-")]
    for kind, count in (("greedy", 1), ("sampled", 3)):
        for tree in read_trees(run.run_dir / "trees" / f"eval-000001-{kind}.jsonl"):
            assert len(tree.leaves) == count
            starts = [step for step in tree.steps[1:] if step.parent == "0"]
            assert len(starts) == count and not [
                step for step in tree.steps if isinstance(step.cause, BranchCause)
            ]
            assert all(leaf.advantage is None for leaf in tree.leaves)


# --- warm-up --------------------------------------------------------------------------------------


@pytest.fixture
def world() -> SearchWorld:
    return SearchWorld(
        load_config(tiny()).tasks.search_world.model_copy(update={"hops": [3]}),
        seed=0,
        num_train=4,
        num_eval=2,
    )


@pytest.fixture
def form(world: SearchWorld) -> TagsFormat:
    settings = load_config(tiny()).tasks.search_world
    words = build_word_tokenizer(world.vocabulary())
    return TagsFormat(words, [WorldSearch(settings, 0)], system_prompt="", require_think=False)


def loss_words(form: TagsFormat, tree: Tree) -> list[str]:
    """Returns, for each step, its tokens that carry loss."""
    return [
        form._tokenizer.decode(
            [
                token
                for token, carries in zip(step.token_ids.tolist(), step.loss_mask, strict=True)
                if carries
            ]
        )
        for step in tree.steps
    ]


def test_the_deciding_token_is_masked_and_nothing_else(
    world: SearchWorld, form: TagsFormat
) -> None:
    task = world.warmup_tasks(1, 0)[0]
    steps = world.expert(task, 0)
    calls = [step.calls[0].body for step in steps[:-1]]
    full = demonstration_tree(form, task, steps)
    masked = demonstration_tree(form, task, steps, masks_decisions=True)
    answer = f"\\boxed{{ {task.reference[0]} }} </answer> <eos>"
    assert loss_words(form, full) == [
        "",
        *(f"<search> {call} </search>" for call in calls),
        f"<answer> {answer}",
    ]
    # Before the first result there is nothing to decide; after it "<search>" and "<answer>" are the
    # two ways on.
    rest = [f"{call} </search>" for call in calls[1:]]
    assert loss_words(form, masked) == ["", f"<search> {calls[0]} </search>", *rest, answer]
    for one, other in zip(masked.steps, full.steps, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize(("frac", "share"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_early_answers_follow_continue_prob(
    frac: float, share: float, world: SearchWorld, form: TagsFormat
) -> None:
    settings = WarmupSettings(decision_frac=frac, continue_prob=[0.25, 0.6], batch_size=60)
    source = Demonstrations(world, form, settings, seed=0)
    trees = [tree for step in range(20) for tree in source.batch(step)]
    lengths = [len(tree.steps) - 1 for tree in trees]
    # Three searches and the answer; cut after one search with probability 0.75, after two with 0.25
    # · 0.4.
    found = [lengths.count(length) / len(lengths) for length in (2, 3, 4)]
    assert found == pytest.approx([0.75 * share, 0.1 * share, 1.0 - 0.85 * share], abs=0.04)
    for tree in trees:
        if len(tree.steps) == 3:
            assert tree.leaves[0].answer == tree.steps[1].content.observations[0].text.split()[-1]
    shows_decision = [
        sum(tree.steps[2].loss_mask) == sum(tree.steps[2].sampled_mask) for tree in trees
    ]
    assert sum(shows_decision) / len(trees) == pytest.approx(frac if frac else 1.0, abs=0.05)
    assert [tree.steps for tree in source.batch(3)] == [
        tree.steps for tree in Demonstrations(world, form, settings, 0).batch(3)
    ]


def test_traces_from_a_file(world: SearchWorld, form: TagsFormat, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    rows = []
    for task in world.warmup_tasks(6, 0):
        steps = []
        for step in world.expert(task, 0):
            calls = [{"name": call.name, "body": call.body} for call in step.calls]
            steps.append(
                {
                    "calls": calls,
                    "observations": [o.text for o in step.observations],
                    "answer": step.answer,
                }
            )
        rows.append({"question": task.question, "steps": steps})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = WarmupSettings(traces=str(path), batch_size=50)
    stored = read_demonstrations(path, settings, ()).demonstrations
    batch = Demonstrations(world, form, settings, seed=0, stored=stored).batch(0)
    # Eight passes over six traces and two of the ninth.
    counts = Counter(tree.task.id for tree in batch)
    assert sorted(counts.values()) == [8, 8, 8, 8, 9, 9]
    assert {tree.task.question for tree in batch} == {row["question"] for row in rows}
    tree = batch[0]
    task = next(task for task in world.warmup_tasks(6, 0) if task.question == tree.task.question)
    assert [step.token_ids.tolist() for step in tree.steps] == [
        step.token_ids.tolist()
        for step in demonstration_tree(form, task, world.expert(task, 0)).steps
    ]
    run = start(
        tmp_path,
        tasks={"search_world": {"hops": [3]}},
        warmup={"traces": str(path), "num_steps": 4, "decision_frac": 0.0},
        run={"num_updates": 0},
        eval={"at_end": False},
    )
    assert run.metrics["warmup/loss"] > 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "no-demonstration"),
        ("no json\n", "demonstrations-unfit"),
        (
            '{"question": "q", "steps": [{"answer": "a"}]}\n{"question": "q"}\n',
            "demonstrations-unfit",
        ),
        ('{"question": "q", "steps": []}\n', "demonstrations-unfit"),
        (
            '{"question": "q", "steps": [{"calls": [{"name": "fly", "body": "x"}]}]}\n',
            "demonstrations-unfit",
        ),
        ('{"question": "q", "steps": [{"answer": "</answer>"}]}\n', "demonstrations-unfit"),
        ('{"question": "q", "steps": [{"thought": "hm"}]}\n', "demonstrations-unfit"),
        ('{"question": 5, "steps": [{"answer": "a"}]}\n', "demonstrations-unfit"),
    ],
)
def test_bad_traces_are_named_before_any_work(
    text: str, code: str, world: SearchWorld, form: TagsFormat, tmp_path: Path
) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(text)
    with raises_code(code) as caught:
        settings = WarmupSettings(traces=str(path))
        stored = read_demonstrations(path, settings, ()).demonstrations
        Demonstrations(world, form, settings, seed=0, stored=stored)
    assert str(path) in str(caught.value)


def test_few_rows_that_the_format_cannot_write_are_left_out(
    world: SearchWorld, form: TagsFormat
) -> None:
    good = [(task, world.expert(task, 0)) for task in world.warmup_tasks(19, 0)]
    flies = StepContent(calls=(ToolCall("fly", "x"),))
    stored = [*good, (replace(good[0][0], id="line 20"), (flies,))]
    settings = WarmupSettings(traces="t.jsonl", batch_size=40)
    found = Demonstrations(world, form, settings, seed=0, stored=stored)
    assert found.left_out.startswith("1 of 20 cannot be written (line 20: ")
    assert "no tool 'fly'" in found.left_out
    # Two passes over twenty, of which the one is no demonstration.
    assert len(found.batch(0)) == 38
    with raises_code("demonstrations-unfit", match=r"2 of 21 rows cannot be written \(line 20: "):
        Demonstrations(world, form, settings, seed=0, stored=[*stored, stored[-1]])


def test_an_expert_that_the_format_cannot_say_is_no_accident(
    world: SearchWorld, form: TagsFormat
) -> None:
    task = world.warmup_tasks(1, 0)[0]
    with pytest.raises(ValueError, match=r"no tool|one call or an answer"):
        demonstration_tree(form, task, (StepContent(thought="hm"),))
