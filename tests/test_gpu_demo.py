"""`python -m benchmarks.gpu_demo` on a CPU: in pieces, with its rows and its curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu_demo
from benchmarks.card.sums import Sums


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "demo.jsonl").read_text().splitlines()]


@pytest.mark.smoke
def test_a_run_in_pieces_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece without time for another update ends after the one under way; the next one makes the
    others, from its checkpoint."""
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--minutes", "20"]
    monkeypatch.setattr(gpu_demo, "GRACE_FRAC", 1.0)
    assert gpu_demo.main(arguments) == 0
    assert [row.get("note") for row in rows_of(tmp_path)] == [None, "begun"]
    monkeypatch.undo()
    assert gpu_demo.main(arguments) == 0
    rows = rows_of(tmp_path)
    assert [row["update"] for row in rows if "update" in row] == [0, 1, 2, 3]
    assert rows[-1]["note"] == "went on" and rows[-1]["updates"] == 3
    assert all("reward/mean" in row for row in rows if row.get("update"))
    assert "reward/mean" in (tmp_path / "demo.md").read_text()


def test_a_failure_is_one_row(tmp_path: Path) -> None:
    """A folder without weights: the first line of the error, and where it was raised."""
    arguments = [str(tmp_path / "no-weights"), "--device", "cpu", "--out", str(tmp_path)]
    assert gpu_demo.main(arguments) == 1
    (row,) = rows_of(tmp_path)
    assert row["note"].startswith("FAILED ModelError: ") and ".py:" in row["note"]


def test_the_curve_by_hand() -> None:
    """Of 0, 1/2 and 1, in nine heights: none, half, all."""
    metrics = [{"reward/mean": value, "time/update_s": 2.0} for value in (0.0, 0.5, 1.0)]
    text = gpu_demo.curve(metrics)
    assert "| reward/mean | 0.000 | 1.000 |  ▄█ |" in text
    assert "| median seconds of update | 2.0 | | |" in text


def test_the_expert_of_the_sums_is_right() -> None:
    tasks = Sums(seed=0, num_train=50, num_eval=5)
    for task in [*tasks.train_tasks(), *tasks.eval_tasks()]:
        first, last = tasks.expert(task, 0)
        left, _, right, sign, rest = first.calls[0].body[len("print(") : -1].split()
        value = int(left) * int(right) + (int(rest) if sign == "+" else -int(rest))
        assert task.reference == (str(value),) == (last.answer,)
