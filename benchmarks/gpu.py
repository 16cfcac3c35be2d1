"""Checks and measurements on one GPU, in four parts of less than nine minutes each, offline: models
of random weights are made on the card.

    python -m benchmarks.gpu 1     correct: masks, attention, packed = separate, keys, noise, shards
    python -m benchmarks.gpu 2     learning: unique tokens a second, MFU, memory
    python -m benchmarks.gpu 3     publish: weights to another process, by every way
    python -m benchmarks.gpu 4     one whole update, by a vLLM server where there is one

Each row is printed and written at once, as one line of JSON, so that a run that is cut off keeps
what it has. A part is a list of works that runs in a process of its own: a work that fails is a row
FAILED and the next one follows, also where it hangs, is killed or spoils the card for its process.

`--device cpu` runs the same with tiny sizes: a test of this program. It needs torch, transformers
and numpy; without pydantic settings are taken unchecked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PARTS = {1: "correct", 2: "learning", 3: "publish", 4: "whole"}
"""Modules of benchmarks.card."""
LIMIT_S, GRACE_S = 470.0, 60.0
"""Of a part; no work goes on for longer. And the time that a process gets to end by itself."""
SPOILED = 3
"""Exit status of works of which one has spoiled the card for its process."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one part and returns the exit code: 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("part", type=int, choices=sorted(PARTS))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds in all")
    asked = parser.parse_args(arguments)
    module = f"benchmarks.card.{PARTS[asked.part]}"
    return supervise(module, asked.part, asked.out, asked.device, asked.limit)


def supervise(
    module: str,
    part: int,
    out: Path,
    device: str,
    limit_s: float,
    say: Callable[[str], None] = print,
) -> int:
    """Runs the works of a module until all have had their turn or the time is over, with a new
    process after each one that has taken its process with it; returns the exit code."""
    begun, first = time.time(), 0
    out.mkdir(parents=True, exist_ok=True)
    rows, progress, stacks = (out / f"part-{part}.{end}" for end in ("jsonl", "works", "stacks"))
    for file in (rows, progress, stacks):
        file.write_text("")
    # On a CPU nothing else may find a card either.
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    while True:
        command = [sys.executable, "-m", "benchmarks.card.child", module, str(part), str(out)]
        command += [device, str(first), f"{begun:.1f}", f"{limit_s:.1f}"]
        child = subprocess.Popen(command, env=environment)
        try:
            # The child ends itself; this is for one that cannot.
            status = child.wait(max(0.0, begun + limit_s - time.time()) + GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        except KeyboardInterrupt:
            child.wait()
            raise
        done = progress.read_text().splitlines()
        if done and not done[-1].endswith(" done"):
            name = done[-1].partition(" ")[2]
            note = f"FAILED {_ended(status)}{_last_line(stacks)}"
            at_s = round(time.time() - begun, 1)
            fault = {"part": part, "what": name, "value": None, "unit": "", "bound": None}
            fault |= {"note": note, "at_s": at_s}
            say(json.dumps(fault))
            with rows.open("a", encoding="utf-8") as ended:
                ended.write(json.dumps(fault) + "\n")
        elif status == 0:
            break
        # Also one that has spoiled the card, or that fails while its process ends.
        following = int(done[-1].partition(" ")[0]) + 1 if done else 0
        if following == first:
            say(f"benchmarks.gpu: no work began (status {status})")
            return 2
        first = following
        stacks.write_text("")
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    failed = [row["what"] for row in found if row["note"].startswith("FAILED")]
    if failed:
        say("failed: " + "; ".join(failed))
    return 1 if failed else 0


def _ended(status: int) -> str:
    if status >= 0:
        return "not over in time; it was at"
    with_name = {one.value: one.name for one in signal.Signals}
    return f"ended by {with_name.get(-status, -status)} at"


def _last_line(stacks: Path) -> str:
    """Where the main thread was, innermost call first, of what faulthandler has written."""
    lines = stacks.read_text(errors="replace").splitlines()
    marks = [n for n, line in enumerate(lines) if "most recent call first" in line]
    # The main thread is written last.
    calls = lines[marks[-1] + 1 :] if marks else []
    short = [" ".join(one.split()).replace(f"{os.getcwd()}/", "") for one in calls[:3]]
    return " " + ("; ".join(short) or "a place that is not known")


if __name__ == "__main__":
    sys.exit(main())
