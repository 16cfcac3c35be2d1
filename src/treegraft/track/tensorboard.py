"""TensorBoard event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from treegraft.errors import SettingError


class TensorBoardTracker:
    """Writes each metric as a scalar under runs/NAME/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingError(
                'track.trackers names "tensorboard", which is not installed; run: pip install "treegraft[track]"'
            ) from error
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Writes one update's metrics."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, update)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
