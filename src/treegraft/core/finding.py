"""Findings: what a check has looked at, and whether it is as it should be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found, such as Finding(name="torch", value="2.13.0", is_good=True)."""

    name: str
    value: str
    is_good: bool = True
    """False where a run could not start, or could not learn."""
    note: str = ""
    """The remedy where something is missing; else a remark."""
    is_doubtful: bool = False
    """It may be as it is meant, but the user should know."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.name, self.value, self.note)))
