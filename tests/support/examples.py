"""How many examples hypothesis tries of a law that names a number of its own."""

from __future__ import annotations

from hypothesis import settings

WHOLE = 100
"""The number of laws that name none, with the slow tests; see tests/conftest.py."""


def at_most(num: int) -> settings:
    """Returns the settings of a law with `num` examples: with the slow tests all, else a third."""
    is_whole = settings().max_examples >= WHOLE
    return settings(max_examples=num if is_whole else -(-num // 3), deadline=None)
