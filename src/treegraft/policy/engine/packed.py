"""Linear layers on a CPU with a second copy of their weights, laid out for our products.

In bfloat16 a plain product lays its weights out anew at every call, which at 16 rows takes longer
than the product itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from treegraft.policy.kernels.engine import Kernels


class Product(Protocol):
    """Linear layers with the same input; their outputs follow each other on the last axis."""

    def __call__(self, rows: Tensor) -> Tensor: ...

    def refresh(self) -> None:
        """Takes over weights that have changed."""


class SeparateLinears:
    """The products one by one, with the model's own weights."""

    def __init__(self, *linears: nn.Linear) -> None:
        self._linears = linears

    def __call__(self, rows: Tensor) -> Tensor:
        outputs = [linear(rows) for linear in self._linears]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def refresh(self) -> None:
        """The weights are the model's own."""


class LaidOutLinears:
    """One product of our kernels in the place of several."""

    def __init__(self, kernels: Kernels, *linears: nn.Linear) -> None:
        self._kernels = kernels
        self._linears = linears
        self._outputs = sum(linear.out_features for linear in linears)
        self.refresh()

    def refresh(self) -> None:
        with torch.inference_mode():
            self._weight = self._kernels.lay_out(_weights(self._linears))
            self._bias = _biases(self._linears)

    def __call__(self, rows: Tensor) -> Tensor:
        # The kernels read a matrix of rows, whatever axes come before the last one.
        flat = rows.reshape(-1, rows.shape[-1])
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        return self._kernels.product(flat, self._weight, self._bias, self._outputs).view(
            *rows.shape[:-1], self._outputs
        )


def _weights(linears: Sequence[nn.Linear]) -> Tensor:
    weights = [linear.weight.detach() for linear in linears]
    # A single one is copied by the new layout anyway.
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _biases(linears: Sequence[Any]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    # Query, key and value are one product here, though some models bias only some of them.
    biases = []
    for linear in linears:
        none = linear.weight.new_zeros(linear.out_features)
        biases.append((none if linear.bias is None else linear.bias).detach())
    return torch.cat(biases)


def product_kind(model: nn.Module, kernels: Kernels | None) -> Callable[..., Product]:
    """Returns the function that lays a linear layer's weights out for our products;
    `SeparateLinears` if these do not fit."""
    if kernels is not None and kernels.product_step and _fits(model, kernels.product_step):
        return functools.partial(LaidOutLinears, kernels)
    return SeparateLinears


def _fits(model: nn.Module, step: int) -> bool:
    for module in model.modules():
        if type(module) is nn.Linear and module.in_features % step:
            return False
    return True


def take_over(linears: Iterable[nn.Module], kind: Callable[..., Product]) -> list[Product]:
    """Returns the layers that replace these linear layers' products, one for each; others are
    left as they are."""
    taken: list[Product] = []
    for linear in linears:
        # Not isinstance: a subclass (quantized, LoRA) computes something else in its forward.
        if type(linear) is nn.Linear and kind is not SeparateLinears:
            product = kind(linear)
            # On the object, so that hooks and names of the model stay as they are.
            linear.forward = product  # type: ignore[assignment]
            taken.append(product)
    return taken
