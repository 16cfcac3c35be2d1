"""Checks and measurements on one GPU, within fifteen minutes and without a network.

    python -m benchmarks.card                           every part, one after the other
    python -m benchmarks.card --only arms --only agent  some of them
    python -m benchmarks.card --device cpu              tiny sizes: a test of this program
    python -m benchmarks.card --pack                    what a bare machine needs, into build/card

Models of random weights are made on the card; SmolLM2-135M is packed. A part is a list of works.
Each row is printed and written at once, as one line of JSON in OUT/rows.jsonl, and no row begins
after the seconds of its part. A work that fails is a row FAILED and the next one follows, also if
it hangs, is killed or spoils the card for its process.

The machine needs Python with torch, transformers and numpy. What else it needs is packed on another
one by --pack, in folders build/card/carry-N that travel with the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.card import carry

GRACE_S = 20.0
"""Time that the process of the works gets to end by itself."""
SPOILED = 3
"""Exit status of works of which one has spoiled the card for its process."""


class Part(NamedTuple):
    """Works that share a limit of seconds."""

    place: str
    """Module and function that returns them."""
    limit_s: float


PARTS: Mapping[str, Part] = {
    "facts": Part("benchmarks.card.correct:facts", 45.0),
    "arms": Part("benchmarks.card.learning:arms", 270.0),
    "errors": Part("benchmarks.card.learning:errors", 35.0),
    "correct": Part("benchmarks.card.correct:correct", 60.0),
    "sampling": Part("benchmarks.card.sampling:sampling", 60.0),
    "tiny": Part("benchmarks.card.runs:tiny", 40.0),
    "agent": Part("benchmarks.card.runs:agent", 180.0),
}
"""In the order in which they run: what decides first, then what is nice to know."""
CALLS: Sequence[Sequence[str]] = (
    ("facts", "arms", "errors"),
    ("correct", "sampling", "tiny"),
    ("agent",),
)
"""The parts of each call where no call may carry everything, or last for so long."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts and returns the exit code: 1 if a check or a work failed, 2 if none began."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card")
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="PART", help=f"one of {', '.join(PARTS)}"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "build/card/out")),
        help="folder of the rows, by default $OUT or build/card/out",
    )
    parser.add_argument("--limit", type=float, default=850.0, help="seconds in all")
    parser.add_argument("--pack", action="store_true", help="pack what a bare machine needs")
    asked = parser.parse_args(arguments)
    if asked.pack:
        carry.pack(CALLS)
        return 0
    carry.unpack()
    if lacking := carry.lacking():
        print(
            f"benchmarks.card: {', '.join(lacking)} cannot be imported here. Install them, or run"
            " `python -m benchmarks.card --pack` on a machine with a package index and bring"
            " build/card/carry-1 here"
        )
        return 2
    chosen = {name: part for name, part in PARTS.items() if name in (asked.only or PARTS)}
    try:
        return supervise(chosen, asked.out, asked.device, asked.limit)
    except KeyboardInterrupt:
        print(f"interrupted; the rows so far are in {asked.out / 'rows.jsonl'}")
        return 130


def supervise(
    parts: Mapping[str, Part],
    out: Path,
    device: str,
    limit_s: float,
    say: Callable[[str], None] = print,
) -> int:
    """Runs the works of parts until all have had their turn or the time is over, in a new process
    after each one that has taken its process with it; returns the exit code."""
    begun = time.time()
    out.mkdir(parents=True, exist_ok=True)
    rows, progress, stacks = (out / name for name in ("rows.jsonl", "progress.jsonl", "stacks.txt"))
    # Rows of earlier runs stay.
    num_earlier = len(rows.read_text().splitlines()) if rows.exists() else 0
    progress.write_text("")
    asked = {
        "parts": [[name, *part] for name, part in parts.items()],
        "out": str(out),
        "device": device,
        "ends": begun + limit_s,
        "begun": begun,
    }
    first = 0
    while True:
        stacks.write_text("")
        status = _run(asked | {"first": first}, _environment(device), begun + limit_s)
        works = [json.loads(line) for line in progress.read_text().splitlines()]
        if works and not works[-1]["is_done"]:
            append_line(progress, works[-1] | {"is_done": True})
            note = f"FAILED {_ended(status)}{_last_line(stacks)}"
            row = _row(works[-1], note, time.time() - begun)
            say(json.dumps(row))
            append_line(rows, row)
        elif status == 0:
            break
        following = works[-1]["number"] + 1 if works else 0
        if following == first:
            say(f"benchmarks.card: no work began (status {status})")
            return 2
        first = following
    found = [json.loads(line) for line in rows.read_text().splitlines()[num_earlier:]]
    say(f"rows: {rows}; as a table: {out / 'table.md'}")
    failed = [row["what"] for row in found if row["note"].startswith("FAILED")]
    if failed:
        say("failed: " + "; ".join(failed))
    return 1 if failed else 0


def _run(asked: Mapping[str, Any], environment: Mapping[str, str], ends: float) -> int:
    """The exit status of one process of works."""
    command = [sys.executable, "-m", "benchmarks.card.child", json.dumps(asked)]
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        # The child ends itself; this is for one that cannot.
        return child.wait(max(0.0, ends - time.time()) + GRACE_S)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        # Whatever it has started goes too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _environment(device: str) -> dict[str, str]:
    found = os.environ | {
        # A pipe keeps what was printed, and it is lost with a process that is ended.
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(carry.paths()),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # As the product sets it (policy/load.py).
    found.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if device == "cpu":
        # Nothing may find a card then.
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def _row(work: Mapping[str, Any], note: str, at_s: float) -> dict[str, Any]:
    """As `bench.Row`, which needs torch."""
    row = {"part": work["part"], "what": work["name"], "value": None, "unit": "", "bound": None}
    return row | {"note": note, "at_s": round(at_s, 1), "details": {}}


def append_line(file: Path, row: Mapping[str, Any]) -> None:
    """Adds one line of JSON."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


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
