"""Finding stop texts in tokens: only a token that contains a stop's last character can complete
it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from treegraft.core.interfaces import Tokenizer
from treegraft.core.types import Sampling, StopReason

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

    def is_in_grace(self, token_ids: Sequence[int], sampling: Sampling) -> bool:
        """Returns whether a final text is complete: one more token, which may be the end token, and
        the completion is over."""
        has_any = bool(token_ids and sampling.final)
        return has_any and self.ends_with_any(token_ids, sampling.final)

    def first_end(
        self,
        token_ids: Sequence[int],
        begin: int,
        sampling: Sampling,
        end_ids: Collection[int],
        limit: int,
    ) -> tuple[int, StopReason] | None:
        """Returns (number of tokens, why) of the first end of a completion among its tokens from
        number `begin` on; None while it goes on."""
        seen = list(token_ids[:begin])
        for token in token_ids[begin:]:
            seen.append(token)
            if (reason := self.reason(seen, sampling, end_ids, limit)) is not None:
                return len(seen), reason
        return None

    def reason(
        self, token_ids: Sequence[int], sampling: Sampling, end_ids: Collection[int], limit: int
    ) -> StopReason | None:
        """Returns why a completion ends with its last token; None while it goes on.

        Args:
            token_ids: all of the completion so far; no shorter part of it has ended.
            limit: longest completion, in tokens.
        """
        if token_ids[-1] in end_ids:
            return StopReason.END
        if self.is_in_grace(token_ids[:-1], sampling):
            return StopReason.STOP
        if sampling.stop and self.ends_with_any(token_ids, sampling.stop):
            return StopReason.STOP
        # Last: an end or a stop with the last allowed token still counts.
        return StopReason.LENGTH if len(token_ids) >= limit else None
