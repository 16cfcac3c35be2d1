"""Why a step is where it is, and why no branch was opened beside it: the part of `types` that explorers write."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartCause:
    """The first step of a first-level rollout."""


@dataclass(frozen=True, slots=True)
class ContinuationCause:
    """The ordinary next step of its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCause:
    """A further sampled child of its parent."""

    entropy_change: float
    """What the rule saw, in the rule's own normalisation."""
    probability: float
    """The probability with which the rule branched, 0..1."""
    rule: str
    """The rule's name."""
    bar: float | None = None
    """What the probability had to exceed: the threshold, or the coin that was tossed; None where not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchDecision:
    """What a rule saw in a step's first tokens, and how many branches were opened beside that step.

    BranchDecision(seen=BranchCause(entropy_change=-0.2, probability=0.46, rule="threshold", bar=0.5), num_wanted=0, num_opened=0)
    """

    seen: BranchCause
    num_wanted: int
    """Branches that the explorer asked for; 0 where the rule said no."""
    num_opened: int = 0
    """How many of them there was budget for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftCause:
    """A step retrieved from another agent."""

    source: str
    """The other agent."""
    task_id: str
    """The task on which it wrote the step."""
    reward: float
    """What its trajectory earned there."""
    similarity: float
    """Cosine between the retrieval key and the trace's key, -1..1; 0 where the trace was drawn at random."""
    content_hash: str = ""
    """Which trace of the buffer."""
    num_cut: int = 0
    """Tokens cut from its left for want of room."""


Cause = StartCause | ContinuationCause | BranchCause | GraftCause
