"""A tool of the user's, and a mark for tests that need Ray."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability
from treegraft.core.types import Task

# Not by importing it: Ray reads the environment once.
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


class Odd:
    """A tool whose body says what becomes of the call."""

    name = "odd"
    description = "Does as it is told."
    capability = Capability.STATELESS
    cacheable = False
    fingerprint = "odd 1"

    async def __call__(self, body: str, task: Task) -> str:
        what, _, rest = body.partition(" ")
        if what == "error":
            raise ToolError(rest)
        if what == "down":
            raise ToolUnavailable(rest)
        if what == "fault":
            raise KeyError(rest)
        if what == "cancel":
            raise asyncio.CancelledError
        if what == "sleep":
            # Tells the test where it runs.
            with Path(rest).open("a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")
            await asyncio.sleep(3.0)
            return "slept"
        if what == "times":
            return rest * 1000
        return f"{body} {task.question} {task.columns.get('n')}"

    async def close(self) -> None:
        """Nothing to release."""
