"""The python tool in Monty: real sandbox workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.tools.test_tools import TASK, toolbox

from treegraft.core.errors import ToolError
from treegraft.core.types import Observation, ToolCall
from treegraft.extras.python.monty_tool import NO_OUTPUT, MontyTool
from treegraft.extras.python.plugin import PythonToolSettings


def worker_pids(parent: int | None = None) -> set[int]:
    """Live worker processes below `parent`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            state, above = fields[2].split()[:2]
            if "(monty" in fields[0] and state != "Z" and int(above) == (parent or os.getpid()):
                found.add(int(entry.name))
    return found


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def run_python(*bodies: str, max_output_chars: int = 1000, **options: Any) -> list[str]:
    """Results of the bodies, run one after the other, errors as their text."""

    async def run() -> list[str]:
        tool = MontyTool(PythonToolSettings(**options), max_output_chars=max_output_chars)
        texts = []
        for body in bodies:
            try:
                texts.append(await tool(body, TASK))
            except ToolError as error:
                texts.append(f"! {error}")
        await tool.close()
        return texts

    return asyncio.run(run())


def test_python_shows_output_and_last_value() -> None:
    assert run_python(
        "print(6 * 7)", "6 * 7", "print('a'); 'b'", "x = 1", "", "x", "(1, {'k': [2]}, {3})"
    ) == [
        "42",
        "42",
        "a\n'b'",
        NO_OUTPUT,
        NO_OUTPUT,
        "! NameError: name 'x' is not defined",
        "(1, {'k': [2]}, {3})",
    ]


def test_the_last_value_is_shown_as_python_shows_it() -> None:
    point = "class P:\n  def __repr__(self): return 'P(1)'\n"
    shown = {
        f"{point}P()": "P(1)",
        f"{point}[P()]  # one": "[P(1)]",
        f"{point}P(\n)": "P(1)",
        "from dataclasses import dataclass\n@dataclass\nclass Q:\n  a: int\nQ(2)": "Q(a=2)",
        "import collections\ncollections.Counter('aab')": "Counter({'a': 2, 'b': 1})",
        "range(3)": "range(0, 3)",
        "{1: 2}.values()": "dict_values([2])",
        "a = []\na.append(a)\na": "[[...]]",
        # Sets in one order, whatever they were made of.
        "[{3, 1, 2}]": "[{1, 2, 3}]",
        "1, 2": "(1, 2)",
        "'''a\n'''": "'a\\n'",
        "print(1); 2": "1\n2",
        "f(\na=1,\n)": "! NameError: name 'f' is not defined",
        "print(1)\neval('2 +')": "! 1\nSyntaxError: Expected an expression (<string>, line 1)",
        "# nothing": NO_OUTPUT,
    }
    assert dict(zip(shown, run_python(*shown), strict=True)) == shown


def test_python_errors_are_short_and_keep_what_was_printed() -> None:
    texts = run_python(
        "1 / 0", "print('so far')\n[][1]", "def f(:", "import os\nos.listdir('/')", "10 ** 100000"
    )
    assert texts[0] == "! ZeroDivisionError: division by zero"
    assert texts[1] == "! so far\nIndexError: list index out of range"
    assert texts[2].startswith("! SyntaxError: ")
    assert texts[3].startswith("! PermissionError")
    assert texts[4].startswith("! ValueError: Exceeds the limit (4300 digits)")


def test_python_limits_give_the_same_words_each_time() -> None:
    bodies = ["while True: pass", "'a' * 10 ** 9", "while True: print('x' * 99)", "2 + 2"]
    first = run_python(*bodies, max_duration_s=0.3)
    assert first == run_python(*bodies, max_duration_s=0.3)
    assert first == [
        "! TimeoutError: the code was stopped; it ran longer than 0.3 s",
        "! MemoryError: the code was stopped; it needed more than 64 MB",
        "! TimeoutError: the code was stopped; it ran longer than 0.3 s",
        "4",
    ]


def test_python_output_is_cut_with_a_note() -> None:
    printed, shown, nested = run_python(
        "print('x' * 100)",
        "'y' * 100",
        "x = []\nfor _ in range(5000): x = [x]\nx",
        max_output_chars=10,
    )
    assert printed == "x" * 10 + "\n[cut after 10 of 101 printed characters]"
    assert shown == "'" + "y" * 9 + "\n[cut after 10 characters]"
    assert nested.startswith("[[[") or "nested too deeply" in nested


def test_python_repeats_itself() -> None:
    bodies = ["import random\nrandom.random()", "import time\ntime.time()", "{'a', 'b', 'c', 'd'}"]
    first = run_python(*bodies)
    assert first == run_python(*bodies)
    assert first[2] == "{'a', 'b', 'c', 'd'}"
    started = time.perf_counter()
    run_python("import time\ntime.sleep(60)")
    assert time.perf_counter() - started < 10


def test_python_calls_run_side_by_side() -> None:
    async def run() -> list[str]:
        tool = MontyTool(PythonToolSettings(num_workers=2))
        texts = await asyncio.gather(*(tool(f"sum(range({n}))", TASK) for n in range(20)))
        await tool.close()
        return texts

    assert asyncio.run(run()) == [str(n * (n - 1) // 2) for n in range(20)]


@on_linux
def test_a_killed_worker_is_an_error_and_the_next_call_works() -> None:
    async def run() -> tuple[Observation, Observation]:
        box = toolbox(
            MontyTool(PythonToolSettings(max_duration_s=20, num_workers=1)), deadline_s=20
        )
        running = asyncio.create_task(box.call(ToolCall("python", "while True: pass"), TASK))
        while not worker_pids():
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        stopped = await running
        after = await box.call(ToolCall("python", "1 + 1"), TASK)
        await box.close()
        return stopped, after

    stopped, after = asyncio.run(run())
    assert stopped == Observation(
        text="the code was stopped: its worker process died", is_error=True
    )
    assert after == Observation(text="2")
    assert worker_pids() == set()


@on_linux
def test_no_worker_outlives_its_interpreter() -> None:
    # The worker's id is printed by the parent; the tool is left open on purpose.
    code = (
        "import asyncio; from tests.extras.test_monty import MontyTool,"
        " PythonToolSettings, TASK, worker_pids\ntool = MontyTool(PythonToolSettings());"
        " print(asyncio.run(tool('6 * 7', TASK)), *worker_pids())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=root, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    value, *pids = done.stdout.split()
    assert value == "42"
    assert pids
    deadline = time.monotonic() + 30
    while any(is_alive(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_closed_python_tool_starts_again() -> None:
    async def run() -> str:
        tool = MontyTool(PythonToolSettings())
        await tool("1", TASK)
        await tool.close()
        text = await tool("2", TASK)
        await tool.close()
        await tool.close()
        return text

    assert asyncio.run(run()) == "2"
