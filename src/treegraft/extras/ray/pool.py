"""Interchangeable actors: a request goes to the least busy one, and to another where that one dies.

A request has to give the same answer whichever of them it reaches, and however often it is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from treegraft.core.errors import DeadlineExceeded
from treegraft.core.spans import carrier, joined, span
from treegraft.extras.ray.actors import Actor, replying, value_of

REST_S = 1.0
"""Time for which an actor that was lost is left alone, unless all are."""
PULSE_S = 30.0
"""Time after which an actor that has not answered is asked for a sign of life, and again."""
SILENCE_S = 15.0
"""Longest wait for a sign of life."""


class Serving(Actor):
    """An actor of a pool."""

    async def ping(self) -> None:
        """Gives a sign of life."""

    def more(self) -> dict[str, Any]:
        """Returns that it can be asked."""
        return {"is_open": True}


def answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Coroutine[Any, Any, str]]:
    """Lets a method of an actor answer what `Pool.ask` sends: it gets the arguments, and its work
    is a span of whoever asks."""

    async def answer(actor: Actor, request: str) -> str:
        asked = json.loads(request)
        with joined(asked["trace"], actor.name), span(method.__name__):
            return await replying(method)(actor, *asked["arguments"])

    answer.__name__, answer.__doc__ = method.__name__, method.__doc__
    return answer


class Pool:
    """Actors that answer the same requests, as one process knows them."""

    def __init__(self, handles: Sequence[Any], role: str, patience_s: float) -> None:
        """Args:
        role: what they are called in messages.
        patience_s: longest time for which a request goes from one lost actor to the next.
        """
        self._handles, self._role, self._patience_s = list(handles), role, patience_s
        self._num_busy = [0] * len(handles)
        self._rests_until = [0.0] * len(handles)

    def take(self, handles: Sequence[Any]) -> None:
        """Takes over other handles of the same actors; as many as before."""
        self._handles[:] = handles

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Returns the answer of one of them.

        Args:
            method: an `answering` one.
            arguments: which JSON can hold.

        Raises:
            DeadlineExceeded: none has answered.
            TreegraftError: what the actor has raised.
        """
        from ray.exceptions import RayError, RayTaskError

        # Escaped, since text of agents may hold what no encoding has.
        request = json.dumps({"arguments": arguments, "trace": carrier()}, default=str)
        lost_at = 0.0
        while True:
            number = min(range(len(self._handles)), key=self._order)
            self._num_busy[number] += 1
            try:
                return value_of(await self._reply(self._handles[number], method, request))
            except RayTaskError:
                # An error of the method itself, which another actor would raise too.
                raise
            except (RayError, TimeoutError) as error:
                now = time.monotonic()
                lost_at = lost_at or now
                self._rests_until[number] = now + REST_S
                if now - lost_at >= self._patience_s:
                    raise DeadlineExceeded(
                        f"{self._role}: no answer within {self._patience_s:g} s from any of"
                        f" {len(self._handles)} actors; the last one was lost by"
                        f" {type(error).__name__}. The state of the cluster tells which nodes are"
                        " gone."
                    ) from error
            finally:
                self._num_busy[number] -= 1
            await asyncio.sleep(max(0.0, min(self._rests_until) - time.monotonic()))

    def _order(self, number: int) -> tuple[bool, int, int]:
        return (time.monotonic() < self._rests_until[number], self._num_busy[number], number)

    async def _reply(self, handle: Any, method: str, request: str) -> str:
        """The reply of one actor, which gives signs of life meanwhile."""
        import ray

        sent = getattr(handle, method).remote(request)
        reply = asyncio.ensure_future(_awaited(sent))
        try:
            while not (await asyncio.wait({reply}, timeout=PULSE_S))[0]:
                async with asyncio.timeout(SILENCE_S):
                    await handle.ping.remote()
            return await reply
        except BaseException:
            reply.cancel()
            with contextlib.suppress(Exception):
                ray.cancel(sent)
            raise


async def _awaited(sent: Any) -> str:
    text: str = await sent
    return text
