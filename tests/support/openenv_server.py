"""A real OpenEnv server for tests, run by a Python that has the package `openenv`:
openenv_server.py PORT (typed | mcp)."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class AddAction(Action):
    """Adds a number to the sum; past 9 the game is over."""

    number: int = Field(description="What to add")


class SumObservation(Observation):
    total: int = 0


class Typed(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="1", step_count=0)
        self.total = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, start: int = 0, **_: Any
    ) -> SumObservation:
        self.total = start
        return SumObservation(total=self.total, metadata={"seed": seed})

    def step(self, action: AddAction, **_: Any) -> SumObservation:
        self.total += action.number
        return SumObservation(total=self.total, reward=action.number / 10, done=self.total > 9)

    @property
    def state(self) -> State:
        return self._state


class WithTools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("adder")
        self.total = 0

        @server.tool
        def add(number: int) -> str:
            """Adds a number to the sum."""
            if number < 0:
                raise ValueError("no negative numbers")
            self.total += number
            return f"sum {self.total}"

        @server.tool
        def say(word: str) -> dict:
            """Says a word."""
            return {"word": word, "total": self.total}

        super().__init__(server)
        self._state = State(episode_id="1", step_count=0)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, start: int = 0, **_: Any
    ) -> Observation:
        self.total = start
        return Observation(done=False)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(done=False)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    port = int(sys.argv[1])
    kind = sys.argv[2]
    parts = (
        (Typed, AddAction, SumObservation)
        if kind == "typed"
        else (WithTools, CallToolAction, CallToolObservation)
    )
    uvicorn.run(
        create_app(*parts, env_name=kind, max_concurrent_envs=4),
        host="127.0.0.1",
        port=port,
        log_level="warning",
    )
