"""Servers that leave their cards while the learner works: in which order they come back, by a
server of ours that answers /sleep and /wake_up as vLLM 0.32 does."""

from __future__ import annotations

import asyncio
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.policy.test_vllm_engine import (
    MODEL,
    OTHER,
    Work,
    ask,
    config_of,
    same,
    undisturbed,
)
from tests.support.error_codes import raises_code
from tests.support.fake_vllm import FakeVllm, fakes
from tests.support.families import build_model, word_tokenizer
from tests.support.tiny import tiny

from treegraft.core.types import Completion
from treegraft.policy.engine.vllm.build import build_engine, options
from treegraft.policy.engine.vllm.engine import VllmEngine
from treegraft.policy.weights import ModelWeights
from treegraft.settings.load import load_config

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def run_asleep(servers: list[FakeVllm], folder: Path, work: Work, **vllm: Any) -> Any:
    """As `run` in test_vllm_engine.py, with servers that may sleep: those here are not the run's
    own, which settings refuse."""
    config = config_of(servers, folder, **vllm)

    async def main() -> Any:
        engine = build_engine(config, copy.deepcopy(MODEL), word_tokenizer(), "tiny")
        own = engine.settings.vllm.model_copy(update={"sleep": True})
        engine.settings = engine.settings.model_copy(update={"vllm": own})
        try:
            await engine.open()
            for one in servers:
                one.events.clear()
            return await asyncio.wait_for(work(engine), 40.0)
        finally:
            await engine.close()

    return asyncio.run(main())


async def sampled(engine: VllmEngine) -> list[Completion]:
    return await asyncio.gather(*(ask(engine, one) for one in range(6)))


def test_weights_wake_before_a_publish_and_the_cache_after_it(tmp_path: Path) -> None:
    """Twice, without the weights that a server slept with: they are gone."""
    third = build_model("llama", 2)

    async def work(engine: VllmEngine) -> list[list[Completion]]:
        found = []
        for version, model in enumerate((OTHER, third), 1):
            await engine.rest()
            assert all(one.asleep and one.label == "loading" for one in servers)
            # A warm-up rests more than once in a row.
            await engine.rest()
            await engine.publish(ModelWeights(model.state_dict()), version)
            found.append(await sampled(engine))
        return found

    with fakes(MODEL, 2) as servers:
        before, after = run_asleep(servers, tmp_path, work)
        once = ["sleep 2", "wake weights", "load", "wake kv_cache"]
        assert [one.events for one in servers] == [2 * once, 2 * once]
    assert same(before, undisturbed(OTHER, tmp_path, range(6))) and same(
        after, undisturbed(third, tmp_path, range(6))
    )


def test_one_that_cannot_sleep_is_told_of_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(engine: VllmEngine) -> list[Completion]:
        servers[0].refuse_sleep = True
        with caplog.at_level(logging.WARNING):
            await engine.rest()
        assert "stays on its GPU while the run learns" in caplog.text
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        return await sampled(engine)

    with fakes(MODEL) as servers:
        found = run_asleep(servers, tmp_path, work)
        assert servers[0].events == ["load"]
    assert same(found, undisturbed(OTHER, tmp_path, range(6)))


def test_sleep_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of others, and machines without a GPU; a server of ours is told that it may sleep."""
    own = tiny(run={"dir": str(tmp_path)}, engine={"kind": "vllm", "vllm": {"sleep": True}})
    config = load_config(own)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises_code("nothing-to-leave"):
        build_engine(config, copy.deepcopy(MODEL), word_tokenizer(), "tiny")
    assert "--enable-sleep-mode" in options(config, tmp_path)
    others = load_config(config, ['engine.vllm.servers=["http://127.0.0.1:9"]'])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with raises_code("nothing-to-leave"):
        build_engine(others, copy.deepcopy(MODEL), word_tokenizer(), "tiny")
    assert not any(tmp_path.iterdir())
