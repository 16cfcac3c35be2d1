"""Packing: whole trees in one sequence, each token once, and the contributions that the loss runs
over.

    tree            0: p p    0.0: s s t    0.0.0: s    0.1: s        leaves: 0.0.0, 0.1
    packed          p  p  s  s  t  s  s
    position        0  1  2  3  4  5  2                               tokens before it on its path
    node ends       7  7  6  6  6  6  7        token i sees token j iff j <= i < end(node of j)
    unique sampled        0  1     2  3
    contributions   leaf 0: 0 1 2;  leaf 1: 3

A token that k trajectories share is scored once and contributes k times, each time with that
trajectory's own advantage, so every published objective comes out as if the trajectories had been
trained apart.

Learning from grafts puts one more node beside each graft: its text as the policy would write it at
that place. It sees the path above the graft, takes the positions that follow it, and nothing else
sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treegraft.core.types import Leaf, Origin, Step, Trajectory, Tree


class Node(NamedTuple):
    """A chain of steps without branches between them."""

    start: int
    """First packed token."""
    end: int
    """One past its last packed token."""
    subtree_end: int
    """One past the last packed token of everything below it."""


@dataclass(frozen=True, slots=True)
class PackedTree:
    """One tree's part of a batch."""

    start: int
    end: int
    nodes: tuple[Node, ...]
    """In depth-first order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """The texts of other agents in the grafts of a batch. L lesson tokens, D contributions."""

    packed: Tensor
    """[L] packed index of each token."""
    sources: Tensor
    """[L] packed index of the token before it: the graft's parent's last one, then the lesson's
    own."""
    temperatures: Tensor
    """[L] of the graft's step."""
    tokens: Tensor
    """[D] which lesson token a contribution is of."""
    trajectories: Tensor
    """[D] which trajectory holds the graft."""
    paths: tuple[tuple[int, ...], ...]
    """For each lesson the tokens of the path above it, then its own."""
    lengths: tuple[int, ...]
    """Tokens of each lesson; they sum to L."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch:
    """Trees packed one after another. T packed tokens, U unique sampled tokens, C contributions, N
    trajectories."""

    token_ids: Tensor
    """[T]"""
    position_ids: Tensor
    """[T] tokens before it on its path."""
    trees: tuple[PackedTree, ...]
    sampled: Tensor
    """[U] packed index of each sampled token."""
    sources: Tensor
    """[U] packed index of the token before it on its path, whose output predicts it."""
    temperatures: Tensor
    """[U] of its step; scores at temperature 0 are those of 1."""
    sampling_logprobs: Tensor
    """[U] of the engine."""
    tokens: Tensor
    """[C] which unique sampled token a contribution is of."""
    trajectories: Tensor
    """[C] which trajectory it belongs to, 0..N-1 in the order of trees and leaves;
    non-decreasing."""
    carries_loss: Tensor
    """[C] bool"""
    advantages: Tensor
    """[C] of the step where attribution is hard, else of the trajectory; 0 before credit."""
    paths: tuple[Trajectory, ...]
    """[N]"""
    step_offsets: tuple[dict[str, int], ...]
    """For each tree, the packed index at which each step starts."""
    lessons: Lessons | None = None
    """None where nothing is learned from grafts."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_path_tokens(self) -> int:
        """Tokens that separate trajectories would hold."""
        return sum(len(step.token_ids) for path in self.paths for step in path.steps)

    def per_trajectory(self, values: Tensor) -> list[Tensor]:
        """Returns, for values [U], those of each trajectory's sampled tokens in order; trajectories
        by tree and leaf."""
        if values.shape[0] != self.sampled.numel():
            raise ValueError(
                f"per_trajectory: got {values.shape[0]} values for {self.sampled.numel()} unique"
                " sampled tokens; expected one each, in the order of `sampled`"
            )
        counts = torch.bincount(self.trajectories, minlength=len(self.paths)).tolist()
        return list(values.index_select(0, self.tokens).split(counts))

    def to(self, device: torch.device) -> TreeBatch:
        """Returns the batch with its tensors on `device`."""
        lessons = (
            None if self.lessons is None else replace(self.lessons, **_moved(self.lessons, device))
        )
        return replace(self, lessons=lessons, **_moved(self, device))


def _moved(batch: TreeBatch | Lessons, device: torch.device) -> dict[str, Any]:
    return {
        n: v.to(device)
        for n in batch.__dataclass_fields__
        if isinstance(v := getattr(batch, n), Tensor)
    }


class _Packer:
    """Accumulates trees; one instance per batch."""

    def __init__(self, *, takes_lessons: bool) -> None:
        self.takes_lessons = takes_lessons
        self.token_ids: list[int] = []
        self.position_ids: list[int] = []
        self.sampled: list[int] = []
        self.sources: list[int] = []
        self.temperatures: list[float] = []
        self.sampling_logprobs: list[float] = []
        self.tokens: list[int] = []
        self.trajectories: list[int] = []
        self.carries_loss: list[bool] = []
        self.advantages: list[float] = []
        self.paths: list[Trajectory] = []
        self.trees: list[PackedTree] = []
        self.step_offsets: list[dict[str, int]] = []
        self.lessons = _LessonColumns()

    def add(self, tree: Tree) -> None:
        """Appends one tree's tokens, nodes and contributions."""
        start = len(self.token_ids)
        offsets: dict[str, int] = {}
        positions: dict[str, int] = {}
        unique: dict[str, range] = {}
        lessons = lesson_steps(tree) if self.takes_lessons else {}
        # Depth first, by ordinals: everything below a step then follows it without a gap, so that
        # two numbers say who sees it. It also makes the sums' order that of the tree alone.
        steps = (
            sorted([*tree.steps, *lessons.values()], key=lambda step: step.ordinals)
            if lessons
            else tree.steps
        )
        by_id = {step.id: step for step in steps}
        for step in steps:
            offsets[step.id] = len(self.token_ids)
            parent = by_id[step.parent] if step.parent is not None else None
            first = positions[parent.id] + len(parent.token_ids) if parent is not None else 0
            positions[step.id] = first
            # The first token of every child is predicted by the last one above it, wherever that is
            # packed; a step of ours that failed has no tokens and is passed over.
            before = None
            while parent is not None and before is None:
                if parent.token_ids:
                    before = offsets[parent.id] + len(parent.token_ids) - 1
                parent = by_id[parent.parent] if parent.parent is not None else None
            is_lesson = step.ordinals[-1] < 0
            unique[step.id] = (self._add_lesson if is_lesson else self._add_step)(
                step, first, before
            )
            if is_lesson and step.parent is not None:
                self.lessons.keep_path(tree.path(step.parent), step)
        nodes = _nodes(steps, offsets, len(self.token_ids))
        self.trees.append(PackedTree(start, len(self.token_ids), nodes))
        for path in tree.trajectories():
            for step in path.steps:
                self._contribute(path, step, unique[step.id])
                if step.id in lessons and has_lesson(path.leaf):
                    self.lessons.contribute(unique[lessons[step.id].id], len(self.paths))
            self.paths.append(path)
        self.step_offsets.append({step.id: offsets[step.id] for step in tree.steps})

    def _contribute(self, path: Trajectory, step: Step, unique: range) -> None:
        index = iter(unique)
        advantage = credit(step, path.leaf)
        for is_sampled, carries in zip(step.sampled_mask, step.loss_mask, strict=True):
            # Also those without loss: diagnostics and the record go over every sampled token.
            if is_sampled:
                self.tokens.append(next(index))
                self.trajectories.append(len(self.paths))
                self.carries_loss.append(carries and path.leaf.has_loss)
                self.advantages.append(advantage)

    def _add_tokens(self, step: Step, first_position: int) -> int:
        offset = len(self.token_ids)
        self.token_ids.extend(step.token_ids)
        self.position_ids.extend(range(first_position, first_position + len(step.token_ids)))
        return offset

    def _add_step(self, step: Step, first_position: int, before: int | None) -> range:
        offset, first_unique = self._add_tokens(step, first_position), len(self.sampled)
        for index, origin in enumerate(step.origins):
            if origin is not Origin.POLICY:
                continue
            self.sampled.append(offset + index)
            self.sources.append(_source(step, offset, index, before))
            self.temperatures.append(step.temperature or 1.0)
            self.sampling_logprobs.append(step.sampling_logprobs[index])
        return range(first_unique, len(self.sampled))

    def _add_lesson(self, step: Step, first_position: int, before: int | None) -> range:
        offset, columns = self._add_tokens(step, first_position), self.lessons
        first_unique = len(columns.packed)
        for index in range(len(step.token_ids)):
            columns.packed.append(offset + index)
            columns.sources.append(_source(step, offset, index, before))
            columns.temperatures.append(step.temperature or 1.0)
        return range(first_unique, len(columns.packed))


class _LessonColumns:
    """The columns of `Lessons` under way."""

    def __init__(self) -> None:
        self.packed: list[int] = []
        self.sources: list[int] = []
        self.temperatures: list[float] = []
        self.tokens: list[int] = []
        self.trajectories: list[int] = []
        self.paths: list[tuple[int, ...]] = []
        self.lengths: list[int] = []

    def keep_path(self, above: Sequence[Step], lesson: Step) -> None:
        self.paths.append(
            (*(token for step in above for token in step.token_ids), *lesson.token_ids)
        )
        self.lengths.append(len(lesson.token_ids))

    def contribute(self, unique: range, trajectory: int) -> None:
        self.tokens.extend(unique)
        self.trajectories.extend([trajectory] * len(unique))


def credit(step: Step, leaf: Leaf) -> float:
    """Returns the advantage that a step's tokens carry on the trajectory that ends in `leaf`; 0
    before credit."""
    return (leaf.advantage or 0.0) if step.advantage is None else step.advantage


def has_lesson(leaf: Leaf) -> bool:
    """Whether the grafts of this leaf's trajectory are worth imitating: it carries loss and did
    better than its group."""
    return leaf.has_loss and (leaf.advantage or 0.0) > 0.0


def lesson_steps(tree: Tree) -> dict[str, Step]:
    """Returns, for each graft that a trajectory worth imitating holds, its lesson as a step beside
    it.

    The ordinals of lessons are negative, so that they stand before their siblings and are never
    taken.
    """
    worth = {
        step.id
        for path in tree.trajectories()
        if has_lesson(path.leaf)
        for step in path.steps
        if step.lesson_ids
    }
    lessons: dict[str, Step] = {}
    for step in tree.steps:
        if step.id not in worth:
            continue
        count = len(step.lesson_ids)
        lessons[step.id] = Step(
            id=f"{step.parent}.{-1 - step.ordinals[-1]}",
            parent=step.parent,
            depth=step.depth,
            token_ids=step.lesson_ids,
            origins=(Origin.FORCED,) * count,
            loss_mask=(False,) * count,
            sampling_logprobs=(0.0,) * count,
            entropies=(0.0,) * count,
            temperature=step.temperature,
        )
    return lessons


def _source(step: Step, offset: int, index: int, before: int | None) -> int:
    """Packed index of the token that predicts the step's token `index`."""
    source = offset + index - 1 if index else before
    if source is None:
        raise ValueError(
            f"step '{step.id}': its first token was sampled, but nothing stands before it to"
            " predict it"
        )
    return source


def _nodes(steps: Sequence[Step], offsets: dict[str, int], end: int) -> tuple[Node, ...]:
    """The steps with single-child chains joined: fewer, longer nodes cost attention less."""
    children: dict[str, int] = {}
    for step in steps[1:]:
        assert step.parent is not None
        children[step.parent] = children.get(step.parent, 0) + 1
    heads = [step for step in steps if step.parent is None or children[step.parent] > 1]
    starts = [offsets[step.id] for step in heads] + [end]
    nodes = []
    for index, step in enumerate(heads):
        # Everything below a step follows it; its subtree ends where the first other one begins.
        depth = len(step.ordinals)
        below = index + 1
        while below < len(heads) and heads[below].ordinals[:depth] == step.ordinals:
            below += 1
        if starts[index] < starts[index + 1]:
            nodes.append(Node(starts[index], starts[index + 1], starts[below]))
    return tuple(nodes)


def pack_trees(
    trees: Sequence[Tree], *, device: torch.device | str = "cpu", takes_lessons: bool = False
) -> TreeBatch:
    """Returns one batch that holds all `trees`, in the order given.

    Args:
        takes_lessons: with those of the grafts that a trajectory with positive advantage and loss
            holds.

    Raises:
        ValueError: no trees, or a sampled token with nothing before it.
    """
    if not trees:
        raise ValueError("pack_trees: got no trees; at least one is needed")
    packer = _Packer(takes_lessons=takes_lessons)
    for tree in trees:
        packer.add(tree)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def numbers(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    columns = packer.lessons
    lessons = Lessons(
        packed=integers(columns.packed),
        sources=integers(columns.sources),
        temperatures=numbers(columns.temperatures),
        tokens=integers(columns.tokens),
        trajectories=integers(columns.trajectories),
        paths=tuple(columns.paths),
        lengths=tuple(columns.lengths),
    )
    return TreeBatch(
        token_ids=integers(packer.token_ids),
        position_ids=integers(packer.position_ids),
        trees=tuple(packer.trees),
        sampled=integers(packer.sampled),
        sources=integers(packer.sources),
        temperatures=numbers(packer.temperatures),
        sampling_logprobs=numbers(packer.sampling_logprobs),
        tokens=integers(packer.tokens),
        trajectories=integers(packer.trajectories),
        carries_loss=torch.tensor(packer.carries_loss, dtype=torch.bool, device=device),
        advantages=numbers(packer.advantages),
        paths=tuple(packer.paths),
        step_offsets=tuple(packer.step_offsets),
        lessons=lessons if columns.packed else None,
    )


def num_tree_tokens(tree: Tree) -> int:
    """Returns the unique tokens of a tree."""
    return sum(len(step.token_ids) for step in tree.steps)


def num_lesson_tokens(tree: Tree) -> int:
    """Returns the tokens that learning from grafts adds to a tree."""
    return sum(len(lesson.token_ids) for lesson in lesson_steps(tree).values())


def split_tree(tree: Tree, max_tokens: int, *, with_lessons: bool = False) -> list[Tree]:
    """Returns the tree whole where it fits `max_tokens`, else trees of some of its leaves each,
    which together have all of them; a single path that is longer goes alone.

    The gradient is that of the whole tree; the price is that tokens above a cut run once per part.
    """
    size = num_tree_tokens(tree) + (num_lesson_tokens(tree) if with_lessons else 0)
    if size <= max_tokens or len(tree.leaves) < 2:
        return [tree]
    costs = {
        step.id: len(step.token_ids) + (len(step.lesson_ids) if with_lessons else 0)
        for step in tree.steps
    }
    # The loss is a sum over contributions, whose weights and denominators do not depend on packs:
    # any division of the leaves is exact. Neighbours share most of their path, so they stay
    # together.
    parts: list[tuple[list[Leaf], set[str]]] = []
    size = 0
    for leaf in tree.leaves:
        names = leaf.step_id.split(".")
        path = {".".join(names[: n + 1]) for n in range(len(names))}
        added = sum(costs[name] for name in path - parts[-1][1]) if parts else 0
        if not parts or size + added > max_tokens:
            parts.append(([], set()))
            size, added = 0, sum(costs[name] for name in path)
        parts[-1][0].append(leaf)
        parts[-1][1].update(path)
        size += added
    return [
        replace(
            tree, steps=tuple(step for step in tree.steps if step.id in names), leaves=tuple(leaves)
        )
        for leaves, names in parts
    ]


def plan_packs(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns groups of indices whose sizes fit `max_tokens`, by first-fit decreasing; a larger
    single one goes alone. Indices ascend within a group, and groups by their first index."""
    packs: list[list[int]] = []
    room: list[int] = []
    # Largest first: small ones fill the gaps. Ties by index, and all sorted again at the end, since
    # gradients are summed in this order, and one seed has to give the same bits.
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        place = next((n for n, left in enumerate(room) if sizes[index] <= left), None)
        if place is None:
            packs.append([])
            room.append(max_tokens)
            place = len(packs) - 1
        packs[place].append(index)
        room[place] -= sizes[index]
    return sorted(sorted(pack) for pack in packs)
