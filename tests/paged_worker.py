"""Runs the paged kernels in Triton's interpreter, which has to be chosen before Triton is imported,
and writes what they computed to a file.

    TRITON_INTERPRET=1 python -m tests.paged_worker FILE
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.test_engine import ids_of, make_engine, run

from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, Sampling
from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.engine import gathered
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.kernels.paged import attend_blocks

Numbers = list[list[float]]


def blocks_of(lengths: Sequence[int], num_shared: int) -> torch.Tensor:
    """Blocks of their own for each path, the first `num_shared` those of the first one."""
    most = max(-(-length // 64) for length in lengths)
    used = torch.arange(len(lengths) * most).view(len(lengths), most)
    used[:, :num_shared] = used[0, :num_shared]
    return used


def slow_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: AttentionOptions
) -> torch.Tensor:
    """[heads, width] in float64, one head after another; keys and values [kv heads, n, width]."""
    group, rows = len(query) // len(keys), []
    for head, own in enumerate(query.double()):
        scores = keys[head // group].double() @ own * rules.scaling
        if rules.softcap is not None:
            scores = rules.softcap * (scores / rules.softcap).tanh()
        if rules.window is not None:
            scores[: -rules.window] = float("-inf")
        if rules.sinks is not None:
            scores = torch.cat((scores, rules.sinks[head].double()[None]))
        weights = scores.softmax(dim=0)[: keys.shape[1]]
        rows.append(weights @ values[head // group].double())
    return torch.stack(rows)


def compare(
    width: int,
    heads: tuple[int, int],
    lengths: Sequence[int],
    num_shared: int = 0,
    dtype: torch.dtype = torch.float32,
    **rules: Any,
) -> dict[str, float]:
    """Distance from the slow loop, and how many rows change a bit where they are alone."""
    generator = torch.Generator().manual_seed(width)
    kv_heads, group = heads
    used = blocks_of(lengths, num_shared)
    padded = -(-width // 16) * 16
    keys = torch.randn(used.numel(), kv_heads, width, 64, generator=generator).to(dtype)
    values = torch.zeros(used.numel(), kv_heads, 64, padded, dtype=dtype)
    values[..., :width] = torch.randn(used.numel(), kv_heads, 64, width, generator=generator)
    query = torch.randn(len(lengths), kv_heads * group, width, generator=generator).to(dtype)
    positions = torch.tensor(lengths) - 1
    sinks = torch.randn(kv_heads * group, generator=generator) if rules.pop("sinks", 0) else None
    options = AttentionOptions(
        width**-0.5, rules.pop("window", None), rules.pop("softcap", None), sinks
    )
    stacked = query.transpose(0, 1)
    found = attend_blocks(stacked, keys, values, used, positions, options)
    gap, num_changed = 0.0, 0
    for row, length in enumerate(lengths):
        path = keys[used[row]].permute(1, 0, 3, 2).reshape(kv_heads, -1, width)[:, :length]
        seen = values[used[row]].permute(1, 0, 2, 3).reshape(kv_heads, -1, padded)
        exact = slow_attention(query[row], path, seen[:, :length, :width], options)
        gap = max(gap, float((found[row] - exact).abs().max()))
        one = slice(row, row + 1)
        # Other strides, other numbers of blocks: as in another batch.
        table = used[one, : -(-length // 64)].contiguous()
        alone = attend_blocks(
            query[one].transpose(0, 1), keys, values, table, positions[one], options
        )
        num_changed += not torch.equal(alone[0], found[row])
    return {"gap": gap, "num_changed": num_changed}


def completions(num: int, prompt: int) -> list[list[int]]:
    """Tokens of `num` branches of one prompt, made together."""
    sampling = Sampling(max_new_tokens=6, temperature=1.0)

    async def work(engine: NativeEngine) -> list[Completion]:
        own = [ids_of(prompt, 1) + ids_of(1 + n % 3, 10 + n) for n in range(num)]
        return await asyncio.gather(
            *(
                engine.complete(Request(own[n], sampling, noise_key=("paged", n)))
                for n in range(num)
            )
        )

    return [list(one.token_ids) for one in run(make_engine(compile_kernels=False), work)]


def main() -> None:
    cases: dict[str, Any] = {
        "lengths": compare(64, (2, 3), (1, 64, 65, 700, 1100, 513, 512)),
        "shared": compare(80, (1, 4), (1300, 1300, 1290, 1300, 1300, 600), num_shared=9),
        "half": compare(64, (2, 7), (900, 30, 901, 1000, 1030), 8, torch.float16),
        "window": compare(16, (2, 2), (900, 901, 1000, 1030, 30), window=100),
        "softcap": compare(16, (2, 2), (300, 700, 70), softcap=1.5),
        "sinks": compare(16, (1, 2), (600, 70, 1), sinks=True),
        "everything": compare(
            32, (2, 1), (900, 901, 1000, 1030, 30), 8, window=600, softcap=2.0, sinks=True
        ),
    }
    plain = completions(7, 70)
    with_triton, asked = gathered.has_triton, [0]

    def counted(device: torch.device) -> bool:
        asked[0] += 1
        return True

    gathered.has_triton = counted
    cases["engine"] = {
        "plain": plain,
        "paged": completions(7, 70),
        "alone": completions(1, 70),
        "proofs": list(gathered._proofs.values()),
        "num_asked": asked[0],
        "makes_copies": gathered.makes_copies(torch.device("cpu")),
    }
    gathered.has_triton = with_triton
    Path(sys.argv[1]).write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
