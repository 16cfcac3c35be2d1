"""The noise that tokens are drawn with: known answers, an independent slow loop, both ways to
compute it, its distribution."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import pytest
import torch

from treegraft.core.keyed import keyed_int
from treegraft.policy.kernels.engine import Kernels, kernels_for
from treegraft.policy.noise import (
    noise_words,
    philox_4x32,
    philox_gumbels,
)

WORD = 2**32


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    found = kernels_for(16, torch.float32, "cpu")
    if found is None:
        pytest.skip("no C compiler, so no kernels")
    yield found


def draws_of(num: int, *key: int | str) -> torch.Tensor:
    return torch.tensor([(*noise_words((*key, n)), n % 50) for n in range(num)])


def slow_words(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 as the paper writes it, by Python's whole numbers."""
    for _ in range(10):
        first = counter[0] * 0xD2511F53
        third = counter[2] * 0xCD9E8D57
        counter = [
            (third // WORD) ^ counter[1] ^ key[0],
            third % WORD,
            (first // WORD) ^ counter[3] ^ key[1],
            first % WORD,
        ]
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return counter


def slow_gumbel(key: tuple[int | str, ...], position: int, entry: int) -> float:
    bits = keyed_int(*key)
    words = slow_words([entry // 4, position, 0, 0], [bits % WORD, bits // WORD])
    return -math.log(-math.log((words[entry % 4] + 0.5) / WORD))


def test_a_key_may_hold_any_text() -> None:
    """The first eight bytes of BLAKE2b over UTF-8, where half a surrogate pair has three bytes."""
    for task, code in (
        ("t/\u00e9 \U0001f600", b"t/\xc3\xa9 \xf0\x9f\x98\x80"),
        ("\ud83d", b"\xed\xa0\xbd"),
    ):
        data = b"int:3\x1fstr:train\x1fint:1\x1fstr:" + code
        expected = hashlib.blake2b(data, digest_size=8).digest()
        assert keyed_int(3, "train", 1, task) == int.from_bytes(expected, "big")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_known_answers_of_philox(counter: str, key: str, words: str) -> None:
    """The three of Random123's kat_vectors, where key and counter are nothing, everything, and
    digits of pi."""
    own, given, expected = ([int(w, 16) for w in text.split()] for text in (counter, key, words))
    assert slow_words(own, given) == expected
    assert philox_4x32(torch.tensor(own), torch.tensor(given)).tolist() == expected


def test_words_are_those_of_an_independent_slow_loop_for_any_counter_and_key() -> None:
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(WORD, (4, 7, 30), generator=generator)
    keys = torch.randint(WORD, (2, 7, 1), generator=generator)
    found = philox_4x32(counters, keys)
    for row in range(7):
        for entry in range(30):
            own = counters[:, row, entry].tolist()
            key = keys[:, row, 0].tolist()
            assert found[:, row, entry].tolist() == slow_words(own, key)


def test_an_entry_is_a_function_of_key_position_and_number() -> None:
    """Whatever rows stand beside it and however many entries are drawn; a row without a position
    has none."""
    key = (1, "train", 0, "task", "0.1")
    at = 37
    draws = torch.tensor([(0, 0, -1), (*noise_words(key), at), (*noise_words((2,)), at)])
    many = philox_gumbels(draws, 103)
    few = philox_gumbels(draws[1:2], 5)
    expected = torch.tensor([slow_gumbel(key, at, entry) for entry in range(103)])
    torch.testing.assert_close(many[1], expected, rtol=2e-7, atol=1e-12)
    assert torch.equal(many[1, :5], few[0])
    assert not many[0].any() and not torch.isclose(many[1], many[2]).any()
    later = philox_gumbels(torch.tensor([(*noise_words(key), at + 1)]), 103)
    assert not torch.isclose(many[1], later[0]).any()
    assert noise_words((1,)) != noise_words(("1",))


def test_kernels_draw_the_noise_of_torch(kernels: Kernels) -> None:
    """1 unit of the last place apart at most: neighbouring floats are neighbouring whole
    numbers."""
    draws = draws_of(300, "ulp")
    draws[7, 2], draws[8, 2] = -1, WORD - 1
    for size in (1, 63, 64, 65, 850):
        ours = kernels.gumbels(draws, size)
        plain = philox_gumbels(draws, size)
        assert ours.shape == plain.shape == (300, size) and not ours[7].any()
        units = (ours.view(torch.int32).long() - plain.view(torch.int32).long()).abs()
        assert int(units.max()) <= 1


def test_a_million_draws_are_the_same_by_kernels_and_by_torch_but_for_near_ties(
    kernels: Kernels,
) -> None:
    """From 8 tokens, where both take the same steps to the logits."""
    logits = 2 * torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    logprobs = logits.log_softmax(dim=-1)
    num_ties = 0
    for part in range(10):
        draws = draws_of(100_000, "million", part)
        ours, plain = (logprobs + f(draws, 8) for f in (kernels.gumbels, philox_gumbels))
        differ = ours.argmax(dim=-1) != plain.argmax(dim=-1)
        best = plain[differ].topk(2, dim=-1).values
        assert ((best[:, 0] - best[:, 1]) < 1e-5).all()
        num_ties += int(differ.sum())
    assert num_ties < 20
