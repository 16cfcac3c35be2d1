"""Trees inside verl's default trainer: loss and gradient are our learner's (law 19).

Real: verl's configuration, its worker's constructor and `_agent_loop_postprocess`, its columns and
padding rows, `get_seqlen_balanced_partitions`, `ppo_loss` with its clip and aggregations, the
registries, and `vLLMHttpServer.generate`. Not real, in `verl_check.py`: the queue (a
dict of rows), the client of vLLM servers (our native engine, which gets verl's parameters), actor
handles (plain objects), the ranks (a loop), the forward pass of the actor (transformers' own, one
row at a time). Never run: Ray, TransferQueue, vLLM, FSDP, Megatron, moving weights, `fit`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make verl-env")

import torch
from tests.extras import verl_check
from tests.support.error_codes import raises_code
from tests.support.hosts import on_one_thread, recipe, recredited, warmed_up, with_failures
from tests.support.verl_check import Held, Queue, in_queue, verl_config

from treegraft import Session, SettingError, Tree, read_trees
from treegraft.extras import verl as ours
from treegraft.extras.verl import arguments
from treegraft.extras.verl.arguments import MANAGER
from treegraft.extras.verl.rows import ADVANTAGES
from treegraft.parts import BranchCause

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    with in_queue(monkeypatch) as found:
        yield found


# ---------------------------------------------------------------------- gradients

HARD = ("credit.attribution=hard", "loss.aggregation=token-mean")
SHAPED = ("loss.shaping_weight=0.6", "loss.clip_high=0.05")
CASES: dict[str, tuple[tuple[str, ...], int, int]] = {
    # Overrides, trees, ranks.
    "token-mean": (("loss.aggregation=token-mean",), 2, 1),
    "sequence-mean": (("loss.aggregation=sequence-mean",), 2, 1),
    "sequence-sum": (("loss.aggregation=sequence-sum", "loss.length_constant=9"), 2, 1),
    "hard, m = 0.6, clip at ratio 1": ((*HARD, *SHAPED), 2, 1),
    "dual clip": (("loss.dual_clip=1.25", "loss.shaping_weight=0.6"), 2, 1),
    "inverse_branching": (
        (*HARD, "credit.leaf_weight=inverse_branching", "explore.graft.num_hybrid=1"),
        2,
        1,
    ),
    "truncated, without loss": (
        (*HARD, "rollout.max_completion_tokens=16", "loss.learn_from_truncated=false"),
        2,
        1,
    ),
    "engine's log-probabilities": ((*HARD, "loss.old_logprobs=engine", *SHAPED), 2, 1),
    "two minibatches on two ranks": (
        ("loss.aggregation=sequence-mean", "learn.num_minibatches=2", *SHAPED),
        4,
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_law_19_loss_and_gradient_are_those_of_our_learner(
    name: str, base: Path, tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, num, ranks = CASES[name]
    config = recipe(base, *overrides, f"run.tasks_per_update={num}")
    held = Held(config, tmp_path, monkeypatch, num_ranks=ranks)
    try:
        held.grow(num)
        gaps = held.step(queue)
    finally:
        held.close()
    print(name, gaps)
    assert [gap.num_trees for gap in gaps] == [num // len(gaps)] * config.learn.num_minibatches
    for gap in gaps:
        assert gap.relative < 1e-5
        assert gap.losses[0] == pytest.approx(gap.losses[1], rel=1e-4, abs=1e-6)
    assert sum(gap.num_grafts for gap in gaps) > 0 or "truncated" in name
    if "clip" in name:
        assert max(gap.clipped for gap in gaps) > 0
    if name == "inverse_branching":
        assert min(gap.num_weights for gap in gaps) > 1
    if "truncated" in name:
        assert sum(gap.num_truncated for gap in gaps) > 0


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
def test_law_19_with_failed_leaves(
    aggregation: str,
    base: Path,
    tmp_path: Path,
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed leaf has no row, and a tree of failed leaves has none at all; verl's padding fills
    the batch up, and counts for nothing."""
    credit = Session.credit

    def failing(self: Session, trees: Any) -> list[Tree]:
        (tree,) = credit(self, trees)
        place = [task.id for task in self.tasks[:3]].index(tree.task.id)
        lost = {0: (1,), 1: tuple(range(len(tree.leaves)))}.get(place, ())
        return recredited([with_failures(tree, lost)], self.config)

    monkeypatch.setattr(Session, "credit", failing)
    config = recipe(base, f"loss.aggregation={aggregation}", "run.tasks_per_update=3")
    held = Held(config, tmp_path, monkeypatch)
    try:
        held.grow(3)
        # The whole tree of failures has no key in the queue.
        assert {key.rsplit("_", 2)[0] for key in queue.found()} == {"uid0", "uid2"}
        (gap,) = held.step(queue)
    finally:
        held.close()
    print(aggregation, gap)
    assert gap.num_failed == 1 and gap.num_trees == 2
    assert gap.relative < 1e-5


def test_a_step_without_any_row_is_refused(
    base: Path, tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(recipe(base), tmp_path, monkeypatch)
    held.close()
    with pytest.raises(Exception, match="no leaf of any tree counts"):
        held.trainer._balance_batch(queue.batch([]), {})


# ---------------------------------------------------------------------- what the queue holds


def test_rows_of_the_queue_are_the_leaves(
    base: Path, tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step after a graft never branches: with one hybrid start, another one can.
    held = Held(recipe(base, "explore.graft.num_hybrid=1"), tmp_path, monkeypatch)
    try:
        uids = held.grow(2)
        requests = {one["request_id"] for one in held.client.asked}
        metrics = asyncio.run(held.keeper.learned(1))
    finally:
        held.close()
    assert [queue.tags[uid]["status"] for uid in uids] == ["finished"] * 2
    steps = [step for tree in held.trees.values() for step in tree.steps]
    assert any(isinstance(step.cause, BranchCause) for step in steps)
    # A tree's requests go to one server.
    assert len(requests) >= 2
    for uid in uids:
        tree = held.trees[uid]
        for place, path in enumerate(tree.trajectories()):
            row = queue.rows[f"{uid}_{place}_0"]
            start = len(path.prompt_ids)
            assert row["prompts"].tolist() == path.prompt_ids
            assert row["responses"].tolist() == path.completion_ids
            assert row["response_mask"].bool().tolist() == path.loss_mask[start:]
            assert row[ADVANTAGES].tolist() == pytest.approx(path.token_advantages[start:])
            # verl's score metrics stay true.
            assert float(row["rm_scores"].sum()) == pytest.approx(path.reward)
            assert row["uid"] == uid and row["session_id"] == place
    # The record of the step.
    folder = tmp_path / "treegraft"
    assert len(read_trees(folder / "trees" / "update-000001.jsonl")) == 2
    rewards = [leaf.reward for tree in held.trees.values() for leaf in tree.leaves]
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_validation_neither_branches_nor_grafts(
    base: Path, tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(recipe(base), tmp_path, monkeypatch)
    try:
        uids = held.grow(2, validates=True)
    finally:
        held.close()
    assert [queue.tags[uid]["status"] for uid in uids] == ["finished"] * 2
    # val_kwargs.n rows of each prompt, without advantages and in verl's own partition.
    assert sorted(queue.found("val")) == [f"{uid}_{n}_0" for uid in uids for n in range(2)]
    rows = [queue.rows[key] for key in queue.found("val")]
    assert all(ADVANTAGES not in row for row in rows)
    assert all(set(row["extra_fields"]["reward_extra_info"]) == {"acc"} for row in rows)
    # Greedy rollouts of a task are equal.
    texts = [tuple(row["responses"].tolist()) for row in rows]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    assert {one["temperature"] for one in held.client.asked} == {0.0}
    assert held.trees == {}


def test_a_prompt_of_another_recipe_fails_alone(
    base: Path, tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    held = Held(recipe(base), tmp_path, monkeypatch)
    prompt = {"uid": "x", "extra_info": {"treegraft": "other/1"}, "global_steps": 1}
    try:
        asyncio.run(held.worker._run_prompt(prompt, {}, {"validate": False}))
    finally:
        held.close()
    assert queue.tags["x"]["status"] == "failure"
    assert "extra_info.treegraft: got 'other/1'" in caplog.text


# ---------------------------------------------------------------------- contracts

METHODS: dict[str, str] = {
    # What is overridden or called, and how verl calls it.
    "trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage": "self batch metrics",
    "trainer.ppo.v1.trainer_base:PPOTrainer._balance_batch": (
        "self batch metrics logging_prefix keep_minibatch"
    ),
    "trainer.ppo.v1.trainer_base:PPOTrainer._consume_sync_metrics": "self",
    "trainer.ppo.v1.trainer_base:register_trainer": "name",
    "trainer.ppo.v1.trainer_sync:PPOTrainerSync.on_step_end": "self",
    "trainer.ppo.padding_utils:upsample_batch_to_divisible_size": (
        "batch batch_multiple eos_token_id"
    ),
    "utils.seqlen_balancing:get_seqlen_balanced_partitions": "seqlen_list k_partitions equal_size",
    "utils.seqlen_balancing:calculate_workload": "seqlen_list",
    "experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers": "self",
    "workers.rollout.replica:RolloutReplicaRegistry.register": "cls name loader",
    "workers.utils.losses:ppo_loss": "config model_output data dp_group",
}
WORKER = {
    "_run_prompt": "self prompt sampling_params trajectory trace",
    "_agent_loop_postprocess": "self output validate kwargs",
    "__init__": "self args kwargs",
}


def _names(function: Any) -> str:
    return " ".join(inspect.signature(function).parameters)


def test_contract_what_is_overridden_has_not_moved() -> None:
    for path, names in METHODS.items():
        module, _, attributes = path.partition(":")
        found: Any = importlib.import_module(f"verl.{module}")
        for one in attributes.split("."):
            found = inspect.getattr_static(found, one)
        found = getattr(found, "__func__", found)
        assert _names(found) == names, path
    base_class = verl_check.TreeWorker.__mro__[1]
    for name, names in WORKER.items():
        # Ray's decorator adds one.
        found = _names(getattr(base_class, name)).replace(" _ray_trace_ctx", "")
        assert found == names, name


def test_contract_verl_finds_trainer_and_manager_by_name() -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.import_utils import load_class_from_fqn

    assert get_trainer_cls("treegraft") is verl_check.of_trainer.TreeTrainer
    manager = load_class_from_fqn(MANAGER, "AgentLoopManager")
    assert manager is ours.TreeManager
    # The entry point of this package leads to the module that registers it.
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."verl.plugins"]' in text
    assert 'treegraft = "treegraft.extras.verl.register"' in text
    importlib.import_module("treegraft.extras.verl.register")
    assert metadata.version("verl") == ours.SUPPORTED


def test_contract_one_tokens_advantage_gives_that_tokens_gradient(
    base: Path, tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(recipe(base, "loss.aggregation=token-mean"), tmp_path, monkeypatch)
    try:
        held.grow(2)
        batch = held.trainer._balance_batch(queue.batch(queue.found()), {})
        held._score(queue, batch)
        held.trainer._compute_advantage(batch, {})
    finally:
        held.close()
    key = next(one for one in batch.keys if queue.rows[one]["response_mask"].sum() > 3)
    place = int(queue.rows[key]["response_mask"].nonzero()[2])
    for other in batch.keys:
        queue.rows[other]["advantages"] = torch.zeros_like(queue.rows[other]["advantages"])
    queue.rows[key]["advantages"][place] = 2.0
    held.model.zero_grad()
    held.loss(queue, [batch.keys]).backward()
    got = {n: w.grad.clone() for n, w in held.model.named_parameters() if w.grad is not None}
    held.model.zero_grad()
    row = queue.rows[key]
    num = sum(int(queue.rows[one]["response_mask"].sum()) for one in batch.keys)
    own = held._logprobs(row)[len(row["prompts"]) - 1 + place]
    # d/dθ of -A (1 + m F) ρ / tokens at ρ = 1.
    shaping = row["extra_fields"]["treegraft"]["shaping"]
    (-2.0 * shaping * own / num).backward()
    for name, w in held.model.named_parameters():
        if w.grad is not None:
            assert float((got[name] - w.grad).norm()) < 1e-5 * float(w.grad.norm()), name


def test_contract_the_shift_of_old_logprobs_moves_the_clip(
    base: Path, tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ratio 1, a positive advantage passes until the shift exceeds ln(1 + clip_high)."""
    held = Held(recipe(base, "loss.clip_high=0.3"), tmp_path, monkeypatch)
    try:
        held.grow(2)
        batch = held.trainer._balance_batch(queue.batch(queue.found()), {})
        held._score(queue, batch)
        held.trainer._compute_advantage(batch, {})
    finally:
        held.close()
    before = {one: queue.rows[one]["old_log_probs"].clone() for one in batch.keys}
    for key in batch.keys:
        plain = held._logprobs(queue.rows[key]).detach()[len(queue.rows[key]["prompts"]) - 1 : -1]
        before[key] = plain
        queue.rows[key]["advantages"] = queue.rows[key]["response_mask"].float()
    norms = []
    for factor in (1.0, 1.29, 1.31):
        for key in batch.keys:
            queue.rows[key]["old_log_probs"] = before[key] - torch.tensor(factor).log()
        held.model.zero_grad()
        held.loss(queue, [batch.keys]).backward()
        grads = [w.grad.flatten() for w in held.model.parameters() if w.grad is not None]
        norms.append(float(torch.cat(grads).norm()))
    assert norms[1] == pytest.approx(1.29 * norms[0], rel=1e-4)
    assert norms[2] == 0.0


# ---------------------------------------------------------------------- the server


def test_contract_verls_server_reports_entropies(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own `vLLMHttpServer.generate`; vLLM's modules and engine are stand-ins."""
    replies = _with_stand_in_of_vllm(monkeypatch)
    from treegraft.extras.verl import server as of_server

    replica = of_server._load_replica()
    made: Any = replica.__init__  # derives from verl's
    assert made is not replica.__mro__[1].__init__
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class Server(of_server.TopReplies, vLLMHttpServer):
        lora_as_adapter = False

        def __init__(self) -> None:
            self.config: Any = _Table(
                max_model_len=64, full_determinism=False, enable_rollout_routing_replay=False
            )
            self.model_config = SimpleNamespace(processor=None)
            self.replica_rank = 0
            self.global_steps = 7
            self._disaggregation_role = "null"
            self._pd_decode_peers = []
            self._admitting = 0
            self.engine = replies

        async def _park_until_admitted(self, request_id: str) -> None:
            self._admitting += 1

    server = Server()
    reply = asyncio.run(server.generate([1, 2], {"logprobs": True, "max_tokens": 2}, "a"))
    assert replies.asked[0].logprobs == 20
    assert list(reply.token_ids) == [5, 6]
    assert reply.log_probs == pytest.approx([math.log(0.5), math.log(0.25)])
    # Σ -p ln p by hand: of (1/2, 1/4), and of (3/4, 1/4).
    first = 0.5 * math.log(2) + 0.25 * math.log(4)
    second = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert reply.extra_fields["entropies"] == pytest.approx([first, second])
    assert reply.extra_fields["global_steps"] == 7


class _Table(dict[str, Any]):
    __getattr__ = dict.__getitem__

    @property
    def mtp(self) -> None:
        return None


def _with_stand_in_of_vllm(patch: pytest.MonkeyPatch) -> Any:
    """Lets verl's server be imported without vLLM; returns an engine of two tokens."""

    class Params:
        prompt_logprobs = None

        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)

    class Engine:
        def __init__(self) -> None:
            self.asked: list[Any] = []

        async def generate(self, *, sampling_params: Any, **_: Any) -> Any:
            self.asked.append(sampling_params)
            one = lambda p: SimpleNamespace(logprob=math.log(p))  # noqa: E731
            rows = [{5: one(0.5), 9: one(0.25)}, {9: one(0.75), 6: one(0.25)}]
            out = SimpleNamespace(token_ids=[5, 6], logprobs=rows, finish_reason="stop")
            yield SimpleNamespace(outputs=[out], metrics=None)

    class Stand(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "SamplingParams":
                return Params
            return dict if name == "TokensPrompt" else type(name, (), {})

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            # verl's own asks for the version of the installed package.
            if name.partition(".")[0] != "vllm" and name != "verl.third_party.vllm":
                return None
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, Finder, is_package=True)

        @staticmethod
        def create_module(spec: Any) -> ModuleType:
            module = Stand(spec.name)
            module.__version__ = "0.24.0"
            return module

        @staticmethod
        def exec_module(module: ModuleType) -> None: ...

    real = metadata.version
    patch.setattr(metadata, "version", lambda one: "0.24.0" if one == "vllm" else real(one))
    patch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    for name in [
        one for one in sys.modules if one.startswith(("vllm", "verl.workers.rollout.vllm"))
    ]:
        patch.delitem(sys.modules, name)
    return Engine()


# ---------------------------------------------------------------------- what is refused


REFUSED = {
    "algorithm.use_kl_in_reward=true": "algorithm.use_kl_in_reward",
    "algorithm.rollout_correction.bypass_mode=true": "bypass_mode",
    "algorithm.rollout_correction.rollout_rs=token_k1": "rollout_rs",
    "algorithm.filter_groups.enable=true": "filter_groups",
    "actor_rollout_ref.rollout.n=8": "rollout.n: got 8, expected 4 by explore.num_leaves",
    "actor_rollout_ref.rollout.temperature=0.7": "temperature: got 0.7, expected 1.0 by rollout",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gspo": "loss_mode: got 'gspo'",
    "actor_rollout_ref.actor.loss_agg_mode=token-sum": "loss_agg_mode: got 'token-sum'",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1": "ppo_mini_batch_size: got 1, expected 2",
    "actor_rollout_ref.actor.shuffle=true": "whole trees",
    "actor_rollout_ref.actor.entropy_coeff=0.01": "entropy_coeff",
    "actor_rollout_ref.actor.clip_ratio_c=3.0": "clip_ratio_c: got 3.0",
    "actor_rollout_ref.rollout.top_p=0.9": "top_p",
    "actor_rollout_ref.rollout.calculate_log_probs=false": "calculate_log_probs: got False",
    "actor_rollout_ref.rollout.name=sglang": "rollout.name: got 'sglang'",
    "actor_rollout_ref.model.tokenizer_path=elsewhere": "tokenizer_path",
    "data.train_batch_size=3": "train_batch_size: got 3, expected 2 by run.tasks_per_update",
    "trainer.v1.trainer_mode=separate_async": "trainer_mode",
    "trainer.total_training_steps=5": "total_training_steps",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refused_among_verls_arguments(override: str, base: Path, tmp_path: Path) -> None:
    config = verl_config(recipe(base), tmp_path, override)
    with pytest.raises(SettingError, match=REFUSED[override]):
        verl_check.of_trainer.TreeTrainer(config)


def test_an_entropy_bonus_is_refused_in_a_recipe(base: Path) -> None:
    with raises_code("host-setting"):
        arguments.HOST.check_recipe(recipe(base, "loss.entropy_coef=0.1"))


def test_no_recipe_and_other_versions_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = verl_config(recipe(base), tmp_path)
    config.treegraft.recipe = None
    with pytest.raises(SettingError, match=r"treegraft\.recipe: got none"):
        verl_check.of_trainer.TreeTrainer(config)
    monkeypatch.setattr(verl_check.verl, "__version__", "0.10.0")
    with pytest.raises(SettingError, match=r"verl 0\.10\.0 is installed, expected 0\.9\.1"):
        verl_check.of_trainer.TreeTrainer(config)


def test_every_argument_that_is_named_is_one_of_verls(base: Path, tmp_path: Path) -> None:
    """With its default as the value that it has to keep."""
    from omegaconf import OmegaConf

    config = verl_config(recipe(base), tmp_path)
    for name in arguments.derived(recipe(base)):
        assert OmegaConf.select(config, name, throw_on_missing=True) is not None or (
            name.endswith("loss_scale_factor")
        ), name
    missing = object()
    for one in arguments.VERL:
        assert OmegaConf.select(config, one.name, default=missing) is not missing, one.name
