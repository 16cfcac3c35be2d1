"""Linear layers of a bfloat16 model on a CPU, with a second copy of their weights laid out for the matrix kernels.

A plain product lays its weights out anew at every call, which at 16 rows takes longer than the product itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_log = logging.getLogger(__name__)

ROWS = 64
"""Rows that the layout is made for; products of 16 to 512 rows gain from it too."""
_TOLERANCE = 0.05
"""Largest difference of a product from a plain one, over the largest value: bfloat16 has 8 bits, and sums run in another order."""


class PackedLinear:
    """One product in the place of several linear layers with the same input; `refresh` after their weights have changed."""

    def __init__(self, *linears: nn.Linear) -> None:
        self._linears = linears
        self.refresh()

    def refresh(self) -> None:
        """Lays the present weights out."""
        with torch.inference_mode():
            weights = [linear.weight.detach() for linear in self._linears]
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weights[0] if len(weights) == 1 else torch.cat(weights), ROWS)
            has_bias = any(linear.bias is not None for linear in self._linears)
            self._bias = torch.cat([_bias(linear) for linear in self._linears]) if has_bias else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the layers, one after another on the last axis."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result


def _bias(linear: nn.Linear) -> torch.Tensor:
    bias: torch.Tensor | None = linear.bias
    return linear.weight.new_zeros(linear.out_features) if bias is None else bias.detach()


def packs(model: Any) -> bool:
    """Returns whether the model's products gain from another layout of their weights, and this torch can make it."""
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        return False
    problem = _problem()
    if problem:
        _log.warning("engine: weights are not laid out for the matrix kernels, so products are slower: %s", problem)
    return not problem


def take_over(linears: Iterable[nn.Module]) -> list[PackedLinear]:
    """Returns what has taken over the products of these linear layers, one for each; others are left as they are."""
    taken = []
    for linear in linears:
        if type(linear) is nn.Linear:
            packed = PackedLinear(linear)
            linear.forward = packed  # type: ignore[assignment]
            taken.append(packed)
    return taken


@functools.cache
def _problem() -> str | None:
    """Why the private operators that this rests on cannot be used, found by a small product; None where they can."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        return _tried(generator)


def _tried(generator: torch.Generator) -> str | None:
    weight, rows = (torch.randn(size, 64, generator=generator).bfloat16() for size in (96, 20))
    bias = torch.randn(96, generator=generator).bfloat16()
    plain = functional.linear(rows, weight, bias).float()
    try:
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        ours = torch.ops.mkldnn._linear_pointwise(rows[None], laid_out, bias, "none", [], "")[0].float()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return str(error).splitlines()[0]
    gap = float((ours - plain).abs().max() / plain.abs().max())
    return None if gap <= _TOLERANCE else f"a product differs from a plain one by {gap:.3g} of its largest value"
