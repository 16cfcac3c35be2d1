"""The budget of a tree, and the rules that share its branches out, never by arrival."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from treegraft.core.types import Branch, BranchCause, BudgetState, Start


class Budget:
    """Grants leaves up to a limit and counts usage; one for each tree."""

    def __init__(self, max_leaves: int) -> None:
        self.max_leaves = max_leaves
        self.state = BudgetState()

    def grant(self, proposal: Start | Branch) -> int:
        """Returns how many of the proposed leaves may be opened, and books them."""
        granted = max(0, min(proposal.num, self.max_leaves - self.state.num_leaves))
        self.state = replace(self.state, num_leaves=self.state.num_leaves + granted)
        return granted

    @property
    def is_spent(self) -> bool:
        """Whether no further leaf can be granted, ever."""
        return self.state.num_leaves >= self.max_leaves

    def spend(self, *, num_tool_calls: int = 0, num_sampled_tokens: int = 0) -> None:
        """Books tool calls and sampled tokens."""
        self.state = replace(
            self.state,
            num_tool_calls=self.state.num_tool_calls + num_tool_calls,
            num_sampled_tokens=self.state.num_sampled_tokens + num_sampled_tokens,
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """Children that may be opened."""

    place: tuple[int, ...]
    """Ordinals of the step they hang below."""
    num: int
    cause: BranchCause
    token: int
    """The allocation's own name for the grant."""


class Allocation(Protocol):
    """Turns the proposals of a tree's leaves into grants."""

    def open_start(self, leaf: Hashable, ordinal: int) -> None:
        """Notes that a first-level rollout has begun."""

    def open_branch(self, leaf: Hashable, grant: Grant) -> None:
        """Notes that one of a grant's children has begun."""

    def propose(
        self, leaf: Hashable, round: int, place: tuple[int, ...], branch: Branch | None
    ) -> None:
        """Takes a leaf's wish after its `round`-th sampled step; None for none. Each leaf says one
        of the two each round."""

    def may_grant(self, leaf: Hashable) -> bool:
        """Returns whether a wish of the leaf that has got nothing so far may still be granted; once
        False, it stays so."""

    def end(self, leaf: Hashable) -> None:
        """Notes that a leaf has ended."""

    def advance(self) -> list[Grant]:
        """Returns the grants that are possible now; open the children, then ask again until there
        are none."""


class Rounds:
    """Grants a round's branches together, once every live leaf of the tree has proposed in it or
    has ended.

    Only the decision waits: a leaf that is ahead goes on, and its later proposals are kept. Where
    the budget is short, the order in the tree decides (as in the released ARPO code), or the
    largest entropy change.
    """

    def __init__(self, budget: Budget, ranking: Literal["order", "entropy"] = "order") -> None:
        self._budget, self._ranking = budget, ranking
        self._reached: dict[Hashable, int] = {}
        self._wishes: dict[int, list[tuple[tuple[int, ...], Branch]]] = {}

    def open_start(self, leaf: Hashable, ordinal: int) -> None:
        """Adds a live leaf that has yet to propose in round 1."""
        self._reached[leaf] = 0

    def open_branch(self, leaf: Hashable, grant: Grant) -> None:
        """Adds a live leaf that has yet to propose in the round after its grant's."""
        self._reached[leaf] = grant.token

    def propose(
        self, leaf: Hashable, round: int, place: tuple[int, ...], branch: Branch | None
    ) -> None:
        """Keeps the wish until its round is complete."""
        # A probe that comes after its leaf has ended: the round may be granted already.
        if leaf not in self._reached:
            return
        self._reached[leaf] = round
        if branch is not None:
            self._wishes.setdefault(round, []).append((place, branch))

    def may_grant(self, leaf: Hashable) -> bool:
        """Returns whether the budget has leaves left: a wish is refused for no other reason."""
        return not self._budget.is_spent

    def end(self, leaf: Hashable) -> None:
        """No longer waits for the leaf."""
        self._reached.pop(leaf, None)

    def advance(self) -> list[Grant]:
        """Returns the grants of the earliest complete round that gets any."""
        # Without live leaves every round is complete.
        complete = min(self._reached.values(), default=max(self._wishes, default=0))
        for number in sorted(round for round in self._wishes if round <= complete):
            # Wishes lie in the order of arrival, which latencies decide; ties of entropy keep the
            # order in the tree.
            wishes = sorted(self._wishes.pop(number), key=lambda wish: wish[0])
            if self._ranking == "entropy":
                wishes.sort(key=lambda wish: -wish[1].cause.entropy_change)
            grants = [
                Grant(place, self._budget.grant(branch), branch.cause, number)
                for place, branch in wishes
            ]
            if granted := [grant for grant in grants if grant.num]:
                return granted
        return []


class Shares:
    """Gives each start its own part of the leaves, so that a proposal is answered at once. Ours: no
    paper has it.

    The M leaves are shared evenly among the N starts, the first ones first. A leaf that branches
    shares its remaining leaves evenly with its children, itself first.
    """

    def __init__(self, budget: Budget, num_starts: int) -> None:
        self._budget = budget
        # Less one: the start is itself a leaf of its part.
        self._parts = [part - 1 for part in _shared(budget.max_leaves, num_starts)]
        self._spare: dict[Hashable, int] = {}
        self._ready: list[Grant] = []
        self._inherited: dict[int, list[int]] = {}
        self._num_grants = 0

    def open_start(self, leaf: Hashable, ordinal: int) -> None:
        """Gives the leaf its start's part; starts that fill up have none."""
        self._spare[leaf] = self._parts[ordinal] if ordinal < len(self._parts) else 0

    def open_branch(self, leaf: Hashable, grant: Grant) -> None:
        """Gives the leaf its part of its parent's remaining leaves."""
        self._spare[leaf] = self._inherited[grant.token].pop(0)

    def propose(
        self, leaf: Hashable, round: int, place: tuple[int, ...], branch: Branch | None
    ) -> None:
        """Grants as many as the leaf's own part allows."""
        spare = self._spare.get(leaf, 0)
        if branch is None or not spare:
            return
        num = self._budget.grant(replace(branch, num=min(branch.num, spare)))
        if not num:
            return
        # Shared out now: the children begin later, and the leaf may branch again before they do.
        self._spare[leaf], *self._inherited[self._num_grants] = _shared(spare - num, num + 1)
        self._ready.append(Grant(place, num, branch.cause, self._num_grants))
        self._num_grants += 1

    def may_grant(self, leaf: Hashable) -> bool:
        """Returns whether the leaf has a part left; its wishes are granted at once or never."""
        return bool(self._spare.get(leaf))

    def end(self, leaf: Hashable) -> None:
        """Keeps nothing: the leaf's remaining part goes to fresh starts in the end."""
        self._spare.pop(leaf, None)

    def advance(self) -> list[Grant]:
        """Returns the grants since the last call."""
        ready, self._ready = self._ready, []
        return ready


def _shared(num: int, parts: int) -> list[int]:
    """A number in equal parts, of which the first are larger by one where it does not divide."""
    return [num // parts + (number < num % parts) for number in range(parts)]
