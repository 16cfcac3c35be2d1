"""`python -m benchmarks.card`: each part with tiny sizes on a CPU, and its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.card import __main__ as card
from benchmarks.card import runs
from benchmarks.card.__main__ import PARTS
from benchmarks.flops import CARDS, forward_flops, known_card

from treegraft.policy.shapes import ModelShape
from treegraft.settings.load import load_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ROOT = Path(__file__).parents[2]


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
        inner_width=6,
    )
    # 2 a weight; half of the tokens have logits; scores and values of 2 heads of 2 over 7 tokens.
    assert forward_flops(shape, 7, 0.5) == 2 * 132 + 0.5 * 2 * 40 + 4 * 4 * 7 == 416
    assert known_card("NVIDIA H100 80GB HBM3") is CARDS["H100"]
    assert known_card("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_the_settings_of_the_runs_are_those_of_recipes(is_rehearsal: bool) -> None:
    """Those of full size too, which no test trains."""
    tiny = load_config(ROOT / runs.TINY_RECIPE, runs.tiny_settings(is_rehearsal))
    agent = load_config(ROOT / runs.AGENT_RECIPE, runs.agent_settings(is_rehearsal))
    assert tiny.explore.explorers == ["graft"] and agent.explore.explorers == ["entropy"]
