"""Trees of agents that own their loop: rollouts first, then a tree of what each call saw.

0          the first context, as far as all rollouts share it
├─ 0.0     rollout 0: a completion; then, in time order, further contexts and completions
└─ 0.1     rollout 1
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import NoiseKey, Serving
from treegraft.core.types import (
    ROOT_ID,
    Cause,
    ContextCause,
    ContinuationCause,
    Leaf,
    Observation,
    Origin,
    Start,
    StartCause,
    Status,
    Step,
    StepContent,
    StopReason,
    Task,
    ToolCall,
    Tree,
)
from treegraft.explore.budget import Budget
from treegraft.explore.compose import asking
from treegraft.rollout.agents.endpoint import Call, Endpoint, Session
from treegraft.rollout.agents.programs import Outcome, Program
from treegraft.rollout.formats.markup import Violation
from treegraft.rollout.loop import Grower


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A program's run: its calls and how it ended."""

    calls: Sequence[Call]
    status: Status
    answer: str | None = None
    reward: float | None = None
    problem: str = ""
    """What went wrong; empty for nothing."""
    limit: StopReason | None = None
    """The limit that ended it."""
    policy_version: int = 0
    results: dict[str, str]
    """Texts of tool results, by the id of the call."""


class AgentGrower(Grower):
    """Grows trees of independent rollouts of a program."""

    def __init__(
        self,
        *parts: Any,
        program: Program,
        temperature: float,
        max_context: int | None = None,
        **more: Any,
    ) -> None:
        """Args:
        parts, more: as of `Grower`; the format is a `Serving`.
        program: the agent.
        temperature: of the recipe, which the agent's requests may name.
        max_context: longest context with its completion, in tokens; None for no limit.
        """
        super().__init__(*parts, **more)
        if not isinstance(self.format, Serving):
            raise SettingError(
                f"format.kind: got {type(self.format).__name__} with an [agent], expected 'chat' or"
                " 'renderer': its messages are written by the chat template.",
                settings=["format.kind"],
                code="agent-format",
            )
        self._form = self.format
        self._program = program
        self._endpoint = Endpoint(
            self.engine,
            self._form,
            self.limits,
            temperature=temperature,
            max_context=max_context,
        )
        self._num_abandoned = 0

    def take_metrics(self) -> dict[str, float]:
        """Returns agent/num_abandoned, and starts counting anew."""
        metrics = {"agent/num_abandoned": float(self._num_abandoned)}
        self._num_abandoned = 0
        return metrics

    async def grow(self, task: Task, *, noise_key: NoiseKey, group_id: str) -> Tree:
        """Returns one tree, scored."""
        budget = self.new_budget()
        explorer = self.explorer
        rollouts: list[Rollout] = []
        async with self._endpoint.serving():
            with asking(explorer, "starts", task.id):
                num = budget.grant(explorer.starts(budget.max_leaves))
            while num:
                async with asyncio.TaskGroup() as group:
                    running = [
                        group.create_task(self._rollout(task, (*noise_key, task.id, start)))
                        for start in range(len(rollouts), len(rollouts) + num)
                    ]
                rollouts += [one.result() for one in running]
                tree = self._tree(task, group_id, rollouts, budget)
                if explorer.wants_rewards:
                    tree = await self._scored(tree)
                with asking(explorer, "fill", task.id):
                    proposal = explorer.fill(tree, budget.max_leaves)
                # Others are refused before work.
                assert isinstance(proposal, Start), "explorers of agents open starts alone"
                num = budget.grant(proposal)
        return tree if explorer.wants_rewards else await self._scored(tree)

    async def _scored(self, tree: Tree) -> Tree:
        with self.watch.waiting("rewards"):
            return await self.scorer(tree)

    async def _rollout(self, task: Task, key: NoiseKey) -> Rollout:
        limits = self.limits
        version = self.engine.policy_version
        is_late = False
        outcome = Outcome()
        fault = ""
        with self._endpoint.session(key) as session, self.watch.waiting("agents"):
            try:
                async with asyncio.timeout(limits.deadline_s):
                    outcome = await self._program.run(task, self._endpoint.address, session.api_key)
            except TimeoutError:
                is_late = True
                late = f"no end within rollout.deadline_s = {limits.deadline_s:g} s"
                outcome = Outcome(problem=late)
                # Ours if the agent was waiting for us.
                fault = late if session.num_open else ""
            except Exception as error:  # such as a command that does not start
                fault = f"{type(error).__name__}: {error}"
            fault = fault or session.fault
        self._num_abandoned += session.num_abandoned
        ended = self._ended(task, session, outcome, fault, is_late)
        return replace(ended, policy_version=version)

    def _ended(
        self, task: Task, session: Session, outcome: Outcome, fault: str, is_late: bool
    ) -> Rollout:
        calls = session.calls
        ended = Rollout(
            calls=calls,
            status=Status.FAILED,
            reward=outcome.reward,
            problem=fault or outcome.problem,
            limit=session.limit,
            results=session.results,
        )
        if fault or not calls:
            no_call = "the agent ended without a completion"
            return replace(ended, reward=None, problem=ended.problem or no_call)
        ran_out = is_late or session.limit is not None
        if not outcome.problem:
            answer = outcome.answer
            if answer is None:
                answer = self._answer_in(calls[-1], task)
                ran_out |= calls[-1].completion.finish is StopReason.LENGTH
            if answer is not None or outcome.reward is not None:
                return replace(ended, status=Status.COMPLETED, answer=answer)
            ended = replace(ended, problem="ended without an answer")
        return replace(ended, status=Status.TRUNCATED if ran_out else Status.FORMAT_VIOLATION)

    def _answer_in(self, call: Call, task: Task) -> str | None:
        """The answer that the text of a completion gives, by the rule of the format."""
        text = call.message.get("content") or ""
        is_cut = call.completion.finish is StopReason.LENGTH
        if is_cut or call.violation or call.message.get("tool_calls") or not text.strip():
            return None
        try:
            _, answer = self._form.split_answer(text)
        except Violation:
            return None
        return self._form.answer_of(StepContent(answer=answer), task)

    def _tree(self, task: Task, group_id: str, rollouts: Sequence[Rollout], budget: Budget) -> Tree:
        if not any(one.calls for one in rollouts):
            # Nothing was asked for, so the prompt is the one that our own agent would have.
            prompt = self._form.prompt_ids(task)
        else:
            firsts = [one.calls[0].context_ids for one in rollouts if one.calls]
            same = takewhile(lambda column: len(set(column)) == 1, zip(*firsts, strict=False))
            prompt = tuple(column[0] for column in same)
        tree = tree_of_rollouts(task, group_id, prompt, rollouts, self.limits.temperature)
        num_tokens = sum(step.num_sampled for step in tree.steps)
        num_calls = sum(len(step.content.observations) for step in tree.steps)
        # Of all rollouts so far.
        state = replace(budget.state, num_sampled_tokens=num_tokens, num_tool_calls=num_calls)
        return replace(tree, budget=state)


def tree_of_rollouts(
    task: Task,
    group_id: str,
    prompt_ids: Sequence[int],
    rollouts: Sequence[Rollout],
    temperature: float,
) -> Tree:
    """Returns the tree of rollouts whose first contexts begin with the prompt, not scored."""
    content = StepContent(thought=task.question)
    origins = [int(Origin.PROMPT)] * len(prompt_ids)
    steps = [_step(ROOT_ID, None, prompt_ids, origins, content=content)]
    leaves = []
    for start, rollout in enumerate(rollouts):
        steps += _steps_of(rollout, start, tuple(prompt_ids), temperature)
        is_failed = rollout.status is Status.FAILED
        leaves.append(
            Leaf(
                step_id=steps[-1].id,
                status=rollout.status,
                answer=rollout.answer,
                environment_reward=rollout.reward,
                has_loss=not is_failed,
                error=rollout.problem if is_failed else None,
            )
        )
    return Tree(task=task, group_id=group_id, steps=tuple(steps), leaves=tuple(leaves))


def _steps_of(
    rollout: Rollout, start: int, prompt: tuple[int, ...], temperature: float
) -> Iterator[Step]:
    """A rollout's steps in time: each completion, below the deepest step whose context it saw, with
    a context step between them for the tokens that are new."""
    paths: list[tuple[str, tuple[int, ...]]] = [(ROOT_ID, prompt)]
    before = ROOT_ID
    cause: Cause = StartCause()

    def next_id() -> str:
        return f"{before}.{start if before == ROOT_ID else 0}"

    for number, call in enumerate(rollout.calls):
        context = call.context_ids
        seen = [one for one in paths if context[: len(one[1])] == one[1]]
        above, known = max(seen, key=lambda one: len(one[1]), default=(None, ()))
        if rest := context[len(known) :]:
            before = next_id()
            origins = [int(Origin.CONTEXT)] * len(rest)
            yield _step(before, above, rest, origins, cause=ContextCause())
            paths.append((before, context))
            above = before
        before = next_id()
        is_last = number == len(rollout.calls) - 1 and rollout.status is not Status.FAILED
        yield _sampled(before, above, call, rollout, cause, temperature, is_last)
        paths.append((before, call.token_ids))
        cause = ContinuationCause()
    if rollout.status is Status.FAILED:
        # An empty step says where, as in other trees.
        yield _step(
            next_id(),
            before,
            (),
            [],
            cause=cause,
            stop_reason=StopReason.ERROR,
            policy_version=rollout.policy_version,
        )


def _sampled(
    step_id: str,
    parent: str | None,
    call: Call,
    rollout: Rollout,
    cause: Cause,
    temperature: float,
    is_last: bool,
) -> Step:
    completion = call.completion
    message = call.message
    made = message.get("tool_calls") or []
    found = [rollout.results[one["id"]] for one in made if one["id"] in rollout.results]
    said = message.get("content") or ""
    content = StepContent(
        thought="\n".join(filter(None, (message.get("reasoning_content"), said))),
        calls=tuple(
            ToolCall(one["function"]["name"], one["function"]["arguments"]) for one in made
        ),
        # One for each call, or none.
        observations=tuple(Observation(text=text) for text in found if len(found) == len(made)),
    )
    violation = call.violation
    stop_reason = completion.finish
    if is_last:
        violation = violation or rollout.problem or None
        stop_reason = rollout.limit or stop_reason
        if rollout.answer is not None and not made:
            content = replace(content, thought=message.get("reasoning_content", ""), answer=said)
    return _step(
        step_id,
        parent,
        completion.token_ids,
        [int(Origin.POLICY)] * len(completion.token_ids),
        sampling_logprobs=completion.sampling_logprobs,
        entropies=completion.entropies,
        entropy_kind=completion.entropy_kind,
        temperature=temperature,
        content=content,
        stop_reason=stop_reason,
        violation=violation,
        policy_version=completion.policy_version,
        cause=cause,
    )


def _step(
    step_id: str,
    parent: str | None,
    token_ids: Sequence[int],
    origins: Sequence[int],
    **fields: Any,
) -> Step:
    """A step; scores that are not among `fields` are 0."""
    unscored = np.zeros(len(token_ids))
    return Step(
        id=step_id,
        parent=parent,
        depth=step_id.count("."),
        token_ids=np.array(token_ids, dtype=np.int64),
        origins=np.array(origins, dtype=np.int8),
        loss_mask=np.array([one == Origin.POLICY for one in origins], dtype=bool),
        **({"sampling_logprobs": unscored, "entropies": unscored} | fields),
    )
