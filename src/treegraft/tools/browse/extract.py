"""Text out of pages, in worker processes: a page may be made to hang or flood whatever reads it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.tools.browse.fetch import Page

START_DEADLINE_S = 120.0
"""Longest wait for a worker to start or to become free, in seconds."""
MAX_ANSWER_BYTES = 50_000_000
"""Longest text of a page, as JSON."""

_SCRIPT = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Text:
    """Text(title="Paris", text="Paris is the capital of France.")"""

    title: str
    """Empty where the page has none."""
    text: str


class ExtractPool:
    """Worker processes that read pages; safe for many threads."""

    def __init__(self, num_workers: int) -> None:
        """Starts the first worker in the background, since that takes seconds; others start when
        needed."""
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        # None stands for a place whose worker has not been started.
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers - 1):
            self._free.put(None)
        self._free.put(self._start())

    def read(self, page: Page, deadline_s: float) -> Text:
        """Returns a page's text.

        Raises:
            ToolError: it cannot be read, or not within `deadline_s` seconds.
            ToolUnavailable: no worker became free or could be started.
        """
        try:
            place = self._free.get(timeout=START_DEADLINE_S)
        except queue.Empty:
            raise ToolUnavailable(
                f"no process that reads pages became free within {START_DEADLINE_S:.0f} s"
            ) from None
        worker: _Worker | None = None
        answer: dict[str, Any] | None = None
        try:
            if place is not None and place.process.poll() is not None:
                place.kill()  # it died meanwhile; its pipes are still open
                place = None
            worker = place or self._start()
            worker.wait_until_ready()
            answer = worker.ask(page, deadline_s)
        finally:
            if worker is not None and answer is None:
                with self._lock:
                    self._workers.discard(worker)
                worker.kill()
            self._free.put(worker if answer is not None else None)
        if answer is None:
            raise ToolError(f"{page.url} could not be read within {deadline_s:g} s")
        if "error" in answer:
            raise ToolError(f"{page.url} could not be read: {answer['error']}")
        return Text(answer["title"], answer["text"])

    def close(self) -> None:
        """Ends all workers, those at work included."""
        with self._lock:
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()

    def _start(self) -> _Worker:
        worker = _Worker()
        with self._lock:
            self._workers = {other for other in self._workers if other.process.poll() is None} | {
                worker
            }
        return worker


class _Worker:
    """One child process; `kill` may come from another thread."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],  # -P: this folder has modules named like packages
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self._is_ready = False
        self._closing = threading.Lock()

    def wait_until_ready(self) -> None:
        """Raises `ToolUnavailable` where the worker does not start."""
        if not self._is_ready and self._read_answer(START_DEADLINE_S) != {"ready": True}:
            raise ToolUnavailable(
                "the process that reads pages did not start; check trafilatura with:"
                f" {sys.executable} -c 'import trafilatura', or install it: pip install"
                " 'treegraft[web]'"
            )
        self._is_ready = True

    def ask(self, page: Page, deadline_s: float) -> dict[str, Any] | None:
        """Returns the answer; None when it did not come in time or the worker died: it is then of
        no more use."""
        request = {
            "kind": page.content_type,
            "charset": page.charset,
            "url": page.url,
            "size": len(page.body),
            "seconds": deadline_s + 1.0,
        }
        # A worker reads a whole page before it begins, so writing never waits for its answer.
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request).encode() + b"\n" + page.body)
            self.process.stdin.flush()
        except (OSError, ValueError):
            return None
        return self._read_answer(deadline_s)

    def kill(self) -> None:
        """Ends the process and waits for its end."""
        with self._closing:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _read_answer(self, deadline_s: float) -> dict[str, Any] | None:
        end = time.monotonic() + deadline_s
        line = bytearray()
        poll = select.poll()
        try:
            assert self.process.stdout is not None
            descriptor = self.process.stdout.fileno()
            poll.register(descriptor, select.POLLIN | select.POLLHUP)
            while not line.endswith(b"\n"):
                if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                    return None
                data = os.read(descriptor, 1 << 16)
                if not data or len(line) > MAX_ANSWER_BYTES:
                    return None
                line += data
        except (OSError, ValueError):  # closed by another thread
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer
