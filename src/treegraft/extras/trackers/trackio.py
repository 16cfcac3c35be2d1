"""trackio: a run with settings, metrics, warnings as alerts, and trajectories as traces."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio

from treegraft import Origin, Step, Trajectory, Tree
from treegraft.parts import Tracked

TRACES_PER_UPDATE = 4


class TrackioTracker:
    """Logs to the project `track.project` (else TRACKIO_PROJECT, else "treegraft"), kept locally
    unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names a place."""

    def __init__(self, run_dir: Path) -> None:
        tracked = Tracked.of(run_dir)
        settings = tracked.settings()
        project = settings["track"]["project"] or os.environ.get("TRACKIO_PROJECT", "treegraft")
        with _silent():
            self._run = trackio.init(
                project,
                run_dir.name,
                config=settings,
                # By name there, so a run of another folder that has the same one is not joined.
                resume="allow" if "trackio" in tracked.updates else "never",
                embed=False,
            )
        self.place = f"project {project}; look with: trackio show --project {project}"

    def sample(self, update: int, trees: Sequence[Tree]) -> None:
        """Logs a trajectory of each of the first trees, the one with the highest reward."""
        for number, tree in enumerate(trees[:TRACES_PER_UPDATE], start=1):
            paths = [path for path in tree.trajectories() if path.reward is not None]
            if paths:
                best = max(paths, key=lambda path: path.reward or 0.0)
                self._run.log({f"trajectory/{number}": trace_of(best)}, step=update)

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Logs one update's metrics at that step."""
        self._run.log(dict(metrics), step=update)

    def warn(self, update: int, name: str, text: str) -> None:
        """Raises an alert."""
        with _silent():
            self._run.alert(f"{name} at update {update}", text)

    def finish(self, latest: Mapping[str, float]) -> None:
        """Logs the latest value of every metric as one record at the last update."""
        summary = {f"summary/{key}": value for key, value in latest.items()}
        self._run.log(summary, step=int(latest.get("policy_version", 0)))

    def close(self) -> None:
        """Writes what is waiting and ends the run."""
        with _silent():
            self._run.finish()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps what trackio prints out of the display."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def trace_of(path: Trajectory) -> trackio.Trace:
    """Returns a trajectory as messages, with its outcome as metadata. Grafted steps are messages
    of an assistant that is named after their source."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": path.task.question}]
    for step in path.steps[1:]:
        messages += _messages(step)
    leaf = path.leaf
    outcome = {
        "task": path.task.id,
        "outcome": str(leaf.status),
        "reward": leaf.reward,
        "is_correct": leaf.is_correct,
        "advantage": leaf.advantage,
        "reference": list(path.task.reference),
        **{f"reward/{name}": value for name, value in leaf.reward_parts.items()},
    }
    return trackio.Trace(messages, metadata={k: v for k, v in outcome.items() if v is not None})


def _messages(step: Step) -> list[dict[str, Any]]:
    content = step.content
    said = [content.thought, content.answer or "", f"({step.violation})" if step.violation else ""]
    spoken: dict[str, Any] = {
        "role": "assistant",
        "content": "\n".join(text for text in said if text),
    }
    if step.origin is Origin.RETRIEVED:
        spoken["name"] = getattr(step.cause, "source", "") or "graft"
    ids = [f"{step.id}-{number}" for number in range(len(content.calls))]
    if content.calls:
        spoken["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.body}}
            for id_, call in zip(ids, content.calls, strict=True)
        ]
    results = [
        {"role": "tool", "tool_call_id": id_, "name": call.name, "content": result.text}
        for id_, call, result in zip(ids, content.calls, content.observations, strict=False)
    ]
    return [spoken, *results]
