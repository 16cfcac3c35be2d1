"""Filling the Step-Trace Buffer: which trajectories are kept, what is counted, and what is left
after a stop."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code

from treegraft.core.types import Observation, Origin, StepContent, Task, ToolCall
from treegraft.policy.tiny import build_word_tokenizer
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.settings.explore import BuildSettings
from treegraft.settings.tasks import RewardSettings, SearchWorldSettings
from treegraft.tasks.rewards import RewardScorer, build_rewards
from treegraft.tasks.search_world import SearchWorld
from treegraft.traces.agents import Attempt, ScriptedAgent
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.collect import (
    OUTAGES,
    BuildReport,
    ScoredAgent,
    attempts_tree,
    build_traces,
)
from treegraft.traces.keys import retrieval_key, split_steps

WORLD = SearchWorldSettings(hops=[1, 2], num_entities=8, num_relations=5)
LOOK_UP = StepContent(
    thought="look\n it  up",
    calls=(ToolCall("search", " e9 r2 "),),
    observations=(Observation(text="r2 of e9\tis e41"),),
)


@functools.cache
def world() -> SearchWorld:
    return SearchWorld(WORLD, seed=3, num_train=6, num_eval=2)


@functools.cache
def format() -> TagsFormat:
    tokenizer = build_word_tokenizer([*world().vocabulary(), "a", "b", ":"])
    return TagsFormat(tokenizer, world().tools(), system_prompt="", require_think=False)


SCORER = RewardScorer(
    build_rewards(RewardSettings(funcs=["hierarchical"], accuracy="exact_match")),
    written_text=format().written_text,
)


class Numbered:
    """Answers right in the samples it is told, and otherwise what its sample says."""

    source = "numbered"

    def __init__(self, right: set[int], results: dict[int, Attempt] | None = None) -> None:
        self.right = right
        self.results = results or {}
        self.asked: list[tuple[str, int]] = []

    async def solve(self, task: Task, sample: int) -> Attempt:
        self.asked.append((task.id, sample))
        # Later samples end first.
        await asyncio.sleep(0.002 / (1 + sample))
        if sample in self.results:
            return self.results[sample]
        thought = " ".join(["a"] * (sample + 1))
        answer = task.reference[0] if sample in self.right else "e0 e0"
        return Attempt(contents=(StepContent(thought=thought, answer=answer),))

    async def close(self) -> None:
        pass


def build(
    path: Path,
    agent: Any,
    *,
    seed: int = 0,
    report: BuildReport | None = None,
    **options: Any,
) -> tuple[BuildReport, list[Any]]:
    asked = ScoredAgent(agent=agent, format=format(), scorer=SCORER)
    own = BuildSettings(**options)
    with TraceBuffer(path, "hashing") as buffer:
        work = build_traces(world().train_tasks(), asked, own, buffer, seed=seed, report=report)
        return asyncio.run(work), list(buffer)


# Keys


def test_a_key_by_hand() -> None:
    assert (
        retrieval_key(" r5 of\nr2 of e9 ? ", [LOOK_UP])
        == "r5 of r2 of e9 ?\nlook it up\nsearch e9 r2\nr2 of e9 is e41"
    )
    assert retrieval_key("q", []) == "q"
    two = StepContent(
        calls=(ToolCall("a", "1"), ToolCall("b", "2")),
        observations=(Observation(text="x"), Observation(text="y")),
    )
    assert retrieval_key("q", [two]) == "q\na 1\nx\nb 2\ny"


def test_a_trajectory_is_split_into_steps_under_what_stood_before() -> None:
    last = StepContent(thought="so", answer="e41")
    first, second = split_steps(
        "t", "q ?", [LOOK_UP, last], reward=0.5, source="s", trajectory="3", policy_version=7
    )
    assert (first.key, first.position, first.terminal, first.value) == ("q ?", 0, False, LOOK_UP)
    assert (second.key, second.position, second.terminal) == (
        "q ?\nlook it up\nsearch e9 r2\nr2 of e9 is e41",
        1,
        True,
    )
    assert {
        (t.task_id, t.reward, t.source, t.trajectory, t.policy_version) for t in (first, second)
    } == {("t", 0.5, "s", "3", 7)}


# Building


def test_the_best_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    report, traces = build(tmp_path / "b", Numbered({1, 3, 4, 6}), num_samples=8, num_best=3)
    assert (
        report.num_tasks,
        report.num_attempts,
        report.num_kept,
        report.num_surplus,
        report.num_too_low,
    ) == (6, 48, 18, 6, 24)
    assert report.mean_reward == pytest.approx(4 * 1.0 / 8)
    assert (report.num_new, report.num_duplicates, len(traces)) == (18, 0, 18)
    assert {int(trace.trajectory) for trace in traces} <= {1, 3, 4, 6}
    assert all(
        trace.terminal and trace.position == 0 and trace.source == "numbered" for trace in traces
    )


def test_ties_are_broken_by_the_seed_and_nothing_else(tmp_path: Path) -> None:
    chosen = {}
    for name, seed, concurrency in (("a", 1, 16), ("b", 1, 2), ("c", 2, 16)):
        _, traces = build(
            tmp_path / name,
            Numbered(set(range(8))),
            num_samples=8,
            num_best=2,
            seed=seed,
            max_concurrent=concurrency,
        )
        chosen[name] = [(trace.task_id, trace.trajectory) for trace in traces]
    assert chosen["a"] == chosen["b"] != chosen["c"]


def test_failures_are_counted_by_reason_and_the_rest_is_kept(tmp_path: Path) -> None:
    failed = {
        0: Attempt(error="no reply"),
        1: Attempt(error="no reply"),
        2: Attempt(error="nonsense", contents=(LOOK_UP,)),
    }
    report, traces = build(tmp_path / "b", Numbered({3}, failed), num_samples=5, num_best=5)
    assert dict(report.failures) == {"no reply": 12, "nonsense": 6}
    assert (report.num_kept, report.num_too_low, len(traces)) == (6, 6, 6)


def test_an_agent_out_of_reach_ends_the_build_with_what_was_done(tmp_path: Path) -> None:
    tasks = world().train_tasks()

    class Dying(Numbered):
        async def solve(self, task: Task, sample: int) -> Attempt:
            if task.id == tasks[0].id:
                return await super().solve(task, sample)
            return Attempt(error="no reply", is_outage=True)

    report = BuildReport()
    with raises_code("agent-out-of-reach"):
        build(tmp_path / "b", Dying({0}), num_samples=OUTAGES // 2, report=report)
    assert (report.num_tasks, report.num_new) == (2, 1)
    with TraceBuffer.open_as_built(tmp_path / "b") as buffer:
        assert [trace.task_id for trace in buffer] == [tasks[0].id]


def test_tasks_that_are_done_are_skipped(tmp_path: Path) -> None:
    tasks = [task.id for task in world().train_tasks()]
    first = Numbered({0})
    again = Numbered({0})
    other = Numbered({0})
    other.source = "other"
    build(tmp_path / "b", first, num_samples=1, num_tasks=4)
    report, _ = build(tmp_path / "b", again, num_samples=1)
    assert (report.num_skipped, report.num_tasks) == (4, 2)
    assert [task for task, _ in first.asked] == tasks[:4]
    assert [task for task, _ in again.asked] == tasks[4:]
    # Traces of one agent are no reason to skip the tasks of another.
    assert build(tmp_path / "b", other, num_samples=1, num_tasks=3)[0].num_skipped == 0
    assert [task for task, _ in other.asked] == tasks[:3]


def test_a_stopped_build_keeps_whole_tasks_and_goes_on_to_the_same_buffer(tmp_path: Path) -> None:
    def work(buffer: TraceBuffer, max_concurrent: int = 16, **options: Any) -> Any:
        asked = ScoredAgent(agent=Numbered({0, 1}), format=format(), scorer=SCORER)
        own = BuildSettings(num_samples=2, max_concurrent=max_concurrent)
        return build_traces(world().train_tasks(), asked, own, buffer, **options)

    with TraceBuffer(tmp_path / "whole", "hashing") as buffer:
        asyncio.run(work(buffer))
        expected = buffer.checksum()

    async def stopped(buffer: TraceBuffer) -> None:
        under_way: asyncio.Task[BuildReport]

        def stop(done: int, total: int, report: BuildReport) -> None:
            if done == 2:
                under_way.cancel()

        under_way = asyncio.create_task(work(buffer, 2, on_progress=stop))
        with pytest.raises(asyncio.CancelledError):
            await under_way
        assert len(asyncio.all_tasks()) == 1

    with TraceBuffer(tmp_path / "b", "hashing") as buffer:
        asyncio.run(stopped(buffer))
        # One more task may have been on its way into the file.
        assert len(buffer) == 2 * len({trace.task_id for trace in buffer}) in (4, 6)
        asyncio.run(work(buffer))
        assert buffer.checksum() == expected


def test_the_scripted_expert_fills_a_buffer(tmp_path: Path) -> None:
    agent = ScriptedAgent(world(), seed=0)
    report, traces = build(tmp_path / "b", agent, num_samples=4, num_best=2)
    hops = [int(task.columns["hops"]) for task in world().train_tasks()]
    # There is one way to do it, so the second trajectory of each task is the first again.
    assert report.num_new == sum(hops) + len(hops) == report.num_duplicates
    assert report.mean_reward == 1.0
    by_task = [trace for trace in traces if trace.task_id == "search_world/train/1"]
    assert [trace.position for trace in by_task] == [0, 1, 2]
    assert by_task[1].key.startswith(by_task[0].key)


def test_attempts_become_paths_of_one_tree() -> None:
    task = world().train_tasks()[0]
    steps = [
        StepContent(calls=(ToolCall("search", "e1 r1"),), observations=(Observation(text="e2"),)),
        StepContent(answer="e2"),
    ]
    tree = attempts_tree(format(), task, [steps, [StepContent(answer="e3")]])
    assert [step.id for step in tree.steps] == ["0", "0.0", "0.0.0", "0.1"]
    assert [leaf.answer for leaf in tree.leaves] == ["e2", "e3"]
    assert list(tree.trajectories()[0].contents) == steps
    assert tree.trajectories()[0].origins.count(Origin.TOOL) == 3
    assert not any(tree.trajectories()[0].loss_mask)


def test_a_step_that_the_format_cannot_say_is_still_scored() -> None:
    task = world().train_tasks()[0]
    other = StepContent(calls=(ToolCall("browse", "a"),), observations=(Observation(text="b"),))
    tree = attempts_tree(format(), task, [[other, StepContent(answer=task.reference[0])]])
    assert tree.steps[1].origin is Origin.POLICY
    assert asyncio.run(SCORER(tree)).leaves[0].reward == 1.0
