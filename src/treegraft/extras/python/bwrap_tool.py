"""The python tool in CPython with NumPy, SciPy and SymPy, each call in a bubblewrap sandbox.

As in Monty's the clock is fixed at `FROZEN_TIME`, sleeping takes no time and `random` and NumPy
start from one seed, so that the same code gives the same output, except for randomness from the
kernel (`os.urandom`) and memory addresses. Warnings are off, as they would cost the agent tokens at
each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

from treegraft import SettingError, ToolError
from treegraft.extras.python.bwrap import Sandbox, SandboxLimits, find_problem
from treegraft.extras.python.output import MAX_OUTPUT_CHARS, NO_OUTPUT, too_large, too_long
from treegraft.extras.python.plugin import PythonToolSettings
from treegraft.extras.python.pooled import PooledPython


class BwrapTool(PooledPython):
    """Runs Python code, each call in a fresh process of a sandbox started ahead."""

    description = (
        f"{PooledPython.description} numpy, scipy and sympy can be imported; there is no network,"
        " and files last for one call."
    )

    def __init__(self, settings: PythonToolSettings) -> None:
        """Tries a first sandbox, then starts the workers, which load their libraries in the
        background.

        Raises `SettingError` where no sandbox can be started, saying what to do.
        """
        self.limits = SandboxLimits(
            max_duration_s=settings.max_duration_s,
            # Beside the libraries: arrays of 64 million numbers.
            max_memory_mb=512,
            # Of a private /tmp that one call sees: files are scratch space.
            max_files_mb=16,
            # As many as linear algebra starts on a large machine; processes cannot be started.
            max_threads=16,
            max_output_chars=MAX_OUTPUT_CHARS,
        )
        if (problem := find_problem()) is not None:
            raise SettingError(
                f"tools.python.backend is 'bwrap', but {problem}", code="bwrap-unusable"
            )
        super().__init__(settings.num_workers)
        self._start()

    @property
    def fingerprint(self) -> str:
        """Changes with everything that results depend on, apart from the code."""
        return f"bwrap {self.limits}"

    def _open(self, threads: ThreadPoolExecutor) -> None:
        self._idle: SimpleQueue[Sandbox | None] = SimpleQueue()
        for _ in range(self._num_workers):
            # A sandbox that is still to be started.
            self._idle.put(None)
            threads.submit(self._warm)

    def _warm(self) -> None:
        # A failure is lost here: the first call tries again and reports it.
        with self._sandbox():
            pass

    @contextmanager
    def _sandbox(self) -> Iterator[Sandbox]:
        idle = self._idle
        sandbox = idle.get()
        try:
            if sandbox is None or not sandbox.is_alive:
                sandbox = None  # should the next line fail
                sandbox = Sandbox(self.limits)
            yield sandbox
        finally:
            idle.put(sandbox)

    def _run(self, code: str) -> str:
        with self._sandbox() as sandbox:
            outcome = sandbox.run(code)
        if outcome.kind == "value":
            return (outcome.printed + outcome.text).rstrip("\n") or NO_OUTPUT
        raise ToolError(
            {
                "timeout": too_long(self.limits.max_duration_s),
                "memory": too_large(self.limits.max_memory_mb),
                "died": f"the code was stopped: its process died ({outcome.text})",
                "error": outcome.printed + outcome.text,
            }[outcome.kind],
            code="code-failed",
        )

    def _end(self) -> None:
        for _ in range(self._num_workers):
            if (sandbox := self._idle.get()) is not None:
                sandbox.close()
