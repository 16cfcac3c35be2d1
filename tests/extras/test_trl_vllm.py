"""Trees sampled by TRL's vLLM, against fakes; `fake_trl_vllm` says what is faked. Nothing here was
run on a GPU, nor with vLLM itself."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: pip install 'treegraft[trl]'")

from tests.support.fake_trl_vllm import FakeLLM, install
from tests.support.hosts import on_one_thread, recipe, warmed_up
from tests.support.trl_check import QUIET, Checked

from treegraft import SettingError
from treegraft.extras.trl import grpo_config
from treegraft.extras.trl.vllm import Colocated
from treegraft.parts import errors, served

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch.setattr)
    # TRL sets torchrun's variables for vLLM; a later trainer here would join a group by them.
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_up(tmp_path_factory.mktemp("runs"), num_steps=30)


def request(**changes: Any) -> served.TokenRequest:
    fields: dict[str, Any] = {
        "token_ids": [3, 4, 5],
        "max_tokens": 4,
        "temperature": 1.0,
        "seed": 5,
        "stop": [],
        "stop_token_ids": [],
        "tree": (0,),
    }
    return served.TokenRequest(**fields | changes)


def ask(source: Any, *requests: served.TokenRequest) -> list[served.TokenReply]:
    async def main() -> list[served.TokenReply]:
        return await asyncio.gather(*(source.generate(one) for one in requests))

    return asyncio.run(main())


def check_reply(reply: served.TokenReply, engine: Any) -> None:
    """Log-probabilities are the model's, entropies sums over its 19 likeliest tokens."""
    path = torch.tensor([[3, 4, 5, *reply.token_ids]])
    rows = engine.plain(input_ids=path).logits[0, 2:-1].log_softmax(dim=-1)
    own = rows.gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
    likely = rows.topk(19).values
    assert torch.allclose(torch.tensor(reply.logprobs), own, atol=1e-5)
    assert reply.entropies is not None
    entropies = -(likely.exp() * likely).sum(dim=1)
    assert torch.allclose(torch.tensor(reply.entropies), entropies, atol=1e-5)


# ---------------------------------------------------------------------- one request


def test_a_colocated_vllm_takes_requests_at_any_token(base: Path) -> None:
    llm = FakeLLM(model=str(base), logprobs_mode="processed_logprobs")
    source = Colocated(llm, torch.device("cpu"))
    llm.llm_engine.num_awaited = 2
    first, again, other = ask(source, request(), request(), request(seed=6))
    assert first == again and other != first
    check_reply(first, llm.llm_engine)
    assert llm.llm_engine.most_at_once <= 3
    with pytest.raises(errors.EngineError, match="vLLM: the prompt is too long"):
        ask(source, request(token_ids=[3] * 160))
    llm.llm_engine.fails = True
    with pytest.raises(errors.EngineError, match="vLLM: out of memory"):
        ask(source, request())
    assert ask(source, request()) == [first] and not llm.llm_engine.requests

    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await source.generate(request(max_tokens=100_000))

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    # The thread drops what nobody waits for before its next step.
    assert ask(source, request()) == [first] and not llm.llm_engine.requests
    source.close()


# ---------------------------------------------------------------------- trainings


class Noted(Checked):
    """Notes how far the log-probabilities of sampling are from TRL's."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.far = getattr(self, "far", [])
        mask = output["completion_mask"] * output["tool_mask"]
        ratio = output["importance_sampling_ratio"].log() * mask
        self.far.append(float(ratio.abs().max()))
        return output


def trained(config: Any, folder: Path, **own: Any) -> Noted:
    args = grpo_config(config, output_dir=str(folder), **QUIET | own)
    trainer = Noted(None, config, args)
    trainer.train()
    return trainer


def check_training(trainer: Noted, num_moves: int) -> None:
    """Gradients are our learner's on the same trees; weights have reached vLLM each time, and
    steps carry their version."""
    print([f"{gap.relative:.1e}" for gap in trainer.gaps], trainer.far)
    assert len(trainer.gaps) == num_moves == len(trainer.far)
    assert all(gap.relative < 1e-5 for gap in trainer.gaps), trainer.gaps
    assert sum(gap.num_grafts for gap in trainer.gaps) > 0
    assert max(trainer.far) < 1e-4
    sampled = [one for tree in trainer.trees for one in tree.steps if any(one.sampled_mask)]
    assert {one.policy_version for one in sampled} == {num_moves - 1}


CAP = "loss.engine_ratio_cap=2.0"


@pytest.mark.smoke
@pytest.mark.parametrize("sleeps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trees_from_a_colocated_vllm(sleeps: bool, base: Path, tmp_path: Path) -> None:
    own = {"use_vllm": True, "vllm_enable_sleep_mode": sleeps}
    trainer = trained(recipe(base, CAP, "learn.lr=0.01"), tmp_path / "out", **own)
    check_training(trainer, 2)
    assert trainer.vllm_generation.llm.asleep == ({"weights", "kv_cache"} if sleeps else set())


@pytest.mark.slow
def test_the_engines_ratio_of_whole_sequences_is_trls(base: Path, tmp_path: Path) -> None:
    """With weights that vLLM has not been given: ratios differ from 1, and are cut at the cap."""

    class Late(Noted):
        def _publish(self) -> None:
            self._last_loaded_step = self.state.global_step
            super()._publish()

    config = recipe(base, "loss.engine_ratio_cap=1.1", "loss.engine_ratio=sequence")
    args = grpo_config(config, output_dir=str(tmp_path), **QUIET, use_vllm=True)
    trainer = Late(None, config, args)
    trainer.train()
    assert max(trainer.far) > 1e-2, trainer.far
    assert all(gap.relative < 1e-5 for gap in trainer.gaps), trainer.gaps


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "own", "said"),
    [
        ("engine.kind=vllm", {}, "engine.kind: got 'vllm', expected 'native' inside TRL"),
        ("run.seed=1", {"vllm_mode": "server"}, "vllm_mode: got 'server', expected 'colocate'"),
        ("run.seed=1", {"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size: got 2"),
        ("run.seed=1", {"vllm_structured_outputs_regex": "a"}, "vllm_structured_outputs_regex"),
        (CAP, {"vllm_importance_sampling_correction": False}, "correction: got False"),
        (CAP, {"vllm_importance_sampling_mode": "token_mask"}, "mode: got 'token_mask'"),
        ("run.seed=1", {"vllm_importance_sampling_correction": True}, "by loss.engine_ratio_cap"),
    ],
)
def test_refused_beside_vllm(override: str, own: dict[str, Any], said: str, base: Path) -> None:
    with pytest.raises(SettingError, match=said):
        grpo_config(recipe(base, override), **QUIET, use_vllm=True, **own)


def test_sleep_loses_the_weights(base: Path) -> None:
    """Of the fake: a training that forgot to move them again would see it."""
    llm = FakeLLM(model=str(base), logprobs_mode="processed_logprobs")
    llm.sleep(level=2)
    assert all(math.isnan(w.flatten()[0]) for w in llm.llm_engine.plain.parameters())
