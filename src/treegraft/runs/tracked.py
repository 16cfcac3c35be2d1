"""The file `trackers.json` of a run folder: the run's id at each tracker, and the last update that
each one has."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError
from treegraft.core.files import write_atomically


@dataclass(slots=True)
class Tracked:
    """The records that the trackers of a run already have."""

    run_dir: Path
    id: str
    """Of the run in all trackers, the same after a resume; made up, so that runs of one name stay
    apart."""
    updates: dict[str, int] = field(default_factory=dict)
    """The last update of each tracker by its name in the recipe; none before its first."""

    @classmethod
    def of(cls, run_dir: Path) -> Tracked:
        """Returns what stands in the run folder, with a new id where nothing does.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = run_dir / "trackers.json"
        if not path.exists():
            return cls(run_dir, uuid.uuid4().hex[:12])
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            updates = {str(name): int(update) for name, update in data["updates"].items()}
            return cls(run_dir, str(data["id"]), updates)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"'{path}' could not be read ({type(error).__name__}: {error}); expected what a run"
                " with trackers writes. Remove it, and the trackers begin a new run.",
                code="tracked-unreadable",
            ) from error

    def has_had(self, name: str, update: int) -> bool:
        """Returns whether a tracker has had the update."""
        return update <= self.updates.get(name, -1)

    def write(self) -> None:
        """Writes the file."""
        data = {"id": self.id, "updates": self.updates}
        write_atomically(self.run_dir / "trackers.json", json.dumps(data, indent=1) + "\n")

    def settings(self) -> dict[str, Any]:
        """Returns the run's resolved settings, as tables."""
        settings: dict[str, Any] = json.loads((self.run_dir / "config.json").read_text("utf-8"))
        return settings
