"""Numbers about grown trees: rollouts and evaluations."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import comb

import numpy as np

from treegraft.core.types import BranchCause, GraftCause, Origin, Status, Trajectory, Tree
from treegraft.rollout.copied import copied_metrics


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0


def rollout_metrics(trees: Sequence[Tree]) -> dict[str, float]:
    """Returns the reward/*, rollout/* and branch/* metrics of an update's trees."""
    paths = [path for tree in trees for path in tree.trajectories()]
    scored = [path for path in paths if path.reward is not None]
    rewards = [[leaf.reward for leaf in tree.leaves if leaf.reward is not None] for tree in trees]
    groups = [group for group in rewards if group]
    after_prompt = [step for tree in trees for step in tree.steps[1:]]
    num_tokens = sum(len(step.token_ids) for step in after_prompt)
    metrics = {
        "reward/mean": (
            statistics.fmean(statistics.fmean(group) for group in groups) if groups else 0.0
        ),
        "reward/std": (
            statistics.fmean(statistics.stdev(g) if len(g) > 1 else 0.0 for g in groups)
            if groups
            else 0.0
        ),
        "rollout/num_trajectories": float(len(paths)),
        "rollout/num_sampled_tokens": float(sum(tree.budget.num_sampled_tokens for tree in trees)),
        "rollout/num_tool_calls": float(sum(tree.budget.num_tool_calls for tree in trees)),
        "rollout/tool_calls_mean": (
            statistics.fmean(path.num_tool_calls for path in paths) if paths else 0.0
        ),
        "rollout/steps_mean": (
            statistics.fmean(len(path.steps) - 1 for path in paths) if paths else 0.0
        ),
        "rollout/retrieved_frac": (
            sum(s.origins.count(Origin.RETRIEVED) for s in after_prompt) / max(1, num_tokens)
        ),
        "rollout/completed_frac": _share(path.status is Status.COMPLETED for path in paths),
        "rollout/truncated_frac": _share(path.status is Status.TRUNCATED for path in paths),
        "rollout/violation_frac": _share(path.status is Status.FORMAT_VIOLATION for path in paths),
        "rollout/failed_frac": _share(path.status is Status.FAILED for path in paths),
        "rollout/accuracy": _share(bool(path.leaf.is_correct) for path in scored),
        "branch/num_starts": float(sum(step.depth == 1 for step in after_prompt)),
        "branch/num_branches": float(
            sum(isinstance(step.cause, BranchCause) for step in after_prompt)
        ),
    }
    metrics |= _graft_metrics(trees, paths)
    names = sorted({name for path in scored for name in path.leaf.reward_parts})
    for name in names:
        values = [path.leaf.reward_parts[name] for path in scored if name in path.leaf.reward_parts]
        metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics


def _graft_metrics(trees: Sequence[Tree], paths: Sequence[Trajectory]) -> dict[str, float]:
    """The graft/* metrics; none where nothing was grafted."""
    causes = [
        (tree, step.cause)
        for tree in trees
        for step in tree.steps
        if isinstance(step.cause, GraftCause)
    ]
    if not causes:
        return {}
    hybrid = [any(step.origin is Origin.RETRIEVED for step in path.steps) for path in paths]
    metrics = {
        "graft/num_grafts": float(len(causes)),
        "graft/hybrid_frac": _share(hybrid),
        "graft/same_task_frac": _share(cause.task_id == tree.task.id for tree, cause in causes),
        "graft/similarity_mean": statistics.fmean(cause.similarity for _, cause in causes),
        "graft/cut_frac": _share(cause.num_cut > 0 for _, cause in causes),
        "graft/source_reward_mean": statistics.fmean(cause.reward for _, cause in causes),
    }
    for name, wanted in (("graft/reward_hybrid", True), ("graft/reward_on_policy", False)):
        rewards = [
            path.reward
            for path, is_hybrid in zip(paths, hybrid, strict=True)
            if is_hybrid is wanted
        ]
        scored = [reward for reward in rewards if reward is not None]
        if scored:
            metrics[name] = statistics.fmean(scored)
    return metrics | copied_metrics(paths)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased estimate that at least one of k samples is correct.

    pass@k = 1 - C(n - c, k) / C(n, k)        (Chen et al., arXiv 2107.03374, eq. 1)
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass_at_k: k is {k}; expected 1..{num_samples}, the number of samples")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def _is_correct(path: Trajectory) -> bool:
    return bool(path.leaf.is_correct)


def accuracy_metrics(trees: Sequence[Tree], name: str) -> dict[str, float]:
    """Returns the share of correct trajectories over all, and by category; a failed trajectory
    counts as wrong.

    Args:
        name: "accuracy" (greedy) or "accuracy_sampled".
    """
    paths = [path for tree in trees for path in tree.trajectories()]
    metrics = {f"eval/{name}": _share(_is_correct(path) for path in paths)}
    for category in sorted({path.task.category for path in paths if path.task.category}):
        key = category.replace(" ", "_")
        metrics[f"eval/{name}_{key}"] = _share(
            _is_correct(path) for path in paths if path.task.category == category
        )
    return metrics


def eval_metrics(greedy: Sequence[Tree] | None, sampled: Sequence[Tree] | None) -> dict[str, float]:
    """Returns the eval/* metrics of an evaluation; None leaves a kind out."""
    metrics: dict[str, float] = {}
    if greedy is not None:
        metrics |= accuracy_metrics(greedy, "accuracy")
    if sampled is not None:
        metrics |= accuracy_metrics(sampled, "accuracy_sampled")
        counts = [
            (len(tree.leaves), sum(_is_correct(p) for p in tree.trajectories())) for tree in sampled
        ]
        for k in (2**n for n in range(1, 12)):
            if counts and all(num >= k for num, _ in counts):
                metrics[f"eval/pass_at_{k}"] = statistics.fmean(
                    pass_at_k(num, c, k) for num, c in counts
                )
    every = [*(greedy or ()), *(sampled or ())]
    paths = [path for tree in every for path in tree.trajectories()]
    metrics["eval/completed_frac"] = _share(path.status is Status.COMPLETED for path in paths)
    metrics["eval/failed_frac"] = _share(path.status is Status.FAILED for path in paths)
    metrics["eval/tool_calls_mean"] = (
        statistics.fmean(path.num_tool_calls for path in paths) if paths else 0.0
    )
    given = [
        path.leaf.environment_reward for path in paths if path.leaf.environment_reward is not None
    ]
    return metrics | ({"eval/environment_reward": statistics.fmean(given)} if given else {})


def paired_gain(
    before: Sequence[Tree], after: Sequence[Tree], *, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Returns (gain, low, high): the difference of mean accuracy over the same tasks with its 95 %
    bootstrap interval.

    Tasks are drawn with replacement, each with both of its results, so that a task's difficulty
    cancels out (Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, ch. 13: percentile
    interval).

    Raises:
        ValueError: the two do not hold the same tasks.
    """

    def means(trees: Sequence[Tree]) -> dict[str, float]:
        return {
            tree.task.id: _share(_is_correct(path) for path in tree.trajectories())
            for tree in trees
        }

    first, second = means(before), means(after)
    if not first or first.keys() != second.keys():
        raise ValueError(
            f"paired_gain: got {len(first)} and {len(second)} tasks; expected the same ones on both"
            " sides"
        )
    differences = np.array([second[task] - first[task] for task in sorted(first)])
    draws = np.random.default_rng(seed).integers(
        0, len(differences), (num_resamples, len(differences))
    )
    low, high = np.percentile(differences[draws].mean(axis=1), [2.5, 97.5])
    return float(differences.mean()), float(low), float(high)
