"""The placement on a Ray cluster, its command and its settings."""

from __future__ import annotations

from treegraft.parts import Registry


def register(registry: Registry) -> None:
    """Registers the placement on a Ray cluster and its command."""
    registry.part(
        "placement",
        "ray",
        "treegraft.extras.ray.placement:ray_placement",
        {"command": "cluster"},
        settings={"": "treegraft.extras.ray.settings:ClusterTables"},
    )
    registry.command(
        "cluster",
        "treegraft.extras.ray.command:cluster",
        help="Train an agent with a recipe on a Ray cluster, as its table [cluster] says.",
    )
