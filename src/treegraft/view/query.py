"""Lists and searches of trees, newest first, in parts, so that no answer takes long."""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treegraft.core.errors import DataError
from treegraft.core.types import GraftCause, Tree
from treegraft.runs.tree_files import TreePart
from treegraft.runs.tree_json import parse_tree
from treegraft.view.pages import summarise, texts
from treegraft.view.runs import RunReader

MAX_FOUND = 100
"""Trees of one answer; its cursor asks for the next."""
BUDGET_S = 1.0
"""Seconds after which an answer is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Conditions on trees; one leaf must meet all conditions on leaves. None and "" set none."""

    text: str = ""
    """Occurs, in upper or lower case, in a question, thought, call, result, answer or error."""
    status: str = ""
    """How a leaf ended."""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    """Length of a leaf's path in tokens."""
    max_tokens: int | None = None
    has_error: bool | None = None
    """A tool call of the agent failed."""
    has_graft: bool | None = None
    has_branch: bool | None = None
    is_mixed: bool | None = None
    """The rewards of the leaves differ, so the tree gives a gradient."""

    def of_leaf(self, leaf: dict[str, Any]) -> bool:
        """Returns whether a leaf meets the conditions on leaves."""
        reward, tokens = leaf["reward"], leaf["num_tokens"]
        limits = ((self.min_reward, reward, operator.le), (self.max_reward, reward, operator.ge))
        lengths = ((self.min_tokens, tokens, operator.le), (self.max_tokens, tokens, operator.ge))
        wanted = (
            (self.has_error, leaf["num_errors"]),
            (self.has_graft, leaf["num_grafts"]),
            (self.has_branch, leaf["num_branches"]),
        )
        return (
            (not self.status or leaf["status"] == self.status)
            and all(
                limit is None or (value is not None and holds(limit, value))
                for limit, value, holds in (*limits, *lengths)
            )
            and all(flag is None or bool(count) is flag for flag, count in wanted)
        )

    def of_group(self, group: dict[str, Any]) -> list[int]:
        """Returns the leaves that match, none where the group does not."""
        is_mixed = group["reward_min"] != group["reward_max"]
        if self.is_mixed is not None and is_mixed is not self.is_mixed:
            return []
        return [n for n, leaf in enumerate(group["leaves"]) if self.of_leaf(leaf)]


def _snippet(tree: Tree, text: str) -> str | None:
    """Returns a lower-case text with its surroundings where it occurs first; None where it does
    not."""
    for one in texts(tree):
        place = one.lower().find(text)
        if place >= 0:
            first = max(0, place - 60)
            return ("…" if first else "") + one[first : place + len(text) + 60]
    return None


def _candidates(
    run: RunReader, wanted: Filter, file: TreePart, first: int
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields the number of each tree of a file with its summary, None where it does not match."""
    # Without a text the summaries decide, which stay in memory.
    if not wanted.text:
        for group in run.groups(file.name)[first:]:
            yield int(group["n"]), group
        return
    text = wanted.text.lower()
    escaped = json.dumps(text)[1:-1].encode()
    for number, line in run.raw_lines(file.name, first):
        found = None
        # Bytes tell without parsing that a line does not have the text. Letters beyond ASCII change
        # their case in ways that bytes do not follow; for those each line is parsed.
        if not text.isascii() or escaped in line.lower():
            tree = parse_tree(line, f"'{file.name}', line {number + 1}")
            snippet = _snippet(tree, text)
            if snippet is not None:
                found = summarise(tree) | {"file": file.name, "n": number, "snippet": snippet}
        yield number, found


def find(
    run: RunReader, wanted: Filter, *, file: str = "", cursor: str = "", kinds: str = "update"
) -> dict[str, Any]:
    """Returns the trees that match, and the cursor of the next part.

    Args:
        file: searches this file alone, in its order; empty for all, newest first.
        cursor: "FILE:NUMBER" of an earlier answer.
        kinds: "update", "eval" or "all" files.

    Returns:
        groups: summaries with `matches`, the leaves that match.
        damaged: a sentence for each file that was left out because a line is damaged.
        cursor: None at the end.
        num_seen, num_files: files searched so far, and all of them.
    """
    if file:
        files = [one for one in run.files() if one.name == file]
    else:
        files = [
            one
            for one in reversed(run.files())
            if kinds in ("all", "update" if one.kind == "update" else "eval")
        ]
    name, _, number = cursor.partition(":")
    names = [one.name for one in files]
    # A cursor whose file a resume has cut away begins anew.
    place = names.index(name) if name in names else 0
    first = int(number) if name in names and re.fullmatch("[0-9]{1,12}", number) else 0
    began, groups, damaged = time.monotonic(), list[dict[str, Any]](), list[str]()
    found = {"groups": groups, "damaged": damaged, "num_files": len(files)}
    for index in range(place, len(files)):
        try:
            for n, group in _candidates(run, wanted, files[index], first):
                if group is not None and (matches := wanted.of_group(group)):
                    groups.append(group | {"matches": matches})
                # One file is always answered whole: its list can be sorted by the page.
                if not file and (len(groups) >= MAX_FOUND or time.monotonic() - began > BUDGET_S):
                    cursor = f"{files[index].name}:{n + 1}"
                    return {**found, "cursor": cursor, "num_seen": index}
        except DataError as error:
            # One damaged file must not hide the others.
            if file:
                raise
            damaged.append(str(error))
        first = 0
    return {**found, "cursor": None, "num_seen": len(files)}


def task_history(run: RunReader, task_id: str) -> list[dict[str, Any]]:
    """Returns the summaries of all trees of a task, in order of updates."""
    return [
        summarise(run.tree(file.name, n)) | {"file": file.name, "n": n}
        for file, n in run.with_task(task_id)
    ]


def grafts_of(run: RunReader, content_hash: str, *, cursor: str = "") -> dict[str, Any]:
    """Returns the grafts of a trace of the buffer: file, tree, step and the leaves below, newest
    first, in parts."""
    needle = json.dumps(content_hash).encode()
    names = [one.name for one in reversed(run.files())]
    place = names.index(cursor) if cursor in names else 0
    began, found = time.monotonic(), list[dict[str, Any]]()
    for number_of_file, name in enumerate(names[place:]):
        # One file at least, so that every answer comes further than the last.
        if number_of_file and (time.monotonic() - began > BUDGET_S or len(found) >= MAX_FOUND):
            return {"grafts": found, "cursor": name}
        for number, line in run.raw_lines(name):
            if needle in line:  # parsing costs a hundred times as much
                tree = parse_tree(line, f"'{name}', line {number + 1}")
                found += places_of(tree, content_hash, name, number)
    return {"grafts": found, "cursor": None}


def places_of(tree: Tree, content_hash: str, file: str, number: int) -> Iterator[dict[str, Any]]:
    """Yields where a trace was grafted into a tree: the step, and the leaves below with their
    rewards."""
    for step in tree.steps:
        if not isinstance(step.cause, GraftCause) or step.cause.content_hash != content_hash:
            continue
        below = [
            (n, leaf.reward)
            for n, leaf in enumerate(tree.leaves)
            if f"{leaf.step_id}.".startswith(f"{step.id}.")
        ]
        yield {
            "file": file,
            "n": number,
            "step": step.id,
            "question": tree.task.question,
            "similarity": step.cause.similarity,
            "leaves": [n for n, _ in below],
            "rewards": [reward for _, reward in below],
        }
