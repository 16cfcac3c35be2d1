"""A tree under construction: steps come in any order, the finished tree stands in canonical
order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treegraft.core.columns import Column, written_by
from treegraft.core.interfaces import Span
from treegraft.core.sessions import Point, Session
from treegraft.core.types import (
    ROOT_ID,
    BranchCause,
    BranchDecision,
    Cause,
    Completion,
    ContextCause,
    ContinuationCause,
    Leaf,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    StopReason,
    StoredCause,
    Task,
    Tree,
    ids_to,
)
from treegraft.explore.budget import Budget

_PARTS = (int(Origin.FORCED), int(Origin.POLICY), int(Origin.TOOL))
"""The origins of a sampled step's tokens, in their order."""


@dataclass(eq=False)
class OpenPath:
    """A trajectory under way."""

    parent: str
    """Step below which the next one comes."""
    context: str | None
    """The step whose context it continues; the same unless that was left. None: an empty one."""
    prefix_ids: list[int]
    """All tokens of the path, the prompt included: the engine's next input."""
    num_prompt: int
    num_sampled: int = 0
    """Steps that the policy sampled."""
    num_tool_calls: int = 0
    """Calls that were run for it."""
    after: Origin = Origin.PROMPT
    """Who wrote its last step."""
    is_over: bool = False
    """Its leaf has ended; later reports of the engine about it are ignored."""
    opening: tuple[int, ...] = ()
    """Forced tokens that its next step begins with."""
    is_lesson: bool = False
    """Whether they are learned from where they paid."""
    point: Point | None = None
    """Where its session comes from; None once it has one."""
    session: Session | None = None
    """The session that makes its calls; None before it runs."""

    @property
    def num_used(self) -> int:
        """Tokens after the prompt, the opening of its next step included."""
        return len(self.prefix_ids) + len(self.opening) - self.num_prompt

    @property
    def tools(self) -> Session:
        """The session of a path that runs."""
        assert self.session is not None, "a path runs in a session"
        return self.session

    def copy(self) -> OpenPath:
        """Returns a path that begins where this one is and goes its own way, in a session of its
        own."""
        return replace(self, prefix_ids=list(self.prefix_ids), session=None)

    def copies(self, num: int) -> list[OpenPath]:
        """Returns so many copies, for which the place they begin at stays open."""
        # Before the first of them opens it and could be the last to need it.
        if self.point is not None:
            self.point.reserve(num)
        return [self.copy() for _ in range(num)]


@dataclass(eq=False)
class OpenTree:
    """Grows by `add_step`; `close` returns the finished tree."""

    task: Task
    group_id: str
    prompt_ids: tuple[int, ...]
    budget: Budget
    _steps: dict[str, Step] = field(default_factory=dict)
    _leaves: dict[str, Leaf] = field(default_factory=dict)
    _num_children: Counter[str] = field(default_factory=Counter)
    _decisions: dict[str, BranchDecision] = field(default_factory=dict)
    _stored: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    """Ids of stored steps, by the step above and their tokens."""

    def __post_init__(self) -> None:
        count = len(self.prompt_ids)
        self._steps[ROOT_ID] = Step(
            id=ROOT_ID,
            parent=None,
            depth=0,
            token_ids=np.array(self.prompt_ids),
            origins=np.full(count, int(Origin.PROMPT)),
            loss_mask=np.full(count, False),
            sampling_logprobs=np.zeros(count),
            entropies=np.zeros(count),
            content=StepContent(thought=self.task.question),
        )

    def steps_to(self, step_id: str) -> tuple[Step, ...]:
        """Returns the steps from the root to `step_id`, without contexts written anew."""
        steps = (self._steps[one] for one in ids_to(step_id))
        return tuple(step for step in steps if not step.is_context)

    def open_path(self, point: Point | None) -> OpenPath:
        """Returns a path that starts at the root, in the session that `point` opens; None for one
        that makes no call."""
        return OpenPath(ROOT_ID, ROOT_ID, list(self.prompt_ids), len(self.prompt_ids), point=point)

    def next_id(self, parent: str) -> str:
        """Returns the id of a new child of `parent`; ordinals count up in the order of asking."""
        # In an order that the loop makes free of latencies: noise is keyed by these ids.
        self._num_children[parent] += 1
        return f"{parent}.{self._num_children[parent] - 1}"

    def add_step(
        self,
        step_id: str,
        path: OpenPath,
        completion: Completion,
        temperature: float,
        content: StepContent,
        *,
        observation_ids: Sequence[int] = (),
        stop_reason: StopReason | None = None,
        violation: str | None = None,
        cause: Cause | None = None,
    ) -> None:
        """Appends a sampled step with its results, behind the path's opening, and moves the path
        below it."""
        opening = path.opening
        # Forced tokens belong to this step alone.
        path.opening = ()
        counts = [len(opening), len(completion.token_ids), len(observation_ids)]
        forced = (0.0,) * len(opening)
        unscored = (0.0,) * len(observation_ids)
        self._append(
            step_id,
            path,
            (*opening, *completion.token_ids, *observation_ids),
            np.repeat(_PARTS, counts),
            sampling_logprobs=np.array(forced + completion.sampling_logprobs + unscored),
            entropies=np.array(forced + completion.entropies + unscored),
            entropy_kind=completion.entropy_kind,
            temperature=temperature,
            content=content,
            stop_reason=stop_reason or completion.finish,
            violation=violation,
            policy_version=completion.policy_version,
            cause=cause or _own_cause(path),
            lesson_ids=opening if path.is_lesson else (),
        )
        path.num_sampled += 1
        path.after = Origin.POLICY
        # Sampled ones only: grafts and results cost no sampling.
        self.budget.spend(num_sampled_tokens=len(completion.token_ids))

    def add_graft(
        self,
        step_id: str,
        path: OpenPath,
        token_ids: tuple[int, ...],
        content: StepContent,
        cause: Cause | None,
        lesson_ids: tuple[int, ...],
        temperature: float,
    ) -> None:
        """Appends a step of another agent and moves the path below it.

        Args:
            temperature: at which the policy would have written it.
        """
        self._append(
            step_id,
            path,
            token_ids,
            np.full(len(token_ids), int(Origin.RETRIEVED)),
            temperature=temperature,
            content=content,
            cause=cause,
            lesson_ids=lesson_ids,
        )
        path.after = Origin.RETRIEVED

    def add_stored(
        self,
        path: OpenPath,
        token_ids: tuple[int, ...],
        content: StepContent,
        cause: StoredCause,
        lesson_ids: tuple[int, ...],
        temperature: float,
    ) -> None:
        """Moves the path below a stored step, which is appended where the tree does not have it
        yet; arguments as in `add_graft`."""
        # By its tokens: trajectories that begin alike share their first steps.
        place = (path.parent, token_ids)
        if place not in self._stored:
            self._stored[place] = self.next_id(path.parent)
        step_id = self._stored[place]
        known = self._steps.get(step_id)
        # A prefix of several stored trajectories is taught once any of them is.
        lesson = lesson_ids if known is None else known.lesson_ids or lesson_ids
        why = cause if known is None else known.cause
        self.add_graft(step_id, path, token_ids, content, why, lesson, temperature)

    def gone_back(self, path: OpenPath, token_ids: Sequence[int]) -> OpenPath:
        """Returns a copy of the path, at the last step up to which the context has these tokens."""
        above = path.copy()
        while above.prefix_ids != list(token_ids[: len(above.prefix_ids)]):
            assert above.context is not None, "the empty path begins every context"
            step = self._steps[above.context]
            del above.prefix_ids[len(above.prefix_ids) - len(step.token_ids) :]
            above.context = step.parent
        return above

    def add_context(self, path: OpenPath, above: OpenPath, spans: Sequence[Span]) -> None:
        """Moves the path to a context written anew, which continues that of `above`."""
        path.context = above.context
        path.prefix_ids = list(above.prefix_ids)
        token_ids = tuple(token for ids, _ in spans for token in ids)
        origins = np.repeat([int(origin) for _, origin in spans], [len(ids) for ids, _ in spans])
        step_id = self.next_id(path.parent)
        self._append(step_id, path, token_ids, origins, cause=ContextCause())

    def _append(
        self,
        step_id: str,
        path: OpenPath,
        token_ids: tuple[int, ...],
        origins: Column,
        **fields: Any,
    ) -> None:
        """Adds a step below the path and moves the path below it; scores that are not among
        `fields` are 0."""
        unscored = np.zeros(len(token_ids))
        self._steps[step_id] = Step(
            id=step_id,
            parent=path.context,
            depth=step_id.count("."),
            token_ids=np.array(token_ids),
            origins=origins,
            loss_mask=written_by(origins, Origin.POLICY),
            **({"sampling_logprobs": unscored, "entropies": unscored} | fields),
        )
        path.parent = path.context = step_id
        path.prefix_ids.extend(token_ids)

    def has_leaf(self, step_id: str) -> bool:
        """Returns whether a trajectory has ended with this step."""
        return step_id in self._leaves

    def end_path(self, path: OpenPath, status: Status, answer: str | None = None) -> None:
        """Makes the path's last step a leaf."""
        self._leaves[path.parent] = Leaf(step_id=path.parent, status=status, answer=answer)

    def reward_path(self, path: OpenPath, reward: float | None) -> None:
        """Notes the environment's reward for the state in which a path has ended."""
        if reward is not None:
            leaf = self._leaves[path.parent]
            self._leaves[path.parent] = replace(leaf, environment_reward=reward)

    def fail_path(
        self,
        path: OpenPath,
        step_id: str,
        error: str,
        policy_version: int,
        cause: Cause | None = None,
    ) -> None:
        """Ends a path by our own fault, with an empty step that says where; at its last step where
        it had ended already."""
        # The environment's reward can fail after the path has ended; its last step is a leaf then.
        if step_id not in self._leaves:
            self._append(
                step_id,
                path,
                (),
                np.zeros(0),
                stop_reason=StopReason.ERROR,
                policy_version=policy_version,
                cause=cause or _own_cause(path),
            )
        self._leaves[step_id] = Leaf(
            step_id=step_id, status=Status.FAILED, has_loss=False, error=error
        )

    def decide(self, step_id: str, decision: BranchDecision) -> None:
        """Keeps the numbers that a rule saw in the first tokens of a step under way; `close` counts
        the branches that came of it."""
        self._decisions[step_id] = decision

    def close(self) -> Tree:
        """Returns the tree in depth-first order."""
        branched = Counter(
            step.before for step in self._steps.values() if isinstance(step.cause, BranchCause)
        )
        # Steps arrive as latencies have it; sorted by their ids they are the same in every run.
        steps = sorted(self._steps.values(), key=lambda step: step.ordinals)
        for number, step in enumerate(steps):
            if decision := self._decisions.get(step.id):
                decision = replace(decision, num_opened=branched[step.before])
                steps[number] = replace(step, decision=decision)
        return Tree(
            task=self.task,
            group_id=self.group_id,
            steps=tuple(steps),
            leaves=tuple(self._leaves[step.id] for step in steps if step.id in self._leaves),
            budget=self.budget.state,
        )


def _own_cause(path: OpenPath) -> Cause:
    return StartCause() if path.parent == ROOT_ID else ContinuationCause()
