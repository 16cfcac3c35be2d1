"""Weights by name: merged adapters, a checksum, and the way to an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from treegraft.policy.output_head import base_model

CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 24
"""Words of a tensor that are summed at once: on a CPU as many as its cache holds as 64-bit
integers, on a GPU so many that starting a kernel costs nothing beside it."""
_MODULUS = 1 << 64


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Returns a checksum of names, types, shapes and bits, computed where the tensors lie."""
    # All sums first: the host would wait for a GPU at each.
    sums = {name: bit_sum(tensor) for name, tensor in weights.items()}
    facts = {}
    for name, tensor in weights.items():
        facts[name] = (str(tensor.dtype), tuple(tensor.shape), int(sums[name]))
    return fingerprint_of(facts)


def fingerprint_of(sums: Mapping[str, tuple[str, tuple[int, ...], int]]) -> str:
    """Returns the checksum of tensors by name, of which each one's type, shape and `bit_sum` are
    known."""
    digest = hashlib.blake2b(digest_size=16)
    # Sorted: engine and learner may list the same weights in another order.
    for name in sorted(sums):
        dtype, shape, total = sums[name]
        digest.update(f"{name} {dtype} {shape} ".encode())
        digest.update((total % _MODULUS).to_bytes(8, "little"))
    return digest.hexdigest()


@torch.no_grad()
def bit_sum(tensor: Tensor, first: int = 0) -> Tensor:
    """Returns Σ_i (2 i + 1) · bits_i modulo 2^64 over a tensor's elements, as an int64 scalar where
    the tensor lies.

    Integer sums do not depend on the order of addition, so every device and thread count gives the
    same value, and the sums of a tensor's parts add up to its own.

    Args:
        first: the number i of the first element, where the tensor is a part of another.
    """
    data = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # In chunks, since each word is widened to 64 bits: at once, a weight would take four times its
    # size again.
    for words in data.split(CHUNK if data.device.type == "cpu" else DEVICE_CHUNK):
        count = words.numel()
        odd = torch.arange(
            2 * first + 1, 2 * (first + count) + 1, 2, dtype=torch.int64, device=words.device
        )
        total += (odd * words).sum()
        first += count
    return total


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ModelWeights:
    """The state dict of a plain model as a `WeightSource`."""

    tensors: Mapping[str, Tensor]

    @property
    def names(self) -> Sequence[str]:
        return list(self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


def plain_weights(model: Any) -> dict[str, Tensor]:
    """Returns a state dict with the names of the plain model, LoRA's products added to the weights
    they adapt."""
    return dict(named_weights(model))


def named_weights(
    model: Any, gather: Callable[[Any], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields what `plain_weights` holds, each tensor made when its turn comes.

    W' = W + scale · B A, formed anew each time: merging in place and undoing it would drift by
    rounding.

    Args:
        gather: makes a weight whole that is divided among processes; those without adapters are
            yielded as they are.
    """
    adapted = adapted_modules(model)
    for name, tensor in base_model(model).state_dict().items():
        if ".lora_" in name:
            continue
        value = tensor
        if name in adapted:
            module = adapted[name]
            if gather is None:
                delta = module.get_delta_weight("default")
            else:
                # Products of parts are no part of the product.
                value = gather(tensor)
                b, a = (gather(part["default"].weight) for part in (module.lora_B, module.lora_A))
                delta = _product(b, a, module)
            # peft keeps the adapters of bfloat16 models in float32.
            value = (value + delta).to(tensor.dtype)
        yield name.replace(".base_layer.", "."), value.detach()


def weight_names(model: Any) -> list[str]:
    """Returns the names of what `plain_weights` holds."""
    names = base_model(model).state_dict()
    return [name.replace(".base_layer.", ".") for name in names if ".lora_" not in name]


def adapted_modules(model: Any) -> dict[str, Any]:
    """Returns the modules with adapters, by the names of the weights that they adapt."""
    if base_model(model) is model:
        return {}
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.base_layer.weight": cast(Any, module)
        for name, module in base_model(model).named_modules()
        if isinstance(module, LoraLayer)
    }


def _product(b: Tensor, a: Tensor, module: Any) -> Tensor:
    """scale · B A, as peft forms it for a linear layer."""
    product = b @ a
    scaled: Tensor = (product.T if module.fan_in_fan_out else product) * module.scaling["default"]
    return scaled
