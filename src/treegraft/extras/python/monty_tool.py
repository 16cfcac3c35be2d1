"""The python tool in Monty, a sandboxed interpreter in worker processes of its own.

There is no file system, no network and no clock: `time` is fixed at `FROZEN_TIME`, sleeping takes
no time and `random` starts from one seed, so that the same code gives the same output (only the
`hash()` of texts differs between workers).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic_monty import (
    Monty,
    MontyCrashedError,
    MontyRuntimeError,
    MontySession,
    MontySyntaxError,
    OSPolicy,
    ResourceLimits,
)
from pydantic_monty._binary import find_monty_binary

from treegraft import ToolError, ToolUnavailable
from treegraft.extras.python.determinism import FROZEN_TIME
from treegraft.extras.python.output import (
    MAX_OUTPUT_CHARS,
    NO_OUTPUT,
    Printed,
    cut,
    show,
    too_large,
    too_long,
)
from treegraft.extras.python.plugin import PythonToolSettings
from treegraft.extras.python.pooled import PooledPython

WATCHDOG_S = 5.0
"""How long past its own limit a worker may stay silent before it is killed."""


# Monty's asynchronous pool aborts the interpreter at exit now and then: its threads may ask for the
# interpreter while that shuts down. The synchronous one calls back in the calling thread only.
class MontyTool(PooledPython):
    """Runs Python code, each call in a fresh session."""

    description = (
        f"{PooledPython.description} There are no files, no network and no third-party packages."
    )

    def __init__(
        self, settings: PythonToolSettings, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> None:
        """Starts nothing: the first call starts the workers."""
        super().__init__(settings.num_workers)
        self.max_duration_s = settings.max_duration_s
        # There are no libraries, and so no arrays.
        self.max_memory_mb = 64
        self.max_output_chars = max_output_chars

    @property
    def fingerprint(self) -> str:
        """Changes with everything that results depend on, apart from the code."""
        limits = f"{self.max_duration_s:g} s, {self.max_memory_mb} MB"
        version = importlib.metadata.version("pydantic-monty")
        return f"monty {version}, {limits}, {self.max_output_chars} characters"

    def _open(self, threads: ThreadPoolExecutor) -> None:
        # Of the program that starts the processes.
        folder = tempfile.TemporaryDirectory(prefix="treegraft-monty-")
        try:
            self._pool = Monty(
                binary_path=_quiet_program(Path(folder.name)),
                min_processes=1,
                max_processes=self._num_workers,
                request_timeout=self.max_duration_s + WATCHDOG_S,
            )
            self._pool.__enter__()
        except Exception as error:
            folder.cleanup()
            text = f"the python tool cannot start its workers: {type(error).__name__}: {error}"
            raise ToolUnavailable(text, code="sandbox-busy") from error
        self._folder = folder

    def _end(self) -> None:
        self._pool.__exit__(None, None, None)
        self._folder.cleanup()

    def _run(self, code: str) -> str:
        printed = Printed(self.max_output_chars)
        limits = ResourceLimits(
            max_feed_duration_secs=self.max_duration_s, max_memory=self.max_memory_mb * 2**20
        )
        policy = OSPolicy(
            datetime=FROZEN_TIME, timezone="utc", sleep="zero", random_start={"seed": 0}
        )
        try:
            with self._pool.checkout(limits=limits, os_policy=policy) as session:
                value, text = _value(session, code, printed)
            shown = "" if value is None else show(value, self.max_output_chars)
            # Many values reach us as others, such as a text for a range; Monty knows their repr.
            if text is not None and not _agree(shown, text, self.max_output_chars):
                shown = cut(text, self.max_output_chars)
        except MontyCrashedError as error:
            died = "the code was stopped: its worker process died"
            raise ToolError(
                too_long(self.max_duration_s) if error.timed_out else died, code="code-died"
            ) from error
        except (MontyRuntimeError, MontySyntaxError) as error:
            text = cut(error.display("type-msg"), self.max_output_chars)
            # In words of ours alone: Monty's numbers and the output so far are a matter of luck.
            if text.startswith("TimeoutError: feed time limit exceeded"):
                raise ToolError(too_long(self.max_duration_s), code="code-failed") from error
            if text.startswith("MemoryError: ") and "memory limit" in text:
                raise ToolError(too_large(self.max_memory_mb), code="code-failed") from error
            raise ToolError(printed.text() + text, code="code-failed") from error
        except RecursionError as error:
            text = "RecursionError: the value is nested too deeply to be shown"
            raise ToolError(printed.text() + text, code="code-failed") from error
        except Exception as error:
            raise ToolError(
                printed.text() + f"{type(error).__name__}: {error}", code="code-failed"
            ) from error
        return (printed.text() + shown).rstrip("\n") or NO_OUTPUT


def _value(session: MontySession, code: str, printed: Printed) -> tuple[Any, str | None]:
    """Runs the code; returns the value of its last expression, and its repr where that expression
    begins a line and is the whole statement."""

    def run(code: str) -> Any:
        return session.feed_run(code, print_callback=lambda stream, text: printed.add(text))

    # Not parsed here, since it is not ours. Where the last line without indentation begins no
    # expression, or is inside of one, the changed code is no Python, and none of it runs.
    starts = [found.start() for found in re.finditer(r"(?m)^[^\s#)\]}]", code)]
    if starts:
        before = code[: starts[-1]]
        last = code[starts[-1] :]
        try:
            found = run(f"{before}pass\n(lambda value: (value, f'{{value!r}}'))((\n{last}\n))")
            return found if found[0] is not None else (None, None)
        except MontySyntaxError as error:
            if any(frame.function_name for frame in error.traceback()):  # raised by code that ran
                raise
    return run(code), None


def _agree(shown: str, text: str, max_chars: int) -> bool:
    """Whether a value that was printed here has this repr, but for the order of sets."""
    if text.startswith(shown[:max_chars]):
        return True
    return len(text) == len(shown) and sorted(text) == sorted(shown)


def _quiet_program(folder: Path) -> Path | None:
    """Returns a program in `folder` that runs Monty's without its standard error; None for Monty's
    own, where a script cannot be run."""
    # A worker out of memory says so on the standard error that it inherits, our terminal; the pool
    # has no setting for it.
    if os.name != "posix":
        return None
    program = folder / "monty"
    binary = shlex.quote(find_monty_binary())
    program.write_text(f'#!/bin/sh\nexec {binary} "$@" 2>/dev/null\n', encoding="utf-8")
    program.chmod(0o700)
    # Not so on a file system that is mounted without the right to run programs.
    return program if os.access(program, os.X_OK) else None
