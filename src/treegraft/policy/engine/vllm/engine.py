"""The engine that samples on vLLM servers."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from safetensors import SafetensorError

from treegraft.core.errors import EngineError
from treegraft.core.files import storage_fault
from treegraft.core.interfaces import Tokenizer, WeightSource
from treegraft.core.types import EntropyKind
from treegraft.policy.engine.served import NUM_ASKED, Draft, ServerEngine, TokenReply
from treegraft.policy.engine.vllm.folder import write_folder
from treegraft.policy.engine.vllm.replies import NUM_MEASURED, read_reply
from treegraft.policy.engine.vllm.server import Server
from treegraft.policy.engine.vllm.servers import Due, Servers
from treegraft.settings.policy import EngineSettings


class VllmEngine(ServerEngine):
    """Samples on servers, which hold copies of the weights."""

    takes_filters = True

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
    ) -> None:
        """Starts nothing; `open` does.

        Args:
            expected: the servers' identity, see `checks.check_identity`.
            weights: a folder of its own for published weights.
            folders: removed at the end.
            initial: the weights to begin with; None for those that servers of ours start with.
        """
        super().__init__(
            None,
            tokenizer,
            end_ids=end_ids,
            max_context=max_context,
            deadline_s=settings.deadline_s,
        )
        self._is_open.clear()
        self.settings = settings
        self._initial = initial
        self._http = http
        self._weights = weights
        self._folders = folders
        self._servers = Servers(servers, settings, expected)
        self._num_asked = NUM_ASKED
        if expected["entropies"] == "measured":
            self._kind = EntropyKind.EXACT
            self._num_asked = NUM_MEASURED
        self._num_published = 0
        self._num_bytes = 0

    async def open(self) -> None:
        """Starts the servers and waits until they can be sampled from.

        Raises:
            SettingError: a server that does not fit the recipe.
            EngineError: one that does not answer or did not start.
        """
        if self._initial is not None:
            self._servers.due = await self._written(self._initial, 0)
            self.fingerprint = self._servers.due.fingerprint
            self._initial = None
        await self._servers.open()
        # The shortest, since any server may answer any request.
        self.max_context = min(one.identity["max_context"] for one in self._servers.members)
        self._is_open.set()

    # ------------------------------------------------------------------ completions

    @property
    def capacity(self) -> int:
        """Completions that run at the same time; more wait for a place."""
        return self.settings.max_rows * max(1, len(self._servers.live))

    @property
    def death(self) -> BaseException | None:
        return self._servers.death

    async def _ask(self, draft: Draft) -> TokenReply:
        tree = draft.request.noise_key[:-1]
        reply = await self._servers.ask(tree, self._body(draft))
        return read_reply(reply["choices"][0], self._kind)

    def _body(self, draft: Draft) -> dict[str, Any]:
        """The body of a draft's next request."""
        asked = draft.next()
        filters = draft.request.sampling.filters
        parameters = {
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_k": filters.top_k,
            "top_p": filters.top_p,
            "repetition_penalty": filters.repetition_penalty,
            "seed": asked.seed,
            "logprobs": self._num_asked,
            # End tokens are in stop_token_ids, so that they stay in the reply.
            "ignore_eos": True,
            "stop_token_ids": asked.stop_token_ids,
            "stop": asked.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        return {
            "token_ids": asked.token_ids,
            "sampling_params": parameters,
            # By the weights, so that a cache which outlived a publish would not be used.
            "cache_salt": self._servers.due.label,
        }

    # ------------------------------------------------------------------ weights

    async def _take_over(self, source: WeightSource | None, version: int) -> None:
        """Gives all servers new weights.

        Raises:
            EngineError: no server took them.
        """
        assert source is not None
        former = self._servers.due.folder
        due = await self._written(source, version)
        await self._servers.publish(due)
        if former is not None:
            # Only now: a server may have been reading it until here.
            shutil.rmtree(former, ignore_errors=True)
        self.fingerprint = due.fingerprint

    async def _written(self, source: WeightSource, version: int) -> Due:
        self._num_published += 1
        path = self._weights / f"weights-{self._num_published}"
        try:
            self._num_bytes += await asyncio.to_thread(write_folder, path, source)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise EngineError(
                f"engine: the weights could not be written to {path}"
                f" ({storage_fault(error) or error}); expected room for two copies of the model,"
                " the former one and this. Free some, or name a larger disk as publish.folder.",
                code="weights-not-written",
            ) from error
        label = f"{self._servers.owner}-{version}.{self._num_published}"
        return Due(label, path, source.fingerprint)

    def take_metrics(self) -> dict[str, float]:
        """Returns the cost of publishing since the last call."""
        metrics = {
            "time/publish_bytes": float(self._num_bytes),
        }
        self._num_bytes = 0
        return metrics

    # ------------------------------------------------------------------ the end

    def move_logs(self, folder: Path) -> None:
        """Moves the servers' logs into a run folder; servers go on writing to them."""
        for member in self._servers.members:
            process = member.server.process
            if process is not None and process.log.exists():
                folder.mkdir(parents=True, exist_ok=True)
                stamp = time.strftime("%Y%m%d-%H%M%S")
                process.log = process.log.rename(folder / f"{stamp}-{process.log.name}")

    async def close(self) -> None:
        """Ends our servers and removes the folders."""
        try:
            await self._servers.close()
        finally:
            await self._http.aclose()
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
