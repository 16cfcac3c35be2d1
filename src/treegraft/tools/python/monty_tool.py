"""The python tool in Monty, a sandboxed interpreter in worker processes of its own.

There is no file system, no network and no clock: `time` is fixed at `FROZEN_TIME`, sleeping takes
no time and `random` starts from one seed, so that the same code gives the same output (only the
`hash()` of texts differs between workers).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import threading
from concurrent.futures import ThreadPoolExecutor

from pydantic_monty import (
    Monty,
    MontyCrashedError,
    MontyRuntimeError,
    MontySyntaxError,
    OSPolicy,
    ResourceLimits,
)

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability, Signature
from treegraft.core.types import Task
from treegraft.settings.tools import PythonToolSettings
from treegraft.tools.python.determinism import FROZEN_TIME
from treegraft.tools.python.output import (
    MAX_OUTPUT_CHARS,
    NO_OUTPUT,
    Printed,
    cut,
    show,
    too_large,
    too_long,
)

WATCHDOG_S = 5.0
"""How long past its own limit a worker may stay silent before it is killed."""


class MontyTool:
    """Runs Python code, each call in a fresh session."""

    name = "python"
    description = (
        "Runs Python code and shows what it prints and the value of its last expression. Each call"
        " starts afresh: names do not carry over. There are no files, no network and no third-party"
        " packages."
    )
    signature = Signature.of_text("code", "Python code.")
    capability = Capability.STATELESS
    cacheable = True

    def __init__(
        self, settings: PythonToolSettings, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> None:
        """Starts nothing: the first call starts the workers."""
        self.max_duration_s = settings.max_duration_s
        self.max_memory_mb = settings.max_memory_mb or 64
        self.num_workers = settings.num_workers
        self.max_output_chars = max_output_chars
        self._lock = threading.Lock()
        self._pool: Monty | None = None
        # Monty's asynchronous pool aborts the interpreter at exit now and then: its threads may ask
        # for the interpreter while that shuts down. The synchronous one calls back in the calling
        # thread only.
        self._threads: ThreadPoolExecutor | None = None

    @property
    def fingerprint(self) -> str:
        """Changes with everything that results depend on beside the code."""
        limits = (
            f"{self.max_duration_s:g} s, {self.max_memory_mb} MB, {self.max_output_chars}"
            " characters"
        )
        return f"monty {importlib.metadata.version('pydantic-monty')}, {limits}"

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the printed text and the value of the last expression.

        Raises `ToolError` for code that fails, runs too long or needs too much memory, and when its
        worker dies; `ToolUnavailable` when no worker can be started.
        """
        pool, threads = self._start()
        return await asyncio.get_running_loop().run_in_executor(threads, self._run, pool, body)

    async def close(self) -> None:
        """Ends all workers, once the calls under way are done. A later call starts new ones."""
        with self._lock:
            pool, threads = self._pool, self._threads
            self._pool = self._threads = None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        if pool is not None:
            await asyncio.to_thread(pool.__exit__, None, None, None)

    def _start(self) -> tuple[Monty, ThreadPoolExecutor]:
        with self._lock:
            if self._pool is None or self._threads is None:
                pool = Monty(
                    min_processes=1,
                    max_processes=self.num_workers,
                    request_timeout=self.max_duration_s + WATCHDOG_S,
                )
                try:
                    pool.__enter__()
                except Exception as error:
                    raise ToolUnavailable(
                        f"the python tool cannot start its workers: {type(error).__name__}: {error}"
                    ) from error
                self._pool = pool
                self._threads = ThreadPoolExecutor(
                    self.num_workers, thread_name_prefix="treegraft-python"
                )
            return self._pool, self._threads

    def _run(self, pool: Monty, code: str) -> str:
        printed = Printed(self.max_output_chars)
        limits = ResourceLimits(
            max_feed_duration_secs=self.max_duration_s, max_memory=self.max_memory_mb * 2**20
        )
        policy = OSPolicy(
            datetime=FROZEN_TIME, timezone="utc", sleep="zero", random_start={"seed": 0}
        )
        try:
            with pool.checkout(limits=limits, os_policy=policy) as session:
                value = session.feed_run(
                    code, print_callback=lambda stream, text: printed.add(text)
                )
            shown = "" if value is None else show(value, self.max_output_chars)
        except MontyCrashedError as error:
            died = "the code was stopped: its worker process died"
            raise ToolError(too_long(self.max_duration_s) if error.timed_out else died) from error
        except (MontyRuntimeError, MontySyntaxError) as error:
            raise ToolError(self._message(error, printed.text())) from error
        except RecursionError as error:
            raise ToolError(
                printed.text() + "RecursionError: the value is nested too deeply to be shown"
            ) from error
        except Exception as error:
            raise ToolError(f"{printed.text()}{type(error).__name__}: {error}") from error
        return (printed.text() + shown).rstrip("\n") or NO_OUTPUT

    def _message(self, error: MontyRuntimeError | MontySyntaxError, printed: str) -> str:
        """Returns the printed text and "Type: message". For a limit, in words of ours alone:
        Monty's numbers and the output so far are a matter of luck."""
        text = cut(error.display("type-msg"), self.max_output_chars)
        if text.startswith("TimeoutError: feed time limit exceeded"):
            return too_long(self.max_duration_s)
        if text.startswith("MemoryError: ") and "memory limit" in text:
            return too_large(self.max_memory_mb)
        return printed + text
