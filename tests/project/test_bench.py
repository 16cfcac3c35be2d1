"""`python -m benchmarks.speed`: each part from end to end with a tiny model, and the arithmetic of
its rows."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.speed import growth, measure
from benchmarks.speed.__main__ import bench_app
from benchmarks.speed.growth import curve_rows, planned_tree
from benchmarks.speed.measure import (
    Report,
    Row,
    Side,
    alternate,
    chosen_cases,
    fit_exponent,
    markdown,
    speed_row,
    time_row,
)
from benchmarks.speed.peers import ScriptPeer, peer_python
from benchmarks.speed.plans import PathPlan, StepPlan, TreePlan, arpo_tree, grow_plan
from benchmarks.speed.update import multiplication_ratio
from benchmarks.workloads import Segment, Workload
from typer.testing import CliRunner

from treegraft.core.errors import DataError, EngineError, SettingError
from treegraft.policy.kernels.engine import kernels_for
from treegraft.policy.learn.pack import TreeBatch
from treegraft.policy.load import load_model
from treegraft.settings.policy import ModelSettings, TinySettings

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


# ---------------------------------------------------------------------- rows


def test_sides_take_turns_in_turned_order_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> Side:
        return Side(
            lambda run: order.append(f"{name}{run}") or run,
            before=lambda run: order.append("("),
            after=lambda run, found: order.append(f"{found})"),
        )

    seconds = alternate({"a": side("a"), "b": side("b")}, 2)
    assert " ".join(order) == "( a0 0) ( b0 0) ( b1 1) ( a1 1) ( a2 2) ( b2 2)"
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_rows_by_hand() -> None:
    """600 tokens in a median of 2 s against 3 s: 300 and 200 a second; as times 2 s against 3 s.
    Both 1.5 times."""
    ours, theirs = [1.0, 2.0, 9.0], [3.0, 3.0, 4.0]
    assert speed_row("w", "x", ours, theirs, 600.0, "tokens/s") == Row(
        what="w", against="x", ratio=1.5, ours=300.0, theirs=200.0, unit="tokens/s", num_runs=3
    )
    row = time_row("w", "x", ours, theirs)
    assert (row.ratio, row.ours, row.theirs, row.unit) == (1.5, 2.0, 3.0, "s")
    assert list(markdown([row]))[2] == "| w | x | 1.50 | 2 | 3 | s | 3 |"


def test_the_exponent_of_a_power_law_and_its_error() -> None:
    """3 n^1.5 has no error. With log-residuals +d, -2d, +d at x = 0, 1, 2: slope unmoved, error
    sqrt(6 d^2 / 1 / 2)."""
    sizes = [2.0, 8.0, 32.0]
    assert fit_exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(
        (1.5, 0.0), abs=1e-6
    )
    d = 0.1
    wobbly = [math.exp(n + shift) for n, shift in zip((0, 1, 2), (d, -2 * d, d), strict=True)]
    assert fit_exponent([math.exp(n) for n in (0, 1, 2)], wobbly) == pytest.approx(
        (1.0, math.sqrt(6 * d * d / 2))
    )
    assert math.isnan(fit_exponent([1.0, 2.0], [1.0, 2.0])[1])
    with pytest.raises(ValueError, match="two or more that differ"):
        fit_exponent([4.0, 4.0], [1.0, 2.0])


def test_parts_are_chosen_by_name_or_by_their_first_words() -> None:
    names = ["group 16", "group 64", "limit"]
    assert chosen_cases(names, []) == names
    assert chosen_cases(names, ["limit", "group"]) == names
    assert chosen_cases(names, ["group 16"]) == ["group 16"]
    with pytest.raises(SettingError, match=r"no part 'grup 64'.*group 16.*'group 64'"):
        chosen_cases(names, ["grup 64"])


def test_rows_are_kept_and_replaced(tmp_path: Path) -> None:
    def row(what: str, ratio: float) -> Row:
        return Row(
            what=what, against="x", ratio=ratio, ours=1.0, theirs=ratio, unit="s", num_runs=1
        )

    file, said = tmp_path / "rows.json", []
    Report({"num_cpus": 2}, file, said.append).run(
        {"a": lambda: [row("a", 1.0), row("b", 2.0)]}, []
    )
    later = Report({"num_cpus": 2}, file, said.append)
    later.keep_earlier()
    later.run({"a": lambda: [row("b", 3.0)], "c": lambda: [row("c", 4.0)]}, [])
    assert [(r["what"], r["ratio"]) for r in json.loads(file.read_text())["rows"]] == [
        ("a", 1.0),
        ("b", 3.0),
        ("c", 4.0),
    ]
    file.write_text("[]")
    with pytest.raises(DataError, match="not the JSON of a benchmark"):
        later.keep_earlier()


# ---------------------------------------------------------------------- trees laid down beforehand


def test_a_plan_by_hand() -> None:
    """One start of 3 + 4 sampled tokens around a result of 2, and a branch of 5 beside its second
    step.

    Tree: 3 + 2 + 4 + 5 = 14 tokens, 12 of them sampled. Apart: (3 + 2 + 4) + (3 + 2 + 5) = 19 and
    15.
    """
    first = StepPlan(3, 0.0, (7, 7))
    plan = TreePlan((PathPlan((first, StepPlan(4)), ((1, PathPlan((StepPlan(5),))),)),))
    assert (plan.num_leaves, plan.num_steps, plan.num_tokens, plan.num_sampled) == (2, 2, 14, 12)
    apart = plan.apart()
    assert (apart.num_leaves, apart.num_tokens, apart.num_sampled) == (2, 19, 15)
    prefixes: list[list[int]] = []

    async def complete(
        prefix: Sequence[int], count: int, key: tuple[int | str, ...]
    ) -> Sequence[int]:
        await asyncio.sleep(0)
        prefixes.append(list(prefix))
        return [count] * count

    assert asyncio.run(grow_plan(complete, plan, [1], (0,))) == 12
    assert sorted(prefixes) == [[1], [1, 3, 3, 3, 7, 7], [1, 3, 3, 3, 7, 7]]


def test_the_tree_of_the_benchmark_is_arpos() -> None:
    plan = arpo_tree()
    assert (len(plan.starts), plan.num_leaves, plan.num_steps, plan.apart().num_leaves) == (
        8,
        16,
        3,
        16,
    )
    waits = [step.wait_s for start in plan.starts for path in start.paths() for step in path]
    assert all(wait == 0 or 0.05 <= wait <= 0.5 for wait in waits) and waits.count(0.0) == 16
    assert {place for start in plan.starts for place, _ in start.branches} == {1, 2}
    assert plan == arpo_tree()


# ---------------------------------------------------------------------- peers

PEER = """
import json, sys
print(json.dumps({"ready": True, "asked": json.loads(sys.argv[1])}), flush=True)
for line in sys.stdin:
    if json.loads(line).get("dies"):
        print("no more", file=sys.stderr)
        sys.exit(3)
    print(json.dumps({"echo": json.loads(line)}), flush=True)
"""


def test_a_peer_answers_and_its_death_is_told(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    (tmp_path / "json.py").write_text("raise ImportError('a file beside the script')")
    peer = ScriptPeer("echo", sys.executable, script, {"size": 3}, tmp_path)
    try:
        assert peer.ready == {"ready": True, "asked": {"size": 3}}
        assert peer.ask(go=1) == {"echo": {"go": 1}}
        with pytest.raises(EngineError, match=r"peer echo: it has ended.*no more"):
            peer.ask(dies=True)
    finally:
        peer.close()


def test_a_peers_python_is_typed_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TREEGRAFT_VLLM_PYTHON", raising=False)
    assert peer_python("vllm", None) is None
    assert peer_python("vllm", Path(sys.executable)) == Path(sys.executable)
    monkeypatch.setenv("TREEGRAFT_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(SettingError, match=r"--vllm-python.*pip install torch"):
        peer_python("vllm", None)


# ---------------------------------------------------------------------- end to end


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


@pytest.mark.filterwarnings("ignore:.*gradient_checkpoint:FutureWarning")  # transformers renames it
def test_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each part's own work turns on by a power of its size, every curve gives that
    power back, and leaves that share the same tokens take the same time."""
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    learn, sample, grow_plan = (
        growth._Learning._run,
        growth.OurEngine.group,
        growth.grow_plan,
    )

    def learned(self: Any, batch: TreeBatch) -> None:
        learn(self, batch)
        now[0] += batch.num_tokens**1.5

    def sampled(self: Any, prompt: Any, rows: int, tokens: int, *rest: Any) -> Any:
        found = sample(self, prompt, rows, tokens, *rest)
        now[0] += (len(prompt) + rows * tokens) ** 0.5
        return found

    async def grown(complete: Any, plan: Any, prompt: Any, *rest: Any) -> int:
        counted = await grow_plan(complete, plan, prompt, *rest)
        now[0] += (len(prompt) + plan.num_tokens) ** 0.75
        return counted

    monkeypatch.setattr(growth._Learning, "_run", learned)
    monkeypatch.setattr(growth.OurEngine, "group", sampled)
    monkeypatch.setattr(growth, "grow_plan", grown)
    rows = bench(tmp_path, "growth")["rows"]
    powers = {row["what"].split(",")[0]: row["ours"] for row in rows if "exponent" in row["unit"]}
    assert powers == pytest.approx(
        {
            "learning by group": 1.5,
            "learning by depth": 1.5,
            "learning by context": 1.5,
            "sampling by group": 0.5,
            "sampling by depth": 0.75,
            "sampling by context": 0.5,
        }
    )
    leaves = [row["ratio"] for row in rows if "leaves of the same" in row["against"]]
    assert leaves == [1.0, 1.0]


def test_planned_trees_are_what_the_plan_says() -> None:
    """Two starts of two steps, 3 + 2 and 4 tokens, and a branch of 4 beside each second step."""
    plan = arpo_tree(
        num_starts=2, num_leaves=4, num_steps=2, tokens=(4, 4), result=(2, 2), wait_s=(0.0, 0.0)
    )
    tree = planned_tree(plan, 5, range(50))
    assert [step.id for step in tree.steps] == [
        "0",
        "0.0",
        "0.0.0",
        "0.0.1",
        "0.1",
        "0.1.0",
        "0.1.1",
    ]
    assert [len(step.token_ids) for step in tree.steps] == [5, 6, 4, 4, 6, 4, 4]
    assert sum(len(step.token_ids) for step in tree.steps) == 5 + plan.num_tokens
    assert sum(sum(step.sampled_mask) for step in tree.steps) == plan.num_sampled
    assert [leaf.step_id for leaf in tree.leaves] == ["0.0.0", "0.0.1", "0.1.0", "0.1.1"]


def test_multiplications_of_a_shape_by_hand() -> None:
    """Two trees of 3 prompt tokens and two leaves of 2 sampled ones."""
    leaf = Segment(2, 2)
    load = Workload("by hand", (Segment(3, below=(leaf, leaf)),) * 2)
    tiny = TinySettings(
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        max_context=64,
    )
    model, _ = load_model(ModelSettings(path="tiny", dtype="float32", tiny=tiny), vocabulary=["a"])
    words = model.get_output_embeddings().weight.shape[0]
    # Queries, keys, values, outputs and the three of the feed-forward part; eight sampled tokens.
    linear, head = 8 * (8 + 4 + 4 + 8) + 3 * 8 * 8, 8 * 8 * words
    assert multiplication_ratio(load, model) == pytest.approx(
        (20 * linear + 60 * 16 + head) / (14 * linear + 48 * 16 + head)
    )


def test_a_curve_by_hand() -> None:
    """1 s at size 10, 4 s at 20, in proportion 2 s: half of it; the exponent is 2."""
    rows = list(curve_rows("c", "tokens", {"a": 10.0, "b": 20.0}, {"a": [1.0], "b": [4.0]}))
    assert [(row.ratio, row.ours, row.theirs) for row in rows[:2]] == [
        (1.0, 1.0, 1.0),
        (0.5, 4.0, 2.0),
    ]
    assert rows[2].ratio == pytest.approx(2.0) and "standard error unknown" in rows[2].unit


@pytest.mark.smoke  # two processes, each of which loads torch
def test_update_memory(tmp_path: Path) -> None:
    rows = bench(tmp_path, "update", "--only", "memory bfloat16")["rows"]
    assert [row["unit"] for row in rows] == ["MB"]


def test_the_parts_are_listed_and_a_wrong_one_is_refused() -> None:
    listed = CliRunner().invoke(bench_app, ["engine", "--quick", "--list"])
    assert listed.output.split("\n")[:2] == ["group 3", "group 5"]
    with pytest.raises(SettingError, match="no part 'grope'"):
        CliRunner().invoke(
            bench_app, ["engine", "--quick", "--only", "grope"], catch_exceptions=False
        )
    with pytest.raises(SettingError, match="--append would have no effect"):
        CliRunner().invoke(bench_app, ["engine", "--quick", "--append"], catch_exceptions=False)
