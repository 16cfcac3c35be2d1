"""Numbers about grown trees: rollouts and evaluations."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import comb

from treegraft.core.interfaces import Explorer, Restarting
from treegraft.core.types import (
    BranchCause,
    GraftCause,
    Origin,
    Status,
    Step,
    Trajectory,
    Tree,
)
from treegraft.explore.compose import asking


def _mean(values: Iterable[float]) -> float:
    """The mean, for flags the share of those that are set; 0 of nothing."""
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _paths(trees: Sequence[Tree]) -> list[Trajectory]:
    return [path for tree in trees for path in tree.trajectories()]


def _ended_frac(paths: Sequence[Trajectory], status: Status) -> float:
    return _mean(path.status is status for path in paths)


def _rewards(paths: Iterable[Trajectory]) -> list[float]:
    return [path.reward for path in paths if path.reward is not None]


def rollout_metrics(trees: Sequence[Tree], references: Sequence[Tree] = ()) -> dict[str, float]:
    """Returns the reward/*, rollout/*, branch/* and graft/* metrics of an update's trees; means and
    shares are the agent's, without whole stored trajectories.

    Args:
        references: trees for the sampler of tasks alone, which count in rollout/num_* only.
    """
    paths = _paths(trees)
    own = [path for path in paths if not path.is_stored]
    scored = [path.leaf for path in own if path.reward is not None]
    means: list[float] = []
    deviations: list[float] = []
    for tree in trees:
        if rewards := _rewards(path for path in tree.trajectories() if not path.is_stored):
            means.append(statistics.fmean(rewards))
            deviations.append(statistics.stdev(rewards) if len(rewards) > 1 else 0.0)
    counts = _counted(trees)
    totals = Counter[str]()
    for tree in [*trees, *references]:
        totals["trajectories"] += len(tree.leaves)
        totals["tokens"] += tree.budget.num_sampled_tokens
        totals["calls"] += tree.budget.num_tool_calls
    metrics = {
        # Of the groups' means, so that a task whose leaves failed counts as much as the others.
        "reward/mean": _mean(means),
        "reward/std": _mean(deviations),
        "rollout/num_trajectories": float(totals["trajectories"]),
        "rollout/num_sampled_tokens": float(totals["tokens"]),
        "rollout/num_tool_calls": float(totals["calls"]),
        "rollout/tool_calls_mean": _mean(path.num_tool_calls for path in own),
        # Of unique tokens: a shared graft counts once.
        "rollout/retrieved_frac": counts["retrieved"] / max(1, counts["tokens"]),
        "rollout/completed_frac": _ended_frac(own, Status.COMPLETED),
        "rollout/truncated_frac": _ended_frac(own, Status.TRUNCATED),
        "rollout/violation_frac": _ended_frac(own, Status.FORMAT_VIOLATION),
        "rollout/failed_frac": _ended_frac(own, Status.FAILED),
        "rollout/accuracy": _mean(bool(leaf.is_correct) for leaf in scored),
        "branch/num_branches": float(counts["branches"]),
    }
    metrics |= _graft_metrics(trees, paths)
    # A reward function may say nothing of a trajectory; its mean is over those it judged.
    parts: dict[str, list[float]] = {}
    for leaf in scored:
        for name, value in leaf.reward_parts.items():
            parts.setdefault(name, []).append(value)
    for name, values in sorted(parts.items()):
        metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics


def _counted(trees: Sequence[Tree]) -> Counter[str]:
    """Steps and tokens after the prompts, by what they are."""
    found = Counter[str]()
    for tree in trees:
        for step in tree.steps[1:]:
            found["tokens"] += step.num_tokens - step.num_by(Origin.CONTEXT)
            if step.is_graft:
                found["retrieved"] += step.num_by(Origin.RETRIEVED)
            if isinstance(step.cause, BranchCause):
                found["branches"] += 1
    return found


def _graft_metrics(trees: Sequence[Tree], paths: Sequence[Trajectory]) -> dict[str, float]:
    """The graft/* metrics; none where nothing was grafted."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    num_grafts = 0
    for tree in trees:
        for step in tree.steps:
            cause = step.cause
            if isinstance(cause, GraftCause):
                num_grafts += 1
                columns["graft/same_task_frac"].append(cause.task_id == tree.task.id)
                columns["graft/similarity_mean"].append(cause.similarity)
                columns["graft/source_reward_mean"].append(cause.reward)
    if not num_grafts:
        return {}
    for path in paths:
        is_hybrid = _is_hybrid(path.steps)
        columns["graft/hybrid_frac"].append(is_hybrid)
        # Left out if there is no such trajectory: a 0 would read as a bad reward.
        if path.reward is not None:
            name = "graft/reward_hybrid" if is_hybrid else "graft/reward_on_policy"
            columns[name].append(path.reward)
    metrics = {"graft/num_grafts": float(num_grafts)}
    for name, values in columns.items():
        metrics[name] = _mean(values)
    return metrics


def _is_hybrid(steps: Sequence[Step]) -> bool:
    return any(step.is_graft for step in steps)


def unused_metrics(trees: Sequence[Tree], explorer: Explorer, num_leaves: int) -> dict[str, float]:
    """Returns branch/unused_frac and graft/unused_frac, the shares of planned branches and grafts
    that were never made, and graft/num_grafts where that is 0; each only where the explorer plans
    for it.

    Args:
        num_leaves: of a tree, at most.
    """
    metrics: dict[str, float] = {}
    num_starts = explorer.starts(num_leaves).num
    if (
        trees
        and not explorer.has_stages
        and num_starts < num_leaves
        and not explorer.wants_rewards
        and explorer.plans_starts
        and not isinstance(explorer, Restarting)
    ):
        # Leaves that no branch took became fresh starts.
        num_unused = 0
        for tree in trees:
            # First-level steps beyond the planned starts are the back-fill.
            num_opened = sum(step.depth == 1 for step in tree.steps)
            num_unused += max(0, num_opened - num_starts)
        metrics["branch/unused_frac"] = num_unused / (len(trees) * (num_leaves - num_starts))
    is_unused: list[bool] = []
    with asking(explorer, "is_hybrid"):
        for path in _paths(trees):
            if explorer.is_hybrid(path.steps[1].ordinals[1]):
                is_unused.append(not _is_hybrid(path.steps))
    if is_unused:
        metrics["graft/unused_frac"] = _mean(is_unused)
        if all(is_unused):
            metrics["graft/num_grafts"] = 0.0
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased estimate that at least one of k samples is correct.

    pass@k = 1 - C(n - c, k) / C(n, k)        (Chen et al., arXiv 2107.03374, eq. 1)
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass_at_k: k is {k}; expected 1..{num_samples}, the number of samples")
    # By binomials, not by (1 - c/n)^k, which is biased.
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def _is_correct(path: Trajectory) -> bool:
    return bool(path.leaf.is_correct)


def accuracy_metrics(trees: Sequence[Tree], name: str) -> dict[str, float]:
    """Returns the share of correct trajectories over all, and by category, those of one key
    together; a failed trajectory counts as wrong.

    Args:
        name: "accuracy" (greedy) or "accuracy_sampled".
    """
    paths = _paths(trees)
    groups: dict[str, list[bool]] = {}
    for path in paths:
        category = path.task.category.replace(" ", "_")
        # "accuracy_sampled" is the share of another pass.
        category = f"_{category}" if category.startswith("sampled") else category
        groups.setdefault(category, []).append(_is_correct(path))
    shares = {f"eval/{name}_{one}": _mean(own) for one, own in sorted(groups.items()) if one}
    return {f"eval/{name}": _mean(map(_is_correct, paths))} | shares


def eval_metrics(greedy: Sequence[Tree] | None, sampled: Sequence[Tree] | None) -> dict[str, float]:
    """Returns the eval/* metrics of an evaluation; None leaves a kind out."""
    metrics: dict[str, float] = {}
    if greedy is not None:
        metrics |= accuracy_metrics(greedy, "accuracy")
    if sampled is not None:
        metrics |= accuracy_metrics(sampled, "accuracy_sampled")
        counts = [(len(one.leaves), sum(map(_is_correct, one.trajectories()))) for one in sampled]
        # Powers of two, as in the field's plots; k = 1 is the accuracy.
        k = 2
        while k <= min(counts, default=(0, 0))[0]:
            metrics[f"eval/pass_at_{k}"] = _mean(pass_at_k(num, c, k) for num, c in counts)
            k *= 2
    paths = _paths([*(greedy or ()), *(sampled or ())])
    metrics["eval/failed_frac"] = _ended_frac(paths, Status.FAILED)
    metrics["eval/tool_calls_mean"] = _mean(path.num_tool_calls for path in paths)
    rewards: list[float] = []
    for path in paths:
        # None without an environment, or if it failed.
        if (reward := path.leaf.environment_reward) is not None:
            rewards.append(reward)
    if rewards:
        metrics["eval/environment_reward"] = _mean(rewards)
    return metrics
