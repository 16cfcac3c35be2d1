"""Loading compiled kernels, with as many threads as torch has where they share its OpenMP."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treegraft.core.errors import KernelError
from treegraft.policy.kernels.compiler import compiled

_log = logging.getLogger(__name__)

ThreadCount = Callable[[], int]
"""Returns how many threads a call may use."""
LONG = ctypes.c_int64
FLOAT = ctypes.c_float
POINTER = ctypes.c_void_p


def load_library(name: str, width: int, dtype: torch.dtype) -> tuple[ctypes.CDLL, ThreadCount]:
    """Returns {name}.c compiled for heads of `width` and float32 or bfloat16.

    Raises:
        KernelError: it cannot be compiled or loaded.
    """
    # Constants of the program: its loops are unrolled by the width.
    definitions = (f"-DWIDTH={width}", *(("-DHALF",) if dtype == torch.bfloat16 else ()))
    try:
        library = ctypes.CDLL(str(compiled(name, definitions)))
    except OSError as error:
        raise KernelError(f"they cannot be loaded: {error}", code="kernels-not-loaded") from error
    if shares_runtime(library):
        return library, torch.get_num_threads
    # On a processor that a kernel is not written for it is compiled without any threads.
    if hasattr(library, "omp_get_max_threads"):
        _log.warning(
            "our kernels (%s) run on one thread: their OpenMP is not torch's, and two teams would"
            " fight for the cores",
            name,
        )
    return library, lambda: 1


def declared(function: Any, *arguments: Any, returns: Any = None) -> Any:
    """Returns a function of a library with the types of its arguments and result declared.

    Undeclared, ctypes would pass every integer in 32 bits.
    """
    function.argtypes = arguments
    function.restype = returns
    return function


def address(
    x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] = ()
) -> int:
    """Returns the address of a tensor, for C code that takes its type and layout for granted.

    Args:
        strides: those of the last axes; none where the tensor has to be contiguous.

    Raises:
        ValueError: it has another type, shape or layout, or lies on another device. The C code
            would read and write beyond it.
    """
    fits = x.stride()[-len(strides) :] == strides if strides else x.is_contiguous()
    if fits and x.dtype is dtype and x.shape == shape and x.is_cpu:
        return x.data_ptr()
    raise ValueError(
        f"kernels: got {x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}, expected"
        f" {dtype} {shape} with strides {strides or 'of a contiguous tensor'} on cpu"
    )


def head_rows(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the address, the step from token to token and that from head to head of x [heads,
    tokens, width], whose last axis is contiguous; raises as `address`."""
    return address(x, dtype, shape, (1,)), x.stride(1), x.stride(0)


def shares_runtime(library: ctypes.CDLL) -> bool:
    """Whether the library's OpenMP threads are torch's own; those of other packages, under names of
    their own, do not matter."""
    # By the address of one of its functions: names of files say nothing, since wheels carry copies
    # of libgomp under names of their own.
    try:
        address = ctypes.cast(library.omp_get_max_threads, ctypes.c_void_p).value
        with open("/proc/self/maps") as file:
            lines = [line.split() for line in file if re.search("libgomp|libiomp|libomp", line)]
    except (OSError, AttributeError):
        return False
    runtimes = {entry[-1] for entry in lines}
    of_torch = {path for path in runtimes if re.search(r"/torch(\.libs)?/", path)} or runtimes
    ours = set()
    for span, *_, path in lines:
        start, end = (int(bound, 16) for bound in span.split("-"))
        if address is not None and start <= address < end:
            ours.add(path)
    return len(of_torch) == 1 and ours == of_torch
