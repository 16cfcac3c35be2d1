"""Servers without Treegraft's plugin: tokens by vLLM's own draw, entropies of the most likely
tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treegraft.core.errors import EngineError, SettingError
from treegraft.policy.engine.served import NUM_ASKED, top_k_entropy
from treegraft.policy.engine.vllm.protocol import check_size
from treegraft.policy.engine.vllm.server import CONTROL_TIMEOUT_S, Server, Unreachable

_MODE = "processed_logprobs"


def plain_entries(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the drawn token's log-probability and Σ -p ln p over the most likely
    tokens in nats, from one token of a reply.

    Raises KeyError, TypeError or ValueError for one that has no such entries.
    """
    logprobs = [float(top["logprob"]) for top in row["top_logprobs"]]
    own = float(row["logprob"])
    if not logprobs or own > 0 or max(logprobs) > 0:
        raise ValueError("no log-probabilities")
    return own, top_k_entropy(logprobs)


async def check_plain(server: Server, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a server says of itself, as far as it can be asked without the plugin: its data
    type, limits and kind of log-probabilities.

    Raises:
        SettingError: something that keeps it from being used.
        Unreachable: it does not answer.
    """
    name = f"engine.vllm: {server}"
    try:
        path = "/server_info?config_format=json"
        # It looks at the whole environment, once.
        response = await server.request("GET", path, timeout_s=4 * CONTROL_TIMEOUT_S)
        model = response.json()["vllm_config"]["model_config"]
        found: dict[str, Any] = {
            "dtype": str(model["dtype"]).removeprefix("torch."),
            "max_context": int(model["max_model_len"]),
            "max_logprobs": int(model["max_logprobs"]),
            "logprobs_mode": str(model["logprobs_mode"]),
        }
    except (EngineError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{name} does not say how it is configured ({error}); expected vLLM with"
            " VLLM_SERVER_DEV_MODE=1. Start it with the options that docs/serving.md names.",
            code="server-config-hidden",
        ) from error
    check_size(name, found, expected)
    if 0 <= found["max_logprobs"] < NUM_ASKED:
        raise SettingError(
            f"{name} was started with --max-logprobs {found['max_logprobs']}, expected at least"
            f" {NUM_ASKED}, of which entropies are made. Raise it.",
            code="server-logprobs-few",
        )
    if found["logprobs_mode"] != _MODE:
        raise SettingError(
            f"{name} was started with --logprobs-mode {found['logprobs_mode']}, expected {_MODE},"
            " those of the distribution that tokens are drawn from. Restart it with that option.",
            code="server-logprobs-mode",
        )
    return found


async def load_plain(server: Server, path: str, timeout_s: float) -> None:
    """Has a server read the weights of a folder by vLLM's own loader, which returns no checksum.

    Raises:
        Unreachable, EngineError: it did not.
    """
    try:
        await server.call("reload_weights", None, path, timeout_s=timeout_s)
    except (ValueError, KeyError) as error:
        raise Unreachable(f"{server} did not read the weights in {path}: {error!r}") from error
