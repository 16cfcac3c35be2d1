"""A toy agent that summarises its history, asks two subagents at a time and goes back: what it
saw is what is learned from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rollout.agents.support import user
from tests.rollout.agents.test_recipe import settings  # noqa: F401
from tests.support.slow_learner import (
    assert_scores_equal,
    gradient_of,
    make_learner,
    saw,
    slow_loss,
)
from tests.support.tiny_chat import tiny_chat
from transformers import AutoModelForCausalLM

from treegraft import Session
from treegraft.core.types import Tree
from treegraft.policy.learn.pack import pack_trees
from treegraft.settings.policy import LossSettings


async def compacting(task: Any, client: Any) -> dict[str, Any]:
    async def ask(messages: list[Any]) -> str:
        reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
        return str(reply.choices[0].message.content)

    async def sub(name: str) -> str:
        return await ask([{"role": "system", "content": name}, user("Look.")])

    messages: list[Any] = [user(task.question)]
    heard = ""
    for turn in range(4):
        said = await ask(messages)
        heard += said
        messages += [{"role": "assistant", "content": said}, user("And?")]
        if turn == 1:
            summary = await ask([{"role": "system", "content": "Summarise."}, user(heard)])
            messages = [user(f"{task.question} So far: {summary}")]
        if turn == 2:
            found = await asyncio.gather(sub("one"), sub("two"))
            messages.append(user(" ".join(found)))
    return {"answer": "x", "reward": float(sum(map(ord, heard)) % 7)}


@pytest.fixture(params=["independent", "entropy"])
def sampled(request: Any, settings: dict[str, Any], tmp_path: Path) -> tuple[list[Tree], Any]:  # noqa: F811
    settings.pop("agent")
    settings["explore"] = {"explorers": [request.param], "num_leaves": 4}
    settings["model"]["dtype"] = "float32"
    with Session(settings, agent=compacting) as session:
        trees = list(session.credit(session.sample(1)))
    model = AutoModelForCausalLM.from_pretrained(tiny_chat(tmp_path / "twin"))
    return trees, model.eval()


def test_steps_hang_below_what_they_saw(sampled: tuple[list[Tree], Any]) -> None:
    trees, _ = sampled
    shapes = []
    for path in (path for tree in trees for path in tree.trajectories()):
        # Two turns, a summary, a turn after it, two subagents, the last turn.
        steps = [step for step in path.steps if step.num_sampled]
        assert len(steps) == 7
        seen = []
        for step in steps:
            above = [one.id for one in saw(path, step)[:-1]]
            seen.append([steps.index(one) for one in steps if one.id in above])
        # A turn that continues another one shares its row.
        assert len(path.rows()) == sum(not one for one in seen)
        shapes.append(seen)
    # Of a turn whose text cannot be sent back as it was, such as half a character, the next one
    # sees what the agent made of it.
    assert [[], [0], [], [], [], [], [3]] in shapes
    for seen in shapes:
        assert seen[1] in ([0], []) and seen[6] in ([3], []) and seen[2:6] == [[]] * 4


def test_law_1_packed_is_each_step_in_its_context(sampled: tuple[list[Tree], Any]) -> None:
    trees, model = sampled
    twin = AutoModelForCausalLM.from_pretrained(model.name_or_path).eval()
    batch = pack_trees(trees)
    assert_scores_equal(model, batch)
    assert batch.num_tokens < batch.num_path_tokens
    loss = LossSettings()
    learner, descent = make_learner(model, loss)
    _, metrics = learner.learn(trees)
    expected = slow_loss(twin, trees, loss, 7.0)
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    expected.backward()
    gap = torch.linalg.norm(descent.gradients[0] - gradient_of(twin))
    assert gap <= 1e-5 * gradient_of(twin).norm() + 1e-7
