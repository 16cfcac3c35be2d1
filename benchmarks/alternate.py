"""Runs two ways of doing the same work alternately and prints the ratio of their medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def compare(what: str, ours: Callable[[], object], theirs: Callable[[], object], against: str, num_runs: int = 5) -> float:
    """Returns how many times faster ours is, after one run of each that does not count; prints a line."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for run in range(num_runs + 1):
        for times, work in zip(seconds, (ours, theirs), strict=True):
            began = time.perf_counter()
            work()
            if run:
                times.append(time.perf_counter() - began)
    mine, other = (statistics.median(times) for times in seconds)
    print(f"{what}: {other / mine:.2f}x against {against} (medians of {num_runs}: {mine:.2f} s, {other:.2f} s)", flush=True)
    return other / mine
