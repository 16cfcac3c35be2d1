"""Settings of `treegraft cluster`: which Ray cluster, and how many engines run there."""

from __future__ import annotations

from typing import Any

from treegraft.parts import Settings, setting


class ClusterSettings(Settings):
    """How `treegraft cluster` spreads a run over machines; other commands ignore it."""

    address: str = setting("local", acts="sends")
    """The Ray cluster: "local" starts one on this machine for the run, "auto" joins the one that
    this machine belongs to, "HOST:PORT" that of another machine's head node."""
    server_gpus: int = setting(0, ge=0)
    """GPUs that sample, shared out equally among the engines; 0 samples on CPUs."""
    engines: int | None = setting(None, ge=1)
    """Engines, each with one copy of published weights, and with tools and rewards for the trees
    that grow there. None means one for each of server_gpus, or one; where engine.kind is "vllm" one
    for every eight of them, a machine's, with a server on each GPU."""


class ClusterTables(Settings):
    """The table [cluster] of a recipe."""

    cluster: ClusterSettings = setting(
        ClusterSettings(), resumable=True, ignored_by_eval=True, only_for="cluster"
    )


def cluster_settings(config: Any) -> ClusterSettings:
    """Returns the table [cluster] of a configuration."""
    found: ClusterSettings = config.cluster
    return found


def num_engines(config: Any) -> int:
    """Returns the number of engines of a run."""
    settings = cluster_settings(config)
    gpus = settings.server_gpus
    # One vLLM engine has the eight GPUs of a machine, a native one has one.
    return settings.engines or max(1, -(-gpus // 8) if config.engine.kind == "vllm" else gpus)
