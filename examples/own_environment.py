"""An environment of your own, a key and a locked door, where trees branch in the middle of a game.

The agent is scripted, so this takes seconds; without the [engine] line the model itself would play.
python examples/own_environment.py
"""

import tempfile
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from treegraft import ScriptedEngine, read_trees, train


class KeyDoor:
    """One object for each trajectory; its public methods are the agent's tools."""

    capability = "fork"  # a branch goes on in a deep copy of the object

    def reset(self, **row: Any) -> None:
        self.has_key = self.is_open = (
            False  # `row` holds the task's columns, question, reference and a seed
        )

    def take(self) -> str:
        """Takes the key."""
        self.has_key = True
        return "taken"

    def unlock(self) -> str:
        """Unlocks the door, with a key."""
        self.is_open = self.has_key
        return "open" if self.is_open else "locked"

    def get_reward(self) -> float:
        return float(self.is_open)


def make_engine(*, tokenizer: Any, **_: Any) -> ScriptedEngine:
    """Returns agents that take the key, and then unlock the door or give up: they are unsure what
    to do with it."""
    second = cycle(["<unlock> </unlock>", "<answer> \\boxed{ e0 } </answer>"])
    replies: list[str | Iterator[str]] = [
        "<take> </take>",
        second,
        "<answer> \\boxed{ e1 } </answer>",
    ]

    def agent(path: str) -> str:
        reply = replies[path.count("</result>")]
        return reply if isinstance(reply, str) else next(reply)

    return ScriptedEngine(
        agent, tokenizer, entropy=lambda path: float(path.count("</result>") == 1)
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = {"dir": folder, "num_updates": 1, "tasks_per_update": 1}
        explore = {
            "explorers": ["entropy"],
            "num_leaves": 2,
            "entropy": {"num_starts": 1, "probe_tokens": 2},
        }
        result = train(
            {
                "run": run,
                "explore": explore,
                "engine": {"kind": make_engine},
                "format": {"system_prompt": "", "require_think": False},
                "eval": {"every": 0, "at_start": False, "at_end": False},
            },
            environment=KeyDoor,
            rewards="environment",
        )
        for path in read_trees(result.run_dir)[0].trajectories():
            seen = [one.text for content in path.contents for one in content.observations]
            print(f"{path.leaf.step_id}: {seen}, reward {path.reward}")
