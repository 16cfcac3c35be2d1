"""The trees of a cluster are those of one process, whatever dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.nodes import Disturbed, Nodes, three_nodes
from tests.cluster.parts import needs_ray
from tests.cluster.worlds import LONGEST
from tests.support.tiny import differing, tiny

from treegraft.train import train

pytestmark = [needs_ray, pytest.mark.slow]

BRANCHED: Mapping[str, Any] = {
    "tasks": {"kind": "tests.cluster.worlds:SlowWorld"},
    "explore": {"explorers": ["entropy"], "num_leaves": 6, "entropy": {"num_starts": 3}},
}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with three_nodes(**{LONGEST: "2"}) as found:
        yield found


def single(folder: Path, **tables: Mapping[str, Any]) -> Path:
    """Returns the folder of a run in this process."""
    run = {"dir": str(folder), "name": "single", **tables.pop("run", {})}
    train(tiny(run=run, **tables), display=False)
    return folder / "single"


def others_than_settings(a: Path, b: Path) -> list[str]:
    """Returns the files in which two runs differ, but for the table [cluster] of their settings."""
    return [name for name in differing(a, b) if not name.endswith("config.json")]


def test_trees_are_the_same_whatever_dies(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough for the time that a lost node's engines take to stand again.
    tables = {**BRANCHED, "run": {"num_updates": 12}}
    monkeypatch.setenv(LONGEST, "0")
    expected = single(tmp_path, **tables)
    run = Disturbed.at(tmp_path, nodes.cluster.address, **tables)
    try:
        first = run.until(lambda: run.num_lines() > 0 and run.engines(), "an update")
        run.kill()
        run.until(lambda: run.num_lines() > 1, "an update")
        run.kill()
        run.until(lambda: run.num_lines() > 2, "an update")
        nodes.remove(run.engines()[0])
        nodes.add()
        run.until(
            lambda: len(run.engines()) == 3 and not {*first} & {*run.engines()}, "three new engines"
        )
        assert run.wait() == 0, run.log.read_text()
    finally:
        run.end()
    assert others_than_settings(expected, run.run) == []
    assert "is back" in run.log.read_text()
