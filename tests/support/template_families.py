"""Chat templates of model families, as TRL's wheel carries them, and tokenizers with their tokens.

The texts are the families' own: none is one of TRL's patched variants for training.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.smollm2 import smollm2
from tokenizers import AddedToken, Regex, pre_tokenizers

# What the tokenizers of these families cut texts by, before bytes are merged.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHATML = "<|im_end|> <|endoftext|> <|im_start|>"
_QWEN = f"{_CHATML} <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
_HERMES = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
_GLM = "<|endoftext|> <|user|> <|observation|> [gMASK] <sop> <|system|> <|assistant|>"
_GEMMA = (
    "<turn|> <|tool_response> <bos> <eos> <pad> <|turn> <|tool> <tool|> <|tool_call> <tool_call|>"
    ' <tool_response|> <|channel> <channel|> <|think|> <|"|> <|image|> <|audio|> <|video|>'
    " <|image> <image|>"
)
_LLAMA = (
    "<|eot_id|> <|eom_id|> <|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|>"
    " <|python_tag|>"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template and what its tokenizer has."""

    sha256: str
    renderer: str
    special: str
    """Special tokens, the end of the agent's turn first."""
    marks: str = ""
    """Further tokens, which are not special."""
    num_ends: int = 1
    """How many of the special tokens end a completion."""
    bos: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    has_thoughts: bool = True
    has_several: bool = True
    has_text: bool = True
    """A turn with calls may have text before them."""


_DATED = {"date_string": "26 Jul 2024"}
FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(
        sha256="a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
        renderer="qwen3",
        special=_QWEN,
        marks=_HERMES,
    ),
    "qwen3_instruct_2507": Family(
        sha256="64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
        # Its template has no thoughts, as that one.
        renderer="qwen3-vl",
        special=_QWEN,
        marks=_HERMES,
        has_thoughts=False,
    ),
    "qwen3_vl": Family(
        sha256="3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4",
        renderer="qwen3-vl",
        special=_QWEN,
        marks=_HERMES,
        has_thoughts=False,
    ),
    "qwen3_5_think": Family(
        sha256="a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
        renderer="qwen3.5",
        special=_QWEN,
        marks=_HERMES,
    ),
    "qwen3_5_nothink": Family(
        sha256="273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
        renderer="qwen3.5",
        special=_QWEN,
        marks=_HERMES,
        options={"enable_thinking": True},
    ),
    "qwen3_6": Family(
        sha256="e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259",
        renderer="qwen3.6",
        special=_QWEN,
        marks=_HERMES,
    ),
    "qwen3_8": Family(
        sha256="c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041",
        renderer="qwen3.8",
        special=_QWEN,
        marks=_HERMES,
    ),
    "nemotron_3_nano": Family(
        sha256="ab7813c3abdd9cb655905a410728b26c7884eca45ddfab8d9f931553485a7862",
        renderer="nemotron-3",
        special=_CHATML,
        marks=_HERMES,
    ),
    "nemotron_3_super": Family(
        sha256="575fb74f54ed264df9047d0ecce3c98938aae953fb4f50356675706264cbb68a",
        renderer="nemotron-3",
        special=_CHATML,
        marks=_HERMES,
    ),
    "nemotron_3_ultra": Family(
        sha256="82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc",
        renderer="nemotron-3-ultra",
        special=_CHATML,
        marks=_HERMES,
    ),
    "nemotron_3_5_lightning": Family(
        sha256="58933db77d3099b4f78c55a38347a72e1ea05b97d6bd8f38775303dc0194e0a9",
        renderer="nemotron-3-ultra",
        special=_CHATML,
        marks=_HERMES,
    ),
    "glm4moe": Family(
        sha256="44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
        renderer="glm-4.5",
        special=_GLM,
        marks=f"{_HERMES} <arg_key> </arg_key> <arg_value> </arg_value>",
        num_ends=3,
        has_text=False,
    ),
    "gemma4": Family(
        sha256="33204f1acb5bd0002713e16a593847f24ceeafe711ed88bda2a352dc996a3373",
        renderer="gemma4",
        special=_GEMMA,
        num_ends=2,
        bos="<bos>",
        has_text=False,
    ),
    "gemma4_v5": Family(
        sha256="0a2c8073c878ab1da004bee933a998606537bbb62016310352c7285c3f01c5b5",
        renderer="gemma4",
        special=_GEMMA,
        num_ends=2,
        bos="<bos>",
        has_text=False,
    ),
    "llama3_1": Family(
        sha256="e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
        renderer="llama-3",
        special=_LLAMA,
        num_ends=2,
        bos="<|begin_of_text|>",
        options=_DATED,
        has_thoughts=False,
        has_several=False,
        has_text=False,
    ),
    "llama3_2": Family(
        sha256="5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4",
        renderer="llama-3",
        special=_LLAMA,
        num_ends=2,
        bos="<|begin_of_text|>",
        options=_DATED,
        has_thoughts=False,
        has_several=False,
        has_text=False,
    ),
}


def template_of(name: str) -> str:
    """Returns the text of a template of TRL's wheel."""
    place = importlib.util.find_spec("trl")
    assert place is not None and place.origin is not None
    path = Path(place.origin).parent / "chat_templates" / f"{name}.jinja"
    text = path.read_text(encoding="utf-8")
    if name in FAMILIES:
        assert hashlib.sha256(text.encode()).hexdigest() == FAMILIES[name].sha256, name
    return text


@functools.cache
def tokenizer_of(name: str) -> Any:
    """Returns SmolLM2's words and merges with a family's tokens and its template."""
    family = FAMILIES[name]
    return tokenizer_with(template_of(name), family.special, family.marks, family.bos)


def tokenizer_with(template: str, special: str, marks: str = "", bos: str = "") -> Any:
    """Returns SmolLM2's words and merges with such tokens, the end of a turn first."""
    tokenizer = copy.deepcopy(smollm2())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytewise])
    added = [AddedToken(text, normalized=False, special=True) for text in special.split()]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    own = [AddedToken(text, normalized=False, special=False) for text in marks.split()]
    tokenizer.add_tokens(own)
    # SmolLM2's is a token of these families.
    tokenizer.unk_token = None
    tokenizer.eos_token = special.split()[0]
    if bos:
        tokenizer.bos_token = bos
    tokenizer.chat_template = template
    return tokenizer


def end_ids_of(name: str) -> list[int]:
    """Returns the tokens that end a completion."""
    family = FAMILIES[name]
    ends = family.special.split()[: family.num_ends]
    return [tokenizer_of(name).convert_tokens_to_ids(one) for one in ends]
