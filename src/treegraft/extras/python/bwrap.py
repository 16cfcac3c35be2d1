"""Starts bubblewrap sandboxes and hands them calls: the host's side of
`treegraft.extras.python.worker`.

A sandbox has an isolated network, a read-only system, no files of the caller's except Python and
the named packages, no /proc, and none of the caller's environment. Started by root, its code runs
as "nobody", who owns nothing here; started by another user, as that user without any capability.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from io import FileIO
from pathlib import Path

from treegraft import ToolUnavailable
from treegraft.extras.python import determinism, output, seccomp
from treegraft.extras.python import worker as sandbox_worker
from treegraft.extras.python.output import Printed
from treegraft.extras.python.worker import ENDED, ERROR, KILL, MEMORY, READY, REPORT, START, VALUE
from treegraft.parts import packages

PACKAGES = ("numpy", "scipy", "sympy")
"""Packages imported ahead of calls."""
BESIDES = ("mpmath", "gmpy2")
"""Their required and optional dependencies."""
START_S = 120.0
"""Longest wait for a sandbox to start; its imports take seconds on a busy machine."""
WATCHDOG_S = 5.0
"""How long past the end of a call a worker may stay silent before its sandbox is ended."""
CPU_SLACK_S = 1
"""Processor time granted beyond the wall-clock limit, for starting and ending a call."""

_NOBODY = 65_534
_INSTALL = "apt-get install bubblewrap (or your distribution's package of that name)"
_NAMESPACES = (
    "The kernel must let this user make user namespaces (sysctl kernel.unprivileged_userns_clone=1,"
    " kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0; in a"
    " container, a profile that allows them). Or take tools.python.backend = 'monty'."
)
_LIBRARIES = ("lib", "lib64")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": ":".join(f"/python/{name}" for name in _LIBRARIES),
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": "/worker:/packages",
    "TZ": "UTC",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_CHUNK = 65_536
_MOST_CHUNKS = 17
"""More than a pipe can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one call."""

    max_duration_s: float
    """Wall-clock time of one call."""
    max_memory_mb: int
    """Address space of one call beyond that of the loaded libraries, in MiB."""
    max_files_mb: int
    """Size of a call's private /tmp and of any file in it, in MiB."""
    max_threads: int
    """Threads of one call; it cannot start processes."""
    max_output_chars: int
    """Longest printed text and value, each."""

    @property
    def cpu_s(self) -> int:
        """Processor time of one call, all threads, in whole seconds."""
        return int(self.max_duration_s) + 1 + CPU_SLACK_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one call."""

    kind: str
    """"value", "error", "memory", "timeout" or "died"."""
    printed: str = ""
    """Printed text, capped, ending in a line break unless empty."""
    text: str = ""
    """The value or the error as text, or the end of the process."""


def find_problem() -> str | None:
    """Returns why no sandbox works here and what to do, in a sentence or two; None where a first
    one worked."""
    if not sys.platform.startswith("linux"):
        return "bubblewrap sandboxes need Linux; take tools.python.backend = 'monty'."
    if shutil.which("bwrap") is None:
        return f"bubblewrap is missing: there is no 'bwrap' on the path. Do: {_INSTALL}."
    if not seccomp.is_known():
        return (
            "bubblewrap sandboxes need an x86_64 or aarch64 processor; take tools.python.backend ="
            " 'monty'."
        )
    if text := packages.lacking("the sandbox", "sympy"):
        return f"{text}."
    limits = SandboxLimits(
        max_duration_s=10, max_memory_mb=64, max_files_mb=1, max_threads=4, max_output_chars=100
    )
    # Tried, not looked up: kernels, containers and security modules each forbid it in a way of
    # their own.
    try:
        sandbox = Sandbox(limits, packages=())
    except ToolUnavailable as error:
        return f"{error} {_NAMESPACES}"
    try:
        outcome = sandbox.run("6 * 7")
    finally:
        sandbox.close()
    if outcome.text != "42":
        return f"a first sandbox answered {outcome} where 42 was expected. {_NAMESPACES}"
    return None


class Sandbox:
    """One bubblewrap sandbox, one call at a time; each in a fresh process, isolated from the
    others."""

    def __init__(self, limits: SandboxLimits, packages: Sequence[str] = PACKAGES) -> None:
        """Starts the sandbox and waits until it can take a call.

        Raises `ToolUnavailable`, with what bubblewrap said, where it cannot be started.
        """
        self._limits = limits
        self._is_busy = False
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_S)
        with tempfile.TemporaryFile() as messages:
            with theirs:
                try:
                    ends = theirs.fileno(), messages.fileno()
                    self._process, first_pid = _launch(limits, packages, *ends)
                except BaseException:
                    self._control.close()
                    raise
            # Also at the exit of an interpreter that forgets `close`.
            self._end = weakref.finalize(self, _end, self._process, self._control, first_pid)
            is_ready = False
            with suppress(OSError):
                is_ready = self._control.recv(1) == READY
            if not is_ready:
                self.close()
                messages.seek(0)
                said = messages.read().decode(errors="replace").strip().splitlines()
                raise ToolUnavailable(
                    "the sandbox did not start:"
                    f" {said[-1] if said else 'bubblewrap said nothing'}.",
                    code="sandbox-not-started",
                )
        self._control.settimeout(WATCHDOG_S)

    @property
    def is_alive(self) -> bool:
        """Whether it can take another call."""
        return self._end.alive and self._process.poll() is None

    def run(self, code: str) -> Outcome:
        """Returns the outcome of `code`, at the latest when its time is over.

        A sandbox that dies during the call, or stops answering, is closed; the outcome is "died".
        """
        try:
            self._finish()
            return self._run(code)
        except (OSError, EOFError):
            self.close()
            return Outcome("died", text="its sandbox ended")

    def close(self) -> None:
        """Ends the sandbox and every process in it."""
        self._end()

    def _run(self, code: str) -> Outcome:
        deadline = time.monotonic() + self._limits.max_duration_s
        (output, output_end), (result, result_end) = _pipe(), _pipe()
        with output, result:
            # A file in memory: a pipe would hold 64 KiB and have to be fed with the rest.
            with output_end, result_end, open(os.memfd_create("code"), "w+b") as file:
                file.write(code.encode("utf-8", errors="surrogatepass"))
                file.seek(0)
                ends = [file.fileno(), output_end.fileno(), result_end.fileno()]
                socket.send_fds(self._control, [START], ends)
                self._is_busy = True
            found = _read(output.fileno(), result.fileno(), self._limits.max_output_chars, deadline)
            self._control.sendall(KILL)
        if found is None:
            # No output: how much there was by then is a matter of luck.
            return Outcome("timeout")
        printed, answer = found
        kind, _, text = answer.decode("utf-8", errors="replace").partition("\n")
        if kind in (VALUE, ERROR):
            return Outcome(kind, printed, text)
        if kind == MEMORY:
            return Outcome(MEMORY)
        # No result: the process was ended, by itself or by the kernel.
        status, cpu_s = self._finish()
        ended_by = os.waitstatus_to_exitcode(status)
        # The kernel's limit counts the threads' time together, so it can come before the deadline.
        if ended_by == -signal.SIGKILL and cpu_s > self._limits.cpu_s - 0.5:
            return Outcome("timeout")
        name = signal.Signals(-ended_by).name if ended_by < 0 else f"exit code {ended_by}"
        return Outcome("died", text=name)

    def _finish(self) -> tuple[int, float]:
        """Waits until the last call's processes are gone; returns its wait status and processor
        seconds."""
        # Here and not at the end of a call: its answer need not wait for its processes to die.
        if not self._is_busy:
            return 0, 0.0
        report = b""
        while len(report) < REPORT.size:
            part = self._control.recv(REPORT.size - len(report))
            if not part:
                raise EOFError("its worker ended")
            report += part
        self._is_busy = False
        mark, status, cpu_s = REPORT.unpack(report)
        assert mark == ENDED
        return status, cpu_s


def _read(output: int, result: int, max_chars: int, deadline: float) -> tuple[str, bytes] | None:
    """Returns a call's printed text and result, never more than the caps; None where the result did
    not end before the deadline (a `time.monotonic`)."""
    printed = Printed(max_chars)
    answer = bytearray()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    poll = select.poll()
    poll.register(output, select.POLLIN)
    poll.register(result, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        for end, _ in poll.poll(left * 1000):
            data = os.read(end, _CHUNK)
            if end == output:
                printed.add(decoder.decode(data, final=not data))
                if not data:
                    poll.unregister(end)
            elif data:
                # Characters have four bytes at most; a note about a cut comes on top.
                answer += data[: 4 * max_chars + 1000 - len(answer)]
            else:
                # Everything printed before the end is in the pipe; a flood after it is ignored.
                os.set_blocking(output, False)
                with suppress(BlockingIOError):
                    for _ in range(_MOST_CHUNKS):
                        data = os.read(output, _CHUNK)
                        printed.add(decoder.decode(data, final=not data))
                return printed.text(), bytes(answer)
    return None


def _launch(
    limits: SandboxLimits, packages: Sequence[str], control: int, messages: int
) -> tuple[subprocess.Popen[bytes], int | None]:
    """Returns bubblewrap's process and the sandbox's first process; its start may still fail.

    The first process is given as the host counts; all others end with it. None where bubblewrap
    named none.
    """
    as_root = os.geteuid() == 0
    settings = asdict(limits) | {
        "control": control,
        "packages": list(packages),
        "uid": _NOBODY if as_root else None,
        "cpu_s": limits.cpu_s,
        # The worker of an ordinary user counts too: it runs as the same user.
        "max_threads": limits.max_threads + (1 if as_root else 2),
    }
    (info, info_end), (block_end, block) = _pipe(), _pipe()
    with info, block:
        with info_end, block_end:
            blocks = [block_end.fileno()] if as_root else []
            command = _command(info_end.fileno(), blocks[0] if blocks else None)
            try:
                process = subprocess.Popen(
                    [*command, json.dumps(settings)],
                    env={**_ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath)},
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    pass_fds=[control, info_end.fileno(), *blocks],
                    start_new_session=True,  # Ctrl-C is the caller's to handle
                )
            except OSError as error:
                raise ToolUnavailable(
                    f"bubblewrap cannot be started: {error}", code="sandbox-not-started"
                ) from error
        first_pid = _first_pid(info.fileno())
        if as_root and first_pid is not None:
            # Root's own id for building the sandbox, another for the code: root owns devices and
            # files of this machine.
            with suppress(OSError):
                for kind in ("gid_map", "uid_map"):
                    Path(f"/proc/{first_pid}/{kind}").write_text(
                        f"0 0 1\n{_NOBODY} {_NOBODY} 1\n", encoding="ascii"
                    )
            with suppress(BrokenPipeError):
                block.write(b"x")
    return process, first_pid


def _pipe() -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return FileIO(reader), FileIO(writer, "w")


def _first_pid(info: int) -> int | None:
    told = b""
    while b"}" not in told:
        ready, _, _ = select.select([info], [], [], START_S)
        part = os.read(info, 4096) if ready else b""
        if not part:
            return None
        told += part
    return int(json.loads(told)["child-pid"])


def _command(info: int, block: int | None) -> list[str]:
    """Returns bubblewrap's command line up to the worker's settings."""
    # --unshare-all only tries for a user namespace. As process 1 the worker reaps what it clones.
    parts = ["bwrap", "--unshare-all", "--unshare-user", "--new-session", "--as-pid-1"]
    parts += ["--hostname", "sandbox", "--info-fd", str(info)]
    capabilities = ["CAP_SYS_ADMIN"]  # the worker gives each call its own namespaces
    if block is not None:
        # bwrap waits until its user ids are mapped; the worker then changes to the lesser one.
        parts += ["--userns-block-fd", str(block)]
        capabilities += ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"]
    for name in capabilities:
        parts += ["--cap-add", name]
    parts += _system()
    # bwrap would create missing parents of a file with rights for their owner only.
    package = Path("/worker", *sandbox_worker.__name__.split(".")[:-1])
    for folder in ("/dev", "/packages", "/tmp", *reversed(package.parents[:-1]), package):
        parts += ["--dir", str(folder)]
    # By package, not the whole of site-packages: that may hold code and keys of the user.
    for name in (*PACKAGES, *BESIDES):
        for source in _package_folders(name):
            parts += ["--ro-bind", str(source), f"/packages/{source.name}"]
    for module in (sandbox_worker, seccomp, output, determinism):
        source = Path(str(module.__file__))
        parts += ["--ro-bind", str(source), str(package / source.name)]
    for device in ("null", "zero", "random", "urandom"):
        parts += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    parts += ["--remount-ro", "/"]
    # Without `site`, which would add packages that are not mounted.
    return [*parts, str(_target(_program())), "-s", "-S", "-B", "-P", "-m", sandbox_worker.__name__]


def _system() -> list[str]:
    """Returns the options that show the system's programs and libraries, and what Python needs of
    its own, to be read only."""
    options = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/lib", "/lib32", "/lib64", "/sbin")):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for path in map(Path, ("/etc/ld.so.cache", "/etc/alternatives")):
        options += ["--ro-bind-try", str(path), str(path)]
    home = Path(os.path.expanduser("~")).resolve()
    covers = [home] if Path("/usr") in home.parents else []
    for folder in covers:
        options += ["--tmpfs", str(folder)]
    # Not the whole folder of a Python outside the system: it may be a home, or hold one.
    folders, files = _interpreter()
    for path in (*folders, *files):
        if not path.is_relative_to("/usr") or path.is_relative_to(home):
            target = _target(path)
            # The sandbox's user must be able to reach it; bwrap would make parents of a file with
            # rights for their owner only.
            for parent in reversed(target.parents[:-1]):
                options += ["--dir", str(parent)]
            options += ["--ro-bind", str(path), str(target)]
    # The packages of calls are mounted one by one; any others are the user's business.
    for folder in folders:
        if (folder / "site-packages").is_dir():
            covers.append(_target(folder / "site-packages"))
            options += ["--tmpfs", str(covers[-1])]
    # Last, since nothing can be mounted in a folder that is read-only.
    for folder in covers:
        options += ["--remount-ro", str(folder)]
    return options


@cache
def _interpreter() -> tuple[list[Path], list[Path]]:
    """Returns the folders of the standard library, and Python's program with the shared libraries
    that lie neither in these nor in the system."""
    program = _program()
    name = Path(sys.platlibdir, f"python{sys.version_info.major}.{sys.version_info.minor}")
    prefixes = [Path(prefix).resolve() for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    folders = []
    # The two are one folder as a rule.
    for prefix in dict.fromkeys(prefixes):
        if (prefix / name).is_dir():
            folders.append(prefix / name)
    libraries = [path for prefix in prefixes for path in prefix.glob("lib*/*.so*")]
    ldd = shutil.which("ldd")
    if program.is_relative_to("/usr") or not libraries or ldd is None:
        return folders, [program]
    users = [program, *(file for folder in folders for file in folder.glob("lib-dynload/*.so"))]
    # As `_ENVIRONMENT` has it for the sandbox.
    environment = {"LD_LIBRARY_PATH": ":".join(f"{prefixes[0]}/{name}" for name in _LIBRARIES)}
    told = subprocess.run(
        [ldd, *map(str, users)], env=environment, capture_output=True, text=True, timeout=START_S
    ).stdout
    found = (Path(os.path.normpath(word)) for word in re.findall(r"=> (/\S+)", told))
    system = (Path("/usr"), Path("/lib"), Path("/lib64"), *folders)
    files = [file for file in found if not any(map(file.is_relative_to, system))]
    return folders, list(dict.fromkeys([program, *files]))


def _target(path: Path) -> Path:
    """Returns where a file or folder of Python lies in the sandbox: under a name that tells nothing
    of the host where it can be moved, which takes the program with its libraries."""
    prefix = Path(sys.base_prefix).resolve()
    program = _program()
    is_moved = program.is_relative_to(prefix) and not program.is_relative_to("/usr")
    if is_moved and path.is_relative_to(prefix):
        return Path("/python", path.relative_to(prefix))
    return path


def _program() -> Path:
    # The base of a virtual environment, whose own folder is not mounted.
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _package_folders(name: str) -> list[Path]:
    """Returns a package's folder, and that of the shared libraries that its wheel puts beside
    it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    libraries = folder.with_name(f"{name}.libs")
    return [folder, libraries] if libraries.is_dir() else [folder]


def _end(process: subprocess.Popen[bytes], control: socket.socket, first_pid: int | None) -> None:
    """Ends a sandbox: closing the control socket requests it, killing its first process forces
    it."""
    control.close()
    if first_pid is not None and process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(first_pid, signal.SIGKILL)
    try:
        # bwrap's own process ends after the sandbox's; killed at once it would leave that behind.
        process.wait(WATCHDOG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
