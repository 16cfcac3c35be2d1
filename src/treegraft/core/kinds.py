"""Explorers and ways to compare outcomes, as the registry has them: what makes or is them, and the
facts that settings and checks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _never(config: Any) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class ExplorerFacts:
    """Facts that an explorer gets beside its settings."""

    vocab_size: int
    """The tokenizer's."""
    penalty: float = 0.0
    """Weight of the reward "overlong", whose differences do not count as success."""


@dataclass(frozen=True, kw_only=True)
class ExplorerKind:
    """An explorer by its name in `explore.explorers`: its maker, and the facts that settings and
    checks use."""

    make: Callable[[Any, ExplorerFacts], Any] | str
    """Called with the table [explore] and the facts of a run; returns an `Explorer`. Or its import
    path."""
    title: str | Callable[[Any], str] = ""
    """The method's name in the field, for model cards; or a function of the table [explore]."""
    leads: bool = False
    """Whether it has to stand first, since its starts and its `fill` make the method."""
    leaves: str = ""
    """The setting that counts the leaves it opens itself, such as "explore.commit.num_starts":
    at most explore.num_leaves. Empty for none."""
    plans_starts: bool = True
    """False where the number of first-level rollouts is known only as the tree grows."""
    opens_at_once: bool = False
    """Whether `leaves` is the number of first-level rollouts that are opened at once; otherwise all
    leaves are."""
    branches: bool = False
    """Whether a step may get several children."""
    retrieves: bool = False
    """Whether it needs a Step-Trace Buffer."""
    begins_below: bool = False
    """Whether rollouts begin below stored or finished steps, so that [credit] restarts counts."""
    compares_together: bool = False
    """Whether such rollouts are compared with the whole tree by default."""
    teaches: Callable[[Any], bool] = _never
    """Whether, under a configuration, it puts tokens into trees that can be imitated."""
    stored_from: str = ""
    """The setting with the least reward of stored trajectories that it begins below."""
    idle: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    """For settings of others by their dotted names: why they have no effect beside it, a function
    of the configuration that returns "" where they have one."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of settings of others, by their dotted names."""


@dataclass(frozen=True, kw_only=True)
class OutcomeKind:
    """A way to compare outcomes, by its name in `credit.advantage`."""

    compare: Callable[..., Any] | str
    """Called with the trajectories of one group and `eps`; returns [trajectories] advantages. Or
    its import path."""
    finish: Callable[[Any], Any] | str | None = None
    """Takes the credited tree and returns the one that is learned from, or its import path; None
    for the same."""
