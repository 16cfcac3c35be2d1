"""Calls of the bubblewrap python tool against a plain subprocess, unconfined, that starts CPython
and runs the same code.

    python -m benchmarks.tools [CALLS]

Alternating, ratio of medians. `code` imports nothing; `sympy` imports what the sandbox has loaded
already. The last lines are a single call's cost beyond the code itself, one after the other and
with a pause between them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.speed.measure import compare
from treegraft.core.types import Task
from treegraft.extras.python.bwrap import Sandbox, SandboxLimits
from treegraft.extras.python.bwrap_tool import BwrapTool
from treegraft.extras.python.plugin import PythonToolSettings

CODES = {
    "code": "print(sum(n * n for n in range(100)))",
    "sympy": "import sympy\nprint(sympy.factorint(360360))",
}
TASK = Task(id="bench", question="", reference=())
WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("calls", type=int, nargs="?", default=20, help="calls of each kind; 20")
    num_calls = parser.parse_args().calls
    with asyncio.Runner() as runner:
        tool = BwrapTool(PythonToolSettings(num_workers=WORKERS, max_duration_s=60))
        runner.run(tool("import sympy", TASK))

        async def ours(code: str) -> None:
            await asyncio.gather(*(tool(code, TASK) for _ in range(num_calls)))

        async def theirs(code: str) -> None:
            gate = asyncio.Semaphore(WORKERS)

            async def one() -> None:
                async with gate:
                    process = await asyncio.create_subprocess_exec(
                        sys.executable, "-c", code, stdout=subprocess.PIPE
                    )
                    await process.communicate()

            await asyncio.gather(*(one() for _ in range(num_calls)))

        def run(side: Callable[[str], Awaitable[None]], code: str) -> None:
            async def calls() -> None:
                await side(code)

            runner.run(calls())

        for name, code in CODES.items():
            print(f"{num_calls} calls of '{name}', {WORKERS} at once")
            compare(
                "python calls per second",
                partial(run, ours, code),
                partial(run, theirs, code),
                "a subprocess",
                num_runs=3,
            )
        runner.run(tool.close())
    sandbox = Sandbox(
        SandboxLimits(
            max_duration_s=60,
            max_memory_mb=256,
            max_files_mb=4,
            max_threads=4,
            max_output_chars=1000,
        )
    )
    for pause_s in (0.0, 0.05):
        print(
            f"a call of '6 * 7', {pause_s:g} s between calls: median"
            f" {1000 * _median_s(sandbox, num_calls, pause_s):.1f} ms"
        )
    sandbox.close()


def _median_s(sandbox: Sandbox, num_calls: int, pause_s: float) -> float:
    seconds = []
    for _ in range(num_calls):
        time.sleep(pause_s)
        began = time.perf_counter()
        sandbox.run("6 * 7")
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
