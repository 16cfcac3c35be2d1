"""An engine over somebody's server of tokens: what it asks, what it makes of replies, whose weights
it samples with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.families import build_model, word_tokenizer
from tests.support.tiny import tiny

from treegraft import Session, SettingError
from treegraft.core.types import Filters
from treegraft.parts import Completion, Sampling, errors, interfaces, served

MODEL = build_model("llama", 0)
PREFIX = (1, 5, 9, 4)
LONG = Sampling(max_new_tokens=12)


class Local:
    """A server of tokens: each reply by the model, the temperature and the seed."""

    def __init__(self, model: Any, *, num_top: int | None = None) -> None:
        self.model = model
        self.num_top = num_top
        self.asked: list[served.TokenRequest] = []
        self.most_at_once = self.num_running = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: served.TokenRequest) -> served.TokenReply:
        self.asked.append(request)
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        await self.gate.wait()
        await asyncio.sleep(0)
        self.num_running -= 1
        generator = torch.Generator().manual_seed(request.seed)
        ids = list[int]()
        logprobs = list[float]()
        entropies = list[float]()
        while len(ids) < request.max_tokens and (not ids or ids[-1] not in request.stop_token_ids):
            with torch.inference_mode():
                logits = self.model(torch.tensor([[*request.token_ids, *ids]])).logits[0, -1]
            row = (logits / request.temperature).log_softmax(dim=0)
            ids.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            logprobs.append(float(row[ids[-1]]))
            top = row.topk(self.num_top).values.tolist() if self.num_top else []
            entropies.append(served.top_k_entropy(top))
        return served.TokenReply(ids, logprobs, entropies if self.num_top else None)


def engine_over(server: Any, **options: Any) -> served.ServerEngine:
    tokenizer = word_tokenizer()
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return served.ServerEngine(server, tokenizer, end_ids=ends, **options)


def request(number: int, sampling: Sampling = LONG, **options: Any) -> interfaces.Request:
    key = (0, "train", 1, f"t{number}", "0")
    return interfaces.Request(PREFIX, sampling, noise_key=key, **options)


def complete(engine: Any, numbers: Sequence[int], sampling: Sampling = LONG) -> list[Completion]:
    async def main() -> list[Completion]:
        return await asyncio.gather(*(engine.complete(request(n, sampling)) for n in numbers))

    return asyncio.run(main())


def test_the_entropy_of_the_likely_tokens_by_hand() -> None:
    """Of 20 log-probabilities the least is left out: it may be that of an unlikely drawn token."""
    likely = [math.log(0.05)] * 19
    partial = -19 * 0.05 * math.log(0.05)
    assert served.top_k_entropy([math.log(0.001), *likely]) == pytest.approx(partial)
    assert served.top_k_entropy([math.log(0.5)]) == pytest.approx(0.5 * math.log(2))


def test_log_probabilities_are_those_of_the_model_and_keys_decide() -> None:
    found = complete(engine_over(Local(MODEL)), range(6))
    assert [one.token_ids for one in complete(engine_over(Local(MODEL)), range(6))] == [
        one.token_ids for one in found
    ]
    assert len({one.token_ids for one in found}) > 3
    for one in found:
        logits = MODEL(torch.tensor([[*PREFIX, *one.token_ids]])).logits[0, len(PREFIX) - 1 : -1]
        own = logits.log_softmax(dim=-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(one.sampling_logprobs), own, atol=1e-5)
        # -ln p of the drawn token estimates the entropy, and says that it does.
        assert one.entropy_kind is served.EntropyKind.SAMPLED
        assert one.entropies == tuple(-one for one in one.sampling_logprobs)
    (other,) = complete(engine_over(Local(MODEL, num_top=20)), [0])
    assert other.token_ids == found[0].token_ids
    assert other.entropy_kind is served.EntropyKind.TOP_K and min(other.entropies) > 0


def test_a_probe_is_asked_for_by_itself() -> None:
    seen: list[Sequence[float]] = []

    async def main() -> Completion:
        return await engine.complete(request(0, probe_tokens=3, on_probe=seen.append))

    engine = engine_over(server := Local(MODEL, num_top=20))
    found = asyncio.run(main())
    assert [one.max_tokens for one in server.asked] == [3, 9]
    assert list(server.asked[1].token_ids) == [*PREFIX, *found.token_ids[:3]]
    assert seen == [found.entropies[:3]]
    assert server.asked[0].tree == (0, "train", 1, "t0") == server.asked[1].tree
    assert server.asked[0].seed != server.asked[1].seed


def test_a_server_is_asked_no_more_than_its_capacity() -> None:
    server = Local(MODEL)
    assert len(complete(engine_over(server, capacity=2), range(5))) == 5
    assert server.most_at_once == 2


def test_a_publish_sets_the_version_between_completions() -> None:
    async def main() -> tuple[Completion, Completion]:
        server.gate.clear()
        before = asyncio.create_task(engine.complete(request(0)))
        await asyncio.sleep(0.01)
        publishing = asyncio.create_task(engine.publish(None, 3))
        after = asyncio.create_task(engine.complete(request(1)))
        await asyncio.sleep(0.01)
        assert len(server.asked) == 1 and not publishing.done()
        server.gate.set()
        return await before, await after

    engine = engine_over(server := Local(MODEL))
    assert [one.policy_version for one in asyncio.run(main())] == [0, 3]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"prefix": ()}, "the prefix is empty"),
        ({"max_context": 4}, "the path has 4 tokens, the model reads at most 4"),
        ({"filters": Filters(top_k=5)}, "does not hold; expected none"),
        ({"reply": served.TokenReply([], [])}, "replied without a token"),
        ({"server": None}, "no server is set"),
    ],
)
def test_what_cannot_be_asked_is_an_error(case: dict[str, Any], said: str) -> None:
    class Fixed:
        async def generate(self, request: Any) -> served.TokenReply:
            reply: served.TokenReply = case["reply"]
            return reply

    server = Fixed() if "reply" in case else case.get("server", Local(MODEL))
    engine = engine_over(server, max_context=case.get("max_context"))
    sampling = Sampling(max_new_tokens=4, filters=case.get("filters", Filters()))
    asked = interfaces.Request(case.get("prefix", PREFIX), sampling, noise_key=(0, "t"))
    with pytest.raises(errors.EngineError, match=said):
        asyncio.run(engine.complete(asked))


def test_a_server_that_hangs_meets_the_deadline() -> None:
    async def main() -> None:
        server.gate.clear()
        await engine.complete(request(0))

    engine = engine_over(server := Local(MODEL), deadline_s=0.05)
    with pytest.raises(errors.DeadlineExceeded, match=r"engine\.deadline_s = 0\.05 s"):
        asyncio.run(main())


def test_a_session_takes_the_engine_and_the_version_of_weights_that_somebody_moved() -> None:
    recipe = tiny(warmup={"num_steps": 0}, explore={"num_leaves": 2})
    with Session(recipe, learns=False) as plain:
        tokenizer = plain.tokenizer
        with pytest.raises(SettingError, match="sync_weights: got no weights, expected some"):
            plain.sync_weights(1)

    class Silent:
        async def generate(self, request: served.TokenRequest) -> served.TokenReply:
            return served.TokenReply([tokenizer.eos_token_id], [-0.5])

    engine = served.ServerEngine(Silent(), tokenizer, end_ids=[tokenizer.eos_token_id])
    with Session(recipe, engine=engine, learns=False) as own:
        own.sync_weights(7)
        (tree,) = own.sample(1, own.tasks[:1])
    kinds = {step.entropy_kind for step in tree.steps if any(step.sampled_mask)}
    assert kinds == {served.EntropyKind.SAMPLED}
    assert {step.policy_version for step in tree.steps if any(step.sampled_mask)} == {7}
