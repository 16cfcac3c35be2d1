"""What brings Weights & Biases, MLflow and trackio, and the setting that they share."""

from __future__ import annotations

from treegraft.parts import Plugin, Settings, TrackerKind, setting


class _Tables(Settings):
    project: str | None = setting(None, resumable=True, ignored_by_eval=True)
    """Project of trackio and Weights & Biases, experiment of MLflow; None takes their environment
    variables, else "treegraft"."""


plugin = Plugin(
    name="trackers",
    trackers={
        "wandb": TrackerKind(
            path="treegraft.extras.trackers.wandb:WandbTracker",
            module="wandb",
            install="treegraft[trackers]",
        ),
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
    settings={"track": _Tables},
)
