"""Rank 0's engine on a cluster, which looks after those of the actors: it opens them, gives them
the weights that are due, deals out trees, and notices who has died."""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from treegraft import Config, TreegraftError
from treegraft.extras.ray.actors import value_of
from treegraft.extras.ray.engines import Weights, pieces_of
from treegraft.parts import Completion, errors, interfaces, plain

_log = logging.getLogger(__name__)

WATCH_S = 1.0
"""Time between two looks at an engine, in seconds."""
STATE_S = 60.0
"""An engine that says nothing for so long is made anew."""
START_S = 600.0
"""Longest wait for an engine at the beginning, loading included."""
CLOSE_S = 30.0
"""Longest wait for an engine's own end."""
SHOW_S = 3.0
"""Time between two writings of roles.json, in seconds."""
SLOW_SHARE = 0.25
"""An engine is slow where it samples less than this share of what the others do in the median, in
all and for each second of a request."""
SLOW_LOOKS = 3
"""Looks in a row after which it is drained."""
FREE_S = 0.1
"""Time between two looks for an engine, in seconds, where none answers."""
MAX_DEATHS = 3
"""Engines that may die while a tree grows in them before the tree is blamed for it."""


class State(StrEnum):
    """What an engine can do."""

    STARTING = "starting"
    LIVE = "live"
    DRAINED = "drained"
    """It is slow: it gets no tree until the next publish, unless no other is left."""
    DOWN = "down"

    @property
    def is_up(self) -> bool:
        """Whether trees can grow there."""
        return self in (State.LIVE, State.DRAINED)


class Member:
    """One engine, as rank 0 sees it."""

    def __init__(self, number: int, make: Callable[[], Any]) -> None:
        self.number, self.make = number, make
        self.handle = make()
        self.state, self.fault = State.STARTING, ""
        self.seen: dict[str, Any] = {}
        """Its own last words on its state."""
        self.opened: dict[str, Any] | None = None
        """What it said when it was opened; None before."""
        self.edition = 0
        """Which weights it holds, see `Weights`."""
        self.num_starts = 0
        self.num_trees = 0
        self.sampled = (0.0, 0.0)
        """Tokens, and seconds of requests, at the last look at its speed."""
        self.num_slow = 0
        self.left = asyncio.Event()
        """Set, and replaced by another one, when its trees have to grow elsewhere."""
        self.looking = asyncio.Lock()

    def __str__(self) -> str:
        return f"engine {self.number}" + (f" on {self.seen['host']}" if "host" in self.seen else "")


class Keeper:
    """The engines of a run as one engine, to which rank 0 publishes. Trees alone are sampled: whole
    ones, in whichever engine."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engines: list[Member] = []
        self.max_context: int | None = None
        self.fingerprint = ""
        self.due = Weights(0, 0, "", [], [])
        """What engines should hold; at first what they begin with."""
        self._tasks: list[asyncio.Task[None]] = []
        self._last_live = time.monotonic()
        self._folder: Path | None = None
        self.num_requests = self.num_restarts = self.num_drained = self.num_bytes = 0

    # ------------------------------------------------------------------ the beginning and the end

    async def open(self, engines: Sequence[Member]) -> None:
        """Waits until all engines can be used, and watches them from then on.

        Raises:
            TreegraftError: one that cannot be opened, or not within START_S.
        """
        self.engines = list(engines)
        await asyncio.gather(*map(self._first, self.engines))
        limits = [found["max_context"] for found in self._opened]
        self.max_context = min((one for one in limits if one is not None), default=None)
        watching = (self._show(), *map(self._keep, self.engines))
        self._tasks = [asyncio.create_task(one) for one in watching]
        for task in self._tasks:
            task.add_done_callback(_tell_fault)

    async def _first(self, member: Member) -> None:
        import ray

        try:
            async with asyncio.timeout(START_S):
                await self._look(member)
        except TimeoutError as error:
            raise errors.EngineError(
                f"cluster: {member} was not ready within {START_S:.0f} s; expected room for it on"
                " one machine. See `ray status`, and Ray's logs there.",
                code="actor-not-ready",
            ) from error
        except ray.exceptions.RayError as error:
            raise errors.EngineError(
                f"cluster: {member} did not start: {_words(error)}", code="actor-not-started"
            ) from error
        self._go_live(member)

    async def close(self) -> None:
        """Ends all engines."""
        import ray

        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

        async def end(member: Member) -> None:
            if member.state.is_up:
                with suppress(ray.exceptions.RayError, TimeoutError, TreegraftError):
                    async with asyncio.timeout(CLOSE_S):
                        value_of(await member.handle.close.remote())
            ray.kill(member.handle)

        await asyncio.gather(*map(end, self.engines))
        if self._folder is not None:
            (self._folder / "roles.json").unlink(missing_ok=True)

    @property
    def _opened(self) -> list[dict[str, Any]]:
        """What each engine said when it was opened."""
        return [one.opened for one in self.engines if one.opened is not None]

    # ------------------------------------------------------------------ life and death

    async def _keep(self, member: Member) -> None:
        """Looks after one engine to the end of the run."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._attend(member)

    async def _attend(self, member: Member) -> None:
        """Looks after one engine once: it is live then, or made anew."""
        import ray

        handle = member.handle
        async with member.looking:
            if member.handle is not handle:
                # Made anew meanwhile, which may take its time.
                return
            try:
                await self._look(member)
            except (ray.exceptions.RayError, TreegraftError) as error:
                self._lose(member, _words(error))
                ray.kill(member.handle)
                member.handle, member.opened = member.make(), None
            else:
                self._go_live(member)

    async def _look(self, member: Member) -> None:
        """Asks an engine how it is, and gives it what it lacks."""
        is_new = member.opened is None
        # One that is not there yet waits for a machine with room.
        async with _within(None if is_new else STATE_S, "it said nothing"):
            seen = json.loads(await member.handle.state.remote())
        said, member.seen = seen.pop("said"), seen
        for text in said:
            _log.warning("%s: %s", member, text)
        if seen["is_broken"]:
            raise errors.EngineError("its engine has died", code="engine-died")
        if is_new:
            async with _within(START_S, "it was not ready"):
                member.opened = value_of(await member.handle.open.remote())
        while member.edition != self.due.edition:
            await self._give(member, self.due)

    async def _give(self, member: Member, due: Weights) -> None:
        """Gives an engine the weights that are due."""
        async with _within(self.config.engine.deadline_s, "it did not take the weights"):
            held = value_of(await member.handle.publish.remote(*due))
        if held and due.fingerprint and held != due.fingerprint:
            raise errors.EngineError(
                f"its weights have checksum {held}, expected {due.fingerprint}",
                code="weights-differ",
            )
        member.edition = due.edition

    def _go_live(self, member: Member) -> None:
        if member.state.is_up:
            return
        if member.state is State.DOWN:
            _log.warning("%s is back", member)
        member.num_starts += 1
        member.state, member.fault = State.LIVE, ""

    def _lose(self, member: Member, fault: str) -> None:
        """Leaves an engine out until it is found well, or made anew; its trees grow elsewhere."""
        is_told, member.fault = fault == member.fault, fault
        member.edition, member.sampled, member.num_slow = 0, (0.0, 0.0), 0
        if member.state.is_up:
            _log.warning("%s: %s; others do its work", member, fault)
            self.num_restarts += 1
            self._last_live = time.monotonic()
            member.state = State.DOWN
            self._empty(member)
        elif not is_told:
            _log.warning("%s does not start: %s", member, fault)

    def _empty(self, member: Member) -> None:
        member.left.set()
        member.left = asyncio.Event()

    def _answering(self) -> list[Member]:
        """The engines that hold the weights which are due, drained ones only for want of others."""
        ready = [one for one in self.engines if one.edition == self.due.edition]
        live = [one for one in ready if one.state is State.LIVE]
        return live or [one for one in ready if one.state is State.DRAINED]

    def drain(self, member: Member, why: str) -> None:
        """Moves an engine's trees to the others until the next publish."""
        member.state, member.fault = State.DRAINED, why
        self.num_drained += 1
        _log.warning("%s; its trees grow in other engines until the next publish", why)
        self._empty(member)

    def drain_slow(self) -> None:
        """Looks at how much each engine has sampled since the last look, and drains those that are
        much slower than the others."""
        speeds: dict[Member, tuple[float, float]] = {}
        for one in self.engines:
            if one.state is State.LIVE and "sampled" in one.seen:
                tokens, seconds = one.seen["sampled"]
                new, spent = tokens - one.sampled[0], seconds - one.sampled[1]
                one.sampled = (tokens, seconds)
                if spent > 0:
                    speeds[one] = (new, new / spent)
        for one, (total, each) in speeds.items():
            others = [speed for other, speed in speeds.items() if other is not one]
            is_slow = bool(others) and all(
                own < SLOW_SHARE * statistics.median(speed[kind] for speed in others)
                for kind, own in enumerate((total, each))
            )
            one.num_slow = one.num_slow + 1 if is_slow else 0
            if one.num_slow >= SLOW_LOOKS:
                self.drain(one, f"{one} samples {each:.3g} tokens a second of a request")

    @property
    def death(self) -> errors.EngineError | None:
        """Why no tree will come any more; None while an engine answers or may come back."""
        deadline_s = self.config.engine.deadline_s
        if self._answering() or time.monotonic() - self._last_live < deadline_s:
            return None
        reasons = "; ".join(f"{one}: {one.fault}" for one in self.engines)
        return errors.EngineError(
            f"engine: none has answered for engine.deadline_s: {reasons}", code="no-engine-left"
        )

    # ------------------------------------------------------------------ weights

    async def publish(self, source: interfaces.WeightSource, version: int) -> None:
        """Gives all engines new weights once their running completions are done.

        Raises:
            EngineError: no engine took them within engine.deadline_s.
        """
        former, fingerprint = self.due, source.fingerprint
        held = set() if former.edition else {found["fingerprint"] for found in self._opened}
        if fingerprint and former.fingerprint == fingerprint:
            pieces = former.pieces
        elif held == {fingerprint}:
            pieces = []
        else:
            pieces = await asyncio.to_thread(self._stored, source)
        self.due = Weights(former.edition + 1, version, fingerprint, list(source.names), pieces)
        self._last_live = time.monotonic()
        for member in self.engines:
            if member.state is State.DRAINED:
                member.state, member.num_slow = State.LIVE, 0
        live = [one for one in self.engines if one.state is State.LIVE]
        await asyncio.gather(*map(self._attend, live))
        while not self._answering():
            if (death := self.death) is not None:
                raise errors.EngineError(
                    f"publish: no engine took version {version}. {death}", code="publish-refused"
                )
            await asyncio.sleep(WATCH_S)
        self.fingerprint = fingerprint

    def _stored(self, source: interfaces.WeightSource) -> list[Any]:
        """Hands weights to Ray, which sends them once to each machine that asks for them."""
        import ray

        found = []
        for piece in pieces_of(source):
            found.append(ray.put(piece))
            self.num_bytes += len(piece)
        return found

    # ------------------------------------------------------------------ trees

    async def grown(self, order: dict[str, Any], name: str) -> Mapping[str, Any]:
        """Returns what an engine has made of an order for a tree, see `RemoteTrees`: whichever has
        the fewest.

        Args:
            name: of the tree, in errors.

        Raises:
            TreegraftError: what its engine has raised, or the tree's engines have died MAX_DEATHS
                times.
        """
        import ray

        faults = list[str]()
        while len(faults) < MAX_DEATHS:
            member = await self._free()
            member.num_trees += 1
            now = {"edition": self.due.edition, "max_context": self.max_context}
            answer = member.handle.grow.remote(json.dumps(order | now))
            asking = asyncio.ensure_future(answer)
            left = asyncio.ensure_future(member.left.wait())
            try:
                await asyncio.wait((asking, left), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    # It may live on, but out of reach; the tree grows elsewhere.
                    ray.cancel(answer)
                    if member.state is not State.DRAINED:
                        faults.append(f"{member}: {member.fault}")
                    continue
                found: dict[str, Any] = value_of(asking.result())
                self.num_requests += found["requests"]
                return found
            except ray.exceptions.RayTaskError as error:
                raise errors.EngineError(
                    f"rollout: tree {name} ended {member} with a fault: {_words(error)}",
                    code="tree-failed",
                ) from error
            except ray.exceptions.RayError as error:
                faults.append(f"{member}: {_words(error)}")
                self._lose(member, _words(error))
            except asyncio.CancelledError:
                ray.cancel(answer)
                raise
            finally:
                asking.cancel()
                left.cancel()
                member.num_trees -= 1
        raise errors.EngineError(
            f"rollout: {MAX_DEATHS} engines have died while tree {name} grew in them"
            f" ({'; '.join(faults)}); expected none. A tool or reward of this task may take all"
            " memory; correct it, and resume.",
            code="engines-died",
        )

    async def _free(self) -> Member:
        while not (answering := self._answering()):
            if (death := self.death) is not None:
                raise death
            await asyncio.sleep(FREE_S)
        return min(answering, key=lambda one: (one.num_trees, one.number))

    async def complete(self, request: interfaces.Request) -> Completion:
        """Raises EngineError: engines grow whole trees."""
        raise errors.EngineError(
            f"engine: got a request for {request.noise_key} on a cluster, whose engines grow whole"
            " trees; expected an order for a tree.",
            code="completed-elsewhere",
        )

    def forget(self, prefix_ids: Sequence[int]) -> None:
        """Does nothing: the engine of each tree drops its own cache."""

    # ------------------------------------------------------------------ what others see

    @property
    def policy_version(self) -> int:
        """That of the latest publish."""
        return self.due.version

    @property
    def capacity(self) -> int:
        """Completions that run at the same time; more wait for a place."""
        return self.config.engine.max_rows * max(1, len(self._answering()))

    def take_metrics(self) -> dict[str, float]:
        """Returns how often engines were asked, and how many engines answer and have died."""
        metrics = {
            "time/engine_requests": float(self.num_requests),
            "time/engine_servers": float(len(self._answering())),
            "time/engine_restarts": float(self.num_restarts),
            "time/engine_drained": float(self.num_drained),
            "time/publish_bytes": float(self.num_bytes),
        }
        self.num_requests = self.num_restarts = self.num_drained = self.num_bytes = 0
        return metrics

    def show_in(self, folder: Path) -> None:
        """Writes the state of all engines into this run folder from now on."""
        self._folder = folder

    async def _show(self) -> None:
        while True:
            self.drain_slow()
            if self._folder is not None:
                with suppress(OSError):
                    # Readers see the former text or this one.
                    partial = self._folder / ".roles.json"
                    partial.write_text(json.dumps(self.roles()), encoding="utf-8")
                    partial.replace(self._folder / "roles.json")
            await asyncio.sleep(SHOW_S)

    def roles(self) -> dict[str, Any]:
        """Returns how each engine is, where, and what it waits for."""
        return {
            "written": time.time(),
            "roles": [
                {
                    "role": "engine",
                    "number": one.number,
                    "host": one.seen.get("host", ""),
                    "pid": one.seen.get("pid"),
                    "state": one.state,
                    "fault": one.fault,
                    "starts": one.num_starts,
                    "queue": one.num_trees,
                    "waits": one.seen.get("waits", {}),
                    "version": self.due.version if one.edition else None,
                    "cpu_s": one.seen.get("cpu_s"),
                    "memory_bytes": one.seen.get("memory_bytes"),
                }
                for one in self.engines
            ],
        }


def _tell_fault(task: asyncio.Task[None]) -> None:
    """Shows a fault of ours: what the task has watched is watched no more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("cluster: the watch of an engine has ended", exc_info=error)


@asynccontextmanager
async def _within(limit_s: float | None, fault: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded where the block takes longer; None for no limit."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise errors.DeadlineExceeded(f"{fault} within {limit_s:g} s", code="actor-late") from error


def _words(error: BaseException) -> str:
    """An error in a line: of Ray's the cause that it reports at the end, or the beginning."""
    if isinstance(error, TreegraftError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_gone = type(error).__name__ in ("ActorUnavailableError", "ActorDiedError")
    if is_gone and "creation task" not in lines[0]:
        return "its process has ended or cannot be reached"
    if not lines:
        return type(error).__name__
    said = lines[-1] if "creation task" in lines[0] else f"{type(error).__name__}: {lines[0]}"
    return plain(said, 600)
