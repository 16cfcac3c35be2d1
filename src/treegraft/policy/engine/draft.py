"""A completion under way on somebody's server: tokens go in, tokens come out, and we decide where
it ends. Without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from treegraft.core.errors import EngineError
from treegraft.core.interfaces import Request, Tokenizer
from treegraft.core.types import Completion, EntropyKind, StopReason
from treegraft.policy.engine.stops import StopFinder


class Drawn(NamedTuple):
    """A token that a server has drawn."""

    token: int
    logprob: float
    """The natural logarithm of its probability, of softmax(logits / T)."""
    entropy: float
    """In nats, of that distribution, or an estimate of its entropy."""


class Drafter:
    """Begins completions for one model."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int]) -> None:
        """Args: end_ids: tokens that end an answer."""
        self.stops, self.end_ids = StopFinder(tokenizer), frozenset(end_ids)

    def begin(self, request: Request, max_context: int | None) -> Draft:
        """Returns a completion of a request without tokens yet.

        Args:
            max_context: longest path in tokens, prompt included; None where there is no limit.

        Raises:
            EngineError: an empty or over-long prefix, or no token is asked for.
        """
        return Draft(self, request, completion_limit(request, max_context))


def completion_limit(request: Request, max_context: int | None) -> int:
    """Returns the most tokens of a completion; arguments and errors as of `Drafter.begin`."""
    prefix_ids, sampling = request.prefix_ids, request.sampling
    if not prefix_ids:
        raise EngineError(
            "engine: the prefix is empty; at least one token is needed to continue from"
        )
    if sampling.max_new_tokens < 1:
        raise EngineError(
            f"engine: max_new_tokens is {sampling.max_new_tokens}; at least 1 is needed"
        )
    if max_context is None:
        return sampling.max_new_tokens
    room = max_context - len(prefix_ids)
    if room < 1:
        raise EngineError(
            f"engine: the path has {len(prefix_ids)} tokens, the model reads at most"
            f" {max_context}; shorten the prompt or lower rollout.max_completion_tokens"
        )
    return min(sampling.max_new_tokens, room)


class Draft:
    """The tokens so far, and how many the next request may ask for."""

    def __init__(self, drafter: Drafter, request: Request, limit: int) -> None:
        """Args: limit: most tokens of the completion."""
        self._drafter, self.request, self._limit = drafter, request, limit
        self._num_probed = 0 if request.on_probe is None else request.probe_tokens or 0
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self.finish: StopReason | None = None
        """None while it goes on."""

    @property
    def is_in_grace(self) -> bool:
        """Whether one more token, and no stop text, is all that may come."""
        return self._drafter.stops.is_in_grace(self.ids, self.request.sampling)

    @property
    def room(self) -> int:
        """The most tokens of the next reply: up to the probe first, then for the rest."""
        if self.is_in_grace:
            return 1
        room = self._limit - len(self.ids)
        ahead = self._num_probed - len(self.ids)
        return min(room, ahead) if ahead > 0 else room

    @property
    def stop_texts(self) -> list[str]:
        """Where a server may stop, so that it does not write on in vain: `take` decides."""
        sampling = self.request.sampling
        return [] if self.is_in_grace else [*sampling.stop, *sampling.final]

    def take(self, drawn: Iterable[Drawn]) -> None:
        """Appends a reply's tokens, as far as the completion goes.

        Raises:
            EngineError: no token.
        """
        count = len(self.ids)
        for token, logprob, entropy in drawn:
            self.ids.append(token)
            self._logprobs.append(logprob)
            self._entropies.append(entropy)
            if self.request.on_probe is not None and len(self.ids) == self._num_probed:
                self.request.on_probe(tuple(self._entropies))
            self.finish = self._drafter.stops.reason(
                self.ids, self.request.sampling, self._drafter.end_ids, self._limit
            )
            if self.finish is not None:
                return
        if len(self.ids) == count:
            raise EngineError("engine: a server replied without a token; expected at least one")

    def completion(self, version: int, entropy_kind: str) -> Completion:
        """Returns the completion, which has ended.

        Args:
            entropy_kind: an `EntropyKind` or its value.
        """
        assert self.finish is not None
        return Completion(
            token_ids=tuple(self.ids),
            sampling_logprobs=tuple(self._logprobs),
            entropies=tuple(self._entropies),
            entropy_kind=EntropyKind(entropy_kind),
            finish=self.finish,
            policy_version=version,
        )
