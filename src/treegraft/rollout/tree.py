"""A tree under construction: steps come in any order, the finished tree stands in canonical
order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treegraft.core.sessions import Point, Session
from treegraft.core.types import (
    ROOT_ID,
    BranchCause,
    BranchDecision,
    Cause,
    Completion,
    ContinuationCause,
    GraftCause,
    Leaf,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    StopReason,
    Task,
    Tree,
)
from treegraft.explore.budget import Budget


@dataclass(eq=False)
class OpenPath:
    """A trajectory under way."""

    parent: str
    """Step below which the next one comes."""
    prefix_ids: list[int]
    """Everything the engine is given next."""
    num_prompt: int
    num_steps: int = 0
    """Steps on it, grafts included."""
    num_sampled: int = 0
    """Steps that the policy sampled."""
    num_tool_calls: int = 0
    """Calls that were run for it."""
    after: Origin = Origin.PROMPT
    """Who wrote its last step."""
    is_over: bool = False
    """Its leaf has ended; later reports of the engine about it are ignored."""
    point: Point | None = None
    """Where its session comes from; None once it has one."""
    session: Session | None = None
    """The session that makes its calls; None before it runs."""

    @property
    def num_used(self) -> int:
        """Tokens after the prompt."""
        return len(self.prefix_ids) - self.num_prompt

    @property
    def tools(self) -> Session:
        """The session of a path that runs."""
        assert self.session is not None, "a path runs in a session"
        return self.session

    def copy(self) -> OpenPath:
        """Returns a path that stands where this one does and goes its own way, in a session of its
        own."""
        return replace(self, prefix_ids=list(self.prefix_ids), session=None)


@dataclass(eq=False)
class OpenTree:
    """Grows by `add_step`; `close` returns the finished tree."""

    task: Task
    group_id: str
    prompt_ids: tuple[int, ...]
    budget: Budget
    _steps: dict[str, Step] = field(default_factory=dict)
    _leaves: dict[str, Leaf] = field(default_factory=dict)
    _children: dict[str, int] = field(default_factory=dict)
    _decisions: dict[str, BranchDecision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.prompt_ids)
        self._steps[ROOT_ID] = Step(
            id=ROOT_ID,
            parent=None,
            depth=0,
            token_ids=self.prompt_ids,
            origins=(Origin.PROMPT,) * count,
            loss_mask=(False,) * count,
            sampling_logprobs=(0.0,) * count,
            entropies=(0.0,) * count,
            content=StepContent(thought=self.task.question),
        )

    def steps_to(self, step_id: str) -> tuple[Step, ...]:
        """Returns the steps from the root to `step_id`."""
        parts = step_id.split(".")
        return tuple(self._steps[".".join(parts[: n + 1])] for n in range(len(parts)))

    def open_path(self, point: Point) -> OpenPath:
        """Returns a path that starts at the root, in the session that `point` opens."""
        return OpenPath(ROOT_ID, list(self.prompt_ids), len(self.prompt_ids), point=point)

    def next_id(self, parent: str) -> str:
        """Returns the id of a new child of `parent`; ordinals count up in the order of asking."""
        # Of asking, which the loop keeps free of latencies: noise is keyed by these ids.
        ordinal = self._children.get(parent, 0)
        self._children[parent] = ordinal + 1
        return f"{parent}.{ordinal}"

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
        """Appends a sampled step with its results and moves the path below it."""
        sampled, shown = len(completion.token_ids), len(observation_ids)
        self._steps[step_id] = Step(
            id=step_id,
            parent=path.parent,
            depth=path.num_steps + 1,
            token_ids=(*completion.token_ids, *observation_ids),
            origins=(Origin.POLICY,) * sampled + (Origin.TOOL,) * shown,
            loss_mask=(True,) * sampled + (False,) * shown,
            sampling_logprobs=completion.sampling_logprobs + (0.0,) * shown,
            entropies=completion.entropies + (0.0,) * shown,
            entropy_kind=completion.entropy_kind,
            temperature=temperature,
            content=content,
            stop_reason=stop_reason or completion.finish,
            violation=violation,
            policy_version=completion.policy_version,
            cause=cause or (StartCause() if path.parent == ROOT_ID else ContinuationCause()),
        )
        path.parent = step_id
        path.prefix_ids.extend(completion.token_ids)
        path.prefix_ids.extend(observation_ids)
        path.num_steps += 1
        path.num_sampled += 1
        path.after = Origin.POLICY
        self.budget.spend(num_sampled_tokens=sampled)

    def add_graft(
        self,
        step_id: str,
        path: OpenPath,
        token_ids: tuple[int, ...],
        content: StepContent,
        cause: GraftCause,
        lesson_ids: tuple[int, ...],
        temperature: float,
    ) -> None:
        """Appends a step of another agent and moves the path below it.

        Args:
            temperature: at which the policy would have written it.
        """
        count = len(token_ids)
        self._steps[step_id] = Step(
            id=step_id,
            parent=path.parent,
            depth=path.num_steps + 1,
            token_ids=token_ids,
            origins=(Origin.RETRIEVED,) * count,
            loss_mask=(False,) * count,
            sampling_logprobs=(0.0,) * count,
            entropies=(0.0,) * count,
            temperature=temperature,
            content=content,
            cause=cause,
            lesson_ids=lesson_ids,
        )
        path.parent = step_id
        path.prefix_ids.extend(token_ids)
        path.num_steps += 1
        path.after = Origin.RETRIEVED

    def end_path(self, path: OpenPath, status: Status, answer: str | None = None) -> None:
        """Makes the path's last step a leaf."""
        self._leaves[path.parent] = Leaf(step_id=path.parent, status=status, answer=answer)

    def reward_path(self, path: OpenPath, reward: float | None) -> None:
        """Notes the environment's reward for the state in which an ended path stands."""
        if reward is not None:
            self._leaves[path.parent] = replace(
                self._leaves[path.parent], environment_reward=reward
            )

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
        if step_id not in self._leaves:
            self._steps[step_id] = Step(
                id=step_id,
                parent=path.parent,
                depth=path.num_steps + 1,
                token_ids=(),
                origins=(),
                loss_mask=(),
                sampling_logprobs=(),
                entropies=(),
                stop_reason=StopReason.ERROR,
                policy_version=policy_version,
                cause=cause or (StartCause() if path.parent == ROOT_ID else ContinuationCause()),
            )
        self._leaves[step_id] = Leaf(
            step_id=step_id, status=Status.FAILED, has_loss=False, error=error
        )

    def decide(self, step_id: str, decision: BranchDecision) -> None:
        """Keeps the numbers that a rule saw in the first tokens of a step under way; `close` counts
        the branches that came of it."""
        self._decisions[step_id] = decision

    def _decided(self, step: Step) -> Step:
        if step.id not in self._decisions:
            return step
        beside = (other for other in self._steps.values() if other.parent == step.parent)
        opened = sum(isinstance(other.cause, BranchCause) for other in beside)
        return replace(step, decision=replace(self._decisions[step.id], num_opened=opened))

    def close(self) -> Tree:
        """Returns the tree in depth-first order."""
        steps = tuple(
            self._decided(step)
            for step in sorted(self._steps.values(), key=lambda step: step.ordinals)
        )
        leaves = tuple(self._leaves[step.id] for step in steps if step.id in self._leaves)
        return Tree(
            task=self.task,
            group_id=self.group_id,
            steps=steps,
            leaves=leaves,
            budget=self.budget.state,
        )
