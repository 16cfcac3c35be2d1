"""Trees and warnings of a run as the JSON that the pages show: a row of a list, a drawing, the
tokens of a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from treegraft.core.columns import FILLERS, Origin
from treegraft.core.types import BranchCause, GraftCause, Leaf, Step, StoredCause, Trajectory, Tree
from treegraft.runs.health import HealthWarning
from treegraft.runs.tree_json import step_to_dict

_STEP_FIELDS = (
    "id",
    "parent",
    "depth",
    "content",
    "cause",
    "decision",
    "violation",
    "policy_version",
)


def _is_graft(step: Step) -> bool:
    return isinstance(step.cause, GraftCause)


def _num_errors(steps: Sequence[Step]) -> int:
    # Failed calls of the policy only; those of a graft or a stored step are another agent's.
    own = [step for step in steps if not isinstance(step.cause, GraftCause | StoredCause)]
    return sum(seen.is_error for step in own for seen in step.content.observations)


def _num_branches(steps: Sequence[Step]) -> int:
    return sum(isinstance(step.cause, BranchCause) for step in steps)


def _num_tokens(steps: Sequence[Step]) -> int:
    return sum(step.num_tokens for step in steps)


def best_leaf(paths: Sequence[Trajectory]) -> int | None:
    """Returns the number of the path with the highest reward; None without rewards. Ties go to a
    correct path, then to the highest advantage, then to the fewest tokens, then to the first
    path."""

    def rank(number: int) -> tuple[float, bool, float, int]:
        path = paths[number]
        num_tokens = _num_tokens(path.steps)
        return path.reward or 0.0, bool(path.leaf.is_correct), path.advantage or 0.0, -num_tokens

    scored = [number for number, path in enumerate(paths) if path.reward is not None]
    # Of equal ones `max` returns the first.
    return max(scored, key=rank, default=None)


def _leaf_row(path: Trajectory) -> dict[str, Any]:
    leaf = path.leaf
    return {
        "step_id": leaf.step_id,
        "status": leaf.status,
        "reward": leaf.reward,
        "advantage": leaf.advantage,
        "is_correct": leaf.is_correct,
        "answer": leaf.answer,
        "num_tokens": _num_tokens(path.steps),
        "num_steps": len(path.steps) - 1,
        "num_calls": path.num_tool_calls,
        "num_errors": _num_errors(path.steps),
        "num_grafts": sum(map(_is_graft, path.steps)),
        "num_branches": _num_branches(path.steps),
    }


def summarise(tree: Tree) -> dict[str, Any]:
    """Returns a tree as a row of a list, with a short row per leaf."""
    paths = tree.trajectories()
    leaves = [_leaf_row(path) for path in paths]
    rewards = [leaf.reward for leaf in tree.leaves if leaf.reward is not None]
    return {
        "question": tree.task.question,
        "category": tree.task.category,
        "num_leaves": len(leaves),
        "num_steps": len(tree.steps) - 1,
        "num_tokens": _num_tokens(tree.steps),
        "longest": max((leaf["num_tokens"] for leaf in leaves), default=0),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "num_correct": sum(bool(leaf.is_correct) for leaf in tree.leaves),
        "num_grafts": sum(map(_is_graft, tree.steps)),
        "num_branches": _num_branches(tree.steps),
        "num_errors": _num_errors(tree.steps),
        "statuses": dict(Counter(str(leaf.status) for leaf in tree.leaves)),
        "leaves": leaves,
    }


# ---------------------------------------------------------------------- the drawing


def _advantage_below(leaves: Sequence[Leaf], step_id: str) -> float | None:
    """The advantage of a shared step in all: the weighted mean over the leaves below it."""
    total = 0.0
    weighted = 0.0
    for leaf in leaves:
        if f"{leaf.step_id}.".startswith(f"{step_id}.") and leaf.advantage is not None:
            total += leaf.weight
            weighted += leaf.weight * leaf.advantage
    return weighted / total if total else None


def _drawn_step(step: Step, leaves: Sequence[Leaf]) -> dict[str, Any]:
    data = step_to_dict(step)
    entropies = data["entropies"]
    ratios = data["ratios"]
    num_loss = step.num_loss_tokens
    is_hard = step.advantage is not None
    # Numbers in place of tokens: a large tree would be a page of many megabytes.
    return {name: data[name] for name in _STEP_FIELDS} | {
        "num_tokens": step.num_tokens,
        "num_lesson": len(step.lesson_ids),
        "num_loss": num_loss,
        "origins": dict(Counter(Origin(one).name.lower() for one in step.origins.tolist())),
        "origin": step.origin.name.lower(),
        "entropy_mean": fmean(entropies) if entropies else None,
        "entropy_max": max(entropies, default=None),
        "ratio_mean": fmean(ratios) if ratios else None,
        "ratio_max": max(ratios or (), default=None),
        "ratio_min": min(ratios or (), default=None),
        "is_learned": ratios is not None and num_loss > 0,
        "advantage": step.advantage if is_hard else _advantage_below(leaves, step.id),
        "is_hard": is_hard,
    }


def spell_unread(
    drawn: Mapping[str, Any], tree: Tree, decode: Callable[[Sequence[int]], str]
) -> None:
    """Adds `wrote`, the text to the letter, to those steps of a drawn tree that the format could
    not read."""
    for row, step in zip(drawn["steps"], tree.steps, strict=True):
        one = step.content
        is_empty = not (one.thought or one.calls or one.observations or one.answer)
        if step.violation is not None or is_empty:
            row["wrote"] = decode(step.token_ids.tolist())


def content_numbers(tree: Tree) -> dict[str, int]:
    """Returns for each step a number that it shares with the steps of the same tokens by the same
    authors."""
    numbers: dict[tuple[bytes, bytes], int] = {}
    found = {}
    for step in tree.steps:
        key = (step.token_ids.tobytes(), step.origins.tobytes())
        found[step.id] = numbers.setdefault(key, len(numbers))
    return found


def draw(tree: Tree) -> dict[str, Any]:
    """Returns a tree as it is drawn: steps without their tokens, and leaves with their rewards
    and the effects of their grafts.

    Steps with one `content_number` have equal tokens. A leaf's `effects` are, by the id of each
    graft on its path, the mean entropies (nats) of the policy's last step before the graft and its
    first after it (RAPO's H- and H+).
    """
    paths = tree.trajectories()
    # Step id -> mean entropy in nats, of the steps with sampled tokens.
    entropy = {step.id: fmean(values) for step in tree.steps if (values := step.sampled_entropies)}
    numbers = content_numbers(tree)
    steps = []
    for step in tree.steps:
        row = _drawn_step(step, tree.leaves)
        row["content_number"] = numbers[step.id]
        steps.append(row)
    leaves = []
    for path in paths:
        effects = {}
        for place, step in enumerate(path.steps):
            if _is_graft(step) and (around := _around(path, place, entropy)):
                effects[step.id] = around
        leaves.append(asdict(path.leaf) | _leaf_row(path) | {"effects": effects})
    return {
        "task": asdict(tree.task),
        "steps": steps,
        "leaves": leaves,
        "best": best_leaf(paths),
    }


# ---------------------------------------------------------------------- what a graft changed


def _around(path: Trajectory, place: int, entropy: Mapping[str, float]) -> list[float]:
    """The mean entropies of the policy's last step before a place of a path and of its first after
    it; empty without both."""
    before = [entropy[step.id] for step in path.steps[:place] if step.id in entropy]
    after = [entropy[step.id] for step in path.steps[place + 1 :] if step.id in entropy]
    return [before[-1], after[0]] if before and after else []


# ---------------------------------------------------------------------- one path


def path_tokens(path: Trajectory) -> list[dict[str, Any]]:
    """Returns the steps of a path with their tokens' columns; scores are of sampled tokens only,
    None if not recorded."""
    found = []
    for step in path.steps:
        data = step_to_dict(step)
        names = ("id", "token_ids", "origins", "loss_mask", *FILLERS)
        row = {name: data.get(name) for name in names}
        row["advantage"] = path.advantage if step.advantage is None else step.advantage
        # A shared step may carry loss for other leaves, but not on this path.
        if not path.leaf.has_loss:
            row["loss_mask"] = [[0, step.num_tokens]]
        found.append(row)
    return found


# ---------------------------------------------------------------------- warnings


def page_warnings(found: Sequence[HealthWarning]) -> list[dict[str, str]]:
    """Returns the warnings of a line of metrics: name, rule and text."""
    return [{"name": one.name, "rule": one.rule.name, "text": one.text} for one in found]


def explanations(found: Sequence[HealthWarning]) -> dict[str, dict[str, Any]]:
    """Returns the rules that occur: name -> meaning, causes and advice."""
    rules: dict[str, dict[str, Any]] = {}
    for one in found:
        rule = one.rule
        rules[rule.name] = {
            "meaning": rule.meaning,
            "causes": list(rule.causes),
            "advice": rule.advice,
        }
    return rules
