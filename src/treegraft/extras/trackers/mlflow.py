"""MLflow: a run with parameters, metrics, warnings as tags, and its end."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from treegraft.parts import Tracked, recipe

PARAMS_AT_ONCE, LONGEST_PARAM, LONGEST_TAG = 100, 6000, 5000
"""Limits of MLflow's servers."""
ID_TAG = "treegraft.id"


class MlflowTracker:
    """Logs to the experiment `track.project` (else MLFLOW_EXPERIMENT_NAME, else "treegraft") at
    MLFLOW_TRACKING_URI."""

    def __init__(self, run_dir: Path) -> None:
        # Its own defaults hold up an update for ten minutes where a server is down.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        tracked = Tracked.of(run_dir)
        settings = tracked.settings()
        name = settings["track"]["project"] or os.environ.get("MLFLOW_EXPERIMENT_NAME", "treegraft")
        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        wanted = f"tags.`{ID_TAG}` = '{tracked.id}'"
        found = self._client.search_runs([experiment], wanted, max_results=1)
        run = found[0] if found else None
        if run is None:
            tags = {ID_TAG: tracked.id}
            run = self._client.create_run(experiment, tags=tags, run_name=run_dir.name)
        self._id: str = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._log_settings(recipe.flatten(settings), run)
        self._is_finished = False
        self.place = f"experiment {name}, run {self._id}"

    def _log_settings(self, settings: Mapping[str, Any], run: Run) -> None:
        texts = {name: str(value)[:LONGEST_PARAM] for name, value in settings.items()}
        known = run.data.params
        params = [Param(name, text) for name, text in texts.items() if name not in known]
        for begin in range(0, len(params), PARAMS_AT_ONCE):
            part = params[begin : begin + PARAMS_AT_ONCE]
            self._client.log_batch(self._id, params=part)
        # A parameter never changes there; a resumed run may have changed some settings.
        for name, text in texts.items():
            if known.get(name, text) != text:
                self._client.set_tag(self._id, f"resumed.{name}", text[:LONGEST_TAG])

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Logs one update's metrics at that step."""
        now = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._id, [Metric(metric_name(k), v, now, update) for k, v in metrics.items()]
        )

    def warn(self, update: int, name: str, text: str) -> None:
        """Writes a warning that begins as a tag."""
        said = f"update {update}: {text}"[:LONGEST_TAG]
        self._client.set_tag(self._id, metric_name(f"warning.{name}"), said)

    def finish(self, latest: Mapping[str, float]) -> None:
        """Notes that the run has done its work; the latest values are its summary already."""
        self._is_finished = True

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id, "FINISHED" if self._is_finished else "KILLED")


def metric_name(key: str) -> str:
    """Returns a metric's key with what MLflow's names cannot hold replaced."""
    return re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)
