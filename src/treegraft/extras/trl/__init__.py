"""Trees inside TRL's GRPOTrainer: rollouts, tools and advantages by a recipe, all else TRL's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treegraft import SettingError

if TYPE_CHECKING:
    from treegraft.extras.trl.arguments import grpo_config
    from treegraft.extras.trl.trainer import TreeGRPOTrainer

__all__ = ["TreeGRPOTrainer", "grpo_config"]

SUPPORTED = "1.16"
"""The minor version of TRL that this was written for: it derives from a method with a private
name."""


def check_version(version: str) -> None:
    """Raises `SettingError` for a version of TRL that is not supported."""
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise SettingError(
            f"treegraft.extras.trl: TRL {version} is installed, expected {SUPPORTED}.*: its"
            " trainer's insides move between minor versions. Run: pip install 'treegraft[trl]'",
            code="trl-version",
        )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        import trl
    except ImportError as error:
        raise SettingError(
            f"treegraft.extras.trl: {name} needs trl, which cannot be imported ({error}); run:"
            " pip install 'treegraft[trl]'",
            code="package-missing",
        ) from error
    check_version(trl.__version__)
    if name == "grpo_config":
        from treegraft.extras.trl.arguments import grpo_config

        return grpo_config
    from treegraft.extras.trl.trainer import TreeGRPOTrainer

    return TreeGRPOTrainer
