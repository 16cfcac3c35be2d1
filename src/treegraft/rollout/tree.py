"""A tree under construction: steps come in any order, the finished tree stands in canonical order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treegraft.explore.budget import Budget
from treegraft.types import (
    ROOT_ID,
    Cause,
    Completion,
    ContinuationCause,
    Leaf,
    Observation,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    StopReason,
    Task,
    Tree,
)


@dataclass(eq=False)
class OpenPath:
    """A trajectory under way."""

    parent: str
    """Step below which the next one comes."""
    prefix_ids: list[int]
    """Everything the engine is given next."""
    num_prompt: int
    num_steps: int = 0
    num_tool_calls: int = 0

    @property
    def num_used(self) -> int:
        """Tokens after the prompt."""
        return len(self.prefix_ids) - self.num_prompt


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

    def open_path(self) -> OpenPath:
        """Returns a path that starts at the root."""
        return OpenPath(ROOT_ID, list(self.prompt_ids), len(self.prompt_ids))

    def next_id(self, parent: str) -> str:
        """Returns the id of a new child of `parent`; ordinals count up in the order of asking."""
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
        self.budget.spend(num_sampled_tokens=sampled)

    def end_path(self, path: OpenPath, status: Status, answer: str | None = None) -> None:
        """Makes the path's last step a leaf."""
        self._leaves[path.parent] = Leaf(step_id=path.parent, status=status, answer=answer)

    def fail_path(self, path: OpenPath, step_id: str, error: str, policy_version: int) -> None:
        """Ends a path by our own fault, with an empty step that says where."""
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
            cause=StartCause() if path.parent == ROOT_ID else ContinuationCause(),
        )
        self._leaves[step_id] = Leaf(step_id=step_id, status=Status.FAILED, has_loss=False, error=error)

    def close(self) -> Tree:
        """Returns the tree in depth-first order."""
        steps = tuple(sorted(self._steps.values(), key=lambda step: step.ordinals))
        leaves = tuple(self._leaves[step.id] for step in steps if step.id in self._leaves)
        return Tree(task=self.task, group_id=self.group_id, steps=steps, leaves=leaves, budget=self.budget.state)


def result_of(content: StepContent, observations: Sequence[Observation]) -> StepContent:
    """Returns the content with its calls' results."""
    return StepContent(thought=content.thought, calls=content.calls, observations=tuple(observations), answer=content.answer)
