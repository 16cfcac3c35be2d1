"""`doctor --gpus`: memory and time by hand, against the estimates that the design was made with,
and what cannot fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.trees import Part, build_tree
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from treegraft.cli.main import app
from treegraft.core.errors import SettingError
from treegraft.core.finding import Finding
from treegraft.explore.build import num_starts
from treegraft.extras.lab.layout import Layout
from treegraft.extras.lab.roofline import CARDS
from treegraft.extras.lab.shape import model_shape, num_shape_weights
from treegraft.extras.lab.sizing import (
    RESERVED,
    Plan,
    gpu_parts,
    host_bytes,
    seconds_by_phase,
    server_bytes,
    sizing,
)
from treegraft.extras.lab.text import ranges
from treegraft.policy.attention_hook import tree_attention
from treegraft.policy.engine.blocks import cache_bytes
from treegraft.policy.engine.build import reserved_bytes
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.scores import packed_hidden
from treegraft.policy.shapes import ModelShape, published_shape
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
"""ARPO with 128 prompts an update, paths of 4k."""
SERVED = [
    "engine.kind=vllm",
    "engine.vllm.num_servers=8",
    'engine.vllm.server_args=["--gpu-memory-utilization", "0.54"]',
]
"""A server beside each rank."""


def shaped(config: Config) -> ModelShape:
    found = model_shape(config, 0)
    assert found is not None
    return found


def found_for(config: Config, num_gpus: int, memory: int | None = None) -> dict[str, Finding]:
    starts = num_starts(config.explore)
    card = "h100" if memory is None else f"h100:{memory}"
    plan = replace(Plan.of(num_gpus, card), num_starts=starts)
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
    assert gpu_parts(config, shape, Plan.of(1, "H100")) == {
        "weights": 2000,
        "masters": 4000,
        "gradients": 4000,
        "AdamW": 8000,
        "engine's weights": 2000,
        # 10 tokens, numbers of 2 bytes: two layers of 4 * 6 + 2 * 4 + 2 * 2 + 8 * 4 = 68, gradients
        # of one of 2 * 6 + 2 * 4 = 20, and a tenth.
        "activations": pytest.approx(1.1 * 10 * 2 * (2 * 68 + 20)),
        # 4 rows of 50 words and their gradients, three float32 copies, less those gradients.
        "logits": 2 * 4 * 50 * 2 + 4 * 3 * 4 * 50 - 10 * 20 * 2,
        "reserved": RESERVED,
    }
    four = gpu_parts(config, shape, Plan.of(4, "H100"))
    # 600 weights in two layers; two of them gathered.
    assert four["gathered layers"] == 2 * 300 * 2 and "weights" not in four
    assert (four["masters"], four["gradients"], four["AdamW"]) == (1000, 1000, 2000)
    # The native engine is rank 0's alone.
    assert four["engine's weights"] == 2000
    assert "engine's weights" not in gpu_parts(config, shape, Plan.of(4, "H100"), 3)
    saving = load_config(
        {"model": {"path": "a/b", "dtype": "bfloat16"}, "learn": {"max_pack_tokens": 10}},
        ["model.gradient_checkpointing=true", "model.lora.rank=2"],
    )
    parts = gpu_parts(saving, shape, Plan.of(1, "H100"))
    # 2 layers of rank 2: query and output 8 each, key and value 6 each, three of 10.
    assert parts["AdamW"] == 8 * 2 * 2 * (16 + 12 + 30)
    # Two inputs of 4, and one layer that is computed again.
    assert parts["activations"] == pytest.approx(1.1 * 10 * 2 * (2 * 4 + 68 + 20))
    assert parts["logits"] == 2 * 10 * 50 * 2 + 4 * 3 * 10 * 50 - 10 * 88 * 2


@pytest.mark.parametrize(("name", "measured"), [("qwen2.5-1.5b", 100.4e3), ("qwen2.5-7b", 218e3)])
def test_a_layer_of_a_published_shape_on_paper(name: str, measured: float) -> None:
    """4 * 8,960 + 2 * (1,536 + 256) + 8 * 1,536 = 51,712 numbers of 2 bytes a token at 1.5B, and
    4 * 18,944 + 2 * (3,584 + 512) + 8 * 3,584 = 112,640 at 7B: 3 % more than was measured."""
    fields = published_shape(f"shape:{name}")
    kept = ModelShape.of_config(fields, num_shape_weights(fields)).kept_width
    assert kept == {"qwen2.5-1.5b": 51_712, "qwen2.5-7b": 112_640}[name]
    assert measured < 2 * kept < 1.04 * measured


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
            packed_hidden(model, batch, compile_kernels=False)
        return sum(one.untyped_storage().nbytes() for at, one in kept.items() if at not in own)

    shape = ModelShape.of_config(fields | {"num_hidden_layers": 1, "model_type": kind}, 0)
    found = (kept_by(3) - kept_by(1)) / 2 / batch.num_tokens / 2
    assert found == pytest.approx(shape.kept_width + shape.query_width, rel=0.02)


def test_eight_cards_at_7b_are_those_of_the_design() -> None:
    """Shards of 15 GB, activations of a 32k pack 19, 0.45 M tokens of keys and values; 19 s of old
    log-probabilities, 79 s of learning, 50 s of sampling."""
    config = load_config(SEVEN, SERVED)
    plan = replace(Plan.of(8, "H100:80"), num_starts=num_starts(config.explore))
    parts = gpu_parts(config, shaped(config), plan)
    shards = parts["masters"] + parts["gradients"] + parts["AdamW"]
    assert shards == pytest.approx(15.2e9, rel=0.01)
    assert parts["server"] == pytest.approx(0.54 * 80e9)
    assert parts["activations"] == pytest.approx(18.6e9, rel=0.01)
    found = found_for(config, 8, 80)
    assert found["GPUs 0 to 7"].value == "learner and server" and found["left"].is_good
    # 43.2 GB less weights of 15.2 and 2 reserved; 57,344 bytes a token.
    note = found["keys and values"].note
    assert found["keys and values"].is_doubtful and "room for 452," in note
    assert "tokens in each server" in note
    seconds = seconds_by_phase(config, shaped(config), plan)
    assert seconds["old log-probabilities"] == pytest.approx(19, rel=0.15)
    assert seconds["forward and backward"] == pytest.approx(79, rel=0.15)
    assert seconds["sampling"] == pytest.approx(50, rel=0.15)


def test_a_server_that_sleeps_and_a_pass_share_their_room() -> None:
    """Activations of 18.6 and gathered layers of .9 GB are there while the server is not, of whose
    43.2 GB all but 2 go: 19.5 GB of room. By that the server may take 78 % of the card."""
    config = load_config(SEVEN, SERVED)
    asleep = load_config(config, ["engine.vllm.sleep=true"])
    plan = Plan.of(8, "H100:80")
    awake, parts = (gpu_parts(one, shaped(one), plan) for one in (config, asleep))
    passing = sum(awake[name] for name in ("gathered layers", "activations"))
    assert parts["never there at once"] == -passing
    assert passing == pytest.approx(19.5e9, rel=0.01)
    found = found_for(asleep, 8, 80)
    assert found["never there at once"].value == f"-{passing / 1e9:.1f} GB"
    more = load_config(asleep, ['engine.vllm.server_args=["--gpu-memory-utilization","0.78"]'])
    assert found_for(more, 8, 80)["left"].is_good
    too_much = load_config(more, ["engine.vllm.sleep=false"])
    verdict = found_for(too_much, 8, 80)["left"]
    assert not verdict.is_good and "engine.vllm.sleep=true" in verdict.note


def test_what_cannot_fit_is_refused_with_what_to_change() -> None:
    config = load_config(SEVEN)
    verdict = found_for(config, 1)["keys and values"]
    assert not verdict.is_good and "short of one path" in verdict.note
    assert "model.lora.rank=16" in verdict.note and "4 such GPUs" in verdict.note
    # Each way that is named does it.
    assert all(one.is_good for one in found_for(config, 4).values())
    adapted = load_config(SEVEN, ["model.lora.rank=16"])
    assert found_for(adapted, 1)["keys and values"].is_good
    large = load_config(SEVEN, ["learn.max_pack_tokens=262144"])
    verdict = found_for(large, 8)["keys and values"]
    way = next(word for word in verdict.note.split() if word.startswith("learn.max_pack"))
    fitting = load_config(SEVEN, [way.strip(";.")])
    assert found_for(fitting, 8)["keys and values"].is_good


def test_phases_follow_the_settings() -> None:
    config = load_config(SEVEN, [*SERVED, "loss.old_logprobs=engine", "loss.kl_coef=0.01"])
    phases = seconds_by_phase(
        config,
        shaped(config),
        replace(Plan.of(8, "H100"), num_starts=num_starts(config.explore)),
    )
    assert list(phases) == ["sampling", "forward and backward", "reference"]


def test_the_command_sizes_cards_that_are_not_here(tmp_path: Any) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[model]\npath = "shape:qwen2.5-32b"\ndtype = "bfloat16"\n')
    runner = CliRunner()
    done = runner.invoke(app, ["doctor", str(path), "--gpus", "1", "--gpu", "H200", "--json"])
    found = json.loads(done.stdout)
    memory = found["memory"]
    assert done.exit_code == 2 and memory["GPUs"]["value"] == "1 x H200 of 141.0 GB"
    assert not memory["keys and values"]["is_good"]
    assert found["verdict"]["value"].startswith("does not fit; ")
    assert found["what runs where"]["learner"]["value"] == "H200, bfloat16"
    assert Plan.of(1, "a100:40").card == replace(CARDS["A100"], memory=40e9)
    for unknown in ("V100", "V100:32", "H100:", "H100:0", "H100:80GB", "H100:-1"):
        with raises_code("unknown-card"):
            Plan.of(1, unknown)
    for words, part in ((["--gpu", "H200"], "without --gpus"), (["--gpu-memory", "80"], "H100:80")):
        done = runner.invoke(app, ["doctor", str(path), *words])
        assert isinstance(done.exception, SettingError) and part in str(done.exception)


def test_the_page_says_how_many_paths_of_a_3b_model_fit() -> None:
    """The sentence of docs/gpu.md on 3B and 4k tokens."""

    def num_paths(card: str, *overrides: str) -> int:
        config = load_config(SEVEN, ["model.path=shape:qwen2.5-3b", *overrides])
        plan = replace(Plan.of(1, card), num_starts=num_starts(config.explore))
        found = {one.name: one for one in sizing(config, shaped(config), plan)}["keys and values"]
        tokens = re.search(r"room for ([\d,]+) tokens", found.note)
        return int(tokens[1].replace(",", "")) // 4096 if tokens else 0

    assert num_paths("H100:80") == 29
    assert num_paths("H100:80", "learn.max_pack_tokens=16384") == 68
    assert num_paths("L40S", "model.lora.rank=16") == 141
    assert num_paths("L40S") == 0
    page = (Path(__file__).resolve().parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "29 paths at a time" in page and "an L40S of 48 GB has room for 141 paths" in page


def test_a_server_takes_its_share_of_the_card_by_hand() -> None:
    """Of 80 GB: 0.92 of it if nothing is said; with the bytes of the cache the weights, the cache
    and what is reserved; two GPUs share the weights."""
    config = load_config(SEVEN, ["engine.kind=vllm"])
    shape, plan = shaped(config), Plan.of(1, "H100:80")
    assert server_bytes(config, shape, plan, 1) == pytest.approx(73.6e9)
    weights = 2.0 * shape.num_weights
    cached = load_config(
        SEVEN, ["engine.kind=vllm", 'engine.vllm.server_args=["--kv-cache-memory-bytes","30e9"]']
    )
    assert server_bytes(cached, shape, plan, 1) == weights + 30e9 + RESERVED
    options = '["--tensor-parallel-size=2", "--gpu-memory-utilization=0.5"]'
    halves = ["engine.kind=vllm", 'engine.vllm.gpus=["1,2"]', f"engine.vllm.server_args={options}"]
    two = load_config(SEVEN, halves)
    found = found_for(two, 3, 80)
    assert (found["GPU 0"].value, found["GPUs 1 to 2"].value) == ("learner", "server")
    assert found["GPUs 1 to 2: server"].value == "40.0 GB"
    tokens = (2 * (40e9 - RESERVED) - weights) / 57_344
    assert f"room for {tokens:,.0f} tokens" in found["keys and values"].note


def test_a_learner_and_a_server_that_do_not_fit_one_card_are_refused() -> None:
    """vLLM's own share leaves 6.4 GB; the share that is named instead fits."""
    config = load_config(SEVEN, SERVED[:2])
    verdict = found_for(config, 8, 80)["left"]
    assert not verdict.is_good and "more than the card has" in verdict.note
    way = verdict.note.partition("Change: ")[2].partition("; or ")[0]
    assert way.startswith("engine.vllm.server_args=") and "lora" not in verdict.note
    fitting = load_config(SEVEN, [*SERVED[:2], way])
    assert all(one.is_good for one in found_for(fitting, 8, 80).values())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learn.ranks=8"], "learn.ranks: got 8 with 4 GPUs"),
        (["learn.ranks=3", "learn.replicate=2"], "learn.replicate: got 2 with 3 ranks"),
        (["engine.kind=vllm", 'engine.vllm.gpus=["4"]'], "names GPU 4, expected numbers from 0 to"),
    ],
)
def test_layouts_that_cannot_be_are_refused(overrides: list[str], said: str) -> None:
    verdict = found_for(load_config(SEVEN, overrides), 4)["layout"]
    assert not verdict.is_good and said in verdict.note


def test_layouts_follow_the_settings() -> None:
    """A learner on the first GPU, servers on the others; servers elsewhere; a GPU for nothing."""
    names = [str(n) for n in range(1, 8)]
    apart = load_config(
        SEVEN, ["engine.kind=vllm", "engine.vllm.num_servers=7", f"engine.vllm.gpus={names}"]
    )
    layout = Layout.of(apart, 8)
    assert (layout.ranks, layout.servers) == (1, tuple((n,) for n in range(1, 8)))
    assert layout.kinds() == {"learner": [0], "server": list(range(1, 8))}
    elsewhere = load_config(
        SEVEN, ["engine.kind=vllm", 'engine.vllm.servers=["http://a:1", "http://b:1"]']
    )
    assert Layout.of(elsewhere, 4).kinds() == {"learner": [0, 1, 2, 3]}
    assert found_for(elsewhere, 8)["keys and values"].value == "elsewhere"
    two = load_config(SEVEN, ["learn.ranks=2", "engine.kind=vllm", "engine.vllm.num_servers=4"])
    found = {holds: ranges(gpus) for holds, gpus in Layout.of(two, 3).kinds().items()}
    assert found == {"learner and 2 servers": "0", "learner and server": "1", "server": "2"}
    assert Layout.of(load_config(SEVEN, ["learn.ranks=2"]), 3).kinds()["nothing"] == [2]


def test_offloaded_shards_are_in_the_hosts_memory() -> None:
    """16 bytes a weight, once for each copy; the GPU keeps passes and gathered layers."""
    options = ["learn.ranks=8", "learn.offload=true", "learn.max_pack_tokens=2048"]
    config = load_config(SEVEN, options)
    shape = shaped(config)
    assert host_bytes(config, shape, 8) == 16.0 * shape.num_weights
    twice = load_config(SEVEN, [*options, "learn.replicate=2"])
    assert host_bytes(twice, shape, 8) == 32.0 * shape.num_weights
    parts = shape.learner_parts(config, 8)
    assert parts.keys() == {"gathered layers", "activations", "logits", "reserved"}
    whole = shape.learner_parts(load_config(SEVEN, [options[0], "learn.max_pack_tokens=8192"]), 8)
    assert parts["activations"] == whole["activations"] / 4
    assert found_for(config, 8)["hosts' memory"].value == "121.8 GB"


def test_the_gpus_of_this_machine_are_taken_where_ranks_or_servers_divide_them() -> None:
    cards = ["NVIDIA H100 80GB HBM3, 81559 MiB"] * 2
    assert Plan.here(load_config(SEVEN), cards) is None
    plan = Plan.here(load_config(SEVEN, ["learn.ranks=2"]), cards)
    assert plan is not None and (plan.num_gpus, plan.card.memory) == (2, 81559 * 2.0**20)
    assert Plan.here(load_config(SEVEN, ["engine.kind=vllm"]), cards) == plan
    cards[:] = ["NVIDIA Unheard, 100 MiB"]
    assert Plan.here(load_config(SEVEN, ["learn.ranks=2"]), cards) is None


def test_the_native_engine_takes_what_doctor_says_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process takes of a card of 80 GB, in order, for 3B in full: both copies of the
    weights, the pool, then all that learning makes. It never has more than there is, and the pool
    is doctor's."""
    options = ["model.path=shape:qwen2.5-3b", "model.dtype=bfloat16", "learn.ranks=1"]
    config = load_config(SEVEN, options)
    shape = shaped(config)
    with torch.device("meta"):
        fields = published_shape(config.model.path)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.bfloat16
        )
    parts = shape.learner_parts(config, 1)
    taken = 2 * parts["weights"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9 - taken, 80e9))
    reserved = reserved_bytes(config, model, 1)
    pool = cache_bytes("auto", torch.device("cuda"), reserved)
    taken += sum(size for name, size in parts.items() if name != "weights")
    assert taken + pool == pytest.approx(80e9)
    assert parts.keys() == {"weights", "masters", "gradients", "AdamW", "activations", "reserved"}
    plan = Plan.of(1, "h100:80")
    assert pool == pytest.approx(80e9 - sum(gpu_parts(config, shape, plan).values()))
    # 40 % of what is free at first would be 27 GB, and learning would end for lack of memory.
    assert 0 < pool < 0.4 * (80e9 - 2 * parts["weights"])
