"""Compiling kernels with the system's C compiler, once per machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from treegraft.core.errors import KernelError

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 120.0
HEADER = "vectors.h"


def find_compiler() -> str | None:
    """Returns the path of $CC, cc, gcc or clang; None where there is none."""
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        if found := shutil.which(name):
            return found
    return None


def compiled(name: str, definitions: Sequence[str]) -> Path:
    """Returns the shared library of {name}.c with these -D options, from the user's cache folder
    where it was made before.

    It depends on the sources, the compiler and the processor.

    Raises:
        KernelError: no compiler, or it failed.
    """
    sources = {
        file: resources.files("treegraft.policy.kernels").joinpath(file).read_bytes()
        for file in (f"{name}.c", HEADER)
    }
    compiler = find_compiler()
    if compiler is None:
        raise KernelError(
            'no C compiler was found (looked for $CC, "cc", "gcc", "clang"); install one, e.g. the'
            " package gcc",
            code="compiler-missing",
        )
    options = (*FLAGS, *definitions)
    # Of the compiler its size and date, not its version: an upgrade changes them, and no process
    # has to be started to ask.
    stamp = os.stat(compiler)
    key = repr((sources, compiler, stamp.st_size, stamp.st_mtime_ns, options, _processor()))
    folder = _cache_folder()
    target = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    # Beside the target and renamed: several runs may compile at once, and none loads half a file.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / f"{name}.so"
        for file, text in sources.items():
            (Path(scratch) / file).write_bytes(text)
        command = [compiler, *options, str(Path(scratch) / f"{name}.c"), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelError(
                f"{compiler} did not compile them: {error}", code="kernels-not-compiled"
            ) from error
        if done.returncode:
            raise KernelError(
                f"{compiler} did not compile them:"
                f" {(done.stderr.strip().splitlines() or ['no message'])[0]}",
                code="kernels-not-compiled",
            )
        os.replace(made, target)
    return target


def _cache_folder() -> Path:
    """The user's own folder: its files are loaded as code, so nobody else may write to it.

    Raises:
        KernelError: it cannot be made, or others may write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "treegraft" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
    except OSError as error:
        raise KernelError(
            f"their folder {folder} cannot be used: {error}", code="kernel-folder-unusable"
        ) from error
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise KernelError(
            f"others than you may write to {folder}, from which code would be loaded; run: chmod"
            f" 700 {folder}",
            code="kernel-folder-open",
        )
    return folder


def _processor() -> str:
    """The properties of the processor that -march=native depends on."""
    try:
        with open("/proc/cpuinfo") as file:
            return "".join(
                line for line in file if line.startswith(("flags", "Features", "model name"))
            )[:8000]
    except OSError:
        return platform.processor() + platform.machine()
