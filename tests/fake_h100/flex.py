"""Compiles FlexAttention over packed trees for an H100 that is not there, and prints in JSON what
the programs need: `python -m tests.fake_h100.flex DTYPE HEADS,KV,WIDTH WINDOW LENGTHS`."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tests.fake_h100 import card
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from treegraft.policy.learn.dense import AttentionShape, probe_tree
from treegraft.policy.learn.flex import (
    BLOCK,
    compiled_flex,
    flex_attend,
    padding_nodes,
    tree_block_mask,
)


def main(dtype: str, heads: str, window: str, lengths: str) -> None:
    """Compiles for all lengths, with gradients and without."""
    card.pretend()
    shape = AttentionShape(*map(int, heads.split(",")), window=int(window) or None)
    kind, mode = getattr(torch, dtype), FakeTensorMode(allow_non_fake_inputs=True)
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda array: mode.from_tensor(from_numpy(array))  # type: ignore[assignment]
    flex, graphs = compiled_flex(), []
    for length in map(int, lengths.split(",")):
        nodes = [*probe_tree(length).nodes, *padding_nodes(length, -length % BLOCK)]
        with mode:
            mask = tree_block_mask(nodes, shape.window, "cuda:0")

            def drawn(count: int, size: int = nodes[-1].end) -> torch.Tensor:
                made = torch.empty(count, size, shape.width, dtype=kind, device="cuda:0")
                return made.requires_grad_()

            inputs = drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads)
            output = flex_attend(flex, *inputs, mask, shape.options)
            torch.autograd.grad(output, inputs, torch.empty_like(output))
            with torch.no_grad():
                flex_attend(flex, *inputs, mask, shape.options)
        graphs.append(counters["stats"]["unique_graphs"])
    found: dict[str, Any] = {"programs": card.compiled, "graphs": graphs}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
