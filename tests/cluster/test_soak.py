"""A run on a Ray cluster of this machine under random deaths for half an hour: all updates are
done, their trees are those of an undisturbed run, memory stays what it was, and no process is left.

TREEGRAFT_SOAK_MINUTES, TREEGRAFT_SOAK_DEATH_S and TREEGRAFT_SOAK_RANK_S set how long it takes, the
time between two deaths of actors, and between two of a learner's rank.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.parts import needs_ray
from tests.cluster.test_job import command, is_over, ranks_in
from tests.cluster.test_services import trees_of
from tests.distributed.jobs import torchrun

from treegraft.runs.record import read_metrics

pytestmark = [needs_ray, pytest.mark.slow]
MINUTES = float(os.environ.get("TREEGRAFT_SOAK_MINUTES", "30"))
DEATH_S = float(os.environ.get("TREEGRAFT_SOAK_DEATH_S", "20"))
RANK_S = float(os.environ.get("TREEGRAFT_SOAK_RANK_S", "300"))
START_S = 600.0
"""Longest wait for a run to stand, or to stand again."""
SEED = 20261123
NUM_ENGINES = 3
GROWTH_MB = 64.0
"""By how much the largest process of a role may be larger in the last third than in the first."""
RECIPE = (
    *("demo", "warmup.num_steps=40", "tasks.num_train=100", "tasks.num_eval=4", "eval.every=0"),
    *("tasks.search_world.hops=[1,2]", "run.tasks_per_update=4", "explore.num_leaves=4"),
    *("explore.explorers=['graft']", "explore.graft.num_hybrid=3", "buffer.path=expert"),
    *("buffer.encoder=hashing", "buffer.grow.num_best=1", "buffer.grow.capacity=200"),
    *("tools.use=['tests.cluster.parts:Odd']", "learn.max_pack_tokens=800"),
    *("eval.at_start=false", "eval.at_end=false", "checkpoint.every=2", "run.dir=."),
)


def resident_mb(pid: int) -> float:
    """The memory of a process; 0 for one that has ended."""
    with suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def live_actors(run: Path) -> list[dict[str, Any]]:
    """What the run says of its actors that live; none while it starts, or where it says nothing."""
    with suppress(OSError, ValueError, KeyError):
        found = json.loads((run / "roles.json").read_text(encoding="utf-8"))
        # Rank 0 that was killed has left its last words behind.
        if time.time() - found["written"] < 8.0:
            live = [one for one in found["roles"] if one["state"] == "live" and one["pid"]]
            return [one for one in live if "ray::" in words_of(one["pid"])]
    return []


def words_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


class Killer:
    """Kills actors and ranks of a run at times and in an order that a seed decides."""

    def __init__(
        self, folder: Path, command_pid: int, said: list[str], goes_on: Callable[[], bool]
    ) -> None:
        """Args:
        said: what the command has printed.
        goes_on: whether it may print more.
        """
        self.folder, self.run, self.pid = folder, folder / "run", command_pid
        self._said, self._goes_on = said, goes_on
        self.deaths: Counter[str] = Counter()
        self.sizes: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """(seconds since the beginning, MB of the largest process) by role."""
        self._draw = random.Random(SEED)
        self._began = time.monotonic()

    def go_on(self) -> None:
        """Kills and measures until the time is over, from the first update on."""
        self._await_whole(lambda: (self.run / "trees" / "updates-000000.jsonl.zst").exists())
        self._began = time.monotonic()
        next_death, next_rank = self.age + DEATH_S, self.age + RANK_S
        while self.age < 60 * MINUTES:
            time.sleep(1.0)
            self._refuse_end()
            actors, ranks = live_actors(self.run), ranks_in(self.folder)
            self._measure(actors, ranks)
            if self.age >= next_death and actors:
                one = self._draw.choice(actors)
                self._kill(one["role"], one["pid"])
                next_death = self.age + DEATH_S
            # Only ranks that work: one that dies while all start has nothing to lose.
            if self.age >= next_rank and actors and len(ranks) == 2:
                self._kill("rank", ranks[self._draw.randrange(2)])
                next_rank = self.age + RANK_S
        # A run that is only just starting again has nothing to save. All that died come back.
        self._await_whole(
            lambda: len(live_actors(self.run)) == NUM_ENGINES and len(ranks_in(self.folder)) == 2
        )

    def _await_whole(self, condition: Callable[[], object]) -> None:
        """Waits for a condition; what starts after a death takes its time."""
        deadline = time.monotonic() + START_S
        while not condition():
            self._refuse_end()
            assert time.monotonic() < deadline, f"not within {START_S} s; {self.report()}"
            time.sleep(1.0)

    def _refuse_end(self) -> None:
        assert self._goes_on(), f"the command has ended; {self.report()}"

    def report(self) -> str:
        return "".join(self._said[-60:]) + self.table()

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    def _kill(self, role: str, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.deaths[role] += 1

    def _measure(self, actors: list[dict[str, Any]], ranks: dict[int, int]) -> None:
        pids = [(one["role"], one["pid"]) for one in actors]
        pids += [(f"rank {rank}", pid) for rank, pid in ranks.items()] + [("command", self.pid)]
        for role in {role for role, _ in pids}:
            largest = max(resident_mb(pid) for own, pid in pids if own == role)
            self.sizes[role].append((self.age, largest))

    def growth_mb(self, role: str) -> float:
        """By how much the largest process of the last third exceeds that of the first."""
        sizes, end = self.sizes[role], self.sizes["command"][-1][0]
        first = [size for at, size in sizes if at < end / 3]
        last = [size for at, size in sizes if at > 2 * end / 3]
        return max(last) - max(first) if first and last else 0.0

    def table(self) -> str:
        lines = [f"deaths: {dict(self.deaths)}"]
        for role, sizes in sorted(self.sizes.items()):
            first, last = sizes[0][1], sizes[-1][1]
            largest = max(size for _, size in sizes)
            lines.append(
                f"{role}: {first:.0f} MB, at the end {last:.0f}, largest {largest:.0f};"
                f" last third {self.growth_mb(role):+.0f} over the first"
            )
        return "\n".join(lines)


def kept(lines: Iterator[str], into: list[str]) -> threading.Thread:
    """Reads a command's output as it comes."""
    reading = threading.Thread(target=lambda: into.extend(lines), daemon=True)
    reading.start()
    return reading


def test_nothing_is_lost_whatever_dies(tmp_path: Path) -> None:
    # Longer than pytest waits for other tests: both runs, starts and ends.
    faulthandler.dump_traceback_later(120 * MINUTES + 3600, file=sys.__stderr__, exit=True)
    spread = (
        *("cluster.learner_ranks=2", f"cluster.engines={NUM_ENGINES}", "run.name=run"),
        "cluster.max_restarts=1000",
    )
    said: list[str] = []
    with command(tmp_path, *RECIPE, *spread, "run.num_updates=100000") as (pid, lines):
        reading = kept(lines, said)
        killer = Killer(tmp_path, pid, said, reading.is_alive)
        killer.go_on()
        os.kill(pid, signal.SIGTERM)
        reading.join(300.0)
    report = killer.report()
    sys.stdout.write(f"{killer.table()}\n")
    assert any("interrupted and saved" in line for line in said), report
    assert is_over(tmp_path, 60.0)
    done = [int(line["update"]) for line in read_metrics(tmp_path / "run")][-1]
    sys.stdout.write(f"updates: {done}\n")
    assert killer.deaths.keys() >= ({"rank"} if MINUTES * 60 > 2 * RANK_S else set()), report
    # The same run to the same update, once more through what was saved, and without any death.
    with command(tmp_path, "--resume", "run", f"run.num_updates={done}") as (_, lines):
        again = "".join(lines)
        assert "finished run" in again, again
    assert [int(line["update"]) for line in read_metrics(tmp_path / "run")] == [*range(done + 1)]
    alone = (*RECIPE, "run.name=alone", f"run.num_updates={done}")
    job = torchrun(2, "-m", "treegraft", "train", *alone, cwd=tmp_path)
    text, _ = job.communicate(timeout=60 * MINUTES + 600)
    assert "finished alone" in text, text
    found, expected = trees_of(tmp_path / "run"), trees_of(tmp_path / "alone")
    assert len(found) == 4 * done and found == expected
    for role in killer.sizes:
        assert killer.growth_mb(role) < GROWTH_MB, report
