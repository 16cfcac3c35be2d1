"""A fake engine whose text comes from a list or a function: for tests, examples and docs, no
weights needed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from treegraft.core.errors import EngineError
from treegraft.core.interfaces import Request, Tokenizer, WeightSource
from treegraft.core.types import Completion, Sampling, StopReason

Reply = str | Sequence[int]
ReplyFunc = Callable[[str], Reply | Awaitable[Reply]]


class ScriptedEngine:
    """Answers requests from a script.

    >>> replies = ["<search>e1 r2</search>", "<answer>\\\\boxed{e7}</answer>"]
    >>> engine = ScriptedEngine(replies, tokenizer)

    A list is used up in the order of requests, which is the order of steps for a single
    trajectory. A function, which may be async, gets the decoded path and returns the reply, for
    any number of trajectories. A reply is a text or token ids. An answer without an
    end-of-sequence token gets one.
    """

    capacity = 1 << 20
    """So many that no tree waits for a place."""
    max_context: int | None = None
    fingerprint = ""
    death: BaseException | None = None

    def __init__(
        self,
        replies: Iterable[Reply] | ReplyFunc,
        tokenizer: Tokenizer,
        *,
        logprob: float = -0.5,
        entropy: float | Callable[[str], float] = 0.5,
        latency_s: Callable[[], float] | None = None,
    ) -> None:
        """Takes the replies; every sampled token gets the same `logprob` and `entropy` (nats).

        Args:
            entropy: for all tokens, or a function of the decoded path for those sampled after it.
            latency_s: called per request for how long to wait, in seconds; None replies at once.
        """
        self._function = replies if callable(replies) else None
        self._list = [] if callable(replies) else list(replies)
        self._tokenizer = tokenizer
        self._logprob = logprob
        self._entropy = entropy
        self._latency_s = latency_s
        self.policy_version = 0
        self.calls: list[Request] = []
        """Every request so far."""

    async def complete(self, request: Request) -> Completion:
        """Returns the next reply, cut at the first stop text and at the token limit.

        Raises:
            EngineError: the list is used up.
        """
        self.calls.append(replace(request, prefix_ids=tuple(request.prefix_ids)))
        text = self._tokenizer.decode(list(request.prefix_ids))
        reply = await self._reply(text)
        entropy = self._entropy(text) if callable(self._entropy) else self._entropy
        if self._latency_s is not None:
            await asyncio.sleep(self._latency_s())
        end = self._tokenizer.eos_token_id
        if isinstance(reply, str):
            ids = self._tokenizer.encode(reply, add_special_tokens=False)
            # A model ends its turn after an answer; without the token the step would go on.
            is_final = any(final in reply for final in request.sampling.final)
            if is_final and end is not None and ids[-1:] != [end]:
                ids = [*ids, end]
        else:
            ids = list(reply)
        ids, finish = self._cut(ids, request.sampling)
        num_probed = request.probe_tokens
        if request.on_probe is not None and num_probed is not None and len(ids) >= num_probed:
            request.on_probe((entropy,) * num_probed)
        count = len(ids)
        return Completion(
            token_ids=tuple(ids),
            sampling_logprobs=(self._logprob,) * count,
            entropies=(entropy,) * count,
            finish=finish,
            policy_version=self.policy_version,
        )

    async def _reply(self, text: str) -> Reply:
        if self._function is not None:
            reply = self._function(text)
            return await reply if inspect.isawaitable(reply) else reply
        if not self._list:
            raise EngineError(
                f"scripted engine: request {len(self.calls)} came, but the list had"
                f" {len(self.calls) - 1} replies; add one",
                code="replies-spent",
            )
        return self._list.pop(0)

    def _cut(self, ids: list[int], sampling: Sampling) -> tuple[list[int], StopReason]:
        # Token by token, as a model would write it: a stop may lie across two tokens.
        for count in range(1, len(ids) + 1):
            if ids[count - 1] == self._tokenizer.eos_token_id:
                return ids[:count], StopReason.END
            text = self._tokenizer.decode(ids[:count])
            if any(stop in text for stop in sampling.stop):
                return ids[:count], StopReason.STOP
            if count == sampling.max_new_tokens:
                return ids[:count], StopReason.LENGTH
        return ids, StopReason.STOP

    async def publish(self, source: WeightSource, version: int) -> None:
        """Takes the version; there are no weights."""
        self.policy_version = version

    def take_metrics(self) -> dict[str, float]:
        """Returns nothing."""
        return {}

    async def close(self) -> None:
        """Has nothing to close."""
