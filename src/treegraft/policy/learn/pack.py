"""Packing: whole trees in one sequence, each token once, and the contributions that the loss runs
over.

    tree            0: p p    0.0: s s t    0.0.0: s    0.1: s        leaves: 0.0.0, 0.1
    packed          p  p  s  s  t  s  s
    position        0  1  2  3  4  5  2                             tokens before it in its context
    node ends       7  7  6  6  6  6  7        token i sees token j iff j <= i < end(node of j)
    unique sampled        0  1     2  3
    contributions   leaf 0: 0 1 2;  leaf 1: 3

A step whose context was written anew lies below the step which that continues, so that each token
sees what the policy saw; the packed tree is that of contexts, and may have several roots.

A token that k trajectories share is scored once and contributes k times, each time with that
trajectory's own advantage, so every published objective comes out as if the trajectories had been
trained apart.

Learning from grafts puts one more node beside each graft: its text as the policy would write it at
that place. It sees the path above the graft, takes the positions that follow it, and nothing else
sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treegraft.core.types import Leaf, Origin, RetryCause, Step, Trajectory, Tree, ids_to


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
class Imitated:
    """The texts of other agents in the grafts of a batch, which are imitated. L tokens, D
    contributions."""

    packed: Tensor
    """[L] packed index of each token."""
    sources: Tensor
    """[L] packed index of the token before it: the graft's parent's last one, then its own
    text's."""
    temperatures: Tensor
    """[L] of the graft's step."""
    tokens: Tensor
    """[D] which of these tokens a contribution is of."""
    trajectories: Tensor
    """[D] which trajectory contains the graft."""


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
    versions: Tensor
    """[U] policy version that sampled it."""
    tokens: Tensor
    """[C] which unique sampled token a contribution is of."""
    trajectories: Tensor
    """[C] which trajectory it belongs to, 0..N-1 in the order of trees and leaves;
    non-decreasing."""
    carries_loss: Tensor
    """[C] bool"""
    advantages: Tensor
    """[C] of the step where attribution is hard, else of the trajectory, times the token's factor
    where it has one; 0 before credit."""
    paths: tuple[Trajectory, ...]
    """[N]"""
    imitated: Imitated | None = None
    """None where nothing is learned from grafts."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def num_path_tokens(self) -> int:
        """Number of tokens that separate trajectories would hold, each in the rows of its
        contexts."""
        rows = (row for path in self.paths for row in path.rows())
        return sum(step.num_tokens for row in rows for step in row.path.steps)

    @property
    def lengths(self) -> Tensor:
        """[N] float64: |y|, the loss tokens of each trajectory's whole path; of a stored one, those
        that its agent wrote."""
        # The pack has the whole of |y|: also the parts of a split tree consist of whole paths.
        owners = self.trajectories[self.carries_loss]
        sampled = torch.bincount(owners, minlength=len(self.paths)).to(torch.float64)
        stored = [path.num_loss_tokens if path.is_stored else 0 for path in self.paths]
        return sampled + sampled.new_tensor(stored)

    def engine_gaps(self, logprobs: Tensor, version: int | None) -> Tensor:
        """Returns the distances of log-probabilities [U] from the engine's, where `version`
        sampled; None for all tokens."""
        gaps = (logprobs - self.sampling_logprobs).abs()
        # Of a group that is replayed, it is how far the policy has moved since.
        return gaps if version is None else gaps[self.versions == version]

    def per_trajectory(self, values: Tensor) -> list[Tensor]:
        """Returns, for values [U], those of each trajectory's sampled tokens in order; trajectories
        by tree and leaf."""
        # With minlength: a trajectory without sampled tokens, as after an early failure, has a
        # place of its own.
        counts = torch.bincount(self.trajectories, minlength=len(self.paths)).tolist()
        return list(values.index_select(0, self.tokens).split(counts))


def columns_of(kind: type[TreeBatch | Imitated]) -> dict[str, list[Any]]:
    """Returns an empty list for each tensor of the class."""
    # Annotations are texts here.
    return {field.name: [] for field in fields(kind) if field.type == "Tensor"}


_DTYPES = {"carries_loss": np.bool_} | dict.fromkeys(
    ("temperatures", "sampling_logprobs", "advantages"), np.float32
)
"""Types of the columns that hold no indices."""


def _tensors(columns: Mapping[str, list[Any]], device: torch.device | str) -> dict[str, Any]:
    tensors = {}
    for name, parts in columns.items():
        kind = _DTYPES.get(name, np.int64)
        # The empty one: grafts may have no column at all.
        joined = np.concatenate([*parts, np.zeros(0, kind)], dtype=kind, casting="unsafe")
        tensors[name] = torch.from_numpy(joined).to(device)
    return tensors


def _joined(parts: Iterable[Any]) -> np.ndarray:
    """The numbers of all parts, one after another."""
    return np.concatenate([np.asarray(part) for part in parts] or [np.zeros(0)])


def _ranges(starts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """start, start + 1, ... for each start with its count: [7, 2], [2, 3] -> 7 8 2 3 4."""
    before = np.cumsum(counts) - counts
    return np.repeat(np.subtract(starts, before), counts) + np.arange(sum(counts))


class _Packer:
    """Accumulates trees, each column as one array a tree; one instance per batch."""

    def __init__(self, *, takes_imitated: bool) -> None:
        self.takes_imitated = takes_imitated
        self.columns = columns_of(TreeBatch)
        self.imitated_columns = columns_of(Imitated)
        self.paths: list[Trajectory] = []
        self.trees: list[PackedTree] = []
        self.num_tokens = self.num_sampled = self.num_imitated_tokens = 0

    def add(self, tree: Tree) -> None:
        """Appends one tree's tokens, nodes and contributions."""
        imitated = imitated_steps(tree) if self.takes_imitated else {}
        # Depth first by contexts: everything below a step then follows it without a gap, so that
        # two numbers say who sees it. It also makes the sums' order that of the tree alone.
        steps = in_packed_order([*tree.steps, *imitated.values()])
        start = self.num_tokens
        end = self.num_tokens
        lengths: list[int] = []
        firsts: list[int] = []
        offsets: dict[str, int] = {}
        positions: dict[str, int] = {}
        last: dict[str, int] = {}
        sources: list[int] = []
        for step in steps:
            offsets[step.id] = end
            parent = step.parent
            length = step.num_tokens
            # By the path, not by the packed place: a branch is rotated as it would be alone.
            above = 0 if parent is None else positions[parent]
            positions[step.id] = above + length
            lengths.append(length)
            firsts.append(above)
            # The first token of every child is predicted by the last one above it, wherever that is
            # packed; a step of ours that failed has no tokens and is passed over.
            before = -1 if parent is None else last[parent]
            sources.append(before)
            last[step.id] = end + length - 1 if length else before
            end += length
        places = np.array(list(offsets.values()))
        index = np.arange(start, end)
        self.columns["token_ids"].append(_joined(step.token_ids for step in steps))
        self.columns["position_ids"].append(index + np.repeat(firsts - places, lengths))
        unique = self._add_scored(steps, np.array(lengths), places, np.array(sources), index)
        nodes = _nodes(steps, offsets, end)
        self.trees.append(PackedTree(start, end, nodes))
        self._contribute(tree, steps, imitated, unique)
        self.num_tokens = end

    def _add_scored(
        self,
        steps: Sequence[Step],
        lengths: np.ndarray,
        places: np.ndarray,
        sources: np.ndarray,
        index: np.ndarray,
    ) -> dict[str, tuple[int, int]]:
        """For each step the number, among the sampled or the imitated tokens, of the first that it
        adds, and how many it adds."""
        count = len(index)
        is_imitated = np.array([step.ordinals[-1] < 0 for step in steps])
        of_imitated = np.repeat(is_imitated, lengths)
        is_sampled = _joined(step.sampled_mask for step in steps) & ~of_imitated
        before = index - 1
        opens = places[lengths > 0] - (index[0] if count else 0)
        before[opens] = sources[lengths > 0]
        scored = is_sampled | of_imitated
        # Greedy tokens are scored at 1: at 0 every distribution is a point, without a gradient.
        temperatures = np.repeat([step.temperature or 1.0 for step in steps], lengths)
        for columns, mask, name in (
            (self.columns, is_sampled, "sampled"),
            (self.imitated_columns, of_imitated, "packed"),
        ):
            columns[name].append(index[mask])
            columns["sources"].append(before[mask])
            columns["temperatures"].append(temperatures[mask])
        logprobs = _joined(step.sampling_logprobs for step in steps)
        self.columns["sampling_logprobs"].append(logprobs[is_sampled])
        versions = np.repeat([step.policy_version for step in steps], lengths)
        self.columns["versions"].append(versions[is_sampled])
        added = np.concatenate([[0], np.cumsum(scored)])
        until = np.cumsum(lengths)
        counts = (added[until] - added[until - lengths]).tolist()
        unique: dict[str, tuple[int, int]] = {}
        for step, own, own_count in zip(steps, is_imitated.tolist(), counts, strict=True):
            unique[step.id] = (self.num_imitated_tokens if own else self.num_sampled, own_count)
            if own:
                self.num_imitated_tokens += own_count
            else:
                self.num_sampled += own_count
        return unique

    def _contribute(
        self,
        tree: Tree,
        steps: Sequence[Step],
        imitated: Mapping[str, Step],
        unique: Mapping[str, tuple[int, int]],
    ) -> None:
        own = [step for step in steps if step.ordinals[-1] >= 0 and unique[step.id][1]]
        carries = _joined(step.loss_mask[step.sampled_mask] for step in own).astype(np.bool_)
        base = unique[own[0].id][0] if own else 0
        rows: list[tuple[int, int, int, float, bool]] = []
        chosen: list[tuple[int, int, int]] = []
        for path in tree.trajectories():
            number = len(self.paths)
            leaf = path.leaf
            for step in path.steps:
                # Also tokens without loss: diagnostics and the record go over every sampled token.
                rows.append((*unique[step.id], number, step.advantage_below(leaf), leaf.has_loss))
                if step.id in imitated and imitates(path, step):
                    chosen.append((*unique[imitated[step.id].id], number))
            self.paths.append(path)
        if not rows:
            return
        starts, counts, owners, advantages, has_loss = zip(*rows, strict=True)
        tokens = _ranges(starts, counts)
        self.columns["tokens"].append(tokens)
        self.columns["trajectories"].append(np.repeat(owners, counts))
        spread = np.repeat(np.array(advantages, np.float64), counts)
        if any(step.credit_factors is not None for step in own):
            spread *= _factors(own)[tokens - base]
        self.columns["advantages"].append(spread)
        self.columns["carries_loss"].append(carries[tokens - base] & np.repeat(has_loss, counts))
        if chosen:
            starts, counts, owners = zip(*chosen, strict=True)
            self.imitated_columns["tokens"].append(_ranges(starts, counts))
            self.imitated_columns["trajectories"].append(np.repeat(owners, counts))


def _factors(steps: Sequence[Step]) -> np.ndarray:
    """The credit factors of the steps' sampled tokens, one after another."""
    return _joined(
        np.ones(step.num_sampled)
        if step.credit_factors is None
        else step.credit_factors[step.sampled_mask]
        for step in steps
    )


def imitates(path: Trajectory, step: Step) -> bool:
    """Whether a trajectory with loss that did better than its group imitates a step's `lesson_ids`:
    those of a graft, of a forced opening, or of the stored trajectory that it is; never those of
    stored steps that it began below."""
    is_own = step.is_graft or path.is_stored or isinstance(step.cause, RetryCause)
    is_worth = path.leaf.has_loss and (path.leaf.advantage or 0.0) > 0.0
    return bool(step.lesson_ids) and is_worth and is_own


def imitated_steps(tree: Tree) -> dict[str, Step]:
    """Returns, for each graft that a trajectory worth imitating contains, the text that is
    imitated as a step at its side.

    The ordinals of these steps are negative, so that they come before their siblings and
    their ids are free.
    """
    found: dict[str, Step] = {}
    for path in tree.trajectories():
        for step in path.steps:
            if imitates(path, step) and step.id not in found:
                found[step.id] = _imitated_step(step)
    return found


def _imitated_step(step: Step) -> Step:
    count = len(step.lesson_ids)
    return Step(
        # A step of its own at the graft's side, not part of it: on the path below, the next step
        # follows the graft's text, never the imitated one.
        id=f"{step.before}.{-1 - step.ordinals[-1]}",
        parent=step.parent,
        depth=step.depth,
        token_ids=np.array(step.lesson_ids),
        origins=np.full(count, Origin.FORCED),
        loss_mask=np.full(count, False),
        sampling_logprobs=np.zeros(count),
        entropies=np.zeros(count),
        temperature=step.temperature,
    )


def in_packed_order(steps: Sequence[Step]) -> list[Step]:
    """Returns the steps of a tree depth first by their contexts, siblings by their ids. That is the
    order of a tree's own steps unless a context was left and taken up again later."""
    below: dict[str | None, list[Step]] = {}
    # From the last, which is taken last from a stack.
    for step in sorted(steps, key=lambda step: step.ordinals, reverse=True):
        below.setdefault(step.parent, []).append(step)
    waiting = below.get(None, [])
    found = []
    while waiting:
        step = waiting.pop()
        found.append(step)
        waiting += below.get(step.id, ())
    return found


def _nodes(steps: Sequence[Step], offsets: dict[str, int], end: int) -> tuple[Node, ...]:
    """The steps with single-child chains joined: fewer, longer nodes cost attention less."""
    children = Counter(step.parent for step in steps)
    depths: dict[str | None, int] = {None: 0}
    for step in steps:
        depths[step.id] = depths[step.parent] + 1
    heads = [step for step in steps if step.parent is None or children[step.parent] > 1]
    starts = [offsets[step.id] for step in heads] + [end]
    nodes = []
    for index, step in enumerate(heads):
        # Everything below a step follows it; its subtree ends where the first other one begins.
        below = index + 1
        while below < len(heads) and depths[heads[below].id] > depths[step.id]:
            below += 1
        # A failed step without tokens has nothing to attend to or from.
        if starts[index] < starts[index + 1]:
            nodes.append(Node(starts[index], starts[index + 1], starts[below]))
    return tuple(nodes)


def pack_trees(
    trees: Sequence[Tree], *, device: torch.device | str = "cpu", takes_imitated: bool = False
) -> TreeBatch:
    """Returns one batch of all `trees`, in their order.

    Args:
        takes_imitated: with the texts of the grafts that a trajectory with positive advantage and
            loss holds.
    """
    packer = _Packer(takes_imitated=takes_imitated)
    for tree in trees:
        packer.add(tree)

    imitated = None
    if packer.num_imitated_tokens:
        imitated = Imitated(**_tensors(packer.imitated_columns, device))
    return TreeBatch(
        **_tensors(packer.columns, device),
        trees=tuple(packer.trees),
        paths=tuple(packer.paths),
        imitated=imitated,
    )


def blank_batch(device: torch.device | str = "cpu") -> TreeBatch:
    """Returns a batch of one sampled token that no trajectory contains, for a pass whose result
    counts for nothing."""
    values = {
        "token_ids": [0, 0],
        "position_ids": [0, 1],
        # The second token, since the first has none before it to predict it.
        "sampled": [1],
        "sources": [0],
        "temperatures": [1.0],
        "sampling_logprobs": [0.0],
        "versions": [0],
    }
    columns = {name: [np.asarray(values.get(name, []))] for name in columns_of(TreeBatch)}
    tree = PackedTree(0, 2, (Node(0, 2, 2),))
    return TreeBatch(**_tensors(columns, device), trees=(tree,), paths=())


def newest_of_several(trees: Sequence[Tree]) -> int | None:
    """Returns the newest policy version that sampled any of the trees, None where one version
    sampled all."""
    # A prompt and a step without tokens have no version of their own.
    versions = {step.policy_version for tree in trees for step in tree.steps if step.num_sampled}
    return max(versions) if len(versions) > 1 else None


def num_tree_tokens(tree: Tree, *, with_imitated: bool = False) -> int:
    """Returns the unique tokens of a tree, with those that learning from grafts adds if wanted."""
    added = num_imitated_tokens(tree) if with_imitated else 0
    return sum(step.num_tokens for step in tree.steps) + added


def num_imitated_tokens(tree: Tree) -> int:
    """Returns the tokens that learning from grafts adds to a tree."""
    return sum(step.num_tokens for step in imitated_steps(tree).values())


def without_branches(tree: Tree) -> Tree:
    """Returns the tree without the leaves that count in their group but have no weight in the loss,
    APPO's branches, and without the steps that are theirs alone: no gradient comes from them.

    Failed and truncated leaves stay, for the record of their log-probabilities.
    """
    leaves = []
    names: set[str] = set()
    for leaf in tree.leaves:
        if leaf.has_loss or leaf.weight or not leaf.status.rule.in_group:
            leaves.append(leaf)
            names.update(ids_to(leaf.step_id))
    if len(leaves) == len(tree.leaves) or not leaves:
        return tree
    return _part(tree, leaves, names)


def split_tree(tree: Tree, max_tokens: int, *, with_imitated: bool = False) -> list[Tree]:
    """Returns the tree whole where it fits `max_tokens`, else trees of some of its leaves each,
    which together have all of them; a single path that is longer goes alone.

    The gradient is that of the whole tree; the price is that tokens above a cut run once per part.
    """
    size = num_tree_tokens(tree, with_imitated=with_imitated)
    # Never a path in two: each part has to hold every token that its own ones are conditioned on.
    if size <= max_tokens or len(tree.leaves) < 2:
        return [tree]
    costs = {}
    for step in tree.steps:
        costs[step.id] = step.num_tokens + (len(step.lesson_ids) if with_imitated else 0)
    # The loss is a sum over contributions, whose weights and denominators do not depend on packs:
    # any division of the leaves is exact. Neighbours share most of their path, so they stay
    # together.
    parts: list[tuple[list[Leaf], set[str]]] = []
    size = 0
    for leaf in tree.leaves:
        path = set(ids_to(leaf.step_id))
        added = sum(costs[name] for name in path - parts[-1][1]) if parts else 0
        if not parts or size + added > max_tokens:
            parts.append(([], set()))
            size = 0
            added = sum(costs[name] for name in path)
        parts[-1][0].append(leaf)
        parts[-1][1].update(path)
        size += added
    return [_part(tree, leaves, names) for leaves, names in parts]


def _part(tree: Tree, leaves: Sequence[Leaf], names: set[str]) -> Tree:
    """The tree with some of its leaves and the named steps alone."""
    steps = tuple(step for step in tree.steps if step.id in names)
    return replace(tree, steps=steps, leaves=tuple(leaves))


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
