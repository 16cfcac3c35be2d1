"""vLLM as TRL's own client and generation code see it, over a tiny model of transformers.

Faked: the package `vllm` (the names that TRL imports from it), the server's routes, NCCL's
broadcast, which goes through a route, and `VLLMClient.init_communicator`, which asks for a CUDA
device. Real: `VLLMClient.generate` and `update_named_params`, `VLLMGeneration`, `GRPOTrainer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from safetensors.torch import load, save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_client, vllm_generation

from treegraft.parts import listener

MAX_CONTEXT = 160


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Logprob:
    def __init__(self, logprob: float, rank: int) -> None:
        self.logprob, self.rank = logprob, rank


class Writing:
    """A completion under way."""

    def __init__(self, prompt: list[int], fields: dict[str, Any]) -> None:
        self.prompt, self.fields = prompt, fields
        self.ids: list[int] = []
        self.rows: list[dict[int, float]] = []
        self.generator = torch.Generator().manual_seed(fields["seed"])

    def step(self, model: Any, tokenizer: Any) -> bool:
        """Draws one token, and returns whether it was the last."""
        with torch.inference_mode():
            ids = torch.tensor([[*self.prompt, *self.ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        row = (logits / self.fields["temperature"]).log_softmax(dim=0)
        token = int(torch.multinomial(row.exp(), 1, generator=self.generator))
        self.ids.append(token)
        values, places = row.topk(self.fields["logprobs"])
        likely = dict(zip(places.tolist(), values.tolist(), strict=True))
        self.rows.append({**likely, token: float(row[token])})
        text = tokenizer.decode(self.ids)
        return (
            token in self.fields["stop_token_ids"]
            or any(stop in text for stop in self.fields["stop"])
            or len(self.ids) == self.fields["max_tokens"]
        )


class FakeEngine:
    """`LLM.llm_engine`: each step draws a token for every request."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model_config = types.SimpleNamespace(max_model_len=MAX_CONTEXT)
        self.model_executor = self.driver_worker = self.model_runner = self
        self.requests: dict[str, Writing] = {}
        self.most_at_once = self.num_loads = self.num_aborted = self.num_awaited = 0
        """`num_awaited`: requests that must be there at once before a token is drawn."""
        self.fails = False
        owner = self

        class Loading(torch.nn.Module):
            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
                owner.load_weights(weights)

        self.plain, self.model_loader = self.model, Loading()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert not self.requests, "weights moved under a running request"
        own = dict(self.plain.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
                self.num_loads += 1

    def add_request(self, name: str, prompt: dict[str, Any], params: SamplingParams) -> None:
        assert params.output_kind is RequestOutputKind.FINAL_ONLY
        if len(prompt["prompt_token_ids"]) >= MAX_CONTEXT:
            raise ValueError("the prompt is too long")
        self.requests[name] = Writing(prompt["prompt_token_ids"], vars(params))
        self.most_at_once = max(self.most_at_once, len(self.requests))

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)
            self.num_aborted += 1

    def step(self) -> list[Any]:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        if self.most_at_once < self.num_awaited:
            time.sleep(0.001)
            return []
        done = []
        for name, one in list(self.requests.items()):
            if one.step(self.plain, self.tokenizer):
                del self.requests[name]
                rows = [{t: Logprob(v, 0) for t, v in row.items()} for row in one.rows]
                output = types.SimpleNamespace(token_ids=one.ids, logprobs=rows)
                done.append(types.SimpleNamespace(request_id=name, finished=True, outputs=[output]))
        return done


class FakeLLM:
    """vLLM in the trainer's process."""

    def __init__(self, *, model: str, enable_sleep_mode: bool = False, **options: Any) -> None:
        assert options["logprobs_mode"] == "processed_logprobs"
        self.llm_engine = FakeEngine(model)
        # What TRL calls `...model_runner.model.load_weights`.
        self.llm_engine.model = self.llm_engine.model_loader
        self.asleep: set[str] = set()
        self.num_resets = 0

    def sleep(self, level: int) -> None:
        self.asleep = {"weights", "kv_cache"}
        with torch.no_grad():
            for weight in self.llm_engine.plain.parameters():
                weight.fill_(math.nan)

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1


class FakeServer:
    """`vllm serve`, on a free port of the loopback."""

    def __init__(self, path: str | Path, **info: Any) -> None:
        """Args:
        info: of its model configuration, in place of what fits.
        """
        self.engine = FakeEngine(str(path))
        self.info = {
            "max_model_len": MAX_CONTEXT,
            "max_logprobs": -1,
            "logprobs_mode": "processed_logprobs",
            **info,
        }
        self.num_updates = self.num_resets = self.num_running = self.most_at_once = 0
        self.num_failing = self.num_awaited = 0
        """`num_awaited`: requests that must run at once before any is answered."""
        self._tensors: asyncio.Queue[dict[str, torch.Tensor]] = asyncio.Queue()
        sock = listener.listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        posts = {
            "/v1/completions": self._complete,
            "/start_weight_update": self._nothing,
            "/update_weights": self._update,
            "/finish_weight_update": self._nothing,
            "/reset_prefix_cache": self._reset,
            "/fake_broadcast": self._broadcast,
        }
        gets = {"/health": self._nothing, "/v1/models": self._models, "/server_info": self._info}
        routes = [Route(path, act, methods=["POST"]) for path, act in posts.items()]
        app = Starlette(routes=[*routes, *(Route(path, act) for path, act in gets.items())])
        config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [sock]}, daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10.0)

    async def _nothing(self, request: Request) -> Response:
        return JSONResponse({})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "policy"}]})

    async def _info(self, request: Request) -> Response:
        config = {"model_config": self.info, "weight_transfer_config": {"backend": "nccl"}}
        return JSONResponse({"vllm_config": config})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        if self.num_failing:
            self.num_failing -= 1
            return JSONResponse({"error": "no room"}, status_code=400)
        (prompt,) = body["prompt"]
        one = Writing(prompt, body)
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        async with asyncio.timeout(30.0):
            while self.most_at_once < self.num_awaited:
                await asyncio.sleep(0.001)
        while not one.step(self.engine.plain, self.engine.tokenizer):
            await asyncio.sleep(0)
        self.num_running -= 1
        named = [{f"token_id:{t}": v for t, v in row.items()} for row in one.rows]
        own = [f"token_id:{token}" for token in one.ids]
        logprobs = {
            "tokens": own,
            "token_logprobs": [row[name] for row, name in zip(named, own, strict=True)],
            "top_logprobs": named,
        }
        choice = {"prompt_token_ids": prompt, "token_ids": one.ids, "logprobs": logprobs}
        return JSONResponse({"choices": [choice]})

    async def _broadcast(self, request: Request) -> Response:
        await self._tensors.put(load(await request.body()))
        return JSONResponse({})

    async def _update(self, request: Request) -> Response:
        assert not self.num_running, "weights moved under a running request"
        names = (await request.json())["update_info"]["names"]
        tensors = await self._tensors.get()
        self.engine.load_weights((name, tensors[str(n)]) for n, name in enumerate(names))
        self.num_updates += 1
        return JSONResponse({})

    async def _reset(self, request: Request) -> Response:
        self.num_resets += 1
        return JSONResponse({"success": True})


def _broadcast(iterator: Iterable[Any], group: str, src: int, post_iter_func: Any) -> None:
    """NCCL's, by a route of the server."""
    tensors = {str(n): post_iter_func(one).contiguous() for n, one in enumerate(iterator)}
    httpx.post(f"{group}/fake_broadcast", content=save(tensors)).raise_for_status()


def _join(self: Any, device: Any = 0) -> None:
    assert self.get_server_info()["weight_transfer_config"] is not None
    self.communicator = self.base_url


def install(setattr_: Any = setattr) -> None:
    """Has TRL find the fakes.

    Args:
        setattr_: as that of `pytest.MonkeyPatch`, which takes everything back.
    """
    for module in (vllm_client, vllm_generation):
        setattr_(module, "is_vllm_available", lambda *_, **__: True)
    setattr_(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    setattr_(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    setattr_(vllm_client.VLLMClient, "init_communicator", _join)
    added = {
        vllm_client: {"packed_nccl_broadcast_producer": _broadcast},
        vllm_generation: {"LLM": FakeLLM, "SamplingParams": SamplingParams},
    }
    for module, names in added.items():
        for name, value in names.items():
            # Names that TRL has only beside vLLM.
            vars(module).setdefault(name, None)
            setattr_(module, name, value)
    assert sys.modules[SamplingParams.__module__].RequestOutputKind is RequestOutputKind


@contextlib.contextmanager
def serving(path: str | Path, **info: Any) -> Iterator[FakeServer]:
    """Holds a server for the time of the block."""
    server = FakeServer(path, **info)
    try:
        yield server
    finally:
        server.close()
