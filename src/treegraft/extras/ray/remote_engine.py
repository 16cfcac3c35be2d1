"""The engines of a cluster as one: which is asked, and what happens when one dies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treegraft import Config
from treegraft.extras.ray.actors import value_of
from treegraft.extras.ray.engines import completion_of, request_to_json
from treegraft.parts import Completion, errors, interfaces

SUSPECT_S = 3.0
"""How long an engine that failed a request is asked last, in seconds."""


class Lost(Exception):
    """A request that its engine did not answer."""


class ClusterEngine:
    """Asks the engines of its route. A completion does not depend on the engine, so any may answer;
    those of a tree share a cache and so keep to one while it lives."""

    def __init__(self, config: Config, *, max_context: int | None) -> None:
        self.settings, self.max_context = config.engine, max_context
        self.policy_version, self.fingerprint = 0, ""
        self.edition = 0
        """Of the weights that replies have to be by, see `Weights`."""
        self._route: Mapping[int, Any] = {}
        self._changed = asyncio.Event()
        self._homes: dict[object, int] = {}
        self._asking: dict[int, set[asyncio.Task[Completion]]] = {}
        self._suspects: dict[int, float] = {}
        """When an engine may be asked again as any other."""
        self.counts: Counter[str] = Counter()
        """Requests, those that moved, and replies from engines without the weights."""

    @property
    def death(self) -> BaseException | None:
        """None: an engine that has died comes back."""
        return None

    @property
    def capacity(self) -> int:
        """Completions that run at the same time; more wait for a place."""
        return self.settings.max_rows * max(1, len(self._route))

    def take(self, edition: int, version: int, engines: Mapping[int, Any]) -> None:
        """Takes over which engines there are, and by which weights they answer.

        Args:
            engines: their handles by number; requests to others move.
        """
        for number, asking in self._asking.items():
            if number not in engines:
                for task in asking:
                    task.cancel()
        if edition != self.edition:
            self._homes.clear()
        self.edition, self.policy_version = edition, version
        self._route = dict(engines)
        self._suspects.clear()
        self._changed.set()
        self._changed.clear()

    async def complete(self, request: interfaces.Request) -> Completion:
        """Returns one completion; see `interfaces.Engine`.

        Raises:
            EngineError: an engine has refused the request.
            DeadlineExceeded: no completion within engine.deadline_s.
        """
        fault = "no engine was there"
        deadline_s, key = self.settings.deadline_s, request.noise_key
        told = None if request.on_probe is None else _first_alone(request.on_probe)
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    number = await self._choose(key[:-1])
                    text = request_to_json(request, self.edition)
                    self.counts["requests"] += 1
                    try:
                        return await self.ask(number, text, told)
                    except Lost as error:
                        fault = str(error)
                        self.counts["moved"] += 1
                        loop = asyncio.get_running_loop()
                        self._suspects[number] = loop.time() + SUSPECT_S
        except TimeoutError as error:
            raise errors.DeadlineExceeded(
                f"engine: no completion for {key} within engine.deadline_s ="
                f" {deadline_s} s; the last fault of an engine: {fault}",
                code="engine-late",
            ) from error

    async def _choose(self, home: object) -> int:
        """The engine that is asked: the tree's, else the one with the fewest requests."""
        loop = asyncio.get_running_loop()
        while True:
            well = [one for one in self._route if self._suspects.get(one, 0.0) <= loop.time()]
            if self._homes.get(home) in well:
                return self._homes[home]
            if well:
                chosen = min(well, key=lambda one: (len(self._asking.get(one, ())), one))
                self._homes[home] = chosen
                return chosen
            try:
                async with asyncio.timeout(SUSPECT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def ask(
        self, number: int, request: str, on_probe: Callable[[Sequence[float]], None] | None
    ) -> Completion:
        """Returns the completion of one engine; raises `Lost` where it does not answer by the
        weights that are due."""
        if number not in self._route:
            raise Lost(f"engine {number} does not answer now")
        task = asyncio.create_task(self._answer(self._route[number], request, on_probe))
        asking = self._asking.setdefault(number, set())
        asking.add(task)
        try:
            # In a task of its own, so that an engine which hangs can be given up.
            await asyncio.wait([task])
            if task.cancelled():
                raise Lost(f"engine {number} was given up")
            return task.result()
        finally:
            task.cancel()
            asking.discard(task)

    async def _answer(
        self, engine: Any, request: str, on_probe: Callable[[Sequence[float]], None] | None
    ) -> Completion:
        import ray

        answers = engine.complete.options(num_returns="streaming").remote(request)
        try:
            async for answer in answers:
                found = value_of(await answer)
                if "stale" in found:
                    self.counts["stale"] += 1
                    raise Lost(f"it holds edition {found['stale']} of the weights")
                if "probe" not in found:
                    return completion_of(found)
                if on_probe is not None:
                    on_probe(tuple(found["probe"]))
            raise Lost("it ended without a completion")
        except ray.exceptions.RayTaskError as error:
            raise errors.EngineError(
                f"engine: a fault of its own: {error.cause!r}", code="engine-failed"
            ) from error
        except ray.exceptions.RayError as error:
            raise Lost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        except asyncio.CancelledError:
            ray.cancel(answers)
            raise

    def forget(self, prefix_ids: Sequence[int]) -> None:
        """Lets every engine drop what it caches below a prompt."""
        text = json.dumps(list(prefix_ids))
        for engine in self._route.values():
            engine.forget.remote(text)

    async def publish(self, source: interfaces.WeightSource, version: int) -> None:
        """Raises EngineError: rank 0 alone publishes."""
        raise errors.EngineError(
            "engine: weights are published by rank 0", code="published-elsewhere"
        )

    def take_metrics(self) -> dict[str, float]:
        """Returns how often engines were asked, and how often again, since the last call."""
        metrics = {
            f"time/engine_{name}": float(self.counts[name])
            for name in ("requests", "moved", "stale")
        }
        self.counts.clear()
        return metrics

    async def close(self) -> None:
        """Does nothing: engines end with the run."""


def _first_alone(on_probe: Callable[[Sequence[float]], None]) -> Callable[[Sequence[float]], None]:
    """Passes on the first probe: asked again elsewhere, a request probes again."""
    waiting = [on_probe]

    def tell(probe: Sequence[float]) -> None:
        if waiting:
            waiting.pop()(probe)

    return tell
