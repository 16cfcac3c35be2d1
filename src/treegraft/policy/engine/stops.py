"""Finding stop texts in tokens: only a token that contains a stop's last character can complete
it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np

from treegraft.core.interfaces import Tokenizer
from treegraft.core.types import Sampling, StopReason

TAIL = 4
"""A stop of n characters lies within the last n + TAIL tokens, each of which has at least one
character or is skipped."""


class StopFinder:
    """Answers whether the last token completes one of the stop texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tables: dict[tuple[tuple[str, ...], frozenset[int]], np.ndarray] = {}

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
        number `begin` on; None while it goes on. The same as `reason` after each of them, but only
        those are looked at that can be an end."""
        texts = (*sampling.stop, *sampling.final)
        suspects = self._suspects(texts, frozenset(end_ids))
        new = np.asarray(token_ids[begin:], dtype=np.int64)
        found = np.flatnonzero(suspects[np.minimum(new, len(suspects) - 1)]) + begin
        # A final text leaves room for one more token.
        late = {begin, *(found + 1).tolist()} if sampling.final else set()
        width = max(map(len, texts), default=0) + TAIL + 2
        for place in sorted({*found.tolist(), *late, max(begin, limit - 1)}):
            if place >= len(token_ids):
                break
            tail = token_ids[max(0, place + 1 - width) : place + 1]
            room = len(tail) + (place + 1 < limit)
            if (reason := self.reason(tail, sampling, end_ids, room)) is not None:
                return place + 1, reason
        return None

    def _suspects(self, texts: tuple[str, ...], end_ids: frozenset[int]) -> np.ndarray:
        """[vocabulary] which tokens may be a completion's last; its last entry stands for all
        beyond the tokenizer's."""
        if (texts, end_ids) not in self._tables:
            lasts = {text[-1] for text in texts}
            table = np.zeros(max(len(self._pieces), *end_ids, 0) + 2, dtype=np.bool_)
            table[: len(self._pieces)] = [not lasts.isdisjoint(piece) for piece in self._pieces]
            table[list(end_ids)] = True
            self._tables[texts, end_ids] = table
        return self._tables[texts, end_ids]

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
        return StopReason.LENGTH if len(token_ids) >= limit else None
