"""How servers get weights: from a folder, from memory to memory, or an adapter over those that they
hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from treegraft.core.interfaces import WeightSource
from treegraft.policy.engine.vllm.folder import WeightsFolder
from treegraft.policy.engine.vllm.pipe import Pipe, address_towards, buckets
from treegraft.policy.engine.vllm.server import Server, Unreachable
from treegraft.policy.output_head import first_line
from treegraft.policy.weights import ModelWeights

_log = logging.getLogger(__name__)

PIPE_TIMEOUT_S = 60.0
"""Longest wait for one bucket."""


class Changed(Unreachable):
    """The weights that are due can no longer be sent: the learner has gone on."""


@dataclass(frozen=True, slots=True)
class Due:
    """The weights that servers have to hold."""

    label: str
    folder: WeightsFolder | None
    """None for those that a server of ours is started with, and those that come by memory."""
    fingerprint: str
    """Empty where servers cannot report it."""
    is_adapter: bool = False
    """Whether the folder holds an adapter, to be laid over the weights of `Fleet.base`."""
    source: WeightSource | None = None
    """From which they are sent from memory to memory; None for a folder."""


@dataclass(slots=True)
class Held:
    """What a server is known to hold."""

    has_base: bool = False
    """The weights that adapters are laid over, where it did not start with them."""
    adapter: str = ""
    """Name of the adapter that it was given last."""


async def give_weights(
    server: Server, held: Held, due: Due, base: WeightsFolder | None, timeout_s: float
) -> None:
    """Gives a paused server the folder that is due.

    Args:
        base: the weights below an adapter; None where servers are started with them.

    Raises:
        Unreachable, EngineError: it did not take them, or read other ones.
    """
    if not due.is_adapter:
        await _give_folder(server, due.folder, due.fingerprint, timeout_s)
        held.has_base = due.folder is base
        return
    if not held.has_base:
        await _give_folder(server, base, "", timeout_s)
        held.has_base = True
    assert due.folder is not None
    body = {"lora_name": due.label, "lora_path": str(due.folder.path)}
    # Room for two: the former one goes when this one has been read.
    await server.request("POST", "/v1/load_lora_adapter", body, timeout_s=timeout_s)
    former, held.adapter = held.adapter, due.label
    if former:
        body = {"lora_name": former}
        await server.request("POST", "/v1/unload_lora_adapter", body, timeout_s=timeout_s)


async def _give_folder(
    server: Server, folder: WeightsFolder | None, fingerprint: str, timeout_s: float
) -> None:
    if folder is not None:
        found = await server.call("treegraft_load", str(folder.path), timeout_s=timeout_s)
        check_sums(server, found, fingerprint)


def check_sums(server: Server, found: Sequence[Mapping[str, str]], expected: str) -> None:
    """Raises Unreachable where one of a server's workers read other weights than expected, ""
    for any."""
    for one in found:
        if expected and one["fingerprint"] != expected:
            raise Unreachable(
                f"{server} read weights with checksum {one['fingerprint']}, expected {expected}"
            )


class Senders:
    """Sends weights to servers from memory to memory, to each through a pipe of its own: one that
    dies breaks no other."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._pipes = timeout_s, dict[Server, Pipe]()
        self._label, self.num_bytes = "", 0

    async def give(
        self, asked: Mapping[Server, Mapping[str, Any]], due: Due
    ) -> Mapping[Server, BaseException]:
        """Sends what is due to paused servers, in one pass over it, and returns what kept some of
        them from taking it.

        Args:
            asked: each with its identity, see `checks.check_identity`.
        """
        source = due.source
        assert source is not None
        faults: dict[Server, BaseException] = {}
        if self._label == due.label and not isinstance(source, ModelWeights):
            # Several ranks stream together, and may be learning by now.
            return dict.fromkeys(asked, Changed("the ranks send weights once a publish"))
        self._label = due.label

        async def joined(server: Server) -> None:
            if server not in self._pipes:
                self._pipes[server] = await self._met(server, asked[server])

        async def received(server: Server) -> None:
            found = await server.call("treegraft_receive", timeout_s=self._timeout_s)
            try:
                check_sums(server, found, due.fingerprint)
            except Unreachable as fault:
                raise Changed(str(fault)) from fault

        async def ended(work: Mapping[Server, asyncio.Task[None]]) -> None:
            found = await asyncio.gather(*work.values(), return_exceptions=True)
            pairs = zip(work, found, strict=True)
            faults.update({one: fault for one, fault in pairs if fault is not None})

        await ended({one: asyncio.create_task(joined(one)) for one in asked})
        work = {one: asyncio.create_task(received(one)) for one in asked if one not in faults}
        pipes = {one: self._pipes.pop(one) for one in work}
        try:
            await asyncio.to_thread(self._send, source, pipes)
            self._pipes |= pipes
        finally:
            # What still waits for a bucket is told by the end of its pipe.
            del pipes
            await ended(work)
            for one in faults:
                self._pipes.pop(one, None)
        return faults

    def _send(self, source: WeightSource, pipes: dict[Server, Pipe]) -> None:
        """Sends all buckets; `pipes` keeps those that took them."""
        for bucket in buckets(source):
            self.num_bytes += bucket.flat.nbytes
            for server, pipe in list(pipes.items()):
                try:
                    pipe.send(bucket)
                except RuntimeError as error:
                    _log.warning("%s was lost in a publish: %s", server, first_line(error))
                    del pipes[server]

    async def _met(self, server: Server, identity: Mapping[str, Any]) -> Pipe:
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
            raise Unreachable(f"{server} did not join the publish: {first_line(error)}") from error
        return pipe
