"""Weights by name, and their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def weights_fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Returns a checksum of names, dtypes and bits; equal for equal weights alone."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
