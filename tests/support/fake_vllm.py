"""A server that answers as vLLM with our plugin does, by a tiny model of its own: for tests of
requests, retries and publishing. It can be told to fail in every way that a real one can."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treegraft.core.listener import listen
from treegraft.core.types import Filters
from treegraft.policy.engine.filters import filtered
from treegraft.policy.engine.vllm.checks import identity_of_model
from treegraft.policy.engine.vllm.folder import read_folder
from treegraft.policy.engine.vllm.replies import PLUGIN_VERSION, ROUTE
from treegraft.policy.weights import weights_fingerprint


class FakeVllm:
    """One server on a free port of the loopback."""

    def __init__(self, model: Any, *, token_s: float = 0.0, **identity: Any) -> None:
        """Args:
        model: what it starts with.
        token_s: seconds that each token takes.
        identity: what it says of itself instead of the truth.
        """
        self.token_s = token_s
        self.identity: dict[str, Any] = {
            **identity_of_model(model, dtype="float32", max_context=96),
            "plugin": PLUGIN_VERSION,
            "is_v2": False,
            "max_logprobs": 20,
            "logprobs_mode": "processed_logprobs",
            **identity,
        }
        self.has_plugin = True
        self.hangs = False
        self.fail_next = 0
        """Requests that are answered with an error of the server's."""
        self.padding = 0
        """Bytes that replies have too many."""
        self.skip_loads = False
        """Keep the old weights where new ones are to be loaded."""
        self.most_at_once = 0
        self.num_requests = 0
        self.labels_asked: list[str] = []
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.model = copy.deepcopy(model)
        self.label = "default"
        self.is_paused = False
        self.measures = False
        """Whether it was asked to report entropies."""
        self.num_running = 0
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
        self._thread.join(10.0)
        with contextlib.suppress(OSError):
            self._listener.close()

    def _app(self) -> Starlette:
        posts = {
            ROUTE: self._generate,
            "/collective_rpc": self._rpc,
            "/pause": self._pause,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset,
            "/update_weight_version": self._set_version,
        }
        routes = [Route(path, act, methods=["POST"]) for path, act in posts.items()]
        routes += [Route("/health", self._health), Route("/weight_info", self._weight_info)]
        return Starlette(routes=routes)

    # ------------------------------------------------------------------ routes

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def _pause(self, request: Request) -> Response:
        self.is_paused = True
        while self.hangs or (self.num_running and request.query_params["mode"] == "wait"):
            await asyncio.sleep(0.002)
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self.is_paused = False
        return JSONResponse({"status": "resumed"})

    async def _reset(self, request: Request) -> Response:
        return JSONResponse({"success": not self.num_running})

    async def _set_version(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True})

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

    def treegraft_load(self, path: str) -> dict[str, Any]:
        weights = dict(read_folder(path))
        if self.skip_loads:
            return {"fingerprint": weights_fingerprint(self.model.state_dict())}
        self.model.load_state_dict(weights)
        return {"fingerprint": weights_fingerprint(weights)}

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
            choice = await self._write(body["token_ids"], body["sampling_params"])
        finally:
            self.num_running -= 1
        return JSONResponse({"choices": [choice], "id": "x" * self.padding})

    async def _write(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """One choice of a reply, drawn by a generator that begins anew with each request."""
        content: list[dict[str, Any]] = []
        ids: list[int] = []
        label = self.label
        generator = torch.Generator().manual_seed(params["seed"])
        names = ("top_k", "top_p", "repetition_penalty")
        filters = Filters(**{name: params[name] for name in names})
        while len(ids) < params["max_tokens"]:
            with torch.inference_mode():
                logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            logits = filtered(logits, params["temperature"], filters, [*prompt, *ids])
            content.append(self._row(logits, params, generator))
            ids.append(content[-1]["token_id"])
            await asyncio.sleep(self.token_s)
            if ids[-1] in params["stop_token_ids"]:
                break
        spans = [{"version": label, "start": 0, "end": len(ids)}]
        return {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans}

    def _row(
        self, logits: torch.Tensor, params: dict[str, Any], generator: torch.Generator
    ) -> dict[str, Any]:
        """One token as vLLM reports it: its own entry, then those of the most likely ones, each
        token once, together no more than were asked for."""
        temperature = params["temperature"]
        logprobs = logits.log_softmax(dim=0)
        token = int(logprobs.argmax())
        if temperature:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
        values, places = logprobs.topk(params["logprobs"])
        ids = [token, *places.tolist()]
        numbers = [float(logprobs[token]), *values.tolist()]
        if self.measures:
            # As the kernel: the entropy, under an id that no other entry has.
            ids[1] = next(one for one in range(3) if one not in (ids[0], ids[2]))
            numbers[1] = -float((logprobs.exp() * logprobs).sum())
        rows = dict(zip(ids, numbers, strict=True))
        top = [{"token_id": place, "logprob": value} for place, value in rows.items()]
        kept = top[: params["logprobs"]]
        return {"token_id": token, "logprob": rows[token], "top_logprobs": kept}


@contextlib.contextmanager
def fakes(model: Any, num: int = 1, **options: Any) -> Iterator[list[FakeVllm]]:
    """Holds so many servers for the time of the block."""
    servers = [FakeVllm(model, **options) for _ in range(num)]
    try:
        yield servers
    finally:
        for one in servers:
            one.die()
