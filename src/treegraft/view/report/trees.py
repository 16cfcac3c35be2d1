"""What a report takes from recorded trees, one line of a file in memory at a time: trajectories
with and without grafts.

Long runs are looked at in `MOST_FILES` updates spread evenly, so that neither time nor memory grows
with the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.core.types import Origin
from treegraft.view.runs import Run

MOST_FILES = 24
"""Updates of a run whose trees are read."""
_POLICY = int(Origin.POLICY)


@dataclass(frozen=True, slots=True)
class Seen:
    """One trajectory of training: Seen(update=3, group="3/t/1", is_hybrid=True, num_sampled=40,
    num_calls=2, reward=1.0, ...)"""

    update: int
    group: str
    """The tree that it is of."""
    is_hybrid: bool
    """It holds a retrieved step."""
    num_sampled: int
    """Tokens of its path that the policy sampled."""
    num_retrieved: int
    """Tokens of its path that were retrieved."""
    num_calls: int
    """Tool calls that were run for it."""
    reward: float | None
    """None: lost to a failure of ours."""
    whole: str
    """Thoughts, calls, results and answer of all steps on one line, the question left out."""
    own: str
    """The same of the policy's own steps."""


def spread(total: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers 0 .. total - 1, evenly spread, first and last
    included."""
    if total <= most:
        return list(range(total))
    return (
        sorted({round(n * (total - 1) / (most - 1)) for n in range(most)})
        if most > 1
        else [total - 1]
    )


def read_trajectories(run: Run, notes: list[str]) -> Iterator[Seen]:
    """Gives the trajectories of the updates looked at, in order; what cannot be read is said in
    `notes`, once a file."""
    files = [file for file in run.files() if file.kind == "update"]
    for place in spread(len(files), MOST_FILES):
        damaged = 0
        try:
            for _, line in run.raw_lines(files[place].name):
                try:
                    yield from _trajectories(json.loads(line), files[place].update)
                except (ValueError, KeyError, TypeError, IndexError):
                    damaged += 1
        except (OSError, ValueError) as error:  # a resume has just cut it away
            notes.append(f"{run.name}: {files[place].name} cannot be read ({error})")
        if damaged:
            notes.append(
                f"{run.name}: {files[place].name} has {damaged} lines that are no tree; they were"
                " left out"
            )


def _trajectories(tree: Mapping[str, Any], update: int) -> list[Seen]:
    steps = {step["id"]: step for step in tree["steps"]}
    return [
        _seen(tree["group_id"], leaf, _path(steps, leaf["step_id"]), update)
        for leaf in tree["leaves"]
    ]


def _path(steps: Mapping[str, Mapping[str, Any]], step_id: str) -> list[Mapping[str, Any]]:
    """The steps of a leaf's path, the root (the prompt) left out."""
    parts = step_id.split(".")
    return [steps[".".join(parts[: end + 1])] for end in range(1, len(parts))]


def _is_graft(step: Mapping[str, Any]) -> bool:
    return step["cause"] is not None and step["cause"]["kind"] == "graft"


def _seen(
    group: str, leaf: Mapping[str, Any], path: Sequence[Mapping[str, Any]], update: int
) -> Seen:
    own = [step for step in path if not _is_graft(step)]
    return Seen(
        update=update,
        group=group,
        is_hybrid=len(own) < len(path),
        num_sampled=sum(
            count for step in own for origin, count in step["origins"] if origin == _POLICY
        ),
        num_retrieved=sum(len(step["token_ids"]) for step in path if _is_graft(step)),
        num_calls=sum(len(step["content"]["observations"]) for step in own),
        reward=leaf["reward"],
        whole=_text(path),
        own=_text(own),
    )


def _text(path: Sequence[Mapping[str, Any]]) -> str:
    words: list[str] = []
    for step in path:
        content = step["content"]
        words.append(content["thought"])
        words += [f"{call['name']} {call['body']}" for call in content["calls"]]
        words += [seen["text"] for seen in content["observations"]]
        words.append(content["answer"] or "")
    return " ".join(" ".join(words).split())
