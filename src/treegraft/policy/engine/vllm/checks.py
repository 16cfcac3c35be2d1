"""Whether a server can be sampled from: its model, version and limits against the recipe's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        SettingError: something that makes it unusable.
        Unreachable: it does not answer.
    """
    found = await _identity(server)
    for field, wanted, remedy in _wanted(expected):
        got = found[field]
        # Of limits the least; below 0 is none.
        if got != wanted and not (field.startswith("max_") and (got < 0 or got >= wanted)):
            raise SettingError(
                f"engine.vllm: {server} has {field} = {got}, expected {wanted}. Start it with"
                f" {remedy}.",
                code="server-unfit",
            )
    if expected["entropies"] == "measured":
        await server.call("treegraft_measure", timeout_s=CONTROL_TIMEOUT_S)
    return found


def _wanted(expected: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """What a server has to say of itself: a field, its value and how to get that."""
    yield "plugin", PLUGIN_VERSION, "the Treegraft of this run on its PYTHONPATH"
    for name in _MODEL:
        yield name, expected[name], "the model of the recipe (model.path)"
    dtype = expected["dtype"]
    context = expected["max_context"]
    yield "dtype", dtype, f"--dtype {dtype}, or change model.dtype"
    if context is not None:
        shorter = "or shorten prompts and rollout.max_completion_tokens"
        yield "max_context", context, f"--max-model-len {context}, {shorter}"
    yield "max_logprobs", NUM_ASKED, f"--max-logprobs {NUM_ASKED}, of which entropies are made"
    yield "logprobs_mode", "processed_logprobs", "--logprobs-mode processed_logprobs"
    if expected["entropies"] == "measured":
        remedy = 'a GPU and VLLM_USE_V2_MODEL_RUNNER=1, or set engine.vllm.entropies = "top_k"'
        yield "is_v2", True, remedy


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
