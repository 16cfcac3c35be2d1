"""A credit rule of your own: what a step is worth is how much better the leaves below it did than
those below its parent.

In the manner of TreeRL and Tree-GRPO: the value of a step is the mean reward below it, and its
advantage the rise of that value, so that a search that helped is praised also where the answer
after it was wrong.

    python examples/own_credit.py
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from statistics import fmean

from own_explorer import Retry, make_engine

from treegraft import Tree, read_trees, train


def rise(tree: Tree) -> Tree:
    """Returns the tree with the advantage of each step; leaves keep theirs, which steps with a
    value of their own override."""
    below: dict[str, list[float]] = {step.id: [] for step in tree.steps}
    for path in tree.trajectories():
        if path.reward is not None:
            for step in path.steps:
                below[step.id].append(path.reward)
    value = {step: fmean(rewards) for step, rewards in below.items() if rewards}
    steps = [
        replace(s, advantage=value[s.id] - value[s.parent]) if s.parent and s.id in value else s
        for s in tree.steps
    ]
    return replace(tree, steps=tuple(steps))


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
            rewards="exact_match",
            credit=rise,
        )
        for step in read_trees(result.run_dir)[0].steps[1:]:
            print(
                f"{step.id:8} {step.advantage:+.2f} "
                f" {[c.body for c in step.content.calls] or step.content.answer}"
            )
