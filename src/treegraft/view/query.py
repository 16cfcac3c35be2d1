"""Lists and searches of trees, newest first, in parts, so that no answer takes long."""

from __future__ import annotations

import json
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
"""Trees after which an answer ends with the file; its cursor asks for the next."""
BUDGET_S = 1.0
"""Seconds after which an answer ends with the file."""


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
        # One leaf has to meet all of them: two leaves that meet one each are no match.
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


def _candidates(run: RunReader, wanted: Filter, file: TreePart) -> Iterator[dict[str, Any]]:
    """Yields the summary of each tree of a file that has the text."""
    # Without a text the summaries decide, which stay in memory.
    if not wanted.text:
        yield from run.groups_of(file)
        return
    text = wanted.text.lower()
    escaped = json.dumps(text)[1:-1].encode()
    for number, line in file.lines():
        # Bytes tell without parsing that a line does not have the text. Letters beyond ASCII change
        # their case in ways that bytes do not follow; for those each line is parsed.
        if text.isascii() and escaped not in line.lower():
            continue
        tree = parse_tree(line, f"'{file.name}', line {number + 1}")
        snippet = _snippet(tree, text)
        if snippet is not None:
            yield summarise(tree) | {"file": file.name, "n": number, "snippet": snippet}


def find(
    run: RunReader, wanted: Filter, *, file: str = "", cursor: str = "", kinds: str = "update"
) -> dict[str, Any]:
    """Returns the trees that match, and the cursor of the next part.

    Args:
        file: the only file to search, in its order; empty for all, newest first.
        cursor: of an earlier answer: the file to go on with.
        kinds: "update", "eval" or "all" files.

    Returns:
        groups: summaries with `matches`, the leaves that match.
        damaged: a sentence for each file that was left out because a line is damaged.
        cursor: None at the end.
        num_seen, num_files: files searched so far, and all of them.
    """
    files = []
    for one in reversed(run.files()):
        is_wanted = kinds in ("all", "update" if one.kind == "update" else "eval")
        if one.name == file or (not file and is_wanted):
            files.append(one)
    names = [one.name for one in files]
    # The search begins again if a resume has cut away the cursor's file.
    index = names.index(cursor) if cursor in names else 0
    began = time.monotonic()
    groups: list[dict[str, Any]] = []
    damaged: list[str] = []
    while index < len(files):
        # Between files alone, so that a cursor is the name of one.
        if len(groups) >= MAX_FOUND or time.monotonic() - began > BUDGET_S:
            break
        try:
            for group in _candidates(run, wanted, files[index]):
                if matches := wanted.of_group(group):
                    groups.append(group | {"matches": matches})
        except DataError as error:
            # One damaged file must not hide the others.
            if file:
                raise
            damaged.append(str(error))
        index += 1
    return {
        "groups": groups,
        "damaged": damaged,
        "cursor": names[index] if index < len(files) else None,
        "num_seen": index,
        "num_files": len(files),
    }
