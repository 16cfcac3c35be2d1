"""Blocking calls, each in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from treegraft.tools.own_thread import run_in_thread


def name_and_thread(name: str = "") -> tuple[str, int]:
    return name, threading.get_ident()


def test_a_call_that_hangs_holds_up_no_other() -> None:
    release = threading.Event()

    def hang() -> int:
        release.wait(30.0)
        return threading.get_ident()

    async def story() -> tuple[int, set[int]]:
        hanging = asyncio.ensure_future(run_in_thread(hang))
        await asyncio.sleep(0.05)
        calls = (run_in_thread(lambda name=str(n): name_and_thread(name)) for n in range(20))
        found = await asyncio.gather(*calls)
        assert [name for name, _ in found] == [str(n) for n in range(20)]
        assert not hanging.done()
        release.set()
        return await hanging, {thread for _, thread in found}

    own, others = asyncio.run(story())
    assert own not in others


def test_a_failure_is_its_callers_and_ends_no_thread() -> None:
    def fail() -> None:
        raise SystemExit(3)

    async def story() -> None:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                await run_in_thread(fail)
            assert (await run_in_thread(name_and_thread))[0] == ""

    asyncio.run(story())
