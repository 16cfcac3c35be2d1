"""What brings MLflow and trackio."""

from __future__ import annotations

from treegraft.parts import Plugin, TrackerKind

plugin = Plugin(
    name="trackers",
    trackers={
        "trackio": TrackerKind(
            path="treegraft.extras.trackers.trackio:TrackioTracker",
            module="trackio",
            install="treegraft[trackers]",
        ),
        "mlflow": TrackerKind(
            path="treegraft.extras.trackers.mlflow:MlflowTracker",
            module="mlflow",
            install="treegraft[trackers]",
        ),
    },
)
