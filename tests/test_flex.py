"""FlexAttention over packed trees: exact against a dense mask, refused where it is not.
test_packed_equals_separate runs the laws through it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from treegraft.policy.learn.flex import flex_distance, proven_flex, tree_block_mask

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of torch: FlexAttention is not compiled here

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not compiled FlexAttention runs backward on a CPU as well, though it says no."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    proven_flex.cache_clear()
    yield
    proven_flex.cache_clear()


def seen_by(ends: list[int], positions: list[int], window: int | None) -> list[str]:
    count = torch.arange(len(ends))
    mask = tree_block_mask(torch.tensor(ends), torch.tensor(positions), window)
    return [
        "".join("x" if x else "." for x in row)
        for row in mask.mask_mod(None, None, count[:, None], count[None]).tolist()
    ]  # type: ignore[arg-type]


def test_a_mask_by_hand() -> None:
    """A prompt of two tokens with branches of two and one, and another tree of one token."""
    assert seen_by([5, 5, 4, 4, 5, 6], [0, 1, 2, 3, 2, 0], None) == [
        "x.....",
        "xx....",
        "xxx...",
        "xxxx..",
        "xx..x.",
        ".....x",
    ]
    assert seen_by([5, 5, 4, 4, 5, 6], [0, 1, 2, 3, 2, 0], 2) == [
        "x.....",
        "xx....",
        ".xx...",
        "..xx..",
        ".x..x.",
        ".....x",
    ]


def test_outputs_and_gradients_are_those_of_a_dense_mask() -> None:
    assert flex_distance(flex_attention, 16, torch.float32, CPU) < 1e-5


@pytest.mark.parametrize(
    ("made", "notice"),
    [
        (lambda flex: lambda *a, **o: 1.01 * flex(*a, **o), "FlexAttention is off by 0.01"),
        (lambda _: 1 / 0, "FlexAttention failed with ZeroDivisionError: division by zero"),
    ],
)
def test_what_fails_or_is_off_is_not_used(
    made: Callable[[Any], Any],
    notice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = torch.compile
    makers: list[Callable[[Any], Any]] = [lambda flex: flex]

    def compile_(function: Any, **options: Any) -> Any:
        # FlexAttention itself compiles something.
        return makers[-1](function) if function is flex_attention else compiled(function, **options)

    monkeypatch.setattr(torch, "compile", compile_)
    assert proven_flex(16, torch.float32, CPU) is flex_attention
    proven_flex.cache_clear()
    makers.append(made)
    with caplog.at_level(logging.WARNING):
        assert proven_flex(16, torch.float32, CPU) is None
    assert notice in caplog.text and "dense masks" in caplog.text


def test_the_proof_needs_gradients_wherever_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without gradients, and within a layer whose activations are computed again."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: f if f is flex_attention else compiled(f, **options)
    )
    with torch.no_grad():
        assert proven_flex(16, torch.float32, CPU) is flex_attention
    proven_flex.cache_clear()

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        assert proven_flex(16, torch.float32, CPU) is flex_attention
        return y.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_on_a_gpu(dtype: torch.dtype) -> None:
    assert proven_flex(64, dtype, torch.device("cuda")) is not None
