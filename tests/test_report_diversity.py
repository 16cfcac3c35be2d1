"""Diversity in reports: clusters, distances and radii by hand, even samples; and how much of a
large run is in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.test_view_large import write_large_run

pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed: pip install 'treegraft[report]'"
)

from treegraft.view.report.diversity import (
    Reservoir,
    choose_encoder,
    count,
    distances,
    embed,
    phase_of,
    project,
    radius_of,
)
from treegraft.view.report.trees import Seen

MOST_MB = 400
"""What a report on a large run may take: matplotlib, scikit-learn and a line of trees, not the
run."""


def seen(number: int) -> Seen:
    return Seen(1, "g", False, number, 0, 0, 1.0, "", "")


def on_circle(*degrees: float) -> np.ndarray:
    """Returns unit vectors at these angles: cosine distance 1 - cos of the angle between."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def test_distances_by_hand() -> None:
    assert distances(on_circle(0, 60, 180)) == pytest.approx(
        np.array([[0, 0.5, 2], [0.5, 0, 1.5], [2, 1.5, 0]]), abs=1e-6
    )


def test_clusters_by_hand() -> None:
    # Three near 0°, three near 90°, one alone at 200°; neighbours are at most 0.02 apart, that is
    # 11.5°.
    vectors = on_circle(0, 2, 4, 90, 92, 94, 200)
    found = count(vectors, ["a", "a", "b", "c", "d", "e", "f"], 0.02)
    assert (found.num, found.clusters, found.noise) == (7, 2, pytest.approx(1 / 7))
    # Only the first two are of one tree: 1 - cos 2° = 0.000609.
    assert found.within == pytest.approx(0.000609, abs=1e-5)
    assert found.distance == pytest.approx(
        distances(vectors)[np.triu_indices(7, 1)].mean(), abs=1e-6
    )
    # Two are too few for a cluster, however alike.
    assert (
        count(on_circle(0, 0), ["a", "b"], 0.5).clusters == 0
        and count(on_circle(0, 0), ["a", "b"], 0.5).within is None
    )
    # All alike: rounding must not tear them apart where the radius is 0.
    assert count(on_circle(*[37.0] * 9), ["a"] * 9, 0.0).clusters == 1


def test_the_radius_is_the_median_distance_to_the_second_neighbour() -> None:
    # At 0°, 10°, 30°: the second neighbours are 30°, 20° and 30° away.
    assert radius_of([on_circle(0, 10, 30)]) == pytest.approx(1 - np.cos(np.radians(30)), abs=1e-6)
    assert radius_of([on_circle(0, 10)]) == 0.0


def test_samples_are_even_and_repeat() -> None:
    reservoir, again = Reservoir(50), Reservoir(50)
    for number in range(1000):
        reservoir.add(seen(number))
        again.add(seen(number))
    numbers = [one.num_sampled for one in reservoir.items]
    assert len(set(numbers)) == 50 and numbers == [one.num_sampled for one in again.items]
    # Of 50 even draws from 0..999 the mean is 500 give or take 41.
    assert 330 < np.mean(numbers) < 670


def test_thirds_of_a_run() -> None:
    assert [phase_of(update, 9) for update in range(1, 10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (
        [phase_of(update, 2) for update in (1, 2)] == [0, 1]
        and phase_of(1, 1) == 0
        and phase_of(50, 40) == 2
    )


def test_projections() -> None:
    line = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [2.0, 2.0, 0.0]], np.float32)
    places, shares = project({"a": line[:1], "b": line[1:]})
    assert shares[0] == pytest.approx(1.0) and abs(
        places["b"][1, 0] - places["a"][0, 0]
    ) == pytest.approx(8**0.5)
    assert project({"a": line[:1], "b": line[:1]})[1] == (0.0, 0.0)


def test_the_hashing_encoder_sees_whole_trajectories() -> None:
    encoder, about = choose_encoder("hashing")
    texts = ["search a b a b is c c", "search a b a b is c d", "something else altogether", ""]
    vectors = embed(encoder, texts)
    assert np.linalg.norm(vectors[:3], axis=1) == pytest.approx(1, abs=1e-5) and "hashed" in about
    matrix = distances(vectors)
    assert matrix[0, 1] < 0.5 < matrix[0, 2]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has"
)
def test_a_large_run_is_streamed(tmp_path: Path) -> None:
    path = write_large_run(tmp_path / "large")
    code = (
        "import sys\nfrom treegraft.cli.main import main\nsys.argv = ['treegraft', 'report',"
        " sys.argv[1]]\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code,"
        " end.code\nassert 'torch' not in sys.modules\nprint(next(line for line in"
        " open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
        timeout=500,
    )
    most = int(done.stdout.split("VmHWM:")[1].split()[0]) / 1024
    print(f"largest memory {most:.0f} MB")
    assert most < MOST_MB
