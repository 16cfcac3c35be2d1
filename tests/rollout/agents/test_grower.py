"""Trees of agents that own their loop, and programs that crash, hang and flood."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.agents.support import (
    ANSWER,
    CALL,
    TASK,
    chat_format,
    engine_of,
    limits,
    solve,
    user,
)
from tests.support.error_codes import raises_code

from treegraft.core.errors import EngineError
from treegraft.core.types import Leaf, Origin, Status, Tree
from treegraft.explore.independent import Independent
from treegraft.rollout.agents import programs
from treegraft.rollout.agents.grower import AgentGrower
from treegraft.rollout.agents.programs import (
    CommandProgram,
    FunctionProgram,
    build_program,
    outcome_of,
)

ASK = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    key = "Bearer " + os.environ["OPENAI_API_KEY"]
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"authorization": key, "content-type": "application/json"}
    reply = urllib.request.urlopen(urllib.request.Request(address, body, headers))
    return json.load(reply)["choices"][0]["message"]["content"]
said = ask(json.loads(os.environ["TASK"])["question"])
"""


async def scored(tree: Tree) -> Tree:
    def reward(leaf: Leaf) -> float | None:
        own = leaf.environment_reward
        return (
            None
            if leaf.status is Status.FAILED
            else float(leaf.answer == "42")
            if own is None
            else own
        )

    return replace(tree, leaves=tuple(replace(leaf, reward=reward(leaf)) for leaf in tree.leaves))


def grown(program: Any, replies: Any, template: str = "qwen2_5", **more: Any) -> Tree:
    engine = replies if hasattr(replies, "complete") else engine_of(replies, template)
    grower = AgentGrower(
        engine,
        chat_format(template),
        None,
        Independent(),
        limits(**more),
        scored,
        program=program if hasattr(program, "run") else FunctionProgram(program),
        temperature=1.0,
    )
    (tree,) = asyncio.run(
        grower.grow_all([TASK], noise_key=(0,), group_prefix="1", max_live_trees=1)
    )
    check_contexts(tree, engine)
    return tree


def check_contexts(tree: Tree, engine: Any) -> None:
    """Law 5: each sampled step's context is exactly what the engine got."""
    by_id = {step.id: step for step in tree.steps}
    given = {one.noise_key[2:]: tuple(one.prefix_ids) for one in engine.calls}
    found = []
    for step in tree.steps:
        if step.origin is not Origin.POLICY:
            continue
        above = step.parent
        ids: list[int] = []
        while above is not None:
            ids[:0] = by_id[above].token_ids.tolist()
            above = by_id[above].parent
        found.append(tuple(ids))
    assert set(found) <= set(given.values())
    assert len(found) == sum(step.num_sampled > 0 for step in tree.steps)


def shape(tree: Tree) -> dict[str, str | None]:
    return {step.id: step.parent for step in tree.steps}


def by_text(text: str) -> str:
    return ANSWER if "= 42" in text else CALL


def test_contexts_that_only_grow_are_one_path() -> None:
    tree = grown(solve, by_text)
    assert shape(tree) == {
        "0": None,
        "0.0": "0",
        "0.0.0": "0.0",
        "0.0.0.0": "0.0.0",
        "0.1": "0",
        "0.1.0": "0.1",
        "0.1.0.0": "0.1.0",
    }
    assert [leaf.answer for leaf in tree.leaves] == ["42", "42"]
    assert [leaf.reward for leaf in tree.leaves] == [1.0, 1.0]
    step = tree.steps[1]
    assert step.content.calls[0].body == '{"text": "6 * 7"}'
    assert step.content.observations[0].text == "6 * 7 = 42"
    assert tree.budget.num_tool_calls == 2 and tree.budget.num_leaves == 2
    (one, *_) = tree.trajectories()
    assert len(one.rows()) == 1


def test_a_thought_that_the_template_drops_leaves_a_side_branch() -> None:
    def reply(text: str) -> str:
        return f"<think>\nhm\n</think>\n\n{by_text(text)}"

    tree = grown(solve, reply, num_leaves=1)
    found = shape(tree)
    assert found == {"0": None, "0.0": "0", "0.0.0": "0", "0.0.0.0": "0.0.0"}
    context = tree.steps[2]
    assert set(context.origins.tolist()) == {Origin.CONTEXT}
    assert "hm" not in chat_format().text_of(context.token_ids.tolist())
    assert tree.steps[1].content.thought == "hm"
    assert len(tree.trajectories()[0].rows()) == 2


def test_qwen3_keeps_thoughts_until_the_next_user_turn() -> None:
    def reply(text: str) -> str:
        return f"<think>\nhm\n</think>\n\n{by_text(text)}"

    async def agent(task: Any, client: Any) -> str:
        await solve(task, client)
        first = {"role": "assistant", "content": "42", "reasoning_content": "hm"}
        messages: list[Any] = [user(task.question), first, user("= 42 ?")]
        await client.chat.completions.create(model="m", messages=messages)
        return "42"

    tree = grown(agent, reply, "qwen3", num_leaves=1)
    found = list(shape(tree).items())
    # Within the turn the conversation only grows; the next one begins without the thought.
    assert found[1:4] == [("0.0", "0"), ("0.0.0", "0.0"), ("0.0.0.0", "0.0.0")]
    context = tree.steps[4]
    assert context.is_context and "hm" not in chat_format().text_of(context.token_ids.tolist())


def test_another_system_prompt_is_another_root_and_the_same_context_needs_no_step() -> None:
    async def agent(_: Any, client: Any) -> str:
        create = client.chat.completions.create
        await create(model="m", messages=[user("one")])
        await create(model="m", messages=[user("one")])
        other = [{"role": "system", "content": "sub"}, user("two")]
        await create(model="m", messages=other)
        await create(model="m", messages=[user("one")])
        return "42"

    tree = grown(agent, lambda _: ANSWER, num_leaves=1)
    assert shape(tree) == {
        "0": None,
        "0.0": "0",
        "0.0.0": "0",
        "0.0.0.0": None,
        "0.0.0.0.0": "0.0.0.0",
        "0.0.0.0.0.0": "0",
    }
    assert tree.leaves[0].step_id == "0.0.0.0.0.0"
    assert len(tree.trajectories()[0].rows()) == 4


def test_first_contexts_share_what_they_have_in_common() -> None:
    numbers = iter("ab")

    async def agent(_: Any, client: Any) -> Any:
        text = f"Say {next(numbers)}"
        await client.chat.completions.create(model="m", messages=[user(text)])
        return {"answer": "x", "reward": 0.25}

    tree = grown(agent, lambda _: ANSWER)
    assert shape(tree) == {"0": None, "0.0": "0", "0.0.0": "0.0", "0.1": "0", "0.1.0": "0.1"}
    assert chat_format().text_of(tree.root.token_ids.tolist()).endswith("Say ")
    assert [(leaf.answer, leaf.reward) for leaf in tree.leaves] == [("x", 0.25)] * 2


def test_parallel_calls_keep_the_order_of_their_arrival() -> None:
    async def reply(text: str) -> str:
        await asyncio.sleep(0.2 if "slow" in text else 0)
        return ANSWER

    async def agent(_: Any, client: Any) -> str:
        create = client.chat.completions.create
        slow = asyncio.create_task(create(model="m", messages=[user("slow")]))
        await asyncio.sleep(0.1)
        await create(model="m", messages=[user("fast")])
        await slow
        return "42"

    tree = grown(agent, reply, num_leaves=1)
    assert chat_format().text_of(tree.root.token_ids.tolist()).count("slow") == 1
    assert [step.id for step in tree.steps] == ["0", "0.0", "0.0.0", "0.0.0.0"]


def test_crashes_and_missing_answers_are_the_agents_fault() -> None:
    async def crash(task: Any, client: Any) -> None:
        await solve(task, client)
        raise KeyError("mine")

    (leaf, _) = grown(crash, by_text).leaves
    assert leaf.status is Status.FORMAT_VIOLATION and leaf.answer is None
    assert grown(crash, by_text).steps[3].violation == "the agent raised KeyError: 'mine'"

    assert grown(solve, by_text, max_agent_steps=1).leaves[0].status is Status.TRUNCATED
    assert grown(solve, by_text, max_completion_tokens=20).leaves[0].status is Status.TRUNCATED


def test_hangs_are_the_agents_unless_it_waits_for_us() -> None:
    async def hang(task: Any, client: Any) -> None:
        await solve(task, client)
        await asyncio.sleep(60)

    assert grown(hang, by_text, deadline_s=0.5, num_leaves=1).leaves[0].status is Status.TRUNCATED

    async def slow(text: str) -> str:
        if "= 42" in text:
            await asyncio.sleep(60)
        return CALL

    with raises_code("all-failed", kind=EngineError):
        grown(solve, slow, deadline_s=0.5)


def test_an_agent_without_a_call_has_failed() -> None:
    async def idle(task: Any, client: Any) -> str:
        if task.id == "t/1":
            raise RuntimeError("no")
        return "42"

    with pytest.raises(EngineError, match="RuntimeError: no"):
        grown(idle, by_text)


def command(tmp_path: Path, text: str) -> CommandProgram:
    file = tmp_path / "agent.py"
    file.write_text(ASK + text)
    return CommandProgram([sys.executable, str(file)])


def test_a_command_answers_by_its_last_line(tmp_path: Path) -> None:
    text = 'print("noise"); print(json.dumps({"answer": said, "reward": 0.5}))'
    tree = grown(command(tmp_path, text), lambda _: ANSWER)
    assert [(leaf.answer, leaf.reward) for leaf in tree.leaves] == [("It is 42.", 0.5)] * 2
    tree = grown(command(tmp_path, 'print("done")'), lambda _: ANSWER)
    assert [leaf.answer for leaf in tree.leaves] == ["42", "42"]


def test_a_command_that_crashes_hangs_or_floods_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "MAX_OUTPUT", 1 << 20)
    tree = grown(command(tmp_path, "sys.exit('broken')"), lambda _: ANSWER)
    assert tree.leaves[0].status is Status.FORMAT_VIOLATION
    assert tree.steps[1].violation == "the command ended with status 1: broken"

    flood = "while True: print('x' * 10000)"
    tree = grown(command(tmp_path, flood), lambda _: ANSWER, num_leaves=1)
    assert "MB of output" in str(tree.steps[1].violation)

    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    start = f"import subprocess, time; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    hang = command(tmp_path, f"{start}time.sleep(60)")
    tree = grown(hang, lambda _: ANSWER, num_leaves=1, deadline_s=2.0)
    assert tree.leaves[0].status is Status.TRUNCATED
    # A child with the output open does not delay the end.
    tree = grown(command(tmp_path, start), lambda _: ANSWER, num_leaves=1, deadline_s=2.0)
    assert tree.leaves[0].status is Status.COMPLETED
    assert not mark.exists()


def test_results_of_programs() -> None:
    assert outcome_of(None) == programs.Outcome()
    assert outcome_of({"answer": 4}).answer == "4"
    for wrong in ("x", float("nan"), [1]):
        assert outcome_of({"reward": wrong}).problem
    assert programs._last_line("a\n" + json.dumps([1])) == programs.Outcome()
    assert build_program("") is None
    with raises_code("agent-not-async"):
        build_program("json:dumps")
