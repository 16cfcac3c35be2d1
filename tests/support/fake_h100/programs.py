"""Has the programs for a GPU compiled at the heads of published shapes, in processes of their own
that need triton and g++. Nothing is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from treegraft.policy.shapes import shape_table

ROOT = Path(__file__).parents[3]
NAMES = ("smollm2-135m", "qwen2.5-1.5b", "qwen3-8b")
DTYPES = {"smollm2-135m": ("float32",), "qwen2.5-1.5b": ("float32", "bfloat16")}
"""Other shapes are learned in bfloat16 alone."""
LENGTHS = "4097,1500,9000"


def heads_of(name: str) -> str:
    """Returns "heads,kv heads,width" of a shape of policy/shapes.toml."""
    found = shape_table()[name]
    fields = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return ",".join(str(found[field]) for field in fields)


def cases_of(name: str, window: int = 0) -> list[str]:
    """Returns the cases of `tests.support.fake_h100.flex` for a shape."""
    heads = heads_of(name)
    return [f"{dtype}:{heads}:{window}" for dtype in DTYPES.get(name, ("bfloat16",))]


def guard(folder: Path) -> Path:
    """Returns the library that is preloaded, built into a folder."""
    path = folder / "guard.so"
    if not path.exists():
        torch_ = Path(torch.__file__).parent
        command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_}/include"]
        command += [f"-I{torch_}/include/torch/csrc/api/include", f"-L{torch_}/lib"]
        command += [str(ROOT / "tests/support/fake_h100/guard.cpp"), "-o", str(path)]
        command += [f"-Wl,-rpath,{torch_}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
    return path


def compiled(
    folder: Path,
    capability: int,
    cases: Sequence[str],
    program: str = "tests.support.fake_h100.flex",
) -> Iterator[dict[str, Any]]:
    """Yields what the program says of each case; raises RuntimeError where it fails."""
    environment = os.environ | {
        "LD_PRELOAD": str(guard(folder)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    command = [sys.executable, "-m", program, str(capability), LENGTHS, *cases]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as running,
    ):
        assert running.stdout is not None
        yield from (json.loads(line) for line in running.stdout if line.startswith("{"))
        if status := running.wait():
            errors.seek(0)
            raise RuntimeError(f"status {status}: {errors.read()[-3000:]}")


def is_backward(program: dict[str, Any]) -> bool:
    """Returns whether a program computes gradients."""
    return "backward" in program["name"] or "bwd" in program["name"]
