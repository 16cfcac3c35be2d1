"""Real servers with vLLM's V2 runner, on a CPU: its kernels, and ours, are computed by Triton's
interpreter. Needs the environment of `make vllm-env`."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, EntropyKind, Sampling
from treegraft.policy.engine.vllm.build import build_engine, find_python
from treegraft.policy.load import load_model
from treegraft.policy.weights import ModelWeights, plain_weights
from treegraft.settings.load import load_config
from treegraft.settings.policy import VllmSettings

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

LIMIT = 1e-5
PREFIX = (5, 6, 7)
SAMPLING = Sampling(max_new_tokens=8)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The servers' Python, which takes Triton's interpreter."""
    try:
        found = find_python(VllmSettings(python=os.environ.get("TREEGRAFT_VLLM_PYTHON")))
    except SettingError as error:
        pytest.skip(str(error))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").symlink_to(Path(__file__).with_name("interpreted.py"))
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nexport TRITON_INTERPRET=1 PYTHONPATH="$PYTHONPATH:{site}"\nexec {found} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def test_v2_servers_draw_by_key_and_measure_exactly(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens at once, one by one, and with either kind of entropies; log-probabilities and
    entropies are the model's, also of weights that are published."""
    # What a GPU takes by itself.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    found = {kind: asyncio.run(sampled(kind, python, tmp_path)) for kind in ("measured", "top_k")}
    measured, likely = found.values()
    for one, other in zip(measured, likely, strict=True):
        assert one.token_ids == other.token_ids
        assert one.sampling_logprobs == pytest.approx(other.sampling_logprobs, abs=LIMIT)
        assert (one.entropy_kind, other.entropy_kind) == (EntropyKind.EXACT, EntropyKind.TOP_K)
        assert all(a > b + 0.01 for a, b in zip(one.entropies, other.entropies, strict=True))
    assert len({one.token_ids for one in measured}) == len(measured)


async def sampled(kind: str, python: str, tmp_path: Path) -> list[Completion]:
    """Completions of three keys, by the first weights and by others."""
    vllm = {"python": python, "entropies": kind}
    config = load_config(
        tiny(
            run={"dir": str(tmp_path / kind), "num_threads": 2},
            model={"tiny": {"hidden_size": 64}},
            engine={"kind": "vllm", "max_rows": 4, "vllm": vllm},
        )
    )
    model, tokenizer = load_model(config.model, vocabulary=[f"w{n}" for n in range(80)])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    engine = build_engine(config, model, tokenizer, "tiny")
    everything = []
    try:
        await engine.open()
        for version, own in enumerate((model, other)):
            if version:
                await engine.publish(ModelWeights(plain_weights(own)), version)
            requests = [
                Request(PREFIX, SAMPLING, noise_key=(0, "train", version, str(n))) for n in range(3)
            ]
            found = await asyncio.gather(*map(engine.complete, requests))
            assert found[:1] == [await engine.complete(requests[0])]
            for one in found:
                check(own, one)
            everything += found
    finally:
        await engine.close()
    return everything


def check(model: Any, one: Completion) -> None:
    """Compares a completion with the model's logits."""
    with torch.inference_mode():
        path = torch.tensor([[*PREFIX, *one.token_ids]])
        logprobs = model(path).logits[0, len(PREFIX) - 1 : -1].float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
    counted = logprobs if one.entropy_kind is EntropyKind.EXACT else logprobs.topk(19).values
    entropies = -(counted.exp() * counted).sum(dim=1)
    assert torch.allclose(torch.tensor(one.sampling_logprobs), own, atol=LIMIT)
    assert torch.allclose(torch.tensor(one.entropies), entropies, atol=LIMIT)
