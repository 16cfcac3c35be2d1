"""Chat templates of our own, for models whose own cannot show tools."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from treegraft.core.errors import SettingError, nearest

SHIPPED: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "plain": (),
}
"""Their names, each with the tokens that a tokenizer must have for it."""
OWN = "own"
"""Names the model's own."""


def shipped_template(name: str) -> str:
    """Returns the text of a template: its marks, and the conversation where it has none itself."""
    folder = resources.files(__package__) / "templates"
    parts = (name,) if name == "mistral" else (name, "conversation")
    return "".join((folder / f"{part}.jinja").read_text("utf-8") for part in parts)


def fitting(tokenizer: Any) -> Iterator[str]:
    """Yields the names of templates that fit a tokenizer, the likeliest first; "plain" only where
    it has no template of its own, since it is foreign to a model that has learnt other marks."""
    for name, marks in SHIPPED.items():
        encoded = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
        unknown = getattr(tokenizer, "unk_token_id", None)
        has_marks = all(len(ids) == 1 and ids[0] != unknown for ids in encoded)
        if has_marks and (marks or not tokenizer.chat_template):
            yield name


def use_template(name: str | None, tokenizer: Any) -> None:
    """Gives the tokenizer the template that `format.chat_template` names; a checkpoint then has
    it. None and "own" leave the model's.

    Raises:
        SettingError: neither a name of ours nor a file that can be read.
    """
    if name is None or name == OWN:
        return
    if name in SHIPPED:
        tokenizer.chat_template = shipped_template(name)
        return
    try:
        text = Path(os.path.expandvars(name)).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"format.chat_template: got '{name}', which cannot be read ({error}); expected a Jinja"
            f" file, '{OWN}', or one of {', '.join(SHIPPED)}.{nearest(name, (OWN, *SHIPPED))}",
            code="template-unreadable",
        ) from error
    tokenizer.chat_template = text
