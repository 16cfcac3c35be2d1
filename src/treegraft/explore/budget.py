"""The budget of a tree, and the rule that grants its branches, never by arrival."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from treegraft.core.types import Branch, BranchCause, BudgetState, Start


class Budget:
    """Grants leaves up to a limit and counts usage; one for each tree."""

    def __init__(self, max_leaves: int) -> None:
        self.max_leaves = max_leaves
        self.state = BudgetState()

    def grant(self, proposal: Start | Branch) -> int:
        """Returns how many of the proposed leaves may be opened, and books them."""
        # Never less than 0: a second stage may ask for leaves of a full tree.
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
    round: int


class Rounds:
    """Grants a round's branches together, once every live leaf of the tree has proposed in it or
    has ended.

    Only the decision waits: a leaf that is ahead goes on, and its later proposals are kept. If the
    budget is short, the order in the tree decides, as in the released ARPO code.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._reached: dict[Hashable, int] = {}
        self._wishes: dict[int, list[tuple[tuple[int, ...], Branch]]] = {}

    def open_start(self, leaf: Hashable) -> None:
        """Adds a live leaf that has yet to propose in round 1."""
        self._reached[leaf] = 0

    def open_branch(self, leaf: Hashable, grant: Grant) -> None:
        """Adds a live leaf that has yet to propose in the round after its grant's."""
        self._reached[leaf] = grant.round

    def propose(
        self, leaf: Hashable, round: int, place: tuple[int, ...], branch: Branch | None
    ) -> None:
        """Takes a leaf's wish after its `round`-th sampled step, None for none; each leaf says one
        of the two each round."""
        # A probe that comes after its leaf has ended: the round may be granted already.
        if leaf not in self._reached:
            return
        self._reached[leaf] = round
        if branch is not None:
            self._wishes.setdefault(round, []).append((place, branch))

    def end(self, leaf: Hashable) -> None:
        """No longer waits for the leaf."""
        self._reached.pop(leaf, None)

    def advance(self) -> list[Grant]:
        """Returns the grants of the earliest complete round that gets any; open the children, then
        ask again until there are none."""
        # Without live leaves every round is complete.
        complete = min(self._reached.values(), default=max(self._wishes, default=0))
        for number in sorted(round for round in self._wishes if round <= complete):
            # Wishes lie in the order of arrival, which latencies decide.
            wishes = sorted(self._wishes.pop(number), key=lambda wish: wish[0])
            granted = []
            for place, branch in wishes:
                if num := self._budget.grant(branch):
                    granted.append(Grant(place, num, branch.cause, number))
            if granted:
                return granted
        return []
