"""One vLLM server: its process if it is ours, and what is said to it over HTTP, in JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json

from treegraft.core.addresses import redacted
from treegraft.core.errors import EngineError

CONTROL_TIMEOUT_S = 30.0
"""Longest wait for the answer to a question that needs no computing."""
ANSWER_BYTES = 1 << 28
"""Largest answer. A token takes at most 4,096 bytes, so it has room for 65,000 tokens."""
TAIL_LINES = 15
_STOP_S = 20.0
"""Time that the launcher gets to end its server, in seconds; it needs 17 at most."""


class Unreachable(Exception):
    """The server did not answer, or said that it has failed: another one may answer."""


class Process:
    """The process of a server, ended by its launcher when this process ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        folders: Sequence[Path] = (),
    ) -> None:
        """Starts nothing.

        Args:
            command: of the server.
            log: appended to.
            folders: removed by the launcher if the run dies.
        """
        launcher = Path(__file__).with_name("launch.py")
        removed = json.dumps([str(folder) for folder in folders])
        # Isolated, so that no module next to the launcher hides one of Python's own.
        self._command = [sys.executable, "-I", str(launcher), removed, *command]
        self._environment = dict(environment)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it. Raises EngineError if the program or its log cannot be opened."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,  # its end is how the launcher sees that we have ended
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C is ours to handle
                )
        except OSError as error:
            raise EngineError(
                f"engine: '{self._command[0]}' did not start: {error}", code="server-not-started"
            ) from error

    @property
    def exit_status(self) -> int | None:
        """How it ended; None while it runs, or before it has been started."""
        return None if self._process is None else self._process.poll()

    def tail(self) -> str:
        """Returns the last lines of its log."""
        with suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-TAIL_LINES:])
        return ""

    def stop(self) -> None:
        """Ends the server and all its processes, and waits for that."""
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Server:
    """The address of a server, and its process if we started it."""

    def __init__(self, url: str, http: httpx.AsyncClient, process: Process | None = None) -> None:
        self.url = url.rstrip("/")
        self.process = process
        self._http = http

    def __str__(self) -> str:
        return redacted(self.url)

    async def is_healthy(self) -> bool:
        """Returns whether the server answers and says that it is well."""
        with suppress(Unreachable, EngineError):
            await self._answer("GET", "/health", None, CONTROL_TIMEOUT_S)
            return True
        return False

    async def post(
        self, path: str, body: Any = None, *, timeout_s: float | None = CONTROL_TIMEOUT_S
    ) -> Any:
        """Returns what the server answers, read from JSON.

        Args:
            timeout_s: longest wait; None for a caller that has a deadline of its own.

        Raises:
            Unreachable: no answer, one that is no JSON, or an error of the server's.
            EngineError: the server refuses the request.
        """
        return self._read(path, await self._answer("POST", path, body, timeout_s))

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[dict[str, Any]]:
        """Returns what a method of our extension returns in each of the server's workers.

        Raises:
            Unreachable, EngineError: as `post` does; the extension is missing.
        """
        body = {"method": method, "args": list(args)}
        answer = await self.post("/collective_rpc", body, timeout_s=timeout_s)
        return list(answer["results"])

    async def version(self) -> str:
        """Returns the label of its weights."""
        path = "/weight_info"
        answer = await self._answer("GET", path, None, CONTROL_TIMEOUT_S)
        return str(self._read(path, answer)["weight_version"])

    async def set_version(self, label: str) -> None:
        """Labels its weights."""
        await self.post("/update_weight_version", {"new_version": label})

    def _read(self, path: str, answer: bytes) -> Any:
        try:
            # Half the time of Python's own reader, which replies with twenty entries a token need.
            return from_json(answer)
        except ValueError as error:
            raise Unreachable(f"{self} did not answer {path} in JSON: {error}") from error

    async def _answer(self, method: str, path: str, body: Any, timeout_s: float | None) -> bytes:
        found = bytearray()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, f"{self.url}{path}", json=body) as response,
            ):
                async for piece in response.aiter_bytes():
                    found += piece
                    # A server that is no vLLM may answer without end.
                    if len(found) > ANSWER_BYTES:
                        raise Unreachable(f"{self} answered {path} with over {ANSWER_BYTES} bytes")
        except TimeoutError as error:
            if timeout_s is None:
                raise
            raise Unreachable(f"{self} did not answer {path} within {timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"{self} did not answer {path}: {type(error).__name__}") from error
        if response.status_code == 200:
            return bytes(found)
        said = " ".join(found[:600].decode(errors="replace").split())
        if response.status_code >= 500:
            raise Unreachable(f"{self} answered {path} with {response.status_code}: {said}")
        raise EngineError(
            f"engine: {self} refused {path} ({response.status_code}): {said}",
            code="server-refused",
        )
