"""What a paused server is given: weights by Treegraft's plugin, by vLLM's own loader, or an adapter
over the weights that it holds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from treegraft.policy.engine.vllm.folder import WeightsFolder
from treegraft.policy.engine.vllm.plain import load_plain
from treegraft.policy.engine.vllm.server import Server, Unreachable


@dataclass(frozen=True, slots=True)
class Due:
    """The weights that servers have to hold."""

    label: str
    folder: WeightsFolder | None
    """None for those that a server of ours is started with."""
    fingerprint: str
    """Empty where servers cannot report it."""
    is_adapter: bool = False
    """Whether the folder holds an adapter, to be laid over the weights of `Fleet.base`."""


@dataclass(slots=True)
class Held:
    """What a server is known to hold."""

    has_base: bool = False
    """The weights that adapters are laid over, where it did not start with them."""
    adapter: str = ""
    """Name of the adapter that it was given last."""


async def give_weights(
    server: Server,
    held: Held,
    due: Due,
    base: WeightsFolder | None,
    *,
    is_plain: bool,
    timeout_s: float,
) -> float:
    """Gives a paused server what is due, and returns the seconds that it took.

    Args:
        base: the weights below an adapter; None where servers are started with them.
        is_plain: the server is without Treegraft's plugin.

    Raises:
        Unreachable, EngineError: it did not take them, or read other ones.
    """
    began = time.monotonic()
    if not due.is_adapter:
        await _give_folder(server, due.folder, due.fingerprint, is_plain, timeout_s)
        held.has_base = due.folder is base
        return time.monotonic() - began
    if not held.has_base:
        await _give_folder(server, base, "", is_plain, timeout_s)
        held.has_base = True
    if held.adapter:
        body = {"lora_name": held.adapter}
        held.adapter = ""
        await server.request("POST", "/v1/unload_lora_adapter", body, timeout_s=timeout_s)
    assert due.folder is not None
    body = {"lora_name": due.label, "lora_path": str(due.folder.path)}
    await server.request("POST", "/v1/load_lora_adapter", body, timeout_s=timeout_s)
    held.adapter = due.label
    return time.monotonic() - began


async def _give_folder(
    server: Server, folder: WeightsFolder | None, fingerprint: str, is_plain: bool, timeout_s: float
) -> None:
    if folder is None:
        return
    path = str(folder.path)
    if is_plain:
        return await load_plain(server, path, timeout_s)
    for one in await server.call("treegraft_load", path, timeout_s=timeout_s):
        if fingerprint and one["fingerprint"] != fingerprint:
            raise Unreachable(
                f"{server} read weights with checksum {one['fingerprint']} from {path}, expected"
                f" {fingerprint}"
            )
