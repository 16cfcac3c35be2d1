"""Trees of given shapes for measurements of the learner, and the same trajectories as rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from treegraft.core.types import Leaf, Origin, Status, Step, Task, Tree

SAMPLED_FRAC = 0.6
"""Assumed share of sampled tokens on a path behind its prompt."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens without a branch between them, and the segments that follow them."""

    num_tokens: int
    num_sampled: int = 0
    """Tokens at its beginning that the policy has sampled; the others carry no loss."""
    below: tuple[Segment, ...] = ()


class Counts(NamedTuple):
    """What one pass computes."""

    tokens: int
    pairs: int
    """(i, j) for which token i sees token j."""
    scored: int
    """Tokens whose logits are made."""


_NOTHING = Counts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload("D", (root,)): trees to learn from, one a root."""

    text: str
    roots: tuple[Segment, ...]

    @property
    def unique(self) -> Counts:
        """Of the trees, each token once."""
        found = [
            Counts(
                one.num_tokens,
                one.num_tokens * above.tokens + _num_causal(one.num_tokens),
                one.num_sampled,
            )
            for root in self.roots
            for one, above in _walk(root)
        ]
        return _total(found)

    @property
    def flat(self) -> Counts:
        """Of the trajectories, each on its own."""
        found = []
        for root in self.roots:
            for one, above in _walk(root):
                if not one.below:
                    tokens = above.tokens + one.num_tokens
                    sampled = above.scored + one.num_sampled
                    found.append(Counts(tokens, _num_causal(tokens), sampled))
        return _total(found)

    @property
    def ratio(self) -> float:
        """Tokens of the trajectories over unique tokens."""
        return self.flat.tokens / self.unique.tokens

    def trees(self, text: Sequence[int], seed: int = 0) -> list[Tree]:
        """Returns the trees, made of passages of `text`; a trajectory's advantage is of either
        sign, and a tree's trajectories weigh 1 together."""
        draw = torch.Generator().manual_seed(seed)
        return [_tree(root, text, number, draw) for number, root in enumerate(self.roots)]


def _num_causal(count: int) -> int:
    return count * (count + 1) // 2


def _total(found: Sequence[Counts]) -> Counts:
    return Counts(*(sum(column) for column in zip(*found, strict=True)))


def _walk(segment: Segment, above: Counts = _NOTHING) -> Iterator[tuple[Segment, Counts]]:
    """Yields each segment with the tokens and the sampled tokens above it."""
    yield segment, above
    here = Counts(above.tokens + segment.num_tokens, 0, above.scored + segment.num_sampled)
    for one in segment.below:
        yield from _walk(one, here)


# ---------------------------------------------------------------------- shapes


def branched(
    prompt: int, length: int, starts: int, leaves: int, branch_at: float
) -> tuple[Segment, ...]:
    """Returns a tree of `starts` paths of `length` tokens behind one prompt, each of which branches
    into leaves / starts trajectories after the share `branch_at` of its tokens."""
    shared = round(length * branch_at)
    leaf = _sampled(length - shared)
    trunk = _sampled(shared, (leaf,) * (leaves // starts))
    return (Segment(prompt, below=(trunk,) * starts),)


def _sampled(count: int, below: tuple[Segment, ...] = ()) -> Segment:
    return Segment(count, round(count * SAMPLED_FRAC), below)


def turns(prompt: int, num: int, thought: int, call: int, result: int) -> tuple[Segment, ...]:
    """Returns a chat whose template drops earlier thoughts: each turn samples a thought and a call
    in a leaf of its own, and the next turn sees the call, without its thought, and the result."""
    leaf = Segment(thought + call, thought + call)
    segment = Segment(call + result, below=(leaf,))
    for _ in range(num - 2):
        segment = Segment(call + result, below=(leaf, segment))
    return (Segment(prompt, below=(leaf, segment)),)


def alone(prompt: int, length: int, num: int) -> tuple[Segment, ...]:
    """Returns trajectories that share nothing."""
    return (Segment(prompt, below=(_sampled(length),)),) * num


def one_prompt(prompt: int, leaves: int, tokens: int) -> Workload:
    """Returns a tree of one prompt and leaves of so many sampled tokens."""
    leaf = Segment(tokens, tokens)
    return Workload("one prompt", (Segment(prompt, below=(leaf,) * leaves),))


def workloads(scale: float = 1.0) -> Mapping[str, Workload]:
    """Returns the shapes that the learner is measured with, all lengths times `scale`."""

    def size(count: int) -> int:
        return max(3, round(count * scale))

    prompt = size(2000)
    path = size(3400)
    return {
        "D": Workload("deep branches", branched(prompt, path, 2, 16, 0.75)),
        "S": Workload(
            "20 turns, thoughts dropped", turns(prompt, 20, size(400), size(60), size(600))
        ),
        "C": Workload("commit branching", branched(size(600), path, 4, 16, 0.7)),
        "A": Workload("ARPO's released settings", branched(size(600), path, 8, 16, 0.5)),
        "G": Workload("nothing shared", alone(prompt, path, 4)),
    }


# ---------------------------------------------------------------------- trees


def _tree(root: Segment, text: Sequence[int], number: int, draw: torch.Generator) -> Tree:
    steps: list[Step] = []
    ends: list[str] = []

    def add(segment: Segment, step_id: str) -> None:
        steps.append(_step(segment, step_id, passage(text, segment.num_tokens, draw)))
        for child, below in enumerate(segment.below):
            add(below, f"{step_id}.{child}")
        if not segment.below:
            ends.append(step_id)

    add(root, "0")
    advantages = torch.linspace(-1.0, 1.5, len(ends)).tolist() if len(ends) > 1 else [1.0]
    leaves = tuple(
        Leaf(
            step_id=step_id,
            status=Status.COMPLETED,
            reward=0.0,
            advantage=advantage,
            weight=1.0 / len(ends),
        )
        for step_id, advantage in zip(ends, advantages, strict=True)
    )
    task = Task(id=f"bench/{number}", question="", reference=())
    return Tree(task=task, group_id=f"{number}", steps=tuple(steps), leaves=leaves)


def _step(segment: Segment, step_id: str, ids: tuple[int, ...]) -> Step:
    own = segment.num_sampled
    others = segment.num_tokens - own
    rest = Origin.TOOL if "." in step_id else Origin.PROMPT
    zeros = np.zeros(segment.num_tokens)
    return Step(
        id=step_id,
        parent=step_id.rpartition(".")[0] or None,
        depth=step_id.count("."),
        token_ids=np.array(ids),
        origins=np.repeat([Origin.POLICY, rest], [own, others]),
        loss_mask=np.repeat([True, False], [own, others]),
        sampling_logprobs=zeros,
        entropies=zeros,
    )


def passage(text: Sequence[int], count: int, draw: torch.Generator) -> tuple[int, ...]:
    """Returns `count` tokens of a text, from a place drawn at random on."""
    start = int(torch.randint(0, len(text) - count + 1, (1,), generator=draw))
    return tuple(text[start : start + count])


def apart(trees: Sequence[Tree]) -> list[Tree]:
    """Returns each trajectory as a tree of its own."""
    return [
        replace(tree, steps=path.steps, leaves=(path.leaf,))
        for tree in trees
        for path in tree.trajectories()
    ]


def prompt_once(trees: Sequence[Tree]) -> list[Tree]:
    """Returns trees whose trajectories share the prompt alone: what follows it is one step each."""
    found = []
    for tree in trees:
        prompt = tree.steps[0]
        paths = tree.trajectories()
        steps = [_joined(path.steps[1:], f"0.{n}") for n, path in enumerate(paths)]
        leaves = tuple(replace(path.leaf, step_id=f"0.{n}") for n, path in enumerate(paths))
        found.append(replace(tree, steps=(prompt, *steps), leaves=leaves))
    return found


def _joined(steps: Sequence[Step], step_id: str) -> Step:
    def column(name: str) -> Any:
        return np.concatenate([getattr(step, name) for step in steps])

    return Step(
        id=step_id,
        parent="0",
        depth=1,
        token_ids=column("token_ids"),
        origins=column("origins"),
        loss_mask=column("loss_mask"),
        sampling_logprobs=column("sampling_logprobs"),
        entropies=column("entropies"),
    )
