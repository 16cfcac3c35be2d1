"""Finding stop texts in tokens: only a token that contains a stop's last character can complete
it."""

from __future__ import annotations

from collections.abc import Sequence

from treegraft.core.interfaces import Tokenizer

TAIL = 4
"""A stop of n characters lies within the last n + TAIL tokens, each of which has at least one
character or is skipped."""


class StopFinder:
    """Answers whether the last token completes one of the stop texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str] | None = None

    def _piece(self, token: int) -> str:
        if self._pieces is None:
            self._pieces = [
                self._tokenizer.decode([index]) for index in range(len(self._tokenizer))
            ]
        return self._pieces[token] if token < len(self._pieces) else ""

    def ends_with_any(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Returns whether the last token completes a stop text; characters after the stop inside
        that token do not matter."""
        last = self._piece(token_ids[-1])
        for stop in stops:
            if stop[-1] not in last:
                continue
            tail = token_ids[-(len(stop) + TAIL) :]
            if stop in self._tokenizer.decode(list(tail)) and stop not in self._tokenizer.decode(
                list(tail[:-1])
            ):
                return True
        return False
