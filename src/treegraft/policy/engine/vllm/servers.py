"""The servers of a run: which one answers, what they hold, and what happens when one dies.

Every live server has the weights that are due, under their label. One that dies is left out until
the run is resumed. Any server may answer a request; those of a tree share a cache and so go to one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import EngineError
from treegraft.policy.engine.vllm.checks import check_identity
from treegraft.policy.engine.vllm.replies import ROUTE
from treegraft.policy.engine.vllm.server import Server, Unreachable
from treegraft.settings.policy import EngineSettings

_log = logging.getLogger(__name__)

MAX_FAULTS = 8
"""A request that so many servers, or one server so often, failed to answer ends with an error."""
READY_S = 600.0
"""Longest wait for a server to become ready or to read weights: large models load for minutes."""
_LOADING = "loading"
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError)
"""Raised by answers of another shape; SettingError, of a server that does not fit, is one of
them."""


@dataclass(frozen=True, slots=True)
class Due:
    """The weights that servers have to hold."""

    label: str
    folder: Path | None = None
    """None for those that a server of ours is started with."""
    fingerprint: str = ""


class Member:
    """One server, as the run sees it."""

    def __init__(self, server: Server, max_rows: int) -> None:
        self.server = server
        self.fault = ""
        """Why it is left out, in words; empty while it is not."""
        self.rows = asyncio.Semaphore(max_rows)
        self.load = 0
        """Requests under way or waiting for a row."""
        self.identity: Mapping[str, Any] = {}


class Servers:
    """Asks servers, and gives them weights."""

    def __init__(
        self,
        servers: Sequence[Server],
        settings: EngineSettings,
        expected: Mapping[str, Any],
    ) -> None:
        """Asks nothing yet.

        Args:
            expected: the identity that each server has to have, see `checks.check_identity`.
        """
        self._expected = expected
        self.members = [Member(one, settings.max_rows) for one in servers]
        # In the labels of weights, so that a reply by those of another run is recognised.
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.due = Due(f"{self.owner}-start")
        self._homes: dict[object, Member] = {}

    # ------------------------------------------------------------------ requests

    @property
    def live(self) -> list[Member]:
        return [one for one in self.members if not one.fault]

    @property
    def death(self) -> EngineError | None:
        """Why no server will answer again; None while one may."""
        if self.live:
            return None
        faults = "; ".join(f"{one.server}: {one.fault}" for one in self.members)
        return EngineError(
            f"engine: no server is left: {faults}. Remove the cause, and resume the run, which"
            " starts its servers again.",
            code="no-server-left",
        )

    async def ask(self, home: object, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a server's reply to a request, by the weights that are due.

        Args:
            home: requests with equal ones go to one server while it lives.

        Raises:
            EngineError: no server is left, the request was refused, or it failed everywhere.
        """
        fault = ""
        for _ in range(MAX_FAULTS):
            member = self._member_for(home)
            try:
                return await self._ask_member(member, body)
            except Unreachable as error:
                fault = str(error)
                await self._look_at(member, fault)
        raise EngineError(
            f"engine: a request failed {MAX_FAULTS} times; the last time: {fault}",
            code="request-failed-often",
        )

    async def _ask_member(self, member: Member, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one server's reply by the weights that are due.

        Raises:
            Unreachable: it did not answer, or by other weights; EngineError: it refused.
        """
        member.load += 1
        try:
            async with member.rows:
                # It may have been left out meanwhile.
                if member.fault:
                    raise Unreachable(member.fault)
                reply = await member.server.post(ROUTE, body, timeout_s=None)
        finally:
            member.load -= 1
        self._check_weights(member, reply)
        return dict(reply)

    def _check_weights(self, member: Member, reply: Mapping[str, Any]) -> None:
        for choice in reply["choices"]:
            for span in choice.get("weight_versions") or [{"version": "none"}]:
                if span["version"] != self.due.label:
                    # Another run has published there, or somebody has started the server anew.
                    raise Unreachable(
                        f"{member.server} replied by weights '{span['version']}', not"
                        f" '{self.due.label}'"
                    )

    def _member_for(self, home: object) -> Member:
        if self.death is not None:
            raise self.death
        member = self._homes.get(home)
        if member is None or member.fault:
            # The least busy: groups differ in length, so counting trees would not balance.
            member = min(self.live, key=lambda one: one.load)
            self._homes[home] = member
        return member

    # ------------------------------------------------------------------ life and death

    async def open(self) -> None:
        """Starts the servers and waits until all are live.

        Raises:
            EngineError: one did not become ready in time; SettingError: one that cannot be used.
        """
        starts = [asyncio.create_task(self._open_one(member)) for member in self.members]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _open_one(self, member: Member) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await self._start(member)
        except TimeoutError as error:
            raise EngineError(
                f"engine: {member.server} was not ready within {READY_S:g} s.{_log_of(member)}",
                code="server-not-ready",
            ) from error
        except Unreachable as error:
            raise EngineError(f"engine: {error}.{_log_of(member)}", code="server-failed") from error

    async def close(self) -> None:
        """Ends the servers that are ours."""

        async def stop(member: Member) -> None:
            if member.server.process is not None:
                await asyncio.to_thread(member.server.process.stop)

        await asyncio.gather(*map(stop, self.members))

    async def _look_at(self, member: Member, fault: str) -> None:
        """Leaves a server out after a fault, unless it is well: then a connection was lost, or one
        request failed."""
        # Whoever waited here may not be the first to find it dead.
        if await self._is_as_it_was(member) or member.fault:
            return
        member.fault = fault
        _log.warning("%s is left out: %s.%s", member.server, fault, _log_of(member))

    async def _is_as_it_was(self, member: Member) -> bool:
        server = member.server
        if server.process is not None and server.process.exit_status is not None:
            return False
        with suppress(Unreachable, EngineError, *_UNREADABLE):
            return await server.version() == self.due.label and await server.is_healthy()
        return False

    async def _start(self, member: Member) -> None:
        """Starts the server if it is ours, waits until it answers, and gives it the due weights."""
        server = member.server
        process = server.process
        if process is not None:
            process.start()
        while not await server.is_healthy():
            if process is not None and process.exit_status is not None:
                raise Unreachable(f"{server} ended with status {process.exit_status}")
            if process is None:
                raise EngineError(
                    f"engine.vllm.servers: {server} does not answer; expected a vLLM server there."
                    " Start it, or correct the address.",
                    code="server-not-there",
                )
            await asyncio.sleep(1.0)
        member.identity = await check_identity(server, self._expected)
        await self._give(member)

    # ------------------------------------------------------------------ weights

    async def publish(self, due: Due) -> None:
        """Gives every live server new weights. No request may be under way.

        Raises:
            EngineError: no server took them.
        """
        self.due = due
        # Caches are empty after a publish, so trees may be spread anew.
        self._homes.clear()
        members = self.live
        faults = await asyncio.gather(*map(self._give, members), return_exceptions=True)
        for member, fault in zip(members, faults, strict=True):
            if isinstance(fault, (Unreachable, EngineError, *_UNREADABLE)):
                await self._look_at(member, str(fault))
            elif fault is not None:
                raise fault
        if self.death is not None:
            raise self.death

    async def _give(self, member: Member) -> None:
        """Gives a server the weights that are due."""
        server = member.server
        due = self.due
        # Drained first: a running request would get the label of weights that it does not have.
        await server.post("/pause?mode=wait", timeout_s=READY_S)
        await server.set_version(_LOADING)
        if due.folder is not None:
            path = str(due.folder)
            for one in await server.call("treegraft_load", path, timeout_s=READY_S):
                if one["fingerprint"] != due.fingerprint:
                    raise Unreachable(
                        f"{server} read weights with checksum {one['fingerprint']}, expected"
                        f" {due.fingerprint}"
                    )
        if not (await server.post("/reset_prefix_cache"))["success"]:
            raise Unreachable(f"{server} did not drop the cached keys of its old weights")
        # Only here do the weights become those that a server answers by: all of them are there.
        await server.set_version(due.label)
        await server.post("/resume")


def _log_of(member: Member) -> str:
    process = member.server.process
    return f" The end of {process.log}:\n{process.tail()}" if process is not None else ""
