"""A server that answers as vLLM with our plugin does, by a tiny model of its own: for tests of
requests, retries and publishing. It can be told to fail in every way that a real one can."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import uvicorn
from peft import PeftModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from treegraft.core.listener import listen
from treegraft.extras.memory.pipe import Pipe
from treegraft.policy.engine.sampling import draws_of_sampling, sample_tokens
from treegraft.policy.engine.vllm.checks import identity_of_model
from treegraft.policy.engine.vllm.folder import WeightsFolder
from treegraft.policy.engine.vllm.protocol import (
    DRAW,
    PLAIN_ROUTE,
    PLUGIN_VERSION,
    ROUTE,
    drawn_columns,
    likely_columns,
    marked_rows,
    packed,
)
from treegraft.policy.weights import weights_fingerprint


class FakeVllm:
    """One server on a free port of the loopback; `die` and `revive` as often as wanted."""

    def __init__(self, model: Any, *, token_s: float = 0.0, **identity: Any) -> None:
        """Args:
        model: what it starts with, each time.
        token_s: seconds that each token takes.
        identity: what it says of itself instead of the truth.
        """
        self._first, self.token_s = model, token_s
        self.identity: dict[str, Any] = {
            **identity_of_model(model, dtype="float32", max_context=96),
            "plugin": PLUGIN_VERSION,
            "draws": draws_of_sampling(),
            "draws_here": True,
            "max_rows": 16,
            "max_logprobs": 20,
            "logprobs_mode": "processed_logits",
            "runner": 1,
            "gpu": "",
            "workers": 1,
            **identity,
        }
        self.has_plugin = True
        """Without it, the server draws by its own generator and reports log-probabilities."""
        self.hangs = False
        self.fail_next = 0
        """Requests that are answered with an error of the server's."""
        self.refuse_adapters = False
        self.receives = 1 << 30
        """Tensors of a publish from memory after which it fails."""
        self.refuse_sleep = False
        self.events: list[str] = []
        """Sleeps, wakes and loads, in their order."""
        self.skip_loads = False
        """Say that weights were loaded, and keep the old ones."""
        self.num_joins = 0
        self.most_at_once = self.num_requests = self.num_loads = self.num_adapter_loads = 0
        self.adapter_files: list[str] = []
        self.labels_asked: list[str] = []
        self._listener = listen("127.0.0.1", 0)
        self._port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._thread: threading.Thread | None = None
        self.revive()

    # ------------------------------------------------------------------ life

    def revive(self) -> None:
        """Starts, with the first weights and without an owner."""
        self.model = copy.deepcopy(self._first)
        self.label, self.owner, self.is_paused = "default", "", False
        self.measures = False
        """Whether it was asked to report entropies where vLLM draws."""
        self.asleep: set[str] = set()
        self.num_running, self.num_tokens = 0, 0
        self.adapters: dict[str, str] = {}
        if self._listener.fileno() < 0:
            self._listener = listen("127.0.0.1", self._port)
        config = uvicorn.Config(
            self._app(), log_level="critical", access_log=False, ws="none", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def die(self) -> None:
        """Ends at once; clients lose their connections."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(10.0)
        with contextlib.suppress(OSError):
            self._listener.close()

    def _app(self) -> Starlette:
        posts = {
            ROUTE: self._generate,
            PLAIN_ROUTE: self._generate,
            "/collective_rpc": self._rpc,
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/reset_prefix_cache": self._reset,
            "/update_weight_version": self._set_version,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        gets = {
            "/health": self._health,
            "/version": self._version,
            "/weight_info": self._weight_info,
            "/metrics": self._metrics,
        }
        routes = [Route(path, act, methods=["POST"]) for path, act in posts.items()]
        return Starlette(routes=[*routes, *(Route(path, act) for path, act in gets.items())])

    # ------------------------------------------------------------------ routes

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.31.0"})

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(f'vllm:generation_tokens_total{{engine="0"}} {self.num_tokens}.0')

    async def _pause(self, request: Request) -> Response:
        self.is_paused = True
        while self.num_running and request.query_params["mode"] == "wait":
            await asyncio.sleep(0.002)
        return JSONResponse({})

    async def _resume(self, request: Request) -> Response:
        self.is_paused = False
        return JSONResponse({})

    async def _sleep(self, request: Request) -> Response:
        """As vLLM: it waits for requests under way, drops its cache and schedules no other."""
        if self.refuse_sleep:
            return JSONResponse({"error": "sleep mode is not enabled"}, status_code=500)
        await self._pause(request)
        if request.query_params["level"] == "2":
            for weight in self.model.parameters():
                weight.data.fill_(float("nan"))
        self.asleep = {"weights", "kv_cache"}
        self.events.append(f"sleep {request.query_params['level']}")
        return JSONResponse({"status": "sleeping"})

    async def _wake_up(self, request: Request) -> Response:
        """As vLLM: with its last part awake it schedules again."""
        for tag in request.query_params.getlist("tags"):
            if tag in self.asleep:
                self.events.append(f"wake {tag}")
            self.asleep.discard(tag)
        self.is_paused = self.is_paused and bool(self.asleep)
        return JSONResponse({"status": "sleeping" if self.asleep else "awake"})

    async def _reset(self, request: Request) -> Response:
        return JSONResponse({"success": not self.num_running})

    async def _set_version(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def _load_adapter(self, request: Request) -> Response:
        body = await request.json()
        if self.refuse_adapters or len(self.adapters) == 2:
            return JSONResponse({"error": "no room"}, status_code=400)
        self._begin_load()
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.num_adapter_loads += 1
        self.adapter_files = sorted(os.listdir(body["lora_path"]))
        self.adapted = PeftModel.from_pretrained(copy.deepcopy(self.model), body["lora_path"])
        return PlainTextResponse("Success")

    async def _unload_adapter(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        status = 200 if self.adapters.pop(name, None) else 404
        return PlainTextResponse("", status_code=status)

    async def _rpc(self, request: Request) -> Response:
        body = await request.json()
        if not self.has_plugin:
            return JSONResponse({"error": f"no method {body['method']}"}, status_code=500)
        result = getattr(self, body["method"])(*body["args"])
        return JSONResponse({"results": [result]})

    def treegraft_measure(self) -> dict[str, Any]:
        self.measures = True
        return {}

    def treegraft_identity(self) -> dict[str, Any]:
        return self.identity

    def treegraft_claim(self, owner: str, lease_s: float, instead_of: str) -> dict[str, Any]:
        if self.owner in ("", owner, instead_of):
            self.owner = owner
        return {"owner": self.owner, "for_s": lease_s}

    def treegraft_release(self, owner: str) -> dict[str, Any]:
        self.owner = "" if self.owner == owner else self.owner
        return {}

    def treegraft_load(self, path: str) -> dict[str, Any]:
        folder = WeightsFolder(path)
        self._begin_load()
        self.num_loads += 1
        if not self.skip_loads:
            self.model.load_state_dict(dict(folder))
        return {"fingerprint": weights_fingerprint(dict(folder)), "seconds": 0.0}

    def treegraft_join(self, host: str, port: int, size: int, kind: str, wait_s: float) -> Any:
        self._pipe = Pipe(host, port, 1, size, kind, wait_s)
        self._pipe.meet()
        self.num_joins += 1
        return {}

    def treegraft_receive(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._begin_load()
        for name, tensor in self._pipe.receive(torch.device("cpu")):
            found[name] = tensor.clone()
            self.model.load_state_dict(found, strict=False)
            if len(found) == self.receives:
                del self._pipe
                raise RuntimeError("the network is gone")
        self.num_loads += 1
        return {"fingerprint": weights_fingerprint(found)}

    def _begin_load(self) -> None:
        assert "weights" not in self.asleep, "there is no memory to load weights into"
        self.events.append("load")

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.num_requests += 1
        if self.fail_next:
            self.fail_next -= 1
            return JSONResponse({"error": "out of memory"}, status_code=500)
        while self.is_paused or self.hangs:
            await asyncio.sleep(0.002)
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        self.labels_asked.append(body["cache_salt"])
        try:
            name = body.get("model")
            if name is not None and name not in self.adapters:
                return JSONResponse({"error": f"no model {name}"}, status_code=404)
            model = self.model if name is None else self.adapted
            is_plain = request.url.path == PLAIN_ROUTE
            choice = await self._write(model, body["token_ids"], body["sampling_params"], is_plain)
        finally:
            self.num_running -= 1
        usage = {"prompt_tokens": len(body["token_ids"])}
        return JSONResponse({"choices": [choice], "usage": usage})

    async def _write(
        self, model: Any, prompt: list[int], params: dict[str, Any], is_plain: bool
    ) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        ids: list[int] = []
        label, generator = self.label, torch.Generator().manual_seed(params.get("seed", 0))
        while len(ids) < params["max_tokens"]:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1:]
            drawn = _plain if "extra_args" not in params else _marked
            if self.identity["runner"] == 2:
                # As that of vLLM: a function of the seed, the position on the path and the token.
                generator.manual_seed(params["seed"] ^ (len(prompt) + len(ids)))
            content.append(drawn(logits, params, len(ids), generator))
            ids.append(content[-1]["token_id"])
            self.num_tokens += 1
            await asyncio.sleep(self.token_s)
            if ids[-1] in params["stop_token_ids"]:
                break
        spans = [{"version": label, "start": 0, "end": len(ids)}]
        if is_plain:
            return {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans}
        table = np.array([[one["logprob"], *one["largest"]] for one in content])
        is_marked = "extra_args" in params
        if not is_marked and params["logprobs"] == 1:
            table[:, 1] = [one["entropy"] if self.measures else math.nan for one in content]
            return packed(ids, *table.T) | {"weight_versions": spans}
        columns = (drawn_columns if is_marked else likely_columns)(table)
        return packed(ids, *columns) | {"weight_versions": spans}


def _marked(
    logits: torch.Tensor, params: dict[str, Any], position: int, generator: torch.Generator
) -> dict[str, Any]:
    """One token of a reply, drawn as the plugin does."""
    order = params["extra_args"][DRAW]
    key = tuple(order["key"]) if order["temperature"] > 0 else None
    drawn = sample_tokens(logits, [order["temperature"]], [key], [order["offset"] + position])
    values, places = marked_rows(logits, drawn)[0].topk(2)
    pairs = zip(places.tolist(), values.tolist(), strict=True)
    top = [{"token_id": place, "logprob": value} for place, value in pairs]
    return {**top[0], "top_logprobs": top, "largest": values.tolist()}


def _plain(
    logits: torch.Tensor, params: dict[str, Any], position: int, generator: torch.Generator
) -> dict[str, Any]:
    """One token of a reply, as vLLM draws and reports it by itself: the drawn token, then the most
    likely ones, together no more than were asked for."""
    temperature = params["temperature"]
    logprobs = (logits[0] / (temperature or 1.0)).log_softmax(dim=0)
    if temperature:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    else:
        token = int(logprobs.argmax())
    values, places = logprobs.topk(params["logprobs"])
    rows = {token: float(logprobs[token])}
    rows |= dict(zip(places.tolist(), values.tolist(), strict=True))
    top = [{"token_id": place, "logprob": value} for place, value in rows.items()]
    kept = top[: params["logprobs"]]
    found = {"token_id": token, "logprob": rows[token], "top_logprobs": kept}
    entropy = -float((logprobs.exp() * logprobs).sum())
    return {**found, "largest": values.tolist(), "entropy": entropy}


@contextlib.contextmanager
def fakes(model: Any, num: int = 1, **options: Any) -> Iterator[list[FakeVllm]]:
    """Holds so many servers for the time of the block."""
    servers = [FakeVllm(model, **options) for _ in range(num)]
    try:
        yield servers
    finally:
        for one in servers:
            one.die()
