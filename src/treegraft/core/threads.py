"""Idle OpenMP threads, released so that those at work keep spinning.

Each thread that ever ran a parallel region of GNU's OpenMP keeps a team of its own. As soon as the
teams of a process have more threads than the machine has cores, all of them stop spinning between
regions and have to be woken for each one, some 50 µs: a decoding step, which has hundreds of them,
takes half as long again (LOG-0.6.md). So a thread that is done for a while gives its team back.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_SOFT = 1
"""omp_pause_soft: threads end, settings stay."""


def release_threads() -> None:
    """Ends the threads that wait for the calling thread's next parallel region, which starts them
    anew. Cheap without any."""
    # Without this runtime there is nothing to release.
    if (pause := _pause()) is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """GNU's OpenMP 5 function of torch's own runtime; None where torch has another one."""
    # Found in the process's map: another libgomp, opened by its name, would know nothing of torch's
    # threads.
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split()[-1] for line in file if "/torch/lib/libgomp" in line}
        function = ctypes.CDLL(paths.pop()).omp_pause_resource_all if len(paths) == 1 else None
    except (OSError, AttributeError):
        return None
    if function is not None:
        function.argtypes = (ctypes.c_int,)
        function.restype = ctypes.c_int
    return function
