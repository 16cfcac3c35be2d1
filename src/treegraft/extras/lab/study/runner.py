"""Runs what is missing of a study, in order, by several processes, also after an interruption."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import treegraft
from treegraft.extras.lab.study.plan import Job, Plan, RunPlan
from treegraft.extras.lab.study.pool import Outcome, Pool
from treegraft.extras.lab.study.results import Key, Line, add_results, known_runs, repair
from treegraft.extras.lab.study.work import carry_out, note_of
from treegraft.extras.lab.text import counted
from treegraft.parts import errors, interrupt

RESULTS = "results.jsonl"
PACKAGE = Path(treegraft.__file__).parent
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a call of `run_study` has done."""

    num_done: int
    """Runs whose results are there."""
    num_left: int
    failures: Mapping[Key, str] = field(default_factory=dict)
    """Why runs have failed."""
    stopped_by: int | None = None
    """The signal that ended it, SIGINT for Ctrl-C; None where none did."""


@contextmanager
def locked(results: Path) -> Iterator[None]:
    """Holds a file of results, and with it the study's folder, for this process.

    Raises:
        StorageError: another process works with it, or it cannot be written to.
    """
    # Imported here, since reading results needs no Unix.
    import fcntl

    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        # To append: another study may share the file.
        lock = results.open("a")
    except OSError as error:
        raise errors.StorageError(
            f"'{results}' cannot be worked in ({error.strerror}: '{error.filename}').",
            code="study-unwritable",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.StorageError(
                f"'{results}': another process is running a study in it; expected none. Wait for"
                " its end, stop it with Ctrl-C, or name another folder with --out.",
                code="study-in-use",
            ) from error
        yield


def run_study(
    plan: Plan,
    out: Path,
    results: Path,
    *,
    workers: int,
    minutes: float | None = None,
    facts: Mapping[str, Any] | None = None,
    say: Say,
) -> Ran:
    """Makes the runs that are missing; a run with equal settings in two worlds is made once.

    Args:
        out: folder of warm-ups, buffers and runs.
        results: file that gets one line a run.
        workers: processes, of one thread each.
        minutes: no job begins after so long; None for no such limit.
        facts: of this machine, for each line.
        say: gets a line for each job that has ended.

    Raises:
        StorageError: another process is at work with `results`.
    """
    out = out.resolve()
    with locked(results):
        # Under the lock, since it may remove a line.
        repair(results, plan.runs)
        known, num_others = known_runs(results, plan.runs)
        for run in plan.runs:
            # Of a process that was killed after it had written the line.
            if run.key in known:
                _tidy(out / run.place, plan.study.keep)
        if num_others:
            say(
                f"{results}: {counted(num_others, 'run')} with other settings than the study has"
                " now, which are not counted"
            )
        missing: dict[str, RunPlan] = {}
        for run in plan.runs:
            if run.key not in known:
                # An arm without a buffer is one run in worlds that differ in the expert alone.
                missing.setdefault(run.fingerprint, run)
        work = _Work(plan, out, results, missing, dict(facts or {}) | commit_of(), say)
        return work.carry_out(workers, minutes)


class _Work:
    def __init__(
        self,
        plan: Plan,
        out: Path,
        results: Path,
        missing: dict[str, RunPlan],
        facts: Line,
        say: Say,
    ) -> None:
        self._plan = plan
        self._out = out
        self._results = results
        self._facts = facts
        self._say = say
        self._waiting: list[Job] = []
        for run in missing.values():
            for one in _in_order(run):
                # Arms and worlds share warm-ups and buffers.
                if all(other.fingerprint != one.fingerprint for other in self._waiting):
                    self._waiting.append(one)
        self._failed: dict[str, str] = {}
        self._running: set[str] = set()
        self._began = time.monotonic()

    def carry_out(self, workers: int, minutes: float | None) -> Ran:
        """Does the work with a pool of processes."""
        pool = Pool(functools.partial(carry_out, out=self._out), workers)
        stopped_by: int | None = None
        try:
            with interrupt.others_as_ctrl_c():
                self._loop(pool, None if minutes is None else minutes * 60)
        except KeyboardInterrupt as error:
            stopped_by = error.number if isinstance(error, interrupt.Ended) else signal.SIGINT
            self._say(
                f"stopping; saving {counted(pool.num_running, 'job')} under way (Ctrl-C again: at"
                " once, going on from the last checkpoints)"
            )
        finally:
            try:
                # Also after a fault of ours: what was done by then is saved.
                for outcome in pool.end():
                    self._take(outcome)
            except KeyboardInterrupt:
                pass
            finally:
                pool.kill()
        known, _ = known_runs(self._results, self._plan.runs)
        failures = {}
        for run in self._plan.runs:
            if run.fingerprint in self._failed:
                failures[run.key] = self._failed[run.fingerprint]
        return Ran(
            num_done=len(known),
            num_left=len(self._plan.runs) - len(known),
            failures=failures,
            stopped_by=stopped_by,
        )

    def _loop(self, pool: Pool, budget_s: float | None) -> None:
        while True:
            # Looked at before each start: a run that has begun goes on to its end.
            is_open = budget_s is None or time.monotonic() - self._began < budget_s
            while is_open and pool.has_room and (job := self._next()) is not None:
                self._running.add(job.fingerprint)
                pool.start(job)
            if not pool.num_running:
                return
            for outcome in pool.outcomes():
                self._take(outcome)

    def _next(self) -> Job | None:
        """The first job that can begin; those whose needs have failed never begin."""
        for job in list(self._waiting):
            # Else a failed warm-up would leave the study waiting for ever.
            causes = [one for one in job.needs if one.fingerprint in self._failed]
            if causes:
                self._waiting.remove(job)
                self._failed[job.fingerprint] = f"its {causes[0].title} has failed"
            elif all(note_of(one, self._out).is_file() for one in job.needs):
                self._waiting.remove(job)
                return job
        return None

    def _take(self, outcome: Outcome) -> None:
        job = outcome.job
        self._running.discard(job.fingerprint)
        seconds = f"{time.monotonic() - self._began:6.0f} s"
        if outcome.error:
            self._failed[job.fingerprint] = outcome.error
            self._say(f"{seconds}  {job.title}: failed: {outcome.error}")
            return
        if not isinstance(job, RunPlan):
            self._say(f"{seconds}  {job.title}")
            return
        # All runs with equal settings: one result is a line for each.
        same = [run for run in self._plan.runs if run.fingerprint == job.fingerprint]
        today = {"date": time.strftime("%Y-%m-%d")}
        add_results(self._results, same, {**today, **self._facts, **outcome.result})
        _tidy(self._out / job.place, self._plan.study.keep)
        left = sum(isinstance(one, RunPlan) for one in self._waiting) + len(self._running)
        also = f" (and {len(same) - 1} equal)" if len(same) > 1 else ""
        accuracy = outcome.result["curve"][-1]["accuracy"]
        self._say(f"{seconds}  {job.title}{also}: {accuracy:.3f}; {counted(left, 'job')} left")


def _in_order(job: Job) -> Iterator[Job]:
    """A job after all that it needs."""
    for one in job.needs:
        yield from _in_order(one)
    yield job


def _tidy(run_dir: Path, keep: str) -> None:
    """Removes what `StudyFile.keep` does not name of a finished run, whose line is on the disk."""
    if keep == "none":
        # A study has hundreds of runs, whose checkpoints would fill the disk.
        shutil.rmtree(run_dir, ignore_errors=True)
    elif keep == "last":
        for name in ("trees", "buffer"):
            shutil.rmtree(run_dir / name, ignore_errors=True)


def commit_of(package: Path = PACKAGE) -> Line:
    """Returns the commit of the package's clone and whether its code, recipes or studies differ
    from it; nothing outside a clone."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        # Fails where the package is not a part of the clone but installed below it.
        git("ls-files", "--error-unmatch", ".")
        # Not the results of studies, which each run changes.
        paths = (".", ":(top)recipes", ":(top)studies/*.toml")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *paths)
        return {"commit": git("rev-parse", "HEAD"), "is_dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "is_dirty": None}
