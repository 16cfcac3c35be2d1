"""Weights & Biases: a run with settings, metrics, warnings as alerts, and a summary."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import wandb

from treegraft.parts import Tracked

INIT_TIMEOUT_S = 30.0


class WandbTracker:
    """Logs to the project `track.project` (else WANDB_PROJECT, else "treegraft"); its files lie in
    runs/NAME/wandb. Without a login the run is recorded there alone, and `place` names the command
    that sends it."""

    def __init__(self, run_dir: Path) -> None:
        # The terminal is the display's.
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        tracked = Tracked.of(run_dir)
        settings = tracked.settings()
        project = settings["track"]["project"] or os.environ.get("WANDB_PROJECT", "treegraft")

        def start(mode: str | None) -> wandb.Run:
            return wandb.init(
                project=project,
                name=run_dir.name,
                id=tracked.id,
                resume="allow",
                dir=str(run_dir),
                config=settings,
                mode=mode,  # type: ignore[arg-type]
                # No code leaves the machine.
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_code=True,
                    disable_git=True,
                    init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT_S)),
                ),
            )

        why, mode = "", wandb.setup().settings.mode
        try:
            # Without a key `init` would ask for one, and hold up the run.
            if mode == "online" and not wandb.login(prompt=False, verify=False):
                raise wandb.Error("there is no login")
            self._run = start(None)
        except wandb.Error as error:
            why = f" ({str(error).strip().partition(chr(10))[0]})"
            # Its service process holds the run's id until then.
            wandb.teardown()
            self._run = start("offline")
        self._is_finished = False
        if mode == "offline" or why:
            self.place = f"offline{why}; to send it: wandb sync {run_dir}/wandb/offline-run-*"
        else:
            self.place = self._run.url or ""

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Logs one update's metrics at that step."""
        self._run.log({**metrics, "update": update}, step=update)

    def warn(self, update: int, name: str, text: str) -> None:
        """Raises an alert."""
        self._run.alert(title=f"{name} at update {update}", text=text)

    def finish(self, latest: Mapping[str, float]) -> None:
        """Writes the summary of a run that has done its work."""
        self._run.summary.update(dict(latest))
        self._is_finished = True

    def close(self) -> None:
        """Ends the run; without `finish` it counts as failed until it is resumed."""
        self._run.finish(exit_code=0 if self._is_finished else 1)
