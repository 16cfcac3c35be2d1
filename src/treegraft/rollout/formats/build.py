"""From [format] to a format."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from treegraft.core.errors import about
from treegraft.core.interfaces import Format, Tool
from treegraft.core.registry import find
from treegraft.rollout.formats.answers import AnswerRule
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.markup import FormatOptions
from treegraft.rollout.formats.shipped import fitting, shipped_template
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.formats.template import TemplateRefusal
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

    Where the settings name no chat template and the tokenizer's own cannot be used, the tokenizer
    gets one of ours that fits.

    Raises:
        SettingError: a tool that cannot be a tag, or a chat template that the chat format cannot
            use.
    """
    options = FormatOptions(
        system_prompt=settings.system_prompt,
        require_think=settings.require_think,
        require_boxed=settings.require_boxed,
        answer=AnswerRule(
            settings.answer, settings.answer_pattern or "", finds_numbers=settings.kind == "chat"
        ),
        max_context=max_context,
        end_ids=end_ids,
        mentions_retrieval=mentions_retrieval,
        thoughts=settings.thoughts,
    )
    if settings.kind == "tags":
        return TagsFormat(tokenizer, tools, **options)
    if settings.kind != "chat":
        with about("format.kind"):
            maker = find(settings.kind, {}, "format", "format.kind")
            # Other makers need not know them.
            more = {"template_options": found} if (found := settings.template_options) else {}
            own: Format = maker(tokenizer, tools, **more, **options)
        return own
    build = partial(
        ChatFormat, tokenizer, tools, template_options=settings.template_options, **options
    )
    try:
        return build()
    except TemplateRefusal as refusal:
        if settings.chat_template is None:
            own = tokenizer.chat_template
            for name in list(fitting(tokenizer)):
                tokenizer.chat_template = shipped_template(name)
                with suppress(TemplateRefusal):
                    form = build()
                    form.notes = (
                        f"{refusal.reason}. Treegraft's own template '{name}' takes its place;"
                        " format.chat_template can name another.",
                    )
                    return form
            tokenizer.chat_template = own
        raise
