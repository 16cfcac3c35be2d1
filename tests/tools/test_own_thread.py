"""Blocking calls in daemon threads."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading

import pytest

from treegraft.tools.own_thread import run_in_thread


def test_a_failure_is_its_callers_and_ends_no_thread() -> None:
    def fail() -> None:
        raise SystemExit(3)

    async def story() -> None:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                await run_in_thread(fail)
            assert await run_in_thread(lambda: "well") == "well"

    asyncio.run(story())


def test_threads_are_used_again_and_never_shared() -> None:
    async def story() -> None:
        # Objects, since a system gives the number of an ended thread to the next one.
        one_by_one = {await run_in_thread(threading.current_thread) for _ in range(50)}
        # A thread waits for calls a moment after its caller has the result, so that the next call
        # may find none.
        assert len(one_by_one) < 10
        barrier = threading.Barrier(8)

        def meet() -> threading.Thread:
            barrier.wait(timeout=10)
            return threading.current_thread()

        assert len(set(await asyncio.gather(*(run_in_thread(meet) for _ in range(8))))) == 8

    asyncio.run(story())


def test_a_forked_process_starts_threads_of_its_own() -> None:
    """The waiting threads of its parent are not in it."""

    async def call() -> int:
        return await asyncio.wait_for(run_in_thread(lambda: 3), timeout=10)

    assert asyncio.run(call()) == 3
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(asyncio.run(call()))
    )
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 3
