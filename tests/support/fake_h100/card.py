"""Makes this process take an H100 or a B200 for present: Inductor writes programs, Triton and ptxas
compile them for it, and nothing is launched. For a process of its own: nothing is undone."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
import types
from typing import Any

import torch
import triton
import triton.backends.nvidia.driver as nvidia
from torch._dynamo import device_interface
from torch._inductor.fx_passes import fuse_attention, joint_graph
from torch._inductor.runtime import triton_heuristics
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

SHARED = 232_448
"""Bytes of shared memory that one block of an H100 or a B200 may have."""
NAMES = {90: "NVIDIA H100 80GB HBM3", 100: "NVIDIA B200"}
"""By compute capability, times 10."""
FACTS = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 * 10**9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "L2_cache_size": 50 * 2**20,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": SHARED,
    "shared_memory_per_multiprocessor": 233_472,
    "gcnArchName": "",
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "uuid": "none",
}
_capability = 90
_PROPERTIES = types.SimpleNamespace(**FACTS)
_LIMITS = {
    "max_shared_mem": SHARED,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1,
    "mem_clock_rate": 1,
    "mem_bus_width": 1,
}

compiled: list[dict[str, Any]] = []
"""Of each program: name, shared memory and registers, bytes that it spills."""


class _Block:
    """In the place of torch.cuda.device."""

    def __init__(self, _: Any = None) -> None: ...
    def __enter__(self) -> _Block:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Stream:
    cuda_stream = stream_id = device_index = 0
    device_type = 1
    device = torch.device("cuda", 0)


def _always(value: Any) -> Any:
    return lambda *_, **__: value


def pretend(capability: int = 90) -> None:
    """Puts everything in place, in a process that was started with the library of guard.cpp as
    LD_PRELOAD: torch looks for a card once."""
    global _capability
    _capability = capability
    _PROPERTIES.name = NAMES[capability]
    _PROPERTIES.major = capability // 10
    _PROPERTIES.multi_processor_count = {90: 132, 100: 148}[capability]
    ctypes.CDLL(os.environ["LD_PRELOAD"]).put_guard()
    # Not for the compilers that are started from here.
    del os.environ["LD_PRELOAD"]
    _pretend_to_torch()
    _pretend_to_triton()
    triton_heuristics.CachingAutotuner.precompile = _precompile
    triton_heuristics.CachingAutotuner.run = _always(None)
    # All three would compute something on the card.
    joint_graph.lazy_init = _always(None)
    fuse_attention._sfdp_init = _always(None)
    fake_tensor.init_gpu_context = _always(None)


def _pretend_to_torch() -> None:
    cuda: Any = torch.cuda
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "is_initialized": True,
        "_lazy_init": None,
        "get_device_capability": (_capability // 10, 0),
        "get_device_properties": _PROPERTIES,
        "get_device_name": _PROPERTIES.name,
        "synchronize": None,
        "_is_compiled": True,
        "is_bf16_supported": True,
        "get_arch_list": [f"sm_{_capability}"],
        "current_stream": _Stream(),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "set_device": None,
        "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }.items():
        setattr(cuda, name, _always(value))
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.random.set_rng_state = cuda.set_rng_state
    cuda.device = cuda._DeviceGuard = cuda.device_of = _Block
    torch.version.cuda = "13.0"
    for name, value in {
        "_cuda_getCurrentRawStream": 0,
        "_cuda_setDevice": None,
        "_cuda_getDevice": 0,
        "_cuda_exchangeDevice": 0,
        "_cuda_maybeExchangeDevice": 0,
        "_cuda_getDeviceCount": 1,
        "_cuda_synchronize": None,
    }.items():
        setattr(torch._C, name, _always(value))
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )
    known: Any = device_interface.CudaInterface
    known.device = _Block
    for name, value in {
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "get_compute_capability": _capability,
        "get_device_properties": _PROPERTIES,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "get_raw_stream": 0,
        "synchronize": None,
        "current_stream": _Stream(),
        "set_device": None,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "is_bf16_supported": True,
    }.items():
        setattr(known, name, staticmethod(_always(value)))
    for name, value in {"get_device_properties": _PROPERTIES, "current_device": 0}.items():
        setattr(known.Worker, name, staticmethod(_always(value)))
    known.Worker.set_device = staticmethod(_always(None))


def _pretend_to_triton() -> None:
    """A driver that knows its target and nothing else."""
    driver: Any = nvidia.CudaDriver
    driver.__init__ = _always(None)
    driver.is_active = staticmethod(lambda: True)
    driver.binary_ext = "cubin"
    driver.utils = types.SimpleNamespace(get_device_properties=_always(_LIMITS))
    for name, value in {
        "get_current_target": GPUTarget("cuda", _capability, 32),
        "get_current_device": 0,
        "get_current_stream": 0,
        "get_device_interface": torch.cuda,
        "get_active_torch_device": torch.device("cuda", 0),
        "get_benchmarker": lambda *_, **__: 1.0,
    }.items():
        setattr(driver, name, _always(value))
    triton.runtime.driver.set_active(driver())


def _precompile(self: Any, *_: Any, **__: Any) -> None:
    """Compiles each form of a program as Inductor would, and notes what it needs."""
    original = triton.compile
    for form in self.configs:
        found: list[Any] = []

        def noting(*values: Any, _found: list[Any] = found, **options: Any) -> Any:
            _found.append(original(*values, **options))
            return _found[-1]

        triton.compile = triton_heuristics.triton.compile = noting
        fault = ""
        try:
            self._precompile_config(form)
        except Exception as error:  # loading it onto the card, which is not there
            fault = f"{type(error).__name__}: {error}"
        finally:
            triton.compile = triton_heuristics.triton.compile = original
        compiled.append({"name": self.fn.__name__, "form": str(form)} | needs(found, fault))
    self.launchers = [_always(None)]


def needs(found: list[Any], fault: str = "") -> dict[str, Any]:
    """What ptxas says of a program; why there is none."""
    if not found:
        return {"fault": fault[:300]}
    binary = found[-1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(binary.asm["ptx"])
        file.flush()
        command = [get_ptxas(_capability).path, "-v", "--regAllocOptLevel=2", "--gpu-name"]
        command += [f"sm_{_capability}a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return {
        "shared": binary.metadata.shared,
        "registers": int(registers),
        "spilled": int(stores) + int(loads),
    }
