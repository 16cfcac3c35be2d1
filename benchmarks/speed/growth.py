"""Time against size: sampling and learning, each curve with its exponent.

An exponent is the slope of log time over log size, by least squares over all points of a curve,
with its standard error. The sizes of a curve take turns, so that a busy moment does not bend it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.speed.measure import Case, Row, Side, alternate, fit_exponent, time_row
from benchmarks.speed.plans import PathPlan, TreePlan, arpo_tree, grow_plan
from benchmarks.speed.stage import OurEngine, Stage
from benchmarks.workloads import one_prompt, passage
from treegraft.core.interfaces import Request
from treegraft.core.types import Leaf, Origin, Sampling, Status, Step, Task, Tree
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.pack import TreeBatch, num_tree_tokens, pack_trees
from treegraft.policy.load import with_adapters
from treegraft.settings.policy import LearnSettings, LossSettings, ModelSettings

GROUPS = (4, 8, 16, 32, 64)
DEPTHS = (1, 2, 3, 4, 6, 8)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384)
PROMPT = 200


def cases(stage: Stage) -> Mapping[str, Case]:
    """Returns the parts of `python -m benchmarks.speed growth`."""
    return {
        "learning group": partial(_learning, stage, "group", _group_trees),
        "learning depth": partial(_learning, stage, "depth", _depth_trees),
        "learning context": partial(_learning, stage, "context", _context_trees, saves_memory=True),
        "learning leaves": partial(_learning_leaves, stage),
        "sampling group": partial(_sampling_group, stage),
        "sampling depth": partial(_sampling_depth, stage),
        "sampling context": partial(_sampling_context, stage),
        "sampling leaves": partial(_sampling_leaves, stage),
    }


def curve_rows(
    name: str, unit: str, points: Mapping[str, float], seconds: Mapping[str, Sequence[float]]
) -> Iterator[Row]:
    """Gives a row for each point, against the smallest one in proportion, and one for the exponent.

    Args:
        unit: of the sizes, such as "unique tokens".
        points: size by label.
        seconds: of each label's runs.
    """
    first = min(points, key=lambda label: points[label])
    base = statistics.median(seconds[first])
    num_runs = len(seconds[first])
    medians = {label: statistics.median(times) for label, times in seconds.items()}
    for label, size in points.items():
        fair = base * size / points[first]
        yield Row(
            what=f"{name}, {label}: {size:,.0f} {unit}",
            against=f"{first}, in proportion",
            ratio=fair / medians[label],
            ours=medians[label],
            theirs=fair,
            unit="s",
            num_runs=num_runs,
        )
    exponent, error = fit_exponent([points[label] for label in medians], list(medians.values()))
    shown = "unknown" if math.isnan(error) else f"{error:.3f}"
    yield Row(
        what=f"{name}: exponent of time over {unit}",
        against="growth in proportion",
        ratio=exponent,
        ours=exponent,
        theirs=1.0,
        unit=f"exponent, standard error {shown} (ratio: the goal is at most 1.05)",
        num_runs=num_runs,
    )


# ---------------------------------------------------------------------- learning


def _group_trees(stage: Stage) -> dict[str, Tree]:
    sizes = stage.pick(GROUPS, (2, 4))
    prompt = stage.pick(PROMPT, 8)
    tokens = stage.pick(64, 4)
    return {f"{n} leaves": _one_prompt(stage, prompt, n, tokens) for n in sizes}


def _depth_trees(stage: Stage) -> dict[str, Tree]:
    depths = stage.pick(DEPTHS, (1, 3))
    prompt = stage.pick(PROMPT, 8)
    return {f"depth {n}": planned_tree(_deep_plan(stage, n), prompt, stage.text) for n in depths}


def _context_trees(stage: Stage) -> dict[str, Tree]:
    lengths = stage.pick(CONTEXTS, (16, 48))
    leaves = stage.pick(8, 2)
    return {f"context {n}": _one_prompt(stage, n, leaves, stage.pick(64, 4)) for n in lengths}


def _one_prompt(stage: Stage, prompt: int, leaves: int, tokens: int) -> Tree:
    (tree,) = one_prompt(prompt, leaves, tokens).trees(stage.text)
    return tree


def _deep_plan(stage: Stage, depth: int) -> TreePlan:
    """Four starts and eight leaves of `depth` steps, without waits."""
    lengths = stage.pick(((48, 48), (16, 16)), ((3, 3), (2, 2)))
    return arpo_tree(
        num_starts=4,
        num_leaves=8,
        num_steps=depth,
        tokens=lengths[0],
        result=lengths[1],
        wait_s=(0.0, 0.0),
    )


class _Learning:
    """One learner, and batches of one tree each."""

    def __init__(self, stage: Stage, *, saves_memory: bool = False) -> None:
        """Args: saves_memory: gradient checkpointing, without which the longest context does not
        fit into 24 GB.
        """
        model = with_adapters(
            stage.load()[0], ModelSettings(gradient_checkpointing=saves_memory), seed=0
        )
        learn = LearnSettings(max_pack_tokens=1 << 20)
        self._learner = Learner(model, learn, LossSettings(), length_constant=64)

    def side(self, tree: Tree) -> Side:
        """Returns forward and backward of the tree's log-probabilities."""
        batch = pack_trees([tree], device=self._learner.device)
        return Side(
            lambda _: self._run(batch),
            before=lambda _: self._learner.model.zero_grad(set_to_none=True),
        )

    def _run(self, batch: TreeBatch) -> None:
        self._learner.scores(batch)[0].sum().backward()


def _learning(
    stage: Stage, name: str, make: Callable[[Stage], dict[str, Tree]], *, saves_memory: bool = False
) -> Iterator[Row]:
    learning = _Learning(stage, saves_memory=saves_memory)
    trees = make(stage)
    seconds = alternate(
        {label: learning.side(tree) for label, tree in trees.items()}, stage.num_runs
    )
    points = {label: float(num_tree_tokens(tree)) for label, tree in trees.items()}
    how = ", gradient checkpointing" if saves_memory else ""
    yield from curve_rows(
        f"learning by {name}, {stage.dtype}{how}", "unique tokens", points, seconds
    )


def _learning_leaves(stage: Stage) -> Iterator[Row]:
    """8 against 64 leaves that have the same number of unique tokens."""
    learning = _Learning(stage)
    few, many, tokens = stage.pick((8, 64, 2048), (2, 4, 16))
    trees = {n: _one_prompt(stage, stage.pick(PROMPT, 8), n, tokens // n) for n in (few, many)}
    sides = {str(n): learning.side(tree) for n, tree in trees.items()}
    yield _leaves_row(
        f"learning, {stage.dtype}",
        few,
        many,
        num_tree_tokens(trees[few]),
        alternate(sides, stage.num_runs),
    )


def _leaves_row(
    name: str, few: int, many: int, num_unique: int, seconds: Mapping[str, Sequence[float]]
) -> Row:
    same = f"{few} leaves of the same {num_unique:,} unique tokens"
    row = time_row(f"{name}: {many} leaves", same, seconds[str(many)], seconds[str(few)])
    change = row.ours / row.theirs - 1
    return Row(
        what=row.what,
        against=row.against,
        ratio=row.ours / row.theirs,
        ours=row.ours,
        theirs=row.theirs,
        unit=f"s ({change:+.1%}; ratio: the goal is at most 1.05)",
        num_runs=row.num_runs,
    )


def planned_tree(plan: TreePlan, prompt: int, text: Sequence[int]) -> Tree:
    """Returns the tree that a plan describes, of passages of a text."""
    generator = torch.Generator().manual_seed(0)
    leaves: list[str] = []

    def step(step_id: str, parent: str | None, own: int, result: int) -> Step:
        count = own + result
        ids = passage(text, count, generator)
        is_root = parent is None
        own_origin = Origin.PROMPT if is_root else Origin.POLICY
        origins = np.repeat([own_origin, Origin.TOOL], [own, result])
        return Step(
            id=step_id,
            parent=parent,
            depth=step_id.count("."),
            token_ids=np.array(ids),
            origins=origins,
            loss_mask=origins == Origin.POLICY,
            sampling_logprobs=np.zeros(count),
            entropies=np.zeros(count),
        )

    def path(parent: str, ordinal: int, planned: PathPlan) -> Iterator[Step]:
        above = parent
        number = ordinal
        children = dict(planned.branches)
        for place, one in enumerate(planned.steps):
            if place in children:
                yield from path(above, 1, children[place])
            yield step(f"{above}.{number}", above, one.num_tokens, len(one.result_ids))
            above = f"{above}.{number}"
            number = 0
        leaves.append(above)

    steps = [step("0", None, prompt, 0)]
    for number, start in enumerate(plan.starts):
        steps += path("0", number, start)
    steps.sort(key=lambda one: one.ordinals)
    ends = sorted(leaves, key=lambda end: [int(part) for part in end.split(".")])
    found = tuple(Leaf(step_id=end, status=Status.COMPLETED, reward=0.0) for end in ends)
    return Tree(
        task=Task(id="bench", question="", reference=()),
        group_id="bench",
        steps=tuple(steps),
        leaves=found,
    )


# ---------------------------------------------------------------------- sampling


def _group_side(
    stage: Stage, ours: OurEngine, prompt: int, rows: int, tokens: int, *, at: int
) -> Side:
    """A group of one prompt; `at` keeps the prompts of a curve's points apart."""

    def after(run: int, found: list[Any]) -> None:
        if run == 0:
            ours.check(stage.prompt(at, prompt), found, tokens)

    return Side(
        lambda run: ours.group(stage.prompt(run * 1000 + at, prompt), rows, tokens, run),
        after=after,
    )


def _sampling_group(stage: Stage) -> Iterator[Row]:
    prompt = stage.pick(PROMPT, 8)
    tokens = stage.pick(64, 4)
    with stage.engine() as ours:
        sizes = stage.pick(GROUPS, (2, 4))
        sides = {f"{n} leaves": _group_side(stage, ours, prompt, n, tokens, at=n) for n in sizes}
        seconds = alternate(sides, stage.num_runs)
    points = {f"{n} leaves": float(prompt + n * tokens) for n in sizes}
    yield from curve_rows(f"sampling by group, {stage.dtype}", "unique tokens", points, seconds)


def _sampling_depth(stage: Stage) -> Iterator[Row]:
    length = stage.pick(PROMPT, 8)
    plans = {f"depth {n}": _deep_plan(stage, n) for n in stage.pick(DEPTHS, (1, 3))}
    with stage.engine() as ours:

        def grow(run: int, plan: TreePlan, number: int) -> int:
            prompt = stage.prompt(run * 1000 + number, length)

            async def complete(
                prefix: Sequence[int], count: int, key: tuple[int | str, ...]
            ) -> Sequence[int]:
                sampling = Sampling(max_new_tokens=count)
                return (
                    await ours.engine.complete(Request(prefix, sampling, noise_key=("bench", *key)))
                ).token_ids

            async def whole() -> int:
                return await grow_plan(complete, plan, prompt, (run, number))

            counted = ours.runner.run(whole())
            assert counted == plan.num_sampled, (
                f"a tree of {plan.num_sampled} sampled tokens has {counted}"
            )
            return counted

        sides = {
            label: Side(
                partial(lambda run, plan, number: grow(run, plan, number), plan=plan, number=number)
            )
            for number, (label, plan) in enumerate(plans.items())
        }
        seconds = alternate(sides, stage.num_runs)
    points = {label: float(length + plan.num_tokens) for label, plan in plans.items()}
    yield from curve_rows(f"sampling by depth, {stage.dtype}", "unique tokens", points, seconds)


def _sampling_context(stage: Stage) -> Iterator[Row]:
    lengths = stage.pick(CONTEXTS, (16, 48))
    rows = stage.pick(8, 2)
    tokens = stage.pick(32, 4)
    # Few prompts at once: room for long ones is made for each.
    with stage.engine(max_context=max(lengths) + 2 * tokens) as ours:
        sides = {f"context {n}": _group_side(stage, ours, n, rows, tokens, at=n) for n in lengths}
        seconds = alternate(sides, stage.num_runs)
    points = {f"context {n}": float(n + rows * tokens) for n in lengths}
    yield from curve_rows(f"sampling by context, {stage.dtype}", "unique tokens", points, seconds)


def _sampling_leaves(stage: Stage) -> Iterator[Row]:
    few, many, tokens = stage.pick((8, 64, 2048), (2, 4, 16))
    prompt = stage.pick(PROMPT, 8)
    with stage.engine() as ours:
        sides = {
            str(n): _group_side(stage, ours, prompt, n, tokens // n, at=n) for n in (few, many)
        }
        seconds = alternate(sides, stage.num_runs)
    yield _leaves_row(f"sampling, {stage.dtype}", few, many, prompt + tokens, seconds)


# ---------------------------------------------------------------------- the buffer


def generated_vectors(count: int, dim: int, seed: int) -> npt.NDArray[np.float32]:
    """Returns [count, dim] of unit length, in clusters as keys of like questions are."""
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((1000, dim), dtype=np.float32)
    vectors = centres[draw.integers(0, len(centres), count)]
    vectors += draw.standard_normal(vectors.shape, dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors
