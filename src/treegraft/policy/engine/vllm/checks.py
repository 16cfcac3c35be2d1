"""Whether a server can be sampled from: its model, version and limits against the recipe's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treegraft.core.errors import EngineError, SettingError
from treegraft.policy.engine.served import NUM_ASKED
from treegraft.policy.engine.vllm.replies import PLUGIN, PLUGIN_VERSION, TESTED
from treegraft.policy.engine.vllm.server import CONTROL_TIMEOUT_S, Server, Unreachable

_MODEL = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


def identity_of_model(
    model: Any, *, dtype: str, max_context: int | None, entropies: str = "top_k"
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
    if found["plugin"] != PLUGIN_VERSION:
        raise SettingError(
            f"{name} has version {found['plugin']} of Treegraft's plugin, expected"
            f" {PLUGIN_VERSION}. Start it with the Treegraft of this run on its PYTHONPATH.",
            code="server-plugin-version",
        )
    for field in _MODEL:
        if found[field] != expected[field]:
            raise SettingError(
                f"{name} has another model: its {field} is {found[field]}, expected"
                f" {expected[field]}, that of model.path. Start it with the model of the recipe.",
                code="server-other-model",
            )
    if found["dtype"] != expected["dtype"]:
        raise SettingError(
            f"{name} computes in {found['dtype']}, expected model.dtype = {expected['dtype']}."
            f" Start it with --dtype {expected['dtype']}, or change model.dtype.",
            code="server-other-dtype",
        )
    wanted = expected["max_context"]
    if wanted is not None and found["max_context"] < wanted:
        raise SettingError(
            f"{name} reads {found['max_context']} tokens, expected {wanted}, the longest path of"
            f" the recipe. Start it with --max-model-len {wanted}, or shorten prompts and"
            " rollout.max_completion_tokens.",
            code="server-context-short",
        )
    _check_logprobs(name, found)
    if expected["entropies"] == "measured":
        await _measure(server, name, found)
    return found


def _check_logprobs(name: str, found: Mapping[str, Any]) -> None:
    if 0 <= found["max_logprobs"] < NUM_ASKED:
        raise SettingError(
            f"{name} was started with --max-logprobs {found['max_logprobs']}, expected at least"
            f" {NUM_ASKED}, of which entropies are made. Raise it.",
            code="server-logprobs-few",
        )
    if found["logprobs_mode"] != "processed_logprobs":
        raise SettingError(
            f"{name} was started with --logprobs-mode {found['logprobs_mode']}, expected"
            " processed_logprobs. Restart it with that option.",
            code="server-logprobs-mode",
        )


async def _measure(server: Server, name: str, found: Mapping[str, Any]) -> None:
    if not found["is_v2"]:
        raise SettingError(
            f"{name} has vLLM's former runner, which reports no exact entropies; expected"
            " VLLM_USE_V2_MODEL_RUNNER=1 and a GPU. Restart it with that, or set"
            ' engine.vllm.entropies = "top_k".',
            code="server-cannot-measure",
        )
    await server.call("treegraft_measure", timeout_s=CONTROL_TIMEOUT_S)


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
        f"engine.vllm: {server} does not know Treegraft's plugin ({fault}); expected vLLM"
        f" {TESTED} or later with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and"
        f" --worker-extension-cls {PLUGIN}: start it with the options that docs/serving.md names.",
        code="server-without-plugin",
    )
