"""`python -m benchmarks.speed`: parts from end to end with a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.speed.__main__ import bench_app
from typer.testing import CliRunner

from treegraft.policy.kernels.engine import kernels_for

KEYS = {"what", "against", "ratio", "ours", "theirs", "unit", "num_runs"}


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Runs a bench with tiny sizes and returns its JSON, whose shape is checked."""
    file = tmp_path / "rows.json"
    typed = [
        *arguments,
        "--quick",
        "--num-runs",
        "1",
        "--json",
        str(file),
        "--work-dir",
        str(tmp_path),
    ]
    result = CliRunner().invoke(bench_app, typed, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(file.read_text())
    assert set(content) == {"machine", "rows"} and content["machine"]["num_cpus"] >= 1
    assert "load_average" in content["machine"] and "load_average_end" in content["machine"]
    for row in content["rows"]:
        assert set(row) == KEYS and row["num_runs"] == 1
        numbers = [row[name] for name in ("ours", "theirs", "ratio")]
        assert all(
            math.isfinite(value) and (value > 0 or "exponent" in row["unit"]) for value in numbers
        )
        assert row["what"] in result.output
    return content


def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREEGRAFT_VLLM_PYTHON", raising=False)
    kernels = kernels_for(16, torch.bfloat16, "cpu")
    has_products = kernels is not None and kernels.product_step > 0
    rows = bench(tmp_path, "engine")["rows"]
    assert [row["against"].partition(",")[0] for row in rows] == [
        *["transformers generate"] * 2,
        "the same leaves sampled apart on our engine",
        "its share of their tokens",
        "the matrix products of the step alone",
        *["the matrix library"] * (2 if has_products else 0),
    ]


def test_update(tmp_path: Path) -> None:
    """Every way of learning against rows without padding, gradients compared before."""
    rows = bench(tmp_path, "update", "--only", "D float32")["rows"]
    ways = ["packed", "gathered keys", "prompt once", "padded"]
    assert [row["what"].rpartition(": ")[2] for row in rows] == ways
    assert {row["against"] for row in rows} == {"rows, no padding, same dtype"}
    # 5 + 2 (6 + 8 · 2) = 49 and 16 (5 + 6 + 2) = 208 tokens
    assert "4.24 tokens for each unique one" in rows[0]["what"]


@pytest.mark.smoke  # trains each method; the other tests train them too
def test_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRL its row is left out; the methods are compared."""
    monkeypatch.delenv("TREEGRAFT_TRL_PYTHON", raising=False)
    rows = bench(tmp_path, "whole")["rows"]
    assert {row["what"].partition(",")[0] for row in rows} == {"RAPO", "ARPO"} and len(rows) == 6


@pytest.mark.smoke  # loads an encoder; tests of the buffer and of encoders compare the same numbers
def test_buffer(tmp_path: Path) -> None:
    rows = bench(tmp_path, "buffer")["rows"]
    assert [row["unit"] for row in rows] == [
        "ms a key",
        "ms a key",
        "traces/s",
        "s",
        "ms a key",
        "ms a key",
    ]
    assert all(
        row["what"].startswith("embedding") and float(row["what"].split()[-1]) > 0.999
        for row in rows[4:]
    )
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.smoke  # two processes, each of which loads torch
def test_update_memory(tmp_path: Path) -> None:
    rows = bench(tmp_path, "update", "--only", "memory S bfloat16")["rows"]
    assert [row["unit"] for row in rows] == ["MB"]
