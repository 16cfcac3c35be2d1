"""Trees of agents that own their loop: rollouts first, then a tree of what each call saw.

0          the first context, as far as all rollouts share it
├─ 0.0     rollout 0: a completion; then, in time order, further contexts and completions
└─ 0.1     rollout 1

A branch is a replay: the program is started again, and its first requests get the recorded
completions for as long as they have the recorded contexts. A program that asks for something else
has a clock or a coin in its messages; it is stopped, and started once more for a run of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import NoiseKey, Serving
from treegraft.core.types import (
    Branch,
    BranchCause,
    BranchDecision,
    Cause,
    Expand,
    Observation,
    Origin,
    PathView,
    Retry,
    Start,
    StartCause,
    Status,
    StepContent,
    StopReason,
    Task,
    ToolCall,
    Tree,
)
from treegraft.explore.budget import Budget, Rounds
from treegraft.explore.compose import asking
from treegraft.rollout.agents.endpoint import Call, Endpoint, Session
from treegraft.rollout.agents.programs import Outcome, Program
from treegraft.rollout.formats.markup import Violation
from treegraft.rollout.loop import Grower
from treegraft.rollout.tree import OpenPath, OpenTree

COUNTED = ("num_abandoned", "num_replays", "num_diverged", "num_replayed_calls")
"""What is counted of an update; runs/metrics.toml says what each is."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a rollout leaves an earlier one: in the place of the call after so many."""

    rollout: int
    num_calls: int
    cause: BranchCause


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
    fork: Fork | None = None
    """Where it left an earlier rollout, whose first calls are its own too."""


class AgentGrower(Grower):
    """Grows trees of rollouts of a program, and of branches by replay."""

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
        self._counts: Counter[str] = Counter()

    def take_metrics(self) -> dict[str, float]:
        """Returns how requests and replays went, and starts counting anew."""
        metrics = {f"agent/{name}": float(self._counts[name]) for name in COUNTED}
        self._counts.clear()
        return metrics

    async def grow(self, task: Task, *, noise_key: NoiseKey, group_id: str) -> Tree:
        """Returns one tree, scored."""
        explorer = self.explorer
        growth = _Growth(self, task, (*noise_key, task.id), group_id)
        max_leaves = growth.budget.max_leaves
        async with self._endpoint.serving():
            with asking(explorer, "starts", task.id):
                proposal: Start | Sequence[Expand | Retry] = explorer.starts(max_leaves)
            while await growth.open(proposal):
                tree = growth.close()
                if explorer.wants_rewards:
                    tree = await self._scored(tree)
                with asking(explorer, "fill", task.id):
                    proposal = explorer.fill(tree, max_leaves)
        return tree if explorer.wants_rewards else await self._scored(tree)

    async def _scored(self, tree: Tree) -> Tree:
        with self.watch.waiting("rewards"):
            return await self.scorer(tree)

    async def rollout(
        self, task: Task, key: NoiseKey, fork: Fork | None, recorded: Sequence[Call]
    ) -> Rollout:
        """Returns a run of the program.

        Args:
            fork: where it leaves an earlier rollout; None for a run of its own, which it becomes
                too if the program does not repeat itself.
            recorded: that rollout's calls up to the one in whose place it begins to sample.
        """
        limits = self.limits
        version = self.engine.policy_version
        is_late = False
        outcome = Outcome()
        fault = ""
        with self._endpoint.session(key, recorded) as session, self.watch.waiting("agents"):
            try:
                async with asyncio.timeout(limits.deadline_s) as deadline:
                    now = asyncio.get_running_loop().time
                    session.give_up = lambda: deadline.reschedule(now())
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
        self._counts["num_abandoned"] += session.num_abandoned
        if fork is not None:
            self._counts["num_replays"] += 1
            if not session.has_repeated:
                self._counts["num_diverged"] += 1
                return await self.rollout(task, key, None, ())
            self._counts["num_replayed_calls"] += fork.num_calls
        ended = self._ended(task, session, outcome, fault, is_late)
        return replace(ended, policy_version=version, fork=fork)

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

    def tree_of(self, task: Task, group_id: str, rollouts: Sequence[Rollout]) -> AgentTree:
        """Returns the tree of rollouts, not scored."""
        firsts = [one.calls[0].context_ids for one in rollouts if one.calls]
        same = takewhile(lambda column: len(set(column)) == 1, zip(*firsts, strict=False))
        # Where nothing was asked for, the prompt is the one that our own agent would have.
        prompt = tuple(column[0] for column in same) if firsts else self._form.prompt_ids(task)
        tree = AgentTree(OpenTree(task, group_id, tuple(prompt), Budget(len(rollouts))))
        for rollout in rollouts:
            tree.add(rollout, self.limits.temperature)
        return tree


class _Growth:
    """One tree under way: its rollouts so far, and the branches that they may open."""

    def __init__(self, grower: AgentGrower, task: Task, key: NoiseKey, group_id: str) -> None:
        self._grower = grower
        self._task = task
        self._key = key
        self._group_id = group_id
        self.budget = grower.new_budget()
        self._rounds = Rounds(self.budget)
        self._rollouts: list[Rollout] = []
        self._tree: AgentTree
        self._decisions: dict[tuple[int, int], BranchDecision] = {}
        """By rollout and call."""

    def close(self) -> Tree:
        """Returns the tree as it is, not scored."""
        for (number, place), decision in self._decisions.items():
            self._tree.open.decide(self._tree.places[number][place].step_id, decision)
        tree = self._tree.open.close()
        num_calls = sum(len(step.content.observations) for step in tree.steps)
        state = replace(
            tree.budget, num_leaves=self.budget.state.num_leaves, num_tool_calls=num_calls
        )
        return replace(tree, budget=state)

    async def open(self, proposal: Start | Sequence[Expand | Retry]) -> bool:
        """Runs what the budget grants of a proposal, and the branches that come of it, to their
        ends; returns whether there was anything."""
        forks = [] if isinstance(proposal, Start) else self._forks(proposal)
        missing = Start(self.budget.max_leaves - self.budget.state.num_leaves)
        if not forks:
            fresh = proposal if isinstance(proposal, Start) else missing
            forks = [None] * self.budget.grant(fresh)
        is_any = bool(forks)
        while forks:
            await self._run(forks)
            # All rollouts have ended, so each round that is granted is complete.
            forks = []
            for grant in self._rounds.advance():
                rollout, num_calls = grant.place[-2:]
                forks += [Fork(rollout, num_calls, grant.cause)] * grant.num
        return is_any

    def _forks(self, wishes: Sequence[Expand | Retry]) -> list[Fork | None]:
        forks: list[Fork | None] = []
        for wish in wishes:
            # Retries are refused before work.
            assert isinstance(wish, Expand), "explorers of agents begin no steps"
            if (place := self._tree.behind(wish.step_id)) is not None:
                num = self.budget.grant(Branch(wish.num, wish.cause))
                forks += [Fork(*place, wish.cause)] * num
        return forks

    async def _run(self, forks: Sequence[Fork | None]) -> None:
        first = len(self._rollouts)
        async with asyncio.TaskGroup() as group:
            running = []
            for number, fork in enumerate(forks, first):
                recorded: Sequence[Call] = ()
                if fork is not None:
                    recorded = self._rollouts[fork.rollout].calls[: fork.num_calls + 1]
                run = self._grower.rollout(self._task, (*self._key, number), fork, recorded)
                running.append(group.create_task(run))
        self._rollouts += [one.result() for one in running]
        self._tree = self._grower.tree_of(self._task, self._group_id, self._rollouts)
        if self._grower.explorer.probe_tokens is not None:
            for number in range(first, len(self._rollouts)):
                self._propose(number)

    def _propose(self, number: int) -> None:
        """Passes on what the explorer proposes beside the calls of a rollout, the first call and
        that of its fork left out."""
        explorer = self._grower.explorer
        rollout = self._rollouts[number]
        self._rounds.open_start(number)
        begin = 0 if rollout.fork is None else rollout.fork.num_calls
        for place in range(begin + 1, len(rollout.calls)):
            at = self._tree.places[number][place]
            steps = self._tree.open.steps_to(at.path.parent)
            view = PathView(steps, (*self._key, at.step_id))
            probe = rollout.calls[place].completion.entropies[: explorer.probe_tokens]
            with asking(explorer, "after_probe", self._task.id):
                branch = explorer.after_probe(view, probe)
            if branch is not None:
                decision = BranchDecision(seen=branch.cause, num_wanted=branch.num)
                self._decisions[number, place] = decision
            wish = branch if branch is not None and branch.num else None
            # By its place in the tree, and where that leads to.
            where = (*steps[-1].ordinals, number, place)
            self._rounds.propose(number, place, where, wish)
        self._rounds.end(number)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call of a rollout is sampled."""

    step_id: str
    """The call's step."""
    path: OpenPath
    """As it was before the call."""
    seen: tuple[OpenPath, ...]
    """The contexts and completions before the call."""


@dataclass(frozen=True, slots=True)
class AgentTree:
    """A tree of rollouts whose first contexts begin with its prompt.

    Each completion is a step below the deepest one whose context it saw, with a context step
    between for the tokens that are new; ids follow time."""

    open: OpenTree
    places: list[list[Place]] = field(default_factory=list)
    """By rollout and call; a fork has those of the calls that it repeats."""

    def behind(self, step_id: str) -> tuple[int, int] | None:
        """Returns a rollout and its call after a step; None if no call follows."""
        for number, places in enumerate(self.places):
            for place, before in enumerate(places[:-1], 1):
                if before.step_id == step_id:
                    return number, place
        return None

    def add(self, rollout: Rollout, temperature: float) -> None:
        """Appends a rollout; that of its fork is there."""
        fork = rollout.fork
        places: list[Place] = []
        path = self.open.open_path(None)
        seen: tuple[OpenPath, ...] = (path.copy(),)
        cause: Cause | None = StartCause()
        if fork is not None:
            above = self.places[fork.rollout]
            places += above[: fork.num_calls]
            path = above[fork.num_calls].path.copy()
            seen = above[fork.num_calls].seen
            cause = fork.cause
        for number in range(len(places), len(rollout.calls)):
            call = rollout.calls[number]
            if fork is None or number > fork.num_calls:
                seen = self._enter(path, seen, call.context_ids)
            before = path.copy()
            step_id = self.open.next_id(path.parent)
            is_last = number == len(rollout.calls) - 1 and rollout.status is not Status.FAILED
            fields = _fields_of(call, rollout, is_last)
            self.open.add_step(step_id, path, call.completion, temperature, cause=cause, **fields)
            places.append(Place(step_id, before, seen))
            seen += (path.copy(),)
            cause = None
        self.places.append(places)
        self._end(path, rollout, cause)

    def _enter(
        self, path: OpenPath, seen: tuple[OpenPath, ...], context: tuple[int, ...]
    ) -> tuple[OpenPath, ...]:
        """Moves a path to a context, below the longest one seen that it begins with; returns what
        is seen with it."""
        fitting = [one for one in seen if list(context[: len(one.prefix_ids)]) == one.prefix_ids]
        nothing = replace(path, context=None, prefix_ids=[])
        above = max(fitting, key=lambda one: len(one.prefix_ids), default=nothing)
        if rest := context[len(above.prefix_ids) :]:
            self.open.add_context(path, above, [(rest, Origin.CONTEXT)])
            return (*seen, path.copy())
        path.context = above.context
        path.prefix_ids = list(above.prefix_ids)
        return seen

    def _end(self, path: OpenPath, rollout: Rollout, cause: Cause | None) -> None:
        if rollout.status is Status.FAILED:
            # An empty step says where, as in other trees.
            step_id = self.open.next_id(path.parent)
            version = rollout.policy_version
            self.open.fail_path(path, step_id, rollout.problem, version, cause)
        else:
            self.open.end_path(path, rollout.status, rollout.answer)
            self.open.reward_path(path, rollout.reward)


def _fields_of(call: Call, rollout: Rollout, is_last: bool) -> dict[str, Any]:
    """What a call's step says beside its tokens."""
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
    stop_reason = call.completion.finish
    if is_last:
        violation = violation or rollout.problem or None
        stop_reason = rollout.limit or stop_reason
        if rollout.answer is not None and not made:
            content = replace(content, thought=message.get("reasoning_content", ""), answer=said)
    return {"content": content, "stop_reason": stop_reason, "violation": violation}
