"""Models of random weights, tiny or of a published shape, and their tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from treegraft.core.text import TAGS
from treegraft.policy.shapes import published_shape
from treegraft.settings.policy import TinySettings


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the random generators of every device inside the block and makes float32 torch's
    default type; restores both afterwards, so that a run's later draws do not depend on the draws
    made here."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        # Weights drawn in another type are others.
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_tiny_model(
    shape: TinySettings, vocabulary_size: int, eos_id: int, pad_id: int, seed: int
) -> Any:
    """Returns a Llama of random weights, the same for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        # Two heads share keys and values, so that grouped attention is what small runs test.
        num_key_value_heads=max(1, shape.num_heads // 2),
        max_position_embeddings=shape.max_context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    with seeded(seed):
        return LlamaForCausalLM(config)


def build_shaped_model(path: str, dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    """Returns (model, tokenizer) of the published shape that `path` names: random weights on
    torch's default device, the same there for the same seed, and bytes as tokens.

    Raises:
        ModelError: there is no such shape.
    """
    fields = published_shape(path)
    tokenizer = build_byte_tokenizer(fields["vocab_size"])
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return build_random_model(fields | ends, dtype, seed), tokenizer


def build_random_model(fields: Mapping[str, Any], dtype: torch.dtype, seed: int) -> Any:
    """Returns a model of random weights for the fields of a config.json, on torch's default
    device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # for_model has it as a parameter by place.
    others = {name: value for name, value in fields.items() if name != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], bos_token_id=None, **others)
    with seeded(seed):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


_TAGS = ("think", "search", "python", "result", "retrieve", "answer")
MARKUP_WORDS = (*(f"<{slash}{tag}>" for tag in _TAGS for slash in ("", "/")), "\\boxed{", "}")


def build_byte_tokenizer(size: int) -> Any:
    """Returns a tokenizer with one token per byte, padded to `size` entries by words that no text
    is split into, which only a model that samples them writes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # "Ġ" is a blank in this alphabet.
    entries += [f"Ġw{index}" for index in range(len(entries), size)]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def build_word_tokenizer(words: Sequence[str]) -> Any:
    """Returns a tokenizer with one token per word of a closed vocabulary and one per tag."""
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    # Once each and in this order: a token's number is part of every recorded tree.
    entries = dict.fromkeys(["<pad>", "<eos>", "<unk>", *MARKUP_WORDS, *words])
    backend = Backend(
        models.WordLevel({word: index for index, word in enumerate(entries)}, unk_token="<unk>")
    )
    # Tags first: in "<search>e1" no blank parts the tag from the word.
    split = pre_tokenizers.Split(Regex(TAGS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.WhitespaceSplit()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
