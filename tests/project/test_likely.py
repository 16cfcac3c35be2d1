"""`python -m benchmarks.likely`: errors and changed decisions by hand, and a run of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks import likely
from benchmarks.likely import Pair, Path


def path_of(first: tuple[float, float], after: tuple[float, float]) -> Path:
    """Of one token a piece, its entropies (exact, likely)."""
    pieces = [Pair(np.array([exact]), np.array([top])) for exact, top in (first, after)]
    return Path((0, "t"), pieces[0], pieces[1], np.array([0.5, 2.0]))


def test_errors_by_hand() -> None:
    found = likely.errors([path_of((1.0, 0.75), (3.0, 2.0))])
    assert found["tokens"] == 2 and found["entropy_mean"] == 2.0
    assert found["missed_mean"] == 0.625 and found["missed_worst"] == 1.0
    assert found["bound_mean"] == 1.25 and found["bound_least_room"] == 0.25


def test_a_decision_changes_where_the_rise_is_in_what_is_missed() -> None:
    """Exact entropies rise by .1, those of the likely tokens fall by .3; the other path falls by
    both."""
    paths = [path_of((2.0, 1.9), (2.1, 1.6)), path_of((2.0, 1.9), (1.0, 0.9))]
    assert likely.changes(paths, "threshold", 1.0) == (1, 1)


@pytest.mark.slow
def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Entropies of the likely tokens are never above the exact ones."""
    assert likely.main(["--questions", "2", "--starts", "1"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["tokens"] > 0 and 0.0 < rows[0]["missed_mean"] < rows[0]["missed_worst"]
    assert rows[0]["bound_least_room"] > -1e-9
    assert len(rows) == 5
