"""A model in this process as an agent that fills the Step-Trace Buffer."""

from __future__ import annotations

import asyncio

from tests.traces.test_build_traces import format, world

from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, StepContent, Tree
from treegraft.explore.independent import Independent
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.agents import Attempt, CheckpointAgent


def test_a_model_here_answers_as_the_leaves_of_one_tree() -> None:
    text = {
        "0.0": "<answer> \\boxed{ e1 } </answer>",
        "0.1": "<result> e1 </result>",
        "0.2": "<search> e1 r1 </search>",
    }
    grown: list[str] = []

    class ByStart(ScriptedEngine):
        async def complete(self, request: Request) -> Completion:
            step_id = str(request.noise_key[-1])
            grown.append(step_id)
            engine = ScriptedEngine(lambda path: text[step_id[:3]], self._tokenizer)
            return await engine.complete(request)

    async def unscored(tree: Tree) -> Tree:
        return tree

    engine = ByStart(lambda path: "", format()._tokenizer)
    limits = Limits(
        num_leaves=3,
        temperature=1.0,
        max_completion_tokens=99,
        max_agent_steps=2,
        max_tool_calls=9,
        deadline_s=9.0,
    )

    async def run() -> list[Attempt]:
        tools = world().tools()
        box = Toolbox(tools, ToolsSettings(deadline_s=5.0, max_concurrent=4, cache=False))
        agent = CheckpointAgent(
            Grower(engine, format(), box, Independent(), limits, unscored),
            num_samples=3,
            max_live_trees=1,
            seed=0,
            source="m",
        )
        made = await asyncio.gather(
            *(
                agent.solve(task, sample)
                for task in world().train_tasks()[:2]
                for sample in range(3)
            )
        )
        await agent.close()
        await box.close()
        assert agent._growing == {}
        return list(made)

    made = asyncio.run(run())
    assert made[0] == Attempt(contents=(StepContent(answer="e1"),)) == made[3]
    assert made[1].error == "not in the format: <result> is not the agent's to write"
    assert made[2].error == "no answer within its limits: agent_steps"
    assert len(grown) == 8
