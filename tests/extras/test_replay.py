"""Gold traces are played again: the expert's, those of a file and of a buffer, as recorded and
after the tools have changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny import tiny

from treegraft.assemble import Parts
from treegraft.core.finding import Finding
from treegraft.core.types import StepContent
from treegraft.extras.data.replay import NUM_TRACES, replayed
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.tasks.build import build_tasks
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import split_steps


def findings(config: Config) -> dict[str, Finding]:
    async def found() -> Sequence[Finding]:
        async with Parts.build(config, needs="prompts") as setup:
            return await replayed(setup)

    return {one.name: one for one in asyncio.run(found())}


def written(steps: Sequence[StepContent], suffix: str) -> list[dict[str, Any]]:
    return [
        {
            "calls": [{"name": call.name, "body": call.body} for call in step.calls],
            "observations": [seen.text + suffix for seen in step.observations],
            "answer": step.answer,
        }
        for step in steps
    ]


def test_traces_as_recorded_and_traces_that_the_tools_contradict(tmp_path: Path) -> None:
    recipe = load_config(tiny())
    source = build_tasks(recipe.tasks, recipe.run.seed)
    solved = [(task, source.expert(task, 0) or ()) for task in source.train_tasks()]
    # Every second line was recorded when the tool said more.
    lines = [
        json.dumps({"question": task.question, "steps": written(steps, " now" if n % 2 else "")})
        for n, (task, steps) in enumerate(solved)
    ]
    (tmp_path / "traces.jsonl").write_text("\n".join(lines))
    about = {"reward": 1.0, "source": "expert", "trajectory": "0"}
    with TraceBuffer(tmp_path / "traces.sqlite", "hashing") as buffer:
        for task, steps in solved:
            buffer.add(split_steps(task.id, task.question, steps, **about))  # type: ignore[arg-type]
    config = load_config(
        tiny(
            warmup={"traces": str(tmp_path / "traces.jsonl")},
            buffer={"path": str(tmp_path / "traces.sqlite"), "encoder": "hashing"},
            explore={"explorers": ["graft"], "graft": {"num_hybrid": 2}},
        )
    )
    found = findings(config)
    changed = found.pop("warmup.traces")
    assert set(found) == {"the expert", "buffer.path"}
    for one in found.values():
        assert one.is_good and not one.is_doubtful and not one.note
        assert f"{NUM_TRACES} of {NUM_TRACES} traces replay as recorded" in one.value
    assert changed.is_good and changed.is_doubtful
    assert f"{NUM_TRACES // 2} of {NUM_TRACES} traces" in changed.value
    # Of the second task, whose first search is the first to differ.
    first = solved[1][1][0]
    seen = first.observations[0].text
    said = f"search {first.calls[0].body!r} gave {seen!r}; expected '{seen} now'"
    assert f"task '{solved[1][0].id}': {said}" in changed.note


def test_an_expert_without_results_is_played_in_its_environment() -> None:
    config = load_config("sokoban", smoke=True)
    (one,) = findings(config).values()
    assert one.name == "the expert" and one.is_good and not one.is_doubtful
    assert "8 of 8" in one.value and one.value.endswith("mean reward of their ends 1")
