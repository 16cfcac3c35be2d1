"""Warnings while training: each rule on hand-made lines of metrics, what is said and when, and real
runs that set some off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.pages import builder
from tests.support.tiny import is_timing, tiny
from tests.support.trees import Part, build_tree

from treegraft.core.registry import CORE_NAMES
from treegraft.explore.compose import Composed
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.rollout.measure import unused_metrics
from treegraft.runs import health
from treegraft.runs.display import PlainDisplay
from treegraft.runs.health import RULES, HealthWarning, Monitor, explained, recorded
from treegraft.runs.metrics import meaning
from treegraft.runs.record import read_metrics
from treegraft.settings.explore import EntropySettings, GraftSettings
from treegraft.settings.load import load_config
from treegraft.train import train

ROOT = Path(__file__).resolve().parents[2]

HEALTHY: dict[str, Any] = {
    # A line of the demo's RAPO run, rounded.
    "rollout/num_trajectories": 192.0,
    "rollout/tool_calls_mean": 2.1,
    "rollout/truncated_frac": 0.03,
    "rollout/violation_frac": 0.02,
    "rollout/failed_frac": 0.0,
    "eval/failed_frac": 0.0,
    "learn/skipped_groups_frac": 0.33,
    "learn/entropy": 0.1,
    "learn/num_contributions": 2500.0,
    "learn/engine_gap": 1e-6,
    "learn/engine_gap_limit": 1e-4,
    "branch/unused_frac": 0.6,
    "graft/unused_frac": 0.55,
    "tools/search_calls": 400.0,
    "tools/search_failure_frac": 0.05,
}
LONG = 8


def lines(
    changes: Callable[[int], dict[str, Any]] | dict[str, Any], count: int = LONG
) -> list[dict[str, Any]]:
    """Healthy lines of updates 1.. with changes, the same for all or a function of the update."""
    return [
        {"update": n, **HEALTHY, **(changes(n) if callable(changes) else changes)}
        for n in range(1, count + 1)
    ]


def at_end(**changes: Any) -> Callable[[int], dict[str, Any]]:
    """These changes in the last of `LONG` updates alone."""
    return lambda n: (
        {key.replace("__", "/"): value for key, value in changes.items()} if n == LONG else {}
    )


def warnings_of(history: Sequence[Mapping[str, Any]], *silenced: str) -> list[list[HealthWarning]]:
    """Returns for each line the warnings that stand after it."""
    monitor = Monitor(silenced)
    return [monitor.take(line)[0] for line in history]


def names(found: list[list[Any]]) -> list[list[str]]:
    return [[warning.name for warning in some] for some in found]


def test_a_healthy_run_is_not_warned_of() -> None:
    assert names(warnings_of(lines({}))) == [[]] * LONG
    # Nor is a line that says nothing, as before the first update, or a tool that nobody called for
    # once.
    assert warnings_of([{"update": 0, "eval/accuracy": 0.1}]) == [[]]
    assert (
        names(warnings_of(lines(at_end(tools__search_calls=0.0, tools__search_failure_frac=None))))
        == [[]] * LONG
    )


CASES: dict[str, tuple[Any, str]] = {
    "no_tool_calls": ({"rollout/tool_calls_mean": 0.0}, "0 calls a trajectory"),
    "no_variance": (at_end(learn__skipped_groups_frac=1.0), "100%"),
    # 0.004 is 4 % of the first update's 0.1.
    "entropy_collapse": (at_end(learn__entropy=0.004), "4.0% of the first"),
    "truncated": (at_end(rollout__truncated_frac=0.25), "25%"),
    "violated": (at_end(rollout__violation_frac=0.5), "50%"),
    "failed": (at_end(rollout__failed_frac=0.01), "1.0%"),
    "failed_eval": (at_end(eval__failed_frac=0.5), "held-out trajectories lost"),
    "branch_unused": ({"branch/unused_frac": 1.0}, "fresh starts: 100%"),
    "graft_unused": ({"graft/unused_frac": 0.96}, "no graft: 96%"),
    "graft_untrue": ({"environment/untrue_graft_frac": 0.6}, "environment contradicts: 60%"),
    "held_out_differs": (
        at_end(rollout__accuracy=0.75, eval__accuracy=0.25),
        "differ: 50% more are correct in training",
    ),
    "engine_drift": (at_end(learn__engine_gap=2e-4), "0.0002 nats"),
    "tool_broken_python": (
        at_end(tools__python_failure_frac=0.5, tools__python_calls=2.0),
        "the tool python failed in 50%",
    ),
    "not_finite": (at_end(learn__loss=float("nan"), reward__mean=float("inf")), "2 metrics"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule_speaks_and_is_silenced(name: str) -> None:
    changes, says = CASES[name]
    history = lines(changes)
    found = warnings_of(history)
    assert [one.name for one in found[-1]] == [name]
    (warning,) = found[-1]
    assert says in warning.text
    assert meaning(warning.key)
    # What was written into a line is read back as the same warning.
    assert recorded({**history[-1], warning.key: warning.value}) == [warning]
    assert warnings_of(history, warning.rule.name)[-1] == []


def test_every_rule_has_a_case_and_a_setting() -> None:
    rules = {rule.name for rule in RULES}
    assert {
        name for name in rules if any(case == name or case.startswith(f"{name}_") for case in CASES)
    } == rules
    assert rules == set(CORE_NAMES["warning"])


def test_windows_are_waited_for() -> None:
    """Three updates without a call, not two; a fourth with calls ends it."""
    calls = [0.0, 0.0, 0.0, 3.0, 0.0]
    found = warnings_of(lines(lambda n: {"rollout/tool_calls_mean": calls[n - 1]}, 5))
    assert names(found) == [[], [], ["no_tool_calls"], [], []]
    without = [
        {key: value for key, value in line.items() if not key.startswith("tools/")}
        for line in lines({}, 4)
    ]
    assert (
        names(warnings_of([{**line, "rollout/tool_calls_mean": 0.0} for line in without]))
        == [[]] * 4
    )  # it has none to call


# ---------------------------------------------------------------------- what is said, and when


def test_a_warning_is_said_once() -> None:
    """Truncation stands in updates 2, 3 and 5, and begins once more after three without it."""
    monitor = Monitor()
    said = []
    for line in lines(lambda n: {"rollout/truncated_frac": 0.4 * (n in (2, 3, 5, 9))}, 10):
        said += [(line["update"], one.name) for one in monitor.take(line)[1]]
    assert said == [(2, "truncated"), (9, "truncated")] and monitor.standing == ["truncated"]


def test_what_begins_is_explained() -> None:
    (warning,) = warnings_of(lines(at_end(rollout__truncated_frac=0.5)))[-1]
    told = explained(warning, 8).splitlines()
    assert told[0] == "truncated at update 8: trajectories out of tokens, steps or calls: 50%"
    assert told[1].startswith("  meaning: Many trajectories end before they answer")
    assert "rollout.max_completion_tokens" in told[2] and "health.truncated=off" in told[3]


def test_a_resumed_monitor_goes_on_as_if_nothing_had_happened() -> None:
    history = lines(
        lambda n: {
            "rollout/truncated_frac": 0.5 if n in (2, 3) else 0.0,
            "tools/search_failure_frac": 0.1 * (n == 7),
        },
        9,
    )
    whole = Monitor()
    everything = [whole.take(line) for line in history]
    for cut in range(1, 9):
        resumed = Monitor((), history[:cut])
        assert [resumed.take(line) for line in history[cut:]] == everything[cut:]


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "warnings.md").read_text(encoding="utf-8")
    assert written == builder().warnings_page(), "run: python docs/build.py --warnings"
    assert all(f"## {rule.name}" in written and rule.advice in written for rule in RULES)


def test_settings_are_checked() -> None:
    config = load_config({"health": {"truncated": "off"}}, ["health.violated=off"])
    assert config.health == {"truncated": "off", "violated": "off"}
    with raises_code("invalid-setting"):
        load_config({}, ["health.truncated=0.3"])
    with raises_code("settings-contradict", "health"):
        load_config({}, ["health.truncate=off"])


# ---------------------------------------------------------------------- the metrics behind them


def test_unused_budgets() -> None:
    """Two starts of four leaves: a tree with two branches uses all, one with four starts nothing;
    one start of two may retrieve."""
    used = build_tree(
        Part.of(
            "p",
            Part.of("s", Part("s"), Part("s"), Part("s")),
            Part.of("s", Part.of("r", Part("s"))),
        )
    )
    unused = build_tree(Part.of("p", *(Part("s") for _ in range(4))))
    both = Composed(
        [
            EntropyBranching(EntropySettings(num_starts=2, normaliser="none"), vocab_size=100),
            HybridRollout(GraftSettings(num_hybrid=2), num_leaves=4, num_starts=2),
        ]
    )
    found = unused_metrics([used, unused], both, 4)
    # Starts 1 and 3 may retrieve: of three such trajectories one holds a graft.
    assert found == {"branch/unused_frac": 0.5, "graft/unused_frac": pytest.approx(2 / 3)}
    nothing = {"branch/unused_frac": 1.0, "graft/unused_frac": 1.0, "graft/num_grafts": 0.0}
    assert unused_metrics([unused], both, 4) == nothing
    assert unused_metrics([unused], Independent(), 4) == {}
    assert unused_metrics([], both, 4) == {}


# ---------------------------------------------------------------------- real runs


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_real_run_that_is_ill_says_so_and_goes_on_after_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untrained weights with no room to answer, a learning rate of 0: truncated or broken, no
    variance, nobody calls a tool."""
    tables: dict[str, Any] = {
        "warmup": {"num_steps": 0},
        "rollout": {"max_completion_tokens": 2},
        "learn": {"lr": 0.0},
        "eval": {"every": 0, "at_start": False, "at_end": False},
        "checkpoint": {"every": 1},
    }
    monkeypatch.setattr(health, "WINDOW", 2)

    def start(name: str, **run: Any) -> Path:
        settings = tiny(**tables, run={"name": name, "dir": str(tmp_path), **run})
        return train(settings, display=PlainDisplay()).run_dir

    whole = start("whole", num_updates=3)
    said = capsys.readouterr().out
    stood = [[one.name for one in recorded(line)] for line in read_metrics(whole)]
    found = [set(some) for some in stood]
    assert (
        found[0] == set()
        and {"no_variance", "no_tool_calls"} <= found[2]
        and found[2] & {"truncated", "violated"}
    )
    assert len(found[2]) >= 3
    for name in found[2]:
        assert said.count(f"warning: {name} at update") == 1 and f"health.{name}=off" in said
    assert f"  ! {', '.join(stood[2])}\n" in said
    # Stopped after two updates and gone on: the same lines, and nothing said twice.
    cut = start("cut", num_updates=2)
    capsys.readouterr()
    train(
        tiny(**tables, run={"name": "cut", "dir": str(tmp_path), "num_updates": 3}),
        resume=cut,
        display=PlainDisplay(),
    )
    told = capsys.readouterr().out
    assert "warning: no_variance" not in told

    def without_times(folder: Path) -> list[dict[str, float]]:
        return [
            {key: value for key, value in line.items() if not is_timing(key)}
            for line in read_metrics(folder)
        ]

    assert without_times(cut) == without_times(whole)
    # Limits of warnings may change with a resume, nothing of the learning.
    train(
        tiny(
            **{**tables, "health": {"truncated": "off"}},
            run={"name": "cut", "dir": str(tmp_path), "num_updates": 3},
        ),
        resume=cut,
    )
    with raises_code("resumed-other-settings"):
        train(
            tiny(
                **{**tables, "learn": {"lr": 1.0}},
                run={"name": "cut", "dir": str(tmp_path), "num_updates": 4},
            ),
            resume=cut,
        )
