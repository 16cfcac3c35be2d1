"""An engine as an actor: completions by request, weights in pieces of bytes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, NamedTuple, cast

from pydantic import TypeAdapter

from treegraft import Config, TreegraftError
from treegraft.extras.ray.actors import Actor, error_reply, replying
from treegraft.parts import Completion, Sampling, assemble_engine, errors, interfaces, spans

PIECE_BYTES = 1 << 26
"""Size from which a piece of published weights is complete, in bytes."""


# ------------------------------------------------------------------ what travels


def request_to_json(request: interfaces.Request, edition: int) -> str:
    """Returns a request for a completion by this edition of the weights or a later one."""
    return json.dumps(
        {
            "prefix": list(request.prefix_ids),
            "sampling": asdict(request.sampling),
            "key": list(request.noise_key),
            "probe": None if request.on_probe is None else request.probe_tokens,
            "edition": edition,
            "trace": spans.carrier(),
        }
    )


_SAMPLING, _COMPLETION = TypeAdapter(Sampling), TypeAdapter(Completion)


def completion_of(found: Mapping[str, Any]) -> Completion:
    """Returns the completion that an actor's answer holds."""
    return _COMPLETION.validate_python(found)


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


class EngineActor(Actor):
    """One engine with its own weights. It answers by an edition that has been published to it."""

    def __init__(self, role: str, number: int, place: str) -> None:
        super().__init__(role, number, place)
        self._stack = AsyncExitStack()
        self._engine: interfaces.Engine | None = None
        self._edition = 0
        """Of the weights that it holds; 0 before the first publish, and while they change."""
        self._is_whole = True
        """False while weights are taken over, and after a publish that broke off."""
        self._num_tokens, self._busy_s = 0, 0.0
        self._publishing = asyncio.Lock()

    def more(self) -> dict[str, Any]:
        """Returns the tokens that it has sampled and the seconds of the requests for them, and
        whether another actor has to take its place."""
        is_broken = not self._is_whole and not self._publishing.locked()
        return {
            "sampled": [self._num_tokens, self._busy_s],
            "is_broken": is_broken or (self._engine is not None and self._engine.death is not None),
        }

    async def begin(self) -> dict[str, Any]:
        """Reads the weights, and returns the engine's limit and checksum."""
        config = Config.model_validate_json(self.place.config)
        opening = assemble_engine(_alone(config), model_path=self.place.model_path)
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
    async def canaries(self, edition: int) -> dict[str, list[dict[str, Any]]]:
        """Returns what each of its servers samples for the canary prompts by these weights."""
        engine = self._opened()
        if self._edition != edition:
            raise errors.EngineError(
                f"engine: it holds edition {self._edition}, expected {edition}",
                code="other-edition",
            )
        asking: Mapping[str, Sequence[Completion]] = await cast(Any, engine).canaries()
        if not asking:
            raise errors.EngineError(
                "engine: none of its servers answered", code="server-silent-engine"
            )
        return {name: [asdict(one) for one in found] for name, found in asking.items()}

    async def complete(self, request: str) -> AsyncIterator[str]:
        """Yields the entropies of the first tokens, where they are asked for, and the completion;
        {"stale": edition} where it has not got the weights."""
        asked = json.loads(request)
        probes: asyncio.Queue[Sequence[float]] = asyncio.Queue()
        try:
            # What it takes over at the moment may be the weights that are asked for.
            async with self._publishing:
                pass
            if self._edition < asked["edition"]:
                yield json.dumps({"value": {"stale": self._edition}})
                return
            began = time.monotonic()
            on_probe = probes.put_nowait if asked["probe"] else None
            work = asyncio.create_task(self._completion(asked, on_probe))
            probing = asyncio.create_task(probes.get())
            try:
                if asked["probe"]:
                    await asyncio.wait((work, probing), return_when=asyncio.FIRST_COMPLETED)
                    if probing.done() and not work.done():
                        yield json.dumps({"value": {"probe": list(probing.result())}})
                completion = await work
                self._num_tokens += len(completion.token_ids)
                self._busy_s += time.monotonic() - began
                yield json.dumps({"value": asdict(completion)})
            finally:
                work.cancel()
                probing.cancel()
        except TreegraftError as error:
            if self._opened().death is not None:
                # Ray starts another one, which begins with sound weights.
                os._exit(1)
            yield error_reply(error)

    async def _completion(
        self, asked: Mapping[str, Any], on_probe: Callable[[Sequence[float]], None] | None
    ) -> Completion:
        with spans.joined(asked["trace"], self.name), spans.span("completion"):
            sampling = _SAMPLING.validate_python(asked["sampling"])
            request = interfaces.Request(
                asked["prefix"], sampling, tuple(asked["key"]), asked["probe"], on_probe
            )
            return await self._opened().complete(request)

    async def forget(self, prefix_ids: str) -> None:
        """Drops what is cached below a prompt."""
        if self._engine is not None:
            self._engine.forget(json.loads(prefix_ids))

    async def end(self) -> None:
        """Ends the engine and its servers."""
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
