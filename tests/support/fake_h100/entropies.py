"""Compiles the kernel of the extension `entropies` for a card that is not there, and prints in JSON
what it needs, a line for each case:

    python -m tests.support.fake_h100.entropies CAPABILITY LENGTHS CASE...

A case is DTYPE:VOCABULARY, such as bfloat16:151936; the lengths are not used.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import torch
import triton
import triton.language
from tests.support.fake_h100 import card


def main(capability: str, _: str, *cases: str) -> None:
    """Compiles each case as a launch would."""
    card.pretend(int(capability))
    kernel = _kernel()
    for case in cases:
        dtype, size = case.split(":")
        logits = torch.empty(2, int(size), dtype=getattr(torch, dtype), device="meta")
        # A column of two, which is aligned to 4 bytes alone.
        column = torch.empty(4, device="meta")[1:]
        arguments = (column, 2, logits, logits.stride(0), logits.shape[1])
        binary = kernel.entropy_kernel.warmup(*arguments, BLOCK=kernel.BLOCK, grid=(2,))
        found = {"name": "entropy_kernel"} | card.needs([binary])
        print(json.dumps({"case": case, "programs": [found]}), flush=True)


def _kernel() -> Any:
    """The module, with what it takes from vLLM, which is not installed here, in its place."""
    scores = types.SimpleNamespace(compute_topk_scores=None)
    utils = types.SimpleNamespace(tl=triton.language, triton=triton)
    gpu = "vllm.v1.worker.gpu"
    sys.modules |= {  # type: ignore[misc]
        "vllm.triton_utils": utils,
        f"{gpu}.sample": types.SimpleNamespace(sampler=scores),
        f"{gpu}.spec_decode": types.SimpleNamespace(rejection_sampler=scores),
    }
    from treegraft.extras.entropies import kernel

    return kernel


if __name__ == "__main__":
    main(*sys.argv[1:])
