"""What a tree may still spend; one account per tree."""

from __future__ import annotations

from dataclasses import replace

from treegraft.types import BudgetState


class Budget:
    """Grants leaves up to a limit and keeps count of what was used."""

    def __init__(self, max_leaves: int) -> None:
        self.max_leaves = max_leaves
        self.state = BudgetState()

    def grant(self, num_leaves: int) -> int:
        """Returns how many of the proposed leaves may be opened, and books them."""
        granted = max(0, min(num_leaves, self.max_leaves - self.state.num_leaves))
        self.state = replace(self.state, num_leaves=self.state.num_leaves + granted)
        return granted

    def spend(self, *, num_tool_calls: int = 0, num_sampled_tokens: int = 0) -> None:
        """Books tool calls and sampled tokens."""
        self.state = replace(
            self.state,
            num_tool_calls=self.state.num_tool_calls + num_tool_calls,
            num_sampled_tokens=self.state.num_sampled_tokens + num_sampled_tokens,
        )
