"""The native engine: right numbers, stops and limits, the same bits whatever else is under way, and
every wait ends."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from tests.support.error_codes import raises_code
from tests.support.families import (
    PACKABLE,
    UNPACKABLE,
    build_model,
    byte_tokenizer,
    chain_model,
    word_tokenizer,
)
from tests.support.trees import VOCABULARY

from treegraft.core.errors import EngineError
from treegraft.core.interfaces import Engine, Request
from treegraft.core.types import Completion, EntropyKind, Sampling, StopReason
from treegraft.policy.engine import forward
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.engine.packed import SeparateLinears
from treegraft.policy.engine.ragged import usable_rows
from treegraft.policy.engine.sampling import sample_tokens
from treegraft.policy.engine.stops import StopFinder
from treegraft.policy.kernels.engine import kernels_for
from treegraft.policy.weights import ModelWeights, weights_fingerprint
from treegraft.settings.policy import EngineSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def make_engine(
    family: str = "llama",
    *,
    model: Any = None,
    tokenizer: Any = None,
    seed: int = 0,
    max_prefill_tokens: int = 512,
    pack_weights: bool = True,
    compile_kernels: bool = True,
    **settings: Any,
) -> NativeEngine:
    model = model if model is not None else build_model(family, seed)
    native = {"cache_gb": settings.pop("cache_gb", "auto")}
    settings = {"max_rows": 32, "deadline_s": 30.0, "native": native} | settings
    with pytest.MonkeyPatch.context() as patch:
        if not compile_kernels:
            patch.setattr(forward, "model_kernels", lambda model: None)
        if not pack_weights:
            patch.setattr(forward, "product_kind", lambda *_: SeparateLinears)
        engine = NativeEngine(model, tokenizer or word_tokenizer(), EngineSettings(**settings))
    engine.max_prefill_tokens = max_prefill_tokens
    return engine


def run(engine: NativeEngine, work: Callable[[NativeEngine], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await asyncio.wait_for(work(engine), 60.0)
        finally:
            await engine.close()

    return asyncio.run(main())


def ids_of(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, VOCABULARY) for _ in range(length))


def greedy(num: int, **fields: Any) -> Sampling:
    return Sampling(max_new_tokens=num, temperature=0.0, **fields)


def complete_one(
    engine: NativeEngine, prefix: Sequence[int], sampling: Sampling, **options: Any
) -> Completion:
    async def work(engine: NativeEngine) -> Completion:
        return await engine.complete(Request(prefix, sampling, noise_key=(1,), **options))

    result: Completion = run(engine, work)
    return result


# ---------------------------------------------------------------------- right numbers


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", PACKABLE)
def test_scores_are_those_of_a_plain_forward_pass(family: str, compiled: bool) -> None:
    """Three branches of one path, at three temperatures, in one batch, against whole logits of the
    plain model."""
    model = build_model(family)
    prompt = ids_of(70, 1)
    temperatures = (1.0, 0.6, 1.7)
    own = (ids_of(1, 2), ids_of(9, 3), ids_of(3, 4))

    async def work(engine: NativeEngine) -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.complete(
                    Request(
                        prompt + own[n],
                        Sampling(max_new_tokens=12, temperature=temperatures[n]),
                        noise_key=(n,),
                    )
                )
                for n in range(3)
            )
        )

    for n, completion in enumerate(
        run(make_engine(family, max_prefill_tokens=16, compile_kernels=compiled), work)
    ):
        path = prompt + own[n] + completion.token_ids
        assert completion.entropy_kind is EntropyKind.EXACT and completion.policy_version == 0
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([path]), use_cache=False).logits[0].float()
        for index, token in enumerate(completion.token_ids):
            row = torch.log_softmax(
                logits[len(prompt + own[n]) + index - 1] / temperatures[n], dim=-1
            )
            assert completion.sampling_logprobs[index] == pytest.approx(float(row[token]), abs=1e-4)
            assert completion.entropies[index] == pytest.approx(
                float(-(row.exp() * row).sum()), abs=1e-4
            )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in UNPACKABLE),
        *((family, torch.bfloat16) for family in ("qwen3-5", "lfm2", "falcon-h1", "llama4")),
    ],
)
def test_models_it_cannot_run_are_refused(family: str, dtype: torch.dtype) -> None:
    model = build_model(family, dtype=dtype)
    with raises_code("model-not-served"):
        make_engine(model=model)
    # It is left as it was.
    model(input_ids=torch.tensor([[3, 4]]), use_cache=False)


def test_frequencies_agree_with_the_distribution() -> None:
    """1500 draws from one distribution: chi-square over tokens with at least 5 expected, the rest
    as one cell."""
    model = build_model("llama")
    prefix = ids_of(5, 7)
    count = 1500
    sampling = Sampling(max_new_tokens=1, temperature=0.8)

    async def work(engine: NativeEngine) -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.complete(Request(prefix, sampling, noise_key=("chi", n)))
                for n in range(count)
            )
        )

    drawn = torch.tensor([c.token_ids[0] for c in run(make_engine(max_rows=256), work)])
    with torch.no_grad():
        expected = count * torch.softmax(
            model(input_ids=torch.tensor([prefix])).logits[0, -1].double() / 0.8, dim=-1
        )
    observed = torch.bincount(drawn, minlength=VOCABULARY).double()
    common = expected >= 5
    cells = torch.cat([expected[common], expected[~common].sum()[None]])
    seen = torch.cat([observed[common], observed[~common].sum()[None]])
    chi = float(((seen - cells) ** 2 / cells).sum())
    freedom = len(cells) - 1
    assert freedom > 10
    # Mean f, variance 2f; four deviations either way.
    assert abs(chi - freedom) < 4 * (2 * freedom) ** 0.5


def test_sampling_by_hand() -> None:
    """p = (1/4, 3/4) at T = 1; at T = 1/2 p ∝ (1, 9)."""
    logits = torch.tensor([[0.0, 1.0986122887]] * 3)
    tokens, logprobs, entropies = sample_tokens(
        logits, [0.0, 1.0, 0.5], [None, (5,), (6,)], [0] * 3
    )
    shares = torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.1, 0.9]])
    assert tokens[0] == 1
    torch.testing.assert_close(
        logprobs, shares.gather(1, tokens[:, None])[:, 0].log(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(entropies, -(shares * shares.log()).sum(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_large_vocabulary_is_drawn_from_in_two_steps_with_the_same_frequencies(
    compiled: bool,
) -> None:
    """600 tokens are blocks of 256, 256 and 88; p falls with their number. Chi-square of 4,000
    draws."""
    logits = -torch.arange(600) / 100.0
    count = 4000
    kernels = kernels_for(16, torch.float32, "cpu") if compiled else None
    tokens, logprobs, entropies = sample_tokens(
        logits.repeat(count, 1),
        [1.0] * count,
        [("k", n) for n in range(count)],
        [3] * count,
        kernels,
    )
    exact = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(logprobs.double(), exact[tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        entropies.double(), -(exact.exp() * exact).sum().expand(count), atol=1e-4, rtol=0
    )
    for cells, index in ((3, tokens // 256), (60, tokens // 10)):
        expected = count * torch.zeros(cells).double().index_add(
            0, torch.arange(600) // (256 if cells == 3 else 10), exact.exp()
        )
        chi = float(((torch.bincount(index, minlength=cells) - expected) ** 2 / expected).sum())
        assert abs(chi - (cells - 1)) < 4 * (2 * (cells - 1)) ** 0.5


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_are_drawn_alike_in_any_company_and_greedy_ones_take_the_largest(
    compiled: bool,
) -> None:
    """Greedy: the largest logit stands in a block of little weight."""
    logits = torch.randn(40, 700, generator=torch.Generator().manual_seed(1))
    logits[:, 650] = logits.amax(dim=-1) + 0.1
    keys = [None if row % 3 == 0 else (row,) for row in range(40)]
    temperatures = [0.0 if key is None else 0.7 for key in keys]
    positions = list(range(40))
    kernels = kernels_for(16, torch.float32, "cpu") if compiled else None
    together = sample_tokens(logits, temperatures, keys, positions, kernels)
    for row in (0, 1, 17, 39):
        alone = sample_tokens(
            logits[row : row + 1].clone(),
            temperatures[row : row + 1],
            keys[row : row + 1],
            positions[row : row + 1],
            kernels,
        )
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))
    assert (together[0][::3] == 650).all()


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "gemma2"])
def test_packed_weights_give_the_products_of_plain_ones_also_after_a_publish(family: str) -> None:
    """bfloat16: log-probabilities of one greedy path with and without, before and after other
    weights; gpt-neox has biases."""
    other = {
        name: tensor.bfloat16() for name, tensor in build_model(family, 5).state_dict().items()
    }

    async def work(engine: NativeEngine) -> list[Completion]:
        before = await engine.complete(Request(ids_of(40, 1), greedy(1), noise_key=(0,)))
        await engine.publish(ModelWeights(other), 1)
        return [before, await engine.complete(Request(ids_of(40, 1), greedy(1), noise_key=(0,)))]

    packed, plain = (
        run(make_engine(model=build_model(family).bfloat16(), pack_weights=choice), work)
        for choice in (True, False)
    )
    for ours, theirs in zip(packed, plain, strict=True):
        assert ours.sampling_logprobs == pytest.approx(theirs.sampling_logprobs, abs=0.05)
        assert ours.entropies == pytest.approx(theirs.entropies, abs=0.05)
    assert abs(packed[0].sampling_logprobs[0] - packed[1].sampling_logprobs[0]) > 1e-3


# ---------------------------------------------------------------------- the same bits in any compan

Done = tuple[tuple[int, ...], float, Completion]
Ask = tuple[tuple[int, ...], Sampling, tuple[Any, ...]]


def requests() -> list[Ask]:
    """Two prompts with five starts each, of several lengths and temperatures."""
    asks: list[Ask] = []
    for prompt_seed, length in ((1, 37), (2, 80)):
        prompt = ids_of(length, prompt_seed)
        for n in range(5):
            own = ids_of((0, 1, 6, 20, 70)[n], 10 * prompt_seed + n)
            sampling = Sampling(
                max_new_tokens=(9, 3, 14, 6, 11)[n], temperature=(1.0, 0.7, 0.0, 1.0, 1.3)[n]
            )
            asks.append((prompt + own, sampling, (prompt_seed, n)))
    return asks


async def ask(engine: NativeEngine, what: Ask, delay_s: float = 0.0) -> list[Completion]:
    """A completion, and another after it on the same path with a "tool result" between them."""
    prefix, sampling, key = what
    await asyncio.sleep(delay_s)
    first = await engine.complete(Request(prefix, sampling, noise_key=(*key, "a")))
    longer = (*prefix, *first.token_ids, *ids_of(4, 99))
    return [first, await engine.complete(Request(longer, sampling, noise_key=(*key, "b")))]


async def one_by_one(engine: NativeEngine) -> list[list[Completion]]:
    return [await ask(engine, what) for what in requests()]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        ("llama", True),
        ("llama-wide", True),
        ("qwen3", True),
        ("gpt-neox", True),
        ("gemma2", True),
        ("llama", False),
        ("gemma2", False),
    ],
)
def test_completions_are_the_same_bits_in_any_company(family: str, compiled: bool) -> None:
    """Alone; all at once; shuffled and staggered; in short chunks; with few rows, so that paths
    wait, are dropped and fed anew."""
    assert_equal_in_any_company(
        lambda **options: make_engine(family, compile_kernels=compiled, **options),
        COMPANIES if family == "llama" else MIXED,
    )


@pytest.mark.parametrize("family", ["llama", "llama-wide", "qwen3"])
def test_completions_in_bfloat16_too_where_products_are_ours(family: str) -> None:
    def made(**options: Any) -> NativeEngine:
        return make_engine(model=build_model(family).bfloat16(), **options)

    engine = made()
    is_rowwise = engine._forward.is_rowwise
    run(engine, one_by_one)
    if not is_rowwise:
        pytest.skip("no products of ours in bfloat16 for this processor")
    assert_equal_in_any_company(made, MIXED)


COMPANIES: list[tuple[float, dict[str, Any]]] = [
    (0.0, {}),
    (0.05, {}),
    (0.0, {"max_prefill_tokens": 16}),
    (0.02, {"max_rows": 3}),
    (0.0, {"max_rows": 1, "cache_gb": 1e-9}),
    (0.02, {"max_rows": 5, "cache_gb": 2e-4, "max_prefill_tokens": 32}),
]
"""Seconds over which requests arrive, and limits of the engine."""
MIXED = [COMPANIES[1], COMPANIES[5]]
"""Without limits, and with all of them at once."""


def assert_equal_in_any_company(
    made: Callable[..., NativeEngine], companies: Sequence[tuple[float, dict[str, Any]]]
) -> None:
    expected = run(made(), one_by_one)

    def in_order(
        seed: int, spread_s: float
    ) -> Callable[[NativeEngine], Awaitable[list[list[Completion]]]]:
        async def work(engine: NativeEngine) -> list[list[Completion]]:
            draw = random.Random(seed)
            order = draw.sample(range(len(expected)), len(expected))
            asks = requests()
            done = await asyncio.gather(
                *(ask(engine, asks[n], draw.random() * spread_s) for n in order)
            )
            return [done[order.index(n)] for n in range(len(order))]

        return work

    for number, (spread_s, options) in enumerate(companies):
        engine = made(**options)
        assert run(engine, in_order(number, spread_s)) == expected, (spread_s, options)
        if options.get("cache_gb") == 1e-9:
            assert engine.take_metrics()["time/engine_evictions"] > 0


def test_a_long_neighbour_changes_no_bit() -> None:
    """Sums over more than some 384 positions are cut by their whole length, unless they are taken
    in spans."""
    prompt = ids_of(30, 1)
    mine = ids_of(300, 2)
    sampling = Sampling(max_new_tokens=15)

    async def alone(engine: NativeEngine) -> Completion:
        return await engine.complete(Request(prompt + mine, sampling, noise_key=(1,)))

    async def accompanied(engine: NativeEngine) -> Completion:
        long = engine.complete(
            Request(prompt + ids_of(700, 3), Sampling(max_new_tokens=20), noise_key=(2,))
        )
        other = engine.complete(
            Request(ids_of(600, 4), Sampling(max_new_tokens=20), noise_key=(3,))
        )
        done: list[Completion] = await asyncio.gather(long, other, alone(engine))
        return done[2]

    assert run(make_engine(), accompanied) == run(make_engine(), alone)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_rows_round_alike_at_every_usable_number_of_them(num_threads: int) -> None:
    """The feed-forward part of a layer, 512 wide: three threads cut 256 rows of it where no vector
    register ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        fields = {**PACKABLE["llama"][1], "intermediate_size": 512, "hidden_size": 64}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
        part = model.model.layers[0].mlp
        rows = torch.randn(1, 64).expand(1024, 64).contiguous()
        with torch.inference_mode():
            results = [part(rows[:count]) for count in usable_rows(model)]
        assert len(results) >= 5
        assert all(bool((result == results[0][0]).all()) for result in results)
    finally:
        torch.set_num_threads(before)


def test_a_branch_by_copy_equals_a_fresh_computation() -> None:
    """A path goes on in one row while another row branches off it twice, at different places."""
    prompt = ids_of(20, 1)

    async def branching(engine: NativeEngine) -> list[Completion]:
        first = await engine.complete(Request(prompt, Sampling(max_new_tokens=12), noise_key=(1,)))
        path = prompt + first.token_ids
        more = Sampling(max_new_tokens=10)
        return await asyncio.gather(
            *(
                engine.complete(Request(path[: 20 + cut], more, noise_key=("branch", cut, n)))
                for cut in (12, 12, 5)
                for n in range(2)
            )
        )

    together = run(make_engine(), branching)

    async def apart(engine: NativeEngine, cut: int, n: int) -> Completion:
        first = await engine.complete(Request(prompt, Sampling(max_new_tokens=12), noise_key=(1,)))
        await engine.publish(
            ModelWeights(engine.model.state_dict()), 0
        )  # nothing is cached any more
        path = prompt + first.token_ids
        return await engine.complete(
            Request(path[: 20 + cut], Sampling(max_new_tokens=10), noise_key=("branch", cut, n))
        )

    async def all_apart(engine: NativeEngine) -> list[Completion]:
        return [await apart(engine, cut, n) for cut in (12, 12, 5) for n in range(2)]

    assert run(make_engine(), all_apart) == together
    assert together[0] != together[1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_traffic_agrees_with_plain_forward_passes(seed: int) -> None:
    assert_traffic_agrees(seed)


def assert_traffic_agrees(seed: int, **options: Any) -> None:
    """Random trees of paths that come and go, weights that change in between, and a cache far too
    small for them."""
    draw = random.Random(seed)
    weights = [build_model("qwen3", version).state_dict() for version in range(3)]
    finished: list[tuple[int, ...]] = []

    async def grow(
        engine: NativeEngine, path: tuple[int, ...], depth: int, key: tuple[int, ...]
    ) -> list[Done]:
        await asyncio.sleep(draw.random() * 0.03)
        sampling = Sampling(
            max_new_tokens=draw.randint(1, 20), temperature=draw.choice([0.7, 1.0, 1.5])
        )
        completion = await engine.complete(Request(path, sampling, noise_key=key))
        finished.append(key)
        done: list[Done] = [(path, sampling.temperature, completion)]
        if depth:
            longer = (
                path
                + completion.token_ids[: draw.randint(1, 20)]
                + ids_of(draw.randint(0, 40), draw.randint(0, 3))
            )
            parts = [grow(engine, longer, depth - 1, (*key, n)) for n in range(draw.randint(1, 3))]
            for below in await asyncio.gather(*parts):
                done += below
        return done

    async def work(engine: NativeEngine) -> list[Done]:
        async def publish() -> None:
            for version in (1, 2):
                while len(finished) < 5 * version:
                    await asyncio.sleep(0.001)
                await engine.publish(ModelWeights(weights[version]), version)

        trees = [grow(engine, ids_of(draw.randint(1, 150), 5), 2, (n,)) for n in range(5)]
        *grown, _ = await asyncio.gather(*trees, publish())
        return [done for tree in grown for done in tree]

    engine = make_engine("qwen3", max_rows=6, cache_gb=6e-4, max_prefill_tokens=24, **options)
    everything = run(engine, work)
    assert {completion.policy_version for *_, completion in everything} == {0, 1, 2}
    model = build_model("qwen3")
    for prefix, temperature, completion in everything:
        model.load_state_dict(weights[completion.policy_version])
        path = prefix + completion.token_ids
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([path]), use_cache=False).logits[
                    0, len(prefix) - 1 : -1
                ]
                / temperature
            )
        rows = torch.log_softmax(logits, dim=-1)
        expected = rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(completion.sampling_logprobs), expected, atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            torch.tensor(completion.entropies), -(rows.exp() * rows).sum(-1), atol=1e-4, rtol=0
        )


# ---------------------------------------------------------------------- stops and limits


def spoken(text: str, *, tokenizer: Any, extra: Sequence[int] = (), **fields: Any) -> Completion:
    """What a model that says `text`, then the tokens `extra`, is cut to."""
    chain = [*tokenizer.encode(text, add_special_tokens=False), *extra]
    sampling = greedy(fields.pop("max_new_tokens", 60), **fields)
    return complete_one(
        make_engine(model=chain_model(chain, len(tokenizer)), tokenizer=tokenizer),
        chain[:1],
        sampling,
    )


def test_a_stop_text_over_many_tokens_ends_a_completion() -> None:
    tokenizer = byte_tokenizer()
    completion = spoken("Q</search>TUV", tokenizer=tokenizer, stop=("</python>", "</search>"))
    assert (
        tokenizer.decode(list(completion.token_ids)) == "</search>"
        and completion.finish is StopReason.STOP
    )
    assert (
        len(completion.token_ids)
        == len(completion.sampling_logprobs)
        == len(completion.entropies)
        == 9
    )


def test_the_token_that_closes_a_stop_is_kept_whole() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer.encode(">!", add_special_tokens=False)) == 1
    completion = spoken("Q</search>!UV", tokenizer=tokenizer, stop=("</search>",))
    assert tokenizer.decode(list(completion.token_ids)) == "</search>!"


def test_a_stop_text_in_the_prefix_does_not_count() -> None:
    tokenizer = byte_tokenizer()
    prefix = tokenizer.encode("</search", add_special_tokens=False)
    chain = tokenizer.encode("h>XYZ", add_special_tokens=False)
    engine = make_engine(model=chain_model(chain, len(tokenizer)), tokenizer=tokenizer)
    completion = complete_one(engine, prefix, greedy(4, stop=("</search>",)))
    assert (
        tokenizer.decode(list(completion.token_ids))[:4] == ">XYZ"
        and completion.finish is StopReason.LENGTH
    )


def test_one_more_token_after_a_final_text() -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    ended = spoken("Q</answer>", tokenizer=tokenizer, extra=[end], final=("</answer>",))
    assert (
        ended.finish is StopReason.END and ended.token_ids[-1] == end and len(ended.token_ids) == 10
    )
    missed = spoken("Q</answer>XYZ", tokenizer=tokenizer, final=("</answer>",))
    assert (
        missed.finish is StopReason.STOP
        and tokenizer.decode(list(missed.token_ids)) == "</answer>X"
    )
    cut = spoken("Q</answer>XYZ", tokenizer=tokenizer, final=("</answer>",), max_new_tokens=9)
    assert cut.finish is StopReason.LENGTH and tokenizer.decode(list(cut.token_ids)) == "</answer>"


def test_limits_are_per_request_and_the_context_holds() -> None:
    limits = (1, 7, 3)

    async def work(engine: NativeEngine) -> list[Completion]:
        prefix = ids_of(6, 1)
        return await asyncio.gather(
            *(
                engine.complete(Request(prefix, Sampling(max_new_tokens=n), noise_key=(n,)))
                for n in limits
            )
        )

    done = run(make_engine(), work)
    assert [len(c.token_ids) for c in done] == list(limits) and {c.finish for c in done} == {
        StopReason.LENGTH
    }
    # The models read 1024 tokens: 1020 leave room for 4, whatever was asked for.
    completion = complete_one(make_engine(), ids_of(1020, 2), Sampling(max_new_tokens=10**9))
    assert len(completion.token_ids) == 4 and completion.finish is StopReason.LENGTH


def test_stop_finder_looks_at_the_last_token_only() -> None:
    tokenizer = byte_tokenizer()
    finder = StopFinder(tokenizer)

    def ends(text: str, *stops: str) -> bool:
        return finder.ends_with_any(tokenizer.encode(text, add_special_tokens=False), stops)

    assert ends("a</s>", "</s>") and ends("a</s>!", "</s>") and ends("</p>", "</s>", "</p>")
    assert (
        not ends("a</s>b", "</s>")
        and not ends("</s", "</s>")
        and not ends("a>", "</s>")
        and not ends("</s>")
    )
    assert ends("é\U0001f600</s>", "</s>")


def test_probes_hear_the_first_entropies() -> None:
    seen: list[Sequence[float]] = []
    completion = complete_one(
        make_engine(),
        ids_of(5, 1),
        Sampling(max_new_tokens=9),
        probe_tokens=4,
        on_probe=lambda values: seen.append(values),
    )
    assert seen == [completion.entropies[:4]]


# ---------------------------------------------------------------------- publishing


def test_a_publish_drains_and_then_everything_is_new() -> None:
    old = build_model("llama", 0)
    new = build_model("llama", 1)
    prefix = ids_of(40, 1)
    long = Sampling(max_new_tokens=40)
    short = Sampling(max_new_tokens=6)

    async def work(engine: NativeEngine) -> Any:
        assert isinstance(engine, Engine) and engine.fingerprint == weights_fingerprint(
            old.state_dict()
        )
        running = [
            asyncio.create_task(engine.complete(Request(prefix, long, noise_key=(n,))))
            for n in range(3)
        ]
        # Two of them wait until the first has taken in the prompt that they share.
        while len(engine._running) + sum(task.done() for task in running) < len(running):
            await asyncio.sleep(0.001)
        publish = asyncio.create_task(engine.publish(ModelWeights(new.state_dict()), 5))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.complete(Request(prefix, short, noise_key=(7,))))
        await publish
        assert engine.policy_version == 5 and engine.fingerprint == weights_fingerprint(
            new.state_dict()
        )
        return (
            await asyncio.gather(*running),
            await late,
            await engine.complete(Request(prefix, short, noise_key=(7,))),
        )

    before, late, after = run(make_engine(), work)
    assert {c.policy_version for c in before} == {
        0
    } and late.policy_version == after.policy_version == 5

    async def fresh(engine: NativeEngine) -> list[Completion]:
        return [
            await engine.complete(Request(prefix, s, noise_key=(n,)))
            for s, n in ((short, 7), (long, 0), (long, 1), (long, 2))
        ]

    on_new = run(make_engine(seed=1), fresh)[0]
    assert (late.token_ids, late.sampling_logprobs) == (
        on_new.token_ids,
        on_new.sampling_logprobs,
    ) and late == after
    assert before == run(make_engine(), fresh)[1:]


def test_foreign_weights_are_refused_and_the_engine_lives_on() -> None:
    async def work(engine: NativeEngine) -> Completion:
        with raises_code("weights-mismatch"):
            await engine.publish(ModelWeights({"x": torch.zeros(1)}), 1)
        assert engine.policy_version == 0
        return await engine.complete(Request(ids_of(4, 1), greedy(2), noise_key=(0,)))

    assert len(run(make_engine(), work).token_ids) == 2


# ---------------------------------------------------------------------- every wait ends


def break_after(engine: NativeEngine, calls: int, gate: threading.Event) -> None:
    """Lets the engine's forward pass wait for the gate, and fail at its n-th call."""
    forward = engine._run
    count = [0]

    def failing(segments: Any) -> Any:
        gate.wait(10.0)
        count[0] += 1
        if count[0] > calls:
            raise RuntimeError("the roof fell in")
        return forward(segments)

    engine._run = failing  # type: ignore[method-assign]


def test_a_death_reaches_every_waiter() -> None:
    async def work(engine: NativeEngine) -> list[Any]:
        gate = threading.Event()
        break_after(engine, 3, gate)
        sampling = Sampling(max_new_tokens=30)
        # With two rows, one request waits for a row and one publish for an idle engine.
        waiters = [
            asyncio.create_task(
                engine.complete(Request(ids_of(5, n), sampling, noise_key=(n + 1,)))
            )
            for n in range(3)
        ]
        await asyncio.sleep(0.2)
        publish = asyncio.create_task(engine.publish(ModelWeights(engine.model.state_dict()), 1))
        await asyncio.sleep(0)
        gate.set()
        results = list(await asyncio.gather(*waiters, publish, return_exceptions=True))
        for later in (
            engine.complete(Request(ids_of(5, 9), sampling, noise_key=(9,))),
            engine.publish(ModelWeights({}), 2),
        ):
            results.extend(await asyncio.gather(later, return_exceptions=True))
        return results

    results = run(make_engine(max_rows=2), work)
    assert len(results) == 6
    assert all(
        isinstance(result, EngineError) and "the roof fell in" in str(result) for result in results
    )


@pytest.mark.parametrize("name", ["_run", "_admit"])
def test_out_of_memory_fails_what_runs_and_not_the_engine(name: str) -> None:
    async def work(engine: NativeEngine) -> Completion:
        original = getattr(engine, name)

        def failing(*args: Any) -> Any:
            setattr(engine, name, original)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

        setattr(engine, name, failing)
        with raises_code("device-memory-spent", match=r"forward pass \(CUDA out"):
            await engine.complete(Request(ids_of(5, 0), greedy(4), noise_key=(1,)))
        return await engine.complete(Request(ids_of(5, 1), greedy(9), noise_key=(1,)))

    assert run(make_engine(), work).token_ids


def test_closing_tells_those_who_wait() -> None:
    async def work(engine: NativeEngine) -> Any:
        slow_down(engine, 0.1)
        task = asyncio.create_task(
            engine.complete(Request(ids_of(5, 1), Sampling(max_new_tokens=900), noise_key=(1,)))
        )
        await asyncio.sleep(0.02)
        await engine.close()
        results = list(await asyncio.gather(task, return_exceptions=True))
        results.extend(
            await asyncio.gather(engine.publish(ModelWeights({}), 1), return_exceptions=True)
        )
        with raises_code("engine-closed"):
            await engine.complete(Request((3,), greedy(1), noise_key=(1,)))
        return results

    assert all(
        isinstance(result, EngineError) and "closed" in str(result)
        for result in run(make_engine(), work)
    )


def test_a_request_that_is_given_up_frees_its_row() -> None:
    async def work(engine: NativeEngine) -> Completion:
        task = asyncio.create_task(
            engine.complete(Request(ids_of(5, 1), Sampling(max_new_tokens=1000), noise_key=(1,)))
        )
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await engine.complete(Request(ids_of(6, 2), greedy(2), noise_key=(2,)))

    engine = make_engine(max_rows=1)
    assert len(run(engine, work).token_ids) == 2


def test_a_long_prompt_is_taken_in_beside_rows_that_decode() -> None:
    """Passes of at most 32 rows, four of which may decode: a prompt of 60 comes in as 28, 28 and
    4."""

    async def work(engine: NativeEngine) -> list[str]:
        engine._buckets = (16, 32)
        engine._room = 32
        ended: list[str] = []

        async def complete(name: str, prefix: tuple[int, ...], count: int) -> None:
            await engine.complete(Request(prefix, greedy(count), noise_key=(name,)))
            ended.append(name)

        long = asyncio.create_task(complete("decodes", ids_of(5, 1), 150))
        await asyncio.sleep(0.02)
        await asyncio.gather(long, complete("prompt", ids_of(60, 2), 1))
        return ended

    assert run(make_engine(max_rows=4, max_prefill_tokens=64), work) == ["prompt", "decodes"]


def slow_down(engine: NativeEngine, seconds: float) -> None:
    """Makes every forward pass take so long."""
    forward = engine._run

    def slow(segments: Any) -> Any:
        time.sleep(seconds)
        return forward(segments)

    engine._run = slow  # type: ignore[method-assign]


def test_a_deadline_is_kept_and_named() -> None:
    async def work(engine: NativeEngine) -> Completion:
        slow_down(engine, 0.3)
        running = asyncio.create_task(
            engine.complete(Request(ids_of(5, 1), greedy(2), noise_key=(1,)))
        )
        await asyncio.sleep(0.02)
        with raises_code("engine-late"):
            await engine.publish(ModelWeights(engine.model.state_dict()), 3)
        with raises_code("engine-late"):
            await running
        engine.settings = EngineSettings(deadline_s=30.0)
        return await engine.complete(Request(ids_of(3, 1), greedy(1), noise_key=(1,)))

    assert len(run(make_engine(deadline_s=0.05), work).token_ids) == 1


@pytest.mark.parametrize(
    ("prefix", "limit", "code"),
    [
        ((), 4, "prefix-empty"),
        (ids_of(1024, 1), 4, "path-too-long"),
    ],
)
def test_bad_requests_are_refused_at_once(prefix: tuple[int, ...], limit: int, code: str) -> None:
    with raises_code(code):
        complete_one(make_engine(), prefix, Sampling(max_new_tokens=limit))


def test_a_loop_that_is_gone_kills_nobody() -> None:
    """A run that ends with requests under way leaves an engine that serves the next one."""
    engine = make_engine()

    async def leave() -> None:
        task = asyncio.create_task(
            engine.complete(Request(ids_of(5, 1), Sampling(max_new_tokens=200), noise_key=(1,)))
        )
        await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(leave())
    assert len(complete_one(engine, ids_of(4, 1), greedy(3)).token_ids) == 3


# ---------------------------------------------------------------------- the cache


def num_rows_fed(work: Callable[[NativeEngine], Awaitable[Any]], **settings: Any) -> int:
    engine = make_engine(**settings)
    run(engine, work)
    return engine.num_rows_fed


def test_a_group_fills_its_prompt_once_and_a_continued_path_is_not_fed_again() -> None:
    prompt = ids_of(50, 1)
    sampling = Sampling(max_new_tokens=4)

    async def group(engine: NativeEngine) -> None:
        await asyncio.gather(
            *(engine.complete(Request(prompt, sampling, noise_key=(n,))) for n in range(8))
        )

    # 49 shared, then for each of 8 rows the prompt's last token and three sampled ones (the fourth
    # is not fed).
    assert num_rows_fed(group) == 49 + 8 * 4

    async def steps(engine: NativeEngine) -> None:
        first = await engine.complete(Request(prompt, sampling, noise_key=(1,)))
        await engine.complete(
            Request(prompt + first.token_ids + ids_of(5, 2), sampling, noise_key=(2,))
        )

    # The second step feeds the last sampled token, five of the result, and three sampled ones.
    assert num_rows_fed(steps) == 49 + 4 + 6 + 3
