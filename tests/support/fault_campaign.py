"""A fault campaign: runs with grafts and a growing buffer meet faults at random moments and are
resumed until they end; what they leave is compared with an undisturbed run byte by byte.

    python -m tests.support.fault_campaign FOLDER --num 100 --seed 0

Faults: SIGKILL; signals that ask for an end, one or several; a full disk (RLIMIT_FSIZE, which
needs no root); a read-only folder (a mount where root may, else the folders' modes); killed
workers. Every end has to be one that the documentation names, with its sentence and without a
traceback. The counts go to standard output; the exit code is 1 where something differs, with FOLDER
kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.forked import Forked
from tests.support.tiny import differing, tiny
from tests.test_grafted_runs import BOTH

from treegraft.core.interrupt import OTHERS

SETTINGS: Mapping[str, Any] = tiny(
    **{
        **BOTH,
        "run": {"num_updates": 3},
        "loss": {**BOTH["loss"], "kl_coef": 0.01},
        # Its tool has a child process.
        "tasks": {"kind": "tests.support.tiny_parts:PooledWorld", "search_world": {}},
        "eval": {"num_samples": 1},
    }
)
ROOT = Path(__file__).resolve().parents[2]
MAX_FAULTS = 3
"""Of one run; then it is resumed to its end."""
DEADLINE_S = 300.0
"""Longest time of one process, on a busy machine."""
ENDINGS = ("kill", "ask", "ask twice")
STORAGE = ("full", "read-only")
FAULTS = (*ENDINGS, *STORAGE, "workers")


@dataclass
class Ended:
    """The end of one process."""

    code: int
    printed: str


@dataclass
class Campaign:
    """What has happened so far."""

    folder: Path
    draw: random.Random
    whole_s: float = 0.0
    """Duration of the undisturbed run."""
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """What was wrong, one sentence each."""

    # ------------------------------------------------------------------ processes

    def begin(self, name: str, *, resumes: bool) -> Forked:
        """Starts `treegraft train`."""
        arguments = ["--resume", str(self.folder / name)]
        if not resumes:
            recipe = str(self.folder / "settings.json")
            arguments = [recipe, f"run.name={name}", f"run.dir={self.folder}"]
        # `nohup` before the campaign would have it ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        words = ["treegraft", "train", *arguments]
        return Forked(words, cwd=ROOT, stderr=subprocess.STDOUT)

    def end_of(self, process: Forked) -> Ended:
        """Waits for the end of a process, which is killed at the deadline."""
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        printed, _ = process.communicate()
        deadline.cancel()
        return Ended(process.returncode or 0, printed)

    # ------------------------------------------------------------------ one fault

    def disturb(self, name: str, fault: str) -> None:
        """Lets one process of the run meet a fault, and checks its end."""
        run = self.folder / name
        process = self.begin(name, resumes=run.exists())
        pid = process.pid
        time.sleep(self.draw.random() * 0.7 * self.whole_s)
        if fault == "kill":
            os.kill(pid, signal.SIGKILL)
        elif fault.startswith("ask"):
            first = number = self.draw.choice((signal.SIGINT, *OTHERS))
            for _ in range(1 if fault == "ask" else 3):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                time.sleep(self.draw.random() * 0.2)
                number = self.draw.choice(OTHERS)
            self.judge(name, fault, self.end_of(process), 128 + first)
            return
        elif fault == "full":
            with suppress(ProcessLookupError):
                size = self.draw.choice((0, 4096, 65536))
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        elif fault == "read-only":
            with read_only(run if run.exists() else self.folder):
                self.judge(name, fault, self.end_of(process), None)
            return
        else:
            for _ in range(8):
                for child in _children(pid):
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                        self.ends["workers killed"] += 1
                time.sleep(self.draw.random() * 0.1 * self.whole_s)
        self.judge(name, fault, self.end_of(process), -signal.SIGKILL if fault == "kill" else None)

    def judge(self, name: str, fault: str, end: Ended, wanted: int | None) -> None:
        """Counts the end of a process, and notes what is wrong with it."""
        errors = [line for line in end.printed.splitlines() if line.startswith("error: ")]
        what = f"{name}, {fault}: exit code {end.code}"
        if "Traceback" in end.printed:
            self.faults.append(f"{what}, a traceback: {end.printed[-1500:]}")
        if end.code == 0:
            self.ends[f"{fault}: finished all the same"] += 1
        elif fault in ENDINGS:
            self.ends[f"{fault}: {_name_of(end.code)}"] += 1
            is_told = "go on with: treegraft train --resume" in end.printed
            is_loading = "\nrun " not in f"\n{end.printed}"
            if end.code != wanted and not (is_loading and -end.code == (wanted or 0) - 128):
                self.faults.append(f"{what}, expected {wanted}: {end.printed[-800:]}")
            elif fault != "kill" and not is_told and not is_loading:
                self.faults.append(f"{what}, and no sentence: {end.printed[-800:]}")
        elif fault in STORAGE:
            self.ends[f"{fault}: exit code {end.code}"] += 1
            if end.code not in (1, 2, 3) or len(errors) != 1:
                self.faults.append(f"{what}, {len(errors)} errors: {end.printed[-800:]}")
        else:
            self.faults.append(f"{what}: {end.printed[-800:]}")
        for partial in self.folder.glob(".*.partial"):
            shutil.rmtree(partial)
            if fault != "kill":
                self.faults.append(f"{what}: '{partial}' was left behind")

    # ------------------------------------------------------------------ whole runs

    def undisturbed(self) -> None:
        """Makes the run that the others are compared with."""
        settings = self.folder / "settings.json"
        settings.write_text(json.dumps(SETTINGS), encoding="utf-8")
        for name in ("undisturbed", "again"):
            began = time.monotonic()
            end = self.end_of(self.begin(name, resumes=False))
            self.whole_s = time.monotonic() - began
        if end.code or differing(self.folder / "undisturbed", self.folder / "again"):
            self.faults.append(f"two undisturbed runs differ: {end}")

    def run(self, number: int, chosen: list[str]) -> None:
        """Takes one run through its faults to its end."""
        name = f"run-{number:03d}"
        for fault in chosen:
            self.disturb(name, fault)
        end = self.end_of(self.begin(name, resumes=(self.folder / name).exists()))
        if end.code:
            self.faults.append(f"{name}, {chosen}: the last resume failed: {end}")
            return
        unlike = differing(self.folder / "undisturbed", self.folder / name)
        if unlike:
            self.faults.append(f"{name}, {chosen}: other bytes in {unlike}")
        else:
            self.ends["runs with equal bytes"] += 1
        left = [one.name for one in self.folder.glob(f"{name}/**/.*.partial")]
        if left:
            self.faults.append(f"{name}, {chosen}: left behind {left}")


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "pid (name) state parent ...", the name with any characters.
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            found += [int(stat.parent.name)] if int(parent) == pid else []
    return found


def _name_of(code: int) -> str:
    number = -code if code < 0 else code - 128
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"exit code {code}"


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a folder read-only for the time of the block."""
    if os.geteuid() == 0:
        # Modes do not bind root.
        mount = ["mount", "--bind", str(folder), str(folder)]
        subprocess.run(mount, check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    folders = [folder, *(one for one in folder.rglob("*") if one.is_dir())]
    for one in folders:
        one.chmod(0o555)
    try:
        yield
    finally:
        for one in folders:
            one.chmod(0o755)


def main() -> int:
    """Runs the campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=100, help="faults in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="kinds of faults; default: all")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(chosen.folder.resolve(), random.Random(chosen.seed))
    began = time.time()
    campaign.undisturbed()
    kinds = chosen.only or FAULTS
    # Every kind as often as the others.
    left = [kinds[number % len(kinds)] for number in range(chosen.num)]
    campaign.draw.shuffle(left)
    taken = [left[first : first + MAX_FAULTS] for first in range(0, len(left), MAX_FAULTS)]
    for number, faults in enumerate(taken):
        campaign.run(number, faults)
        print(f"run {number}: {faults}, {len(campaign.faults)} wrong", file=sys.stderr)
    for fault in campaign.faults:
        print(f"wrong: {fault}")
    for what, count in sorted(campaign.ends.items()):
        print(f"{count:4} {what}")
    minutes = (time.time() - began) / 60
    told = f"{chosen.num} faults in {len(taken)} runs, {len(campaign.faults)} wrong"
    print(f"{told}, {minutes:.1f} min since it was started")
    return 1 if campaign.faults else 0


if __name__ == "__main__":
    sys.exit(main())
