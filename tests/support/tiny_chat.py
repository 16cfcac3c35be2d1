"""A tiny model of random weights with the template of a real one, saved as transformers does."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import trl
from tests.rollout.test_format_tags import byte_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def tiny_chat(folder: Path) -> Path:
    """Writes a Qwen2 of one layer that reads bytes, with the template of Qwen2.5, and returns its
    folder."""

    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text(encoding="utf-8")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
