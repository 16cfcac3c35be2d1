"""Compiles FlexAttention over packed trees for a card that is not there, and prints in JSON what
the programs need, a line for each case:

    python -m tests.support.fake_h100.flex CAPABILITY LENGTHS CASE...

A case is DTYPE:HEADS,KV,WIDTH:WINDOW, such as bfloat16:28,4,128:0.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tests.support.fake_h100 import card
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from treegraft.policy.learn.dense import AttentionShape, probe_tree
from treegraft.policy.learn.flex import (
    BLOCK,
    Flex,
    compiled_flex,
    flex_attend,
    padding_nodes,
    tree_block_mask,
)


def main(capability: str, lengths: str, *cases: str) -> None:
    """Compiles each case for all lengths, with gradients and without."""
    card.pretend(int(capability))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda array: mode.from_tensor(from_numpy(array))  # type: ignore[assignment]
    for case in cases:
        dtype, heads, window = case.split(":")
        shape = AttentionShape(*map(int, heads.split(",")), window=int(window) or None)
        # As in a process of its own, where nothing else has been compiled.
        torch._dynamo.reset()
        counters.clear()
        card.compiled.clear()
        flex = compiled_flex()
        graphs = []
        for length in map(int, lengths.split(",")):
            _compile(flex, shape, getattr(torch, dtype), length, mode)
            graphs.append(counters["stats"]["unique_graphs"])
        found: dict[str, Any] = {"case": case, "programs": card.compiled, "graphs": graphs}
        print(json.dumps(found), flush=True)


def _compile(
    flex: Flex, shape: AttentionShape, kind: torch.dtype, length: int, mode: FakeTensorMode
) -> None:
    nodes = [*probe_tree(length).nodes, *padding_nodes(length, -length % BLOCK)]
    with mode:
        mask = tree_block_mask(nodes, shape.window, "cuda:0")

        def drawn(count: int) -> torch.Tensor:
            made = torch.empty(count, nodes[-1].end, shape.width, dtype=kind, device="cuda:0")
            return made.requires_grad_()

        inputs = drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads)
        output = flex_attend(flex, *inputs, mask, shape.options)
        torch.autograd.grad(output, inputs, torch.empty_like(output))
        with torch.no_grad():
            flex_attend(flex, *inputs, mask, shape.options)


if __name__ == "__main__":
    main(*sys.argv[1:])
