"""What explorers are shown, and what they may answer."""

from __future__ import annotations

from dataclasses import dataclass

from treegraft.types import BranchCause, Origin, Step


@dataclass(frozen=True, slots=True)
class PathView:
    """A path under way, from the root to the last step that is done."""

    steps: tuple[Step, ...]
    """The root first."""
    noise_key: tuple[int | str, ...]
    """Of the step that comes next; keyed randomness is a function of it."""

    @property
    def start(self) -> int:
        """Ordinal of the first-level rollout that the path belongs to; branches inherit it."""
        return self.steps[1].ordinals[1]

    @property
    def num_sampled(self) -> int:
        """Steps that the policy sampled."""
        return sum(step.origin is Origin.POLICY for step in self.steps)

    @property
    def num_grafts(self) -> int:
        """Steps that were retrieved."""
        return sum(step.origin is Origin.RETRIEVED for step in self.steps)


@dataclass(frozen=True, slots=True)
class Start:
    """Opens first-level rollouts."""

    num: int


@dataclass(frozen=True, slots=True)
class Generate:
    """The policy samples the next step."""


@dataclass(frozen=True, slots=True)
class Graft:
    """A step of another agent is retrieved and attached; the policy samples the one after it."""

    whole: bool = False
    """The rest of the other agent's trajectory instead of one step."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Opens further sampled children below a step."""

    num: int
    """0: the rule looked and said no, which is worth recording."""
    cause: BranchCause


__all__ = ["Branch", "Generate", "Graft", "PathView", "Start"]
