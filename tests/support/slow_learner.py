"""Example trees, and each published objective one trajectory and one token at a time: the slow
implementation that the learner is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.trees import Part, build_tree
from torch.nn.attention.flex_attention import flex_attention

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import LEARNING_RULES, Origin, Status, Step, Trajectory, Tree
from treegraft.policy.learn import scores as scores_module
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.learn.pack import TreeBatch
from treegraft.policy.learn.scores import token_scores
from treegraft.policy.learn.tree_attention import PackedPlan
from treegraft.settings.policy import LearnSettings, LossSettings

Weights = list[torch.Tensor]

BRANCHING = Part.of(
    "ppppp",
    Part.of(
        "sstt",
        Part.of(
            "sstrf",
            Part("ss", reward=1.0),
            Part("sSs", reward=0.0),
            Part("s", reward=-1.0, status=Status.TRUNCATED),
        ),
        Part("sss", reward=0.25, temperature=0.7),
        temperature=1.3,
    ),
    Part("ssss", reward=1.0),
    Part.of("st", Part("", status=Status.FAILED)),
    Part("ss", reward=-1.0, status=Status.FORMAT_VIOLATION),
)
FLAT = Part.of("pp", Part("sss", reward=0.5), Part("s", reward=0.5))
"""A group without variance."""


def example_trees(count: int = 2, **credit: Any) -> list[Tree]:
    parts = [
        BRANCHING,
        FLAT,
        Part.of("ppp", Part("sts", reward=1.0), Part("ss", reward=0.0)),
        BRANCHING,
    ][:count]
    return [
        assign_credit(build_tree(part, task_id=f"t/{n}", seed=n), **credit)
        for n, part in enumerate(parts)
    ]


# ---------------------------------------------------------------------- the slow way


def saw(path: Trajectory, step: Step) -> list[Step]:
    """The steps whose tokens the model saw before this one's, and the step itself."""
    by_id = {one.id: one for one in (*path.steps, *path.contexts)}
    found = [step]
    while (parent := found[0].parent) is not None:
        found.insert(0, by_id[parent])
    return found


def plain_scores(model: Any, path: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a trajectory's sampled tokens, from a forward pass of each
    step in its context, with whole logits; from one of the whole path if that is all contexts."""
    if path.contexts or any(step.parent != step.before for step in path.steps):
        passes = [(saw(path, step), {step.id}) for step in path.steps if step.num_sampled]
    else:
        passes = [([*path.steps], {step.id for step in path.steps})]
    logprobs = []
    entropies = []
    for steps, wanted in passes:
        ids = [token for step in steps for token in step.token_ids.tolist()]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        place = 0
        for step in steps:
            for is_sampled in step.sampled_mask:
                if is_sampled and step.id in wanted:
                    scaled = logits[place - 1] / (step.temperature or 1.0)
                    row = torch.log_softmax(scaled, dim=-1)
                    logprobs.append(row[ids[place]])
                    entropies.append(-(row.exp() * row).sum())
                place += 1
    empty = torch.zeros(0)
    return (torch.stack(logprobs), torch.stack(entropies)) if logprobs else (empty, empty)


def column(path: Trajectory, name: str) -> list[Any]:
    """A column of the sampled tokens, step by step in time."""
    return [
        value for step in path.steps for value in getattr(step, name)[step.sampled_mask].tolist()
    ]


def slow_loss(
    model: Any,
    trees: Sequence[Tree],
    loss: LossSettings,
    constant: float,
    old: Any = None,
    reference: Any = None,
) -> torch.Tensor:
    """The published objectives, one trajectory and one token at a time.

    Args:
        old: a frozen model that gives the old log-probabilities; None takes the present ones.
    """
    total = torch.zeros((), dtype=torch.float32)
    paths = [path for tree in trees for path in tree.trajectories()]
    counted = [path for path in paths if LEARNING_RULES[path.status].in_denominator]
    num_groups = sum(
        any(LEARNING_RULES[leaf.status].in_denominator for leaf in tree.leaves) for tree in trees
    )
    token_mean = sum(
        path.leaf.weight * sum(sum(step.loss_mask) for step in path.steps) for path in counted
    )
    for path in paths:
        mask = [path.leaf.has_loss and one for one in column(path, "loss_mask")]
        if not any(mask):
            continue
        length = sum(mask)
        if loss.aggregation == "token-mean":
            factor = path.leaf.weight / token_mean
        elif loss.aggregation == "sequence-mean":
            factor = path.leaf.weight / length / num_groups
        else:
            factor = path.leaf.weight / constant / num_groups
        logprobs, entropies = plain_scores(model, path)
        with torch.no_grad():
            before = logprobs.detach() if old is None else plain_scores(old, path)[0]
            anchor = None if reference is None else plain_scores(reference, path)[0]
        advantages = [
            ((path.leaf.advantage or 0.0) if step.advantage is None else step.advantage)
            * (1.0 if step.credit_factors is None else step.credit_factors[place])
            for step in path.steps
            for place, sampled in enumerate(step.sampled_mask)
            if sampled
        ]
        written = [one for step in path.steps[1:] for one in step.origins.tolist()]
        written += [one for step in path.contexts for one in step.origins.tolist()]
        # What was written again is no token of the trajectory's own.
        origins = [one for one in written if one != Origin.CONTEXT]
        sampled_at = column(path, "sampling_logprobs")
        if loss.old_logprobs == "engine":
            before = torch.tensor(sampled_at)
        gaps = [float(b) - p for b, p in zip(before, sampled_at, strict=True)]
        by_path = loss.engine_ratio == "sequence"
        whole = math.fsum(gap for gap, has_loss in zip(gaps, mask, strict=True) if has_loss)
        shaping = 1 + loss.shaping_weight * origins.count(Origin.RETRIEVED) / len(origins)
        for index, has_loss in enumerate(mask):
            if not has_loss:
                continue
            ratio = shaping * torch.exp(logprobs[index] - before[index])
            if loss.objective == "gspo":
                taught = torch.tensor(mask)
                ratio = shaping * torch.exp((logprobs - before)[taught].mean())
                # The token form, which differs where the tokens of a sequence carry different ones.
                if len(set(advantages)) > 1:
                    own = logprobs[index]
                    ratio = ratio.detach() * torch.exp(own - own.detach())
            carried = advantages[index]
            if getattr(loss, "future_weight", 0):
                places = [n for n, sampled in enumerate(path.sampled_mask) if sampled]
                carried *= future_factor(
                    loss, (logprobs - before).tolist(), mask, places, index, advantages
                )
            objective = token_objective(loss, ratio, logprobs[index], carried)
            if loss.engine_ratio_cap is not None:
                factor_of_engine = math.exp(whole if by_path else gaps[index])
                objective = objective * min(factor_of_engine, loss.engine_ratio_cap)
            if anchor is not None:
                gap = anchor[index] - logprobs[index]
                objective = objective - loss.kl_coef * (torch.exp(gap) - gap - 1)
            objective = objective + loss.entropy_coef * entropies[index]
            total = total - factor * objective
    return total


def future_factor(
    loss: Any,
    gaps: Sequence[float],
    mask: Sequence[bool],
    places: Sequence[int],
    index: int,
    advantages: Sequence[float],
) -> float:
    """APPO's 1 + b f of one token: its sum over all later loss tokens, each with its distance on
    the path; 0 where two tokens of the trajectory are past dual clip."""
    # An extension, which tests of the core do without.
    from treegraft.extras.methods import appo_loss

    past = [math.exp(gap) > loss.dual_clip for gap in gaps]
    if sum(m and far and a < 0 for m, far, a in zip(mask, past, advantages, strict=True)) > 1:
        return 0.0
    total = sum(
        gaps[n] * 2 ** (-(places[n] - places[index]) / appo_loss.HALF_LIFE)
        for n in range(index, len(gaps))
        if mask[n] and not past[n]
    )
    if advantages[index] < 0 and math.exp(gaps[index]) > 6:
        return 1.0 + loss.future_weight
    return 1.0 + loss.future_weight * min(max(math.exp(total), 1.0), appo_loss.HIGHEST)


def token_objective(
    loss: LossSettings, ratio: torch.Tensor, logprob: torch.Tensor, advantage: float
) -> torch.Tensor:
    """One token's term, case by case."""
    low = 1 - loss.clip_low
    high = 1 + loss.clip_high
    if loss.objective == "cispo":
        return min(max(float(ratio.detach()), low), high) * advantage * logprob
    if loss.objective == "gppo" and advantage < 0 and ratio < low:
        return low * advantage * (1 + loss.kept_low * (logprob - logprob.detach()))
    if loss.objective == "gppo" and advantage > 0 and ratio > high:
        return high * advantage * (1 + logprob - logprob.detach())
    bounded = torch.clamp(ratio, low, high)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    if loss.dual_clip is not None and advantage < 0:
        objective = torch.maximum(objective, torch.tensor(loss.dual_clip * advantage))
    return objective


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat(
        [
            torch.zeros(w.numel()) if w.grad is None else w.grad.float().flatten()
            for w in model.parameters()
        ]
    )


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative norm of the difference."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


class Descent:
    """Plain gradient descent in the optimiser's place: a step that shows the gradient as it is."""

    def __init__(self, model: Any, lr: float) -> None:
        self.model = model
        self.last_lr = lr
        self.gradients: list[torch.Tensor] = []
        self.num_steps = 0

    def step(self) -> float:
        self.gradients.append(gradient_of(self.model))
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight -= self.last_lr * weight.grad
                weight.grad = None
        return float(self.gradients[-1].norm())


def make_learner(
    model: Any, loss: LossSettings | None = None, lr: float = 0.0, **learn: Any
) -> tuple[Learner, Descent]:
    learner = Learner(
        model, LearnSettings(lr=lr, **learn), loss or LossSettings(), length_constant=7
    )
    descent = Descent(model, lr)
    learner.optimiser = descent  # type: ignore[assignment]
    return learner, descent


DENSE_LIMITS = {"dense": 1024, "gathered": 0}
"""Tokens of a tree up to which it takes a dense mask, where there are no kernels."""
WAYS = ("kernels", *DENSE_LIMITS, "flex")
"""Ways of attending over a tree."""


def attend_by(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Makes the learner attend over trees in one way, however large they are."""
    flex = flex_attention if kind == "flex" else None
    patch.setattr(scores_module, "PackedPlan", lambda batch: PackedPlan(batch, flex=flex))
    if kind in DENSE_LIMITS:
        module = "treegraft.policy.learn.tree_attention"
        patch.setattr(f"{module}.tree_kernels", lambda *_: None)
        patch.setattr(f"{module}.DENSE_LIMIT", DENSE_LIMITS[kind])
    # Not compiled FlexAttention runs backward on a CPU as well, though it says no.
    patch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def assert_scores_equal(model: Any, batch: TreeBatch, atol: float = 1e-5) -> None:
    with torch.no_grad():
        logprobs, entropies = token_scores(model, batch)
        for path, ours, spread in zip(
            batch.paths,
            batch.per_trajectory(logprobs),
            batch.per_trajectory(entropies),
            strict=True,
        ):
            expected = plain_scores(model, path)
            torch.testing.assert_close(ours, expected[0], atol=atol, rtol=0)
            torch.testing.assert_close(spread, expected[1], atol=atol, rtol=0)


def shift_weights(model: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)


def gradients_of(optimiser: MasterAdamW) -> dict[str, torch.Tensor]:
    """The gradients that the next step takes, by the weights' names."""
    pairs = zip(optimiser._names, optimiser._masters, strict=True)
    return {name: master.grad for name, master in pairs if master.grad is not None}
