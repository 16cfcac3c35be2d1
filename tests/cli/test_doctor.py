"""`treegraft doctor`: memory by hand, shapes of models, and everything that is missing."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from typer.testing import CliRunner

from treegraft.cli import main as cli
from treegraft.cli import memory
from treegraft.cli.doctor import data_files, import_paths
from treegraft.cli.memory import Place, memory_of, needed
from treegraft.core.errors import SettingError
from treegraft.core.finding import Finding
from treegraft.policy.load import load_model, load_shape
from treegraft.policy.shapes import ModelShape
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.policy import ModelSettings

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))


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
    assert "torch" in printed and "verdict: installed" in printed
    recipe = tmp_path / "r.toml"
    recipe.write_text("[run]\nseed = 5\n[warmup]\nnum_steps = 2\n")
    assert run(monkeypatch, recipe, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["sum"]["is_good"] and found["first tasks"]


def test_doctor_finds_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    path = tmp_path / "r.toml"
    path.write_text(
        '[tasks]\nkind = "dataset"\n[tasks.dataset]\ntrain = ["$NOWHERE/a.jsonl",'
        ' "/nowhere/b.jsonl", "hub:c"]\n[tools]\nuse = ["search",'
        ' "no_such_module:lookup", "a_file.py:lookup"]\n[model]\npath = "/nowhere/model/x"\n'
        '[explore]\nexplorers = ["graft"]\n[buffer]\npath = "/nowhere/traces.sqlite"\n'
        '[credit]\nattribution = "no_such_credit:f"\n[loss]\nobjective = "no_such_loss:f"\n'
    )
    assert run(monkeypatch, path) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "verdict: not ready; 9 to correct" in printed
    for part in (
        "set the environment variable",
        "cannot be read",
        "name a file",
        "no module 'no_such_credit'",
        "no module 'no_such_loss'",
        "a file; write 'a_file:lookup'",
        "no such folder",
        "buffer.path",
        "/nowhere/traces.sqlite",
        "hub:c",
    ):
        assert part in printed


def test_doctor_looks_where_a_run_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "of_this_folder.py").write_text("f = print")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data = {"kind": "dataset", "dataset": {"train": ["~/rows.jsonl"]}}
    own = {"use": ["json:loads", "of_this_folder:f"]}
    config = load_config({"tasks": data, "tools": own})
    assert [one.is_good for one in data_files(config)] == [True]
    assert [one.value for one in import_paths(config)] == ["found", "found"]


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
    parts = needed(config, SHAPE, on_cpu(24))
    assert parts["weights"] == parts["engine's weights"] == parts["engine's packed weights"] == 4000
    assert parts["gradients"] == 4000 and parts["AdamW"] == 8000
    # 32 rows; 256 tokens of a prompt are assumed.
    tokens = 256 + config.rollout.max_completion_tokens
    assert parts["keys and values"] == 32 * tokens * 8 * 4
    assert not {"masters", "reference", "reserved"} & parts.keys()
    half = needed(load_config(config, ["model.dtype=bfloat16"]), SHAPE, on_cpu(24))
    assert half["weights"] == half["engine's weights"] == half["engine's packed weights"] == 2000
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


def estimate(config: Config, num_gpus: int, gpu_gb: float = 80) -> dict[str, Finding]:
    place = Place.planned(config, num_gpus, gpu_gb)
    return {one.name: one for one in memory_of(config, shaped(config), place)}


def test_eight_cards_at_7b_are_those_of_the_page() -> None:
    """docs/gpu.md: shards of 15.2 GB, gathered layers of .9, activations of 18.6."""
    config = load_config(SEVEN, ["engine.kind=vllm"])
    parts = needed(config, shaped(config), Place.planned(config, 8))
    shards = parts["masters"] + parts["gradients"] + parts["AdamW"]
    assert shards == pytest.approx(15.2e9, rel=0.01)
    assert parts["gathered layers"] == pytest.approx(0.93e9, rel=0.01)
    assert parts["activations"] == pytest.approx(18.6e9, rel=0.01)
    found = estimate(config, 8)
    assert found["sum"].is_good and "80.0 GB of each GPU" in found["sum"].note
    assert "servers may take 0.54 of it" in found["sum"].note
    assert "nothing of it was measured" in found["estimate"].note


def test_what_does_not_fit_names_settings_that_take_less() -> None:
    config = load_config(SEVEN)
    total = estimate(config, 1, 141)["sum"]
    assert not total.is_good and "model.lora.rank=16" in total.note
    assert estimate(load_config(config, ["model.lora.rank=16"]), 1, 141)["sum"].is_good
    assert estimate(config, 8)["sum"].is_good


def test_the_page_says_how_many_paths_of_a_3b_model_fit() -> None:
    """The sentence of docs/gpu.md on 3B and 4k tokens."""

    def note(gpu_gb: float, *overrides: str) -> str:
        config = load_config(SEVEN, ["model.path=shape:qwen2.5-3b", *overrides])
        return estimate(config, 1, gpu_gb)["sum"].note

    assert "room for 29 paths of 4,096 tokens" in note(80)
    assert "room for 141 paths" in note(48, "model.lora.rank=16")
    assert "room for" not in note(48)
    page = (Path(__file__).resolve().parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "29 paths at a time" in page and "an L40S of 48 GB has room for 141 paths" in page


def test_the_command_estimates_cards_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[model]\npath = "shape:qwen2.5-32b"\ndtype = "bfloat16"\n')
    assert run(monkeypatch, path, "--gpus", "1", "--gpu-gb", "141", "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert "141.0 GB of each GPU" in found["memory"]["sum"]["note"]
    assert found["verdict"]["value"].startswith("not ready; ")
    done = CliRunner().invoke(cli.app, ["doctor", str(path), "--gpu-gb", "141"])
    assert isinstance(done.exception, SettingError) and "without --gpus" in str(done.exception)


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "0, NVIDIA H100, 1024, 81559\n1, NVIDIA H100, 2048, 81559\n"
    monkeypatch.setattr(memory.shutil, "which", lambda _: "/bin/true")
    done = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: done)
    rooms = [memory.Room(size << 20, 81559 << 20, "the GPU") for size in (1024, 2048)]
    assert memory.gpus() == {f"{n}: NVIDIA H100, 85.5 GB": room for n, room in enumerate(rooms)}
    place = Place.here(load_config(SEVEN))
    assert (place.num_gpus, place.num_ranks, place.limit) == (2, 1, 1 << 30)
    assert Place.here(load_config(SEVEN, ["learn.ranks=2"])).num_ranks == 2
    monkeypatch.setattr(memory.shutil, "which", lambda _: None)
    assert memory.gpus() == {}


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
    assert memory.gigabytes(2.14e9) == "2.1 GB" and memory.gigabytes(512e6) == "512 MB"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_in_24_gigabytes(path: Path) -> None:
    config = load_config(path)
    *parts, total = memory_of(config, shaped(config), on_cpu(24))
    assert parts and total.is_good and total.value.endswith(("MB", "GB"))


@functools.cache  # reading a GGUF file takes seconds
def shape_of(path: str) -> ModelShape:
    found = load_shape(ModelSettings(path=path), ["a"])
    assert found is not None
    return found


def shaped(config: Config) -> ModelShape:
    return shape_of(config.model.path)


def on_cpu(free_gb: float) -> Place:
    room = memory.Room(int(free_gb * 2**30), 24 * 2**30, "this machine")
    return Place(room=room, num_gpus=0, num_ranks=1)


def test_too_little_memory_is_said() -> None:
    # What is free counts, not what there is.
    *_, total = memory_of(Config(), shaped(Config()), on_cpu(0.25))
    assert not total.is_good and "268 MB of 25.8 GB" in total.note
    assert "learn.max_pack_tokens=2048" in total.note


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 400000\nfile 1\n")
    # 300,000 bytes are left, and files that were read give 400,000 back.
    assert memory.memory_room(tmp_path) == memory.Room(700_000, 1_000_000, "this control group")
    (tmp_path / "memory.max").write_text("max\n")
    found = memory.memory_room(tmp_path)
    assert found is not None and found.place == "this machine" and 0 < found.free <= found.whole
