"""What the programs for a GPU need at the heads of published shapes, as a table of docs/gpu.md:

    python -m tests.support.fake_h100.table [--write]

It needs triton and g++, and takes about a minute for each card and shape. Nothing is launched.
"""

from __future__ import annotations

import argparse
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
PAGE = ROOT / "docs/gpu.md"
BEGIN, END = "<!-- fake-h100 -->\n", "<!-- end -->"
NAMES = ("smollm2-135m", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-8b", "qwen2.5-32b")
DTYPES = {"smollm2-135m": ("float32",), "qwen2.5-1.5b": ("float32", "bfloat16")}
"""Other shapes are learned in bfloat16 alone."""
LENGTHS = "4097,1500,9000"
HEAD = (
    "| card | shape | forward | backward | forward without gradients |\n|---|---|---:|---:|---:|\n"
)


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


def row_of(capability: int, found: dict[str, Any]) -> str:
    """Returns the row of a case: of each program KB of shared memory, registers, spilled bytes."""
    card = {90: "H100 (sm_90)", 100: "B200 (sm_100)"}[capability]
    dtype, heads, window = found["case"].split(":")
    known = {heads_of(name): name for name in NAMES}
    shape = f"{known[heads]}, {heads.replace(',', ' / ')}, {dtype}"
    shape += f", window {window}" if window != "0" else ""
    # Left out: a sum before the backward program, some 36 registers.
    programs = [one for one in found["programs"] if "_tem_" in one["name"]]
    assert [is_backward(one) for one in programs] == [False, True, False], found["programs"]
    needs = (
        one.get("fault") or f"{one['shared'] / 1024:.0f} KB, {one['registers']}, {one['spilled']:,}"
        for one in programs
    )
    return f"| {card} | {shape} | {' | '.join(needs)} |"


def is_backward(program: dict[str, Any]) -> bool:
    """Returns whether a program computes gradients."""
    return "backward" in program["name"] or "bwd" in program["name"]


def main() -> None:
    """Prints the table, and writes it into the page with --write."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_h100.table")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--cards", type=int, nargs="+", default=[90, 100])
    parser.add_argument("--shapes", nargs="+", default=list(NAMES), choices=NAMES)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for capability in asked.cards:
            cases = [case for name in asked.shapes for case in cases_of(name)]
            for found in compiled(Path(folder), capability, cases):
                rows.append(row_of(capability, found))
                print(rows[-1], "graphs", found["graphs"], flush=True)
    if asked.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        table = HEAD + "\n".join(rows) + "\n"
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
