"""Trees inside verl's default trainer (v1): rollouts, tools and advantages by a recipe, all else
verl's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treegraft import SettingError

if TYPE_CHECKING:
    from treegraft.extras.verl.manager import TreeManager

__all__ = ["TreeManager"]

SUPPORTED = "0.9.1"
"""The version of verl that this was written for: it overrides methods with private names."""


def check_version(version: str) -> None:
    """Raises `SettingError` for a version of verl that is not supported."""
    if version.split("+")[0] != SUPPORTED:
        raise SettingError(
            f"treegraft.extras.verl: verl {version} is installed, expected {SUPPORTED}: its"
            " trainer's insides move between versions. Run: pip install"
            f" verl=={SUPPORTED}",
            code="verl-version",
        )


def __getattr__(name: str) -> Any:
    # verl loads the manager by this path in the process of its trainer.
    if name == "TreeManager":
        from treegraft.extras.verl.manager import TreeManager

        return TreeManager
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
