"""The tiny model of random weights and its word-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from treegraft.settings.policy import TinySettings


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
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    # The caller's generator stays as it is, so that a run's other draws do not depend on the model.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


_TAGS = ("think", "search", "python", "result", "retrieve", "answer")
MARKUP_WORDS = (*(f"<{slash}{tag}>" for tag in _TAGS for slash in ("", "/")), "\\boxed{", "}")


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
    split = pre_tokenizers.Split(Regex(r"</?[a-z_]+>|\\boxed\{|\}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.WhitespaceSplit()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
