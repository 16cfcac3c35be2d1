"""`doctor --gpus`: memory and time by hand, against the estimates that the design was made with,
and what cannot fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from treegraft.cli.main import app
from treegraft.cli.memory import model_shape
from treegraft.cli.sizing import RESERVED, Plan, gpu_parts, seconds_by_phase, sizing
from treegraft.core.errors import SettingError
from treegraft.core.finding import Finding
from treegraft.policy.bounds import ModelShape
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

SEVEN: dict[str, Any] = {
    "model": {"path": "shape:qwen2.5-7b", "dtype": "bfloat16", "gradient_checkpointing": True},
    "run": {"tasks_per_update": 128},
    "explore": {"explorers": ["entropy"], "num_leaves": 16},
    "rollout": {"max_completion_tokens": 3840},
    "learn": {"num_minibatches": 8, "max_pack_tokens": 32768},
    "engine": {"max_rows": 256},
}
"""ARPO with 128 prompts a update, paths of 4k."""


def shaped(config: Config) -> ModelShape:
    found = model_shape(config)
    assert found is not None
    return found


def found_for(config: Config, num_gpus: int, memory: float | None = None) -> dict[str, Finding]:
    plan = Plan.of(num_gpus, "h100", memory)
    return {one.name: one for one in sizing(config, shaped(config), plan)}


def test_parts_of_one_gpu_by_hand() -> None:
    config = load_config(
        {"model": {"path": "a/b", "dtype": "bfloat16"}, "learn": {"max_pack_tokens": 10}},
        ["learn.vocab_chunk=4"],
    )
    shape = ModelShape(
        num_weights=1000,
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        hidden_size=4,
        vocab_size=50,
        num_heads=2,
        intermediate_size=6,
    )
    assert gpu_parts(config, shape, Plan.of(1, "H100", None)) == {
        "weights": 2000,
        "masters": 4000,
        "gradients": 4000,
        "AdamW": 8000,
        "engine's weights": 2000,
        # Two layers, 10 tokens of 3 * 6 + 2 * 4 + 8 * 4 = 58 numbers of 2 bytes.
        "activations": 2 * 10 * 58 * 2,
        # 4 rows of 50 words and their gradients, three float32 copies.
        "logits": 2 * 4 * 50 * 2 + 4 * 3 * 4 * 50,
        "reserved": RESERVED,
    }
    four = gpu_parts(config, shape, Plan.of(4, "H100", None))
    # 600 weights in two layers; two of them gathered.
    assert four["gathered layers"] == 2 * 300 * 2 and "weights" not in four
    assert (four["masters"], four["gradients"], four["AdamW"]) == (1000, 1000, 2000)
    assert four["engine's weights"] == 2000
    saving = load_config(
        {"model": {"path": "a/b", "dtype": "bfloat16"}, "learn": {"max_pack_tokens": 10}},
        ["model.gradient_checkpointing=true", "model.lora.rank=2"],
    )
    parts = gpu_parts(saving, shape, Plan.of(1, "H100", None))
    # 2 layers of rank 2: query and output 8 each, key and value 6 each, three of 10.
    assert parts["AdamW"] == 8 * 2 * 2 * (16 + 12 + 30)
    assert parts["activations"] == 2 * 10 * 4 * 2 + 10 * 58 * 2


def test_eight_cards_at_7b_are_those_of_the_design() -> None:
    """scale.md's estimates: shards 15 GB, the server's weights 15, activations of a 32k pack 12,
    0.46 to 0.5 M tokens of keys and values; 19 s of old log-probabilities, 79 s of learning, 50 s
    of sampling."""
    config = load_config(SEVEN)
    plan = Plan.of(8, "H100", 80)
    parts = gpu_parts(config, shaped(config), plan)
    shards = parts["masters"] + parts["gradients"] + parts["AdamW"]
    assert shards == pytest.approx(15.2e9, rel=0.01)
    assert parts["engine's weights"] == pytest.approx(15.2e9, rel=0.01)
    assert parts["activations"] == pytest.approx(12e9, rel=0.1)
    found = found_for(config, 8)
    assert found["keys and values"].is_doubtful and "room for 542," in found["keys and values"].note
    seconds = seconds_by_phase(config, shaped(config), plan)
    assert seconds["old log-probabilities"] == pytest.approx(19, rel=0.15)
    assert seconds["forward and backward"] == pytest.approx(79, rel=0.15)
    assert seconds["sampling"] == pytest.approx(50, rel=0.15)


def test_what_cannot_fit_is_refused_with_what_to_change() -> None:
    config = load_config(SEVEN)
    verdict = found_for(config, 1)["keys and values"]
    assert not verdict.is_good and "short of one path" in verdict.note
    assert "model.lora.rank=16" in verdict.note and "4 such GPUs" in verdict.note
    # Each way that is named does it.
    assert found_for(config, 4)["keys and values"].is_good
    adapted = load_config(SEVEN, ["model.lora.rank=16"])
    assert found_for(adapted, 1)["keys and values"].is_good
    large = load_config(SEVEN, ["learn.max_pack_tokens=262144"])
    verdict = found_for(large, 8)["keys and values"]
    way = next(word for word in verdict.note.split() if word.startswith("learn.max_pack"))
    fitting = load_config(SEVEN, [way.strip(";.")])
    assert found_for(fitting, 8)["keys and values"].is_good


def test_phases_follow_the_settings() -> None:
    config = load_config(SEVEN, ["loss.old_logprobs=engine", "loss.kl_coef=0.01"])
    phases = seconds_by_phase(config, shaped(config), Plan.of(8, "H100", None))
    assert list(phases) == ["sampling", "forward and backward", "reference"]


def test_the_command_sizes_cards_that_are_not_here(tmp_path: Any) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[model]\npath = "shape:qwen2.5-32b"\ndtype = "bfloat16"\n')
    runner = CliRunner()
    done = runner.invoke(app, ["doctor", str(path), "--gpus", "1", "--gpu", "H200", "--json"])
    memory = json.loads(done.stdout)["memory"]
    assert done.exit_code == 2 and memory["GPUs"]["value"] == "1 x H200 of 141.0 GB"
    assert not memory["keys and values"]["is_good"]
    with pytest.raises(SettingError, match="--gpu: got 'V100', expected one of H200, H100"):
        Plan.of(1, "V100", None)
    for alone in (["--gpu", "H200"], ["--gpu-memory", "80"]):
        done = runner.invoke(app, ["doctor", str(path), *alone])
        assert isinstance(done.exception, SettingError) and "without --gpus" in str(done.exception)
