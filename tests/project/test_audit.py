"""The page on security tells the truth about tests and versions."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import audit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def version(text: str) -> tuple[int, ...]:
    numbers = [int(part) for part in text.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def test_no_lower_bound_and_no_pin_is_below_what_was_checked_by_hand() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| ([\d.]+) \|$", PAGE, re.M)
    assert len(rows) == 9
    floors = audit.floors()
    pins = audit.pins()
    for name, fixed in rows:
        assert version(floors[name]) >= version(fixed), name
        assert name not in pins or version(pins[name]) >= version(fixed), name
        assert name not in pins or version(pins[name]) >= version(floors[name]), name


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert named
    assert [one for one in named if not (ROOT / one).is_file()] == []
