"""What the development runs chose and cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.tuning import STUDY, TIE, chosen_of, tuned

from treegraft.extras.lab.study.file import read_study
from treegraft.extras.lab.study.plan import make_plan

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
            lr = run.config.learn.lr
            temperature = run.config.rollout.temperature
            assert {"lr": 3e-4, "temperature": 1.0} | chosen[run.arm] == {
                "lr": lr,
                "temperature": temperature,
            }, f"{name}: {run.arm}"
            compared += 1
    assert compared >= 48


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
