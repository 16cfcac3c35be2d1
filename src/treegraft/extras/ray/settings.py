"""Settings of `treegraft cluster`: which Ray cluster, and what stands on it."""

from __future__ import annotations

from typing import Any

from treegraft.parts import Settings, setting


class ClusterSettings(Settings):
    """How `treegraft cluster` spreads a run over machines; other commands take no notice."""

    address: str = setting("local", acts="sends")
    """The Ray cluster: "local" starts one on this machine for the run, "auto" takes the one that
    this machine belongs to, "HOST:PORT" that of another machine's head node."""
    learner_gpus: int = setting(0, ge=0)
    """GPUs that learn, one rank on each; 0 learns on CPUs."""
    learner_ranks: int | None = setting(None, ge=1)
    """Processes that learn together, each on a machine with room for it; None takes one for each of
    learner_gpus, and without GPUs learns in the command's own process."""
    max_restarts: int = setting(3, ge=0)
    """How often the learner's ranks start again from the last checkpoint after one of them was
    lost; with learn.ranks = "auto" also fewer of them, where machines are gone."""
    server_gpus: int = setting(0, ge=0)
    """GPUs that sample, shared out equally among the engines; 0 samples on CPUs."""
    engines: int | None = setting(None, ge=1)
    """Engines, each with one copy of published weights, and with tools and rewards for the trees
    that grow there. None takes one for each of server_gpus, or one; where engine.kind is "vllm" one
    for every eight of them, a machine's, with a server on each GPU."""

    @property
    def num_ranks(self) -> int:
        """The ranks that there are to be; 1 is the command's own process, unless it wants a GPU."""
        return self.learner_ranks or max(1, self.learner_gpus)


def cluster_settings(config: Any) -> ClusterSettings:
    """Returns the table [cluster] of a configuration."""
    found: ClusterSettings = config.cluster
    return found


def num_engines(config: Any) -> int:
    """Returns how many engines there are to be."""
    settings = cluster_settings(config)
    gpus = settings.server_gpus
    return settings.engines or max(1, -(-gpus // 8) if config.engine.kind == "vllm" else gpus)


class ClusterTables(Settings):
    """The table [cluster] of a recipe."""

    cluster: ClusterSettings = setting(
        ClusterSettings(), resumable=True, ignored_by_eval=True, only_for="cluster"
    )
