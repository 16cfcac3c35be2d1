"""Every metric key with its meaning and unit; metrics.toml has the table."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from treegraft.core.errors import nearest
from treegraft.core.registry import registered


def _meanings() -> dict[str, str]:
    texts = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {key: " ".join(text.split()) for key, text in texts.items()}


CALLS = ("rollout/num_tool_calls", "environment/num_replayed_calls")
"""Executed calls: the policy's, and those that an environment repeated for a branch."""
METRICS: Mapping[str, str] = _meanings()
"""Key or pattern -> one line with the unit."""


@functools.cache
def known_metrics() -> Mapping[str, str]:
    """Returns every metric key with its meaning, those of extensions after ours."""
    # Not at import: every extension's entry point is looked up for it.
    others = {key: entry.value for key, entry in registered("metric").items()}
    return {**METRICS, **others}


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Pattern and key in the table."""
    # Longer patterns first, so that the most specific one wins: "eval/accuracy_sampled_{category}"
    # before "eval/accuracy_{category}".
    keys = sorted((key for key in known_metrics() if "{" in key), key=len, reverse=True)
    compiled = []
    for key in keys:
        before, after = map(re.escape, re.split(r"\{\w+\}", key))
        # A name may be any text but the slash that ends a group; {k} is a count.
        inner = r"\d+" if "{k}" in key else "[^/]+"
        compiled.append((re.compile(f"{before}({inner}){after}"), key))
    return compiled


def find_entry(key: str) -> tuple[str, str] | None:
    """Returns the key of the table that a metric's key belongs to, and the name that stands in it
    for {name}, "" for none; None for a key that the table does not know."""
    if key in known_metrics():
        return key, ""
    found = ((known, pattern.fullmatch(key)) for pattern, known in _patterns())
    return next(((known, match[1]) for known, match in found if match), None)


def find_meaning(key: str) -> str | None:
    """Returns the meaning of a metric, None for a key that the table does not know."""
    entry = find_entry(key)
    return None if entry is None else known_metrics()[entry[0]]


def meaning(key: str) -> str:
    """Returns the meaning of a metric; raises KeyError, naming the nearest one, where there is
    none."""
    found = find_meaning(key)
    if found is None:
        raise KeyError(
            f"unknown metric '{key}'.{nearest(key, known_metrics())} Its meaning belongs in"
            " metrics.toml."
        )
    return found
