"""From [format] to a format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Format, Tool
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.markup import FormatOptions
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.settings.tasks import FormatSettings


def build_format(
    settings: FormatSettings,
    tokenizer: Any,
    tools: Sequence[Tool],
    *,
    max_context: int | None = None,
    end_ids: Sequence[int] | None = None,
    mentions_retrieval: bool = False,
) -> Format:
    """Returns the format of a recipe; the options beside the settings are those of `FormatOptions`.

    Raises:
        SettingError: a tool that cannot be a tag, or a chat template that the chat format cannot
            use.
    """
    options = FormatOptions(
        system_prompt=settings.system_prompt,
        require_think=settings.require_think,
        require_boxed=settings.require_boxed,
        max_context=max_context,
        end_ids=end_ids,
        mentions_retrieval=mentions_retrieval,
    )
    if settings.kind == "chat":
        return ChatFormat(tokenizer, tools, template_options=settings.template_options, **options)
    return TagsFormat(tokenizer, tools, **options)


def use_template(settings: FormatSettings, tokenizer: Any) -> None:
    """Gives the tokenizer the template that `format.chat_template` names, if any; a checkpoint then
    keeps it.

    Raises:
        SettingError: no such file.
    """
    if settings.chat_template is None:
        return
    path = Path(os.path.expandvars(settings.chat_template)).expanduser()
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"format.chat_template: got '{settings.chat_template}', which cannot be read ({error});"
            " expected a Jinja file."
        ) from error
