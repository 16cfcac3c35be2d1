"""TensorBoard event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from treegraft.core.errors import SettingError


def find_tensorboard() -> type[TensorBoardTracker]:
    """Returns the tracker.

    Raises:
        SettingError: TensorBoard is not installed.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise SettingError(
            'track.trackers names "tensorboard", which is not installed; run: pip install'
            ' "treegraft[track]"'
        ) from error
    return TensorBoardTracker


class TensorBoardTracker:
    """Writes each metric as a scalar under runs/NAME/tensorboard. A resumed run adds a file; equal
    steps show the later value."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Writes one update's metrics."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, update)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
