"""The placement of a run's engines on a Ray cluster, and its command."""

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
        help="Train an agent with a recipe whose engines run on a Ray cluster.",
    )
