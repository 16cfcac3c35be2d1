"""Models of published shapes: their sizes, tokenizers and random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.trees import Part, build_tree
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from treegraft.policy import shapes
from treegraft.policy.attention_hook import tree_attention
from treegraft.policy.engine.blocks import cache_bytes
from treegraft.policy.engine.build import reserved_bytes
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.scores import packed_hidden
from treegraft.policy.load import load_model, load_shape
from treegraft.policy.shapes import ModelShape, published_shape, shape_named, shape_table
from treegraft.policy.tiny import seeded
from treegraft.settings.load import load_config
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


def settings(path: object) -> ModelSettings:
    return ModelSettings(path=str(path))


@pytest.mark.parametrize("name", list(shape_table()))
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    path = f"shape:{name}"
    model, tokenizer = load_model(ModelSettings(path=path), has_weights=False)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert ModelShape.of_model(model).num_weights == PUBLISHED[name]
    assert len(tokenizer) == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_shape_of_a_hub_model_is_known_by_its_name() -> None:
    assert shape_named("Qwen/Qwen2.5-7B-Instruct") == "shape:qwen2.5-7b"
    assert shape_named("meta-llama/Llama-3.1-8B-Instruct") == "shape:llama-3.1-8b"
    assert shape_named("Qwen/Qwen3-80B") is None and load_shape(settings("Qwen/Qwen3-80B")) is None
    assert load_shape(settings("Qwen/Qwen3-4B-FP8")) == load_shape(settings("shape:qwen3-4b"))


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


SEVEN: dict[str, Any] = {
    "model": {"path": "shape:qwen2.5-7b", "dtype": "bfloat16", "gradient_checkpointing": True},
    "learn": {"max_pack_tokens": 32768},
}
SHAPE = ModelShape(
    num_weights=1000,
    num_layers=2,
    num_kv_heads=1,
    head_dim=2,
    hidden_size=4,
    vocab_size=50,
    num_heads=2,
    inner_width=6,
)


def test_parts_of_a_learner_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "VOCAB_CHUNK", 4)
    model = {"path": "a/b", "dtype": "bfloat16"}
    recipe = {"model": model, "learn": {"max_pack_tokens": 10}}
    config = load_config(recipe)
    assert SHAPE.learner_parts(config, 1) == {
        "weights": 2000,
        "masters": 4000,
        "gradients": 4000,
        "AdamW": 8000,
        # 10 tokens, numbers of 2 bytes: two layers of 4 * 6 + 2 * 4 + 2 * 2 + 8 * 4 = 68, gradients
        # of one of 2 * 6 + 2 * 4 = 20, and a tenth.
        "activations": pytest.approx(1.1 * 10 * 2 * (2 * 68 + 20)),
        # 4 rows of 50 words and their gradients, three float32 copies, less those gradients.
        "logits": 2 * 4 * 50 * 2 + 4 * 3 * 4 * 50 - 10 * 20 * 2,
        "reserved": ModelShape.RESERVED,
    }
    four = SHAPE.learner_parts(config, 4)
    # 600 weights in two layers; two of them gathered.
    assert four["gathered layers"] == 2 * 300 * 2 and "weights" not in four
    assert (four["masters"], four["gradients"], four["AdamW"]) == (1000, 1000, 2000)
    monkeypatch.setattr(shapes, "VOCAB_CHUNK", 2048)
    saving = load_config(recipe, ["model.gradient_checkpointing=true", "model.lora.rank=2"])
    parts = SHAPE.learner_parts(saving, 1)
    # 2 layers of rank 2: query and output 8 each, key and value 6 each, three of 10.
    assert parts["AdamW"] == 8 * 2 * 2 * (16 + 12 + 30)
    # Two inputs of 4, and one layer that is computed again.
    assert parts["activations"] == pytest.approx(1.1 * 10 * 2 * (2 * 4 + 68 + 20))
    assert parts["logits"] == 2 * 10 * 50 * 2 + 4 * 3 * 10 * 50 - 10 * 88 * 2


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_autograd_keeps_of_a_layer_what_its_shape_says(kind: str) -> None:
    """What three layers keep more than one, in bfloat16. On a CPU attention's output is copied for
    the matrix behind it, so queries count once more."""
    fields: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    batch = pack_trees([build_tree(Part("p" * 160, (Part("s" * 20),)))])

    def kept_by(num_layers: int) -> int:
        config = AutoConfig.for_model(kind, num_hidden_layers=num_layers, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        own = {one.data_ptr() for one in (*model.parameters(), *model.buffers())}
        kept: dict[int, torch.Tensor] = {}

        def keep(one: torch.Tensor) -> torch.Tensor:
            kept[one.untyped_storage().data_ptr()] = one
            return one

        with saved_tensors_hooks(keep, lambda one: one), tree_attention(model):
            packed_hidden(model, batch)
        return sum(one.untyped_storage().nbytes() for at, one in kept.items() if at not in own)

    shape = ModelShape.of_config(fields | {"num_hidden_layers": 1, "model_type": kind}, 0)
    found = (kept_by(3) - kept_by(1)) / 2 / batch.num_tokens / 2
    assert found == pytest.approx(shape.kept_width + shape.query_width, rel=0.02)


def test_the_native_engine_takes_what_the_learner_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process takes of a card of 80 GB, in order, for 3B in full: both copies of the
    weights, the pool, then all that learning makes. It never has more than there is."""
    config = load_config(SEVEN, ["model.path=shape:qwen2.5-3b", "learn.ranks=1"])
    model, _ = load_model(config.model, has_weights=False)
    parts = ModelShape.of_model(model).learner_parts(config, 1)
    taken = 2 * parts["weights"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9 - taken, 80e9))
    pool = cache_bytes("auto", torch.device("cuda"), reserved_bytes(config, model, 1))
    taken += sum(size for name, size in parts.items() if name != "weights")
    assert taken + pool == pytest.approx(80e9)
    assert parts.keys() == {"weights", "masters", "gradients", "AdamW", "activations", "reserved"}
    # 40 % of what is free at first would be 27 GB, and learning would end for lack of memory.
    assert 0 < pool < 0.4 * (80e9 - 2 * parts["weights"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_draws_of_a_seed_leave_the_device_s_generator_alone() -> None:
    state = torch.cuda.get_rng_state()
    with seeded(3):
        torch.randn(4, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
