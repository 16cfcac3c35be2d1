"""Warnings while training: problems that an update's metrics show.

The rules look at lines of metrics and at nothing else, in order, so that a resumed run warns as an
undisturbed one does. A warning that stands is written into the update's line as `health/NAME`, its
value being the number that set it off.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.registry import registered

MetricsLine = Mapping[str, Any]
Findings = Mapping[str, float]
"""The findings of a rule: a number by subject, such as a tool's name; "" for the whole run."""


class History:
    """The part of earlier lines that rules compare with: bounded, and a function of the lines."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.first_entropy: float | None = None
        self.recent: deque[MetricsLine] = deque(maxlen=window)
        """The lines of the latest updates that sampled, the latest one included."""

    def add(self, line: MetricsLine) -> None:
        """Adds a line before the rules look at it."""
        # The first measured one: updates without learning have none.
        if self.first_entropy is None:
            self.first_entropy = number(line, "learn/entropy")
        # The line of an evaluation before the first update holds no trajectories to judge.
        if "rollout/num_trajectories" in line:
            self.recent.append(line)

    def mean(self, key: str) -> float | None:
        """Returns the mean of a metric over the window; None if it is not full, or one of its lines
        has no such number."""
        total = 0.0
        for line in self.recent:
            value = number(line, key)
            if value is None:
                return None
            total += value
        return total / self.window if len(self.recent) == self.window else None


def number(line: MetricsLine, key: str) -> float | None:
    """Returns a finite metric of a line, None where there is none."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---------------------------------------------------------------------- conditions

Check = Callable[[History, MetricsLine, float], Findings]


def _whole(value: float | None, is_wrong: Callable[[float], bool]) -> Findings:
    return {"": value} if value is not None and is_wrong(value) else {}


def _from(key: str) -> Check:
    """The latest value is at the limit or above."""
    return lambda history, line, limit: _whole(number(line, key), lambda value: value >= limit)


def _mean_from(key: str) -> Check:
    """The mean of the window is at the limit or above."""
    # A line without the key must not repeat the warning of an earlier one.
    return lambda history, line, limit: _whole(
        history.mean(key) if key in line else None, lambda value: value >= limit
    )


def _unused_from(key: str) -> Check:
    """As `_mean_from`; before the window is full, nothing at all has been made so far."""
    wait = _mean_from(key)

    def check(history: History, line: MetricsLine, limit: float) -> Findings:
        shares = [number(one, key) for one in history.recent]
        if len(shares) < history.window and set(shares) == {1.0}:
            return {"": 1.0}
        return wait(history, line, limit)

    return check


def _no_tool_calls(history: History, line: MetricsLine, limit: float) -> Findings:
    # A recipe without tools is meant to have no calls.
    has_tools = any(key.startswith("tools/") and key.endswith("_calls") for key in line)
    mean = history.mean("rollout/tool_calls_mean") if has_tools else None
    return _whole(mean, lambda value: value <= limit)


def _entropy_collapse(history: History, line: MetricsLine, limit: float) -> Findings:
    now = number(line, "learn/entropy")
    first = history.first_entropy
    # A group that is skipped has no entropy: 0 would be the absence of a measurement.
    if now is None or not first or number(line, "learn/num_contributions") == 0:
        return {}
    return _whole(now / first, lambda value: value <= limit)


def _failed(history: History, line: MetricsLine, limit: float) -> Findings:
    shares = {"": number(line, "rollout/failed_frac"), "eval": number(line, "eval/failed_frac")}
    # Above the limit, not at it: the default of 0 must not warn where nothing failed.
    return {name: share for name, share in shares.items() if share is not None and share > limit}


def _held_out_differs(history: History, line: MetricsLine, limit: float) -> Findings:
    held_out = number(line, "eval/accuracy")
    if held_out is None:
        held_out = number(line, "eval/accuracy_sampled")
    trained = number(line, "rollout/accuracy")
    if held_out is None or trained is None:
        return {}
    return _whole(trained - held_out, lambda value: value >= limit)


def _engine_drift(history: History, line: MetricsLine, limit: float) -> Findings:
    # The accepted gap depends on the engine's precision; the limit is a multiple of it.
    gap = number(line, "learn/engine_gap")
    allowed = number(line, "learn/engine_gap_limit")
    return _whole(gap, lambda value: allowed is not None and value > limit * allowed)


def _tool_broken(history: History, line: MetricsLine, limit: float) -> Findings:
    found = {}
    for key in line:
        if match := re.fullmatch(r"tools/(.*)_failure_frac", key, re.DOTALL):
            share = number(line, key)
            if share is not None and share >= limit and number(line, f"tools/{match[1]}_calls"):
                found[match[1]] = share
    return found


def _not_finite(history: History, line: MetricsLine, limit: float) -> Findings:
    count = sum(isinstance(value, float) and not math.isfinite(value) for value in line.values())
    return _whole(float(count), lambda value: value > limit)


# ---------------------------------------------------------------------- the rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One warning: its condition and its texts."""

    name: str
    """As in [health] and in `health/NAME`."""
    check: Check
    limit: float
    """The number that `check` compares with."""
    limit_is: str
    """The meaning of `limit`."""
    says: str
    """The finding, a format string over {value} and {subject}."""
    meaning: str
    causes: tuple[str, ...]
    advice: str


_CHECKS: Mapping[str, Check] = {
    "no_tool_calls": _no_tool_calls,
    "no_variance": _from("learn/skipped_groups_frac"),
    "entropy_collapse": _entropy_collapse,
    "truncated": _from("rollout/truncated_frac"),
    "violated": _from("rollout/violation_frac"),
    "failed": _failed,
    "branch_unused": _unused_from("branch/unused_frac"),
    "graft_unused": _unused_from("graft/unused_frac"),
    "graft_untrue": _mean_from("environment/untrue_graft_frac"),
    "held_out_differs": _held_out_differs,
    "engine_drift": _engine_drift,
    "tool_broken": _tool_broken,
    "not_finite": _not_finite,
}


_TEXTS = ("limit_is", "says", "meaning", "advice")


def _rules() -> tuple[Rule, ...]:
    texts = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    rules = []
    for name, check in _CHECKS.items():
        facts = texts[name]
        facts |= {key: " ".join(facts[key].split()) for key in _TEXTS}
        facts["causes"] = tuple(facts["causes"])
        rules.append(Rule(name=name, check=check, **facts))
    return tuple(rules)


RULES = _rules()
PREFIX = "health/"
WINDOW = 3
"""Updates that means are over; a shorter window would warn of single bad updates."""


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Returns the rules of all warnings, those of extensions after ours."""
    return (*RULES, *(one.load() for one in registered("warning").values()))


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """A warning that is active after an update."""

    rule: Rule
    subject: str
    """What it is about, such as a tool's name; "" for the run as a whole."""
    value: float
    """The number that set it off."""

    @property
    def key(self) -> str:
        """Its metric: "health/truncated", "health/tool_broken_search"."""
        return f"{PREFIX}{self.rule.name}" + (f"_{self.subject}" if self.subject else "")

    @property
    def name(self) -> str:
        return self.key.removeprefix(PREFIX)

    @property
    def text(self) -> str:
        """The finding, on one line."""
        found = self.rule.says.format(value=self.value, subject=self.subject)
        return f"held-out {found}" if self.rule.name == "failed" and self.subject else found


def recorded(line: MetricsLine) -> list[HealthWarning]:
    """Returns the warnings that were written into a line of metrics, in the order of `RULES`."""
    keys = sorted(key for key in line if key.startswith(PREFIX))
    found = []
    # Most lines have none, and rules of extensions are loaded for those that have one alone.
    for rule in rules() if keys else ():
        begin = f"{PREFIX}{rule.name}"
        for key in keys:
            value = number(line, key)
            if f"{key}_".startswith(f"{begin}_") and value is not None:
                subject = key.removeprefix(begin).removeprefix("_")
                found.append(HealthWarning(rule, subject, value))
    return found


class Monitor:
    """The warnings of a run under way: which begin and which end, so that each is said once."""

    def __init__(self, silenced: Container[str] = (), lines: Sequence[MetricsLine] = ()) -> None:
        """Args:
        silenced: names of the rules that are left out.
        lines: of metrics, from before a resume.
        """
        self._silenced = silenced
        self._history = History(WINDOW)
        self._last: dict[str, int] = {}
        """Latest update of each warning that has begun and is not over, by name."""
        for line in lines:
            self.take(line)

    @property
    def standing(self) -> Sequence[str]:
        """The names of the warnings that have begun and are not over."""
        return list(self._last)

    def take(self, line: MetricsLine) -> tuple[list[HealthWarning], list[HealthWarning], list[str]]:
        """Takes the metrics of an update.

        Returns:
            all warnings that stand after it, in the order of `RULES`; those of them that begin; a
            sentence for each one that is over.
        """
        self._history.add(line)
        found = []
        for rule in rules():
            if rule.name not in self._silenced:
                subjects = rule.check(self._history, line, rule.limit)
                for subject, value in sorted(subjects.items()):
                    found.append(HealthWarning(rule, subject, value))
        began = [warning for warning in found if warning.name not in self._last]
        update = int(line["update"])
        for warning in found:
            self._last[warning.name] = update
        ends = []
        for name, last in [*self._last.items()]:
            # A warning that comes and goes would be said in every other update; so one is over only
            # if it has not occurred for as many updates as the window has.
            if update - last >= WINDOW:
                del self._last[name]
                ends.append(f"{name} is over: last seen in update {last}")
        return found, began, ends


def explained(warning: HealthWarning, update: int) -> str:
    """Returns a warning as a person reads it when it begins: finding, meaning and advice."""
    return (
        f"{warning.name} at update {update}: {warning.text}\n"
        f"  meaning: {warning.rule.meaning}\n"
        f"  to do:   {warning.rule.advice}\n"
        f"  (silence it with health.{warning.rule.name}=off; it is not repeated while it stands)"
    )
