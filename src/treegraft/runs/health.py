"""Warnings while training: problems that an update's metrics show.

The rules look at lines of metrics and at nothing else, in order, so that a resumed run warns as an
undisturbed one does. A warning that stands is written into the update's line as `health/NAME`, its
value being the number that set it off. health.toml has the rules: most name a metric with a limit,
the others have a function here that measures.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

MetricsLine = Mapping[str, Any]
PREFIX = "health/"
WINDOW = 3
"""Updates that means are over; a shorter window would warn of single bad updates."""


class History:
    """The part of earlier lines that rules compare with: bounded, and a function of the lines."""

    def __init__(self) -> None:
        self.first_entropy: float | None = None
        self.recent: deque[MetricsLine] = deque(maxlen=WINDOW)
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
        return total / len(self.recent) if len(self.recent) == self.recent.maxlen else None


def number(line: MetricsLine, key: str) -> float | None:
    """Returns a finite metric of a line, None where there is none."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---------------------------------------------------------------------- measured numbers

Numbers = Mapping[str, float | None]
"""A number by subject, such as a tool's name, "" for the whole run; None if there is none."""


def _no_tool_calls(history: History, line: MetricsLine) -> Numbers:
    # A recipe without tools is meant to have no calls.
    has_tools = any(key.startswith("tools/") and key.endswith("_calls") for key in line)
    return {"": history.mean("rollout/tool_calls_mean") if has_tools else None}


def _entropy_collapse(history: History, line: MetricsLine) -> Numbers:
    now = number(line, "learn/entropy")
    first = history.first_entropy
    # A group that is skipped has no entropy: 0 would be the absence of a measurement.
    if now is None or not first or number(line, "learn/num_contributions") == 0:
        return {}
    return {"": now / first}


def _failed(history: History, line: MetricsLine) -> Numbers:
    # The limit of 0 must not warn where nothing failed.
    return {
        "": number(line, "rollout/failed_frac") or None,
        "eval": number(line, "eval/failed_frac") or None,
    }


def _held_out_differs(history: History, line: MetricsLine) -> Numbers:
    held_out = number(line, "eval/accuracy")
    if held_out is None:
        held_out = number(line, "eval/accuracy_sampled")
    trained = number(line, "rollout/accuracy")
    return {"": None if held_out is None or trained is None else trained - held_out}


def _engine_drift(history: History, line: MetricsLine) -> Numbers:
    # The accepted gap depends on the engine's precision, so it is no limit of the rule's own.
    gap = number(line, "learn/engine_gap")
    allowed = number(line, "learn/engine_gap_limit")
    is_wrong = gap is not None and allowed is not None and gap > allowed
    return {"": gap if is_wrong else None}


def _tool_broken(history: History, line: MetricsLine) -> Numbers:
    found = {}
    for key in line:
        match = re.fullmatch(r"tools/(.*)_failure_frac", key, re.DOTALL)
        if match and number(line, f"tools/{match[1]}_calls"):
            found[match[1]] = number(line, key)
    return found


def _not_finite(history: History, line: MetricsLine) -> Numbers:
    count = sum(isinstance(value, float) and not math.isfinite(value) for value in line.values())
    return {"": float(count) or None}


_MEASURES: Mapping[str, Callable[[History, MetricsLine], Numbers]] = {
    "no_tool_calls": _no_tool_calls,
    "entropy_collapse": _entropy_collapse,
    "failed": _failed,
    "held_out_differs": _held_out_differs,
    "engine_drift": _engine_drift,
    "tool_broken": _tool_broken,
    "not_finite": _not_finite,
}

# ---------------------------------------------------------------------- the rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One warning: its condition and its texts."""

    name: str
    """As in [health] and in `health/NAME`."""
    metric: str = ""
    """The metric that is compared with the limit; "" if a function of `_MEASURES` measures."""
    is_mean: bool = False
    """Whether its mean over the window counts, not the latest value."""
    is_low: bool = False
    """Whether the limit is the largest value that is wrong, not the smallest."""
    limit: float
    limit_is: str
    """The meaning of `limit`."""
    says: str
    """The finding, a format string over {value} and {subject}."""
    meaning: str
    causes: tuple[str, ...]
    advice: str

    def findings(self, history: History, line: MetricsLine) -> dict[str, float]:
        """Returns the numbers that are wrong, by subject."""
        numbers: Numbers
        if not self.metric:
            numbers = _MEASURES[self.name](history, line)
        elif self.is_mean:
            # A line without the key must not repeat the warning of an earlier one.
            numbers = {"": history.mean(self.metric) if self.metric in line else None}
        else:
            numbers = {"": number(line, self.metric)}
        found = {}
        for subject, value in sorted(numbers.items()):
            if value is not None and (value <= self.limit if self.is_low else value >= self.limit):
                found[subject] = value
        return found


def _rules() -> tuple[Rule, ...]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for name, facts in tables.items():
        facts["name"] = name
        for key in ("limit_is", "says", "meaning", "advice"):
            facts[key] = " ".join(facts[key].split())
    return TypeAdapter(tuple[Rule, ...]).validate_python(tuple(tables.values()))


RULES = _rules()


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """A warning that is active after an update."""

    rule: Rule
    subject: str
    """What it is about, such as a tool's name; "" for the run as a whole."""
    value: float
    """The number that set it off."""

    @property
    def name(self) -> str:
        """Such as "truncated" and "tool_broken_search"."""
        return self.rule.name + (f"_{self.subject}" if self.subject else "")

    @property
    def key(self) -> str:
        """Its metric."""
        return f"{PREFIX}{self.name}"

    @property
    def text(self) -> str:
        """The finding, on one line."""
        found = self.rule.says.format(value=self.value, subject=self.subject)
        return f"held-out {found}" if self.rule.name == "failed" and self.subject else found


def recorded(line: MetricsLine) -> list[HealthWarning]:
    """Returns the warnings that were written into a line of metrics, in the order of `RULES`."""
    keys = sorted(key for key in line if key.startswith(PREFIX))
    found = []
    for rule in RULES:
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
        self._history = History()
        self._last: dict[str, int] = {}
        """Latest update of each warning that has begun and is not over, by name."""
        for line in lines:
            self.take(line)

    @property
    def standing(self) -> Sequence[str]:
        """The names of the warnings that have begun and are not over."""
        return list(self._last)

    def take(self, line: MetricsLine) -> tuple[list[HealthWarning], list[HealthWarning]]:
        """Takes the metrics of an update.

        Returns:
            all warnings that stand after it, in the order of `RULES`; those of them that begin.
        """
        self._history.add(line)
        update = int(line["update"])
        # A warning that comes and goes would be said in every other update; so one is over only if
        # it has not occurred for as many updates as the window has.
        self._last = {name: last for name, last in self._last.items() if update - last <= WINDOW}
        found = []
        for rule in RULES:
            if rule.name not in self._silenced:
                for subject, value in rule.findings(self._history, line).items():
                    found.append(HealthWarning(rule, subject, value))
        began = [warning for warning in found if warning.name not in self._last]
        for warning in found:
            self._last[warning.name] = update
        return found, began


def explained(warning: HealthWarning, update: int) -> str:
    """Returns a warning as a person reads it when it begins: finding, meaning and advice."""
    return (
        f"{warning.name} at update {update}: {warning.text}\n"
        f"  meaning: {warning.rule.meaning}\n"
        f"  to do:   {warning.rule.advice}\n"
        f"  (silence it with health.{warning.rule.name}=off; it is not repeated while it stands)"
    )
