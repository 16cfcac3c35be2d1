"""The process in which the works of the parts run, one after the other.

python -m benchmarks.card.child '{"parts": [[NAME, PLACE, SECONDS]], "out": FOLDER, ...}'
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.card.__main__ import SPOILED, append_line
from benchmarks.card.bench import Bench, Work, table

LEAST_S = 5.0
"""With less time left no work is begun."""
ROWS_SHARE = 0.85
"""Of the time of a work; no row begins after it."""


def main(text: str) -> int:
    """Runs the works from number `first` on; returns `SPOILED` if one has spoiled the card for this
    process."""
    asked = json.loads(text)
    if asked["device"] == "cuda" and not torch.cuda.is_available():
        said = "benchmarks.card: no CUDA device; --device cpu runs tiny sizes, as a test"
        print(said, file=sys.stderr)
        return 2
    out = Path(asked["out"])
    bench = Bench(
        ends_s=asked["ends"] - asked["begun"],
        file=out / "rows.jsonl",
        is_tiny=asked["device"] == "cpu",
        spent_s=time.time() - asked["begun"],
    )
    if asked["first"] == 0:
        bench.add("machine", None, "", note=json.dumps(_machine(bench)))
    works = [
        (name, float(limit_s), work)
        for name, place, limit_s in asked["parts"]
        for work in _works(place, bench)
    ]
    progress = out / "progress.jsonl"
    with (out / "stacks.txt").open("a", encoding="utf-8") as stacks:
        faulthandler.enable(stacks, all_threads=False)
        for number, (part, limit_s, work) in enumerate(works):
            if number < asked["first"]:
                continue
            bench.part = part
            ends_s = min(bench.ends_s, _began(progress, part, bench.seconds) + limit_s)
            seconds = min(work.limit_s, ends_s - bench.seconds)
            if seconds < LEAST_S:
                bench.add(work.name, None, "", note=f"left out: the {limit_s:g} s are over")
                continue
            bench.until_s = bench.seconds + ROWS_SHARE * seconds
            mark = {"number": number, "part": part, "name": work.name, "at_s": bench.seconds}
            append_line(progress, mark | {"is_done": False})
            faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
            with bench.measure(work.name, ""):
                work.run(bench)
            faulthandler.cancel_dump_traceback_later()
            append_line(progress, mark | {"is_done": True})
            if bench.is_spoiled():
                return SPOILED
    rows = [json.loads(line) for line in bench.file_lines()]
    (out / "table.md").write_text(table(rows), encoding="utf-8")
    return 0


def _works(place: str, bench: Bench) -> Sequence[Work]:
    module, _, name = place.partition(":")
    found: Sequence[Work] = getattr(importlib.import_module(module), name)(bench)
    return found


def _began(progress: Path, part: str, now: float) -> float:
    """When the first work of a part began, perhaps in an earlier process."""
    marks = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    return min((mark["at_s"] for mark in marks if mark["part"] == part), default=now)


def _machine(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {"device": "CPU", "python": platform.python_version()}
    if bench.device.type == "cuda":
        free, whole = torch.cuda.mem_get_info()
        found |= {"device": torch.cuda.get_device_name(), "free_gb": round(free / 1e9, 1)}
        found |= {"memory_gb": round(whole / 1e9, 1), "cuda": str(torch.version.cuda)}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return found | {"num_cpus": torch.get_num_threads()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
