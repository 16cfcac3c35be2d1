"""The compiled kernels against torch, and what happens where they cannot be compiled."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most
from tests.support.families import build_model
from transformers import Phi3Config, Phi3ForCausalLM

from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.engine.blocks import BlockPool, PathCache
from treegraft.policy.engine.forward import (
    FusedForward,
    HookedForward,
    build_forward,
    shape_problem,
)
from treegraft.policy.engine.ragged import RaggedPlan, Segment
from treegraft.policy.kernels import engine as module
from treegraft.policy.kernels.engine import BLOCK, Kernels, kernels_for, padded_width
from treegraft.policy.kernels.library import load_library, shares_runtime
from treegraft.policy.output_head import max_context


def compiled(width: int, dtype: torch.dtype = torch.float32) -> Kernels:
    found = kernels_for(width, dtype, "cpu")
    if found is None:
        pytest.skip("there is no C compiler")
    return found


SHAPES = st.tuples(st.sampled_from([2, 8, 16, 40, 64, 128]), st.integers(1, 3), st.integers(1, 9))


@at_most(40)
@given(
    st.integers(1, 40),
    st.integers(1, 40).map(lambda half: 2 * half),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 2),
)
def test_products_of_any_shape_whose_rows_do_not_depend_on_each_other(
    rows: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype, num_threads: int
) -> None:
    """Against float64; and a row alone, in any company and anywhere in it has the same bits. The
    rows are a slice of wider ones."""
    kernels = compiled(16, dtype)
    if not kernels.product_step:
        pytest.skip("no products of ours for this processor")
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs + 6, generator=draw).to(dtype)[:, 4 : 4 + inputs]
    weight = torch.randn(outputs, inputs, generator=draw).to(dtype)
    bias = torch.randn(outputs, generator=draw).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        laid_out = kernels.lay_out(weight)
        result = kernels.product(x, laid_out, bias if has_bias else None, outputs)
        alone = torch.cat(
            [
                kernels.product(row[None], laid_out, bias if has_bias else None, outputs)
                for row in x.flip(0)
            ]
        ).flip(0)
    finally:
        torch.set_num_threads(before)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    torch.testing.assert_close(
        result.double(), exact, atol=1e-4 if dtype == torch.float32 else 0.05, rtol=0.01
    )
    assert torch.equal(result, alone)


@at_most(60)
@given(
    SHAPES,
    st.lists(st.integers(0, 200), min_size=1, max_size=20),
    st.sampled_from([None, 1, 5, 64, 100]),
    st.sampled_from([None, 3.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 2),
)
def test_attention_over_blocks(
    shape: tuple[int, int, int],
    positions: list[int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    """Tokens at any positions, each on its own path of blocks in any order, against softmax in
    float64; padding rows are 0."""
    width, kv_heads, group = shape
    kernels = compiled(width, dtype)
    heads = kv_heads * group
    generator = torch.Generator().manual_seed(len(positions))
    num_blocks = 4 * len(positions)
    keys = torch.randn(num_blocks, kv_heads, width, BLOCK, generator=generator).to(dtype)
    values = torch.randn(num_blocks, kv_heads, BLOCK, padded_width(width), generator=generator).to(
        dtype
    )
    query = (
        torch.randn(len(positions) + 1, heads, width, generator=generator).to(dtype).transpose(0, 1)
    )
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    table = torch.randperm(num_blocks, generator=generator).view(len(positions), 4).int()
    rows = torch.tensor([*range(len(positions)), -1], dtype=torch.int32)
    at = torch.tensor([*positions, 0], dtype=torch.int32)
    batch = kernels.batch(table, rows, at, heads, kv_heads)
    batch.threads = num_threads
    options = AttentionOptions(0.3, window, softcap, sinks)
    out = kernels.attend(batch, query, keys, values, options)
    assert not out[-1].any()
    for index, position in enumerate(positions):
        path = table[index].long()
        own_keys = (
            keys[path]
            .permute(1, 2, 0, 3)
            .reshape(kv_heads, width, -1)
            .double()[..., : position + 1]
        )
        own_values = (
            values[path]
            .permute(1, 0, 2, 3)
            .reshape(kv_heads, 4 * BLOCK, -1)
            .double()[:, : position + 1, :width]
        )
        scores = query[:, index].double().view(kv_heads, group, width) @ own_keys * 0.3
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if window is not None:
            scores[..., : max(0, position - window + 1)] = float("-inf")
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(kv_heads, group, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : position + 1]
        expected = (weights @ own_values).view(heads, width)
        torch.testing.assert_close(
            out[index].double(), expected, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 30, 576])
def test_norm_and_gate(size: int, dtype: torch.dtype) -> None:
    kernels = compiled(16, dtype)
    generator = torch.Generator().manual_seed(0)
    x, added, both = (
        torch.randn(5, n, generator=generator).to(dtype) for n in (size, size, 2 * size)
    )
    weight = torch.randn(size, generator=generator).to(dtype)
    close: dict[str, Any] = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    )
    state = x.clone()
    total = x + added
    normed = kernels.norm(state, added, weight, 1e-5)
    torch.testing.assert_close(state, total)
    expected = torch.nn.functional.rms_norm(total.float(), (size,), eps=1e-5) * weight.float()
    torch.testing.assert_close(normed.float(), expected, **close)
    torch.testing.assert_close(
        kernels.norm(x, None, weight, 1e-5).float(),
        torch.nn.functional.rms_norm(x.float(), (size,), eps=1e-5) * weight.float(),
        **close,
    )
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(
        kernels.gate(gate, up).float(), torch.nn.functional.silu(gate.float()) * up.float(), **close
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_far_from_zero(dtype: torch.dtype) -> None:
    """silu(x) is x or nothing there; e^100 is no float32."""
    gate = torch.tensor([[-1e4, -180.0, -100.0, -90.0, -50.0, 50.0, 90.0, 100.0, 180.0, 1e4]]).to(
        dtype
    )
    found = compiled(16, dtype).gate(gate, torch.ones_like(gate)).float()
    torch.testing.assert_close(found, torch.where(gate > 0, gate, 0.0).float(), atol=1e-18, rtol=0)


def test_a_layer_of_another_shape_is_refused() -> None:
    model = build_model("llama")
    width = model.config.head_dim
    kernels = compiled(width)
    cache = PathCache(BlockPool(model, 0.0), max_rows=1)
    row = cache.open([1, 2, 3], 3)
    assert row is not None
    cache.extend(row, 3)
    plan = RaggedPlan(3, cache.pool, cache.table, [Segment(row, 3, 0)], kernels)
    kv_heads = cache.pool.keys[0].shape[1]
    options = AttentionOptions(1.0, None, None, None)
    query = torch.zeros(2 * kv_heads, 3, width)
    key = torch.zeros(kv_heads, 3, width)
    assert plan.attend(0, query, key, key, options).shape == (3, 2 * kv_heads, width)
    for wrong in (
        torch.zeros(kv_heads + 1, 3, width),
        torch.zeros(kv_heads, 3, width + 2),
        key.bfloat16(),
    ):
        with pytest.raises(ValueError, match="kernels: got"):
            plan.attend(0, query, wrong, key, options)


FREE = {
    ("attend", 1): ("type", "gaps"),
    ("batch", 0): ("longer",),
    ("blocks", 0): ("longer",),
    ("gumbels", 0): ("gaps",),
    ("lay_out", 0): ("longer", "gaps"),
}
"""What a call below takes all the same: sinks are cast, sizes of a table are its own, and some
tensors are copied where they have gaps."""


def test_tensors_of_another_type_or_shape_do_not_reach_the_c_code() -> None:
    """Of each call one tensor at a time is wrong."""
    kernels = compiled(16)
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    table, rows, at = (torch.zeros(n, dtype=torch.int32) for n in ((1, 2), (3,), (3,)))
    batch = kernels.batch(table, rows, at, 2, 1)
    blocks = (drawn(4, 1, 16, BLOCK), drawn(4, 1, BLOCK, 16))
    query, key, value, cosines, sines = drawn(2, 3, 16), *drawn(2, 1, 3, 16), *drawn(2, 3, 16)

    def attend(query: torch.Tensor, sinks: torch.Tensor, *blocks: torch.Tensor) -> None:
        kernels.attend(batch, query, *blocks, AttentionOptions(1.0, None, None, sinks))

    calls: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "batch": (lambda *x: kernels.batch(*x, 2, 1), (table, rows, at)),
        "store": (
            lambda *x: kernels.store(batch, *x[:5], x[5:]),
            (query, key, value, *blocks, cosines, sines),
        ),
        "attend": (attend, (query, drawn(2), *blocks)),
        "norm": (lambda *x: kernels.norm(*x, 1e-5), (drawn(3, 32), drawn(3, 32), drawn(32))),
        "norm_heads": (lambda *x: kernels.norm_heads(*x, 1e-5), (drawn(3, 2, 16), drawn(16))),
        "gate": (kernels.gate, (drawn(3, 32), drawn(3, 32))),
        "blocks": (kernels.blocks, (drawn(3, 300), drawn(3).abs())),
        "gumbels": (lambda x: kernels.gumbels(x, 40), (torch.tensor([[1, 2, 3], [4, 5, 6]]),)),
        "lay_out": (kernels.lay_out, (drawn(20, 32),)),
        "product": (lambda *x: kernels.product(*x, 20), (drawn(3, 32), drawn(32, 32), drawn(20))),
    }
    for name, (call, right) in calls.items():
        call(*(x.clone() for x in right))
        for place, own in enumerate(right):
            wrongs = {
                "type": own.double() if own.is_floating_point() else own.float(),
                "longer": torch.cat([own, own], dim=-1),
                "gaps": torch.stack([own, own], dim=-1)[..., 0],
            }
            for what in wrongs.keys() - set(FREE.get((name, place), ())):
                with pytest.raises(ValueError, match="kernels: got"):
                    call(*right[:place], wrongs[what], *right[place + 1 :])
                    pytest.fail(f"{name} took tensor {place} ({what})")


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_noise_does_not_depend_on_torchs_default_type(default: torch.dtype) -> None:
    kernels = compiled(16)
    draws = torch.tensor([[5, 6, n] for n in range(7)])
    expected = kernels.gumbels(draws, 300)
    torch.set_default_dtype(default)
    try:
        found = kernels.gumbels(draws, 300)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_a_model_that_no_pass_fits_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    monkeypatch.setattr(
        "treegraft.policy.engine.forward._distance_problem", lambda *_: "they are wrong"
    )
    assert build_forward(model) == (None, "they are wrong")
    assert not any("forward" in vars(module) for module in model.modules())


def test_positions_that_would_change_the_rotation_of_others_are_out_of_reach() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    size |= {
        "max_position_embeddings": 96,
        "original_max_position_embeddings": 48,
        "pad_token_id": 0,
    }
    assert max_context(Phi3ForCausalLM(Phi3Config(**size, rope_parameters=rope))) == 48
    assert max_context(Phi3ForCausalLM(Phi3Config(**size))) == 96


def test_threads_are_torchs_whatever_other_packages_bring() -> None:
    importlib.import_module("sklearn.utils._openmp_helpers")  # has an OpenMP of its own
    library, _ = load_library("engine", 16, torch.float32)
    assert shares_runtime(library)
    assert not shares_runtime(ctypes.CDLL("libm.so.6"))


def test_rotation_and_storing() -> None:
    """One head of width 4, by hand: (1, 2, 3, 4) turned by a quarter in its first plane (1, 3), not
    at all in (2, 4)."""
    kernels = compiled(4)
    query, key, value = (torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]) for _ in range(3))
    keys = torch.zeros(3, 1, 4, BLOCK)
    values = torch.zeros(3, 1, BLOCK, 16)
    table, rows, at = (torch.tensor(x, dtype=torch.int32) for x in ([[1, 2]], [0], [70]))
    batch = kernels.batch(table, rows, at, 1, 1)
    kernels.store(
        batch,
        query,
        key,
        value,
        keys,
        values,
        (torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0]])),
    )
    assert query.flatten().tolist() == [-3.0, 2.0, 1.0, 4.0] and key.flatten().tolist() == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]
    assert keys[2, 0, :, 6].tolist() == [-3.0, 2.0, 1.0, 4.0] and values[2, 0, 6, :4].tolist() == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]
    assert int(keys.count_nonzero()) == 4 and int(values.count_nonzero()) == 4


# ---------------------------------------------------------------------- which forward pass


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "mistral"])
def test_decoders_of_llamas_shape_run_on_kernels(family: str) -> None:
    compiled(8)
    forward, problem = build_forward(build_model(family))
    assert problem is None and isinstance(forward, FusedForward)


@pytest.mark.parametrize("family", ["granite", "gemma2", "gpt-neox", "phi3", "cohere", "gpt-oss"])
def test_others_run_in_transformers_own_way(family: str) -> None:
    """Granite's modules are Llama's, but it scales what they give: only its numbers tell."""
    model = build_model(family)
    assert (shape_problem(model) is None) == (family == "granite")
    forward, problem = build_forward(model)
    assert problem is None and isinstance(forward, HookedForward)
    assert (forward.kernels is None) == (kernels_for(8, torch.float32, "cpu") is None)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and nothing compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._kernels.cache_clear()
    yield tmp_path
    module._kernels.cache_clear()


def test_they_are_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(8)
    (made,) = (fresh / "treegraft" / "kernels").iterdir()
    stamp = made.stat().st_mtime_ns
    module._kernels.cache_clear()
    assert kernels_for(8, torch.float32, "cpu") is not None and made.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("compiler", ["/bin/false", "/does/not/exist"])
def test_without_a_compiler_torchs_operators_do_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.WARNING):
        forward, problem = build_forward(build_model("llama"))
    assert problem is None and isinstance(forward, HookedForward) and forward.kernels is None
    assert "running on torch's operators alone" in caplog.text
    assert (
        "did not compile them" if compiler == "/bin/false" else "no C compiler was found"
    ) in caplog.text


def test_a_folder_that_others_may_write_to_is_not_loaded_from(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fresh / "treegraft" / "kernels"
    folder.mkdir(parents=True)
    os.chmod(folder, 0o777)
    with caplog.at_level(logging.WARNING):
        assert kernels_for(8, torch.float32, "cpu") is None
    assert "chmod 700" in caplog.text


def test_other_devices_and_types_have_none() -> None:
    assert (
        kernels_for(8, torch.float32, "cuda") is None
        and kernels_for(8, torch.float16, "cpu") is None
    )
