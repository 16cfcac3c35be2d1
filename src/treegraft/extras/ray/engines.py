"""An engine as an actor: it has its own weights, and all else that the trees need which grow
there."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, cast

from treegraft import Config
from treegraft.extras.ray.actors import Actor, replying
from treegraft.parts import Completion, assemble_engine, errors, interfaces, remote, spans

PIECE_BYTES = 1 << 26
"""Size from which a piece of published weights is complete, in bytes."""

# ------------------------------------------------------------------ what travels


class Weights(NamedTuple):
    """Published weights: what they are, and where Ray keeps their pieces."""

    edition: int
    """Number of the publish, from 1 on: a warm-up publishes one version several times, with other
    weights each time."""
    version: int
    fingerprint: str
    names: Sequence[str]
    pieces: list[Any]
    """Handles of bytes, each a safetensors file; none where every engine has these weights from its
    beginning."""


def pieces_of(source: interfaces.WeightSource) -> Iterator[bytes]:
    """Yields weights as safetensors files of about `PIECE_BYTES`; a tensor is in one piece."""
    from safetensors.torch import save

    held: dict[str, Any] = {}
    size = 0
    for name, tensor in source:
        # Copied: tied weights share their memory, which the format does not know.
        held[name] = tensor.detach().cpu().contiguous().clone()
        size += held[name].nbytes
        if size >= PIECE_BYTES:
            yield save(held)
            held, size = {}, 0
    if held:
        yield save(held)


class _Pieces:
    """Weights on their way as a `WeightSource`; each piece is fetched when its turn comes, so that
    a machine never holds them twice."""

    def __init__(self, weights: Weights) -> None:
        self.names, self.fingerprint = weights.names, weights.fingerprint
        self._pieces = weights.pieces

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        import ray
        from safetensors.torch import load

        if not self._pieces:
            raise errors.EngineError(
                "engine: it lacks the weights that every engine was to begin with",
                code="first-weights-missing",
            )
        for piece in self._pieces:
            yield from load(ray.get(piece)).items()


# ------------------------------------------------------------------ the actor


class _Counting:
    """An engine, with a count of what it samples."""

    def __init__(self, engine: interfaces.Engine, max_context: int | None) -> None:
        self._engine, self.max_context = engine, max_context
        self.num_requests = self.num_tokens = 0
        self.busy_s = 0.0
        """Seconds of requests, added up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def complete(self, request: interfaces.Request) -> Completion:
        """As `interfaces.Engine.complete`."""
        began = time.monotonic()
        self.num_requests += 1
        found = await self._engine.complete(request)
        self.num_tokens += len(found.token_ids)
        self.busy_s += time.monotonic() - began
        return found


class EngineActor(Actor):
    """An engine with prompts, tools and rewards beside it. Trees grow by an edition of the weights
    that has been published to it."""

    def __init__(self, role: str, number: int, place: str) -> None:
        super().__init__(role, number, place)
        self._stack = AsyncExitStack()
        self._engine: interfaces.Engine | None = None
        self._counting: _Counting | None = None
        self._host: remote.TreeHost | None = None
        self._hosting, self._publishing = asyncio.Lock(), asyncio.Lock()
        self._edition = 0
        """Of the weights that it holds; 0 before the first publish, and while they change."""
        self._is_whole = True
        """False while weights are taken over, and after a publish that broke off."""

    def more(self) -> dict[str, Any]:
        """Returns the tokens that it has sampled and the seconds of the requests for them, what its
        trees wait for, and whether another actor has to take its place."""
        is_broken = not self._is_whole and not self._publishing.locked()
        is_dead = self._engine is not None and self._engine.death is not None
        counting = self._counting
        return {
            "sampled": [0, 0.0] if counting is None else [counting.num_tokens, counting.busy_s],
            "waits": {} if self._host is None else self._host.waits,
            "is_broken": is_broken or is_dead,
        }

    async def begin(self) -> dict[str, Any]:
        """Reads the weights, and returns the engine's limit and checksum."""
        self._config = Config.model_validate_json(self.place.config)
        opening = assemble_engine(_alone(self._config), model_path=self.place.model_path)
        engine = self._engine = await self._stack.enter_async_context(opening)
        return {"max_context": engine.max_context, "fingerprint": engine.fingerprint}

    @replying
    async def publish(self, *weights: Any) -> str:
        """Takes over `Weights` once running completions are done; returns the checksum of what it
        holds then."""
        due = Weights(*weights)
        async with self._publishing:
            engine = self._opened()
            if self._edition != due.edition:
                # What it holds until the end may be half of each.
                self._edition, self._is_whole = 0, False
                await engine.publish(_Pieces(due), due.version)
                self._edition, self._is_whole = due.edition, True
            return engine.fingerprint

    @replying
    async def grow(self, order: str) -> dict[str, Any]:
        """Returns one tree, scored, and what was counted for it; see `TreeHost.grow`."""
        asked = json.loads(order)
        where = spans.joined(asked["trace"], self.name)
        with where, spans.span("grow", group_id=asked["group_id"]):
            # What it takes over at the moment may be the weights that are asked for.
            async with self._publishing:
                self._refuse_older(asked["edition"])
            host, counting = await self._hosted(asked["max_context"])
            found = await host.grow(asked)
        if self._opened().death is not None:
            # The tree's failures are its own. Another engine grows it.
            os._exit(1)
        found["requests"], counting.num_requests = counting.num_requests, 0
        return found

    async def _hosted(self, max_context: int | None) -> tuple[remote.TreeHost, _Counting]:
        """What trees grow in, made for the first of them.

        Args:
            max_context: the smallest of all engines: trees are the same in each.
        """
        async with self._hosting:
            if self._host is None or self._counting is None:
                counting = self._counting = _Counting(self._opened(), max_context)
                making = remote.TreeHost.opened(
                    self._config, cast(Any, counting), model_path=self.place.model_path
                )
                self._host = await self._stack.enter_async_context(making)
            return self._host, self._counting

    def _refuse_older(self, edition: int) -> None:
        if self._edition < edition:
            raise errors.EngineError(
                f"engine: it holds edition {self._edition} of the weights, expected {edition}",
                code="other-edition",
            )

    async def end(self) -> None:
        """Ends tools and environments, the engine and its servers."""
        await self._stack.aclose()

    def _opened(self) -> interfaces.Engine:
        if self._engine is None:
            raise errors.EngineError("engine: it is not open yet", code="engine-not-open")
        return self._engine


def _alone(config: Config) -> Config:
    """The settings of one engine of several: servers on the GPUs that Ray has given to it, one on
    each, or on as many together as their options take."""
    if config.engine.kind != "vllm":
        return config
    vllm, visible = config.engine.vllm, os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus, each = [one for one in visible.split(",") if one], vllm.gpus_each
    own = [",".join(gpus[n : n + each]) for n in range(0, len(gpus), each)]
    vllm = vllm.model_copy(update={"num_servers": max(1, len(own)), "gpus": own})
    engine = config.engine.model_copy(update={"vllm": vllm})
    return config.model_copy(update={"engine": engine})
