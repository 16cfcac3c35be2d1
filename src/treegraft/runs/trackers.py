"""From names in a recipe to trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from treegraft.core.errors import SettingError, nearest
from treegraft.core.interfaces import Tracker
from treegraft.core.plugins import load_object


def find_trackers(names: Sequence[str]) -> list[Callable[[Path], Tracker]]:
    """Returns the makers of a recipe's trackers, each called with the run folder.

    Raises:
        SettingError: an unknown name, or an extra that is not installed.
    """
    makers: list[Callable[[Path], Tracker]] = []
    for name in names:
        if name == "tensorboard":
            from treegraft.runs.tensorboard import find_tensorboard

            makers.append(find_tensorboard())
        elif ":" in name:
            makers.append(load_object(name))
        else:
            raise SettingError(
                f"track.trackers names '{name}'; expected \"tensorboard\" or an import path"
                f" 'package.module:Tracker'.{nearest(name, ['tensorboard'])}"
            )
    return makers
