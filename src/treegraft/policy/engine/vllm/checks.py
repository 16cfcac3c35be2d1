"""Whether a server can be sampled from: its model, versions and limits against the recipe's."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from treegraft.core.errors import EngineError, SettingError
from treegraft.policy.engine.sampling import draws_of_sampling
from treegraft.policy.engine.served import NUM_ASKED
from treegraft.policy.engine.vllm.protocol import (
    COLUMNS,
    DRAW_CLASS,
    MIN_LOGPROBS,
    PLUGIN,
    PLUGIN_VERSION,
    TESTED,
    check_size,
)
from treegraft.policy.engine.vllm.server import CONTROL_TIMEOUT_S, Server, Unreachable, runs
from treegraft.settings.policy import OWN_DRAWS

LEASE_S = 300.0
"""A server whose run has died without giving it up is free after so many seconds."""
_MODEL = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
_HOW = "start it with the options that docs/serving.md names"


def identity_of_model(
    model: Any, *, dtype: str, max_context: int | None, entropies: str = "exact"
) -> dict[str, Any]:
    """Returns the identity that a server has to have for sampling from this model.

    Args:
        max_context: longest path of the run, in tokens; None for no limit.
        entropies: engine.vllm.entropies.
    """
    text = model.config.get_text_config()
    found = {name: getattr(text, name, None) for name in _MODEL}
    return found | {"dtype": dtype, "max_context": max_context, "entropies": entropies}


async def check_identity(server: Server, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the server says of itself.

    Raises:
        SettingError: something that keeps it from being used.
        Unreachable: it does not answer.
    """
    found = await _identity(server)
    name = f"engine.vllm: {server}"
    if found["plugin"] != PLUGIN_VERSION or found["draws"] != draws_of_sampling():
        raise SettingError(
            f"{name} has another version of Treegraft's plugin ({found['plugin']}, which draws"
            f" {found['draws'][:3]}...; expected {PLUGIN_VERSION}, {draws_of_sampling()[:3]}...)."
            " Start it with the Treegraft of this run on its PYTHONPATH.",
            code="server-plugin-version",
        )
    for field in _MODEL:
        if found[field] != expected[field]:
            raise SettingError(
                f"{name} has another model: its {field} is {found[field]}, expected"
                f" {expected[field]}, that of model.path. Start it with the model of the recipe.",
                code="server-other-model",
            )
    check_size(name, found, expected)
    draws, measures = expected["entropies"] in OWN_DRAWS, expected["entropies"] == "measured"
    if (draws and not found["draws_here"]) or (measures and found["runner"] != 2):
        what = "draws without the keys" if draws else "has vLLM's former runner"
        way = f"--logits-processors {DRAW_CLASS}" if draws else "VLLM_USE_V2_MODEL_RUNNER=1, a GPU"
        raise SettingError(
            f"{name} {what}, so it has no exact entropies; expected {way}. Restart it with that,"
            ' or set engine.vllm.entropies = "top_k".',
            code="server-without-draws",
        )
    if measures:
        await server.call("treegraft_measure", timeout_s=CONTROL_TIMEOUT_S)
    least = MIN_LOGPROBS if draws or measures else NUM_ASKED
    if 0 <= found["max_logprobs"] < least:
        raise SettingError(
            f"{name} was started with --max-logprobs {found['max_logprobs']}, expected at least"
            f" {least}: replies carry log-probability and entropy there. Raise it.",
            code="server-logprobs-few",
        )
    mode = "processed_logits" if draws else "processed_logprobs"
    if found["logprobs_mode"] != mode:
        raise SettingError(
            f"{name} was started with --logprobs-mode {found['logprobs_mode']}, expected {mode}"
            " with engine.vllm.entropies as it is. Restart it with that option.",
            code="server-logprobs-mode",
        )
    return found


async def _identity(server: Server) -> dict[str, Any]:
    try:
        results = await server.call("treegraft_identity", timeout_s=CONTROL_TIMEOUT_S)
        return results[0]
    except (EngineError, ValueError, KeyError, TypeError, IndexError) as error:
        fault = str(error)
    except Unreachable as error:
        if not await server.is_healthy():
            raise
        fault = str(error)
    raise SettingError(
        f"engine.vllm: {server} does not know Treegraft's plugin ({fault}); expected"
        f" vLLM {TESTED} or later with VLLM_SERVER_DEV_MODE=1, --enable-scale-out,"
        f" --worker-extension-cls {PLUGIN}.Extension and --middleware {COLUMNS}: {_HOW}.",
        code="server-without-plugin",
    )


async def claim(server: Server, owner: str, instead_of: str = "") -> None:
    """Makes `owner` the one run that publishes to a server.

    Args:
        instead_of: an owner that is known to have ended; "" for none.

    Raises:
        EngineError: another run holds it; Unreachable: it does not answer.
    """
    results = await server.call(
        *("treegraft_claim", owner, LEASE_S, instead_of), timeout_s=CONTROL_TIMEOUT_S
    )
    for held in results:
        if held["owner"] == owner:
            continue
        host, pid, _ = held["owner"].split(":")
        if not instead_of and host == socket.gethostname() and not runs(int(pid)):
            return await claim(server, owner, held["owner"])
        raise EngineError(
            f"engine.vllm.servers: {server} belongs to another run (host {host}, process {pid});"
            " expected one that no other run publishes to. End that run (the server is then free"
            f" after {held['for_s']:.0f} s at most), or use another server.",
            code="server-of-other-run",
        )
