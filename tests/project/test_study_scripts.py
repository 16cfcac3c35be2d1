"""Scripts of studies/figures: which steps count, means, sweeps and costs by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from studies.figures.entropy_by_position import PROMPT, live_steps, main, mean_over_trees
from studies.figures.papers import PAPERS, costs, vary
from studies.figures.papers import main as main_of_papers
from tests.extras.test_report import CALLS, TOKENS, record, study_line
from tests.support.viewed import grown_tree, write_run

from treegraft.extras.lab.report.groups import Group


def test_steps_that_show_the_policy_by_itself() -> None:
    """Not the graft, nor the answer below it, nor the branch."""
    found = [(step.id, after) for step, after in live_steps(grown_tree(1, "t/1"))]
    assert found == [
        ("0.0", PROMPT),
        ("0.1", PROMPT),
        ("0.1.0", "search"),
        ("0.1.0.0", "search"),
        ("0.2", PROMPT),
    ]


def test_means_and_intervals_over_trees_by_hand() -> None:
    # n = 2, 1 steps with S = 0.6, 0.9: m = 1.5 / 3. S - m n = -0.4, 0.4, so the error is
    # sqrt(2 / 1 * 0.32) / 3 = 0.8 / 3, and t(1, 0.975) = 12.7062.
    point = mean_over_trees(1, [[0.2, 0.4], [0.9]])
    assert (point.mean, point.num_steps, point.num_trees) == (pytest.approx(0.5), 3, 2)
    assert point.half == pytest.approx(12.7062 * 0.8 / 3, abs=1e-4)
    assert mean_over_trees(2, [[0.6]]).half == 0


def test_a_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(write_run(tmp_path / "run")))
    assert (tmp_path / "run" / "entropy-by-position.svg").is_file()
    assert f"\n{PROMPT}, 1, " in capsys.readouterr().out


# ---------------------------------------------------------------------- the papers' figures


def test_sets_that_differ_in_one_thing_alone() -> None:
    def one(label: str, *settings: dict[str, Any]) -> Group:
        return Group(label, "", tuple(record(label, settings=each) for each in settings))

    groups = [
        one("a", {"p": 0.0, "q": 1}),
        one("b", {"p": 0.5, "q": 1}),
        one("c", {"p": 1.0, "q": 2}),
        one("d", {"p": 1.0, "q": 1}),
        one("e", {"q": 1}),
    ]
    assert [[g.label for g in found] for found in vary(groups, "p")] == [["a", "b", "d"]]
    warmed = [
        one(label, {"p": p, "model.path": "x"}, {"p": p, "model.path": "y"})
        for label, p in (("a", 0.0), ("b", 1.0))
    ]
    assert [[g.label for g in found] for found in vary(warmed, "p")] == [["a", "b"]]
    assert vary(warmed, "model.path") == []


def test_sweeps_of_a_study(tmp_path: Path) -> None:
    error = "tasks.search_world.error_prob"
    lines = [
        study_line("near", seed, 0.8 + 0.02 * seed, **{"buffer__random_prob": 0.0, error: 0.0})
        for seed in range(2)
    ]
    lines += [study_line("random", 0, 0.3, **{"buffer__random_prob": 1.0, error: 0.0})]
    lines += [study_line("half", 0, 0.5, **{"buffer__random_prob": 0.5, error: 0.0})]
    lines += [
        study_line("near", seed, 0.6, "flawed", **{"buffer__random_prob": 0.0, error: 0.3})
        for seed in range(2)
    ]
    # A flag and a text are no numbers; both at once are not one setting.
    lines += [study_line("flag", 0, 0.1, **{"buffer__random_prob": True, error: 0.0})]
    lines += [study_line("both", 0, 0.1, **{"buffer__random_prob": 0.5, error: 0.3})]
    (tmp_path / "lines").write_text("".join(lines))
    main_of_papers(["rapo-8", str(tmp_path / "lines"), "--out", str(tmp_path)])
    with (tmp_path / "rapo-8.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, list[tuple[str, str, float]]] = {}
    for row in rows:
        found.setdefault(f"{row['setting']} {row['method']}", []).append(
            (row["value"], row["n"], pytest.approx(float(row["mean"])))
        )
    assert found == {
        "buffer.random_prob near (w)": [("0.0", "2", 0.81), ("0.5", "1", 0.5), ("1.0", "1", 0.3)],
        "buffer.random_prob near (flawed)": [("0.0", "2", 0.6), ("0.5", "1", 0.1)],
        f"{error} near (w)": [("0.0", "2", 0.81), ("0.3", "2", 0.6)],
        f"{error} half (w)": [("0.0", "1", 0.5), ("0.3", "1", 0.1)],
    }
    # One run: Wilson for 50 of 100 tasks, 0.5 ± 0.0962.
    half = next(row for row in rows if row["value"] == "0.5" and row["group"] == "half")
    assert float(half["low"]) == pytest.approx(0.4038, abs=1e-4)


def paper_line(method: str, seed: int, seconds: float, calls: int) -> dict[str, Any]:
    """A run of two updates."""
    spent = [{"update": n, "accuracy": 0.5, CALLS: calls * n, TOKENS: 10.0 * n} for n in (0, 2)]
    updates = {"update": [1, 2], CALLS: [calls, calls], "time/rollout_s": [seconds, 3 * seconds]}
    return {"method": method, "seed": seed, "world": "w", "curve": spent, "updates": updates}


LINES = [
    paper_line("RAPO", 0, 3.0, 6),
    paper_line("GRPO", 0, 1.0, 4),
    paper_line("GRPO", 1, 2.0, 4),
]


def test_costs_of_an_update_beside_the_baseline_s() -> None:
    """GRPO: (1 + 3) / 2 and (2 + 6) / 2 seconds, mean 3; RAPO 6. Tokens: 20 over two updates."""
    heads, grpo, rapo = costs(LINES, "GRPO")
    assert heads == ["arm", "rollout s", "learning s", "CPU s", "calls", "tokens"]
    assert grpo == ["GRPO", "3 (1.00 x)", "", "", "4 (1.00 x)", "10 (1.00 x)"]
    assert rapo == ["RAPO", "6 (2.00 x)", "", "", "6 (1.50 x)", "10 (1.00 x)"]


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_figures_are_drawn(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line | {"settings": {"a": place}} for place, line in enumerate(LINES[:2])]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main_of_papers([name, str(tmp_path / "lines"), "--out", str(tmp_path), "--baseline", "GRPO"])
    assert (tmp_path / f"{name}.svg").is_file()
    assert ("| arm | rollout s |" in capsys.readouterr().out) == PAPERS[name].has_costs
