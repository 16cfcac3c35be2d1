"""An engine over a server of tokens that somebody else runs and gives its weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from treegraft.core.errors import DeadlineExceeded, EngineError
from treegraft.core.interfaces import NoiseKey, Request, Tokenizer, WeightSource
from treegraft.core.keyed import keyed_int
from treegraft.core.types import NO_FILTERS, Completion, StopReason
from treegraft.core.types import EntropyKind as EntropyKind  # offered here too, as the next one
from treegraft.policy.engine.stops import StopFinder as StopFinder

NUM_ASKED = 20
"""Log-probabilities of each token that are requested: vLLM's own limit, unless --max-logprobs
raises it."""


def top_k_entropy(logprobs: Iterable[float]) -> float:
    """Returns Σ -p ln p in nats over the 19 most likely tokens: of 20 that are requested, an
    unlikely token that was drawn is in the place of the last one."""
    most_likely = sorted(logprobs, reverse=True)[: NUM_ASKED - 1]
    return sum(-math.exp(one) * one for one in most_likely)


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request to a server."""

    token_ids: Sequence[int]
    """The whole path so far."""
    max_tokens: int
    temperature: float
    seed: int
    """Below 2^63; a function of the noise key and the position."""
    stop: Sequence[str]
    """Texts that may end the reply, and stay in it; a longer reply is cut here."""
    stop_token_ids: Sequence[int]
    """Tokens that end the reply, and stay in it."""
    tree: NoiseKey
    """Equal for the requests of one tree, which share a prefix; a fleet may send them to one
    server."""


class TokenReply(NamedTuple):
    """What a server has drawn from softmax(logits / temperature)."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """[tokens] Of the drawn tokens, under that distribution."""
    entropies: Sequence[float] | None = None
    """[tokens] By `top_k_entropy`; None if the server reports nothing but the drawn tokens."""


class TokenServer(Protocol):
    """Turns token ids into more token ids."""

    async def generate(self, request: TokenRequest) -> TokenReply:
        """Returns at least one token; raises `EngineError` if there is none."""


def completion_limit(request: Request, max_context: int | None) -> int:
    """Returns the largest number of tokens of a completion.

    Args:
        max_context: the longest path in tokens, prompt included; None for no limit.

    Raises:
        EngineError: an empty or over-long prefix.
    """
    prefix_ids = request.prefix_ids
    sampling = request.sampling
    if not prefix_ids:
        raise EngineError(
            "engine: the prefix is empty; at least one token is needed to continue from",
            code="prefix-empty",
        )
    if max_context is None:
        return sampling.max_new_tokens
    room = max_context - len(prefix_ids)
    if room < 1:
        raise EngineError(
            f"engine: the path has {len(prefix_ids)} tokens, the model reads at most"
            f" {max_context}; shorten the prompt or lower rollout.max_completion_tokens",
            code="path-too-long",
        )
    return min(sampling.max_new_tokens, room)


class Draft:
    """A completion under way: the tokens so far, and the next request for more."""

    def __init__(
        self,
        stops: StopFinder,
        end_ids: frozenset[int],
        request: Request,
        limit: int,
        kind: EntropyKind,
    ) -> None:
        """Args:
        limit: most tokens of the completion.
        kind: of the replies' entropies.
        """
        self._stops = stops
        self._end_ids = end_ids
        self.request = request
        self._limit = limit
        self._kind = kind
        self._num_probed = 0 if request.on_probe is None else request.probe_tokens or 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.entropies: list[float] = []
        self.finish: StopReason | None = None

    def next(self) -> TokenRequest:
        """Returns the next request: up to the probe first, then for the rest."""
        sampling = self.request.sampling
        key = self.request.noise_key
        count = len(self.ids)
        room = self._limit - count
        if count < self._num_probed:
            room = min(room, self._num_probed - count)
        in_grace = self._stops.is_in_grace(self.ids, sampling)
        return TokenRequest(
            token_ids=[*self.request.prefix_ids, *self.ids],
            max_tokens=1 if in_grace else room,
            temperature=sampling.temperature,
            # 63 bits, since vLLM reads a signed number.
            seed=keyed_int("seed", count, *key) >> 1,
            # Only so that the server does not write on in vain: `take` decides.
            stop=[] if in_grace else [*sampling.stop, *sampling.final],
            stop_token_ids=sorted(self._end_ids),
            tree=key[:-1],
        )

    def take(self, reply: TokenReply) -> None:
        """Appends a reply's tokens up to the end of the completion.

        Raises:
            EngineError: a reply without tokens.
        """
        if not reply.token_ids:
            raise EngineError(
                "engine: a server replied without a token; expected at least one",
                code="reply-without-token",
            )
        entropies = reply.entropies
        if entropies is None:
            self._kind = EntropyKind.SAMPLED
            # E[-ln p] over draws is the entropy, so one draw is an unbiased estimate.
            entropies = [-one for one in reply.logprobs]
        if not len(reply.token_ids) == len(reply.logprobs) == len(entropies):
            raise ValueError("a reply's columns have other lengths than its tokens")
        before = len(self.ids)
        sampling = self.request.sampling
        self.ids += reply.token_ids
        end = self._stops.first_end(self.ids, before, sampling, self._end_ids, self._limit)
        if end is not None:
            size, self.finish = end
            del self.ids[size:]
        count = len(self.ids) - before
        self.logprobs += reply.logprobs[:count]
        self.entropies += entropies[:count]
        if self.request.on_probe is not None and before < self._num_probed <= len(self.ids):
            self.request.on_probe(tuple(self.entropies[: self._num_probed]))

    def completion(self, version: int) -> Completion:
        """Returns the completion, which has ended."""
        assert self.finish is not None
        return Completion(
            token_ids=tuple(self.ids),
            sampling_logprobs=tuple(self.logprobs),
            entropies=tuple(self.entropies),
            entropy_kind=self._kind,
            finish=self.finish,
            policy_version=version,
        )


class ServerEngine:
    """Samples on a server whose weights somebody else moves; a publish sets the version alone.

    Entropies are those of the most likely tokens (`EntropyKind.TOP_K`), or -ln p of the drawn ones
    (`EntropyKind.SAMPLED`): an estimate without bias that has the variance of one draw, so it is of
    no use for RAPO's retrieval reward.
    """

    fingerprint = ""
    takes_filters = False
    """Whether requests can have filters."""
    _kind = EntropyKind.TOP_K
    """Of the entropies in replies that have any."""

    def __init__(
        self,
        server: TokenServer | None,
        tokenizer: Tokenizer,
        *,
        end_ids: Sequence[int],
        capacity: int = 256,
        max_context: int | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        """Asks nothing yet.

        Args:
            server: None for one that is set as `server` before the first request.
            end_ids: tokens that end a completion, the end of sequence among them; more may be set
                as `end_ids` before the first request.
            capacity: requests to the server at the same time.
            max_context: the longest path of the server, in tokens; None for no limit.
            deadline_s: longest wait for a completion, and for those under way at a publish.
        """
        self.server = server
        self._capacity = capacity
        self.max_context = max_context
        self.policy_version = 0
        self._deadline_s = deadline_s
        self.end_ids = frozenset(end_ids)
        self._stops = StopFinder(tokenizer)
        self._num_running = 0
        self._is_open = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_open.set()
        self._is_idle.set()
        self._places = asyncio.Semaphore(capacity)

    @property
    def capacity(self) -> int:
        """Completions that run at the same time; more wait for a place."""
        return self._capacity

    @property
    def death(self) -> BaseException | None:
        """None: a server that does not answer is an error of each request."""
        return None

    async def complete(self, request: Request) -> Completion:
        """Returns one completion; see `interfaces.Engine`.

        Raises:
            EngineError: an empty or over-long prefix, filters, or no reply.
            DeadlineExceeded: no completion in time.
        """
        # Outside the deadline: a bad request is refused at once.
        draft = self._draft(request)
        try:
            async with asyncio.timeout(self._deadline_s):
                # One version a completion: a publish waits for those that run, and new ones for it.
                await self._is_open.wait()
                self._num_running += 1
                self._is_idle.clear()
                try:
                    while draft.finish is None:
                        draft.take(await self._ask(draft))
                finally:
                    self._num_running -= 1
                    if not self._num_running:
                        self._is_idle.set()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"engine: no completion for {request.noise_key} within engine.deadline_s ="
                f" {self._deadline_s} s; the servers are too slow for this many rows, or"
                " have died",
                code="engine-late",
            ) from error
        return draft.completion(self.policy_version)

    def _draft(self, request: Request) -> Draft:
        if request.sampling.filters != NO_FILTERS and not self.takes_filters:
            raise EngineError(
                f"engine: got {request.sampling.filters}, which a `TokenRequest` does not hold;"
                ' expected none. Leave them out, or use the engine "native" or "vllm".',
                code="filters-invalid",
            )
        limit = completion_limit(request, self.max_context)
        return Draft(self._stops, self.end_ids, request, limit, self._kind)

    async def _ask(self, draft: Draft) -> TokenReply:
        if self.server is None:
            raise EngineError(
                "engine: no server is set; expected one before the first request",
                code="engine-without-server",
            )
        async with self._places:
            return await self.server.generate(draft.next())

    async def publish(self, source: WeightSource | None, version: int) -> None:
        """Takes the version, once running completions are done; the source is not read.

        Raises:
            DeadlineExceeded: completions took longer than the deadline.
        """
        # New completions wait from here on, or a busy server would never be idle.
        self._is_open.clear()
        try:
            try:
                await asyncio.wait_for(self._is_idle.wait(), self._deadline_s)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"engine: version {version} was not published within engine.deadline_s ="
                    f" {self._deadline_s} s; {self._num_running} completions were still running",
                    code="publish-late",
                ) from error
            await self._take_over(source, version)
            self.policy_version = version
        finally:
            self._is_open.set()

    async def _take_over(self, source: WeightSource | None, version: int) -> None:
        """Gives servers the weights, no completion being under way; here they have them already."""

    def take_metrics(self) -> dict[str, float]:
        """Returns nothing."""
        return {}

    async def close(self) -> None:
        """Does nothing: the server is its owner's."""
