"""The servers of a run: which one answers, what they hold, and what happens when one dies.

Every server that is live holds the weights of `Fleet.due`, under its label, and belongs to this
run. One that dies is left out until it is back and has been given those weights. A completion does
not depend on the server, so any may answer; those of a tree share a cache and so keep to one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from enum import StrEnum
from typing import Any

from treegraft.core.errors import EngineError, SettingError
from treegraft.policy.engine.vllm.checks import check_identity, claim
from treegraft.policy.engine.vllm.folder import WeightsFolder
from treegraft.policy.engine.vllm.loading import CHANGED, Due, Held, give_weights
from treegraft.policy.engine.vllm.protocol import PLAIN_ROUTE, ROUTE
from treegraft.policy.engine.vllm.server import CONTROL_TIMEOUT_S, Server, Unreachable
from treegraft.settings.policy import EngineSettings

_log = logging.getLogger(__name__)

WATCH_S = 5.0
"""Time between two looks at the servers, in seconds."""
MAX_FAULTS = 8
"""A request that so many servers, or one server so often, failed to answer is given up."""
SLOW_SHARE = 0.25
"""A server is slow where it computes less than this share of what the others do in the median, in
all and for each of its requests: one with few requests is slow by the first alone."""
SLOW_LOOKS = 3
"""Looks in a row after which it is drained."""
_LOADING = "loading"
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError)
"""Raised by answers of another shape; SettingError, of a server that does not fit, is one of
them."""


class State(StrEnum):
    """What a server can do."""

    DOWN = "down"
    """Nothing yet, or nothing any more until it is back."""
    LIVE = "live"
    """It answers, with the weights that are due."""
    DRAINED = "drained"
    """It is slow or off the learner's policy: it gets no request until the next publish, unless no
    other is left."""
    LEFT_OUT = "left out"
    """It has died too often."""


class Member:
    """One server, as the fleet sees it."""

    def __init__(self, server: Server, max_rows: int) -> None:
        self.server, self.state = server, State.DOWN
        self.rows = asyncio.Semaphore(max_rows)
        self.asking: set[asyncio.Task[Any]] = set()
        """Requests under way."""
        self.num_waiting = 0
        self.num_revivals = 0
        self.fault = ""
        """Why it is not live, in words."""
        self.hangs = self.sleeps = False
        self.loading = asyncio.Lock()
        self.num_tokens, self.progress_at = -1.0, 0.0
        self.speed: tuple[float, float] | None = None
        """Tokens since the last look, in all and for each request; None where it had none."""
        self.num_slow = 0
        """Looks in a row at which it was slow."""
        self.identity: Mapping[str, Any] = {}
        self.held = Held()

    @property
    def load(self) -> int:
        return len(self.asking) + self.num_waiting


class Fleet:
    """Asks servers, keeps them alive, and gives them weights."""

    def __init__(
        self,
        servers: Sequence[Server],
        settings: EngineSettings,
        expected: Mapping[str, Any],
        is_external: bool,
    ) -> None:
        """Asks nothing yet.

        Args:
            expected: the identity that each server has to have, see `checks.check_identity`.
            is_external: somebody else gives the servers weights, whose labels mean nothing here.
        """
        self.settings, self._expected, self.is_external = settings, expected, is_external
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.members = [Member(one, settings.max_rows) for one in servers]
        self.due = Due(f"{self.owner}-start", None, "")
        self.base: WeightsFolder | None = None
        """The weights that a server from elsewhere needs below an adapter."""
        self._wait_s = settings.vllm.start_timeout_s
        self.senders: Any = None
        """Of publish.kind, if an extension has registered that."""
        self._homes: dict[object, Member] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_requests = self.num_moved = self.num_repeated = self.num_revivals = 0
        self.num_drained = 0
        self.num_prompt = self.num_cached = 0

    # ------------------------------------------------------------------ requests

    @property
    def live(self) -> list[Member]:
        return [one for one in self.members if one.state is State.LIVE]

    @property
    def death(self) -> EngineError | None:
        """Why no server will answer again; None while one is live or on its way."""
        if any(one.state is not State.LEFT_OUT for one in self.members):
            return None
        reasons = "; ".join(f"{one.server}: {one.fault}" for one in self.members)
        return EngineError(
            f"engine: no server is left after engine.vllm.max_restarts ="
            f" {self.settings.vllm.max_restarts}: {reasons}",
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
            member = await self._member_for(home)
            try:
                return await self.ask_member(member, body)
            except Unreachable as error:
                fault = str(error)
                self.num_moved += 1
                self.lost(member, fault)
        raise EngineError(
            f"engine: a request failed {MAX_FAULTS} times; the last time: {fault}",
            code="request-failed-often",
        )

    async def ask_member(self, member: Member, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one server's reply by the weights that are due.

        Raises:
            Unreachable: it did not answer, or by other weights; EngineError: it refused.
        """
        reply = await self._ask_once(member, body)
        labels = {
            span["version"]
            for choice in reply["choices"]
            for span in choice.get("weight_versions") or ({"version": "none"},)
        }
        if (wrong := labels - {self.due.label}) and not self.is_external:
            # Another run has published there, or somebody has started the server anew.
            self.num_repeated += 1
            raise Unreachable(
                f"{member.server} replied by weights '{min(wrong)}', not '{self.due.label}'"
            )
        usage = reply.get("usage") or {}
        self.num_prompt += usage.get("prompt_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        self.num_cached += details.get("cached_tokens") or 0
        return reply

    async def _member_for(self, home: object) -> Member:
        while True:
            if self.death is not None:
                raise self.death
            if not self.live:
                self._take_back()
            member = self._homes.get(home)
            if (member is None or member.state is not State.LIVE) and self.live:
                member = self._homes[home] = min(self.live, key=lambda one: one.load)
            if member is not None and member.state is State.LIVE:
                return member
            self._changed.clear()
            await self._changed.wait()

    async def _ask_once(self, member: Member, body: Mapping[str, Any]) -> dict[str, Any]:
        member.num_waiting += 1
        try:
            await member.rows.acquire()
        finally:
            member.num_waiting -= 1
        try:
            if member.state is not State.LIVE:
                raise Unreachable(member.fault)
            self.num_requests += 1
            path = PLAIN_ROUTE if self.is_external else ROUTE
            asking = asyncio.create_task(member.server.request("POST", path, body, timeout_s=None))
            member.asking.add(asking)
            try:
                # In a task of its own, so that a server which hangs can be given up.
                await asyncio.wait([asking])
                if asking.cancelled():
                    raise Unreachable(member.fault)
                return dict(asking.result().json())
            except ValueError as error:
                raise Unreachable(f"{member.server} did not reply in JSON: {error}") from error
            finally:
                asking.cancel()
                member.asking.discard(asking)
        finally:
            member.rows.release()

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
        self._spawn(self._watch())

    async def _open_one(self, member: Member) -> None:
        timeout_s = self.settings.vllm.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._raise_up(member, is_first=True)
        except TimeoutError as error:
            raise EngineError(
                f"engine: {member.server} was not ready within engine.vllm.start_timeout_s ="
                f" {timeout_s:g} s.{self._log_of(member)}",
                code="server-not-ready",
            ) from error
        except Unreachable as error:
            raise EngineError(
                f"engine: {error}.{self._log_of(member)}", code="server-failed"
            ) from error
        except SettingError:
            raise
        except _UNREADABLE as error:
            raise EngineError(
                f"engine.vllm: {member.server} is not a vLLM server, by its answers ({error!r});"
                " expected one that docs/serving.md describes. Correct the address.",
                code="not-a-vllm-server",
            ) from error
        self._go_live(member)

    async def close(self) -> None:
        """Gives the servers up, and ends those that are ours."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            if member.server.process is not None or self.is_external:
                continue
            with suppress(Unreachable, EngineError, *_UNREADABLE):
                await member.server.call("treegraft_release", self.owner, timeout_s=5.0)
        ours = [one.server.process for one in self.members if one.server.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in ours))

    def _go_live(self, member: Member) -> None:
        member.state, member.fault, member.hangs = State.LIVE, "", False
        member.num_tokens, member.speed, member.num_slow = -1.0, None, 0
        self._changed.set()

    def lost(self, member: Member, fault: str) -> None:
        """Leaves the server out until it is found well or is back; if it is not well, its requests
        move."""
        if member.state is not State.LIVE:
            return
        member.state, member.fault = State.DOWN, fault
        self._spawn(self._revive(member))

    def drain(self, member: Member, why: str) -> None:
        """Moves a live server's requests to the others until the next publish."""
        member.state, member.fault = State.DRAINED, why
        self.num_drained += 1
        _log.warning("%s; its requests go to other servers until the next publish", why)
        for task in member.asking:
            task.cancel()

    def _take_back(self) -> None:
        """Lets drained servers answer again."""
        for member in self.members:
            if member.state is State.DRAINED:
                self._go_live(member)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _revive(self, member: Member) -> None:
        if not member.hangs and await self._is_as_it_was(member):
            # A connection was lost, or one request failed; the others go on.
            self._go_live(member)
            return
        _log.warning("%s: %s; its requests go to other servers", member.server, member.fault)
        for task in member.asking:
            task.cancel()
        most = self.settings.vllm.max_restarts
        while member.num_revivals < most:
            member.num_revivals += 1
            self.num_revivals += 1
            try:
                async with asyncio.timeout(self.settings.vllm.start_timeout_s):
                    await self._raise_up(member)
            except (TimeoutError, Unreachable, EngineError, *_UNREADABLE) as error:
                if isinstance(error, EngineError) and error.code == CHANGED:
                    return self.drain(member, f"{member.server} came back late: {error}")
                member.fault = str(error) or "it was not ready in time"
                _log.warning("%s: %s", member.server, member.fault)
                continue
            _log.warning("%s is back, with the weights that are due", member.server)
            self._go_live(member)
            return
        member.state = State.LEFT_OUT
        _log.warning("%s is left out: %s", member.server, member.fault)
        self._changed.set()

    async def _is_as_it_was(self, member: Member) -> bool:
        server = member.server
        if server.process is not None and server.process.exit_status is not None:
            return False
        with suppress(Unreachable, EngineError, *_UNREADABLE):
            is_due = self.is_external or await server.version() == self.due.label
            return is_due and await server.is_healthy()
        return False

    async def _raise_up(self, member: Member, *, is_first: bool = False) -> None:
        """Waits until the server answers, started anew where it is ours, and has the weights that
        are due."""
        server, process = member.server, member.server.process
        if process is not None:
            # Not asked for its health first: a process that hangs may still say that it is well.
            is_well = not is_first and process.exit_status is None and await server.is_healthy()
            if not is_well or member.hangs:
                member.held.adapter, member.sleeps = "", False
                await asyncio.to_thread(process.stop, for_good=False)
                process.start()
        while not await server.is_healthy():
            if process is not None and process.exit_status is not None:
                raise Unreachable(f"{server} ended with status {process.exit_status}")
            if process is None and is_first:
                # Nobody said that it is still to come.
                raise EngineError(
                    f"engine.vllm.servers: {server} does not answer; expected a vLLM server there."
                    " Start it, or correct the address.",
                    code="server-not-there",
                )
            await asyncio.sleep(1.0)
        if not self.is_external:
            member.identity = await check_identity(server, self._expected)
            await claim(server, self.owner)
        if process is None:
            # Somebody may have started it anew.
            member.held = Held()
        # What is due may change while it is being loaded.
        while not self.is_external and await server.version() != self.due.label:
            for fault in (await self.load(member)).values():
                raise fault

    async def _watch(self) -> None:
        """Finds servers that have died or hang, and renews the claims."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_S)
            for member in self.live:
                if member.sleeps:
                    # One that dies now is started when the learner has left it room again.
                    continue
                process = member.server.process
                if process is not None and process.exit_status is not None:
                    self.lost(member, f"it ended with status {process.exit_status}")
                    continue
                try:
                    num_tokens = await member.server.num_tokens()
                    if process is None and not self.is_external:
                        await claim(member.server, self.owner)
                except (Unreachable, EngineError, *_UNREADABLE) as error:
                    self.lost(member, str(error))
                    continue
                since, count = num_tokens - member.num_tokens, len(member.asking)
                is_known = member.num_tokens >= 0 and count
                member.speed = (since, since / count) if is_known else None
                if since or not count:
                    member.num_tokens, member.progress_at = num_tokens, loop.time()
                elif loop.time() - member.progress_at > self.settings.vllm.hang_timeout_s:
                    waited = f"{self.settings.vllm.hang_timeout_s:g} s"
                    member.hangs = True
                    self.lost(member, f"it computed no token within {waited}")
            self._find_slow()

    def _find_slow(self) -> None:
        """Drains a server that was slow at `SLOW_LOOKS` looks in a row."""
        speeds = [(one, one.speed) for one in self.live if one.speed is not None]
        for member, own in speeds:
            others = [speed for one, speed in speeds if one is not member]
            medians = map(statistics.median, zip(*others, strict=True))
            is_slow = bool(others) and all(
                mine < SLOW_SHARE * median for mine, median in zip(own, medians, strict=True)
            )
            member.num_slow = member.num_slow + 1 if is_slow else 0
            if member.num_slow >= SLOW_LOOKS:
                share = "less than a quarter of the other servers' tokens a second"
                self.drain(member, f"{member.server} computes {share}")

    def _log_of(self, member: Member) -> str:
        process = member.server.process
        return f" The end of {process.log}:\n{process.tail()}" if process is not None else ""

    # ------------------------------------------------------------------ weights

    def begin_anew(self, version: int) -> None:
        """Asks servers that somebody else has given new weights."""
        self.due = Due(f"{self.owner}-{version}", None, "")
        self._homes.clear()
        self._take_back()

    async def rest(self, level: int) -> None:
        """Has servers leave their GPUs until they are given weights; no request may be under way.

        Args:
            level: 1 keeps the weights in the hosts' memory, 2 keeps none.
        """

        async def each(member: Member) -> None:
            try:
                await member.server.set_version(_LOADING)
                path = f"/sleep?level={level}&mode=wait"
                await member.server.request("POST", path, timeout_s=self._wait_s)
                member.sleeps = True
            except (Unreachable, EngineError) as fault:
                _log.warning("%s stays on its GPU while the run learns: %s", member.server, fault)

        await asyncio.gather(*(each(one) for one in self.live if not one.sleeps))

    async def publish(self, due: Due, deadline_s: float) -> None:
        """Gives every live server new weights. No request may be under way.

        Raises:
            EngineError: no server took them within `deadline_s`.
        """
        self.due = due
        self._homes.clear()
        self._take_back()

        for member, fault in (await self.load(*self.live)).items():
            self.lost(member, str(fault))
        try:
            async with asyncio.timeout(deadline_s):
                # Where all of them failed: one that is started anew.
                await self._member_for(None)
        except TimeoutError as error:
            reasons = "; ".join(f"{one.server}: {one.fault}" for one in self.members)
            raise EngineError(
                f"engine: no server took the weights within engine.deadline_s = {deadline_s:g} s:"
                f" {reasons}",
                code="publish-refused",
            ) from error

    async def load(self, *members: Member) -> Mapping[Member, BaseException]:
        """Gives servers the weights that are due, and returns what kept some from taking them."""
        faults: dict[Member, BaseException] = {}

        async def each(step: Callable[[Member], Coroutine[Any, Any, None]]) -> None:
            left = [one for one in members if one not in faults]
            found = await asyncio.gather(*map(step, left), return_exceptions=True)
            faults.update({m: one for m, one in zip(left, found, strict=True) if one is not None})

        async with AsyncExitStack() as stack:
            for one in members:
                await stack.enter_async_context(one.loading)
            due = self.due
            await each(self._pause)
            if due.source is None:
                await each(
                    lambda one: give_weights(one.server, one.held, due, self.base, self._wait_s)
                )
            else:
                asked = {one.server: one.identity for one in members if one not in faults}
                lost = await self.senders.give(asked, due)
                faults |= {one: lost[one.server] for one in members if one.server in lost}
            await each(lambda one: self._resume(one, due))
        for fault in faults.values():
            if not isinstance(fault, (Unreachable, EngineError, *_UNREADABLE)):
                raise fault
        return faults

    async def _pause(self, member: Member) -> None:
        server = member.server
        if server.process is None:
            # The claim may have run out while the learner was busy.
            await claim(server, self.owner)
        # Drained first: a running request would get the label of weights that it does not have.
        await server.request("POST", "/pause?mode=wait", timeout_s=self._wait_s)
        await server.set_version(_LOADING)
        if member.sleeps:
            await server.request("POST", "/wake_up?tags=weights", timeout_s=self._wait_s)

    async def _resume(self, member: Member, due: Due) -> None:
        """Only here do the weights become those that a server answers by: all of them are there."""
        server = member.server
        if member.sleeps:
            # Last: the weights on their way take room too. The server itself resumes with this.
            await server.request("POST", "/wake_up?tags=kv_cache", timeout_s=self._wait_s)
            member.sleeps = False
        response = await server.request("POST", "/reset_prefix_cache", timeout_s=CONTROL_TIMEOUT_S)
        if not response.json()["success"]:
            raise Unreachable(f"{server} did not drop the cached keys of its old weights")
        await server.set_version(due.label)
        await server.request("POST", "/resume", timeout_s=CONTROL_TIMEOUT_S)
