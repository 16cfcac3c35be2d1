"""`python -m benchmarks.card`: each part with tiny sizes on a CPU, works that fail in every way,
and what a bare machine is given."""

from __future__ import annotations

import itertools
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.card import __main__ as card
from benchmarks.card import carry, correct, learning, runs
from benchmarks.card.__main__ import PARTS, Part
from benchmarks.card.bench import Bench, check
from benchmarks.flops import CARDS, forward_flops, known_card
from benchmarks.workloads import workloads
from tests.support import faulty_part

from treegraft.policy.shapes import ModelShape
from treegraft.settings.load import load_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ROOT = Path(__file__).parents[2]
FAULTY = {"faulty": Part("tests.support.faulty_part:works", 300.0)}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("part", [name for name in PARTS if name != "agent"])
@pytest.mark.smoke
def test_each_part_runs_and_writes_its_rows(part: str, tmp_path: Path) -> None:
    """On a CPU with tiny sizes, within the limit of the part, and nothing is left out."""
    assert card.main(["--only", part, "--device", "cpu", "--out", str(tmp_path)]) == 0
    machine, *rows = rows_of(tmp_path)
    assert machine["what"] == "machine" and "torch" in machine["note"]
    assert rows and all(row["part"] == part for row in rows)
    assert all("left out" not in row["note"] for row in rows)
    assert rows[-1]["at_s"] < PARTS[part].limit_s
    table = (tmp_path / "table.md").read_text()
    assert all(row["what"] in table for row in rows)


def test_the_calls_have_every_part_once() -> None:
    """Two calls of at most ten minutes and three together of less than fifteen, with what a machine
    needs to start and to send."""
    assert [name for call in card.CALLS for name in call] == list(PARTS)
    limits = [sum(PARTS[name].limit_s for name in call) for call in card.CALLS]
    assert max(limits) < 600 and sum(limits) <= 720


@pytest.mark.smoke
def test_whatever_a_work_does_the_next_one_has_its_turn(tmp_path: Path) -> None:
    """One raises, one does not fit, one hangs, one is killed, one spoils the card, one hangs at the
    end: each is one row that says so, and each of the last four ends its process alone."""
    said: list[str] = []
    code = card.supervise(FAULTY, tmp_path, "cpu", 300.0, said.append)
    found = [(row["what"], row["value"], row["note"]) for row in rows_of(tmp_path)[1:]]
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
    assert found[8][0] == "hangs at the end" and "FAILED not over in time" in found[8][2]
    assert len(found) == 9
    assert said[-1] == "failed: raises; hangs; is killed; spoils; hangs at the end"


def test_no_work_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert card.supervise(FAULTY, tmp_path, "cpu", 4.0, lambda _: None) == 0
    rows = rows_of(tmp_path)[1:]
    assert len(rows) == 8
    assert all(row["note"] == "left out: the 300 s are over" for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_full_sizes_are_refused(tmp_path: Path) -> None:
    said: list[str] = []
    assert card.supervise(FAULTY, tmp_path, "cuda", 60.0, said.append) == 2
    assert said == ["benchmarks.card: no work began (status 2)"]


def test_rows_are_written_at_once_and_time_ends_a_part(tmp_path: Path) -> None:
    bench = Bench(ends_s=-1.0, file=tmp_path / "rows.jsonl", is_tiny=True)
    check(bench, "a gap", 0.5, 1.0, "nats")
    assert len(rows_of(tmp_path)) == 1
    check(bench, "another", float("nan"), 1.0, "nats", "of 7")
    assert not bench.has_time("a third")
    with bench.measure("a fourth", "s"):
        faulty_part.does_not_fit(bench)
    assert [row.note for row in bench.rows] == [
        "",
        "FAILED of 7",
        "left out: the time of the part is over",
        "out of memory: CUDA out of memory.",
    ]


def test_operations_of_a_token_by_hand() -> None:
    # One layer: query and output 4 x 4, key and value 4 x 2, three of 4 x 6, two norms; 10 words,
    # not tied, and a last norm.
    shape = ModelShape(
        num_weights=32 + 16 + 72 + 8 + 80 + 4,
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        hidden_size=4,
        vocab_size=10,
        num_heads=2,
        intermediate_size=6,
    )
    # 2 a weight; half of the tokens have logits; scores and values of 2 heads of 2 over 7 tokens.
    assert forward_flops(shape, 7, 0.5) == 2 * 132 + 0.5 * 2 * 40 + 4 * 4 * 7 == 416
    assert known_card("NVIDIA H100 80GB HBM3") is CARDS["H100"]
    assert known_card("NVIDIA GeForce RTX 4090") is None


def test_the_numbers_of_a_cell_by_hand() -> None:
    """Packed in half the time of the rows, at 86,400 of 20,700 tokens: twice as fast, of at most as
    many times as the rows take operations."""
    bench = Bench(ends_s=60.0, is_tiny=True)
    load, shape = workloads()["D"], bench.shape("qwen2.5-1.5b")
    found = learning.cell(bench, shape, load, 10.0, 20.0)
    assert found["raw_tokens_s"] == 8640.0 and found["unique_tokens_s"] == 2070.0
    most = learning.operations(shape, load.flat) / learning.operations(shape, load.unique)
    assert found["times_rows"] == 2.0 and found["limit_frac"] == pytest.approx(2.0 / most)
    assert "mfu" not in found and "peak_gb" not in found


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_the_settings_of_the_runs_are_those_of_recipes(is_rehearsal: bool) -> None:
    """Those of full size too, which no test trains."""
    tiny = load_config(ROOT / runs.TINY_RECIPE, runs.tiny_settings(is_rehearsal))
    agent = load_config(ROOT / runs.AGENT_RECIPE, runs.agent_settings(is_rehearsal))
    assert tiny.explore.explorers == ["graft"] and agent.explore.explorers == ["entropy"]


def test_the_curve_by_hand() -> None:
    """Of 0, 1/2 and 1, in nine heights: none, half, all."""
    assert runs.curve([0.0, 0.5, 1.0]) == " ▄█ from 0 to 1"


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of both machines."""
    monkeypatch.setattr(carry, "PACKED", tmp_path / "packed")
    monkeypatch.setattr(carry, "ROOT", tmp_path)
    for name in ("site", "model"):
        monkeypatch.setattr(carry, name.upper(), tmp_path / "home" / name)
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(range(250)) * 4)
    monkeypatch.setattr(carry, "_weights", lambda: weights)
    wheel = tmp_path / "treegraft_no_such_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("treegraft_no_such_package.py", "VALUE = 7")
    present = tmp_path / "torch-1.0-py3-none-any.whl"
    shutil.copy(wheel, present)
    monkeypatch.setattr(carry, "_wheels", lambda _: [wheel, present])
    monkeypatch.setattr(carry, "_tokenizer", lambda *_: [])
    monkeypatch.setattr(carry, "_without_tokenizer", lambda source, _: source)
    monkeypatch.setattr(carry, "_tree_bytes", lambda: 1000)


@pytest.mark.usefixtures("_elsewhere")
def test_what_travels_fits_and_comes_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 bytes of weights and a limit that leaves room for some 400 of them a call: three
    pieces, each call within the limit, whole when the last has come; of wheels only what is missing
    is taken."""
    small = sum(file.stat().st_size for file in carry._wheels(tmp_path)) + 92
    monkeypatch.setattr(carry, "MOST", 1000 + small + 400)
    carry.pack([("facts",), ("tiny",), ("agent",)])
    assert "--only facts" in capsys.readouterr().out
    folders = sorted(carry.PACKED.glob("carry-*"))
    assert len(folders) == 3
    assert all(carry._folder_bytes(folder) + 1000 <= carry.MOST for folder in folders)
    for folder in folders:
        assert not (carry.MODEL / carry.WEIGHTS).exists()
        away = folder.rename(tmp_path / folder.name)
        for other in carry.PACKED.glob("carry-*"):
            other.rename(tmp_path / f"later-{other.name}")
        away.rename(folder)
        carry.unpack()
        shutil.rmtree(folder)
        for other in tmp_path.glob("later-*"):
            other.rename(carry.PACKED / other.name.removeprefix("later-"))
    assert (carry.MODEL / carry.WEIGHTS).read_bytes() == bytes(range(250)) * 4
    assert [file.name for file in carry.SITE.iterdir()] == ["treegraft_no_such_package.py"]


def test_a_machine_that_lacks_a_package_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(carry, "PACKED", tmp_path)
    monkeypatch.setattr(carry, "SITE", tmp_path / "site")
    monkeypatch.setattr(carry, "_is_here", lambda name: name != "pydantic")
    assert card.main(["--only", "facts", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "pydantic cannot be imported here" in said and "--pack" in said
    (tmp_path / "site/pydantic").mkdir(parents=True)
    assert carry.lacking() == []


@pytest.mark.usefixtures("_elsewhere")
def test_weights_that_fit_into_no_call_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = sum(file.stat().st_size for file in carry._wheels(tmp_path))
    monkeypatch.setattr(carry, "MOST", 1000 + wheels + 500)
    with pytest.raises(SystemExit, match="fit into no call"):
        carry.pack([("facts",)])


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
    bench = Bench(ends_s=60.0, is_tiny=True, say=lambda _: None)
    correct._noise(bench)
    assert [one.what for one in bench.rows if one.note.startswith("FAILED")] == [row]
