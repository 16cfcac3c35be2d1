"""What brings TensorBoard, Weights & Biases, MLflow, trackio and answers to Prometheus, with their
settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.parts import Contradiction, Registry, Settings, setting

SETTING = "track.prometheus"


class _Tables(Settings):
    project: str | None = setting(None, acts="nothing", resumable=True, ignored_by_eval=True)
    """Project of trackio and Weights & Biases, experiment of MLflow; None takes their environment
    variables, else "treegraft"."""
    prometheus: str | None = setting(None, acts="sends", resumable=True, ignored_by_eval=True)
    """Address at which a Prometheus server finds the latest metrics of the run, such as
    "127.0.0.1:9464"; None for none."""


def address_of(place: str) -> tuple[str, int] | None:
    """Returns host and port of a text "host:port"; None for any other text."""
    host, _, port = place.rpartition(":")
    is_address = host and port.isdecimal() and int(port) <= 65535
    return (host.strip("[]"), int(port)) if is_address else None


def _wrong(config: Any) -> Iterator[Contradiction]:
    place = config.track.prometheus
    if place is not None and address_of(place) is None:
        yield Contradiction(
            (SETTING,),
            f"{SETTING}: got '{place}', expected a host and a port such as \"127.0.0.1:9464\".",
        )


def _needs(config: Any) -> Iterator[tuple[str, str]]:
    if config.track.prometheus is not None:
        yield f"{SETTING} = '{config.track.prometheus}'", "prometheus_client"


TRACKERS = {
    "tensorboard": "treegraft.extras.trackers.tensorboard:TensorBoardTracker",
    "wandb": "treegraft.extras.trackers.wandb:WandbTracker",
    "trackio": "treegraft.extras.trackers.trackio:TrackioTracker",
    "mlflow": "treegraft.extras.trackers.mlflow:MlflowTracker",
}
"""Import paths by the names of the packages that they need."""


def register(registry: Registry) -> None:
    """Registers four trackers, and answers to Prometheus."""
    for name, path in TRACKERS.items():
        registry.part("tracker", name, path, {"module": name, "install": "treegraft[trackers]"})
    registry.part(
        "service",
        SETTING,
        "treegraft.extras.trackers.exporter:prometheus",
        settings={"track": _Tables},
        checks=(_wrong,),
        needs=_needs,
    )
