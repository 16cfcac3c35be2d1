"""What a script or a notebook gets back from a run: metrics, trees, an agent, the viewer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft import RunResult, answer_question, train
from treegraft.core.errors import SettingError
from treegraft.evals.agent import Agent, Answer
from treegraft.runs.record import read_metrics, read_trees


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("result")
    return train(tiny(run={"dir": str(folder), "name": "a"}), display=False)


@pytest.fixture(scope="module")
def question(result: RunResult) -> str:
    return result.trees()[0].task.question


# --- what is read ---------------------------------------------------------------------------------


def test_metrics_of_each_update_and_evaluations_are_read(result: RunResult) -> None:
    lines = read_metrics(result.run_dir)
    assert result.history == lines and [line["update"] for line in lines] == [0, 1, 2]
    accuracies = [line["eval/accuracy"] for line in lines]
    assert [one["accuracy"] for one in result.evaluations] == accuracies
    assert [one["update"] for one in result.evaluations] == [0, 1, 2]
    assert not any("reward/mean" in one or "mean" in one for one in result.evaluations)


def test_trees_of_an_update(result: RunResult) -> None:
    for update in (1, 2):
        path = result.run_dir / "trees" / f"update-00000{update}.jsonl"
        assert result.trees(update) == read_trees(path)
    assert result.trees() == result.trees(2)
    with raises_code("update-without-trees"):
        result.trees(7)


def test_an_earlier_run_is_read_from_its_folder(result: RunResult, tmp_path: Path) -> None:
    assert RunResult.read(str(result.run_dir)) == result
    with raises_code("not-a-run"):
        RunResult.read(tmp_path / "nothing")


def test_it_is_one_line(result: RunResult) -> None:
    text = repr(result)
    assert text.startswith(f"<RunResult {str(result.run_dir)!r}: checkpoint update-000002, ")
    assert f"eval/accuracy {result.metrics['eval/accuracy']:.3g}" in text and "\n" not in text


# --- the agent ------------------------------------------------------------------------------------


def test_the_agent_answers_as_the_command_does(result: RunResult, question: str) -> None:
    """From a script, under a running event loop, and at the same time: one greedy answer."""
    expected, tokenizer = answer_question(result.run_dir, question)

    async def notebook() -> list[Answer]:
        async with result.agent() as agent:
            found = [await agent(question), agent.ask(question)]
            return [*found, *await asyncio.gather(agent(question), agent(question))]

    with result.agent() as agent:
        answers = [agent.ask(question), *asyncio.run(notebook())]
    assert len(answers) == 5
    for one in answers:
        assert one.trajectory.token_ids == expected.token_ids
        assert one.text == expected.leaf.answer and one.trajectory.reward is None
        contents = list(expected.contents)
        assert [call for call, _ in one.tool_calls] == [
            call for content in contents for call in content.calls[: len(content.observations)]
        ]
    assert tokenizer.decode(answers[0].trajectory.prompt_ids)
    assert "\n" not in repr(answers[0]) and answers[0]._repr_html_().startswith("<pre")


def test_a_conversation_goes_on(result: RunResult, question: str) -> None:
    agent: Agent = result.agent(system_prompt="r1 of e1 ?")
    with agent:
        first = agent.ask(question)
        assert first.messages == [
            {"role": "user", "content": question},
            {"role": "assistant", "content": first.text or ""},
        ]
        second = agent.ask("r2 of e2 ?", history=first.messages)
        prompts = [
            one.tokenizer.decode(one.trajectory.prompt_ids, skip_special_tokens=False)
            for one in (first, second)
        ]
    # The system prompt, the question, the answer and the next question, in this order.
    for prompt, parts in zip(
        prompts, (["r1 of e1", question], ["r1 of e1", question, "r2 of e2"]), strict=True
    ):
        places = [prompt.index(part.removesuffix(" ?")) for part in parts]
        assert all(a < b for a, b in pairwise([-1, *places]))
    with raises_code("history-invalid", match="history: got a message with the role 'ghost'"):
        agent.ask(question, history=[{"role": "ghost", "content": "x"}])
    with raises_code("question-empty", match="question: got ' '"):
        agent.ask(" ")
    with raises_code("question-empty", match="question: got 5"):
        agent.ask(5)  # type: ignore[arg-type]
    agent.close()


def test_a_cancelled_question_ends_and_the_agent_goes_on(result: RunResult, question: str) -> None:
    async def notebook() -> None:
        async with result.agent() as agent:
            asked = asyncio.create_task(agent(question))
            while not agent._asked:
                await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert not agent._asked
            assert (await agent(question)).trajectory.token_ids

    asyncio.run(notebook())
    assert not [one for one in threading.enumerate() if one.name == "treegraft-agent"]


def test_an_agent_that_cannot_be_loaded_says_why_each_time(result: RunResult) -> None:
    agent = result.agent("tools.use=['tests.support.tiny_parts:nothing']")
    for _ in range(2):
        with raises_code("import-name-missing"):
            agent.ask("?")
    agent.close()
    with raises_code("override-idle"):
        result.agent("eval.temperature=0.5")


# --- the viewer, and progress in a notebook -------------------------------------------------------


def test_the_viewer_is_served_until_it_is_closed(
    result: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    viewer = result.view()
    assert opened == [viewer.url] and viewer.url in repr(viewer)
    answer = httpx.get(f"{viewer.url}api/runs")
    assert [one["name"] for one in answer.json()] == ["a"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    viewer.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(viewer.url)


def test_an_agent_knows_the_objects_of_its_run(tmp_path: Path) -> None:
    def brief(completions: list[str], **_: Any) -> list[float]:
        return [1 / (1 + len(one)) for one in completions]

    def shout(text: str) -> str:
        """Returns the text in capitals."""
        return text.upper()

    run = {"dir": str(tmp_path), "num_updates": 1, "tasks_per_update": 2, "name": "own"}
    settings = tiny(run=run, warmup={"num_steps": 0})
    settings["reward"] = {}
    result = train(settings, rewards=brief, tools=shout, display=False)
    with result.agent() as agent:
        assert agent.ask("r1 of e2 ?").trajectory.status
    read = RunResult.read(result.run_dir)
    with pytest.raises(SettingError), read.agent() as agent:
        agent.ask("r1 of e2 ?")
    with read.agent(rewards=brief, tools=shout) as agent:
        assert agent.ask("r1 of e2 ?").trajectory.status
