"""What a run leaves behind, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, Unpack

from treegraft.core.errors import DataError
from treegraft.core.given import GivenObjects
from treegraft.core.interfaces import Tokenizer
from treegraft.core.shown import above
from treegraft.core.types import Observation, ToolCall, Trajectory, Tree
from treegraft.runs.open import find_checkpoint
from treegraft.runs.record import RunFolder, read_metrics
from treegraft.runs.tree_files import parts_in
from treegraft.settings.objects import Objects

Messages = Iterable[Mapping[str, Any]]
"""Chat messages, {"role": ..., "content": ...}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an agent has answered, and how it came to that."""

    trajectory: Trajectory
    tokenizer: Tokenizer

    @property
    def text(self) -> str | None:
        """The answer; None where the agent came to none, see `trajectory.status`."""
        return self.trajectory.leaf.answer

    @property
    def tool_calls(self) -> list[tuple[ToolCall, Observation]]:
        """The calls that were run, each with its result."""
        contents = self.trajectory.contents
        return [pair for one in contents for pair in zip(one.calls, one.observations, strict=False)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation with this answer at its end, the `history` of a further question; of
        what the agent did only its answers stand in it."""
        said = {"role": "assistant", "content": self.text or ""}
        return [*self.trajectory.task.conversation(), said]

    def __str__(self) -> str:
        return self.text or f"no answer: {self.trajectory.status}"

    def __repr__(self) -> str:
        return f"<Answer {self.text!r:.99}: {len(self.tool_calls)} calls>"

    def _repr_html_(self) -> str:
        return self.trajectory._repr_html_()


class AskedAgent(Protocol):
    """A trained agent: `treegraft.evals.agent.Agent`, loaded at the first question."""

    async def __call__(self, question: str, *, history: Messages = ()) -> Answer: ...
    def ask(self, question: str, *, history: Messages = ()) -> Answer: ...
    def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class ServedViewer(Protocol):
    """The viewer at an address: `treegraft.view.inline.Viewer`."""

    url: str

    def close(self) -> None: ...


def update_latest(latest: Mapping[str, float], line: Mapping[str, float]) -> dict[str, float]:
    """Returns the latest value of every metric after a further line; warnings that do not stand any
    more are left out."""
    kept = {key: value for key, value in latest.items() if not key.startswith("health/")}
    return {**kept, **line}


def latest_of(lines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the latest value of every metric in lines of metrics."""
    latest: dict[str, float] = {}
    for line in lines:
        latest = update_latest(latest, line)
    # The number of a line is no metric.
    latest.pop("update", None)
    return latest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run: its folder and the data in it."""

    run_dir: Path
    checkpoint_dir: Path
    """The final checkpoint, a folder that transformers loads."""
    metrics: Mapping[str, float]
    """The latest value of every metric."""
    given: GivenObjects = field(default_factory=GivenObjects, compare=False)
    """The Python objects that its settings lead to, for `agent`."""

    @classmethod
    def read(cls, run_dir: Path | str) -> RunResult:
        """Returns the result of an earlier run, finished or not, from its folder.

        Raises:
            CheckpointError: not a run folder, or one without a checkpoint.
            DataError: it has no metrics yet, or they are damaged.
        """
        folder = RunFolder.open(Path(run_dir).expanduser()).path
        latest = latest_of(read_metrics(folder))
        return cls(run_dir=folder, checkpoint_dir=find_checkpoint(folder), metrics=latest)

    def __repr__(self) -> str:
        names = ("reward/mean", "eval/accuracy", "eval/accuracy_sampled")
        known = [f"{name} {self.metrics[name]:.3g}" for name in names if name in self.metrics]
        last = self.checkpoint_dir.name
        return f"<RunResult {str(self.run_dir)!r}: {', '.join([f'checkpoint {last}', *known])}>"

    @property
    def history(self) -> list[dict[str, float]]:
        """The metrics of each update, under flat names such as "reward/mean"; a line of update 0
        holds the evaluation before the first one. Read anew each time."""
        return read_metrics(self.run_dir)

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The evaluations, each as a dict with "update" and names such as "accuracy" and
        "pass_at_4"."""
        found = []
        for line in self.history:
            ours = {"update": line["update"]}
            for key, value in line.items():
                if key.startswith("eval/"):
                    ours[key.removeprefix("eval/")] = value
            if len(ours) > 1:
                found.append(ours)
        return found

    def trees(self, update: int | None = None) -> list[Tree]:
        """Returns the trees of an update, None for the last one.

        Raises:
            DataError: no trees of it are recorded, with those that are.
        """
        folder = RunFolder.open(self.run_dir).trees_dir
        parts = {part.update: part for part in parts_in(folder, "update")}
        wanted = max(parts, default=None) if update is None else update
        if wanted not in parts:
            there = f"{min(parts)} to {max(parts)}" if parts else "none"
            raise DataError(
                f"run '{self.run_dir}' has no trees of update {update}; recorded are: {there}",
                code="update-without-trees",
            )
        return [*parts[wanted].trees()]

    def agent(
        self, *overrides: str, system_prompt: str | None = None, **objects: Unpack[Objects]
    ) -> AskedAgent:
        """Returns the trained agent, to be asked: `answer = agent.ask("...")` or, within
        `async with`, `answer = await agent("...")`.

        Args:
            overrides: settings that differ from the run's, such as "eval.greedy=false".
            system_prompt: in place of the recipe's; None keeps that.
            objects: Python objects that the settings lead to, as of `train`; those of this
                process's own run are known.
        """
        place = self.checkpoint_dir
        known = self.given
        agent: AskedAgent = above("agent")(
            place, overrides, system_prompt=system_prompt, given=known, **objects
        )
        return agent

    def view(self, *, opens: bool = True) -> ServedViewer:
        """Serves the viewer of this run on the loopback address, until its `close()` or the end of
        the process, and shows it: in a notebook below the cell, else in the browser.

        Args:
            opens: False serves it only.
        """
        viewer: ServedViewer = above("viewer")([self.run_dir], opens=opens)
        return viewer
