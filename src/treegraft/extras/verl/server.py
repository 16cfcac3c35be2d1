"""verl's vLLM server with entropies of the most likely tokens in its replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry

from treegraft.parts import served


def use_top_servers() -> None:
    """Makes verl start servers of this kind for `rollout.name=vllm`, in this process."""
    RolloutReplicaRegistry.register("vllm", _load_replica)


def _load_replica() -> Any:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class TopServer(TopReplies, vLLMHttpServer):  # type: ignore[misc]
        pass

    class TopReplica(vLLMReplica):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(TopServer)

    return TopReplica


class TopReplies:
    """Adds `extra_fields["entropies"]` to the replies of a server whose `engine` is vLLM's.

    verl requests the log-probability of the drawn token alone; here it requests `NUM_ASKED`.
    """

    @property
    def engine(self) -> Any:
        return self._engine

    @engine.setter
    def engine(self, engine: Any) -> None:
        self._engine = _TopEngine(engine)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns verl's reply with one entropy in nats for each token."""
        found: list[float] = []
        token = _FOUND.set(found)
        try:
            reply = await super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            _FOUND.reset(token)
        reply.extra_fields["entropies"] = found
        return reply


_FOUND: ContextVar[list[float]] = ContextVar("found")
"""The entropies of the request that this task is in."""


class _TopEngine:
    """vLLM's engine with more log-probabilities in each request."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params: Any, **more: Any) -> AsyncIterator[Any]:
        """As vLLM's; notes the entropies of the tokens of the last output."""
        if sampling_params.logprobs is not None:
            sampling_params.logprobs = served.NUM_ASKED
        last: Any = None
        async for last in self._engine.generate(sampling_params=sampling_params, **more):
            yield last
        rows = last.outputs[0].logprobs if last is not None and last.outputs else None
        for row in rows or ():
            _FOUND.get().append(served.top_k_entropy(one.logprob for one in row.values()))
