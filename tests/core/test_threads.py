"""Teams of OpenMP threads are given back, and come again."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from treegraft.core.threads import _pause, release_threads


@pytest.mark.skipif(
    not Path("/proc/self/task").exists() or _pause() is None,
    reason="torch has no OpenMP runtime of GNU's here",
)
def test_a_team_ends_and_comes_again() -> None:
    counts: list[int] = []

    def count() -> None:
        # A thread that ends is listed for another moment.
        time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/task")))

    def work() -> None:
        torch.set_num_threads(3)
        count()
        for _ in range(2):
            torch.ones(3_000_000).mul_(2.0)
            count()
            release_threads()
            count()
        release_threads()
        torch.set_num_threads(1)

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    alone, *rest = counts
    assert rest == [alone + 2, alone, alone + 2, alone]
