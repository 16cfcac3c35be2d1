"""The bubblewrap python tool, and attacks on both python tools: real sandboxes, a real host."""

from __future__ import annotations

import ast
import asyncio
import errno
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.support.attacks import (
    ATTACKS,
    QUICK,
    SIGN,
    STOPPED,
    UNCONTAINED,
    UNCONTAINED_AS_ROOT,
    code_of,
)
from tests.support.error_codes import raises_code

from treegraft.core.errors import ToolError
from treegraft.core.interfaces import Tool
from treegraft.core.types import Observation, Task, ToolCall
from treegraft.extras.python import bwrap, output, seccomp
from treegraft.extras.python.bwrap import Sandbox, SandboxLimits
from treegraft.extras.python.bwrap_tool import BwrapTool
from treegraft.extras.python.monty_tool import MontyTool
from treegraft.extras.python.output import NO_OUTPUT
from treegraft.extras.python.plugin import PythonToolSettings
from treegraft.settings.load import load_config
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.build import build_tools
from treegraft.tools.toolbox import Toolbox

T = TypeVar("T")
TASK = Task(id="t/1", question="?", reference=())
# Where it is installed, a sandbox that does not start is a failure.
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")
SMALL = SandboxLimits(
    max_duration_s=20, max_memory_mb=256, max_files_mb=4, max_threads=4, max_output_chars=2000
)
BARE: tuple[str, ...] = ()


def sandboxes() -> set[int]:
    """Live processes of bubblewrap below this one, and their first children."""
    found = set()
    parents = {os.getpid()}
    while parents:
        below = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    name, _, rest = (entry / "stat").read_text().rpartition(")")
                except OSError:
                    continue
                state, above = rest.split()[:2]
                if (
                    int(above) in parents
                    and state != "Z"
                    and ("(bwrap" in name or parents != {os.getpid()})
                ):
                    below.add(int(entry.name))
        found |= below
        parents = below
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_all(
    *bodies: str, limits: SandboxLimits = SMALL, packages: tuple[str, ...] = BARE
) -> list[bwrap.Outcome]:
    sandbox = Sandbox(limits, packages=packages)
    try:
        return [sandbox.run(body) for body in bodies]
    finally:
        sandbox.close()


def test_the_worker_finds_its_modules_where_they_are_mounted() -> None:
    """Without bubblewrap too: a module that is moved must not end the sandbox unseen, by a skip."""
    command = bwrap._command(3, None)
    mounted = {
        target: Path(source)
        for option, source, target in zip(command, command[1:], command[2:], strict=False)
        if option == "--ro-bind" and target.startswith("/worker/")
    }
    assert f"/worker/{command[-1].replace('.', '/')}.py" in mounted
    for source in mounted.values():
        for name in re.findall(r"^(?:from|import) (treegraft[\w.]*)", source.read_text(), re.M):
            assert f"/worker/{name.replace('.', '/')}.py" in mounted


@needs_bwrap
def test_the_libraries_work_and_values_are_shown() -> None:
    async def run() -> list[str]:
        tool = BwrapTool(PythonToolSettings(max_duration_s=20, num_workers=1))
        assert isinstance(tool, Tool)
        try:
            return [
                await tool("import sympy\nx = sympy.Symbol('x')\nsympy.integrate(x**2, x)", TASK),
                await tool(
                    "import numpy as np\nprint(np.arange(3).sum())\nnp.eye(2).tolist()", TASK
                ),
                await tool(
                    "from scipy import optimize\nround(optimize.brentq(lambda x: x**2 - 2, 0,"
                    " 2), 6)",
                    TASK,
                ),
                await tool("x = 1", TASK),
            ]
        finally:
            await tool.close()

    assert asyncio.run(run()) == ["x**3/3", "3\n[[1.0, 0.0], [0.0, 1.0]]", "1.414214", NO_OUTPUT]
    assert sandboxes() == set()


@needs_bwrap
def test_the_whole_standard_library_is_there() -> None:
    # Also where Python lies in a folder that is closed to the user that the code runs as.
    names = {
        "statistics",
        "queue",
        "graphlib",
        "sqlite3",
        "multiprocessing",
        "xml.etree.ElementTree",
        "urllib.request",
        "zoneinfo",
    }
    (outcome,) = run_all(f"import {', '.join(sorted(names))}\nstatistics.median([3, 1, 2])")
    assert (outcome.kind, outcome.text) == ("value", "2")


@needs_bwrap
def test_a_call_reads_like_montys() -> None:
    bodies = [
        "print('a'); 'b'",
        "1 / 0",
        "print('so far')\n[][1]",
        "raise ValueError",
        "raise KeyError('k')",
        "{3, 1, 2}",
    ]
    bodies += [
        (
            "import time, datetime\ntime.sleep(99)\n(time.time(), time.perf_counter(),"
            " datetime.datetime.now())"
        ),
        "assert False",
    ]
    bodies += [
        "if __name__ == '__main__':\n    print('main')",
        "input()",
        "import sys\nprint('e', file=sys.stderr)\nsys.exit(0)",
    ]

    async def monty(body: str) -> str:
        tool = MontyTool(PythonToolSettings(max_duration_s=20))
        try:
            return await tool(body, TASK)
        except ToolError as error:
            return str(error)
        finally:
            await tool.close()

    ours = [f"{outcome.printed}{outcome.text}".rstrip("\n") for outcome in run_all(*bodies)]
    assert ours[:-2] == [asyncio.run(monty(body)) for body in bodies[:-2]]
    assert ours[-2:] == ["EOFError: EOF when reading a line", "e"]


@needs_bwrap
def test_limits_are_told_and_the_next_call_works() -> None:
    limits = SandboxLimits(
        max_duration_s=2, max_memory_mb=64, max_files_mb=1, max_threads=4, max_output_chars=10
    )
    bodies = [
        "while True: pass",
        "'a' * 10**9",
        "print('x' * 100)",
        "'y' * 100",
        "import ctypes\nctypes.string_at(0)",
        "6 * 7",
    ]
    kinds = [
        (outcome.kind, outcome.printed + outcome.text)
        for outcome in run_all(*bodies, limits=limits)
    ]
    assert kinds == [
        ("timeout", ""),
        ("memory", ""),
        ("value", "x" * 10 + "\n[cut after 10 of 101 printed characters]\n"),
        ("value", "'" + "y" * 9 + "\n[cut after 10 characters]"),
        ("died", "SIGSEGV"),
        ("value", "42"),
    ]


@needs_bwrap
def test_nothing_passes_from_call_to_call() -> None:
    look = (
        "import os, sys, random\n(os.listdir('/tmp'), hasattr(sys, 'mark'), random.random(),"
        " 'secret' in globals())"
    )
    leave = (
        "import os, sys, random\nopen('/tmp/left', 'w').write('x')\nsys.mark ="
        " 1\nrandom.seed(9)\nsecret = 1"
    )
    before, _, after = run_all(look, leave, look)
    assert before == after
    assert before.text.startswith("([], False, 0.84")


@needs_bwrap
def test_code_is_never_in_the_memory_of_the_next_call() -> None:
    # The worker passes descriptors on unread; a scan of the heap finds what it scans for only once
    # it is put there.
    scan = """
import gc, sys
word = bytes(reversed(b'drow-neddih')).decode()
dicts = [o for o in gc.get_objects() if isinstance(o, dict) and o is not globals()]
found = [o for o in dicts if word in map(str, o.values())]
len(found)
"""
    first, second = run_all("kept = 'hidden-word'\nprint(kept)", scan)
    assert first.printed == "hidden-word\n"
    assert second.text == "0"


@needs_bwrap
def test_long_code_and_odd_characters_arrive_whole() -> None:
    texts = run_all(
        "x = '" + "a" * 300_000 + "'\nlen(x)",
        "'Größe 数学 \U0001f600'",
        "print('\\ud800')",
        "'\\x00'",
    )
    assert [outcome.printed + outcome.text for outcome in texts] == [
        "300000",
        "'Größe 数学 \U0001f600'",
        "?\n",
        r"'\x00'",
    ]


@needs_bwrap
def test_a_killed_sandbox_is_an_error_and_the_next_call_works() -> None:
    async def run() -> tuple[Observation, Observation]:
        box = Toolbox(
            [BwrapTool(PythonToolSettings(max_duration_s=60, num_workers=1))],
            ToolsSettings(deadline_s=90, max_output_chars=200, cache=False, max_concurrent=4),
        )
        await box.call(ToolCall("python", "1"), TASK)
        running = asyncio.create_task(box.call(ToolCall("python", "while True: pass"), TASK))
        await asyncio.sleep(0.5)
        for pid in sandboxes():
            os.kill(pid, signal.SIGKILL)
        stopped = await running
        after = await box.call(ToolCall("python", "1 + 1"), TASK)
        await box.close()
        return stopped, after

    stopped, after = asyncio.run(run())
    # Of bwrap's two processes either may be seen to die first.
    assert stopped.is_error and stopped.text in (
        "the code was stopped: its process died (its sandbox ended)",
        "the code was stopped: its process died (SIGKILL)",
    )
    assert after == Observation(text="2")
    assert sandboxes() == set()


@needs_bwrap
def test_no_sandbox_outlives_its_interpreter() -> None:
    code = (
        "import os; from tests.extras import test_sandbox as t\nbox ="
        " t.Sandbox(t.SMALL, packages=()); print(box.run('6 * 7').text, *t.sandboxes(),"
        " flush=True); os._exit(0)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=root, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    value, *pids = done.stdout.split()
    assert value == "42"
    assert pids
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home with a key in it, whose Python was configured with the home as its prefix."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix).resolve()
    tests = Path(__file__).parents[1]

    def link(source: str, target: str) -> str:
        try:
            os.link(os.path.realpath(source), target)
        except OSError:  # another file system
            shutil.copy2(source, target)
        return target

    # Not pytest's folder, which is closed to other users.
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "bin").mkdir()
        link(str(bwrap._program()), str(folder / "bin" / name))
        left_out = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib")
        library = Path("lib", name)
        shutil.copytree(prefix / library, folder / library, copy_function=link, ignore=left_out)
        for file in prefix.glob("lib/*.so*"):
            link(str(file), str(folder / "lib" / file.name))
        package = Path(bwrap.__file__).parents[2]
        shutil.copytree(package, folder / "src" / "treegraft", copy_function=link, ignore=left_out)
        link(str(tests / "support" / "attacks.py"), str(folder / "src" / "attacks.py"))
        for place in (folder / ".ssh" / "id_test", folder / library / "site-packages" / "own_key"):
            place.parent.mkdir()
            place.write_text("s3cret")
        yield folder
    finally:
        shutil.rmtree(folder)


IN_A_HOME = """
import os, socket, sys, tempfile
from pathlib import Path
import attacks
from treegraft.extras.python.bwrap import Sandbox, SandboxLimits
home = Path(sys.prefix)
limits = SandboxLimits(
    max_duration_s=1, max_memory_mb=128, max_files_mb=4, max_threads=8, max_output_chars=2000
)
os.environ["TREEGRAFT_SECRET"] = "s3cret"
with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
    secret = Path(folder, "secret")
    secret.write_text("s3cret")
    box = Sandbox(limits, packages=())
    seen = box.run(
        "import os, sqlite3, ssl\\n"
        "tops = [n for n in os.listdir('/') if n != 'usr' and not os.path.islink('/' + n)]\\n"
        "names = {n for top in tops for a, d, f in os.walk('/' + top) for n in d + f}\\n"
        f"[n for n in ('.ssh', 'id_test', 'own_key', 'attacks.py', {home.name!r}) if n in names]"
    )
    print(os.getuid(), seen.kind, seen.text)
    for name in attacks.QUICK:
        code = attacks.code_of(
            name, secret=str(secret), pid=os.getpid(), port=server.getsockname()[1]
        )
        answer = box.run(code)
        if attacks.SIGN in answer.printed or "s3cret" in answer.printed + answer.text:
            print(name, answer)
    print(box.run("6 * 7").text, len(attacks.QUICK), secret.read_text(), os.listdir(folder))
    box.close()
"""


@needs_bwrap
@pytest.mark.parametrize(
    "user",
    # Root's attacks are contained in the tests above, where these run as root.
    [pytest.param(0, marks=pytest.mark.slow), 12_345] if os.geteuid() == 0 else [os.geteuid()],
)
def test_neither_root_nor_an_ordinary_user_shows_a_home_that_holds_python(
    user: int, home: Path
) -> None:
    """And the attacks are contained for both: an ordinary user's code runs as that user."""
    (python,) = (home / "bin").iterdir()
    for place in (home, home / ".ssh", home / ".ssh" / "id_test"):
        os.chown(place, user, -1)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(home / "src"),
        "LD_LIBRARY_PATH": str(home / "lib"),
        "HOME": str(home),
    }
    as_user: dict[str, Any] = {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(
        [python, "-B", "-S", "-c", IN_A_HOME],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        **(as_user if os.geteuid() == 0 else {}),
    )
    assert done.stdout == f"{user} value []\n42 {len(QUICK)} s3cret ['secret']\n", done.stderr


@needs_bwrap
@pytest.mark.parametrize("user", [0, 12_345] if os.geteuid() == 0 else [os.geteuid()])
def test_the_systems_own_python_will_do(user: int, home: Path) -> None:
    """Whose folder is the system's, and is shown with it."""
    python = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    if not python.exists():
        pytest.skip(f"there is no {python}")
    code = (
        "from treegraft.extras.python.bwrap import Sandbox, SandboxLimits\n"
        "box = Sandbox(SandboxLimits(max_duration_s=9, max_memory_mb=64, max_files_mb=1,"
        " max_threads=4, max_output_chars=99), packages=())\n"
        "print(box.run('import sys, ssl, sqlite3; sys.prefix').text)"
    )
    as_user: dict[str, Any] = {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(
        [python, "-B", "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(home / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        **(as_user if os.geteuid() == 0 else {}),
    )
    assert done.stdout == "'/usr'\n", done.stderr


CHECKED = ("_CLONE", "_SOCKETPAIR", "_FLOCK", "_IOCTL", "_FCNTL", "_PRCTL")
"""System calls whose arguments the filter looks at."""


def checked(machine: str = platform.machine()) -> dict[str, int]:
    column = ("x86_64", "aarch64").index(machine)
    return {name: getattr(seccomp, name)[column] for name in CHECKED}


def kernel_answers(numbers: str) -> dict[int, int]:
    """The errors of calls by number with arguments that no call takes; 0 for one that passed."""
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfound = {}\n"
        f"for number in {numbers}:\n    ctypes.set_errno(0)\n"
        "    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)\n"
        "    found[number] = ctypes.get_errno() if value == -1 else 0\nfound"
    )
    (outcome,) = run_all(code, limits=replace(SMALL, max_output_chars=100_000))
    found: dict[int, int] = ast.literal_eval(outcome.text)
    return found


@needs_bwrap
def test_every_system_call_that_is_not_named_is_refused() -> None:
    """Of 1,024 numbers, those of later kernels included; and the second table of x86-64."""
    named = {*seccomp.allowed(), *checked().values()}
    if platform.machine() == "x86_64":
        # uretprobe and uprobe pass by every filter; whoever calls them is killed (SIGILL).
        named |= {335, 336}
    found = kernel_answers(f"sorted(set(range(1024)) - {named})")
    assert len(found) == 1024 - len(named) > 800
    newer = seccomp._NEWER
    assert {found[number] for number in found if number < newer} == {errno.EPERM}
    assert {found[number] for number in found if number >= newer} == {errno.ENOSYS}
    odd = (2**30 + 39, 2**30, 2**31 - 1)
    assert kernel_answers(repr(odd)) == dict.fromkeys(odd, errno.ENOSYS)
    # Arguments of -1 are none that these let pass.
    numbers = checked()
    assert kernel_answers(str([numbers[name] for name in CHECKED[1:]])) == {
        numbers["_SOCKETPAIR"]: errno.EPERM,
        numbers["_FLOCK"]: errno.ENOLCK,
        numbers["_IOCTL"]: errno.ENOTTY,
        numbers["_FCNTL"]: errno.EPERM,
        numbers["_PRCTL"]: errno.EPERM,
    }


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_lets_pass_what_its_table_names(machine: str) -> None:
    """Read by an interpreter of its instructions, so for the processor that is not at hand too."""
    steps = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))

    def verdict(number: int, first: int = 0, second: int = 0, arch: int | None = None) -> int:
        arch = seccomp._ARCHES[machine] if arch is None else arch
        data = {0: number, 4: arch, 16: first, 24: second}
        place = 0
        value = 0
        while True:
            code, if_true, if_false, constant = steps[place]
            place += 1
            if code == 0x06:
                return int(constant)
            if code == 0x20:
                value = data[constant]
            elif code == 0x54:
                value &= constant
            else:
                test = {0x15: value == constant, 0x35: value >= constant, 0x25: value > constant}
                test[0x45] = bool(value & constant)
                place += if_true if test[code] else if_false

    allow = 0x7FFF0000
    refuse = 0x50000 | errno.EPERM
    absent = 0x50000 | errno.ENOSYS
    numbers = checked(machine)
    named = set(seccomp.allowed(machine))
    assert not named & set(numbers.values())
    for number in set(range(2000)) - set(numbers.values()):
        expected = allow if number in named else absent if number >= 424 else refuse
        assert verdict(number) == expected
    assert verdict(0, arch=0x40000003) == 0x80000000  # 32 bits
    clone, pair, lock = (numbers[name] for name in ("_CLONE", "_SOCKETPAIR", "_FCNTL"))
    assert [verdict(clone, flags) for flags in (0x3D0F00, 17, 0)] == [allow, refuse, refuse]
    stream = socket.SOCK_STREAM
    datagram = socket.SOCK_DGRAM
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    assert [
        verdict(pair, *given) for given in ((1, stream), (1, stream | flags), (1, datagram), (2, 1))
    ] == [allow, allow, refuse, refuse]
    assert [verdict(lock, 3, command) for command in (1, 6, 7, 37, 1024, 1031)] == [
        allow,
        0x50000,
        0x50000,
        refuse,
        refuse,
        refuse,
    ]


@needs_bwrap
def test_what_computing_needs_passes_the_filter() -> None:
    bodies = {
        (
            "import threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()"
        ): "1\n",
        (
            "import asyncio\nasync def run():\n    await asyncio.sleep(0.01)\n"
            "    return await asyncio.to_thread(lambda: 7)\nasyncio.run(run())"
        ): "7",
        (
            "import sqlite3\na, b = (sqlite3.connect('/tmp/x', timeout=0) for n in range(2))\n"
            "a.execute('create table t (n)'); a.execute('insert into t values (5)'); a.commit()\n"
            "b.execute('select * from t').fetchall()"
        ): "[(5,)]",
        (
            "import tempfile, shutil, tarfile, os\nopen('/tmp/a', 'w').write('x')\n"
            "shutil.copy2('/tmp/a', '/tmp/b')\n"
            "with tarfile.open('/tmp/t.gz', 'w:gz') as tar: tar.add('/tmp/a')\n"
            "with tempfile.TemporaryDirectory() as name: shutil.move('/tmp/b', name)\n"
            "sorted(os.listdir('/tmp'))"
        ): "['a', 't.gz']",
        (
            "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('rang'))\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.05)\nsignal.pause()"
        ): "rang\n",
        "import mmap\nm = mmap.mmap(-1, 4096); m[:2] = b'hi'; bytes(m[:2])": "b'hi'",
        "import shelve\nwith shelve.open('/tmp/s') as s: s['a'] = 1; print(dict(s))": "{'a': 1}\n",
        "import ssl, hashlib, zoneinfo\nhashlib.sha256(b'').hexdigest()[:4]": "'e3b0'",
        "import multiprocessing\na, b = multiprocessing.Pipe(); a.send([1]); b.recv()": "[1]",
        "import ctypes\nctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda n: n + 1)(3)": "4",
        "import os, uuid, secrets\nos.cpu_count() > 0, len(secrets.token_hex(4))": "(True, 8)",
    }
    outcomes = run_all(*bodies)
    assert [outcome.printed + outcome.text for outcome in outcomes] == list(bodies.values())


@needs_bwrap
def test_what_the_kernel_holds_for_a_call_is_bounded() -> None:
    """Every descriptor a socket, all of them full: the most that a call can leave unread."""
    code = (
        "import socket\nheld, size = [], 0\ntry:\n    while True: held += socket.socketpair()\n"
        "except OSError as error: print(error)\nfor one in held:\n    one.setblocking(False)\n"
        "    try:\n        while True: size += one.send(bytes(60_000))\n"
        "    except BlockingIOError: pass\nsize"
    )
    (outcome,) = run_all(code)
    assert outcome.printed == "[Errno 24] Too many open files\n"
    assert 1_000_000 < int(outcome.text) < 16 * 2**20


@needs_bwrap
def test_locks_of_a_call_do_not_reach_the_host() -> None:
    """On a file that host and sandbox share: granted inside, not there outside."""
    ours = Path(str(output.__file__)).stat().st_ino
    wait = (
        "import fcntl, threading\nfile = open('/worker/treegraft/extras/python/output.py')\n"
        "fcntl.lockf(file, fcntl.LOCK_SH)\nthreading.Event().wait(0.5)\n'granted'"
    )
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(run_all, wait)
        found: set[str] = set()
        while not call.done():
            found |= set(Path("/proc/locks").read_text().split())
            time.sleep(0.02)
        assert call.result()[0].text == "'granted'"
    assert not [word for word in found if word.endswith(f":{ours}")]


def test_where_bubblewrap_is_missing_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with raises_code("bwrap-unusable"):
        build_tools(
            load_config({"tools": {"use": ["python"], "python": {"backend": "bwrap"}}}).tools, []
        )


def test_where_namespaces_are_forbidden_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with raises_code("bwrap-unusable"):
        BwrapTool(PythonToolSettings())


# Attacks


def aim(
    attack: Callable[[Path, int], Coroutine[Any, Any, T]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> T:
    """Runs the attack on a host with a secret file, a secret in the environment and a server;
    checks them afterwards."""
    monkeypatch.setenv("TREEGRAFT_SECRET", "s3cret")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    names = set(os.listdir("/tmp")) | {""}
    modes = [os.stat(f"/dev/{name}").st_mode for name in ("null", "zero", "random")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        result = asyncio.run(attack(secret, server.getsockname()[1]))
        with pytest.raises(TimeoutError):
            server.accept()
    assert secret.read_text() == "s3cret"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert not {"left", "link", "up", "disk"} & (set(os.listdir("/tmp")) - names)
    assert [os.stat(f"/dev/{name}").st_mode for name in ("null", "zero", "random")] == modes
    return result


@pytest.mark.parametrize("backend", ["monty", pytest.param("bwrap", marks=needs_bwrap)])
def test_attacks_are_contained(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def attack(secret: Path, port: int) -> dict[str, Observation]:
        tool: Tool = (
            MontyTool(PythonToolSettings(max_duration_s=1.0))
            if backend == "monty"
            else BwrapTool(PythonToolSettings(max_duration_s=1.0))
        )
        box = Toolbox(
            [tool],
            ToolsSettings(deadline_s=60, max_output_chars=500, cache=False, max_concurrent=2),
        )
        codes = [code_of(name, secret=str(secret), pid=os.getpid(), port=port) for name in ATTACKS]
        answers = await asyncio.gather(
            *(box.call(ToolCall("python", code), TASK) for code in codes)
        )
        sound = await box.call(ToolCall("python", "6 * 7"), TASK)
        assert sound.text == "42" or sound.text.startswith("TimeoutError")
        await box.close()
        return dict(zip(ATTACKS, answers, strict=True))

    answers = aim(attack, tmp_path, monkeypatch)
    assert len(answers) >= 60
    assert [
        name for name, answer in answers.items() if SIGN in answer.text or "s3cret" in answer.text
    ] == []
    assert all(len(answer.text) <= 500 for answer in answers.values())
    assert [name for name in STOPPED if not answers[name].is_error] == []
    assert sandboxes() == set()


def test_monty_writes_nothing_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does it leave its folder behind."""
    before = set(Path(tempfile.gettempdir()).glob("treegraft-monty-*"))

    async def run() -> list[str]:
        tool = MontyTool(PythonToolSettings(max_duration_s=2))
        told = []
        for code in ("repr(['a' * 10**6] * 10**4)", "('x' * 10**6).join(['a'] * 10**6)", "6 * 7"):
            try:
                told.append(await tool(code, TASK))
            except ToolError as error:
                told.append(str(error))
        await tool.close()
        return told

    *errors, value = asyncio.run(run())
    assert len(errors) == 2 and all("was stopped" in error for error in errors)
    assert value == "42"
    assert capfd.readouterr() == ("", "")
    assert set(Path(tempfile.gettempdir()).glob("treegraft-monty-*")) <= before


def succeeds(name: str, folder: Path, port: int) -> bool:
    """Whether the attack reaches what it is after in a plain process; the "caller" is one that
    nobody needs."""
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text("s3cret")
    victim = subprocess.Popen(["sleep", "600"])
    try:
        code = code_of(name, secret=str(secret), pid=victim.pid, port=port).replace(
            "'/tmp/link'", repr(str(folder / "link"))
        )
        # A shell in between, for the attack on the parent.
        command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, code]
        env = {**os.environ, "TREEGRAFT_SECRET": "s3cret"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=env, cwd=folder
        )
        return SIGN in done.stdout
    finally:
        victim.kill()
        victim.wait()


def test_the_attacks_do_harm_where_nothing_contains_them(tmp_path: Path) -> None:
    # Else their silence would say nothing.
    names = [*UNCONTAINED, *(UNCONTAINED_AS_ROOT if os.geteuid() == 0 else ())]
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server, ThreadPoolExecutor(2) as threads:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        folders = [tmp_path / str(number) for number in range(len(names))]
        try:
            done = list(
                threads.map(
                    lambda name, folder: succeeds(name, folder, server.server_port), names, folders
                )
            )
        finally:
            server.shutdown()
            thread.join()
    assert [name for name, is_harmful in zip(names, done, strict=True) if not is_harmful] == []


class Page(BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


# Load


@needs_bwrap
@pytest.mark.slow
def test_two_thousand_calls_from_64_trajectories_leak_nothing() -> None:
    async def run() -> tuple[int, int, dict[str, float]]:
        tool = BwrapTool(PythonToolSettings(max_duration_s=20))
        box = Toolbox(
            [tool],
            ToolsSettings(deadline_s=120, max_output_chars=200, cache=False, max_concurrent=16),
        )
        await box.call(ToolCall("python", "1"), TASK)
        before = (open_files(), len(sandboxes()))

        async def trajectory(row: int) -> int:
            right = 0
            for step in range(row * 2000 // 64, (row + 1) * 2000 // 64):
                if step % 10 == 0:
                    call = ToolCall(
                        "python", f"open('/tmp/{step}', 'w').write('x')\nraise ValueError({step})"
                    )
                    right += (await box.call(call, TASK)).text == f"ValueError: {step}"
                else:
                    right += (
                        await box.call(ToolCall("python", f"{step} * {step}"), TASK)
                    ).text == str(step * step)
            return right

        right = sum(await asyncio.gather(*(trajectory(row) for row in range(64))))
        await asyncio.sleep(1)
        assert open_files() <= before[0] + 2
        # Each of the two sandboxes: bubblewrap, its first process, the child that waits.
        assert len(sandboxes()) <= 6
        metrics = box.take_metrics()
        await box.close()
        return right, before[0], metrics

    temporary = set(os.listdir("/tmp"))
    right, _, metrics = asyncio.run(run())
    assert right == 2000
    assert metrics["tools/python_calls"] == 2001
    assert metrics["tools/python_failure_frac"] == pytest.approx(200 / 2001)
    assert sandboxes() == set()
    assert not {str(step) for step in range(2000)} & (set(os.listdir("/tmp")) - temporary)


def test_a_sandbox_that_does_not_start_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises_code("sandbox-not-started"):
        Sandbox(SMALL, packages=BARE)
