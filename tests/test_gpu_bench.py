"""`python -m benchmarks.gpu`: each part with tiny sizes on a CPU, and without pydantic; the sizes
and rows by hand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu
from benchmarks.card import correct, learning
from benchmarks.card.bench import Bench, check
from benchmarks.card.trees import Workload

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("part", [1, 2, 3, 4])
@pytest.mark.smoke
def test_each_part_runs_and_writes_its_rows(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with tiny sizes. Nothing is left out but the server: tests/serving has it."""
    monkeypatch.setenv("TREEGRAFT_VLLM_PYTHON", str(tmp_path / "no-python"))
    assert gpu.main([str(part), "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / f"part-{part}.jsonl").open()]
    assert rows and all(row["part"] == part for row in rows)
    without = [row for row in rows if row["value"] is None]
    assert all("vLLM server" in row["what"] and "vllm" in row["note"] for row in without)
    table = (tmp_path / f"part-{part}.md").read_text()
    assert all(row["what"] in table for row in rows)


@pytest.mark.smoke
def test_whatever_a_work_does_the_next_one_has_its_turn(tmp_path: Path) -> None:
    """One raises, one does not fit, one hangs, one is killed, one spoils the card: each is one row
    that says so, and each of the last three ends its process alone."""
    said: list[str] = []
    code = gpu.supervise("tests.faulty_part", 1, tmp_path, "cpu", 300.0, said.append)
    rows = [json.loads(line) for line in (tmp_path / "part-1.jsonl").open()]
    found = [(row["what"], row["value"], row["note"]) for row in rows]
    assert code == 1
    assert found[0] == ("good", 1.0, "")
    assert found[1] == ("before it raises", 3.0, "")
    assert found[2][:2] == ("raises", None)
    assert found[2][2].startswith("FAILED ValueError: no such shape, at faulty_part.py:")
    assert found[3] == ("does not fit", None, "out of memory: CUDA out of memory.")
    assert found[4][0] == "hangs"
    assert found[4][2].startswith("FAILED not over in time; it was at") and "_hangs" in found[4][2]
    assert found[5][0] == "is killed" and "FAILED ended by SIGSEGV at" in found[5][2]
    assert found[6][0] == "spoils" and "illegal memory access" in found[6][2]
    assert found[7] == ("good again", 2.0, "")
    assert len(found) == 8
    assert said[-1] == "failed: raises; hangs; is killed; spoils"


def test_no_work_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert gpu.supervise("tests.faulty_part", 1, tmp_path, "cpu", 4.0, lambda _: None) == 0
    rows = [json.loads(line) for line in (tmp_path / "part-1.jsonl").open()]
    assert len(rows) == 7
    assert all(row["note"] == "left out: 4 s are over" for row in rows)


WITHOUT = """
import sys, time
sys.modules["pydantic"] = None
from benchmarks.card import child
code = child.main("benchmarks.card.whole", "4", sys.argv[1], "cpu", "0", str(time.time()), "300")
assert "treegraft.settings.config" not in sys.modules
sys.exit(code)
"""


@pytest.mark.smoke
def test_a_machine_without_pydantic(tmp_path: Path) -> None:
    """Part 4 with engine, learner and models alone, in a process that cannot import it."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert '"pydantic": false' in done.stdout and "1.5B, 2 trees: update" in done.stdout
    assert "no pydantic here" in done.stdout


def test_without_a_card_full_sizes_are_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said: list[str] = []
    module = "benchmarks.card.correct"
    assert gpu.supervise(module, 1, tmp_path, "cuda", 60.0, said.append) == 2
    assert said == ["benchmarks.gpu: no work began (status 2)"]


def test_rows_are_written_at_once_and_time_ends_a_part(tmp_path: Path) -> None:
    bench = Bench(part=3, limit_s=-1.0, file=tmp_path / "rows.jsonl", is_tiny=True)
    check(bench, "a gap", 0.5, 1.0, "nats")
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1
    check(bench, "another", float("nan"), 1.0, "nats", "of 7")
    assert not bench.has_time("a third")
    with bench.measure("a fourth", "s"):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
    assert [row.note for row in bench.rows] == [
        "",
        "FAILED of 7",
        "left out: -1 s of the part are over",
        "out of memory: CUDA out of memory.",
    ]


@pytest.mark.parametrize("ratio", [1.3, 1.6, 3.3])
def test_a_workload_has_the_size_and_the_share_ratio(ratio: float) -> None:
    shape = Workload.of(8192, ratio).shape
    assert shape.num_unique == 8192
    assert shape.ratio == pytest.approx(ratio, rel=0.01)


def test_the_trajectories_apart_are_those_of_the_tree() -> None:
    load = Workload.of(96, 1.6)
    text = list(range(3, 500))
    (tree,), apart = load.trees(text), load.apart(text)
    paths = tree.trajectories()
    assert [one.trajectories()[0].token_ids for one in apart] == [path.token_ids for path in paths]
    found = [one.leaves[0].advantage for one in apart]
    assert found == [path.advantage for path in paths] and min(found) < 0 < max(found)


def test_units_of_the_last_place_by_hand() -> None:
    one, zero = torch.tensor([1.0, -1.0]), torch.zeros(2)
    assert correct.ulps(one, one) == 0.0
    assert correct.ulps(one.nextafter(zero), one) == 1.0
    # Through 0, whose two signs are one number.
    assert correct.ulps(zero.nextafter(one), zero.nextafter(-one)) == 2.0


@pytest.mark.parametrize(
    ("name", "broken", "row"),
    [
        ("philox_4x32", lambda words: words ^ 1, "noise: words unlike the CPU's"),
        ("philox_gumbels", lambda noise: noise + 0.01, "noise: farthest from the CPU's"),
    ],
)
def test_noise_that_is_off_on_the_device_fails(
    name: str, broken: Callable[[torch.Tensor], torch.Tensor], row: str, monkeypatch: Any
) -> None:
    """The first call of each pair is the device's."""
    right, calls = getattr(correct, name), itertools.count()

    def made(*given: Any) -> torch.Tensor:
        found = right(*given)
        return broken(found) if next(calls) == 0 else found

    monkeypatch.setattr(correct, name, made)
    bench = Bench(part=1, limit_s=60.0, is_tiny=True, say=lambda _: None)
    correct._noise(bench)
    assert [one.what for one in bench.rows if one.note.startswith("FAILED")] == [row]


def test_shards_that_do_not_fit_the_host_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """7,615,616,512 weights of 16 bytes are 122 GB."""
    monkeypatch.setattr(learning, "host_bytes", lambda: 100_000_000_000)
    bench = Bench(part=3, limit_s=60.0, say=lambda _: None)
    learning._offloaded(bench, "7B full", "qwen2.5-7b")
    (row,) = bench.rows
    assert row.value is None
    assert row.note == "left out: 122 GB of host memory needed, 100 GB free"
