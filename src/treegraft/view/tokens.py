"""Token ids as texts, by the tokenizer in the run's checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer

from treegraft.core.files import read_inside

_UNKNOWN = "\ufffd"
_LONGEST = 8
"""Tokens that may make one character together."""


class TokenTexts:
    """The texts of a run's tokens. A copied folder without checkpoints has no tokenizer, only
    ids."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None
        self._known: dict[int, str] = {}

    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer of any checkpoint: it is the same throughout a run, and a live run has no
        checkpoint at first."""
        if self._loaded is None:
            # Of our checkpoints, or of those that TRL's trainer saves.
            places = ("checkpoints/*/tokenizer.json", "checkpoint-*/tokenizer.json")
            for path in sorted(one for place in places for one in self._run_dir.glob(place)):
                # The library raises plain exceptions; another checkpoint may be whole.
                with suppress(Exception):
                    found = read_inside(path, self._run_dir).decode()
                    self._loaded = Tokenizer.from_str(found)
                    break
        return self._loaded

    @property
    def is_there(self) -> bool:
        """Whether there is a tokenizer."""
        with self._lock:
            return self._tokenizer() is not None

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """Returns one text per token, None without a tokenizer.

        Where several tokens make one character, the first gets it and the others are empty.
        """
        with self._lock:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                return None
            for token in set(token_ids) - self._known.keys():
                self._known[token] = self._alone(tokenizer, token)
            texts = [self._known[token] for token in token_ids]
            place = 0
            while place < len(texts):
                if _UNKNOWN in texts[place]:
                    place += self._join(tokenizer, token_ids, texts, place)
                else:
                    place += 1
            return texts

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens together, special ones included; ids without a tokenizer."""
        with self._lock:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                return " ".join(f"#{token}" for token in token_ids)
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _alone(self, tokenizer: Tokenizer, token: int) -> str:
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        if tokenizer.decoder is None:
            # Without a decoder pieces are joined by spaces.
            return f"{text} "
        # A decoder of whole texts strips the space that begins a word.
        begins_word = (tokenizer.id_to_token(token) or "").startswith("\u2581")
        return f" {text}" if begins_word and not text.startswith(" ") else text

    @staticmethod
    def _join(tokenizer: Tokenizer, token_ids: Sequence[int], texts: list[str], place: int) -> int:
        """Assigns a character of several tokens to the first of them; returns their number."""
        for count in range(2, min(_LONGEST, len(texts) - place) + 1):
            ids = list(token_ids[place : place + count])
            joined = str(tokenizer.decode(ids, skip_special_tokens=False))
            if _UNKNOWN not in joined:
                texts[place : place + count] = [joined] + [""] * (count - 1)
                return count
        return 1
