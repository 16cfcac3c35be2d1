"""Sends weights to vLLM servers, each through a pipe of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch

from treegraft.extras.memory.pipe import Pipe, address_towards, buckets
from treegraft.parts import errors, interfaces

_log = logging.getLogger(__name__)

PIPE_TIMEOUT_S = 60.0
"""Longest wait for one bucket."""


def _changed(why: str) -> errors.EngineError:
    return errors.EngineError(
        f"publish: the weights that are due can no longer be sent ({why}); the server waits for the"
        " next publish",
        code="weights-gone-on",
    )


class Senders:
    """Sends weights to servers from memory to memory, to each through a pipe of its own: one that
    dies breaks no other."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._pipes = timeout_s, dict[Any, Pipe]()
        self._label, self.num_bytes = "", 0

    async def give(
        self, asked: Mapping[Any, Mapping[str, Any]], due: Any
    ) -> Mapping[Any, BaseException]:
        """Sends what is due to paused servers, in one pass over it, and returns what kept some of
        them from taking it.

        Args:
            asked: each with its identity, see `checks.check_identity`.
        """
        source = due.source
        assert source is not None
        faults: dict[Any, BaseException] = {}
        if self._label == due.label and not hasattr(source, "tensors"):
            # Several ranks stream together, and may be learning by now.
            return dict.fromkeys(asked, _changed("ranks send weights once a publish"))
        self._label = due.label

        async def joined(server: Any) -> None:
            if server not in self._pipes:
                self._pipes[server] = await self._met(server, asked[server])

        async def received(server: Any) -> None:
            found = await server.call("treegraft_receive", timeout_s=self._timeout_s)
            for one in found:
                if one["fingerprint"] != due.fingerprint:
                    raise _changed(f"checksum {one['fingerprint']}, expected {due.fingerprint}")

        async def ended(work: Mapping[Any, asyncio.Task[None]]) -> None:
            found = await asyncio.gather(*work.values(), return_exceptions=True)
            pairs = zip(work, found, strict=True)
            faults.update({one: fault for one, fault in pairs if fault is not None})

        await ended({one: asyncio.create_task(joined(one)) for one in asked})
        work = {one: asyncio.create_task(received(one)) for one in asked if one not in faults}
        pipes = {one: self._pipes.pop(one) for one in work}
        is_sent = False
        try:
            await asyncio.to_thread(self._send, source, pipes)
            self._pipes |= pipes
            is_sent = True
        finally:
            for pipe in () if is_sent else pipes.values():
                pipe.close()
            await ended(work)
            for one in faults:
                self._pipes.pop(one, None)
        return faults

    def _send(self, source: interfaces.WeightSource, pipes: dict[Any, Pipe]) -> None:
        """Sends all buckets; `pipes` keeps those that took them."""
        for bucket in buckets(source):
            self.num_bytes += bucket.flat.nbytes
            for server, pipe in list(pipes.items()):
                try:
                    pipe.send(bucket)
                except RuntimeError as error:
                    _log.warning("%s was lost in a publish: %s", server, error)
                    pipes.pop(server).close()

    async def _met(self, server: Any, identity: Mapping[str, Any]) -> Pipe:
        host = "127.0.0.1"
        if server.process is None:
            host = address_towards(urlsplit(server.url).hostname or host)
        kind = "gloo"
        if torch.cuda.is_available():
            # NCCL refuses two processes on one GPU.
            own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            kind = "ipc" if own == identity["gpu"] else "nccl"
        pipe = Pipe(host, 0, 0, 1 + int(identity["workers"]), kind, PIPE_TIMEOUT_S)
        words = (host, pipe.port, 1 + int(identity["workers"]), kind, PIPE_TIMEOUT_S)
        meeting = asyncio.to_thread(pipe.meet)
        try:
            joining = server.call("treegraft_join", *words, timeout_s=2 * PIPE_TIMEOUT_S)
            await asyncio.gather(meeting, joining)
        except RuntimeError as error:
            raise errors.EngineError(
                f"publish: {server} did not join: {error}", code="server-not-joined"
            ) from error
        return pipe
