"""Models of published shapes: their sizes, tokenizers and random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code

from treegraft.extras.lab.shape import model_shape, shape_named
from treegraft.policy import shapes
from treegraft.policy.load import load_model
from treegraft.policy.shapes import published_shape, shape_table
from treegraft.policy.tiny import seeded
from treegraft.settings.config import Config
from treegraft.settings.policy import ModelSettings

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "llama-3.1-8b": 8_030_261_248,
    # 2 layers of 2 * (64 * 64) + 2 * (64 * 32) + 3 * (64 * 192) + 2 * 64, 300 * 64, a norm of 64.
    "bytes": 117_824,
}
"""Weights of the models on the hub, and of the shape for smoke tests."""
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize("name", list(shape_table()))
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    path = f"shape:{name}"
    model, tokenizer = load_model(ModelSettings(path=path), has_weights=False)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    estimated = model_shape(Config.model_validate({"model": {"path": path}}), 0)
    assert estimated is not None
    assert sum(w.numel() for w in model.parameters()) == PUBLISHED[name] == estimated.num_weights
    assert len(tokenizer) == model.config.vocab_size == estimated.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_shape_of_a_hub_model_is_known_by_its_name() -> None:
    assert shape_named("Qwen/Qwen2.5-7B-Instruct") == published_shape("shape:qwen2.5-7b")
    assert shape_named("meta-llama/Llama-3.1-8B-Instruct") == published_shape("shape:llama-3.1-8b")
    assert shape_named("Qwen/Qwen3-8B") == published_shape("shape:qwen3-8b")
    assert shape_named("Qwen/Qwen3-80B") is None


def test_an_unknown_shape_is_an_error_that_names_the_near_one() -> None:
    with raises_code("unknown-shape"):
        published_shape("shape:qwen2.5-8b")


def loaded(monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[Any, Any]:
    monkeypatch.setattr(shapes, "shape_table", lambda: {"small": SMALL})
    return load_model(ModelSettings(path="shape:small", dtype="bfloat16"), **more)


def test_weights_are_random_and_those_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.random.get_rng_state()
    weights = [
        torch.cat([w.detach().flatten() for w in loaded(monkeypatch, seed=seed)[0].parameters()])
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert weights[0].dtype == torch.bfloat16
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_byte_tokenizer_gives_every_text_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = loaded(monkeypatch)
    for text in ("<search> r2 of e9?\n</search>", "naïve — 日本語 🙂", "  two  blanks "):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.decode([399]) == " w399" and len(tokenizer) == 400


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_draws_of_a_seed_leave_the_device_s_generator_alone() -> None:
    state = torch.cuda.get_rng_state()
    with seeded(3):
        torch.randn(4, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
