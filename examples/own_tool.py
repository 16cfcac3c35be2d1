"""A tool of your own: a typed function with a docstring.

The agent is scripted, so this takes seconds; without the [engine] line the model itself would play.

    python examples/own_tool.py
"""

from __future__ import annotations

import tempfile
from typing import Any

from treegraft import ScriptedEngine, Task, read_trees, train


async def shortcut(relation: str, task: Task) -> str:
    """Returns where the whole question leads. Write its first word."""
    if relation not in task.question:
        raise ValueError(f"{relation} is not in the question")  # becomes text that the agent reads
    return str(task.reference[0])


def agent(path: str) -> str:
    """Uses the tool with a word that is not in the question, then rightly, then answers."""
    if "</result>" not in path:
        return "<shortcut> unknown </shortcut>"
    if path.count("</result>") == 1:
        return f"<shortcut> {path.split()[0]} </shortcut>"
    found = path.rsplit("<result>", 1)[1].split()[0]
    return f"<answer> \\boxed{{ {found} }} </answer>"


def make_engine(*, tokenizer: Any, **_: Any) -> ScriptedEngine:
    """Returns the engine that `engine.kind` names."""
    return ScriptedEngine(agent, tokenizer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            {
                "run": {"dir": folder, "num_updates": 1, "tasks_per_update": 2},
                "engine": {"kind": make_engine},
                "format": {"system_prompt": "", "require_think": False},
                "explore": {"num_leaves": 2},
                "eval": {"every": 0, "at_start": False, "at_end": False},
            },
            tools=[shortcut],
        )
        trajectory = read_trees(result.run_dir)[0].trajectories()[0]
        print(trajectory.task.question)
        for content in trajectory.contents:
            print(
                [
                    f"{c.name}({c.body}) -> {o.text}"
                    for c, o in zip(content.calls, content.observations, strict=True)
                ]
            )
        print(f"answer {trajectory.leaf.answer}, reward {trajectory.reward}")
