"""Rank 0's engine on a cluster, which supervises those of the actors: it opens them, gives them the
weights that are due, deals out trees, and notices who has died."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from treegraft import Config, TreegraftError
from treegraft.extras.ray.actor import Weights, pieces_of, value_of
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
FREE_S = 0.1
"""Time between two looks for an engine, in seconds, if none answers."""
MAX_DEATHS = 3
"""Engines that may die while a tree grows in them before the tree is blamed for it."""


class Member:
    """One engine, as rank 0 sees it."""

    def __init__(self, number: int, make: Callable[[], Any]) -> None:
        self.number = number
        self.make = make
        self.handle = make()
        self.host = ""
        self.is_live = False
        """Whether it can take trees."""
        self.fault = ""
        self.opened: dict[str, Any] | None = None
        """What it said when it was opened; None before."""
        self.edition = 0
        """That of its weights, see `Weights`."""
        self.num_trees = 0
        self.left = asyncio.Event()
        """Set, and replaced by another one, when its trees have to grow elsewhere."""
        self.looking = asyncio.Lock()

    def __str__(self) -> str:
        return f"engine {self.number}" + (f" on {self.host}" if self.host else "")

    def move_trees(self) -> None:
        """Has its trees grow again in other engines."""
        self.left.set()
        self.left = asyncio.Event()


class Supervisor:
    """The engines of a run as one engine, to which rank 0 publishes. Trees alone are sampled: whole
    ones, in whichever engine."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engines: list[Member] = []
        self.max_context: int | None = None
        self.fingerprint = ""
        self.due = Weights(0, 0, "", [], [])
        """What engines should have; at first what they begin with."""
        self._tasks: list[asyncio.Task[None]] = []
        self._last_live = time.monotonic()
        self.num_restarts = 0
        self.num_bytes = 0

    # ------------------------------------------------------------------ the beginning and the end

    async def open(self, engines: Sequence[Member]) -> None:
        """Waits until all engines can be used, and watches them from then on.

        Raises:
            TreegraftError: one that cannot be opened, or not within START_S.
        """
        self.engines = list(engines)
        # All at once: each loads its weights, for minutes.
        await asyncio.gather(*map(self._first, self.engines))
        self.max_context = self._opened[0]["max_context"]
        self._tasks = [asyncio.create_task(self._keep(one)) for one in self.engines]
        for task in self._tasks:
            task.add_done_callback(_report_fault)

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
        member.is_live = True

    async def close(self) -> None:
        """Ends all engines."""
        import ray

        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

        async def end(member: Member) -> None:
            if member.is_live:
                with suppress(ray.exceptions.RayError, TimeoutError, TreegraftError):
                    async with asyncio.timeout(CLOSE_S):
                        value_of(await member.handle.close.remote())
            # An actor out of reach may live on, and would hold its GPU.
            ray.kill(member.handle)

        await asyncio.gather(*map(end, self.engines))

    @property
    def _opened(self) -> list[dict[str, Any]]:
        """What each engine said when it was opened."""
        return [one.opened for one in self.engines if one.opened is not None]

    # ------------------------------------------------------------------ life and death

    async def _keep(self, member: Member) -> None:
        """Watches one engine to the end of the run."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._attend(member)

    async def _attend(self, member: Member) -> None:
        """Looks at one engine once: it is live then, or made anew."""
        import ray

        handle = member.handle
        async with member.looking:
            if member.handle is not handle:
                # Made anew meanwhile, which may need its time.
                return
            try:
                await self._look(member)
            except (ray.exceptions.RayError, TreegraftError) as error:
                self._lose(member, _words(error))
                ray.kill(member.handle)
                member.handle = member.make()
                member.opened = None
                return
            if not member.is_live:
                _log.warning("%s is back", member)
                member.is_live = True
                member.fault = ""

    async def _look(self, member: Member) -> None:
        """Reads the state of an engine, and gives it what it lacks."""
        is_new = member.opened is None
        # One that has no process yet waits for a machine with room.
        async with _within(None if is_new else STATE_S, "it said nothing"):
            seen = json.loads(await member.handle.state.remote())
        member.host = seen["host"]
        for text in seen["said"]:
            _log.warning("%s: %s", member, text)
        if seen["is_dead"]:
            raise errors.EngineError("its engine has died", code="engine-died")
        if is_new:
            async with _within(START_S, "it was not ready"):
                member.opened = value_of(await member.handle.open.remote())
        while member.edition != self.due.edition:
            await self._give(member, self.due)

    async def _give(self, member: Member, due: Weights) -> None:
        """Gives an engine the weights that are due."""
        async with _within(self.config.engine.deadline_s, "it did not take the weights"):
            found = value_of(await member.handle.publish.remote(*due))
        # Law 7.
        if found and due.fingerprint and found != due.fingerprint:
            raise errors.EngineError(
                f"its weights have checksum {found}, expected {due.fingerprint}",
                code="weights-differ",
            )
        member.edition = due.edition

    def _lose(self, member: Member, fault: str) -> None:
        """Leaves an engine out until it answers, or is made anew; its trees grow elsewhere."""
        if member.is_live:
            _log.warning("%s: %s; others do its work", member, fault)
            self.num_restarts += 1
            self._last_live = time.monotonic()
            member.is_live = False
            member.move_trees()
        elif fault != member.fault:
            _log.warning("%s does not start: %s", member, fault)
        member.fault = fault
        member.edition = 0

    def _answering(self) -> list[Member]:
        """The live engines with the weights that are due."""
        return [one for one in self.engines if one.is_live and one.edition == self.due.edition]

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
        # `due` is replaced below.
        former = self.due
        fingerprint = source.fingerprint
        loaded = set() if former.edition else {found["fingerprint"] for found in self._opened}
        if fingerprint and former.fingerprint == fingerprint:
            pieces = former.pieces
        # At the start every engine has read these weights from the checkpoint.
        elif loaded == {fingerprint}:
            pieces = []
        else:
            pieces = await asyncio.to_thread(self._stored, source)
        self.due = Weights(former.edition + 1, version, fingerprint, list(source.names), pieces)
        self._last_live = time.monotonic()
        await asyncio.gather(*(self._attend(one) for one in self.engines if one.is_live))
        while not self._answering():
            if (death := self.death) is not None:
                raise errors.EngineError(
                    f"publish: no engine took version {version}. {death}", code="publish-refused"
                )
            await asyncio.sleep(WATCH_S)
        self.fingerprint = fingerprint

    def _stored(self, source: interfaces.WeightSource) -> list[Any]:
        """Hands weights to Ray, which sends them once to each machine that needs them."""
        import ray

        found = []
        for piece in pieces_of(source):
            found.append(ray.put(piece))
            self.num_bytes += len(piece)
        return found

    # ------------------------------------------------------------------ trees

    async def grown(self, order: dict[str, Any], name: str) -> Mapping[str, Any]:
        """Returns what an engine has made of an order for a tree, see `RemoteTrees`: the one with
        the fewest trees.

        Args:
            name: of the tree, in errors.

        Raises:
            TreegraftError: what its engine has raised, or the tree's engines have died MAX_DEATHS
                times.
        """
        import ray

        faults = list[str]()
        # A tree whose tool ends its process would kill one engine after another.
        while len(faults) < MAX_DEATHS:
            member = await self._free()
            member.num_trees += 1
            answer = member.handle.grow.remote(json.dumps(order | {"edition": self.due.edition}))
            asking = asyncio.ensure_future(answer)
            left = asyncio.ensure_future(member.left.wait())
            try:
                await asyncio.wait((asking, left), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    found: dict[str, Any] = value_of(asking.result())
                    return found
                # It may live on, but out of reach; the tree grows elsewhere.
                ray.cancel(answer)
                faults.append(f"{member}: {member.fault}")
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

    @property
    def policy_version(self) -> int:
        """That of the latest publish."""
        return self.due.version

    @property
    def capacity(self) -> int:
        """Completions that run at the same time; more wait for a place."""
        return self.config.engine.max_rows * max(1, len(self._answering()))

    def take_metrics(self) -> dict[str, float]:
        """Returns how many engines answer, and how many have died since the last call."""
        metrics = {
            "time/engine_servers": float(len(self._answering())),
            "time/engine_restarts": float(self.num_restarts),
            "time/publish_bytes": float(self.num_bytes),
        }
        self.num_restarts = 0
        self.num_bytes = 0
        return metrics


def _report_fault(task: asyncio.Task[None]) -> None:
    """Logs a fault of ours: the task watches its engine no more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("cluster: the watch of an engine has ended", exc_info=error)


@asynccontextmanager
async def _within(limit_s: float | None, fault: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded if the block needs longer; None for no limit."""
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
    if not lines:
        return type(error).__name__
    is_of_start = "creation task" in lines[0]
    if type(error).__name__ in ("ActorUnavailableError", "ActorDiedError") and not is_of_start:
        return "its process has ended or cannot be reached"
    return plain(lines[-1] if is_of_start else f"{type(error).__name__}: {lines[0]}", 600)
