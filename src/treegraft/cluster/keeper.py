"""Rank 0's view of the actors: it opens them, gives them what they should hold, deals out trees,
and notices who has died."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from treegraft.cluster.actors import value_of
from treegraft.cluster.asking import ClusterEngine
from treegraft.cluster.engines import Weights, pieces_of
from treegraft.core.errors import EngineError, TreegraftError
from treegraft.core.files import write_atomically
from treegraft.core.interfaces import WeightSource
from treegraft.core.text import plain
from treegraft.settings.config import Config

_log = logging.getLogger(__name__)

WATCH_S = 1.0
"""Time between two looks at an actor, in seconds."""
STATE_S = 60.0
"""An actor that says nothing for so long is ended, and started anew."""
START_S = 600.0
"""Longest wait for an actor at the beginning, loading included."""
CLOSE_S = 30.0
"""Longest wait for an actor's own end."""
SHOW_S = 3.0
"""Time between two writings of roles.json, in seconds."""
MAX_DEATHS = 3
"""Growers that may die while a tree grows in them before the tree is blamed for it."""


class State(StrEnum):
    """What an actor can do."""

    STARTING = "starting"
    LIVE = "live"
    DOWN = "down"


class Member:
    """One actor, as rank 0 sees it."""

    def __init__(self, role: str, number: int, make: Callable[[], Any]) -> None:
        self.role, self.number, self.make = role, number, make
        self.handle = make()
        self.state, self.fault = State.STARTING, ""
        self.since = time.time()
        self.seen: dict[str, Any] = {}
        """Its own last words on its state."""
        self.opened: dict[str, Any] = {}
        """What it said when it was opened."""
        self.version, self.route = -1, -1
        self.num_starts = 0
        self.num_trees = 0
        self.lost = asyncio.Event()
        self.looking = asyncio.Lock()

    def __str__(self) -> str:
        return f"{self.role} {self.number}" + (
            f" on {self.seen['host']}" if "host" in self.seen else ""
        )


class Keeper:
    """The actors of a run, engines and growers."""

    def __init__(self, config: Config, engine: ClusterEngine) -> None:
        """Args:
        engine: rank 0's own way to the engines; the keeper tells it which there are.
        """
        self.config, self.engine = config, engine
        self.engines: list[Member] = []
        self.growers: list[Member] = []
        self.helpers: list[Member] = []
        """Tool workers and buffer replicas."""
        self.services: tuple[Any, ...] = ()
        """What growers are told of the helpers when they open."""
        self.due: Weights | None = None
        self._route = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_live = time.monotonic()
        self._folder: Path | None = None
        self.num_restarts = 0
        self.num_bytes = 0

    # ------------------------------------------------------------------ the beginning and the end

    async def help(self, helpers: Sequence[Member], services: tuple[Any, ...]) -> None:
        """Waits until tool workers and buffer replicas can be used; before `open`.

        Args:
            services: what growers are told of them.

        Raises:
            TreegraftError: one that cannot be opened, or not within START_S.
        """
        self.helpers, self.services = list(helpers), services
        await asyncio.gather(*map(self._first, self.helpers))

    async def open(self, engines: Sequence[Member], growers: Sequence[Member]) -> None:
        """Waits until all actors can be used, and watches them from then on.

        Raises:
            TreegraftError: one that cannot be opened, or not within START_S.
        """
        self.engines, self.growers = list(engines), list(growers)
        await asyncio.gather(*map(self._first, self.engines))
        limits = [one.opened["max_context"] for one in self.engines]
        known = [limit for limit in limits if limit is not None]
        self.engine.max_context = min(known, default=None)
        await asyncio.gather(*map(self._first, self.growers))
        for member in self._all:
            self._spawn(self._keep(member))
        self._spawn(self._show())

    async def _first(self, member: Member) -> None:
        import ray

        try:
            async with asyncio.timeout(START_S):
                await self._look(member)
        except TimeoutError as error:
            raise EngineError(
                f"cluster: {member} was not ready within {START_S:.0f} s; expected room for it on"
                " one machine. See `ray status`, and Ray's logs there."
            ) from error
        except ray.exceptions.RayError as error:
            raise EngineError(f"cluster: {member} did not start: {_words(error)}") from error
        self._go_live(member)

    async def close(self) -> None:
        """Ends all actors."""
        import ray

        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

        async def end(member: Member) -> None:
            if member.state is State.LIVE:
                with suppress(ray.exceptions.RayError, TimeoutError, TreegraftError):
                    async with asyncio.timeout(CLOSE_S):
                        value_of(await member.handle.close.remote())
            ray.kill(member.handle)

        await asyncio.gather(*map(end, self._all))
        if self._folder is not None:
            (self._folder / "roles.json").unlink(missing_ok=True)

    @property
    def _all(self) -> Sequence[Member]:
        return (*self.growers, *self.engines, *self.helpers)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ life and death

    async def _keep(self, member: Member) -> None:
        """Looks after one actor to the end of the run."""
        import ray

        while True:
            await asyncio.sleep(WATCH_S)
            try:
                async with asyncio.timeout(None if member.state is State.DOWN else STATE_S):
                    await self._look(member)
            except ray.exceptions.ActorDiedError as error:
                self._lose(member, _words(error))
                # It could not be made where Ray put it; elsewhere it may.
                await asyncio.sleep(SHOW_S)
                member.handle = member.make()
            except ray.exceptions.RayError as error:
                self._lose(member, _words(error))
            except (TimeoutError, TreegraftError) as error:
                self._lose(member, str(error) or f"it has said nothing for {STATE_S:.0f} s")
                ray.kill(member.handle, no_restart=False)
            else:
                self._go_live(member)

    async def _look(self, member: Member) -> None:
        """Asks an actor how it is, and gives it what it lacks."""
        async with member.looking:
            await self._served(member)

    async def _served(self, member: Member) -> None:
        seen = json.loads(await member.handle.state.remote())
        for text in seen.pop("said"):
            _log.warning("%s on %s: %s", f"{member.role} {member.number}", seen["host"], text)
        member.seen = seen
        if seen.get("is_broken"):
            raise EngineError("its engine has died")
        if not seen["is_open"]:
            member.version = member.route = -1
            limit = (self.engine.max_context, *self.services) if member in self.growers else ()
            member.opened = value_of(await member.handle.open.remote(*limit)) or {}
        if member in self.engines:
            while self.due is not None and member.version != self.due.version:
                await self._give(member, self.due)
        elif member in self.growers and member.route != self._route:
            route, version, engines = self._route, self.engine.policy_version, self._answering()
            numbers, handles = [one.number for one in engines], [one.handle for one in engines]
            value_of(await member.handle.take.remote(route, version, numbers, handles))
            member.route = route

    async def _give(self, member: Member, due: Weights) -> None:
        """Gives an engine the weights that are due."""
        held = value_of(await member.handle.publish.remote(due.header(), list(due.pieces)))
        if held and due.fingerprint and held != due.fingerprint:
            raise EngineError(f"its weights have checksum {held}, expected {due.fingerprint}")
        member.version = due.version

    def _go_live(self, member: Member) -> None:
        if member.state is State.LIVE:
            return
        if member.state is State.DOWN:
            _log.warning("%s is back", member)
        member.num_starts += 1
        member.state, member.fault, member.since = State.LIVE, "", time.time()
        member.lost.clear()
        self._tell()

    def _lose(self, member: Member, fault: str) -> None:
        member.version = member.route = -1
        member.fault = fault
        if member.state is not State.LIVE:
            return
        _log.warning("%s: %s; others do its work", member, fault)
        self.num_restarts += 1
        member.state, member.since = State.DOWN, time.time()
        member.lost.set()
        self._tell()

    def _answering(self) -> list[Member]:
        """The engines that hold the weights which are due."""
        due = -1 if self.due is None else self.due.version
        return [one for one in self.engines if one.state is State.LIVE and one.version == due]

    def _tell(self) -> None:
        """Lets growers and this process know which engines answer."""
        answering = self._answering()
        if answering:
            self._last_live = time.monotonic()
        self._route += 1
        version = 0 if self.due is None else self.due.version
        self.engine.take(version, {one.number: one.handle for one in answering})
        self._changed.set()
        self._changed.clear()
        for member in self.growers:
            if member.state is State.LIVE:
                self._spawn(self._tell_one(member))

    async def _tell_one(self, member: Member) -> None:
        import ray

        with suppress(ray.exceptions.RayError, TreegraftError):
            await self._look(member)

    @property
    def death(self) -> EngineError | None:
        """Why no completion will come any more; None while an engine answers or may come back."""
        deadline_s = self.config.engine.deadline_s
        if self._answering() or time.monotonic() - self._last_live < deadline_s:
            return None
        reasons = "; ".join(f"{one}: {one.fault}" for one in self.engines)
        return EngineError(f"engine: none has answered for engine.deadline_s: {reasons}")

    # ------------------------------------------------------------------ weights

    async def publish(self, source: WeightSource, version: int) -> None:
        """Gives all engines new weights once their running completions are done.

        Raises:
            EngineError: no engine took them within engine.deadline_s.
        """
        import ray

        former, fingerprint = self.due, source.fingerprint
        if former is not None and fingerprint and former.fingerprint == fingerprint:
            pieces = former.pieces
        elif former is None and all(
            one.opened["fingerprint"] == fingerprint for one in self.engines
        ):
            pieces = ()
        else:
            pieces = await asyncio.to_thread(self._stored, source)
        self.due = Weights(version, fingerprint, tuple(source.names), pieces)

        async def give(member: Member) -> None:
            try:
                async with asyncio.timeout(self.config.engine.deadline_s):
                    await self._look(member)
            except (ray.exceptions.RayError, TimeoutError, TreegraftError) as error:
                self._lose(member, _words(error))
                faults.append(f"{member}: {member.fault}")

        faults: list[str] = []
        self._last_live = time.monotonic()
        await asyncio.gather(*(give(one) for one in self.engines if one.state is State.LIVE))
        self._tell()
        while not self._answering():
            if self.death is not None:
                raise EngineError(f"publish: no engine took version {version}: {'; '.join(faults)}")
            await asyncio.sleep(WATCH_S)

    def _stored(self, source: WeightSource) -> list[Any]:
        """Hands weights to Ray, which sends them once to each machine that asks for them."""
        import ray

        found = []
        for piece in pieces_of(source):
            found.append(ray.put(piece))
            self.num_bytes += len(piece)
        return found

    # ------------------------------------------------------------------ trees

    async def grow(self, order: str, name: str) -> dict[str, Any]:
        """Returns the tree of an order, from whichever grower has the fewest.

        Args:
            name: of the tree, in errors.

        Raises:
            TreegraftError: what its grower has raised, or the tree's growers have died MAX_DEATHS
                times.
        """
        import ray

        faults: list[str] = []
        while len(faults) < MAX_DEATHS:
            member = await self._free_grower()
            member.num_trees += 1
            answer = member.handle.grow.remote(order)
            asking = asyncio.ensure_future(_awaited(answer))
            lost = asyncio.ensure_future(member.lost.wait())
            try:
                await asyncio.wait((asking, lost), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    faults.append(f"{member}: {member.fault}")
                    continue
                found: dict[str, Any] = value_of(asking.result())
                return found
            except ray.exceptions.RayTaskError as error:
                raise EngineError(
                    f"rollout: tree {name} ended {member} with a fault: {_words(error)}"
                ) from error
            except ray.exceptions.RayError as error:
                faults.append(f"{member}: {_words(error)}")
                self._lose(member, _words(error))
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            finally:
                asking.cancel()
                lost.cancel()
                member.num_trees -= 1
        raise EngineError(
            f"rollout: {MAX_DEATHS} growers have died while tree {name} grew in them"
            f" ({'; '.join(faults)}); expected none. A tool or reward of this task may take all"
            " memory; correct it, and resume."
        )

    async def _free_grower(self) -> Member:
        deadline_s = self.config.engine.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    live = [one for one in self.growers if one.state is State.LIVE]
                    if live and self._answering():
                        return min(live, key=lambda one: (one.num_trees, one.number))
                    await self._changed.wait()
        except TimeoutError as error:
            reasons = [str(one) + ": " + one.fault for one in self.growers if one.fault]
            raise EngineError(
                f"rollout: no grower and engine were there for engine.deadline_s ="
                f" {deadline_s:g} s: {'; '.join(reasons) or 'no engine'}"
            ) from error

    # ------------------------------------------------------------------ what others see

    def show_in(self, folder: Path) -> None:
        """Writes the state of all roles into this run folder from now on."""
        self._folder = folder

    async def _show(self) -> None:
        while True:
            if self._folder is not None:
                with suppress(OSError):
                    write_atomically(self._folder / "roles.json", json.dumps(self.roles()))
            await asyncio.sleep(SHOW_S)

    def roles(self) -> dict[str, Any]:
        """Returns what each actor is, where, and what it waits for."""
        return {
            "written": time.time(),
            "roles": [
                {
                    "role": one.role,
                    "number": one.number,
                    "host": one.seen.get("host", ""),
                    "pid": one.seen.get("pid"),
                    "state": one.state,
                    "since": one.since,
                    "fault": one.fault,
                    "starts": one.num_starts,
                    "queue": one.num_trees if one in self.growers else None,
                    "waits": one.seen.get("waits", ""),
                    "version": one.version if one in self.engines else None,
                }
                for one in self._all
            ],
        }


async def _awaited(answer: Any) -> Any:
    return await answer


def _words(error: BaseException) -> str:
    """An error in a line: the cause that Ray reports at its end, or its beginning."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = lines[-1] if "creation task" in lines[0] else f"{type(error).__name__}: {lines[0]}"
    return plain(said, 600)
