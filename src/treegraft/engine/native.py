"""The in-process engine: any transformers decoder, continuous batching, prompts shared, branches by prefix.

One thread owns the model and the store. Each turn of its loop takes in what was asked, gives every request a row (copying what
another row already holds of its path), runs one forward pass over all rows that have tokens to feed, and samples for those that
are complete. A request joins and leaves at any token. Decoding never runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from treegraft.attention import ATTENTION, install_attention
from treegraft.config import EngineSettings
from treegraft.engine.packed import pack_linears
from treegraft.engine.ragged import MIN_ROWS, RaggedPlan, Segment, attention_problem, usable_rows
from treegraft.engine.sampling import keyed_seed, sample_tokens
from treegraft.engine.stops import StopFinder
from treegraft.engine.store import KeyValueStore, PathCache, Row
from treegraft.errors import DeadlineExceeded, EngineError, ModelError
from treegraft.interfaces import NoiseKey, Tokenizer
from treegraft.models import Head, decoder, end_token_ids, head_problem, max_context, weights_fingerprint
from treegraft.types import Completion, Sampling, StopReason


@dataclass(eq=False)
class Request:
    """One call of `complete` on its way through the engine thread."""

    prompt_ids: tuple[int, ...]
    own_ids: list[int]
    sampling: Sampling
    noise_key: NoiseKey
    finish: Callable[[Completion | BaseException], None]
    probe_tokens: int | None = None
    on_probe: Callable[[Sequence[float]], None] | None = None
    row: Row | None = None
    is_cancelled: bool = False
    in_grace: bool = False
    """A final text was written; one more token and it is over."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Order:
    """Something for the engine thread to do when nothing is running (a publish) or at once (forget)."""

    act: Callable[[], None]
    done: Callable[[BaseException | None], None]
    waits_for_idle: bool


class NativeEngine:
    """Samples from its own copy of the weights, refreshed by `publish`."""

    def __init__(self, model: Any, tokenizer: Tokenizer, settings: EngineSettings, *, num_prompts: int = 64) -> None:
        """Takes over `model` (nobody else may run it).

        Args:
            num_prompts: how many prompts are kept at once.

        Raises:
            ModelError: the model's attention or head cannot be run piece by piece.
        """
        self.model = model
        self.settings = settings
        self._end_ids = frozenset(end_token_ids(model, tokenizer))
        self._stops = StopFinder(tokenizer)
        self._limit = max_context(model)
        self._version = 0
        self._fingerprint = weights_fingerprint(model.state_dict())
        is_tried = model.config._attn_implementation == ATTENTION
        if not is_tried and (problem := head_problem(model) or attention_problem(model)):
            raise ModelError(
                f"engine: the native engine cannot run this model: {problem}; choose another model or another engine.kind"
            )
        install_attention(model)
        self._linears = pack_linears(model) if settings.pack_weights else None
        self._decoder, self._head = decoder(model), Head(model)
        self._build_store(num_prompts)
        self._buckets = usable_rows(model)
        self._inbox: queue.SimpleQueue[Request | Order | None] = queue.SimpleQueue()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._orders: list[Order] = []
        self._death: BaseException | None = None
        self._is_over = threading.Event()
        self.num_forwards = 0
        self.num_rows_fed = 0
        self._thread = threading.Thread(target=self._main, name="treegraft-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what callers see

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    async def complete(
        self,
        prefix_ids: Sequence[int],
        sampling: Sampling,
        *,
        noise_key: NoiseKey,
        num_shared: int | None = None,
        probe_tokens: int | None = None,
        on_probe: Callable[[Sequence[float]], None] | None = None,
    ) -> Completion:
        """Returns one completion; see `interfaces.Engine`.

        Raises:
            EngineError: an empty or over-long prefix, or the engine has died.
            DeadlineExceeded: no completion within engine.deadline_s.
        """
        self._check(prefix_ids, sampling)
        shared = max(0, min(len(prefix_ids), len(prefix_ids) if num_shared is None else num_shared) - 1)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def finish(result: Completion | BaseException) -> None:
            _post(loop, lambda: _resolve(future, result))

        probe = None
        if on_probe is not None:
            listener = on_probe

            def probe(entropies: Sequence[float]) -> None:
                _post(loop, lambda: listener(entropies))

        request = Request(
            prompt_ids=tuple(prefix_ids[:shared]),
            own_ids=list(prefix_ids[shared:]),
            sampling=sampling,
            noise_key=noise_key,
            finish=finish,
            probe_tokens=probe_tokens,
            on_probe=probe,
        )
        self._submit(request)
        try:
            return await asyncio.wait_for(future, self.settings.deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"engine: no completion for {noise_key} within engine.deadline_s = {self.settings.deadline_s} s; "
                "the machine is too slow for this many rows, or rollout.max_completion_tokens is too high"
            ) from error
        finally:
            request.is_cancelled = True

    def forget(self, prefix_ids: Sequence[int]) -> None:
        """Drops what is cached below a prompt once nothing is under way there."""
        shared = tuple(prefix_ids[:-1])
        self._submit(Order(lambda: self._cache.forget(shared), lambda _: None, waits_for_idle=False))

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copies `weights` (a state dict of the plain model) once running requests are done, and drops all cached paths.

        Raises:
            EngineError: names are missing or unknown (the engine keeps its weights), or it has died.
            DeadlineExceeded: running requests took longer than engine.deadline_s.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def act() -> None:
            load_weights(self.model, weights)
            if self._linears is not None:
                self._linears.refresh()
            self._cache.clear()
            self._version, self._fingerprint = version, weights_fingerprint(self.model.state_dict())

        def done(error: BaseException | None) -> None:
            _post(loop, lambda: _resolve(future, error))

        self._submit(Order(act, done, waits_for_idle=True))
        try:
            await asyncio.wait_for(future, self.settings.deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"engine: version {version} was not published within engine.deadline_s = {self.settings.deadline_s} s; "
                "requests were still running"
            ) from error

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

    def _submit(self, item: Request | Order) -> None:
        """Hands something to the thread; where that has ended in the meantime, its sender is told at once."""
        self._inbox.put(item)
        if self._is_over.is_set():
            self._dismiss()

    def _check(self, prefix_ids: Sequence[int], sampling: Sampling) -> None:
        if self._death is not None:
            raise EngineError(f"engine: its thread has died: {self._death!r}") from self._death
        if not self._thread.is_alive():
            raise EngineError("engine: it has been closed")
        if not prefix_ids:
            raise EngineError("engine: the prefix is empty; at least one token is needed to continue from")
        if sampling.max_new_tokens < 1:
            raise EngineError(f"engine: max_new_tokens is {sampling.max_new_tokens}; at least 1 is needed")
        if self._limit is not None and len(prefix_ids) + 1 > self._limit:
            raise EngineError(
                f"engine: the path has {len(prefix_ids)} tokens, the model reads at most {self._limit}; "
                "shorten the prompt or lower rollout.max_completion_tokens"
            )

    # ------------------------------------------------------------------ the thread

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:  # everything that waits on this thread has to hear of its death
            self._death = error
        self._is_over.set()
        self._dismiss()

    def _dismiss(self) -> None:
        """Tells everything that waits on this thread that it waits in vain."""
        reason = EngineError(
            f"engine: its thread has died: {self._death!r}" if self._death else "engine: closed while the request was under way"
        )
        for request in (*self._running, *self._waiting):
            request.finish(reason)
        for order in self._orders:
            order.done(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, Request):
                    item.finish(reason)
                elif item is not None:
                    item.done(reason)

    def _turn(self) -> bool:
        """One turn of the loop; False when told to close."""
        is_idle = not (self._running or self._waiting or self._orders)
        while is_idle or not self._inbox.empty():
            item = self._inbox.get()
            is_idle = False
            if item is None:
                return False
            if isinstance(item, Request):
                self._waiting.append(item)
            elif item.waits_for_idle:
                self._orders.append(item)
            else:
                item.act()
        self._drop_cancelled()
        if self._orders and not self._running:
            for order in self._orders:
                try:
                    order.act()
                except EngineError as error:  # refused before anything was touched
                    order.done(error)
                else:
                    order.done(None)
            self._orders.clear()
        if not self._orders:
            self._admit()
        if self._running:
            self._step()
        return True

    def _drop_cancelled(self) -> None:
        self._waiting = [request for request in self._waiting if not request.is_cancelled]
        for request in [request for request in self._running if request.is_cancelled]:
            self._leave(request)

    def _admit(self) -> None:
        """Gives rows to waiting requests in order of arrival; the rest waits for a free row."""
        while self._waiting:
            request = self._waiting[0]
            row = self._cache.open(request.prompt_ids, request.own_ids)
            if row is None:
                return
            longest = len(request.own_ids) + request.sampling.max_new_tokens
            if self._limit is not None:
                longest = min(longest, self._limit - len(request.prompt_ids))
            self._cache.row_store.reserve(longest)
            request.row = row
            self._running.append(self._waiting.pop(0))

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        if request.row is not None:
            self._cache.close(request.row)

    def _step(self) -> None:
        """One forward pass over every row (and unfilled prompt) that fits, then sampling where a row is complete."""
        segments, requests = self._plan()
        hidden, ends = self._forward(segments)
        for segment in segments:
            if segment.row is not None:
                segment.row.fed += segment.count
        complete = [
            (request, end)
            for request, end in zip(requests, ends, strict=True)
            if request is not None and request.row is not None and request.row.fed == len(request.row.token_ids)
        ]
        if complete:
            self._sample([request for request, _ in complete], hidden[torch.tensor([end for _, end in complete])])

    def _plan(self) -> tuple[list[Segment], list[Request | None]]:
        """Decoding rows first, then prompts and results in chunks whose cuts depend on the path alone."""
        segments: list[Segment] = []
        requests: list[Request | None] = []
        room, offset = self._buckets[-1], 0
        ready = [r for r in self._running if r.row is not None and r.row.prompt.is_ready]
        ready.sort(key=lambda request: len(request.row.token_ids) - request.row.fed if request.row else 0)
        limit = min(self.settings.max_prefill_tokens, room)
        for request in ready:
            row = request.row
            assert row is not None
            count = min(len(row.token_ids) - row.fed, limit)
            if offset + count > room:
                continue
            base = len(row.prompt.token_ids)
            segments.append(Segment(self._cache.row_store, row.slot, row.fed, count, offset, base, row))
            requests.append(request)
            offset += count
        for prompt in self._cache.prompts_to_fill(row.prompt for row in (r.row for r in self._running) if row is not None):
            count = min(len(prompt.token_ids) - prompt.fed, limit)
            if offset + count > room:
                continue
            segments.append(Segment(self._cache.prompt_store, prompt.slot, prompt.fed, count, offset, 0))
            requests.append(None)
            prompt.fed += count
            offset += count
        return segments, requests

    def _forward(self, segments: list[Segment]) -> tuple[torch.Tensor, list[int]]:
        """Returns hidden states [rows, width] and each segment's last row."""
        prompts = {prompt.slot: prompt for prompt in self._cache.all_prompts()}
        ids: list[int] = []
        positions: list[int] = []
        for segment in segments:
            source = segment.row.token_ids if segment.row is not None else prompts[segment.slot].token_ids
            ids.extend(source[segment.fed : segment.fed + segment.count])
            positions.extend(range(segment.base + segment.fed, segment.base + segment.fed + segment.count))
        rows = next(bucket for bucket in self._buckets if bucket >= len(ids))
        padding = [0] * (rows - len(ids))
        plan = RaggedPlan(rows, self._cache.prompt_store, self._cache.row_store, segments)
        device = self.model.device
        output = self._decoder(
            input_ids=torch.tensor([ids + padding], device=device),
            position_ids=torch.tensor([positions + padding], device=device),
            use_cache=False,
            attention_plan=plan,
        )
        self.num_forwards += 1
        self.num_rows_fed += len(ids)
        return output.last_hidden_state[0], [segment.offset + segment.count - 1 for segment in segments]

    def _sample(self, requests: list[Request], hidden: torch.Tensor) -> None:
        rows = next(bucket for bucket in self._buckets if bucket >= len(requests))
        padded = torch.cat([hidden, hidden.new_zeros(rows - len(requests), hidden.shape[1])])
        logits = self._head(padded)[: max(len(requests), MIN_ROWS)]
        blank = logits.shape[0] - len(requests)
        temperatures = [request.sampling.temperature for request in requests] + [0.0] * blank
        seeds = [
            keyed_seed(request.noise_key, len(request.sampled)) if request.sampling.temperature > 0 else None
            for request in requests
        ] + [None] * blank
        columns = [column.tolist() for column in sample_tokens(logits, temperatures, seeds)]
        for request, token, logprob, entropy in zip(requests, *(column[: len(requests)] for column in columns), strict=True):
            self._append(request, token, logprob, entropy)

    def _append(self, request: Request, token: int, logprob: float, entropy: float) -> None:
        request.sampled.append(token)
        request.logprobs.append(logprob)
        request.entropies.append(entropy)
        if request.on_probe is not None and len(request.sampled) == request.probe_tokens:
            request.on_probe(tuple(request.entropies))
        reason = self._stop_reason(request, token)
        if reason is None:
            assert request.row is not None
            request.row.token_ids.append(token)
            return
        self._leave(request)
        request.finish(
            Completion(
                token_ids=tuple(request.sampled),
                sampling_logprobs=tuple(request.logprobs),
                entropies=tuple(request.entropies),
                finish=reason,
                policy_version=self._version,
            )
        )

    def _stop_reason(self, request: Request, token: int) -> StopReason | None:
        """Why the completion ends with this token; None while it goes on."""
        if token in self._end_ids:
            return StopReason.END
        if request.in_grace:
            return StopReason.STOP
        sampling = request.sampling
        if sampling.stop and self._stops.ends_with_any(request.sampled, sampling.stop):
            return StopReason.STOP
        if sampling.final and self._stops.ends_with_any(request.sampled, sampling.final):
            request.in_grace = True
        limit = len(request.sampled) >= sampling.max_new_tokens
        if limit or (
            self._limit is not None and len(request.prompt_ids) + len(request.own_ids) + len(request.sampled) >= self._limit
        ):
            return StopReason.LENGTH
        return None

    # ------------------------------------------------------------------ construction

    def _build_store(self, num_prompts: int) -> None:
        num_rows = self.settings.max_rows
        prompts, rows = KeyValueStore.for_model(self.model, num_prompts), KeyValueStore.for_model(self.model, num_rows)
        self._cache = PathCache(prompts, rows, num_prompts, num_rows)


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies a state dict into `model` in place, casting to its dtype.

    Raises:
        EngineError: names are missing or unknown.
    """
    own = model.state_dict()
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())[:4]
        raise EngineError(f"engine: published weights do not fit its model; names in only one of them: {odd}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def _post(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Runs `act` on the event loop; nobody listens any more where the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
