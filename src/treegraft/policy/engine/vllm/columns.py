"""The route of a vLLM server that answers in columns: arrays in place of rows, no text a token.

An ASGI middleware of the server's own process (`vllm serve --middleware`).
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from treegraft.policy.engine.vllm.protocol import DRAW, ROUTE, drawn_columns, likely_columns, packed


class Columns:
    """Answers `ROUTE` as vLLM answers /inference/v1/generate, and leaves all other routes alone."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        raw = Request(scope, receive)
        try:
            request = GenerateRequest.model_validate(await raw.json())
            response = await _answer(request, raw)
        except ValueError as error:  # pydantic's, and vLLM's for parameters
            response = JSONResponse({"error": str(error)[:600]}, status_code=400)
        if response is not None:  # None: nobody waits for it
            await response(scope, receive, send)


@with_cancellation  # type: ignore[untyped-decorator]  # vllm is not installed here
async def _answer(request: Any, raw_request: Request) -> Response:
    request.sampling_params.flat_logprobs = True
    # vLLM's own way from request to tokens, and ours from tokens to a reply.
    handler = copy.copy(raw_request.app.state.serving_tokens)
    handler.serve_tokens_full_generator = _reply
    found = await handler.serve_tokens(request, raw_request)
    if isinstance(found, dict):
        return JSONResponse(found)
    return JSONResponse(found.model_dump(), status_code=found.error.code)


async def _reply(request: Any, results: AsyncGenerator[Any, None], *_: Any) -> dict[str, Any]:
    # One alone: vLLM was asked for final results.
    (final,) = [one async for one in results]
    (output,) = final.outputs
    if output.finish_reason == "error":
        raise RuntimeError("vLLM could not compute a token")
    # Of each token its own entry, and then those of the largest.
    table = np.array(output.logprobs.logprobs).reshape(len(output.token_ids), -1)
    is_marked = DRAW in (request.sampling_params.extra_args or {})
    read = drawn_columns if is_marked else likely_columns
    # Of two, the second one is the entropy; see the extension `entropies`.
    columns = table.T if table.shape[1] == 2 else read(table)
    versions = [asdict(one) for one in output.weight_versions or ()]
    choice = packed(output.token_ids, *columns) | {"weight_versions": versions}
    usage = {
        "prompt_tokens": len(final.prompt_token_ids),
        "prompt_tokens_details": {"cached_tokens": final.num_cached_tokens},
    }
    return {"choices": [choice], "usage": usage}
