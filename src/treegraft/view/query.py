"""Lists and searches of trees, newest first, in parts, so that no answer takes long."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treegraft.core.errors import DataError
from treegraft.core.types import Tree
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
    """A text, in upper or lower case, of a question, thought, call, result, answer or error."""
    status: str = ""
    """How a leaf ended."""
    has_error: bool | None = None
    """A tool call of the agent failed."""
    has_graft: bool | None = None
    has_branch: bool | None = None
    is_mixed: bool | None = None
    """The rewards of the leaves differ, so the tree gives a gradient."""

    def of_leaf(self, leaf: dict[str, Any]) -> bool:
        """Returns whether a leaf meets the conditions on leaves."""
        if self.status and leaf["status"] != self.status:
            return False
        wanted = {
            "num_errors": self.has_error,
            "num_grafts": self.has_graft,
            "num_branches": self.has_branch,
        }
        return all(flag is None or bool(leaf[name]) is flag for name, flag in wanted.items())

    def of_group(self, group: dict[str, Any]) -> list[int]:
        """Returns the leaves that match, none if the group does not."""
        is_mixed = group["reward_min"] != group["reward_max"]
        if self.is_mixed is not None and is_mixed is not self.is_mixed:
            return []
        return [n for n, leaf in enumerate(group["leaves"]) if self.of_leaf(leaf)]


def _snippet(tree: Tree, text: str) -> str | None:
    """Returns a lower-case text with its surroundings at its first occurrence; None without
    one."""
    for one in texts(tree):
        place = one.lower().find(text)
        if place >= 0:
            first = max(0, place - 60)
            return ("…" if first else "") + one[first : place + len(text) + 60]
    return None


def _candidates(
    run: RunReader, wanted: Filter, file: TreePart, first: int
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields the number of each tree of a file with its summary, None if its text does not
    match."""
    # Without a text the summaries decide, which stay in memory.
    if not wanted.text:
        for group in run.groups_of(file)[first:]:
            yield int(group["n"]), group
        return
    text = wanted.text.lower()
    escaped = json.dumps(text)[1:-1].encode()
    for number, line in file.lines(first):
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
        file: the only file to search, in its order; empty for all, newest first.
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
    # The search begins again if a resume has cut away the cursor's file.
    place = names.index(name) if name in names else 0
    first = int(number) if name in names and re.fullmatch("[0-9]{1,12}", number) else 0
    began = time.monotonic()
    groups: list[dict[str, Any]] = []
    damaged: list[str] = []
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
