"""The waits under way, by whom they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from treegraft.core.spans import span


@dataclass(slots=True)
class Watch:
    """The waits under way, by owner: {"engine": 40, "tool python": 2}."""

    waits: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def waiting(self, owner: str) -> Iterator[None]:
        """Counts one wait for the time of the block."""
        self.waits[owner] += 1
        try:
            with span(owner):
                yield
        finally:
            self.waits[owner] -= 1

    def __str__(self) -> str:
        """Returns "waiting for engine (40), tool python (2)"; "" where nothing is waited for."""
        waits = [f"{owner} ({count})" for owner, count in sorted(self.waits.items()) if count]
        return f"waiting for {', '.join(waits)}" if waits else ""
