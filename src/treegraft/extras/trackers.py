"""TensorBoard, Weights & Biases, MLflow and trackio, through the trackers of accelerate."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from treegraft.parts import Registry, Tracked, recipe

MLFLOW_TAG = "treegraft.id"


class AccelerateTracker:
    """One of accelerate's trackers, which continues its own run if the training is resumed."""

    place: str
    """Address of the run if the tracker has one, else its project."""

    def __init__(self, kind: str, run_dir: Path) -> None:
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # The log of accelerate refuses to work without it.
        PartialState()
        tracked = Tracked.of(run_dir)
        settings = json.loads((run_dir / "config.json").read_text("utf-8"))
        # As each tracker itself does, which accelerate does not.
        project = os.environ.get(f"{kind.upper()}_PROJECT") or "treegraft"
        with _silent():
            self._tracker: Any = LOGGER_TYPE_TO_CLASS[kind](**_OPTIONS[kind](project, tracked))
            self._tracker.start()
            # MLflow's parameters cannot change, and TensorBoard would list a second run.
            if kind in ("wandb", "trackio") or kind not in tracked.updates:
                self._tracker.store_init_configuration(_plain_values(settings))
        self.place = getattr(self._tracker.tracker, "url", None) or f"project {project}"

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of an update, with its number as the step."""
        self._tracker.log(dict(metrics), step=update)

    def warn(self, update: int, name: str, text: str) -> None:
        """Raises an alert if the tracker has alerts; all have the metric "health/NAME"."""
        if alert := getattr(self._tracker.tracker, "alert", None):
            with _silent():
                alert(f"{name} at update {update}", text)

    def close(self) -> None:
        """Sends what is left and ends the run."""
        with _silent():
            self._tracker.finish()


def _plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted names; TensorBoard refuses lists and None."""
    values: dict[str, Any] = {}
    for name, value in recipe.flatten(settings).items():
        values[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return values


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps what trackers print out of the display."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


# --- what each tracker is made with ---------------------------------------------------------------


def _tensorboard(project: str, tracked: Tracked) -> dict[str, Any]:
    return {"run_name": "tensorboard", "logging_dir": tracked.run_dir}


def _wandb(project: str, tracked: Tracked) -> dict[str, Any]:
    import wandb

    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    mode = wandb.setup().settings.mode
    # Without a key it would ask for one, and hold up the run.
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    return {
        "run_name": project,
        "name": tracked.run_dir.name,
        "id": tracked.id,
        "resume": "allow",
        "dir": str(tracked.run_dir),
        "mode": mode,
        # The terminal is the display's, and no code leaves the machine.
        "settings": wandb.Settings(
            silent=True, console="off", disable_code=True, disable_git=True, init_timeout=30.0
        ),
    }


def _trackio(project: str, tracked: Tracked) -> dict[str, Any]:
    return {
        "run_name": project,
        "name": tracked.run_dir.name,
        # Found by name there: a run of another folder that has the same name is not joined.
        "resume": "allow" if "trackio" in tracked.updates else "never",
        "embed": False,
    }


def _mlflow(project: str, tracked: Tracked) -> dict[str, Any]:
    # With its own defaults a server that is down delays an update by ten minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    import mlflow

    runs = mlflow.search_runs(
        filter_string=f"tags.`{MLFLOW_TAG}` = '{tracked.id}'",
        search_all_experiments=True,
        output_format="list",
    )
    return {
        # MLFLOW_EXPERIMENT_NAME comes before it.
        "experiment_name": project,
        "run_id": runs[0].info.run_id if runs else None,
        "run_name": tracked.run_dir.name,
        "tags": {MLFLOW_TAG: tracked.id},
    }


_OPTIONS = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
"""By the name of the tracker, which is that of the package that it needs."""


def register(registry: Registry) -> None:
    """Registers four trackers."""
    for name in _OPTIONS:
        registry.part(
            "tracker",
            name,
            partial(AccelerateTracker, name),
            {"module": name, "install": "treegraft[trackers]"},
        )
