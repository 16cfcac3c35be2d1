"""Top-k, top-p, min-p and the repetition penalty: by hand, as transformers has them, and in the
native engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
import torch
from tests.policy.test_engine import ids_of, make_engine
from tests.support.families import build_model

from treegraft.assemble import eval_limits, training_limits
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, Filters, Sampling
from treegraft.policy.engine.filters import EXCLUDED, filtered
from treegraft.policy.engine.sampling import sample_tokens
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

# .4, .3, .2, .1
LOGITS = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()


def kept(filters: Filters, logits: torch.Tensor = LOGITS, temperature: float = 1.0) -> list[int]:
    left = filtered(logits, temperature, filters, [])
    return [token for token, score in enumerate(left.tolist()) if score > EXCLUDED]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), [0, 1, 2, 3]),
        (Filters(top_k=3), [0, 1, 3]),
        (Filters(top_k=9), [0, 1, 2, 3]),
        (Filters(top_p=0.45), [1, 3]),
        (Filters(top_p=1e-9), [1]),
        # of .4, .3 left by top-k, .4 / .7 = .57 alone reach .55; of all four they do not
        (Filters(top_k=2, top_p=0.55), [1]),
        (Filters(top_p=0.55), [1, 3]),
    ],
)
def test_what_is_kept_by_hand(filters: Filters, expected: list[int]) -> None:
    assert kept(filters) == expected


def test_the_temperature_comes_before_the_limits() -> None:
    # Squared, .16 .09 .04 .01 of .30: the first has .53, above .45.
    assert kept(Filters(top_p=0.45), temperature=0.5) == [1]


def test_the_penalty_divides_positive_logits_of_the_path_and_multiplies_negative_ones() -> None:
    left = filtered(torch.tensor([3.0, -1.0, 2.0]), 0.0, Filters(repetition_penalty=2.0), [0, 1, 0])
    assert left.tolist() == [1.5, -2.0, 2.0]  # once, however often a token stands there


@pytest.mark.parametrize("size", [50, 50_000])
def test_a_drawn_token_that_is_kept_stays_the_one_drawn_from_a_small_vocabulary(size: int) -> None:
    """The noise is that of the key, so leaving out others does not move the maximum."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(200, size, generator=generator)
    filters = Filters(top_k=size // 5)
    same = 0
    for number, row in enumerate(logits):
        [whole] = sample_tokens(row[None], [1.0], [(number,)], [0])[0].tolist()
        left = filtered(row, 1.0, filters, [])
        [token], [logprob], [entropy] = (
            c.tolist() for c in sample_tokens(left[None], [1.0], [(number,)], [0])
        )
        assert left[token] > EXCLUDED and math.isfinite(logprob) and math.isfinite(entropy)
        same += token == whole
        assert size > 4096 or token == whole or left[whole] == EXCLUDED
        assert sample_tokens(left[None], [1.0], [(number,)], [0])[0].tolist() == [token]
    assert same > 100


def test_an_engine_draws_from_what_is_left_and_scores_that() -> None:
    model = build_model("llama")
    prefix = ids_of(40, 1)
    filters = Filters(top_k=5, top_p=0.9, repetition_penalty=1.3)
    sampling = Sampling(max_new_tokens=12, temperature=0.7, filters=filters)

    async def work(company: Sequence[Sampling]) -> Completion:
        engine = make_engine("llama")
        try:
            found = await asyncio.gather(
                *(
                    engine.complete(Request(prefix, one, noise_key=(number,)))
                    for number, one in enumerate((sampling, *company))
                )
            )
            return found[0]
        finally:
            await engine.close()

    completion = asyncio.run(work([]))
    path = list(prefix)
    for token, logprob, entropy in zip(
        completion.token_ids, completion.sampling_logprobs, completion.entropies, strict=True
    ):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
        row = filtered(logits, 0.7, filters, path).log_softmax(dim=0)
        assert int((row > -100).sum()) <= 5
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entropy == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-4)
        path.append(token)
    # Plain rows beside it change nothing, nor does it change theirs.
    plain = Sampling(max_new_tokens=12)
    assert asyncio.run(work([plain, plain])) == completion


# --- settings -------------------------------------------------------------------------------------


def test_evaluation_filters_and_training_never_does() -> None:
    table = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    config = load_config({"eval": table})
    sampled = eval_limits(config, temperature=0.6, num_leaves=4)
    assert sampled.filters == Filters(top_p=0.95, top_k=20, repetition_penalty=1.1)
    greedy = eval_limits(config, temperature=0.0, num_leaves=1)
    assert greedy.filters == Filters(repetition_penalty=1.1)
    assert training_limits(config).filters == Filters()
    assert eval_limits(Config(), temperature=1.0, num_leaves=1).filters == Filters()


def test_an_evaluation_may_have_a_budget_of_its_own() -> None:
    config = load_config(
        {
            "rollout": {"max_tool_calls": 6, "max_completion_tokens": 90},
            "eval": {"max_completion_tokens": 40, "max_tool_calls": 0},
        }
    )
    limits = eval_limits(config, temperature=0.0, num_leaves=1)
    assert (limits.max_tool_calls, limits.max_completion_tokens) == (0, 40)
    assert training_limits(config).max_completion_tokens == 90
