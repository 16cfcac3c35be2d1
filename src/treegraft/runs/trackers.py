"""From names in a recipe to trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from treegraft.core.interfaces import Tracker
from treegraft.core.plugins import pick


def find_trackers(names: Sequence[str]) -> list[Callable[[Path], Tracker]]:
    """Returns the makers of a recipe's trackers, each called with the run folder.

    Raises:
        SettingError: an unknown name, or an extra that is not installed.
    """
    found = [pick(name, TRACKERS, "track.trackers") for name in names]
    return [make() if name in TRACKERS else make for name, make in zip(names, found, strict=True)]


def _tensorboard() -> Callable[[Path], Tracker]:
    from treegraft.runs.tensorboard import find_tensorboard

    return find_tensorboard()


TRACKERS = {"tensorboard": _tensorboard}
