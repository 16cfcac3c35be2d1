"""Runs, kills and resumes training in forked children of one process, so that the packages below
are imported once.

    python -m tests.support.killed_runs FOLDER settings.json jobs.json

A job is {"name": run name, "kill": [target, call, when] or null, "resume": bool}; the exit code
(negative: the signal) of each goes to FOLDER/outcomes.json, what it printed to FOLDER/NAME.log.
`kill` ends the process with SIGKILL at the nth call of "module:attribute": before it, after it, or
(`write_atomically`, `append_metrics`) with half of it written.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def die() -> None:
    """Ends this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(target: str, nth: int, when: str) -> None:
    """Puts the end of the process at the nth call of the target."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    count = 0

    def armed(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth and when == "before":
            die()
        if count == nth and when == "half" and name == "write_atomically":
            path, data = args
            path.with_name(f".{path.name}.partial").write_bytes(data[: len(data) // 2])
            die()
        result = original(*args, **kwargs)
        if count == nth and when == "half":
            metrics = args[0].metrics_path
            os.truncate(metrics, metrics.stat().st_size - 20)
        if count == nth:
            die()
        return result

    setattr(owner, name, armed)


def work(folder: Path, settings: Mapping[str, Any], job: Mapping[str, Any]) -> int:
    """Does one job in this process; returns the exit code."""
    from treegraft.runs.display import PlainDisplay
    from treegraft.train import train

    began = time.monotonic()
    if job["kill"] is not None:
        arm(*job["kill"])
    display = PlainDisplay(sys.stdout)
    if job["resume"]:
        train(None, resume=folder / job["name"], display=display)
    else:
        train(
            {**settings, "run": {**settings["run"], "name": job["name"], "dir": str(folder)}},
            display=display,
        )
    print(f"{time.monotonic() - began:.2f} s")
    return 0


def child(folder: Path, settings: Mapping[str, Any], job: Mapping[str, Any]) -> int:
    """Forks, does the job in the child, and returns its exit code or minus the signal that ended
    it."""
    pid = os.fork()
    if pid == 0:
        code = 70
        with (folder / f"{job['name']}.log").open("a", buffering=1) as log:
            sys.stdout = sys.stderr = log
            try:
                code = work(folder, settings, job)
            except BaseException:
                traceback.print_exc(file=log)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Does the jobs one after another."""
    folder = Path(sys.argv[1])
    settings = json.loads(Path(sys.argv[2]).read_text())
    jobs = json.loads(Path(sys.argv[3]).read_text())
    # The first job loads, before the forks, what all of them need. It leaves no thread behind but
    # idle ones of tools, which a fork forgets.
    outcomes = [work(folder, settings, jobs[0])]
    left = {thread.name for thread in threading.enumerate()} - {"MainThread", "treegraft-tool"}
    assert not left, threading.enumerate()
    outcomes += [child(folder, settings, job) for job in jobs[1:]]
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
