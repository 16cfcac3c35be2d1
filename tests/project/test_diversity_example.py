"""The example that measures diversity: distances, radii and clusters by hand, and a run."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.viewed import write_run

from treegraft.runs.record import read_trees

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "diversity.py"


@functools.cache
def exported() -> dict[str, Any]:
    """The example's functions. Not at import: each process that collects the tests would load
    scikit-learn."""
    return runpy.run_path(str(EXAMPLE))


def clusters(distances: np.ndarray, radius: float) -> Any:
    return exported()["clusters"](distances, radius)


def on_circle(*degrees: float) -> np.ndarray:
    """Returns the distances of unit vectors at these angles: 1 - cos of the angle between."""
    angles = np.radians(degrees)
    found: np.ndarray = exported()["distances"](np.stack([np.cos(angles), np.sin(angles)], axis=1))
    return found


def test_distances_by_hand() -> None:
    wanted = np.array([[0, 0.5, 2], [0.5, 0, 1.5], [2, 1.5, 0]])
    assert on_circle(0, 60, 180) == pytest.approx(wanted, abs=1e-6)


def test_clusters_by_hand() -> None:
    # Three near 0°, three near 90°, one alone at 200°; neighbours are at most 0.02 apart, that is
    # 11.5°.
    assert clusters(on_circle(0, 2, 4, 90, 92, 94, 200), 0.02) == (2, pytest.approx(1 / 7))
    # Two are too few for a cluster, however alike.
    assert clusters(on_circle(0, 0), 0.5) == (0, 1.0)
    # All alike: rounding must not tear them apart where the radius is 0.
    assert clusters(on_circle(*[37.0] * 9), 0.0) == (1, 0.0)


def test_the_radius_is_the_median_distance_to_the_second_neighbour() -> None:
    # At 0°, 10°, 30°: the second neighbours are 30°, 20° and 30° away.
    assert exported()["radius_of"]([on_circle(0, 10, 30)]) == pytest.approx(
        1 - np.cos(np.radians(30))
    )


def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "first", note="hm")
    hybrid = read_trees(run)[0].trajectories()[0]
    assert (
        exported()["text_of"](hybrid)
        == "hm search e1 r1 r1 of e1 is e2 search e2 r2 r2 of e2 is e3 e3"
    )
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), str(run)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    # Four updates with one hybrid trajectory each, all alike.
    assert lines[0] == f"{run} hybrid: 4 trajectories, 1 clusters, 0% in none"
    assert lines[1].startswith(f"{run} on-policy: 4 trajectories, ")
