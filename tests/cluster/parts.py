"""Tools of the user's, and a Ray cluster of this machine alone, for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.files import code_checksum
from treegraft.core.interfaces import Capability
from treegraft.core.types import Task
from treegraft.extras.ray.actors import Place
from treegraft.extras.ray.ray import connected
from treegraft.settings.config import Config
from treegraft.settings.load import config_json

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


def place_of(config: Config) -> Place:
    """Returns what actors of these settings need."""
    return Place(
        cwd=str(Path.cwd()),
        path=tuple(sys.path),
        code=code_checksum(),
        config=config_json(config),
    )


@contextmanager
def cluster(config: Config, num_cpus: float = 4.0) -> Iterator[None]:
    """Holds a cluster of this machine alone."""
    with connected(config, {"CPU": num_cpus}):
        yield
