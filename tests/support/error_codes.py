"""Errors of ours in tests: told by their codes, so that messages can be edited."""

from __future__ import annotations

import re

import pytest

from treegraft.core.errors import TreegraftError


def raises_code(
    code: str, *settings: str, match: str = "", kind: type[TreegraftError] = TreegraftError
) -> pytest.RaisesExc[TreegraftError]:
    """Expects an error of ours, as `pytest.raises` does.

    Args:
        code: its code.
        settings: dotted names that it has to be about, among others.
        match: a pattern that its message has to hold; only where the sentence is the point.
        kind: its class, where that is the point.
    """

    def fits(error: TreegraftError) -> bool:
        assert error.code == code, f"expected the code {code}, got {error.code}: {error}"
        assert {*settings} <= {*error.settings}, f"{settings} are not in {error.settings}"
        assert re.search(match, str(error)), f"expected {match} in: {error}"
        return True

    return pytest.raises(kind, check=fits)
