"""TensorBoard event files in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from treegraft.parts import Tracked


class TensorBoardTracker:
    """Writes each metric as a scalar under runs/NAME/tensorboard, settings and warnings as texts. A
    resumed run adds a file."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        settings = json.dumps(Tracked.of(run_dir).settings(), indent=2)
        # Indented text is code in Markdown, which TensorBoard shows.
        self._writer.add_text("settings", "    " + settings.replace("\n", "\n    "))

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Writes one update's metrics."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, update)
        self._writer.flush()

    def warn(self, update: int, name: str, text: str) -> None:
        """Writes a warning that begins."""
        self._writer.add_text(f"warnings/{name}", text, update)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
