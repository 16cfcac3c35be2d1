"""The placement on a Ray cluster, its command and its settings."""

from __future__ import annotations

from treegraft.parts import Command, PlacementKind, Plugin

plugin = Plugin(
    name="ray",
    placements={
        "ray": PlacementKind(path="treegraft.extras.ray.placement:ray_placement", command="cluster")
    },
    commands={
        "cluster": Command(
            path="treegraft.extras.ray.command:cluster",
            help="Train an agent with a recipe on a Ray cluster, as its table [cluster] says.",
        )
    },
    settings={"": "treegraft.extras.ray.settings:ClusterTables"},
)
