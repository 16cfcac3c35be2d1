"""The public fake: it says what it is told to, within the rules of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.support.error_codes import raises_code
from tests.support.families import byte_tokenizer, word_tokenizer

from treegraft.core.interfaces import Engine, Request
from treegraft.core.types import Completion, EntropyKind, Sampling, StopReason
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.policy.weights import ModelWeights

SAMPLING = Sampling(max_new_tokens=50, stop=("</search>",), final=("</answer>",))


def ids(text: str) -> list[int]:
    return list(word_tokenizer().encode(text, add_special_tokens=False))


def complete(
    engine: ScriptedEngine,
    prefix: Sequence[int] = (5, 6),
    sampling: Sampling = SAMPLING,
    **rest: Any,
) -> Completion:
    return asyncio.run(engine.complete(Request(prefix, sampling, noise_key=("k",), **rest)))


def test_it_is_an_engine() -> None:
    engine = ScriptedEngine([], word_tokenizer())
    assert isinstance(engine, Engine)
    assert (engine.policy_version, engine.fingerprint) == (0, "")
    asyncio.run(engine.publish(ModelWeights({}), 3))
    assert engine.policy_version == 3
    asyncio.run(engine.close())


def test_replies_come_in_order_with_scores() -> None:
    engine = ScriptedEngine(
        ["<search>w1</search>", "<answer>w2</answer>"], word_tokenizer(), logprob=-0.25, entropy=1.5
    )
    first = complete(engine)
    second = complete(engine, (7,))
    assert first.token_ids == tuple(ids("<search>w1</search>")) and first.finish is StopReason.STOP
    # The answer is followed by the end-of-sequence token, as sampled ones are.
    assert second.token_ids == (*ids("<answer>w2</answer>"), 1) and second.finish is StopReason.END
    assert first.sampling_logprobs == (-0.25,) * 3 and first.entropies == (1.5,) * 3
    assert (first.entropy_kind, first.policy_version) == (EntropyKind.EXACT, 0)
    assert [call.prefix_ids for call in engine.calls] == [(5, 6), (7,)]
    assert engine.calls[0].sampling == SAMPLING and engine.calls[0].noise_key == ("k",)
    with raises_code("replies-spent"):
        complete(engine)


def test_limits_and_ends() -> None:
    stop = word_tokenizer().eos_token_id
    engine = ScriptedEngine(
        [ids("w1 w2 w3 w4"), [*ids("w1"), stop, *ids("w2")], "w1</search>w2 w3", "w1 w2"],
        word_tokenizer(),
    )
    short = Sampling(max_new_tokens=3, stop=SAMPLING.stop)
    results = [complete(engine, sampling=short) for _ in range(4)]
    assert [result.finish for result in results] == [
        StopReason.LENGTH,
        StopReason.END,
        StopReason.STOP,
        StopReason.STOP,
    ]
    assert [len(result.token_ids) for result in results] == [3, 2, 2, 2]


def test_a_stop_over_several_tokens_keeps_the_one_that_closes_it() -> None:
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(["ab</search>!c"], tokenizer)
    result = complete(engine)
    assert (
        tokenizer.decode(list(result.token_ids)) == "ab</search>!"
        and result.finish is StopReason.STOP
    )


def test_a_function_sees_the_path_and_may_wait() -> None:
    async def reply(path: str) -> str:
        await asyncio.sleep(0)
        return path.split()[-1]

    engine = ScriptedEngine(reply, word_tokenizer(), latency_s=lambda: 0.0)
    assert complete(engine, ids("w1 w9")).token_ids == tuple(ids("w9"))


def test_probes_are_called_once_enough_is_there() -> None:
    engine = ScriptedEngine(["w1 w2 w3", "w1"], word_tokenizer(), entropy=0.75)
    seen: list[Sequence[float]] = []
    complete(engine, probe_tokens=2, on_probe=seen.append)
    complete(engine, probe_tokens=2, on_probe=seen.append)
    assert seen == [(0.75, 0.75)]
