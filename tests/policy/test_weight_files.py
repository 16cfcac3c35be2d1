"""Which models are read by rows, and what is tried in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.families import build_model, word_tokenizer

from treegraft.policy import weights
from treegraft.policy.learn.scores import packing_problem
from treegraft.policy.learn.weight_files import WeightFiles, cut_model, model_shape, shardable_files
from treegraft.policy.load import unpacked_gguf
from treegraft.settings.load import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    build_model("llama").save_pretrained(place, max_shard_size="20KB")
    word_tokenizer().save_pretrained(place)
    return place


def found(path: Path | str, *overrides: str) -> list[Path] | None:
    config = load_config({"model": {"path": str(path)}, "engine": {"kind": "vllm"}}, overrides)
    return shardable_files(config, path)


def test_a_folder_of_safetensors_is_read_by_rows(folder: Path) -> None:
    files = found(folder)
    assert files == sorted(folder.glob("*.safetensors")) and len(files) > 1


@pytest.mark.parametrize(
    "override",
    [
        "engine.kind=native",
        "model.lora.rank=4",
        "engine.vllm.servers=['http://127.0.0.1:1']",
    ],
)
def test_rank_0_reads_what_else_needs_the_whole_model(folder: Path, override: str) -> None:
    assert found(folder, override) is None


def test_files_with_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build_model("llama")
    model.config.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    weights = {f"old.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert found(tmp_path) is None
    assert found("shape:smollm2-135m") is None


def test_rows_are_those_of_a_model_in_its_type(folder: Path) -> None:
    """Rounded to bfloat16 first, as a model that is loaded whole is."""
    model = build_model("llama")
    files = WeightFiles(sorted(folder.glob("*.safetensors")), model_shape(model), "bfloat16")
    assert not files.lacks(model)
    name, weight = next(iter(model.named_parameters()))
    rows = files.rows(name, weight, 3, 5)
    assert rows.dtype is torch.bfloat16 and torch.equal(rows, weight[3:8].bfloat16())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt-oss", "granite"])
def test_the_model_that_is_tried_has_a_layer_of_each_kind_and_all_buffers(family: str) -> None:
    model = build_model(family)
    data: dict[str, Any] = json.loads(model_shape(model))
    data["num_hidden_layers"] = 6 if not data.get("layer_types") else data["num_hidden_layers"]
    small = cut_model(json.dumps(data))
    kinds = set(data.get("layer_types") or ())
    assert set(getattr(small.config, "layer_types", None) or ()) >= kinds
    assert small.config.num_hidden_layers <= max(1, len(kinds))
    assert dict(small.named_buffers()).keys() >= dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(small.named_buffers())[name], buffer)
    assert packing_problem(small) is None


def test_the_model_that_is_tried_has_heads_of_all_widths() -> None:
    """Gemma 4's layers differ in them, and the last two of four share keys and values."""
    small = cut_model(model_shape(build_model("gemma4")))
    assert [layer.self_attn.head_dim for layer in small.model.layers] == [8, 16]
    assert packing_problem(small) is None


def test_a_checksum_is_the_same_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ (2 i + 1) · bits_i modulo 2^64, by Python's integers."""
    words = torch.tensor([3, -5, 7, 2**31 - 1, -(2**31), 11, 13], dtype=torch.int32)
    expected = sum((2 * n + 1) * one for n, one in enumerate(words.tolist())) % 2**64
    for chunk in (1, 3, 100):
        monkeypatch.setattr(weights, "CHUNK", chunk)
        assert int(weights.bit_sum(words)) % 2**64 == expected
        parts = weights.bit_sum(words[:4]) + weights.bit_sum(words[4:], first=4)
        assert int(parts) % 2**64 == expected


def test_the_table_of_a_gguf_model_s_names_is_made_once() -> None:
    """transformers asks for it for each module of a model."""
    gguf = pytest.importorskip("gguf")
    unpacked_gguf()
    first = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    unpacked_gguf()
    assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30) is first
    assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is not first
