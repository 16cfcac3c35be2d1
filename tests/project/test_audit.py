"""The page on security tells the truth about tests and versions, and `make audit` about holes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks import audit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def version(text: str) -> tuple[int, ...]:
    numbers = [int(part) for part in text.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def test_no_lower_bound_and_no_pin_is_below_what_was_checked_by_hand() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| ([\d.]+) \|$", PAGE, re.M)
    assert len(rows) == 9
    floors, pins = audit.floors(), audit.pins()
    for name, fixed in rows:
        assert version(floors[name]) >= version(fixed), name
        assert name not in pins or version(pins[name]) >= version(fixed), name
        assert name not in pins or version(pins[name]) >= version(floors[name]), name


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert named
    assert [one for one in named if not (ROOT / one).is_file()] == []


def test_bounds_of_requirements() -> None:
    floors = audit.floors()
    assert floors["ray"] == "2.60" and floors["trl"] == "1.16" and "treegraft" not in floors
    assert audit.pins()["torch"].count(".") == 2


ANSWER = {
    "dependencies": [
        {"name": "good", "version": "1.0", "vulns": []},
        {"name": "bad", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]},
        {"name": "far", "skip_reason": "not found"},
    ]
}


def stand_in(tmp_path: Path, says: str) -> str:
    """Returns a command that answers so, as pip-audit."""
    path = tmp_path / "pip-audit"
    path.write_text(f"#!{sys.executable}\nprint({says!r})\n")
    path.chmod(0o755)
    return str(path)


def test_holes_are_told_from_what_was_not_asked(tmp_path: Path) -> None:
    found = audit.asked(stand_in(tmp_path, json.dumps(ANSWER)), {"good": "1.0"}, tmp_path / "list")
    assert found == (["bad 2.0: CVE-1, fixed in 2.1"], ["far"])
    assert (tmp_path / "list").read_text() == "good==1.0\n"


@pytest.mark.parametrize(
    ("says", "code"),
    [
        (json.dumps(ANSWER), 1),
        (json.dumps({"dependencies": ANSWER["dependencies"][:1]}), 0),
        ("no connection", audit.UNREACHED),
    ],
)
def test_the_exit_code_tells_a_hole_from_a_database_that_is_away(
    tmp_path: Path, says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(stand_in(tmp_path, says)) == code
    assert ("docs/security.md" in capsys.readouterr().out) is (code == audit.UNREACHED)
