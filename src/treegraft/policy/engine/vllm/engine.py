"""The engine that samples on vLLM servers, by our own draws in them."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from safetensors import SafetensorError

from treegraft.core.errors import DeadlineExceeded, EngineError
from treegraft.core.files import storage_fault
from treegraft.core.interfaces import Request, Tokenizer, WeightSource
from treegraft.core.types import NO_FILTERS, Completion, EntropyKind
from treegraft.policy.canary import CANARY_SAMPLING, PROMPTS, canary_key
from treegraft.policy.engine.draft import Draft, Drafter, Drawn
from treegraft.policy.engine.vllm.fleet import Fleet, Member
from treegraft.policy.engine.vllm.folder import (
    WeightsFolder,
    held_folder,
    write_adapter,
    write_folder,
)
from treegraft.policy.engine.vllm.loading import Due
from treegraft.policy.engine.vllm.plain import plain_entries, plain_parameters
from treegraft.policy.engine.vllm.protocol import DRAW, entries_of
from treegraft.policy.engine.vllm.server import Server, Unreachable
from treegraft.settings.policy import EngineSettings

_log = logging.getLogger(__name__)


class VllmEngine:
    """Samples on servers, which hold copies of the weights."""

    def __init__(
        self,
        servers: Sequence[Server],
        http: httpx.AsyncClient,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        *,
        expected: Mapping[str, Any],
        end_ids: Sequence[int],
        max_context: int | None,
        weights: Path,
        folders: Sequence[Path],
        initial: WeightSource | None,
        publishes_adapters: bool = False,
    ) -> None:
        """Starts nothing; `open` does.

        Args:
            expected: the servers' identity, see `checks.check_identity`.
            weights: a folder of its own for published weights.
            folders: removed at the end.
            initial: the weights to begin with; None for those that servers of ours start with.
            publishes_adapters: give servers adapters alone, over the weights they begin with.
        """
        self.settings, self.max_context = settings, max_context
        self.policy_version, self.fingerprint = 0, ""
        self._initial, self._publishes_adapters = initial, publishes_adapters
        self._http, self._weights, self._folders = http, weights, folders
        self._fleet = Fleet(servers, settings, expected)
        self._drafter = Drafter(tokenizer, end_ids)
        self._num_running, self._num_published = 0, 0
        self._is_open, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._num_bytes = 0
        self._lock = ExitStack()
        with suppress(OSError):
            # Not every file system knows locks.
            self._lock.enter_context(held_folder(weights))
        self._former: list[WeightsFolder] = []
        """Of earlier publishes, to be removed."""

    async def open(self) -> None:
        """Starts the servers and waits until they can be sampled from.

        Raises:
            SettingError: a server that does not fit the recipe.
            EngineError: one that does not answer or did not start.
        """
        if self._initial is not None:
            self._fleet.due = await self._written(self._initial, 0)
            self.fingerprint = self._fleet.due.fingerprint
            self._fleet.base = self._fleet.due.folder
        await self._fleet.open()
        self._initial = None
        limits = [member.identity["max_context"] for member in self._fleet.members]
        self.max_context = min(limits, default=self.max_context)
        self._is_open.set()

    # ------------------------------------------------------------------ completions

    @property
    def capacity(self) -> int:
        """Completions that run at the same time; more wait for a place."""
        return self.settings.max_rows * max(1, len(self._fleet.live))

    @property
    def death(self) -> BaseException | None:
        return self._fleet.death

    async def complete(self, request: Request) -> Completion:
        """Returns one completion; see `interfaces.Engine`.

        Raises:
            EngineError: an empty or over-long prefix, or no server is left.
            DeadlineExceeded: no completion within engine.deadline_s.
        """
        draft, key = self._drafter.begin(request, self.max_context), request.noise_key
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                # One version a completion: a publish waits for those that run, and new ones for it.
                await self._is_open.wait()
                self._num_running += 1
                self._is_idle.clear()
                try:
                    while draft.finish is None:
                        body = self._body(draft)
                        draft.take(self._drawn(await self._fleet.ask(key[:-1], body)))
                finally:
                    self._num_running -= 1
                    if not self._num_running:
                        self._is_idle.set()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"engine: no completion for {key} within engine.deadline_s ="
                f" {self.settings.deadline_s} s; the servers are too slow for this many rows, or"
                " have died"
            ) from error
        return self._completion(draft)

    def _body(self, draft: Draft) -> dict[str, Any]:
        """The body of the next request of a completion."""
        request, due = draft.request, self._fleet.due
        parameters = {
            "max_tokens": draft.room,
            **_drawing(request, len(draft.ids), self._fleet.is_plain),
            "ignore_eos": True,
            "stop_token_ids": sorted(self._drafter.end_ids),
            "stop": draft.stop_texts,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        # Salted by the weights, so that a cache which outlived a publish would not be used.
        body = {
            "token_ids": [*request.prefix_ids, *draft.ids],
            "sampling_params": parameters,
            "cache_salt": due.label,
        }
        return body | ({"model": due.label} if due.is_adapter else {})

    def _drawn(self, reply: Mapping[str, Any]) -> list[Drawn]:
        """The tokens of a reply.

        Raises:
            EngineError: they or their two entries are missing.
        """
        is_plain = self._fleet.is_plain
        read = plain_entries if is_plain else entries_of
        try:
            choice = reply["choices"][0]
            pairs = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
            return [Drawn(token, *read(one)) for token, one in pairs]
        except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
            raise EngineError(
                f"engine: a server's reply lacks tokens or their entries ({error!r}); expected"
                f" {'log-probabilities' if is_plain else 'the draw of the plugin of Treegraft'}."
                " See docs/serving.md."
            ) from error

    def _completion(self, draft: Draft) -> Completion:
        kind = EntropyKind.TOP_K if self._fleet.is_plain else EntropyKind.EXACT
        return draft.completion(self.policy_version, kind)

    def forget(self, prefix_ids: Sequence[int]) -> None:
        """Does nothing: servers drop what was used least recently."""

    # ------------------------------------------------------------------ weights

    async def publish(self, source: WeightSource, version: int) -> None:
        """Gives all servers new weights once running completions are done.

        Raises:
            EngineError: no server took them.
            DeadlineExceeded: completions took longer than engine.deadline_s.
        """
        deadline_s = self.settings.deadline_s
        self._is_open.clear()
        try:
            try:
                await asyncio.wait_for(self._is_idle.wait(), deadline_s)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"engine: version {version} was not published within engine.deadline_s ="
                    f" {deadline_s} s; {self._num_running} completions were still running"
                ) from error
            before = self._fleet.due.folder
            due = await self._written(source, version, is_adapter=self._publishes_adapters)
            await self._fleet.publish(due, self.settings.vllm.start_timeout_s)
            self._former += [] if before in (None, self._fleet.base) else [before]
            # A server that is being started anew may still read one; the next publish removes it.
            if not any(member.loading.locked() for member in self._fleet.members):
                for former in self._former:
                    former.remove()
                self._former.clear()
            self.policy_version, self.fingerprint = version, due.fingerprint
            assert due.folder is not None
            self._num_bytes += due.folder.num_bytes()
        finally:
            self._is_open.set()

    async def _written(
        self, source: WeightSource, version: int, *, is_adapter: bool = False
    ) -> Due:
        self._num_published += 1
        label = f"{self._fleet.owner}-{version}.{self._num_published}"
        path = self._weights / f"weights-{self._num_published}"
        try:
            if is_adapter:
                folder = await asyncio.to_thread(write_adapter, path, source)
            else:
                folder = await asyncio.to_thread(
                    write_folder, path, source, has_each_name=self._fleet.is_plain
                )
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise EngineError(
                f"engine: the weights could not be written to {path}"
                f" ({storage_fault(error) or error}); expected room for two copies of the model,"
                ' the former one and this. Free some, or set publish.kind = "disk" and'
                " publish.folder."
            ) from error
        # Servers report no checksum of an adapter: the canary is the proof.
        fingerprint = "" if is_adapter else source.fingerprint
        return Due(label, folder, fingerprint, is_adapter)

    async def canaries(self) -> Mapping[str, Sequence[Completion]]:
        """Returns the completion of each canary prompt by each live server, by its address."""
        asked = {str(one.server): one for one in self._fleet.live}

        async def answer(member: Member, number: int) -> Completion:
            request = Request(PROMPTS[number], CANARY_SAMPLING, canary_key(number))
            draft = self._drafter.begin(request, self.max_context)
            while draft.finish is None:
                reply = await self._fleet.ask_member(member, self._body(draft))
                draft.take(self._drawn(reply))
            return self._completion(draft)

        found: dict[str, Sequence[Completion]] = {}
        for name, member in asked.items():
            try:
                async with asyncio.timeout(self.settings.deadline_s):
                    found[name] = await asyncio.gather(
                        *(answer(member, number) for number in range(len(PROMPTS)))
                    )
            except TimeoutError:
                member.hangs = True
                self._fleet.lost(member, "it did not answer within engine.deadline_s")
            except Unreachable as fault:
                self._fleet.lost(member, str(fault))
        return found

    def set_aside(self, name: str, why: str) -> None:
        """Samples from other servers until the next publish, as long as one is left."""
        for member in self._fleet.live:
            if str(member.server) == name:
                self._fleet.drain(member, why)

    def take_metrics(self) -> dict[str, float]:
        """Returns counts of requests and the cost of publishing since the last call."""
        fleet = self._fleet
        metrics = {
            "time/engine_requests": float(fleet.num_requests),
            "time/engine_moved": float(fleet.num_moved),
            "time/engine_stale": float(fleet.num_repeated),
            "time/engine_restarts": float(fleet.num_revivals),
            "time/engine_drained": float(fleet.num_drained),
            "time/engine_servers": float(len(fleet.live)),
            "time/engine_cached_frac": fleet.num_cached / max(1, fleet.num_prompt),
            "time/publish_bytes": float(self._num_bytes),
        }
        fleet.num_requests = fleet.num_moved = fleet.num_repeated = fleet.num_revivals = 0
        fleet.num_cached = fleet.num_prompt = fleet.num_drained = 0
        self._num_bytes = 0
        return metrics

    # ------------------------------------------------------------------ the end

    def move_logs(self, folder: Path) -> None:
        """Moves the servers' logs into a run folder; servers go on writing to them."""
        for member in self._fleet.members:
            process = member.server.process
            if process is not None and process.log.exists():
                folder.mkdir(parents=True, exist_ok=True)
                stamp = time.strftime("%Y%m%d-%H%M%S")
                process.log = process.log.rename(folder / f"{stamp}-{process.log.name}")

    async def close(self) -> None:
        """Ends our servers, gives the others up, and removes the folders."""
        try:
            await self._fleet.close()
        finally:
            await self._http.aclose()
            self._lock.close()
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)


def _drawing(request: Request, count: int, is_plain: bool) -> dict[str, Any]:
    """The parameters that say how tokens are drawn and what is reported of them."""
    sampling, key = request.sampling, request.noise_key
    if is_plain:
        return plain_parameters(sampling, key, count)
    draw: dict[str, Any] = {
        "key": list(key),
        "offset": count,
        "temperature": sampling.temperature,
    }
    if sampling.filters != NO_FILTERS:
        draw["filters"] = asdict(sampling.filters)
    # The server chooses greedily among what our draw has left.
    return {"temperature": 0.0, "logprobs": 2, "extra_args": {DRAW: draw}}
