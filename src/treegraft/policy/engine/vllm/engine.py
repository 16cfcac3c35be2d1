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
from statistics import fmean
from typing import Any

import httpx
from safetensors import SafetensorError

from treegraft.core.errors import EngineError
from treegraft.core.files import storage_fault
from treegraft.core.interfaces import Request, Tokenizer, WeightSource
from treegraft.core.keyed import keyed_int
from treegraft.core.registry import registered
from treegraft.core.types import NO_FILTERS, Completion, EntropyKind
from treegraft.policy.engine.served import NUM_ASKED, Draft, ServerEngine, TokenReply, TokenRequest
from treegraft.policy.engine.vllm.fleet import Fleet, Member
from treegraft.policy.engine.vllm.folder import (
    WeightsFolder,
    held_folder,
    write_adapter,
    write_folder,
)
from treegraft.policy.engine.vllm.loading import Due
from treegraft.policy.engine.vllm.protocol import DRAW, unpacked
from treegraft.policy.engine.vllm.server import Server, Unreachable
from treegraft.policy.publish import CANARY_SAMPLING, PROMPTS, canary_key
from treegraft.settings.policy import OWN_DRAWS, EngineSettings

_log = logging.getLogger(__name__)


class VllmEngine(ServerEngine):
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
        kind: str = "auto",
    ) -> None:
        """Starts nothing; `open` does.

        Args:
            expected: the servers' identity, see `checks.check_identity`.
            weights: a folder of its own for published weights.
            folders: removed at the end.
            initial: the weights to begin with; None for those that servers of ours start with.
            kind: publish.kind.
        """
        super().__init__(
            *(None, tokenizer),
            end_ids=end_ids,
            max_context=max_context,
            deadline_s=settings.deadline_s,
        )
        self._is_open.clear()
        self.settings, self.fingerprint = settings, ""
        self._initial, self._publishing, entropies = initial, kind, expected["entropies"]
        self._draws_here = entropies in OWN_DRAWS
        self._http, self._weights, self._folders = http, weights, folders
        self._fleet = Fleet(servers, settings, expected, kind == "external")
        if sender := registered("sender").get(kind):
            self._fleet.senders = sender.load()(settings.vllm.start_timeout_s)
        # How many log-probabilities of likely tokens; of one, the entropy stands in its place.
        self._num_asked, self._num_tokens = NUM_ASKED, expected["vocab_size"]
        if entropies != "top_k":
            self._kind, self._num_asked, self._num_tokens = EntropyKind.EXACT, 1, None
        self._num_published = self._num_bytes = 0
        self._bounds: list[float] = []
        """Of the entropies of tokens since the last metrics."""
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
        limits = [one.identity["max_context"] for one in self._fleet.members if one.identity]
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

    async def _ask(self, draft: Draft) -> TokenReply:
        body = self._body(draft)
        reply = self._read(await self._fleet.ask(draft.request.noise_key[:-1], body))
        self._bounds += reply.bounds or ()
        return reply

    def _body(self, draft: Draft) -> dict[str, Any]:
        """The body of a draft's next request."""
        asked, due = draft.next(), self._fleet.due
        parameters = {
            "max_tokens": asked.max_tokens,
            **self._drawing(draft, asked),
            "ignore_eos": True,
            "stop_token_ids": asked.stop_token_ids,
            "stop": asked.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        # Salted by the weights, so that a cache which outlived a publish would not be used.
        body = {
            "token_ids": asked.token_ids,
            "sampling_params": parameters,
            "cache_salt": due.label,
        }
        return body | ({"model": due.label} if due.is_adapter else {})

    def _drawing(self, draft: Draft, asked: TokenRequest) -> dict[str, Any]:
        """The parameters that say how tokens are drawn and what is reported of them."""
        request = draft.request
        sampling = request.sampling
        if not self._draws_here:
            # vLLM's V2 runner draws by seed, position on the path and token: the same token however
            # often the path is cut into requests. The former one begins anew with each request.
            is_v2 = all(one.identity.get("runner") == 2 for one in self._fleet.members)
            seed = keyed_int("seed", *request.noise_key) >> 1 if is_v2 else asked.seed
            return {"temperature": asked.temperature, "seed": seed, "logprobs": self._num_asked}
        draw: dict[str, Any] = {
            "key": list(request.noise_key),
            "offset": len(draft.ids),
            "temperature": sampling.temperature,
        }
        if sampling.filters != NO_FILTERS:
            draw["filters"] = asdict(sampling.filters)
        # The server chooses greedily among what our draw has left.
        return {"temperature": 0.0, "logprobs": 2, "extra_args": {DRAW: draw}}

    def _read(self, reply: Mapping[str, Any]) -> TokenReply:
        """A reply's tokens, log-probabilities and entropies.

        Raises:
            EngineError: a reply without tokens or without their two entries.
        """
        try:
            return unpacked(reply["choices"][0], self._num_tokens)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"engine: a server's reply lacks tokens or their log-probabilities ({error!r});"
                " expected both. See docs/serving.md.",
                code="reply-lacks-tokens",
            ) from error

    # ------------------------------------------------------------------ weights

    async def _take_over(self, source: WeightSource | None, version: int) -> None:
        """Gives all servers new weights.

        Raises:
            EngineError: no server took them.
        """
        if self._fleet.is_external:
            self._fleet.begin_anew(version)
            return
        assert source is not None
        before = self._fleet.due.folder
        due = await self._written(source, version, is_adapter=self._publishing == "adapter")
        await self._fleet.publish(due, self.settings.vllm.start_timeout_s)
        self._former += [] if before in (None, self._fleet.base) else [before]
        # A server that is being started anew may still read one; the next publish removes it.
        if not any(member.loading.locked() for member in self._fleet.members):
            for former in self._former:
                former.remove()
            self._former.clear()
        self.fingerprint = due.fingerprint
        if due.folder is not None:
            self._num_bytes += due.folder.num_bytes()
        else:
            self._num_bytes += self._fleet.senders.num_bytes
            self._fleet.senders.num_bytes = 0

    async def _written(
        self, source: WeightSource, version: int, *, is_adapter: bool = False
    ) -> Due:
        self._num_published += 1
        label = f"{self._fleet.owner}-{version}.{self._num_published}"
        if self._fleet.senders is not None:
            return Due(label, None, source.fingerprint, source=source)
        path = self._weights / f"weights-{self._num_published}"
        try:
            write = write_adapter if is_adapter else write_folder
            folder = await asyncio.to_thread(write, path, source)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise EngineError(
                f"engine: the weights could not be written to {path}"
                f" ({storage_fault(error) or error}); expected room for two copies of the model,"
                ' the former one and this. Free some, or set publish.kind = "disk" and'
                " publish.folder.",
                code="weights-not-written",
            ) from error
        # Servers report no checksum of an adapter: the canary is the proof.
        fingerprint = "" if is_adapter else source.fingerprint
        return Due(label, folder, fingerprint, is_adapter)

    async def rest(self) -> None:
        """Has the servers leave their GPUs until the next publish, with engine.vllm.sleep."""
        if self.settings.vllm.sleep:
            await self._fleet.rest(1 if self._publishing == "adapter" else 2)

    async def canaries(self) -> Mapping[str, Sequence[Completion]]:
        """Returns the completion of each canary prompt by each live server, by its address."""
        asked = {str(one.server): one for one in self._fleet.live}

        async def answer(member: Member, number: int) -> Completion:
            draft = self._draft(Request(PROMPTS[number], CANARY_SAMPLING, canary_key(number)))
            while draft.finish is None:
                draft.take(self._read(await self._fleet.ask_member(member, self._body(draft))))
            return draft.completion(self.policy_version)

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
        bounds, self._bounds = self._bounds, []
        return metrics | ({"rollout/entropy_tail_bound": fmean(bounds)} if bounds else {})

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
