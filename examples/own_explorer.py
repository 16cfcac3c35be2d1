"""An explorer of your own: where a call failed, the tree branches, so that the agent tries to mend
it twice.

python examples/own_explorer.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from treegraft import ScriptedEngine, read_trees, train
from treegraft.parts import Branch, BranchCause, Independent, PathView, Start


class Retry(Independent):
    """Opens half of the leaves at the root, and the others beside the step that follows a failed
    call."""

    probe_tokens = (
        0  # asked after each result; a number k would show it the entropies of the next k tokens
    )

    def starts(self, max_leaves: int) -> Start:
        return Start(max(1, max_leaves // 2))

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        has_failed = any(result.is_error for result in path.steps[-1].content.observations)
        return (
            Branch(1, BranchCause(entropy_change=0.0, probability=1.0, rule="retry"))
            if has_failed
            else None
        )


def make_engine(*, tokenizer: Any, **_: Any) -> ScriptedEngine:
    """Returns agents that forget the relation in every other first search, and then guess or search
    again."""
    guess = "<answer> \\boxed{ e0 } </answer>"
    search = "<search> {entity} {relation} </search>"
    first = cycle(["<search> {entity} </search>", search])
    second = cycle([guess, search, search, guess])

    def agent(path: str) -> str:
        relation, _, entity, *_ = path.split()  # "r1 of e42 ?"
        if f"{relation} of {entity} is" in path:
            return f"<answer> \\boxed{{ {path.rsplit(' is ', 1)[1].split()[0]} }} </answer>"
        return (
            next(second if "</result>" in path else first)
            .replace("{entity}", entity)
            .replace("{relation}", relation)
        )

    return ScriptedEngine(agent, tokenizer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            {
                "run": {"dir": folder, "num_updates": 1, "tasks_per_update": 1},
                "tasks": {"search_world": {"hops": [1]}},
                "engine": {"kind": make_engine},
                "explore": {"num_leaves": 6},
                "format": {"system_prompt": "", "require_think": False},
                "eval": {"every": 0, "at_start": False, "at_end": False},
            },
            explorer=Retry(),
        )
        for step in read_trees(result.run_dir)[0].steps[1:]:
            print(
                "  " * step.depth,
                step.id,
                type(step.cause).__name__,
                step.content.answer or step.content.calls[0].body,
            )
