"""What reading a server's reply costs this process, in microseconds a sampled token:

    python -m benchmarks.replies

Replies of 500 tokens with stop texts: in JSON as vLLM writes them, by the plugin's two entries or
the 20 most likely tokens, and in columns as Treegraft's route does. The best of 15, CPU time.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from treegraft.core.interfaces import Request
from treegraft.core.types import EntropyKind, Sampling
from treegraft.policy.engine.served import Draft, StopFinder
from treegraft.policy.engine.vllm.protocol import packed, unpacked

TOKENS, ROUNDS = 500, 15
SAMPLING = Sampling(max_new_tokens=TOKENS, stop=("</search>", "</python>"), final=("</answer>",))


class Letters:
    """A tokenizer of 1,000 pieces, a hundredth of which ends as a tag does."""

    def __len__(self) -> int:
        return 1000

    def decode(self, ids: list[int]) -> str:
        return "".join(">" if one % 100 == 0 else "ab"[one % 2] for one in ids)


def replies() -> dict[str, Mapping[str, Any]]:
    """Returns a reply of each kind."""
    draw = random.Random(0)
    ids = [draw.randrange(3, 1000) for _ in range(TOKENS)]

    def content(count: int) -> list[dict[str, Any]]:
        rows = []
        for token in ids:
            values = sorted((-3 * draw.random() for _ in range(count)), reverse=True)
            top = [{"token_id": n, "logprob": one} for n, one in enumerate(values)]
            rows.append({"token_id": token, "logprob": values[0], "top_logprobs": top})
        return rows

    column = np.random.default_rng(0).random(TOKENS)
    return {
        "JSON, 2 entries": {"token_ids": ids, "logprobs": {"content": content(2)}},
        "JSON, 20 entries": {"token_ids": ids, "logprobs": {"content": content(20)}},
        "columns": packed(ids, -column, column),
    }


def main() -> None:
    """Prints a table."""
    stops = StopFinder(Letters())  # type: ignore[arg-type]
    request = Request((1,), SAMPLING, noise_key=(0, "train", 1, "t", "0"))
    print("| reply | bytes | JSON | columns | take | in all |\n|---|---:|---:|---:|---:|---:|")
    for name, choice in replies().items():
        body, best = json.dumps(choice, separators=(",", ":")).encode(), [math.inf] * 3
        for _ in range(ROUNDS):
            draft = Draft(stops, frozenset({2}), request, TOKENS, EntropyKind.EXACT)
            times = [time.process_time()]
            read = json.loads(body)
            times.append(time.process_time())
            columns = unpacked(read)
            times.append(time.process_time())
            draft.take(columns)
            times.append(time.process_time())
            parts = [end - start for start, end in itertools.pairwise(times)]
            best = [min(pair) for pair in zip(best, parts, strict=True)]
        assert len(draft.ids) == TOKENS
        shown = " | ".join(f"{1e6 * one / TOKENS:.2f}" for one in (*best, sum(best)))
        print(f"| {name} | {len(body) / TOKENS:.0f} | {shown} |")


if __name__ == "__main__":
    main()
