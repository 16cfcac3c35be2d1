"""Writes in the background: their order, and what a failure stops."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft import train
from treegraft.runs import recorder
from treegraft.runs.record import read_metrics, read_trees
from treegraft.runs.recorder import BackgroundWriter
from treegraft.runs.tree_files import write_trees


def test_writes_come_in_order_and_beside_the_caller() -> None:
    done: list[int] = []
    go = threading.Event()
    writer = BackgroundWriter()
    writer.submit(lambda: go.wait(10.0) and done.append(0))
    for n in range(1, 5):
        writer.submit(lambda n=n: done.append(n))  # type: ignore[misc]
    assert not done
    go.set()
    writer.drain()
    assert done == [0, 1, 2, 3, 4]
    writer.close()


def test_after_a_failure_nothing_is_written_and_every_call_says_so() -> None:
    done: list[str] = []
    writer = BackgroundWriter()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer.submit(fail)
    with pytest.raises(OSError, match="No space left"):
        writer.drain()
    with pytest.raises(OSError, match="No space left"):
        writer.submit(lambda: done.append("line"))
    writer.close()
    assert not done


def test_a_line_of_metrics_comes_after_its_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trees of the second update cannot be written: its line is missing, the first one's is
    there, and the run says what has failed."""
    settings = tiny(
        run={"num_updates": 4, "dir": str(tmp_path), "name": "run"},
        warmup={"num_steps": 4},
        eval={"every": 0, "at_start": False, "at_end": False},
        checkpoint={"every": 0},
    )

    def write(path: Path, trees: object) -> None:
        if path.name == "update-000002":
            raise OSError(28, "No space left on device")
        write_trees(path, trees)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder, "write_trees", write)
    with raises_code("not-written"):
        train(settings, display=False)
    assert [line["update"] for line in read_metrics(tmp_path / "run")] == [0, 1]
    assert len(read_trees(tmp_path / "run")) == 3
