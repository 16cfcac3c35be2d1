"""Recorded trees in the shapes that the pages show: a line of a list, a drawing, the tokens of a
path.

All work on the parsed lines of trees/*.jsonl, not on `types.Tree`: a list of 32 trees must not cost
a check of every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from treegraft.core.types import Origin

_POLICY = int(Origin.POLICY)
_RETRIEVED = int(Origin.RETRIEVED)
NAMES = tuple(origin.name.lower() for origin in Origin)
SCORES = ("entropies", "sampling_logprobs", "old_logprobs", "ratios")
"""Columns that are recorded for sampled tokens only."""


def ids_above(step_id: str) -> list[str]:
    """Returns the ids on the path to a step, the root first, itself last."""
    parts = step_id.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _paths(tree: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The steps of each leaf's path."""
    steps = {step["id"]: step for step in tree["steps"]}
    return [[steps[step_id] for step_id in ids_above(leaf["step_id"])] for leaf in tree["leaves"]]


def _kind(step: dict[str, Any]) -> str:
    return "" if step["cause"] is None else str(step["cause"]["kind"])


def _num_errors(step: dict[str, Any]) -> int:
    return sum(bool(seen["is_error"]) for seen in step["content"]["observations"])


def _leaf_summary(leaf: dict[str, Any], path: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kinds = [_kind(step) for step in path]
    return {
        "step_id": leaf["step_id"],
        "status": leaf["status"],
        "reward": leaf["reward"],
        "advantage": leaf["advantage"],
        "is_correct": leaf["is_correct"],
        "answer": leaf["answer"],
        "num_tokens": sum(len(step["token_ids"]) for step in path),
        "num_steps": len(path) - 1,
        "num_calls": sum(
            len(step["content"]["observations"]) for step in path if _kind(step) != "graft"
        ),
        "num_errors": sum(_num_errors(step) for step in path if _kind(step) != "graft"),
        "num_grafts": kinds.count("graft"),
        "num_branches": kinds.count("branch"),
    }


def best_leaf(leaves: Sequence[dict[str, Any]]) -> int | None:
    """Returns the leaf with the highest reward, of equals the correct one, then that with fewest
    tokens, then the first."""
    scored = [n for n, leaf in enumerate(leaves) if leaf["reward"] is not None]
    if not scored:
        return None

    def order(n: int) -> tuple[float, bool, int, int]:
        return -leaves[n]["reward"], not leaves[n]["is_correct"], leaves[n].get("num_tokens", 0), n

    return min(scored, key=order)


def summarise(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree as a line of a list, with a short line per leaf."""
    leaves = [
        _leaf_summary(leaf, path) for leaf, path in zip(tree["leaves"], _paths(tree), strict=True)
    ]
    rewards = [leaf["reward"] for leaf in leaves if leaf["reward"] is not None]
    statuses: dict[str, int] = {}
    for leaf in leaves:
        statuses[leaf["status"]] = statuses.get(leaf["status"], 0) + 1
    steps = tree["steps"]
    return {
        "group_id": tree["group_id"],
        "task_id": tree["task"]["id"],
        "question": tree["task"]["question"],
        "category": tree["task"]["category"],
        "num_leaves": len(leaves),
        "num_steps": len(steps) - 1,
        "num_tokens": sum(len(step["token_ids"]) for step in steps),
        "longest": max((leaf["num_tokens"] for leaf in leaves), default=0),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "num_correct": sum(bool(leaf["is_correct"]) for leaf in leaves),
        "num_grafts": sum(_kind(step) == "graft" for step in steps),
        "num_branches": sum(_kind(step) == "branch" for step in steps),
        "num_errors": sum(_num_errors(step) for step in steps if _kind(step) != "graft"),
        "statuses": statuses,
        "best": best_leaf(leaves),
        "leaves": leaves,
    }


def _origin_counts(step: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for origin, count in step["origins"]:
        counts[NAMES[origin]] = counts.get(NAMES[origin], 0) + count
    return counts


def _mean(values: Sequence[float] | None) -> float | None:
    return fmean(values) if values else None


def _advantage_below(leaves: Sequence[dict[str, Any]], step_id: str) -> float | None:
    """What a shared step gets in all: the weighted mean of the advantages of the leaves below
    it."""
    prefix = f"{step_id}."
    below = [
        leaf
        for leaf in leaves
        if f"{leaf['step_id']}.".startswith(prefix) and leaf["advantage"] is not None
    ]
    weight = sum(leaf["weight"] for leaf in below)
    return sum(leaf["weight"] * leaf["advantage"] for leaf in below) / weight if weight else None


def _drawn_step(step: dict[str, Any], leaves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    entropies, ratios = step["entropies"], step["ratios"]
    num_loss = sum(count for carries, count in step["loss_mask"] if carries)
    is_hard = step["advantage"] is not None
    kept = (
        "id",
        "parent",
        "depth",
        "content",
        "cause",
        "stop_reason",
        "violation",
        "policy_version",
        "temperature",
        "entropy_kind",
    )
    return {name: step[name] for name in kept} | {
        "decision": step.get("decision"),
        "num_tokens": len(step["token_ids"]),
        "num_lesson": len(step.get("lesson_ids") or ()),
        "num_loss": num_loss,
        "origins": _origin_counts(step),
        "origin": NAMES[step["origins"][0][0]] if step["origins"] else "forced",
        "entropy_mean": _mean(entropies),
        "entropy_max": max(entropies, default=None),
        "ratio_mean": _mean(ratios),
        "ratio_max": max(ratios) if ratios else None,
        "ratio_min": min(ratios) if ratios else None,
        "is_learned": ratios is not None and num_loss > 0,
        "advantage": step["advantage"] if is_hard else _advantage_below(leaves, step["id"]),
        "is_hard": is_hard,
    }


def _graft_effects(path: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """For each graft of a path the mean entropies of the policy's last step before it and first
    after it (RAPO's H- and H+)."""
    for place, step in enumerate(path):
        if _kind(step) != "graft":
            continue
        before = next((s for s in reversed(path[:place]) if s["entropies"]), None)
        after = next((s for s in path[place + 1 :] if s["entropies"]), None)
        if before is not None and after is not None:
            yield step["id"], fmean(before["entropies"]), fmean(after["entropies"])


def _said(step: dict[str, Any]) -> tuple[object, ...]:
    """What a step did, for comparisons: its calls and its answer."""
    content = step["content"]
    return tuple((call["name"], call["body"].strip()) for call in content["calls"]), content[
        "answer"
    ]


def _history(path: Sequence[dict[str, Any]]) -> list[object]:
    """What was done and seen on a path after its prompt."""
    return [
        (_said(step), tuple(seen["text"] for seen in step["content"]["observations"]))
        for step in path[1:]
    ]


def _drift(
    ungrafted: Sequence[Sequence[dict[str, Any]]], before: int, after: int
) -> dict[str, Any]:
    """How the policy's mean entropy went between two depths on the paths without a graft, each
    later step counted once."""
    pairs = {
        path[after]["id"]: (path[before], path[after]) for path in ungrafted if len(path) > after
    }
    seen = [
        (a["entropies"], b["entropies"])
        for a, b in pairs.values()
        if a["entropies"] and b["entropies"]
    ]
    return {
        "num": len(seen),
        "before": fmean(fmean(a) for a, _ in seen) if seen else None,
        "after": fmean(fmean(b) for _, b in seen) if seen else None,
    }


def graft_peers(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns for each graft what stands beside it in its group: a graft alone does not show what
    it changed.

    By the graft's id:
        num: steps that the policy wrote at its depth after the same calls and results. num_same:
        those of them that did what the graft did. rewards: of the leaves below those, without a
        graft on their path. drift: mean entropies (nats) at the depths of the policy's steps before
        and after the graft, on paths without a graft
            that come so far, and how many steps that are; None where no step of the policy follows
            the graft.
    """
    paths = _paths(tree)
    histories = [_history(path) for path in paths]
    is_ungrafted = [not any(_kind(step) == "graft" for step in path) for path in paths]
    ungrafted = [path for path, is_without in zip(paths, is_ungrafted, strict=True) if is_without]
    found: dict[str, dict[str, Any]] = {}
    for path, history in zip(paths, histories, strict=True):
        for place, step in enumerate(path):
            if _kind(step) != "graft" or step["id"] in found:
                continue
            # A history has no prompt: what was done before step `place` are its first place - 1
            # entries.
            above = history[: place - 1]
            around = {
                other[place]["id"]: other[place]
                for other, known in zip(paths, histories, strict=True)
                if len(other) > place and other[place]["entropies"] and known[: place - 1] == above
            }
            same = {step_id for step_id, other in around.items() if _said(other) == _said(step)}
            rewards = [
                leaf["reward"]
                for leaf, other, is_without in zip(tree["leaves"], paths, is_ungrafted, strict=True)
                if is_without
                and len(other) > place
                and other[place]["id"] in same
                and leaf["reward"] is not None
            ]
            before = next((n for n in range(place - 1, -1, -1) if path[n]["entropies"]), None)
            after = next((n for n in range(place + 1, len(path)) if path[n]["entropies"]), None)
            drift = None if before is None or after is None else _drift(ungrafted, before, after)
            found[step["id"]] = {
                "num": len(around),
                "num_same": len(same),
                "rewards": rewards,
                "drift": drift,
            }
    return found


def _contrast(leaves: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Mean reward of the leaves with and without something."""
    found: dict[str, Any] = {}
    for key, has in (("with", True), ("without", False)):
        rewards = [
            leaf["reward"]
            for leaf in leaves
            if bool(leaf[name]) is has and leaf["reward"] is not None
        ]
        found[key] = {"num": len(rewards), "reward": fmean(rewards) if rewards else None}
    return found


def draw(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree as it is drawn: steps without their tokens, leaves with what they earned, and
    what stands out."""
    paths = _paths(tree)
    short = [_leaf_summary(leaf, path) for leaf, path in zip(tree["leaves"], paths, strict=True)]
    leaves = [leaf | extra for leaf, extra in zip(tree["leaves"], short, strict=True)]
    for leaf, path in zip(leaves, paths, strict=True):
        leaf["effects"] = {
            step_id: [before, after] for step_id, before, after in _graft_effects(path)
        }
    return {
        "group_id": tree["group_id"],
        "task": tree["task"],
        "budget": tree["budget"],
        "steps": [_drawn_step(step, tree["leaves"]) for step in tree["steps"]],
        "leaves": leaves,
        "best": best_leaf(leaves),
        "peers": graft_peers(tree),
        "grafted": _contrast(leaves, "num_grafts"),
        "branched": _contrast(leaves, "num_branches"),
    }


def path_tokens(tree: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Returns the steps of a leaf's path with their tokens' columns; scores are of sampled tokens
    only, None where not recorded."""
    leaf = tree["leaves"][number]
    steps = {step["id"]: step for step in tree["steps"]}
    found = []
    for step in (steps[step_id] for step_id in ids_above(leaf["step_id"])):
        advantage = step["advantage"] if step["advantage"] is not None else leaf["advantage"]
        found.append(
            {
                "id": step["id"],
                "token_ids": step["token_ids"],
                "origins": step["origins"],
                "loss_mask": step["loss_mask"]
                if leaf["has_loss"]
                else [[0, len(step["token_ids"])]],
                "advantage": advantage,
            }
            | {name: step[name] for name in SCORES}
        )
    return found


def texts(tree: dict[str, Any]) -> Iterator[str]:
    """Returns what a person could search for: question, thoughts, calls, results, answers,
    violations, errors."""
    yield tree["task"]["question"]
    yield tree["task"]["id"]
    for step in tree["steps"]:
        content = step["content"]
        yield content["thought"]
        yield from (call["body"] for call in content["calls"])
        yield from (seen["text"] for seen in content["observations"])
        yield content["answer"] or ""
        yield step["violation"] or ""
    yield from (leaf["error"] or "" for leaf in tree["leaves"])
