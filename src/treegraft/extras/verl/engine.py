"""An engine over verl's servers, which take tokens and give tokens with log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from treegraft.parts import Completion, errors, interfaces, served

SUMMED = served.NUM_ASKED - 1
"""The most likely tokens in every reply: an unlikely token that was drawn replaces the last
one of the request."""


class VerlServer(Protocol):
    """The source of tokens: verl's `LLMServerClient`."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        """Returns an object with `token_ids`, `log_probs` (one for each) and a dict `extra_fields`.

        Args:
            request_id: those with one id go to one server, for its cache of prefixes.
        """


class _Dated(served.Draft):
    """A completion under way, with the versions of the weights that drew its tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.versions: set[int] = set()

    def completion(self, version: int) -> Completion:
        # Law 15: one version writes a whole completion.
        if len(self.versions) > 1:
            raise errors.EngineError(
                f"engine: a completion is by the weights of steps {sorted(self.versions)}, expected"
                " those of one: verl has moved weights while trees grew.",
                code="verl-weights-moved",
            )
        return super().completion(max(self.versions))


class ServerEngine(served.ServerEngine):
    """Samples on verl's servers, whose weights verl moves.

    A request ends at the probe, so that branches open while the step goes on. Draws are the
    servers' own: two runs of one seed differ.
    """

    def __init__(
        self,
        server: VerlServer,
        tokenizer: interfaces.Tokenizer,
        end_ids: Iterable[int],
        settings: Any,
        *,
        max_context: int | None,
    ) -> None:
        """Args:
        end_ids: tokens that end an answer.
        settings: the table [engine].
        max_context: longest path in tokens.
        """
        super().__init__(
            None,
            tokenizer,
            end_ids=list(end_ids),
            capacity=settings.max_rows,
            max_context=max_context,
            deadline_s=settings.deadline_s,
        )
        self._client = server
        self._num_requests = 0

    def _draft(self, request: interfaces.Request) -> _Dated:
        # verl's servers filter in an evaluation.
        limit = served.completion_limit(request, self.max_context)
        return _Dated(self._stops, self.end_ids, request, limit, self._kind)

    async def _ask(self, draft: Any) -> served.TokenReply:
        # More requests would wait in verl's queue and miss their deadline.
        async with self._places:
            asked = draft.next()
            self._num_requests += 1
            reply = await self._client.generate(
                # Of a tree: seed, purpose, number, task.
                "/".join(map(str, asked.tree)),
                prompt_ids=list(asked.token_ids),
                sampling_params={
                    **_drawing(draft.request.sampling),
                    "logprobs": True,
                    "max_tokens": asked.max_tokens,
                    "stop": list(asked.stop),
                    "stop_token_ids": list(asked.stop_token_ids),
                    "include_stop_str_in_output": True,
                    "skip_special_tokens": False,
                },
            )
        version = int(reply.extra_fields.get("global_steps") or 0)
        draft.versions.add(version)
        self.policy_version = version
        return self._drawn(reply)

    def _drawn(self, reply: Any) -> served.TokenReply:
        ids = list(reply.token_ids)
        logprobs = reply.log_probs
        if logprobs is None or len(logprobs) != len(ids):
            raise errors.EngineError(
                "engine: verl's server gave no log-probability for each token, which learning"
                f" needs (it gave {logprobs if logprobs is None else len(logprobs)} for"
                f" {len(ids)} tokens).",
                code="reply-lacks-tokens",
            )
        found = reply.extra_fields.get("entropies")
        if found is None or len(found) != len(ids):
            raise errors.EngineError(
                "engine: verl's server gave no entropies; expected those of its"
                f" {SUMMED} most likely tokens, which Treegraft's server class for vLLM adds where"
                " trainer.v1.trainer_mode=treegraft.",
                code="verl-without-entropies",
            )
        return served.TokenReply(ids, logprobs, found)

    def take_metrics(self) -> dict[str, float]:
        """Returns the number of requests since the last call."""
        count = self._num_requests
        self._num_requests = 0
        return {"time/engine_requests": float(count)}


def _drawing(sampling: Any) -> Mapping[str, Any]:
    """The parameters that say how a token is drawn; filters are an evaluation's."""
    # They are off in training, where rows need the policy's own probabilities.
    own = sampling.filters
    return {
        "temperature": sampling.temperature,
        "top_p": own.top_p,
        "top_k": own.top_k or -1,
        "repetition_penalty": own.repetition_penalty,
    }
