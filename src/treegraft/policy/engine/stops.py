"""Finding stop texts in tokens: only a token that contains a stop's last character can complete
it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from treegraft.core.interfaces import Tokenizer

TAIL = 4
"""A stop of n characters lies within the last n + TAIL tokens, each of which has at least one
character or is skipped."""


class StopFinder:
    """Answers whether the last token completes one of the stop texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @functools.cached_property
    def _pieces(self) -> list[str]:
        # Once for the whole vocabulary: decoding the tail for every token would take longer than
        # sampling it.
        return [self._tokenizer.decode([index]) for index in range(len(self._tokenizer))]

    def ends_with_any(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Returns whether the last token completes a stop text; characters after the stop inside
        that token do not matter."""
        token = token_ids[-1]
        # Models pad their vocabulary beyond the tokenizer's.
        last = self._pieces[token] if token < len(self._pieces) else ""
        for stop in stops:
            if stop[-1] not in last:
                continue
            tail = token_ids[-(len(stop) + TAIL) :]
            with_last, before = (self._tokenizer.decode(list(ids)) for ids in (tail, tail[:-1]))
            # A stop that was there before was completed by an earlier token.
            if stop in with_last and stop not in before:
                return True
        return False
