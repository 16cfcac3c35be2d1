"""Programs that are agents: an async function, or a command that runs once a rollout."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from treegraft.core import packages
from treegraft.core.errors import SettingError
from treegraft.core.import_paths import pick
from treegraft.core.types import Task

MAX_OUTPUT = 8 << 20
"""Bytes of a command's stdout, and of its stderr; past it the command is killed."""
KEPT = 64 << 10
"""Bytes at the end of each that are read."""
SETTING = "agent.run"
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. Outcome(answer="42")"""

    answer: str | None = None
    """None leaves it to the text of the last completion."""
    reward: float | None = None
    """None leaves it to the reward functions."""
    problem: str = ""
    """What the program did wrong, in words; empty for nothing."""


class Program(Protocol):
    """An agent that owns its loop."""

    async def run(self, task: Task, address: str, api_key: str) -> Outcome:
        """Solves a task by requests to an OpenAI-compatible server. Cancelled, it stops at once.

        Args:
            address: the base URL of the server.
        """


def outcome_of(value: Any) -> Outcome:
    """Returns the outcome that a program's result says: None, an answer, or an object with
    "answer", "reward" or both."""
    if not isinstance(value, Mapping):
        return Outcome(None if value is None else str(value))
    answer, reward = value.get("answer"), value.get("reward")
    said = None if answer is None else str(answer)
    if reward is None:
        return Outcome(said)
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    if not is_number:
        text = f"the agent's reward is {str(reward)[:80]!r}; expected a finite number"
        return Outcome(said, problem=text)
    return Outcome(said, float(reward))


@dataclass(frozen=True, slots=True)
class FunctionProgram:
    """An async function `agent(task, client)`; the client is an `openai.AsyncOpenAI`."""

    function: Callable[..., Any]

    async def run(self, task: Task, address: str, api_key: str) -> Outcome:
        """Awaits the function; what it raises is its problem."""
        from openai import AsyncOpenAI

        # Straight to this machine, whatever proxy the environment names. A repeated request would
        # be a further sample, so the function decides about it.
        async with (
            httpx.AsyncClient(trust_env=False, verify=False, timeout=None) as connection,
            AsyncOpenAI(
                base_url=address, api_key=api_key, http_client=connection, max_retries=0
            ) as client,
        ):
            try:
                return outcome_of(await self.function(task, client))
            except Exception as error:  # the user's code
                return Outcome(problem=f"the agent raised {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class CommandProgram:
    """A command that finds the server in OPENAI_BASE_URL and OPENAI_API_KEY, and the task as JSON
    in TASK. If the last line of its output is a JSON object, this is its result."""

    command: Sequence[str]

    async def run(self, task: Task, address: str, api_key: str) -> Outcome:
        """Runs the command in a new folder and a process group of its own, which is killed at the
        end."""
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                cwd=folder,
                env=_environment(task, address, api_key),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdout is not None and process.stderr is not None
            kill = partial(_kill, process.pid)
            reads = [
                asyncio.create_task(_end_of(one, kill)) for one in (process.stdout, process.stderr)
            ]
            try:
                # `wait` would wait for children too that have the output open.
                while process.returncode is None:
                    await asyncio.sleep(_PAUSE_S)
            finally:
                kill()
                # A child that has left the group may have the output open still.
                await asyncio.wait(reads, timeout=1)
                for one in reads:
                    one.cancel()
        out, err = [one.result() if not one.cancelled() and one.done() else "" for one in reads]
        if out is None or err is None:
            return Outcome(problem=f"the command wrote more than {MAX_OUTPUT >> 20} MB of output")
        if process.returncode:
            said = err.strip()[-500:] or out.strip()[-500:]
            text = f"the command ended with status {process.returncode}: {said}"
            return Outcome(problem=text)
        return _last_line(out)


def _environment(task: Task, address: str, api_key: str) -> dict[str, str]:
    shown = {
        "id": task.id,
        "question": task.question,
        "messages": task.conversation(),
        "columns": dict(task.columns),
    }
    # Straight to this machine, whatever proxy is there.
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
    return {
        **os.environ,
        "OPENAI_BASE_URL": address,
        "OPENAI_API_KEY": api_key,
        "TASK": json.dumps(shown, default=str),
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


async def _end_of(stream: asyncio.StreamReader, kill: Callable[[], None]) -> str | None:
    """The last bytes of an output; None, after `kill`, if it had more than MAX_OUTPUT."""
    last = b""
    num_read = 0
    while data := await stream.read(1 << 16):
        num_read += len(data)
        last = (last + data)[-KEPT:]
        if num_read > MAX_OUTPUT:
            kill()
            return None
    return last.decode(errors="replace")


def _last_line(out: str) -> Outcome:
    lines = out.strip().splitlines()
    with suppress(ValueError, RecursionError):
        found = json.loads(lines[-1]) if lines else None
        if isinstance(found, dict):
            return outcome_of(found)
    return Outcome()


def build_program(run: str | Sequence[str]) -> Program | None:
    """Returns the program of `agent.run`; None for none.

    Raises:
        SettingError: no such function, one that is not async, or the package openai is missing.
    """
    if not run:
        return None
    if not isinstance(run, str):
        # It runs in another folder, where names of files of this one lead nowhere.
        return CommandProgram(
            [str(Path(one).resolve()) if Path(one).is_file() else one for one in run]
        )
    packages.require(SETTING, "openai")
    function = pick(run, {}, SETTING)
    # An object with an async `__call__` will do as well.
    if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise SettingError(
            f"{SETTING}: got '{run}', which is not async; expected `async def agent(task, client)`,"
            " or a command as a list of strings.",
            settings=[SETTING],
            code="agent-not-async",
        )
    return FunctionProgram(function)
