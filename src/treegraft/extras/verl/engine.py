"""An engine over a server that takes tokens and gives tokens with log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from treegraft.parts import Completion, errors, interfaces, served

SUMMED = served.NUM_ASKED - 1
"""The most likely tokens that every reply holds: an unlikely token that was drawn takes the place
of the last one that is asked for."""


class TokenServer(Protocol):
    """What is asked for tokens: verl's `LLMServerClient`."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        """Returns an object with `token_ids`, `log_probs` (one for each) and a dict `extra_fields`.

        Args:
            request_id: those with one id go to one server, for its cache of prefixes.
        """


class ServerEngine:
    """Samples on servers whose weights somebody else moves.

    A request ends at the probe, so that branches open while the step goes on. Draws are the
    servers' own: two runs of one seed differ.
    """

    def __init__(
        self,
        server: TokenServer,
        tokenizer: interfaces.Tokenizer,
        end_ids: Iterable[int],
        settings: Any,
        *,
        entropies: str,
        max_context: int | None,
    ) -> None:
        """Args:
        end_ids: tokens that end an answer.
        settings: the table [engine].
        entropies: "top_k", which the server adds to its replies, or "sampled".
        max_context: longest path in tokens.
        """
        self._server, self._settings = server, settings
        self._stops, self._end_ids = served.StopFinder(tokenizer), frozenset(end_ids)
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
        limit = served.completion_limit(request, self.max_context)
        kind = served.EntropyKind.TOP_K
        begun = served.Draft(self._stops, self._end_ids, request, limit, kind)
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
                    f" {deadline_s} s; the servers are too slow for this many rows, or have died",
                    code="engine-late",
                ) from error
        if len(versions) > 1:
            raise errors.EngineError(
                f"engine: a completion is by the weights of steps {sorted(versions)}, expected"
                " those of one: verl has moved weights while trees grew.",
                code="verl-weights-moved",
            )
        self.policy_version = max(versions)
        return begun.completion(self.policy_version)

    async def _go_on(self, begun: served.Draft) -> int:
        """Adds the tokens of one more request, and returns the version that drew them."""
        asked = begun.next()
        self._num_requests += 1
        reply = await self._server.generate(
            # Of a tree: seed, purpose, number, task.
            "/".join(map(str, asked.tree)),
            prompt_ids=list(asked.token_ids),
            sampling_params={
                **_drawing(begun.request.sampling),
                "logprobs": True,
                "max_tokens": asked.max_tokens,
                "stop": list(asked.stop),
                "stop_token_ids": list(asked.stop_token_ids),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
            },
        )
        begun.take(self._drawn(reply))
        return int(reply.extra_fields.get("global_steps") or 0)

    def _drawn(self, reply: Any) -> served.TokenReply:
        ids, logprobs = list(reply.token_ids), reply.log_probs
        if logprobs is None or len(logprobs) != len(ids):
            raise errors.EngineError(
                "engine: verl's server gave no log-probability for each token, which learning"
                f" needs (it gave {logprobs if logprobs is None else len(logprobs)} for"
                f" {len(ids)} tokens).",
                code="reply-lacks-tokens",
            )
        if self._entropies == "sampled":
            return served.TokenReply(ids, logprobs)
        found = reply.extra_fields.get("entropies")
        if found is None or len(found) != len(ids):
            raise errors.EngineError(
                "engine: verl's server gave no entropies; expected those of its"
                f" {SUMMED} most likely tokens, which Treegraft's server class for vLLM adds where"
                " trainer.v1.trainer_mode=treegraft.",
                code="verl-without-entropies",
            )
        return served.TokenReply(ids, logprobs, found)

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
