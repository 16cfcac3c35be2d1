"""What the development runs chose, and the pages' numbers of studies that no marked table holds."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tuning import STUDY, TIE, chosen_of, tuned

from treegraft.extras.lab.study.file import read_study
from treegraft.extras.lab.study.plan import make_plan
from treegraft.extras.lab.study.results import CALLS, known_runs
from treegraft.extras.statistics import (
    accuracy_at,
    bootstrap_interval,
    permutation_test,
)

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, dict[str, float]] = {
    "default": {},
    "lr 1e-4": {"lr": 1e-4},
    "lr 1e-3": {"lr": 1e-3},
    "temperature 1.3": {"temperature": 1.3},
}


def test_the_first_setting_stays_unless_another_is_better_by_more_than_a_tie() -> None:
    assert chosen_of({"first": 0.50, "other": 0.505}) == "first"
    assert chosen_of({"first": 0.50, "other": 0.50 + 2 * TIE, "worse": 0.1}) == "other"


@pytest.mark.parametrize("name", ["thoughts-tuned", "budgets", "bonus-attack", "lucky"])
def test_runs_have_the_settings_that_were_chosen(name: str) -> None:
    """The settings of the runs themselves: an arm may inherit from its base what nobody chose."""
    chosen = {arm: SETTINGS[found.chosen] for arm, found in tuned().items()}
    compared = 0
    for run in make_plan(STUDY.with_name(f"{name}.toml")).runs:
        if run.arm in chosen:
            lr, temperature = run.config.learn.lr, run.config.rollout.temperature
            assert {"lr": 3e-4, "temperature": 1.0} | chosen[run.arm] == {
                "lr": lr,
                "temperature": temperature,
            }, f"{name}: {run.arm}"
            compared += 1
    assert compared >= 48


def test_pages_have_the_calls_and_differences_that_no_table_holds() -> None:
    """Calls a rollout in TextWorld; what the bonus is worth; all twenty pairs without a thought."""
    lines = known_lines("published", "textworld")
    for arm, leaves, words in (
        ("own lessons, call bonus", 24, "from 3.2 to 5.4 calls"),
        ("GRPO", 48, "(GRPO: 3.7)"),
    ):
        made = [one["updates"][CALLS] for (_, name, _), one in lines.items() if name == arm]
        means = [statistics.fmean(one[at] for one in made) / leaves for at in (0, -1)]
        assert len(made) == 10 and f"{means[1]:.1f}" in words and f"{means[0]:.1f}" == "3.2"
        assert words in " ".join((ROOT / "docs" / "methods.md").read_text("utf-8").split())
    page = " ".join((ROOT / "docs" / "results-exploring.md").read_text("utf-8").split())
    bonus = "own lessons, call bonus"
    worth = {
        world: at_budget("bonus-attack", world, bonus, "own lessons, 4 leaves")
        for world in ("done", "no thoughts")
    }
    shown = said(worth["done"])
    assert f"{shown} ({said(worth['no thoughts'])[:3]} without a thought)" in page
    twenty = [
        difference
        for study in ("thoughts-tuned", "bonus-attack")
        for difference in at_budget(study, "no thoughts", "commit, begun anew", bonus)
    ]
    assert f"which no protocol announced, give {said(twenty)}, p = .03" in page
    assert round(permutation_test(twenty, [0.0] * 20), 2) == 0.03


def test_the_page_has_what_a_thinking_model_cost_and_reached() -> None:
    lines = known_lines("smollm2-thoughts", "thoughts")
    names = ("commit, begun anew", "own lessons, call bonus")
    arms = {name: [lines["thoughts", name, pair]["curve"] for pair in range(6)] for name in names}
    page = " ".join((ROOT / "docs" / "results.md").read_text("utf-8").split())
    page = page.split("**And if it thinks")[1].split("**And in a world")[0]

    def ends(key: str) -> list[float]:
        return [statistics.fmean(curve[-1][key] for curve in arms[name]) for name in names]

    ours, theirs = ends("eval/pass_at_2")
    assert f"pass@2 is {ours:.2f} and {theirs:.2f}".replace("0.", ".") in page
    assert all(round(one, -2) == 28_800 for one in ends("rollout/num_sampled_tokens"))
    ours, theirs = ends("time/cpu_s")
    assert f"A run takes {ours:.0f} and {theirs:.0f} CPU seconds" in page
    updates = ends("update")
    assert f"makes {updates[0]:.1f} updates and own lessons {updates[1]:.1f}" in page
    at_600 = [
        statistics.fmean(
            accuracy_at([p[CALLS] for p in curve], [p["accuracy"] for p in curve], 600) or 0.0
            for curve in arms[name]
        )
        for name in names
    ]
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert (
        f"With SmolLM2-135M it has {at_600[0]:.2f} and own lessons with a bonus {at_600[1]:.2f} at"
        f" equal calls, after {updates[0]:.1f} and {updates[1]:.1f} updates" in readme
    )
    costs = [[point["time/cpu_s"] for point in curve] for curve in arms[names[0]]]
    shares = [[point["accuracy"] for point in curve] for curve in arms[names[0]]]
    found = [accuracy_at(x, y, theirs) or 0.0 for x, y in zip(costs, shares, strict=True)]
    assert statistics.fmean(found) < statistics.fmean(c[-1]["accuracy"] for c in arms[names[1]])


def known_lines(study: str, world: str) -> dict[Any, Any]:
    plan = make_plan(ROOT / "studies" / f"{study}.toml", only=[world])
    return known_runs(ROOT / "studies" / f"{study}.jsonl", plan.runs)[0]


def at_budget(study: str, world: str, ours: str, theirs: str) -> list[float]:
    """The differences of two arms at 4,000 calls, pair by pair."""
    found = {}
    for (_, arm, pair), line in known_lines(study, world).items():
        curve = line["curve"]
        found[arm, pair] = accuracy_at(
            [one[CALLS] for one in curve], [one["accuracy"] for one in curve], 4000
        )
    return [found[ours, pair] - found[theirs, pair] for pair in range(10)]  # type: ignore[operator]


def said(differences: list[float]) -> str:
    """ ".18 [.07, .30]", as pages write it."""
    low, high = bootstrap_interval(differences) or (0.0, 0.0)
    mean = statistics.fmean(differences)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]".replace("0.", ".")


def test_the_page_has_what_tuning_cost() -> None:
    compared = read_study(STUDY.with_name("thoughts-tuned.toml"))
    for name, found in tuned().items():
        if name.endswith("(removed since)"):
            continue
        arm = compared.arms[name]
        assert arm.tuning_runs == found.num_runs == 8
        assert (arm.tuning_calls, arm.tuning_cpu_s) == (round(found.calls), round(found.cpu_s))
    page = (ROOT / "docs" / "results-exploring.md").read_text(encoding="utf-8")
    cost = sum(round(one.cpu_s) for one in tuned().values())
    assert f"`python -m benchmarks.tuning`; {cost:,} CPU" in page


def test_the_page_has_the_reach_of_its_study() -> None:
    plan = make_plan(ROOT / "studies" / "reach-calls.toml")
    lines = known_runs(ROOT / "studies" / "reach-calls.jsonl", plan.runs)[0]
    page = (ROOT / "docs" / "results-exploring.md").read_text(encoding="utf-8")
    section = page.split("## What an agent can reach")[1].split("\n## ")[0]
    shown = re.findall(r"^\| ([^|]+) \|((?: [01]\.\d\d \|){4}) ([\d,]+) \|$", section, re.M)
    assert len(shown) == 6
    reach = ("eval/pass_at_8", "eval/pass_within_1", "eval/pass_within_4")
    for arm, numbers, calls in shown:
        ends = [line["curve"][-1] for (_, one, _), line in lines.items() if one == arm]
        assert len(ends) == 5
        means = [statistics.fmean(end[key] for end in ends) for key in ("accuracy", *reach)]
        assert [f"{mean:.2f}" for mean in means] == numbers.replace("|", " ").split()
        assert f"{statistics.fmean(end[CALLS] for end in ends):,.0f}" == calls
    earlier = make_plan(ROOT / "studies" / "reach.toml")
    lines = known_runs(ROOT / "studies" / "reach.jsonl", earlier.runs)[0]
    found = []
    for arm, *_ in shown:
        ends = [line["curve"][-1][reach[0]] for (_, one, _), line in lines.items() if one == arm]
        found.append(f"{statistics.fmean(ends):.2f}".removeprefix("0"))
    assert f"gave pass@8 of {', '.join(found[:-1])} and {found[-1]}" in " ".join(section.split())
