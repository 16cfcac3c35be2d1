"""Tokens for trees from the vLLM that TRL has in the trainer's process."""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from trl.generation import vllm_generation

from treegraft.parts import errors, served


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


class Colocated:
    """vLLM in the trainer's process. A thread makes its steps, so that requests join and leave at
    any token; whoever moves the weights waits until there are none."""

    def __init__(self, llm: Any, device: torch.device) -> None:
        """Starts the thread."""
        self._engine = llm.llm_engine
        self._device = device
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
        # Of each place the log-probabilities of the likely tokens and of its own.
        logprobs: list[float] = []
        entropies: list[float] = []
        for token, row in zip(output.token_ids, output.logprobs, strict=True):
            logprobs.append(row[token].logprob)
            entropies.append(served.top_k_entropy(one.logprob for one in row.values()))
        return served.TokenReply(list(output.token_ids), logprobs, entropies)

    def _run(self) -> None:
        if self._device.type == "cuda":
            # The current device is a thread's own.
            torch.cuda.set_device(self._device)
        while self._take_asked():
            try:
                self._step()
            # Whatever vLLM raises ends the requests under way, and is raised in those who wait.
            except Exception as error:
                self._fail(error)

    def _take_asked(self) -> bool:
        """Adds new requests; waits where nothing is under way. False at the end."""
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
        waiting = self._waiting
        self._waiting = {}
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
