"""Batches of questions from many coroutines, answered by one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """Answers questions away from the event loop; those that arrive while a batch is under way
    form the next one."""

    def __init__(self, answer: Callable[[Sequence[Q]], Sequence[A]], thread_name: str) -> None:
        """Args:
        answer: from questions to one answer each, in order; called in one thread. Its error
            fails every question of the batch.
        """
        self._answer = answer
        # One: encoders keep state between calls, and share the cores with the engine.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """Returns the answer. Raises the errors of `answer`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[A] = loop.create_future()
        self._waiting.append((question, answer))
        # The worker starts only after this coroutine waits, so questions of one moment share the
        # first batch.
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await answer

    def close(self) -> None:
        """Ends the thread, once the batch under way is done."""
        self._thread.shutdown(cancel_futures=True)

    async def _work(self) -> None:
        try:
            while self._waiting:
                # Questions that were cancelled meanwhile are left out.
                batch = [one for one in self._waiting if not one[1].done()]
                self._waiting = []
                try:
                    answers = await asyncio.get_running_loop().run_in_executor(
                        self._thread, self._answer, [question for question, _ in batch]
                    )
                except Exception as error:
                    for _, waiting in batch:
                        if not waiting.done():
                            waiting.set_exception(error)
                    continue
                for (_, waiting), answer in zip(batch, answers, strict=True):
                    if not waiting.done():
                        waiting.set_result(answer)
        finally:
            self._worker = None
