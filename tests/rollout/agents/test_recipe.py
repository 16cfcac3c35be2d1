"""Recipes with an [agent]: a whole run with a tiny model, and what is refused before work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.agents.support import user
from tests.support.error_codes import raises_code
from tests.support.tiny_chat import tiny_chat

import treegraft


async def talk(task: Any, client: Any) -> dict[str, Any]:
    """Two conversations of two turns, with a reward that depends on what was said."""
    said = ""
    for system in ("Be brief.", "Be long."):
        messages: list[Any] = [{"role": "system", "content": system}, user(task.question)]
        for _ in range(2):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=6
            )
            text = str(reply.choices[0].message.content)
            messages += [{"role": "assistant", "content": text}, user("And?")]
            said += text
    return {"answer": said[:1], "reward": float(sum(map(ord, said)) % 7)}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    rows = [{"question": f"{n} + {n} ?", "answer": str(2 * n)} for n in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "run": {
            "dir": str(tmp_path / "runs"),
            "num_updates": 1,
            "tasks_per_update": 2,
            "num_threads": 1,
        },
        "model": {"path": str(tiny_chat(tmp_path / "model"))},
        "tasks": {
            "kind": "dataset",
            "num_train": 4,
            "num_eval": 2,
            "dataset": {
                "train": [str(data)],
                "question_column": "question",
                "reference_column": "answer",
            },
        },
        "agent": {"run": "tests.rollout.agents.test_recipe:talk"},
        "format": {"kind": "chat"},
        "reward": {"funcs": ["environment"]},
        "explore": {"num_leaves": 3},
        "rollout": {"max_completion_tokens": 64},
        "eval": {"every": 0, "at_start": False},
        "learn": {"lr": 1e-3},
    }


@pytest.mark.parametrize("explorer", ["independent", "entropy"])
def test_a_run_learns_from_contexts_of_their_own(settings: dict[str, Any], explorer: str) -> None:
    settings["explore"] |= {"explorers": [explorer], "num_leaves": 6, "entropy": {"num_starts": 2}}
    runs = [treegraft.train(settings) for _ in range(2)]
    lines = []
    for run in runs:
        text = (Path(run.run_dir) / "metrics.jsonl").read_text().splitlines()[-1]
        lines.append({k: v for k, v in json.loads(text).items() if not k.startswith("time/")})
    assert lines[0] == lines[1]
    assert lines[0]["learn/grad_norm"] > 0
    assert lines[0]["rollout/completed_frac"] == 1
    # Contexts and prompts are computed once for all rollouts that share them.
    assert lines[0]["learn/unique_frac"] < 1
    # What the engine sampled with is what the learner computes for the same contexts.
    assert lines[0]["learn/engine_gap"] < 1e-4
    assert lines[0]["agent/num_diverged"] == 0
    assert (lines[0]["agent/num_replays"] > 0) is (explorer == "entropy")


def test_an_agent_is_a_python_object(settings: dict[str, Any]) -> None:
    by_name = treegraft.train(settings)
    del settings["agent"]
    calls = []

    async def closure(task: Any, client: Any) -> Any:
        calls.append(task.id)
        return await talk(task, client)

    result = treegraft.train(settings, agent=closure)
    assert len(calls) >= 6
    assert result.metrics["reward/mean"] == by_name.metrics["reward/mean"]
    again = Path(treegraft.train(settings, agent=talk).run_dir)
    assert f'"{__name__}:talk"' in (again / "config.json").read_text()
    script = "import os; assert os.environ['TASK']; print('{\"answer\": \"4\"}')"
    with raises_code("all-failed"):  # it asks for no completion
        treegraft.train(settings, agent=[sys.executable, "-c", script])
    with raises_code("argument-invalid"):
        treegraft.train(settings, agent=3)  # type: ignore[arg-type]


def test_prompts_of_our_own_loop_do_not_limit_an_agents(settings: dict[str, Any]) -> None:
    """With a place for tools ours would have 500 tokens; those of the agent have 60."""
    settings["rollout"]["max_completion_tokens"] = 4000
    settings["run"]["num_updates"] = 0
    settings["eval"] = {"every": 0, "at_end": False}
    assert "eval/accuracy" in treegraft.train(settings).metrics


@pytest.mark.parametrize(
    ("table", "change", "named"),
    [
        ("format", {"kind": "tags"}, "format.kind"),
        ("tools", {"use": ["search"]}, "tools.use"),
        ("explore", {"explorers": ["commit"]}, "explore.explorers"),
        ("warmup", {"num_steps": 3}, "warmup.traces"),
    ],
)
def test_what_belongs_to_our_own_loop_is_refused(
    settings: dict[str, Any], table: str, change: dict[str, Any], named: str
) -> None:
    settings[table] = {**settings.get(table, {}), **change}
    if table == "tools":
        settings["tools"] = {"use": ["tests.rollout.agents.test_recipe:lookup"]}
    with raises_code("settings-contradict", "agent.run", named):
        treegraft.train(settings)


async def lookup(query: str) -> str:
    """Looks a word up."""
    return query


def test_an_agent_that_is_not_there_is_refused(settings: dict[str, Any]) -> None:
    settings["agent"] = {"run": "tests.rollout.agents.test_recipe:nobody"}
    with raises_code("import-name-missing"):
        treegraft.train(settings)
