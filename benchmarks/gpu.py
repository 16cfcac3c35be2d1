"""Checks and measurements on one GPU, in four parts of a few minutes each, offline: models of
random weights are made on the card.

    python -m benchmarks.gpu 1     correct: masks, attention, packed = separate, keys, noise
    python -m benchmarks.gpu 2     sampling against the bandwidth's bound
    python -m benchmarks.gpu 3     learning: unique tokens a second, MFU, memory
    python -m benchmarks.gpu 4     one whole update by phase

Each row is printed and written at once, so that a run that is cut off keeps what it has. `--tiny`
runs the same on a CPU with tiny sizes: a test of this program. It needs torch, transformers and
numpy; without pydantic settings are taken unchecked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from pathlib import Path

from benchmarks.card import bare

PARTS = {1: ("correct", 220.0), 2: ("sampling", 480.0), 3: ("learning", 430.0), 4: ("whole", 150.0)}
"""Module of benchmarks.card, and seconds after which no row is begun."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one part and returns the exit code: 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("part", type=int, choices=sorted(PARTS))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the rows")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a test, no measurement")
    asked = parser.parse_args(arguments)
    has_pydantic = bare.import_settings()

    import torch
    import transformers

    from benchmarks.card.bench import Bench, table

    if not torch.cuda.is_available() and not asked.tiny:
        said = "benchmarks.gpu: no CUDA device; --tiny runs it on the CPU, as a test"
        print(said, file=sys.stderr)
        return 2
    name, limit_s = PARTS[asked.part]
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"part-{asked.part}.jsonl"
    file.unlink(missing_ok=True)
    bench = Bench(part=asked.part, limit_s=limit_s, file=file, is_tiny=asked.tiny)
    device = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    head = {"device": device, "versions": versions, "python": platform.python_version()}
    print(json.dumps(head | {"pydantic": has_pydantic, "tiny": asked.tiny}), flush=True)
    importlib.import_module(f"benchmarks.card.{name}").run(bench)
    text = f"{device}, {versions}\n\n{table(bench.rows)}"
    (asked.out / f"part-{asked.part}.md").write_text(text, encoding="utf-8")
    failed = [row.what for row in bench.rows if row.note.startswith("FAILED")]
    if failed:
        print("failed: " + "; ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
