"""The inside of a bubblewrap sandbox: an interpreter with its libraries loaded, and a fresh
child for each call.

The worker is the sandbox's first process. It has one child ready: cloned from it into process,
mount and IPC namespaces of its own, with a private /tmp, limits, no capability and the filter of
`treegraft.extras.python.seccomp`. When the child and all of its namespace are dead, the worker
reports the end and clones the next. It exits when the host closes its end of the control socket.

Only the standard library and three further modules of this folder are inside the sandbox, and no
/proc.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import gc
import importlib
import io
import json
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from treegraft.extras.python.determinism import fix_clock, seed
from treegraft.extras.python.output import cut, show
from treegraft.extras.python.seccomp import install

READY = b"r"
START = b"c"
KILL = b"k"
ENDED = b"d"
"""Worker to host: the first child waits; host to worker: run (with three descriptors), stop; worker
to host: over."""
REPORT = struct.Struct("=cid")
"""ENDED, the wait status, processor seconds."""
VALUE = "value"
ERROR = "error"
MEMORY = "memory"
"""First line of a child's result: a value, an exception, or out of memory."""

_NEW_NAMESPACES = 0x20000 | 0x20000000 | 0x08000000
"""CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWIPC."""
_CLONE_NUMBER = {"x86_64": 56, "aarch64": 220}
_PRIVATE = 0x4000 | 0x40000
"""MS_REC, MS_PRIVATE."""
_PLAIN_FILES = 2 | 4 | 8
"""MS_NOSUID, MS_NODEV, MS_NOEXEC."""
_CAPABILITIES_VERSION = 0x20080522
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TZ": "UTC"}
_MAX_FILES = 64
"""Open descriptors of one call."""
_PAGE = 65_536

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serves calls until the host closes its end."""
    settings = json.loads(sys.argv[1])
    for package in settings["packages"]:
        importlib.import_module(package)
    if "numpy" in sys.modules:
        _warm_up()
    for name in ("exit", "quit"):  # as `site` does, which -S leaves out
        setattr(builtins, name, sys.exit)
    fix_clock()
    settings["start_bytes"] = _address_space()
    gc.collect()
    # The children share these pages: a collection would copy them all.
    gc.freeze()
    with socket.socket(fileno=settings["control"]) as control:
        _serve(control, settings)


def _warm_up() -> None:
    """Fills the caches and buffers of the libraries, so that no call pays for their first use."""
    import numpy
    import scipy.linalg
    import sympy

    square = numpy.eye(64)
    scipy.linalg.solve(square @ square, square)
    x = sympy.Symbol("x")
    sympy.solve(sympy.expand((x - 1) * (x + 2)), x)


def _serve(control: socket.socket, settings: Mapping[str, Any]) -> None:
    child, line = _start_child(control, settings)
    if line.recv(1) != READY:
        sys.exit("the sandbox's first child could not be set up")
    control.sendall(READY)
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not order:
            return
        if order != START:
            continue  # a stop that came after the end
        # Passed on unread: nothing of a call may stay in the memory that later children share.
        with suppress(OSError):
            socket.send_fds(line, [START], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(line, 0)  # hanging up, the end of the child, is always reported
        ready = {descriptor for descriptor, _ in poll.poll()}
        is_host_gone = control.fileno() in ready and not control.recv(1)
        # The first process of its namespace: all others in it die too.
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        line.close()
        if is_host_gone:
            return
        control.sendall(REPORT.pack(ENDED, status, usage.ru_utime + usage.ru_stime))
        # Ahead of the next call, which then waits for neither the clone nor its limits.
        child, line = _start_child(control, settings)


def _start_child(control: socket.socket, settings: Mapping[str, Any]) -> tuple[int, socket.socket]:
    """Returns the id of a process cloned from this one, waiting for a call, and the line to it."""
    line, other = socket.socketpair()
    child = _clone()
    if child == 0:
        try:
            control.close()
            line.close()
            _confine(settings)
            other.sendall(READY)
            _run_call(other, settings)
        except BaseException as error:
            with suppress(BaseException):
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            # Without the cleanup of an interpreter that is a copy.
            os._exit(1)
    other.close()
    return child, line


def _clone() -> int:
    """Returns the child's process id, 0 in the child, which is the first process of its
    namespaces."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    number = _CLONE_NUMBER[os.uname().machine]
    # Not os.fork: namespaces for processes can otherwise be had for a grandchild only. Nothing but
    # this thread runs here.
    pid = ctypes.PyDLL(None, use_errno=True).syscall(
        number, ctypes.c_long(_NEW_NAMESPACES | signal.SIGCHLD), 0, 0, 0, 0
    )
    failure = ctypes.get_errno()
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(failure, f"no child in namespaces of its own: {os.strerror(failure)}")
    return int(pid)


def _confine(settings: Mapping[str, Any]) -> None:
    """Drops every right of this process that computing does not need."""
    files = settings["max_files_mb"] * 2**20
    options = f"size={files},nr_inodes=1024,mode=0700"
    if settings["uid"] is not None:
        options += f",uid={settings['uid']},gid={settings['uid']}"
    # First, else the mount below would show up in the worker's namespace too.
    _mount(b"none", b"/", b"", _PRIVATE, b"")
    _mount(b"tmpfs", b"/tmp", b"tmpfs", _PLAIN_FILES, options.encode())
    if settings["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    os.chdir("/tmp")
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_FSIZE: files,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_NPROC: settings["max_threads"],
        resource.RLIMIT_SIGPENDING: _MAX_FILES,
        resource.RLIMIT_AS: settings["start_bytes"] + settings["max_memory_mb"] * 2**20,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    # After the mounts and the change of user, which need them.
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
    # Last, since the filter refuses what is done above.
    install(_libc)


def _mount(source: bytes, target: bytes, kind: bytes, flags: int, options: bytes) -> None:
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), options) != 0:
        failure = ctypes.get_errno()
        raise OSError(failure, f"mounting {target.decode()}: {os.strerror(failure)}")


def _address_space() -> int:
    """Returns the address space of this process in bytes, found by bisection over limits: there is
    no /proc."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    low = 0
    high = 2**47
    while high - low > _PAGE:
        middle = (low + high) // 2
        try:
            resource.setrlimit(resource.RLIMIT_AS, (middle, before[1]))
            mmap.mmap(-1, _PAGE).close()
            high = middle
        except (OSError, MemoryError, ValueError):
            low = middle
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    return high


# --- one call, in its child -----------------------------------------------------------------------


def _run_call(line: socket.socket, settings: Mapping[str, Any]) -> None:
    order, descriptors, _, _ = socket.recv_fds(line, 1, 3)
    if order != START:
        return
    code_end, output_end, result_end = descriptors
    # The line stays open: its closing, at the latest by death, is for the worker the end of the
    # call.
    empty = os.open("/dev/null", os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(output_end, 1)
    os.dup2(output_end, 2)
    os.close(empty)
    os.close(output_end)
    with open(code_end, "rb") as source:
        code = source.read().decode("utf-8", errors="surrogatepass")
    # Through a buffer of its own for each: a flood must not pay a system call a character.
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False), 65_536)
        file = io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)
        setattr(sys, name, file)
    warnings.simplefilter("ignore")
    seed()
    kind, text = _outcome(code, settings["max_output_chars"])
    with suppress(BaseException):  # the code may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()
    result = f"{kind}\n{text}".encode("utf-8", errors="replace")
    while result:
        result = result[os.write(result_end, result) :]
    # Told before the slow part of dying begins.
    os.close(result_end)
    os._exit(0)


def _outcome(code: str, max_chars: int) -> tuple[str, str]:
    # Given back when the code is over, so that an end for lack of memory can still be told.
    reserve = [bytearray(2**20)]
    try:
        try:
            return VALUE, _evaluate(code, max_chars)
        finally:
            reserve.clear()
    except SystemExit as error:
        if error.code in (None, 0):
            return VALUE, ""
        return ERROR, f"SystemExit: {cut(str(error.code), max_chars)}"
    except MemoryError:
        return MEMORY, ""
    except BaseException as error:
        return ERROR, _describe(error, max_chars)


def _evaluate(code: str, max_chars: int) -> str:
    """Returns the last expression's value as text, empty where there is none or it is None."""
    # A module, not a bare dict: pickle and dataclasses look classes up in `sys.modules`.
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    tree = ast.parse(code, "<python>")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    exec(compile(tree, "<python>", "exec"), module.__dict__)
    if not isinstance(last, ast.Expr):
        return ""
    value = eval(compile(ast.Expression(last.value), "<python>", "eval"), module.__dict__)
    return "" if value is None else show(value, max_chars)


def _describe(error: BaseException, max_chars: int) -> str:
    try:
        # A KeyError shows the repr of its key.
        is_key = isinstance(error, KeyError) and len(error.args) == 1
        message = str(error.args[0] if is_key else error)
    except BaseException:  # a message that cannot be made
        message = ""
    name = type(error).__name__
    return f"{name}: {cut(message, max_chars)}" if message else name


if __name__ == "__main__":
    main()
