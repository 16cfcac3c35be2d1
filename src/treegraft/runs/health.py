"""Warnings while training: problems that an update's metrics show.

The rules look at lines of metrics and at nothing else, in order, so that a resumed run warns as an
undisturbed one does. A warning that stands is written into the update's line as `health/NAME`, its
value being the number that set it off.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from treegraft.core.registry import registered
from treegraft.runs.health_rules import RULES, History, MetricsLine, Rule, number
from treegraft.settings.health import HealthSettings

PREFIX = "health/"


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
        """Its metric: "health/truncated", "health/tool_failing_search"."""
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
    return [
        HealthWarning(rule, key.removeprefix(begin).removeprefix("_"), value)
        for rule in (rules() if keys else ())
        for begin in (f"{PREFIX}{rule.name}",)
        for key in keys
        if f"{key}_".startswith(f"{begin}_") and (value := number(line, key)) is not None
    ]


class Monitor:
    """The warnings of a run under way: which begin and which end, so that each is said once."""

    def __init__(self, settings: HealthSettings, lines: Sequence[MetricsLine] = ()) -> None:
        """Args:
        lines: of metrics, from before a resume.
        """
        self._settings, self._history = settings, History(settings.window)
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
        self._history.begin(line)
        found = [
            HealthWarning(rule, subject, value)
            for rule in rules()
            if (limit := getattr(self._settings, rule.name)) != "off"
            for subject, value in sorted(rule.check(self._history, line, limit).items())
        ]
        self._history.end(line)
        began = [warning for warning in found if warning.name not in self._last]
        update = int(line["update"])
        self._last |= {warning.name: update for warning in found}
        # A warning that comes and goes would be said in every other update; so one is over only
        # when it has not stood for as many updates as the window holds.
        window = self._settings.window
        over = [name for name, last in self._last.items() if update - last >= window]
        ends = [f"{name} is over: last seen in update {self._last.pop(name)}" for name in over]
        return found, began, ends


def explained(warning: HealthWarning, update: int) -> str:
    """Returns a warning as a person reads it when it begins: finding, meaning and advice."""
    return (
        f"{warning.name} at update {update}: {warning.text}\n"
        f"  meaning: {warning.rule.meaning}\n"
        f"  to do:   {warning.rule.advice}\n"
        f"  (silence it with health.{warning.rule.name}=off; it is not repeated while it stands)"
    )
