"""`treegraft doctor`: memory by hand, shapes of models, and everything that is missing."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code

from treegraft.cli import main as cli
from treegraft.cli import memory
from treegraft.cli.doctor import missing_files
from treegraft.cli.memory import gigabytes, needed
from treegraft.policy.load import load_model, load_shape
from treegraft.policy.shapes import ModelShape
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.policy import ModelSettings

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Runs `treegraft doctor` in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["treegraft", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_doctor_without_and_with_a_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed and "verdict: ready" in printed
    recipe = tmp_path / "r.toml"
    recipe.write_text("[run]\nseed = 5\n[warmup]\nnum_steps = 2\n")
    assert run(monkeypatch, recipe) == 0
    printed = capsys.readouterr().out
    assert "by a formula, not measured" in " ".join(printed.split()) and "first tasks" in printed
    # Too little memory keeps nothing else from being tried.
    monkeypatch.setattr(memory, "physical_memory", lambda: 10_000_000)
    assert run(monkeypatch, recipe) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "first tasks" in printed and "learn.max_pack_tokens" in printed
    assert "verdict: not ready; 1 to correct" in printed


def test_doctor_finds_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "r.toml"
    path.write_text(
        '[tasks]\nkind = "dataset"\n[tasks.dataset]\ntrain = ["$NOWHERE/a.jsonl",'
        ' "/nowhere/b.jsonl", "hub:c"]\n[tools]\nuse = ["json:loads"]\n'
        '[model]\npath = "/nowhere/model/x"\n'
        '[explore]\nexplorers = ["graft"]\n[buffer]\npath = "/nowhere/traces.sqlite"\n'
    )
    assert run(monkeypatch, path) == 2
    printed = capsys.readouterr().out
    assert "verdict: not ready; 4 to correct" in printed
    for part in (
        "$NOWHERE/a.jsonl",
        "/nowhere/b.jsonl",
        "/nowhere/traces.sqlite",
        "no such folder",
    ):
        assert part in printed
    assert run(monkeypatch, "demo", 'tools.use=["no_such_module:lookup"]') == 2
    assert "no module 'no_such_module'" in capsys.readouterr().out


def test_doctor_looks_where_a_run_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    data = {"kind": "dataset", "dataset": {"train": ["~/rows.jsonl"]}}
    assert not [*missing_files(load_config({"tasks": data, "tools": {"use": ["json:loads"]}}))]


SHAPE = ModelShape(
    num_weights=1000,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    hidden_size=4,
    inner_width=16,
    vocab_size=50,
)
"""A token's keys and values are 2 layers * 2 * 2 numbers."""


def test_memory_of_one_process_by_hand() -> None:
    config = load_config({"model": {"path": "a/b"}, "engine": {"max_rows": 32}})
    parts = needed(config, SHAPE, 1, on_gpu=False)
    # The engine's weights, and the kernels' copy of them.
    assert parts["weights"] == 4000 and parts["engine's weights"] == 2 * 4000
    assert parts["gradients"] == 4000 and parts["AdamW"] == 8000
    # 32 rows; 256 tokens of a prompt are assumed.
    path = (256 + config.rollout.max_completion_tokens) * 8 * 4
    assert parts["keys and values"] == 32 * path
    assert needed(config, SHAPE, 1)["keys and values"] == path
    assert not {"masters", "reference"} & parts.keys()
    half = needed(load_config(config, ["model.dtype=bfloat16"]), SHAPE, 1, on_gpu=False)
    assert half["weights"] == 2000 and half["engine's weights"] == 2 * 2000
    # Gradients move to the float32 masters as they are made.
    assert half["masters"] == half["gradients"] == 4000


SEVEN: dict[str, Any] = {
    "model": {"path": "shape:qwen2.5-7b", "dtype": "bfloat16", "gradient_checkpointing": True},
    "run": {"tasks_per_update": 128},
    "explore": {"explorers": ["entropy"], "num_leaves": 16},
    "rollout": {"max_completion_tokens": 3840},
    "learn": {"num_minibatches": 8, "max_pack_tokens": 32768},
}
"""ARPO with 128 prompts an update, paths of 4k: seven.toml of docs/gpu.md."""


def total(num_gpus: int, *overrides: str) -> str:
    found = memory.memory(load_config(SEVEN, overrides), num_gpus)
    assert found.is_good and found.note.startswith("by a formula, not measured: ")
    return found.value.partition(" of each GPU")[0]


def test_eight_cards_at_7b_are_those_of_the_page() -> None:
    """docs/gpu.md: shards of 15.2 GB, gathered layers of .9, activations of 18.6."""
    config = load_config(SEVEN, ["engine.kind=vllm"])
    parts = needed(config, shaped(config), 8)
    shards = parts["masters"] + parts["gradients"] + parts["AdamW"]
    assert shards == pytest.approx(15.2e9, rel=0.01)
    assert parts["gathered layers"] == pytest.approx(0.93e9, rel=0.01)
    assert parts["activations"] == pytest.approx(18.6e9, rel=0.01)
    # As many ranks as GPUs, which torchrun starts.
    assert total(8, "engine.kind=vllm") == "36.8 GB"


def test_one_card_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    three = "model.path=shape:qwen2.5-3b"
    sums = [total(1, three), total(1, three, "model.lora.rank=16")]
    for size in (*sums, total(1, "model.lora.rank=16")):
        assert size in page, size


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory.gpus() == ["NVIDIA H100, 81559 MiB"]
    found = memory.memory(load_config(SEVEN))
    assert not found.is_good and "of 85.5 GB" in found.value
    program.unlink()
    assert memory.gpus() == []


def test_the_words_of_the_tasks_count_as_weights_of_a_tiny_model() -> None:
    """A word more is a row of the embeddings and one of the head."""
    small, large = (load_shape(ModelSettings(), [f"w{n}" for n in range(num)]) for num in (3, 5))
    assert small is not None and large is not None
    assert large.num_weights - small.num_weights == 2 * 2 * Config().model.tiny.hidden_size


def test_the_shape_of_a_folder_is_read_from_its_configuration(tmp_path: Path) -> None:
    model, _ = load_model(ModelSettings(path="shape:bytes"))
    model.config.save_pretrained(tmp_path)
    settings = ModelSettings(path=str(tmp_path))
    with raises_code("weights-missing"):
        load_shape(settings)
    (tmp_path / "model.safetensors").touch()
    assert load_shape(settings) == ModelShape.of_model(model)
    (tmp_path / "config.json").write_text('{"model_type": "none such"}')
    with raises_code("model-config-invalid"):
        load_shape(settings)


def test_unusable_models_are_named(tmp_path: Path) -> None:
    unusable = (
        (str(tmp_path), "model-folder-invalid"),
        ("pypi:not-a-package-here", "model-package-missing"),
        ("a b", "model-missing"),
    )
    for path, code in unusable:
        with raises_code(code):
            load_shape(ModelSettings(path=path))


def test_sizes_for_people() -> None:
    assert gigabytes(2.14e9) == "2.1 GB" and gigabytes(512e6) == "512 MB"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_in_24_gigabytes(path: Path) -> None:
    config = load_config(path)
    assert 0 < sum(needed(config, shaped(config), 1, on_gpu=False).values()) < 24e9


@functools.cache  # reading a GGUF file takes seconds
def shape_of(path: str) -> ModelShape:
    found = load_shape(ModelSettings(path=path), ["a"])
    assert found is not None
    return found


def shaped(config: Config) -> ModelShape:
    return shape_of(config.model.path)
