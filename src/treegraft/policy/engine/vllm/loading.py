"""How servers get weights: from a folder, from memory to memory, or an adapter over those that they
hold."""

from __future__ import annotations

from dataclasses import dataclass

from treegraft.core.interfaces import WeightSource
from treegraft.policy.engine.vllm.folder import WeightsFolder
from treegraft.policy.engine.vllm.server import Server, Unreachable

CHANGED = "weights-gone-on"
"""Code of the error that weights which are due can no longer be sent: the learner has gone on."""


@dataclass(frozen=True, slots=True)
class Due:
    """The weights that servers have to hold."""

    label: str
    folder: WeightsFolder | None
    """None for those that a server of ours is started with, and those that come by memory."""
    fingerprint: str
    """Empty where servers cannot report it."""
    is_adapter: bool = False
    """Whether the folder holds an adapter, to be laid over the weights of `Fleet.base`."""
    source: WeightSource | None = None
    """From which they are sent from memory to memory; None for a folder."""


@dataclass(slots=True)
class Held:
    """What a server is known to hold."""

    has_base: bool = False
    """The weights that adapters are laid over, where it did not start with them."""
    adapter: str = ""
    """Name of the adapter that it was given last."""


async def give_weights(
    server: Server, held: Held, due: Due, base: WeightsFolder | None, timeout_s: float
) -> None:
    """Gives a paused server the folder that is due.

    Args:
        base: the weights below an adapter; None where servers are started with them.

    Raises:
        Unreachable, EngineError: it did not take them, or read other ones.
    """
    if not due.is_adapter:
        await _give_folder(server, due.folder, due.fingerprint, timeout_s)
        held.has_base = due.folder is base
        return
    if not held.has_base:
        await _give_folder(server, base, "", timeout_s)
        held.has_base = True
    assert due.folder is not None
    body = {"lora_name": due.label, "lora_path": str(due.folder.path)}
    # Room for two: the former one goes when this one has been read.
    await server.request("POST", "/v1/load_lora_adapter", body, timeout_s=timeout_s)
    former, held.adapter = held.adapter, due.label
    if former:
        body = {"lora_name": former}
        await server.request("POST", "/v1/unload_lora_adapter", body, timeout_s=timeout_s)


async def _give_folder(
    server: Server, folder: WeightsFolder | None, expected: str, timeout_s: float
) -> None:
    if folder is None:
        return
    for one in await server.call("treegraft_load", str(folder.path), timeout_s=timeout_s):
        if expected and one["fingerprint"] != expected:
            raise Unreachable(
                f"{server} read weights with checksum {one['fingerprint']}, expected {expected}"
            )
