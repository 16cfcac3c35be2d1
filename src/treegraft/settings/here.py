"""What this machine has, as far as it shows without torch: for settings that follow it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)

_GPUS = Path("/proc/driver/nvidia/gpus")


def vllm_pythons() -> list[Path]:
    """Returns where the Python of `make vllm-env` is looked for: in the working directory, and in
    the clone that this package is run from."""
    places = Path.cwd(), Path(__file__).parents[3]
    return [one / ".vllm-env/bin/python" for one in places]


def engine_here(python: str | None) -> str:
    """Returns the engine that engine.kind = "auto" stands for on this machine, and says why.

    Args:
        python: engine.vllm.python.
    """
    has_gpu = (
        os.environ.get("CUDA_VISIBLE_DEVICES") != "" and _GPUS.is_dir() and any(_GPUS.iterdir())
    )
    if not has_gpu:
        _log.info('engine.kind = "auto" takes "native": there is no GPU')
        return "native"
    if python is not None or any(one.exists() for one in vllm_pythons()):
        _log.info('engine.kind = "auto" takes "vllm": there are a GPU and an environment of vLLM')
        return "vllm"
    _log.warning(
        'engine.kind = "auto" takes "native", which samples slowly on a GPU: there is no'
        " environment of vLLM. `make vllm-env VLLM=vllm==0.32.0` makes one."
    )
    return "native"
