"""Scripts of studies/figures: which steps count, and means by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies.figures.entropy_by_position import PROMPT, live_steps, main, mean_over_trees
from tests.support.viewed import grown_tree, write_run


def test_steps_that_show_the_policy_by_itself() -> None:
    """Not the graft, nor the answer below it, nor the branch."""
    found = [(step.id, after) for step, after in live_steps(grown_tree(1, "t/1"))]
    assert found == [
        ("0.0", PROMPT),
        ("0.1", PROMPT),
        ("0.1.0", "search"),
        ("0.1.0.0", "search"),
        ("0.2", PROMPT),
    ]


def test_means_and_intervals_over_trees_by_hand() -> None:
    # n = 2, 1 steps with S = 0.6, 0.9: m = 1.5 / 3. S - m n = -0.4, 0.4, so the error is
    # sqrt(2 / 1 * 0.32) / 3 = 0.8 / 3, and t(1, 0.975) = 12.7062.
    point = mean_over_trees(1, [[0.2, 0.4], [0.9]])
    assert (point.mean, point.num_steps, point.num_trees) == (pytest.approx(0.5), 3, 2)
    assert point.half == pytest.approx(12.7062 * 0.8 / 3, abs=1e-4)
    assert mean_over_trees(2, [[0.6]]).half == 0


def test_a_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(write_run(tmp_path / "run")))
    assert (tmp_path / "run" / "entropy-by-position.svg").is_file()
    assert f"\n{PROMPT}, 1, " in capsys.readouterr().out
