"""An engine over a server that takes tokens and gives tokens with log-probabilities."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from treegraft.parts import Completion, draft, errors, interfaces

TOP = 20
"""Log-probabilities of each token that are asked for: vLLM's own limit, unless --max-logprobs
raises it."""
SUMMED = TOP - 1
"""Those of the most likely tokens that every reply holds: an unlikely token that was drawn takes
the place of the last one."""


class TokenServer(Protocol):
    """What is asked for tokens: verl's `LLMServerClient`."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        """Returns an object with `token_ids`, `log_probs` (one for each) and a dict `extra_fields`.

        Args:
            request_id: those with one id go to one server, for its cache of prefixes.
        """


def entropy_of(logprobs: Sequence[float]) -> float:
    """Returns Σ -p ln p over the `SUMMED` largest of a token's log-probabilities, in nats: a lower
    bound of the entropy."""
    return sum(-math.exp(one) * one for one in sorted(logprobs, reverse=True)[:SUMMED])


class ServerEngine:
    """Samples on servers whose weights somebody else moves.

    A request ends at the probe, so that branches open while the step goes on. Draws are the
    servers' own: two runs of one seed differ.
    """

    def __init__(
        self,
        server: TokenServer,
        drafter: draft.Drafter,
        settings: Any,
        *,
        entropies: str,
        max_context: int | None,
    ) -> None:
        """Args:
        settings: the table [engine].
        entropies: "top_k", which the server adds to its replies, or "sampled".
        max_context: longest path in tokens.
        """
        self._server, self._drafter, self._settings = server, drafter, settings
        self._entropies, self.max_context = entropies, max_context
        self.capacity: int = settings.max_rows
        self.policy_version, self.fingerprint = 0, ""
        self.death: BaseException | None = None
        self._num_requests = 0
        self._free = asyncio.Semaphore(self.capacity)

    async def complete(self, request: interfaces.Request) -> Completion:
        """Returns one completion; see `interfaces.Engine`.

        Raises:
            EngineError: a request that cannot be served, or a reply without what is needed.
            DeadlineExceeded: no completion within engine.deadline_s.
        """
        begun = self._drafter.begin(request, self.max_context)
        versions: set[int] = set()
        deadline_s = self._settings.deadline_s
        async with self._free:
            try:
                async with asyncio.timeout(deadline_s):
                    while begun.finish is None:
                        versions.add(await self._go_on(begun))
            except TimeoutError as error:
                raise errors.DeadlineExceeded(
                    f"engine: no completion for {request.noise_key} within engine.deadline_s ="
                    f" {deadline_s} s; the servers are too slow for this many rows, or have died"
                ) from error
        if len(versions) > 1:
            raise errors.EngineError(
                f"engine: a completion is by the weights of steps {sorted(versions)}, expected"
                " those of one: verl has moved weights while trees grew."
            )
        self.policy_version = max(versions)
        return begun.completion(self.policy_version, self._entropies)

    async def _go_on(self, begun: draft.Draft) -> int:
        """Adds the tokens of one more request, and returns the version that drew them."""
        request = begun.request
        self._num_requests += 1
        reply = await self._server.generate(
            # Of a tree: seed, purpose, number, task.
            "/".join(map(str, request.noise_key[:-1])),
            prompt_ids=[*request.prefix_ids, *begun.ids],
            sampling_params={
                **_drawing(request.sampling),
                "logprobs": True,
                "max_tokens": begun.room,
                "stop": begun.stop_texts,
                "stop_token_ids": sorted(self._drafter.end_ids),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
            },
        )
        begun.take(self._drawn(reply))
        return int(reply.extra_fields.get("global_steps") or 0)

    def _drawn(self, reply: Any) -> list[draft.Drawn]:
        ids, logprobs = list(reply.token_ids), reply.log_probs
        if logprobs is None or len(logprobs) != len(ids):
            raise errors.EngineError(
                "engine: verl's server gave no log-probability for each token, which learning"
                f" needs (it gave {logprobs if logprobs is None else len(logprobs)} for"
                f" {len(ids)} tokens)."
            )
        if self._entropies == "sampled":
            return [draft.Drawn(one, p, -p) for one, p in zip(ids, logprobs, strict=True)]
        found = reply.extra_fields.get("entropies")
        if found is None or len(found) != len(ids):
            raise errors.EngineError(
                "engine: verl's server gave no entropies; expected those of its"
                f" {SUMMED} most likely tokens, which Treegraft's server class for vLLM adds where"
                " trainer.v1.trainer_mode=treegraft."
            )
        return list(map(draft.Drawn, ids, logprobs, found))

    def forget(self, prefix_ids: Sequence[int]) -> None:
        """Does nothing: servers drop what was used least recently."""

    async def publish(self, source: Any, version: int) -> None:
        """Notes the version alone: verl moves the weights."""
        self.policy_version = version

    async def close(self) -> None:
        """Does nothing: the servers are verl's."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the number of requests since the last call."""
        count, self._num_requests = self._num_requests, 0
        return {"time/engine_requests": float(count)}


def _drawing(sampling: Any) -> Mapping[str, Any]:
    """The parameters that say how a token is drawn; filters are an evaluation's."""
    own = sampling.filters
    return {
        "temperature": sampling.temperature,
        "top_p": own.top_p,
        "top_k": own.top_k or -1,
        "min_p": own.min_p,
        "repetition_penalty": own.repetition_penalty,
    }
