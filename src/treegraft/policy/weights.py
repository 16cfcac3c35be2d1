"""Weights by name: merged adapters, a checksum, and the way to an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Words of a tensor that are summed at once: 8 MB as 64-bit integers."""
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so multiplication by it is a bijection modulo 2^64."""
_MODULUS = 1 << 64


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Returns a checksum of names, types, shapes and bits, computed where the tensors lie.

    For each tensor h = Σ_i (2 i + 1) · word_i modulo 2^64, chunk by chunk, the chunks chained by
    h ← h · c + sum; then a hash of all names and sums. Integer sums do not depend on the order of
    addition, so every device and thread count gives the same value.
    """
    digest = hashlib.blake2b(digest_size=16)
    # Sorted: engine and learner may list the same weights in another order.
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(_checksum(tensor).to_bytes(8, "little"))
    return digest.hexdigest()


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # 32-bit words halve the work for 16-bit weights; the rest, at most three bytes, goes singly.
    whole = data.numel() // 4 * 4
    # A view needs an aligned start, which a slice of another tensor may not have.
    head = data[:whole] if data.data_ptr() % 4 == 0 else data[:whole].clone()
    checksum = 0
    # In chunks, since each word is widened to 64 bits: at once, a weight would take four times its
    # size again.
    for words in (*head.view(torch.int32).split(CHUNK), data[whole:]):
        odd = 2 * torch.arange(words.numel(), dtype=torch.int64, device=words.device) + 1
        total = int((words.to(torch.int64) * odd).sum())
        checksum = (checksum * _FACTOR + total) % _MODULUS
    return checksum


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
    they adapt.

    W' = W + scale · B A, formed anew each time: merging in place and undoing it would drift by
    rounding.
    """
    if not hasattr(model, "get_base_model"):
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}
    from peft.tuners.lora import LoraLayer

    inner = model.get_base_model()
    deltas = {
        name: cast(Any, module).get_delta_weight("default")
        for name, module in inner.named_modules()
        if isinstance(module, LoraLayer)
    }
    merged = {}
    for name, tensor in inner.state_dict().items():
        if ".lora_" in name:
            continue
        owner = name.removesuffix(".base_layer.weight")
        is_adapted = owner != name and owner in deltas
        # peft keeps the adapters of bfloat16 models in float32.
        value = (tensor + deltas[owner]).to(tensor.dtype) if is_adapted else tensor
        merged[name.replace(".base_layer.", ".")] = value.detach()
    return merged
