"""A run on a Ray cluster of this machine under random deaths for half an hour: all updates are
done, their trees are those of an undisturbed run, memory stays what it was, and no process is left.

TREEGRAFT_SOAK_MINUTES and TREEGRAFT_SOAK_DEATH_S set how long it takes and the time between two
deaths of engines.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cluster.nodes import Disturbed
from tests.cluster.parts import needs_ray
from tests.cluster.test_services import trees_of

from treegraft import train
from treegraft.runs.record import read_metrics
from treegraft.settings.load import load_config

pytestmark = [needs_ray, pytest.mark.slow]
MINUTES = float(os.environ.get("TREEGRAFT_SOAK_MINUTES", "30"))
DEATH_S = float(os.environ.get("TREEGRAFT_SOAK_DEATH_S", "20"))
START_S = 600.0
"""Longest wait for the run to begin, and for all engines to be back."""
NUM_ENGINES = 3
GROWTH_MB = 64.0
"""Limit on the growth of the command's process from the first third of the time to the last."""
RECIPE = [
    "warmup.num_steps=40",
    "tasks.num_train=100",
    "tasks.num_eval=4",
    "eval.every=0",
    "tasks.search_world.hops=[1,2]",
    "run.tasks_per_update=4",
    "explore.num_leaves=4",
    "explore.explorers=['graft']",
    "explore.graft.num_hybrid=3",
    "buffer.path=expert",
    "buffer.encoder=hashing",
    "buffer.grow.num_best=1",
    "tools.use=['tests.cluster.parts:Odd']",
    "eval.at_start=false",
    "eval.at_end=false",
    "checkpoint.every=2",
]


def resident_mb(pid: int) -> float:
    """The memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def disturb(run: Disturbed) -> tuple[int, float]:
    """Kills engines for the time of the test; returns how many, and the growth of the command's
    process in MB."""
    draw = random.Random(20261123)
    num_deaths = 0
    sizes: list[float] = []
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        time.sleep(DEATH_S)
        assert run.process.poll() is None, run.log.read_text()
        sizes.append(resident_mb(run.process.pid))
        if engines := run.engines():
            with suppress(ProcessLookupError):
                os.kill(draw.choice(engines), signal.SIGKILL)
                num_deaths += 1
    third = max(1, len(sizes) // 3)
    return num_deaths, max(sizes[-third:]) - max(sizes[:third])


def test_nothing_is_lost_whatever_dies(tmp_path: Path) -> None:
    # Longer than pytest waits for other tests: both runs, starts and ends.
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(120 * MINUTES + 3600, file=sys.__stderr__, exit=True)
    own = (f"run.dir={tmp_path}", "run.name=cluster", f"cluster.engines={NUM_ENGINES}")
    run = Disturbed(tmp_path, "demo", *RECIPE, *own, "run.num_updates=100000")
    try:
        run.until(lambda: run.num_lines() > 0, "an update", START_S)
        num_deaths, growth_mb = disturb(run)
        run.until(lambda: len(run.engines()) == NUM_ENGINES, "all engines", START_S)
        run.process.send_signal(signal.SIGTERM)
        run.wait()
        assert run.until_gone(60.0) == {}
        done = [int(line["update"]) for line in read_metrics(run.run)][-1]
        sys.stdout.write(f"{done} updates, {num_deaths} deaths, {growth_mb:+.0f} MB\n")
        assert num_deaths and growth_mb < GROWTH_MB
        # The same run to the same update, once more through what was saved.
        run.process = run.start("--resume", str(run.run), f"run.num_updates={done}")
        assert run.wait() == 0, run.log.read_text()
    finally:
        run.end()
    assert [int(line["update"]) for line in read_metrics(run.run)] == [*range(done + 1)]
    alone = (f"run.dir={tmp_path}", "run.name=alone", f"run.num_updates={done}")
    train(load_config("demo", [*RECIPE, *alone]), display=False)
    found = trees_of(run.run)
    assert len(found) == 4 * done and found == trees_of(tmp_path / "alone")
