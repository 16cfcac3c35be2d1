"""Tokens for trees from the vLLM that TRL has: its server, or the one in the trainer's process."""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from treegraft import SettingError
from treegraft.parts import errors, served

MODE = "processed_logprobs"
"""Log-probabilities of the distribution that tokens are drawn from."""


def _parameters(request: served.TokenRequest) -> dict[str, Any]:
    """What vLLM calls them, in a request and in its `SamplingParams`."""
    return {
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        "logprobs": served.NUM_ASKED,
        "seed": request.seed,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


def _reply(token_ids: list[int], rows: list[dict[int, float]]) -> served.TokenReply:
    """A reply from the log-probabilities of each place's likely tokens and its own."""
    return served.TokenReply(
        token_ids,
        [row[token] for token, row in zip(token_ids, rows, strict=True)],
        [served.top_k_entropy(row.values()) for row in rows],
    )


class AskedServer:
    """TRL's server, asked by TRL's client."""

    def __init__(self, client: VLLMClient, num_at_once: int) -> None:
        """Asks the server what it is.

        Raises:
            SettingError: it does not report the log-probabilities that trees need.
        """
        self._client = client
        model = client.get_server_info()["model_config"]
        self.max_context = int(model["max_model_len"])
        if model["logprobs_mode"] != MODE:
            raise SettingError(
                f"{client.base_url} was started with --logprobs-mode {model['logprobs_mode']},"
                f" expected {MODE}, those that tokens are drawn from. Restart it with that option.",
                code="server-logprobs-mode",
            )
        if 0 <= (most := int(model["max_logprobs"])) < served.NUM_ASKED:
            raise SettingError(
                f"{client.base_url} was started with --max-logprobs {most}, expected"
                f" {served.NUM_ASKED} or more, of which entropies are made; -1 sets no limit.",
                code="server-logprobs-few",
            )
        # TRL's client waits for each reply in the thread that asks.
        self._threads = ThreadPoolExecutor(num_at_once, thread_name_prefix="treegraft-vllm")

    async def generate(self, request: served.TokenRequest) -> served.TokenReply:
        """Returns the server's tokens."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, request)

    def _ask(self, request: served.TokenRequest) -> served.TokenReply:
        parameters = _parameters(request)
        named = {name: parameters.pop(name) for name in ("temperature", "max_tokens", "logprobs")}
        try:
            found = self._client.generate(
                [list(request.token_ids)], **named, generation_kwargs=parameters
            )
        # TRL's client raises plain exceptions.
        except Exception as error:
            raise errors.EngineError(
                f"engine: {self._client.base_url}: {error}", code="server-failed"
            ) from error
        if found["logprobs"] is None:
            raise errors.EngineError(
                f"engine: {self._client.base_url} replied without log-probabilities",
                code="reply-lacks-tokens",
            )
        pairs = zip(found["logprob_token_ids"][0], found["logprobs"][0], strict=True)
        rows = [dict(zip(ids, values, strict=True)) for ids, values in pairs]
        return _reply(found["completion_ids"][0], rows)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Colocated:
    """vLLM in the trainer's process. A thread makes its steps, so that requests join and leave at
    any token; whoever moves the weights waits until there are none."""

    def __init__(self, llm: Any, device: torch.device) -> None:
        """Starts the thread."""
        self._engine, self._device = llm.llm_engine, device
        self.max_context = int(self._engine.model_config.max_model_len)
        self._asked: queue.SimpleQueue[tuple[served.TokenRequest, Future[Any]] | None]
        self._asked = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
        self._names = itertools.count()
        self._thread = threading.Thread(target=self._run, name="treegraft-vllm", daemon=True)
        self._thread.start()

    async def generate(self, request: served.TokenRequest) -> served.TokenReply:
        """Returns vLLM's tokens."""
        future: Future[Any] = Future()
        self._asked.put((request, future))
        output = await asyncio.wrap_future(future)
        tops: list[dict[int, Any]] = output.logprobs or [{}]
        rows = [{token: one.logprob for token, one in row.items()} for row in tops]
        try:
            return _reply(list(output.token_ids), rows)
        except (KeyError, ValueError) as error:
            raise errors.EngineError(
                "engine: vLLM replied without log-probabilities", code="reply-lacks-tokens"
            ) from error

    def _run(self) -> None:
        if self._device.type == "cuda":
            # The current device is a thread's own.
            torch.cuda.set_device(self._device)
        while self._take_asked():
            try:
                self._step()
            # Whatever vLLM raises ends the requests under way, and is told to those who wait.
            except Exception as error:
                self._fail(error)

    def _take_asked(self) -> bool:
        """Adds what was asked for; waits where nothing is under way. False at the end."""
        while not self._waiting or not self._asked.empty():
            if (asked := self._asked.get()) is None:
                return False
            request, future = asked
            name = f"treegraft-{next(self._names)}"
            try:
                prompt = {"prompt_token_ids": list(request.token_ids)}
                self._engine.add_request(name, prompt, _sampling(_parameters(request)))
            # A request that vLLM refuses.
            except Exception as error:
                _refuse(future, error)
                continue
            self._waiting[name] = future
        return True

    def _step(self) -> None:
        given_up = [name for name, one in self._waiting.items() if one.cancelled()]
        if given_up:
            self._engine.abort_request(given_up)
        for name in given_up:
            del self._waiting[name]
        for output in self._engine.step() if self._waiting else ():
            if output.finished and output.request_id in self._waiting:
                future = self._waiting.pop(output.request_id)
                if future.set_running_or_notify_cancel():
                    future.set_result(output.outputs[0])

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            _refuse(future, error)
        self._engine.abort_request(list(waiting))

    def close(self) -> None:
        """Ends the thread; vLLM is TRL's."""
        self._asked.put(None)
        self._thread.join()


def _refuse(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        fault = errors.EngineError(f"engine: vLLM: {error}", code="server-failed")
        future.set_exception(fault)


def _sampling(parameters: Mapping[str, Any]) -> Any:
    """vLLM's parameters; replies come once they are whole."""
    kind = vllm_generation.SamplingParams
    # The module that the class comes from, which nothing here imports by its name.
    whole = sys.modules[kind.__module__].RequestOutputKind.FINAL_ONLY
    return kind(**parameters, output_kind=whole)


def token_source(generation: Any, args: Any, num_at_once: int) -> AskedServer | Colocated:
    """Returns where tokens come from, of a trainer's `VLLMGeneration`; each process has its own.

    Raises:
        SettingError: TRL's server does not report what trees need.
    """
    if generation.mode == "colocate":
        return Colocated(generation.llm, generation.accelerator.device)
    client = getattr(generation, "vllm_client", None)
    if client is None:
        # TRL's own is the main process's.
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        client = VLLMClient(base_url=url, connection_timeout=args.vllm_server_timeout)
    return AskedServer(client, num_at_once)
