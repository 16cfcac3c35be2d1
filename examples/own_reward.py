"""A reward of your own beside a built-in one: right answers count, and every call costs a little.

python examples/own_reward.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from treegraft import ScriptedEngine, Trajectory, read_trees, train


def thrift(*, trajectories: Sequence[Trajectory], **columns: Any) -> list[float]:
    """Returns minus the number of tool calls; `columns` holds prompts, completions, reference and
    the data set's own."""
    return [-float(trajectory.num_tool_calls) for trajectory in trajectories]


def make_engine(*, tokenizer: Any, **_: Any) -> ScriptedEngine:
    """Returns agents that guess, look it up, and look up something else first."""
    first = cycle(
        [
            "<answer> \\boxed{ e0 } </answer>",
            "<search> {entity} {relation} </search>",
            "<search> e0 r0 </search>",
        ]
    )

    def agent(path: str) -> str:
        relation, _, entity, *_ = path.split()  # "r1 of e42 ?"
        if "</result>" not in path:
            return next(first).replace("{entity}", entity).replace("{relation}", relation)
        if f"{relation} of {entity} is" in path:
            return f"<answer> \\boxed{{ {path.rsplit(' is ', 1)[1].split()[0]} }} </answer>"
        return f"<search> {entity} {relation} </search>"

    return ScriptedEngine(agent, tokenizer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            {
                "run": {"dir": folder, "num_updates": 1, "tasks_per_update": 1},
                "tasks": {"search_world": {"hops": [1]}},
                "engine": {"kind": make_engine},
                "reward": {"weights": [1.0, 0.1]},
                "format": {"system_prompt": "", "require_think": False},
                "explore": {"num_leaves": 3},
                "eval": {"every": 0, "at_start": False, "at_end": False},
            },
            rewards=["exact_match", thrift],
        )
        for leaf in read_trees(result.run_dir)[0].leaves:
            print(
                f"{dict(leaf.reward_parts)} -> {leaf.reward:.1f}, advantage {leaf.advantage:+.2f}"
            )
