"""The in-process engine: any transformers decoder, continuous batching, every beginning that paths
share stored and computed once.

One thread owns the model and the keys. Each turn of its loop takes the new requests in, gives every
request a row (with all blocks that are stored of its path), runs one forward pass over all rows
that have tokens to feed, and samples for those that are complete. A request joins and leaves at any
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from treegraft.core.errors import DeadlineExceeded, EngineError, ModelError
from treegraft.core.interfaces import NoiseKey, Request, Tokenizer, WeightSource
from treegraft.core.threads import release_threads
from treegraft.core.types import NO_FILTERS, Completion
from treegraft.policy.engine.blocks import BlockPool, PathCache, cache_bytes, common_length
from treegraft.policy.engine.filters import filtered
from treegraft.policy.engine.forward import Forward, build_forward
from treegraft.policy.engine.ragged import BUCKETS, MIN_ROWS, RaggedPlan, Segment, usable_rows
from treegraft.policy.engine.requests import LiveRequest, Order, post, settle
from treegraft.policy.engine.sampling import sample_tokens
from treegraft.policy.engine.served import completion_limit
from treegraft.policy.engine.stops import StopFinder
from treegraft.policy.output_head import OutputHead, end_token_ids, first_line, max_context
from treegraft.policy.weights import weights_fingerprint
from treegraft.settings.policy import EngineSettings

T = TypeVar("T")

MAX_PREFILL_TOKENS = 512
"""Longest stretch of one prompt or result that a forward pass takes in: longer ones gain little and
hold up the rows that decode."""
MIN_SHARED = 32
"""Tokens from which a request waits for another that is taking in the same ones."""


class NativeEngine:
    """Samples from its own copy of the weights, refreshed by `publish`."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, settings: EngineSettings, reserved: float = 0.0
    ) -> None:
        """Takes over `model`, which must not be run elsewhere.

        Args:
            reserved: see `cache_bytes`.

        Raises:
            ModelError: the model's attention or head cannot be run piece by piece.
        """
        self.model = model
        self.settings = settings
        self.policy_version = 0
        self.capacity = settings.max_rows
        self.max_context = max_context(model)
        self.max_prefill_tokens = MAX_PREFILL_TOKENS
        self.fingerprint = weights_fingerprint(model.state_dict())
        self.death: BaseException | None = None
        self._end_ids = frozenset(end_token_ids(model, tokenizer.eos_token_id))
        self._stops = StopFinder(tokenizer)
        own = settings.native
        forward, problem = build_forward(model)
        if forward is None:
            raise ModelError(
                f"engine: the native engine cannot run this model: {problem}; choose another model"
                " or another engine.kind",
                code="model-not-served",
            )
        self._forward: Forward = forward
        self._head = OutputHead(model)
        room = cache_bytes(own.cache_gb, model.device, reserved)
        self._cache = PathCache(BlockPool(model, room), settings.max_rows)
        # Of a row-wise forward pass any number is exact, so nothing is padded.
        self._buckets = range(1, BUCKETS[-1] + 1) if forward.is_rowwise else usable_rows(model)
        self._inbox: queue.SimpleQueue[LiveRequest | Order | None] = queue.SimpleQueue()
        self._waiting: list[LiveRequest] = []
        self._running: list[LiveRequest] = []
        self._orders: list[Order] = []
        self._is_over = threading.Event()
        self.num_forwards = self.num_rows_fed = 0
        # A daemon, so that a run which dies does not wait for a pass.
        self._thread = threading.Thread(target=self._main, name="treegraft-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for callers

    async def complete(self, request: Request) -> Completion:
        """Returns one completion; see `interfaces.Engine`.

        Raises:
            EngineError: an empty or over-long prefix, or the engine has died.
            DeadlineExceeded: no completion within engine.deadline_s.
        """
        completion_limit(request, self.max_context)
        release_threads()
        loop = asyncio.get_running_loop()
        on_probe = request.on_probe and functools.partial(post, loop, request.on_probe)
        # A copy, since the caller may lengthen its list while the request waits.
        own = replace(request, prefix_ids=list(request.prefix_ids), on_probe=on_probe)
        live = LiveRequest(own)
        self._submit(live)
        return await self._answer(
            live.future,
            f"no completion for {request.noise_key}",
            "the machine is too slow for this many rows, or rollout.max_completion_tokens is too"
            " high",
        )

    async def publish(self, source: WeightSource, version: int) -> None:
        """Copies the plain model's weights once running requests are done, where they differ from
        its own, and drops all cached paths.

        Raises:
            EngineError: names are missing or unknown (its weights stay), or it has
                died.
            DeadlineExceeded: running requests took longer than engine.deadline_s.
        """

        def act() -> None:
            # Equal after an update whose groups were all skipped, and after a resume.
            if source.fingerprint != self.fingerprint:
                load_weights(self.model, source)
                self._forward.refresh()
                self.fingerprint = weights_fingerprint(self.model.state_dict())
            # Keys and values of the old weights.
            self._cache.clear()
            self.policy_version = version

        order = Order(act)
        self._submit(order)
        await self._answer(
            order.future, f"version {version} was not published", "requests were still running"
        )

    async def close(self) -> None:
        """Ends the thread; requests under way get an `EngineError`."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 30.0)

    def take_metrics(self) -> dict[str, float]:
        """Returns evictions and mean rows per forward pass since the last call."""
        metrics = {
            "time/engine_evictions": float(self._cache.num_evictions),
            "time/engine_rows_mean": self.num_rows_fed / max(1, self.num_forwards),
        }
        self._cache.num_evictions = self.num_rows_fed = self.num_forwards = 0
        return metrics

    async def _answer(self, future: Future[T], failure: str, reason: str) -> T:
        try:
            # A caller that gives up or is cancelled itself cancels the future, which the thread
            # looks at.
            return await asyncio.wait_for(asyncio.wrap_future(future), self.settings.deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"engine: {failure} within engine.deadline_s = {self.settings.deadline_s} s;"
                f" {reason}",
                code="engine-late",
            ) from error

    def _submit(self, item: LiveRequest | Order) -> None:
        # Put first and looked at second: the other way round, the thread could end in between and
        # the item would never be answered.
        self._inbox.put(item)
        if self._is_over.is_set():
            self._dismiss()

    # ------------------------------------------------------------------ the thread

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        # Of any kind: everything that waits on this thread has to hear of its death.
        except BaseException as error:
            self.death = error
        self._is_over.set()
        self._dismiss()

    def _dismiss(self) -> None:
        """Fails everything that waits on this thread."""
        reason = EngineError("engine: it has been closed", code="engine-closed")
        if self.death is not None:
            reason = EngineError(f"engine: its thread has died: {self.death!r}", code="engine-died")
        # All of them: a request without an answer would wait for its whole deadline.
        left: list[LiveRequest | Order | None] = [*self._running, *self._waiting, *self._orders]
        # Not by `empty`: another caller may take the last item between the look and the taking.
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._inbox.get_nowait())
        for item in left:
            if item is not None:
                settle(item.future, reason)

    def _turn(self) -> bool:
        """One turn of the loop; False after `close`."""
        is_idle = not (self._running or self._waiting or self._orders)
        if is_idle and self._inbox.empty():
            # Before the wait below: a team of threads that idles here slows the learner's.
            release_threads()
        # All of it, so that requests made together share their first pass.
        while is_idle or not self._inbox.empty():
            item = self._inbox.get()
            is_idle = False
            if item is None:
                return False
            if isinstance(item, LiveRequest):
                self._waiting.append(item)
            else:
                self._orders.append(item)
        self._waiting = [live for live in self._waiting if not live.future.cancelled()]
        for live in self._running.copy():
            if live.future.cancelled():
                self._leave(live)
        # A completion is by one version of the weights, so a publish waits for the running ones;
        # new requests wait for the publish, which would otherwise never find the engine idle.
        if self._orders and not self._running:
            for order in self._orders:
                try:
                    order.act()
                except EngineError as error:  # refused before anything was touched
                    settle(order.future, error)
                else:
                    settle(order.future, None)
            self._orders.clear()
        try:
            if not self._orders:
                self._admit()
            if self._running:
                self._step()
        except torch.OutOfMemoryError as error:
            self._give_up(error)
        return True

    def _admit(self) -> None:
        """Gives rows to waiting requests in order of arrival, while there is room.

        One that begins like a path which is just being taken in waits for it, and shares its
        blocks.
        """
        number = 0
        while number < len(self._waiting):
            live = self._waiting[number]
            prefix_ids = live.request.prefix_ids
            if self._is_being_fed(prefix_ids):
                number += 1
                continue
            longest = len(prefix_ids) + live.request.sampling.max_new_tokens
            live.row = self._cache.open([*prefix_ids], min(longest, self.max_context or longest))
            if live.row is None:
                # Shorter ones behind it would fit, but then a long path might wait for ever.
                return
            self._running.append(self._waiting.pop(number))

    def _is_being_fed(self, prefix_ids: Sequence[int]) -> bool:
        # Group members ask for one prompt at the same time; each would compute it by itself.
        shared = 0
        for row in self._cache.rows:
            if row.num_unfed > MIN_SHARED:
                shared = max(shared, common_length(row.token_ids, prefix_ids[:-1]))
        # Looked up last: most requests find nobody who is taking in their beginning.
        return shared > 0 and shared >= self._cache.matched(prefix_ids) + MIN_SHARED

    def _leave(self, live: LiveRequest) -> None:
        self._running.remove(live)
        if live.row is not None:
            self._cache.close(live.row)

    def _step(self) -> None:
        """One forward pass over every row that fits, then sampling where a row is complete."""
        segments, requests = self._plan()
        hidden = self._run(segments)
        # Behind the path's last token only; a prompt that was taken in by halves has none yet.
        done: list[LiveRequest] = []
        ends: list[int] = []
        for live, segment in zip(requests, segments, strict=True):
            if segment.count == segment.row.num_unfed:
                done.append(live)
                ends.append(segment.offset + segment.count - 1)
        found = self._sample(done, hidden[ends]) if done else []
        for segment in segments:
            self._cache.fed(segment.row, segment.count)
        for live, (token, logprob, entropy) in zip(done, found, strict=True):
            self._append(live, token, logprob, entropy)

    def _give_up(self, error: torch.OutOfMemoryError) -> None:
        """Fails the requests that the device has no memory for."""
        # Blocks that the allocator has cached may be what the next pass needs.
        torch.cuda.empty_cache()
        reason = EngineError(
            f"engine: the device has no memory left for a forward pass ({first_line(error)});"
            " lower engine.native.cache_gb, engine.max_rows, learn.max_pack_tokens or"
            " rollout.max_completion_tokens",
            code="device-memory-spent",
        )
        if not self._running:
            settle(self._waiting.pop(0).future, reason)
        for live in self._running.copy():
            self._leave(live)
            settle(live.future, reason)

    def _plan(self) -> tuple[list[Segment], list[LiveRequest]]:
        """The tokens that this pass takes in, a stretch of each row, and the requests they are
        of."""
        segments: list[Segment] = []
        requests: list[LiveRequest] = []
        room = self._buckets[-1]
        offset = 0
        # A fixed number, so that chunks do not depend on company, which leaves room for all rows
        # that decode.
        limit = min(self.max_prefill_tokens, max(MIN_ROWS, room - self.settings.max_rows))
        for live in sorted(self._running, key=_place):
            row = live.row
            assert row is not None
            count = min(row.num_unfed, limit)
            # Whole chunks or nothing: cut to the room that is left, they would depend on company.
            if offset + count > room:
                continue
            self._cache.extend(row, count)
            segments.append(Segment(row, count, offset))
            requests.append(live)
            offset += count
        return segments, requests

    def _run(self, segments: list[Segment]) -> Tensor:
        """Returns the hidden states of the segments' tokens, one after another, and of the
        padding."""
        last = segments[-1]
        count = last.offset + last.count
        # If products round by their number of rows, only numbers that round alike are run.
        rows = self._buckets[bisect_left(self._buckets, count)]
        plan = RaggedPlan(
            rows, self._cache.pool, self._cache.table, segments, self._forward.kernels
        )
        self.num_forwards += 1
        self.num_rows_fed += count
        return self._forward(*plan.inputs(self.model.device), plan)

    def _sample(
        self, requests: list[LiveRequest], hidden: Tensor
    ) -> list[tuple[int, float, float]]:
        """Returns token, log-probability and entropy of each request."""
        # The head's product is padded as those of the layers are; rows of padding are greedy, and
        # thrown away.
        rows = self._buckets[bisect_left(self._buckets, len(requests))]
        padded = functional.pad(hidden, (0, 0, 0, rows - len(requests)))
        logits = self._head(padded)[: max(len(requests), MIN_ROWS)]
        temperatures = [0.0] * len(logits)
        keys: list[NoiseKey | None] = [None] * len(logits)
        positions = [0] * len(logits)
        for row, live in enumerate(requests):
            temperatures[row] = live.request.sampling.temperature
            if live.request.sampling.temperature > 0:
                # By the position in the completion, not by the pass: neither company nor a
                # repeated request changes a token.
                keys[row], positions[row] = live.request.noise_key, len(live.sampled)
        columns = sample_tokens(logits, temperatures, keys, positions, self._forward.kernels)
        self._draw_filtered(requests, logits, keys, columns)
        tokens, logprobs, entropies = (column[: len(requests)].tolist() for column in columns)
        return list(zip(tokens, logprobs, entropies, strict=True))

    def _draw_filtered(
        self,
        requests: list[LiveRequest],
        logits: Tensor,
        keys: Sequence[NoiseKey | None],
        columns: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Draws anew, into `columns`, for the requests that filter their tokens."""
        for row, live in enumerate(requests):
            sampling = live.request.sampling
            if sampling.filters == NO_FILTERS:
                continue
            path = [*live.request.prefix_ids, *live.sampled]
            # Temperature is applied by `filtered`, so the draw is at 1.
            left = filtered(logits[row], sampling.temperature, sampling.filters, path)
            drawn = sample_tokens(left[None], [1.0], [keys[row]], [len(live.sampled)])
            for column, value in zip(columns, drawn, strict=True):
                column[row] = value[0]

    def _append(self, live: LiveRequest, token: int, logprob: float, entropy: float) -> None:
        live.sampled.append(token)
        live.logprobs.append(logprob)
        live.entropies.append(entropy)
        # Before the end is looked for: a step may end with the last token of its probe.
        if live.request.on_probe is not None and len(live.sampled) == live.request.probe_tokens:
            live.request.on_probe(tuple(live.entropies))
        limit = live.request.sampling.max_new_tokens
        if self.max_context is not None:
            limit = min(limit, self.max_context - len(live.request.prefix_ids))
        reason = self._stops.reason(live.sampled, live.request.sampling, self._end_ids, limit)
        if reason is None:
            assert live.row is not None
            live.row.token_ids.append(token)
            return
        self._leave(live)
        completion = Completion(
            token_ids=tuple(live.sampled),
            sampling_logprobs=tuple(live.logprobs),
            entropies=tuple(live.entropies),
            finish=reason,
            policy_version=self.policy_version,
        )
        settle(live.future, completion)


def _place(live: LiveRequest) -> tuple[int, list[int]]:
    """Where a request comes in a pass."""
    row = live.row
    assert row is not None
    # Fewest tokens first: rows that decode never wait for a long prompt or tool result. Then by
    # blocks, so that a shared block which attention has loaded serves several rows.
    return row.num_unfed, [node.block for node in row.nodes]


def load_weights(model: torch.nn.Module, source: WeightSource) -> None:
    """Copies weights into `model` in place, one tensor after another, casting to its dtype.

    Raises:
        EngineError: names are missing or unknown (the model is left as it was), or a shape differs.
    """
    own = model.state_dict()
    # Before anything is copied, so that a refused publish changes nothing.
    if own.keys() != set(source.names):
        odd = sorted(own.keys() ^ set(source.names))[:4]
        raise EngineError(
            f"engine: published weights do not fit its model; names in only one of them: {odd}",
            code="weights-mismatch",
        )
    for name, tensor in source:
        # copy_ alone would broadcast.
        if own[name].shape != tensor.shape:
            raise EngineError(
                f"engine: published weights do not fit its model: '{name}' has shape"
                f" {tuple(tensor.shape)}, expected {tuple(own[name].shape)}",
                code="weights-mismatch",
            )
        own[name].copy_(tensor)
