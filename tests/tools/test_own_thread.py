"""Blocking calls, each in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from treegraft.tools.own_thread import run_in_thread


def name_and_thread(name: str = "") -> tuple[str, int]:
    return name, threading.get_ident()


def test_a_failure_is_its_callers_and_ends_no_thread() -> None:
    def fail() -> None:
        raise SystemExit(3)

    async def story() -> None:
        for _ in range(3):
            with pytest.raises(RuntimeError):
                await run_in_thread(fail)
            assert (await run_in_thread(name_and_thread))[0] == ""

    asyncio.run(story())
