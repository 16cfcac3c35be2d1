"""The process in which the works of a part run, one after the other.

python -m benchmarks.card.child MODULE PART OUT DEVICE FIRST BEGUN SECONDS
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import platform
import sys
import time
from pathlib import Path

from benchmarks.card import bare
from benchmarks.gpu import SPOILED

LEAST_S = 5.0
"""With less time left no work is begun."""


def main(
    module: str, part: str, out: str, device: str, first: str, begun: str, limit_s: str
) -> int:
    """Runs the works from number `first` on; returns `gpu.SPOILED` where one has spoiled the card
    for this process.

    Args:
        begun: when the part began, by `time.time`.
    """
    has_pydantic = bare.import_settings()

    import torch
    import transformers

    from benchmarks.card.bench import Bench, table_of

    if device == "cuda" and not torch.cuda.is_available():
        said = "benchmarks.gpu: no CUDA device; --device cpu runs tiny sizes, as a test"
        print(said, file=sys.stderr)
        return 2
    stem = Path(out) / f"part-{part}"
    bench = Bench(
        part=int(part),
        limit_s=float(limit_s),
        file=stem.with_suffix(".jsonl"),
        is_tiny=device == "cpu",
        spent_s=time.time() - float(begun),
    )
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    head = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    head |= {"cuda": str(torch.version.cuda), "python": platform.python_version()}
    print(json.dumps(head | {"pydantic": has_pydantic, "first": int(first)}), flush=True)
    works = importlib.import_module(module).works(bench)
    with (
        stem.with_suffix(".works").open("a", encoding="utf-8") as progress,
        stem.with_suffix(".stacks").open("a", encoding="utf-8") as stacks,
    ):
        faulthandler.enable(stacks, all_threads=False)
        for number, work in enumerate(works[int(first) :], start=int(first)):
            seconds = min(work.limit_s + work.grace_s, bench.limit_s - bench.seconds)
            if seconds < LEAST_S:
                bench.add(work.name, None, "", note=f"left out: {bench.limit_s:g} s are over")
                continue
            # Near the end of the part, half of what is left is for rows that are under way.
            bench.until_s = bench.seconds + min(work.limit_s, seconds / 2)
            progress.write(f"{number} {work.name}\n")
            progress.flush()
            faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
            with bench.measure(work.name, ""):
                work.run(bench)
            faulthandler.cancel_dump_traceback_later()
            progress.write(f"{number} {work.name} done\n")
            progress.flush()
            if bench.is_spoiled():
                return SPOILED
    facts = ", ".join(f"{key} {value}" for key, value in head.items())
    text = f"{facts}\n\n{table_of(stem.with_suffix('.jsonl'))}"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
