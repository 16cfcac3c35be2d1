"""Tool workers: stateless tools in processes of their own, wherever there is room, so that a grower
holds neither sandboxes nor an index.

Each tool of `tools.use` whose capability is "stateless" runs there. Tools with a state, those of
tasks, of environments and of MCP servers stay with the grower.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from treegraft.core.errors import DeadlineExceeded, ToolError, ToolUnavailable, TreegraftError
from treegraft.core.interfaces import Capability, Signature, Tool
from treegraft.core.types import Task, ToolCall
from treegraft.extras.ray.actors import replying
from treegraft.extras.ray.plugin import cluster_settings
from treegraft.extras.ray.pool import Pool, Serving, answering
from treegraft.runs.tree_json import task_from_json, task_to_json
from treegraft.settings.load import load_config
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.build import build_tools
from treegraft.tools.toolbox import Toolbox


class ToolWorker(Serving):
    """The tools of `tools.use` and the toolbox that runs them (an actor)."""

    def __init__(self, role: str, number: int, place: str) -> None:
        """Makes the tools; one that cannot be made is the answer to every request."""
        super().__init__(role, number, place)
        config = load_config(json.loads(self.place.config))
        self._fault: TreegraftError | None = None
        self._toolbox: Toolbox
        try:
            own = _workers_own(config.tools, cluster_settings(config).tool_workers)
            self._toolbox = Toolbox(build_tools(own, ()), own)
        except TreegraftError as error:
            self._fault = error

    @property
    def _box(self) -> Toolbox:
        if self._fault is not None:
            raise self._fault
        return self._toolbox

    @replying
    async def describe(self, _request: str = "") -> list[dict[str, Any]]:
        """Returns what `RemoteTool` has to know of each tool, in the order of tools.use."""
        return [_facts(tool) for tool in self._box.tools.values()]

    @answering
    async def call(self, name: str, body: str, task: Any) -> dict[str, Any]:
        """Returns the whole result of a call, or the error that the agent is to read."""
        seen = await self._box.call(ToolCall(name, body), task_from_json(task))
        fingerprint = getattr(self._box.tools[name], "fingerprint", "")
        return {"text": seen.text, "is_error": seen.is_error, "fingerprint": str(fingerprint)}

    async def end(self) -> None:
        """Ends the tools' own processes."""
        if self._fault is None:
            await self._toolbox.close()


def _workers_own(settings: ToolsSettings, num_workers: int) -> ToolsSettings:
    """The settings of a worker's toolbox: deadline and retries are its own, caches and output cap
    the grower's, and the rate limit is divided."""
    rate = settings.max_calls_per_s
    return settings.model_copy(
        update={
            "mcp": [],
            "cache": False,
            "cache_path": "",
            "replay": False,
            "max_output_chars": sys.maxsize,
            "max_calls_per_s": None if rate is None else rate / num_workers,
        }
    )


def _facts(tool: Tool) -> dict[str, Any]:
    signature: Signature | None = getattr(tool, "signature", None)
    return {
        "name": tool.name,
        "description": tool.description,
        "capability": tool.capability,
        "cacheable": tool.cacheable,
        "signature": None if signature is None else asdict(signature),
        "fingerprint": str(getattr(tool, "fingerprint", "")),
    }


class RemoteTool:
    """A tool that tool workers run, in a grower's toolbox (a `Tool`).

    It has no `is_remote`: retries, like the deadline, are the worker's, so that a call which moves
    to another worker has both anew.
    """

    def __init__(self, facts: dict[str, Any], pool: Pool, deadline_s: float) -> None:
        """Args:
        facts: of `ToolWorker.describe`.
        deadline_s: longest wait for an answer, moves and queues included.
        """
        self.name, self.description = facts["name"], facts["description"]
        self.capability, self.cacheable = Capability(facts["capability"]), facts["cacheable"]
        found = facts["signature"]
        self.signature = None if found is None else Signature(**found)
        self.fingerprint = facts["fingerprint"]
        self.deadline_s = deadline_s
        self._pool = pool

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the result of a call. Raises as a `Tool` does."""
        try:
            found = await self._pool.ask("call", self.name, body, task_to_json(task))
        except DeadlineExceeded as error:
            raise ToolUnavailable(str(error)) from error
        self.fingerprint = found["fingerprint"]
        if found["is_error"]:
            raise ToolError(found["text"])
        text: str = found["text"]
        return text

    async def close(self) -> None:
        """Does nothing: the workers serve others too."""


def remote_tools(
    facts: Sequence[dict[str, Any]],
    pool: Pool,
    deadline_s: float,
    settings: ToolsSettings,
    own: Sequence[Tool],
) -> list[Tool]:
    """Returns the same tools in the same order as `build_tools`, the stateless ones of tools.use as
    `RemoteTool`.

    Args:
        facts: of `ToolWorker.describe`.
        deadline_s: longest wait of a trajectory for an answer.
        own: the tasks' tools.

    Raises:
        SettingError, DataError: as `build_tools` does.
    """
    stays = [Capability(one["capability"]) is not Capability.STATELESS for one in facts]
    here = [entry for entry, has_state in zip(settings.use, stays, strict=True) if has_state]
    built = build_tools(settings.model_copy(update={"use": here}), own)
    local = iter(built[len(own) :])
    chosen: list[Tool] = [
        next(local) if has_state else RemoteTool(one, pool, deadline_s)
        for one, has_state in zip(facts, stays, strict=True)
    ]
    return [*own, *chosen, *local]
