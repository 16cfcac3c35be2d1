"""Tiny real transformers models of many families, with random weights large enough that their
logits differ clearly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.trees import VOCABULARY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treegraft.policy.tiny import build_word_tokenizer

SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
WINDOWED = {
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
NO_KV = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
SMALL = {"initializer_range": 0.02}
"""As real models begin: in bfloat16 what attention does is lost in rounding."""

PACKABLE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "llama-tied": ("LlamaConfig", {**SHAPE, "tie_word_embeddings": True}),
    "llama-wide": (
        "LlamaConfig",
        {**SHAPE, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen3": ("Qwen3Config", {**SHAPE, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            **SHAPE,
            **WINDOWED,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {**SHAPE, **WINDOWED, "query_pre_attn_scalar": 8}),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", NO_KV),
    "phi3": ("Phi3Config", SHAPE),
    "granite": (
        "GraniteConfig",
        {
            **SHAPE,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
        },
    ),
    "mistral": ("MistralConfig", {**SHAPE, "sliding_window": 5}),
    "cohere": ("CohereConfig", {**SHAPE, "logit_scale": 0.25}),
    "gpt-oss": (
        "GptOssConfig",
        {
            **SHAPE,
            **WINDOWED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 10000.0},
        },
    ),
}
"""Families whose attention takes ours: grouped and plain heads, windows, soft-caps, sinks, scales,
tied weights, heads of two widths, keys and values that layers share."""

UNPACKABLE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "qwen3-next": ("Qwen3NextConfig", {**SHAPE, **LINEAR, "head_dim": 8}),
    "qwen3-5": ("Qwen3_5TextConfig", {**SHAPE, **LINEAR, **SMALL, "head_dim": 8}),
    "lfm2": ("Lfm2Config", {**SHAPE, **SMALL, "layer_types": ["conv", "full_attention"]}),
    "falcon-h1": (
        "FalconH1Config",
        {
            **SHAPE,
            **SMALL,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8192,
        },
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
}
"""State spaces, linear attention, convolutions, chunks longer than any path here, and a family
without the registry."""


def build_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model of the family, the same for the same seed."""
    name, fields = {**PACKABLE, **UNPACKABLE}[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**fields))
        with torch.no_grad():
            for parameter_name, weight in model.named_parameters():
                if parameter_name.endswith("sinks"):
                    weight.normal_()
    if getattr(model.config, "attn_logit_softcapping", None):
        # Earlier versions of transformers (5.17) leave the cap out by default.
        model.set_attn_implementation("eager")
    return model.to(dtype).eval()


@functools.cache
def word_tokenizer() -> Any:
    """One token per word or tag; as many as the models have."""
    tokenizer = build_word_tokenizer([f"w{n}" for n in range(VOCABULARY - 17)])
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    return tokenizer


@functools.cache
def byte_tokenizer() -> Any:
    """One token per byte, besides ">!" as one token and the end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE({text: index for index, text in enumerate([*alphabet, ">!"])}, [(">", "!")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=backend, eos_token="<|end|>")


def chain_model(chain: Sequence[int], size: int) -> Any:
    """Returns a Llama that, greedily, follows every token of `chain` with the next one: it says
    what it is told to."""
    config = transformers.LlamaConfig(
        **{
            **SHAPE,
            "vocab_size": size,
            "hidden_size": 272,
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
        }
    )
    assert size <= config.hidden_size and len(set(chain[:-1])) == len(chain) - 1, (
        "a token has one successor"
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        model.lm_head.weight.zero_()
        for token, follower in itertools.pairwise(chain):
            model.lm_head.weight[follower, token] = 1.0
    return model


def byte_model(folder: Path) -> str:
    """Saves a tiny Llama of random weights with the byte tokenizer, without a chat template;
    returns its folder."""
    tokenizer = byte_tokenizer()
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "max_position_embeddings": 4096,
    }
    ends: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **shape, **ends)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
