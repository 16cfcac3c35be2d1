"""Token ids as texts, by the tokenizer in the run's checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer

from treegraft.core.files import read_inside


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
                    # From its text: by path the library would follow links out of the run.
                    self._loaded = Tokenizer.from_str(found)
                    break
        return self._loaded

    @property
    def is_there(self) -> bool:
        """Whether there is a tokenizer."""
        with self._lock:
            return self._tokenizer() is not None

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """Returns one text per token, None without a tokenizer; a token that is a part of a
        character alone has the sign for unknown ones."""
        with self._lock:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                return None
            for token in set(token_ids) - self._known.keys():
                self._known[token] = self._alone(tokenizer, token)
            return [self._known[token] for token in token_ids]

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
