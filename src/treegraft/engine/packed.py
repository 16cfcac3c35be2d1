"""Linear layers of a bfloat16 model on a CPU, with a second copy of their weights laid out for the matrix kernels.

A plain product lays its weights out anew at every call, which at 16 rows takes longer than the product itself.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_log = logging.getLogger(__name__)

ROWS = 64
"""Rows that the layout is made for; products of 16 to 512 rows gain from it too."""
_TOLERANCE = 0.05
"""Largest difference of a product from a plain one, over the largest value: bfloat16 has 8 bits, and sums run in another order."""


class PackedLinears:
    """Takes over the products of a model's linear layers; `refresh` after its weights have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if type(module) is nn.Linear]
        self._weights: list[Any] = []
        self.refresh()
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._product, index)  # type: ignore[method-assign]

    def refresh(self) -> None:
        """Lays the present weights out."""
        self._weights = [_laid_out(layer.weight) for layer in self._layers]

    def _product(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weights[index], self._layers[index].bias, "none", [], ""
        )
        return result


def pack_linears(model: Any) -> PackedLinears | None:
    """Returns what has taken over the model's linear layers; None where nothing is gained or this torch cannot do it."""
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        return None
    if (problem := _problem()) is not None:
        _log.warning("engine: weights are not laid out for the matrix kernels, so products are slower: %s", problem)
        return None
    return PackedLinears(model)


def _laid_out(weight: torch.Tensor) -> Any:
    with torch.inference_mode():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


@torch.inference_mode()
def _problem() -> str | None:
    """Why the private operators that this rests on cannot be used, found by a small product; None where they can."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(size, 64, generator=generator).bfloat16() for size in (96, 20))
    bias = torch.randn(96, generator=generator).bfloat16()
    plain = functional.linear(rows, weight, bias).float()
    try:
        ours = torch.ops.mkldnn._linear_pointwise(rows[None], _laid_out(weight), bias, "none", [], "")[0].float()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return str(error).splitlines()[0]
    gap = float((ours - plain).abs().max() / plain.abs().max())
    return None if gap <= _TOLERANCE else f"a product differs from a plain one by {gap:.3g} of its largest value"
