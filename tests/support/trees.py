"""Trees for tests: written out by hand in a few letters, or drawn at random by hypothesis."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from treegraft.core.types import (
    BranchCause,
    BudgetState,
    ContextCause,
    ContinuationCause,
    GraftCause,
    Leaf,
    Observation,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    StopReason,
    Task,
    ToolCall,
    Tree,
    ids_to,
)

VOCABULARY = 97
"""Token ids of random trees are 3..VOCABULARY - 1, clear of padding and end tokens."""
LETTERS = {
    "c": Origin.CONTEXT,
    "p": Origin.PROMPT,
    "s": Origin.POLICY,
    "t": Origin.TOOL,
    "r": Origin.RETRIEVED,
    "f": Origin.FORCED,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One step: Part("sst", Part("s", reward=1.0), Part("ss")) is a search with its result and two
    answers below it.

    A capital S is a sampled token that carries no loss. A step of r alone is a graft; `lesson` is
    how many tokens its agent wrote.
    """

    marks: str
    children: tuple[Part, ...] = ()
    reward: float | None = 0.0
    status: Status = Status.COMPLETED
    temperature: float = 1.0
    lesson: int = 0
    entropies: Sequence[float] | None = None
    """Of its sampled tokens in order, above 0; None draws them."""

    @classmethod
    def of(cls, marks: str, *children: Part, **fields: Any) -> Part:
        return cls(marks, children, **fields)


def build_tree(
    root: Part, *, task_id: str = "t/1", seed: int = 0, tokens: Sequence[int] = ()
) -> Tree:
    """Returns the tree; token ids (unless given, in depth-first order) and log-probabilities are
    random from `seed`."""
    draw = random.Random(seed)
    lesson_draw = random.Random(f"lessons {seed}")
    given = iter(tokens)
    steps: list[Step] = []
    leaves: list[Leaf] = []

    def add(part: Part, step_id: str, parent: str | None) -> None:
        origins = tuple(LETTERS[mark.lower()] for mark in part.marks)
        sampled = [origin is Origin.POLICY for origin in origins]
        is_leaf = parent is not None and not part.children
        cause: Any = (
            None if parent is None else StartCause() if parent == "0" else ContinuationCause()
        )
        is_graft = set(part.marks) == {"r"}
        if is_graft:
            cause = GraftCause(source="expert", task_id=task_id, reward=1.0, similarity=0.875)
        known = iter(part.entropies or ())
        ended = StopReason.ERROR if part.status is Status.FAILED else StopReason.STOP
        steps.append(
            Step(
                id=step_id,
                parent=parent,
                depth=step_id.count("."),
                token_ids=tuple(
                    next(given, None) or draw.randrange(3, VOCABULARY) for _ in origins
                ),
                origins=origins,
                loss_mask=tuple(mark == "s" for mark in part.marks),
                sampling_logprobs=tuple(-draw.random() if one else 0.0 for one in sampled),
                entropies=tuple(
                    (next(known, None) or draw.random()) if one else 0.0 for one in sampled
                ),
                temperature=part.temperature,
                stop_reason=None if parent is None or is_graft else ended,
                cause=cause,
                lesson_ids=tuple(lesson_draw.randrange(3, VOCABULARY) for _ in range(part.lesson)),
            )
        )
        if is_leaf:
            failed = part.status is Status.FAILED
            leaves.append(
                Leaf(
                    step_id=step_id,
                    status=part.status,
                    reward=None if failed else part.reward,
                    has_loss=not failed,
                )
            )
        for ordinal, child in enumerate(part.children):
            add(child, f"{step_id}.{ordinal}", step_id)

    add(root, "0", None)
    task = Task(id=task_id, question="?", reference=("1",))
    return Tree(task=task, group_id=f"0/{task_id}", steps=tuple(steps), leaves=tuple(leaves))


def with_contexts(tree: Tree, seed: int = 0) -> Tree:
    """Returns the tree with the results of each step in a context written anew: below the step's
    own parent, as where thoughts are dropped, or at random below an earlier step or none."""
    draw = random.Random(f"contexts {seed}")
    names = {"0": "0"}
    contexts = {"0": "0"}
    steps: list[Step] = [tree.root]
    for step in tree.steps[1:]:
        before = str(step.before)
        own = f"{names[before]}.{step.ordinals[-1]}"
        count = step.num_tokens - step.num_by(Origin.TOOL)
        is_split = 0 < count < step.num_tokens and not step.is_graft
        moved = replace(step, id=own, parent=contexts[before], depth=own.count("."))
        if not is_split:
            steps.append(moved)
            names[step.id] = contexts[step.id] = own
            continue
        tools = step.origins == int(Origin.TOOL)
        steps.append(_taken(moved, ~tools))
        earlier = [contexts[before], contexts[before], *ids_to(own), None]
        anew = _taken(replace(moved, id=f"{own}.0", parent=draw.choice(earlier)), tools)
        again = tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(0, 3)))
        origins = (Origin.CONTEXT,) * len(again) + (Origin.TOOL,) * anew.num_tokens
        none = (0.0,) * len(origins)
        anew = replace(
            anew,
            depth=own.count(".") + 1,
            token_ids=(*again, *anew.token_ids.tolist()),
            origins=origins,
            loss_mask=(False,) * len(origins),
            sampling_logprobs=none,
            entropies=none,
            cause=ContextCause(),
        )
        steps.append(anew)
        names[step.id] = contexts[step.id] = anew.id
    leaves = []
    for leaf in tree.leaves:
        name = names[leaf.step_id]
        # The last step of a trajectory has no context below it.
        if steps[[one.id for one in steps].index(name)].is_context:
            steps = [one for one in steps if one.id != name]
            name = name.rpartition(".")[0]
        leaves.append(replace(leaf, step_id=name))
    steps.sort(key=lambda step: step.ordinals)
    return replace(tree, steps=tuple(steps), leaves=tuple(leaves))


def _taken(step: Step, mask: Any) -> Step:
    """The step with some of its tokens."""
    names = ("token_ids", "origins", "loss_mask", "sampling_logprobs", "entropies")
    return replace(step, **{name: getattr(step, name)[mask] for name in names})


def text_of(tree: Tree, step: Step) -> list[int]:
    """Returns the tokens of the path above an imitated step, then its own."""
    assert step.parent is not None
    return [token for own in (*tree.path(step.parent), step) for token in own.token_ids.tolist()]


@st.composite
def parts(draw: Any, depth: int = 3) -> Part:
    """A random step with everything below it; a failed one may be empty."""
    width = draw(st.integers(1, 3)) if depth and draw(st.booleans()) else 0
    status = (
        draw(st.sampled_from([Status.COMPLETED] * 4 + list(Status)))
        if not width
        else Status.COMPLETED
    )
    if status is Status.FAILED and draw(st.booleans()):
        return Part("", status=status)
    marks = draw(st.text("ssssSttrf", min_size=1, max_size=5))
    children = tuple(draw(parts(depth - 1)) for _ in range(width))
    return Part(
        marks,
        children,
        reward=draw(st.sampled_from([-1.0, 0.0, 0.25, 1.0])),
        status=status,
        temperature=draw(st.sampled_from([1.0, 1.0, 0.7, 0.0])),
    )


@st.composite
def random_trees(draw: Any, *, min_starts: int = 1) -> Tree:
    """A random tree: branches at any depth, tokens of every origin, all statuses, empty steps where
    a leaf has failed."""
    prompt = "p" * draw(st.integers(1, 6))
    starts = tuple(draw(parts()) for _ in range(draw(st.integers(min_starts, 4))))
    return build_tree(Part(prompt, starts), seed=draw(st.integers(0, 10**6)))


@st.composite
def agent_steps(
    draw: Any, depth: int = 3, *, after_graft: bool = False, is_first: bool = True
) -> Part:
    """A step of a rollout as RAPO on an entropy-branched tree grows it, with everything below it.

    The first step and the one after a graft are the policy's own; grafts and branches stand at any
    other place and mix.
    """
    if not is_first and not after_graft and draw(st.booleans()):
        below = [
            draw(agent_steps(depth, after_graft=True, is_first=False))
            for _ in range(draw(st.integers(1, 2)))
        ]
        # A trajectory may end on a graft: no step, token or second was left for the policy.
        ends = draw(st.integers(0, 5)) == 0
        status = (
            draw(st.sampled_from([Status.TRUNCATED, Status.FAILED])) if ends else Status.COMPLETED
        )
        marks = "r" * draw(st.integers(1, 4))
        return Part(
            marks,
            () if ends else tuple(below),
            status=status,
            reward=-1.0,
            lesson=draw(st.integers(0, 3)),
        )
    width = draw(st.integers(1, 3)) if depth and draw(st.integers(0, 3)) else 0
    marks = draw(st.text("sssS", min_size=1, max_size=3)) + draw(st.sampled_from(["", "t", "ttf"]))
    status = (
        Status.COMPLETED if width else draw(st.sampled_from([Status.COMPLETED] * 3 + list(Status)))
    )
    return Part(
        marks,
        tuple(draw(agent_steps(depth - 1, is_first=False)) for _ in range(width)),
        reward=draw(st.sampled_from([-1.0, 0.0, 0.25, 1.0])),
        status=status,
        temperature=draw(st.sampled_from([1.0, 1.0, 0.7])),
    )


@st.composite
def mixed_trees(draw: Any) -> Tree:
    """A random tree of branches and grafts, with lessons."""
    starts = tuple(draw(agent_steps()) for _ in range(draw(st.integers(1, 3))))
    return build_tree(Part("p" * draw(st.integers(1, 4)), starts), seed=draw(st.integers(0, 10**6)))


@st.composite
def recorded_trees(draw: Any) -> Tree:
    """A random tree with everything filled in that a record can hold."""
    texts = st.text(max_size=12)
    numbers = st.floats(allow_nan=False, width=64)
    tree = draw(random_trees())

    def dressed(step: Step) -> Step:
        count = len(step.token_ids)
        mask = step.sampled_mask
        content = StepContent(
            thought=draw(texts),
            calls=tuple(
                ToolCall(name, draw(texts))
                for name in draw(st.lists(st.sampled_from(["python", "search"]), max_size=2))
            ),
            observations=tuple(
                Observation(
                    text=draw(texts), is_error=draw(st.booleans()), is_truncated=draw(st.booleans())
                )
                for _ in range(draw(st.integers(0, 2)))
            ),
            answer=draw(st.none() | texts),
        )
        known = draw(st.booleans())
        causes = st.sampled_from(
            [
                StartCause(),
                ContinuationCause(),
                BranchCause(entropy_change=-0.25, probability=0.5, rule="entropy"),
                GraftCause(source="expert", task_id="t/7", reward=1.0, similarity=0.875),
            ]
        )
        return replace(
            step,
            content=content,
            violation=draw(st.none() | texts),
            stop_reason=draw(st.none() | st.sampled_from(list(StopReason))),
            policy_version=draw(st.integers(0, 99)),
            cause=draw(causes) if step.parent else None,
            sampling_logprobs=tuple(draw(numbers) if one else 0.0 for one in mask),
            old_logprobs=tuple(draw(numbers) if one else 0.0 for one in mask) if known else None,
            ratios=tuple(draw(numbers) if one else 1.0 for one in mask) if known else None,
            credit_factors=tuple(draw(numbers) if one else 1.0 for one in mask) if known else None,
            entropies=tuple(0.5 if one else 0.0 for one in mask) if count else (),
        )

    return replace(
        tree,
        task=Task(
            id=draw(texts),
            question=draw(texts),
            reference=tuple(draw(st.lists(texts, max_size=3))),
            category=draw(texts),
            columns=draw(
                st.dictionaries(
                    texts,
                    st.none() | texts | st.integers() | st.lists(texts, max_size=2),
                    max_size=3,
                )
            ),
        ),
        steps=tuple(dressed(step) for step in tree.steps),
        leaves=tuple(
            replace(
                leaf,
                reward_parts=draw(st.dictionaries(texts, numbers, max_size=2)),
                answer=draw(st.none() | texts),
                is_correct=draw(st.none() | st.booleans()),
                advantage=draw(st.none() | numbers),
                weight=draw(st.floats(0, 1)),
                error=draw(st.none() | texts),
            )
            for leaf in tree.leaves
        ),
        budget=BudgetState(
            num_leaves=draw(st.integers(0, 9)),
            num_tool_calls=1,
            num_sampled_tokens=draw(st.integers(0, 9)),
        ),
    )
