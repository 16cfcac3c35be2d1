"""The start of a run: a new folder or one to resume, with its settings and state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.files import storage_fault, write_atomically
from treegraft.core.given import GIVEN, GivenObjects, Record
from treegraft.core.shipped import names_recipe
from treegraft.runs.checkpoint import (
    TrainState,
    latest_checkpoint,
    leave_out,
    read_state,
    tidy,
    whole_state,
)
from treegraft.runs.record import RunFolder, free_name, read_metrics, runs_beside
from treegraft.runs.resume_inputs import choose_checkpoint, refuse_changes, refuse_other_settings
from treegraft.runs.trust import CHECKPOINT, RUN, key_problem, mark, require_trust
from treegraft.settings.config import Config, settings_with
from treegraft.settings.load import config_json, differences, load_config
from treegraft.settings.objects import with_objects
from treegraft.settings.table import with_choices, with_value

Source = Config | Mapping[str, Any] | str | Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known before any work begins. Nothing has been written yet."""

    config: Config
    path: Path
    """Where the run folder is, or will be; with a number at its end where the user gave no name and
    another run takes this one first."""
    folder: RunFolder | None
    """The folder to go on in; None for a new run."""
    checkpoint: Path | None
    """The checkpoint to go on from; None starts at the beginning."""
    state: TrainState
    passed: Sequence[Path] = ()
    """Newer checkpoints that cannot be gone on from."""
    notices: Sequence[str] = ()
    """What the user is told when the run begins, one sentence each."""
    given: GivenObjects = field(default_factory=GivenObjects)
    """The Python objects that the settings lead to."""
    accepts_changes: bool = False
    """Whether what lies beside the checkpoint is taken as it is, see `runs.resume_inputs`."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return (
            self.folder is not None
            and self.state.is_closed
            and bool(spent_limits(self.config, self.state))
        )

    def open_folder(self) -> RunFolder:
        """Returns the run folder: a new one, or the existing one cut to the state to go on from."""
        if self.folder is None:
            is_named = self.config.run.name is not None
            folder = RunFolder.create(self.path, config_json(self.config), is_named=is_named)
            folder.claim()
            folder.write_objects(self.given.records)
            return folder
        # -1: without a checkpoint even the evaluation before the first update is repeated.
        update = -1 if self.checkpoint is None else self.state.update
        self.folder.cut_to(update, self.state.metrics_size, is_closed=self.state.is_closed)
        self.folder.cut_warmup(self.state.warmup_steps)
        for checkpoint in self.passed:
            leave_out(checkpoint)
        write_atomically(self.path / "config.json", config_json(self.config))
        mark(self.path, RUN)
        return self.folder

    def give_up(self, folder: RunFolder | None) -> None:
        """Leaves the folder as it was: removes a folder just made, and releases one to go on in."""
        if folder is not None:
            folder.release()
            if self.folder is None:
                shutil.rmtree(folder.path)

    def latest_metrics(self) -> dict[str, float]:
        """Returns the latest value of every metric logged so far."""
        latest: dict[str, float] = {}
        for line in self.history():
            latest = update_latest(latest, line)
        latest.pop("update", None)
        return latest

    def history(self) -> list[dict[str, float]]:
        """Returns the lines of metrics logged so far; after `open_folder`, those up to the state to
        go on from."""
        # A run that was stopped before its first line has no metrics.jsonl yet.
        return read_metrics(self.path) if self.folder and self.state.metrics_size else []


def spent_limits(config: Config, state: TrainState) -> list[str]:
    """Returns the limits of [run] that are reached; with any of them the run is over."""
    over = [name for name, share in config.run.spent(state.spent).items() if share >= 1.0]
    return over + ["num_updates"] * (state.update >= config.run.num_updates)


def update_latest(latest: Mapping[str, float], line: Mapping[str, float]) -> dict[str, float]:
    """Returns the latest value of every metric after a further line; warnings that do not stand any
    more are left out."""
    kept = {key: value for key, value in latest.items() if not key.startswith("health/")}
    return {**kept, **line}


def new_start(config: Source, recipe: str | None, given: GivenObjects | None = None) -> Start:
    """Returns the start of a new run.

    Args:
        given: the Python objects that the settings lead to; None for none.

    Raises:
        SettingError: neither settings nor a recipe.
        CheckpointError: the run folder exists.
    """
    if config is None:
        raise SettingError(
            "train: neither settings nor a run to resume were given; name a recipe or a run"
            " folder.",
            code="nothing-to-train",
        )
    settings = load_config(config)
    source = recipe or (config if isinstance(config, str | Path) else "run")
    stem = Path(source).stem
    name = settings.run.name or f"{stem}-seed{settings.run.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path(settings.run.dir).expanduser() / name
    if settings.run.name is None:
        # Two runs that start within one second would have one name.
        path = free_name(path)
    RunFolder.refuse_unusable(path)
    return Start(
        config=settings,
        path=path,
        folder=None,
        checkpoint=None,
        state=TrainState.fresh(),
        notices=[*filter(None, [key_problem()])],
        given=given or GivenObjects(),
    )


def resumed_start(
    run_dir: Path,
    config: Source,
    *,
    accepts_changes: bool = False,
    given: GivenObjects | None = None,
) -> Start:
    """Returns where a run goes on: at its latest checkpoint, or at its beginning where it has none.

    Args:
        config: the settings it was started with; only those declared as resumable may differ. None
            takes its own.
        accepts_changes: go on although metrics, evaluations or the buffer have changed since the
            checkpoint was written, and from an earlier one where the latest is damaged or has lost
            its metrics.
        given: the Python objects that the settings lead to; None for none.

    Raises:
        SettingError: the run was begun with Python objects, and one of them is missing.
        CheckpointError: no run folder, a damaged checkpoint, other settings, or something else that
            has changed.
    """
    own = own_config(run_dir)
    settings = own if config is None else load_config(config)
    # The folder is named already; a recipe need not repeat what was typed for the first start.
    if settings.run.name is None:
        settings = with_value(settings, "run.name", own.run.name)
    # Chosen when the run began; on another machine the choice could be another.
    settings = with_choices(settings, own)
    may_change = settings_with("resumable")
    refused = [one for one in differences(own, settings) if not one.startswith(may_change)]
    if refused:
        named = ", ".join(f"[{one[:-1]}]" if one.endswith(".") else one for one in may_change)
        raise CheckpointError(
            f"run folder '{run_dir}' was started with other settings: {'; '.join(refused)}. A"
            f" resumed run may change {named} only; leave the rest as it was, or start a new run.",
            code="resumed-other-settings",
        )
    folder, given = RunFolder.open(run_dir), given or GivenObjects()
    changed = _changed_objects(folder.read_objects(), given, str(run_dir))
    # Before anything is read or tidied: another process may be writing a checkpoint.
    folder.claim()
    try:
        tidy(folder.checkpoints_dir)
        chosen = choose_checkpoint(run_dir, folder.checkpoints_dir, accepts=accepts_changes)
        checkpoint, state = chosen.checkpoint, chosen.state
        notices = [*changed, *chosen.notices, *_of_the_beginning(folder, checkpoint)]
        if checkpoint is not None:
            require_trust(checkpoint, CHECKPOINT)
            refuse_other_settings(run_dir, own, checkpoint)
            notices += refuse_changes(run_dir, state, checkpoint, accepts=accepts_changes)
            notices += _damaged_results(folder, state.update, settings)
        if settings.run.num_updates < state.update:
            raise CheckpointError(
                f"run folder '{run_dir}' has done {state.update} updates; run.num_updates is"
                f" {settings.run.num_updates}, expected at least {state.update}.",
                code="updates-done",
            )
    except BaseException as error:
        folder.release()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"run folder '{run_dir}' cannot be worked in ({storage_fault(error) or error}).",
                code="run-unwritable",
            ) from error
        raise
    return Start(
        config=settings,
        path=folder.path,
        folder=folder,
        checkpoint=checkpoint,
        state=state,
        passed=chosen.passed,
        notices=notices,
        accepts_changes=accepts_changes,
        given=given,
    )


def _changed_objects(noted: Sequence[Record], now: GivenObjects, run_dir: str) -> list[str]:
    """Returns a sentence for each object whose source has changed since it was noted.

    Raises:
        SettingError: an object that the settings lead to was not given again.
    """
    present = {record.name: record for record in now.records}
    missing = [one for one in noted if one.name.startswith(GIVEN) and one.name not in present]
    if missing:
        asked = ", ".join(f"{one.argument}= ({one.qualified})" for one in missing)
        raise SettingError(
            f"run folder '{run_dir}' was begun with Python objects, which it cannot keep; expected"
            f" the same ones again: {asked}. Call treegraft.train(resume=..., ...) with them.",
            code="objects-not-given",
        )
    return [
        f"'{one.qualified}' ({one.argument}=) has changed since the run began, so what follows may"
        " differ from an uninterrupted run"
        for one in noted
        if one.name in present and present[one.name].checksum != one.checksum
    ]


def _of_the_beginning(folder: RunFolder, checkpoint: Path | None) -> Iterator[str]:
    """What is lost where a run without a checkpoint begins anew."""
    if os.path.lexists(folder.checkpoints_dir) and not folder.checkpoints_dir.is_dir():
        raise CheckpointError(
            f"run folder '{folder.path}': checkpoints is not a folder; expected the one that"
            " `treegraft train` made. Put it back.",
            code="checkpoints-no-folder",
        )
    if checkpoint is None and folder.metrics_size():
        yield (
            f"{folder.path} has no checkpoint; the run begins anew, and its metrics and trees so"
            " far are removed"
        )


def _damaged_results(folder: RunFolder, update: int, config: Config) -> Iterator[str]:
    """What a resume does not depend on, and is not as it was written."""
    has_all = config.track.record_trees and config.track.keep_trees is None
    if damaged := folder.damaged_trees(update, has_all=has_all):
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        yield (
            f"{', '.join(damaged[:3])}{more}: missing or not as written, so that what is shown of"
            " them may be wrong; the run itself does not depend on them and goes on as it was"
        )
    best = folder.checkpoints_dir / "best"
    if best.exists() and whole_state(best) is None:
        yield (
            f"{best} is damaged; the run goes on without it, and the next better evaluation"
            " replaces it"
        )


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
    require_trust(path.parent, RUN)
    # Without the overrides at first, so that an error in one of them does not blame the folder.
    try:
        load_config(path)
    except (SettingError, OSError, RecursionError) as error:
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
    checkpoint: Path | str, config: Config | None, overrides: Sequence[str]
) -> tuple[Config, Path | str]:
    """Returns settings without adapters (a checkpoint holds them merged or merges them at load),
    and where to load the model from.

    Raises:
        CheckpointError: no such checkpoint, a plain model without settings, or settings that this
            user neither wrote nor trusts.
    """
    place: Path | str = str(checkpoint)
    if not str(checkpoint).startswith("pypi:"):
        place = find_checkpoint(checkpoint)
        # A plain model has no state to check; a checkpoint of ours is checked with a recipe too.
        if config is None or (place / "treegraft").is_dir():
            read_state(place)
        if config is None:
            require_trust(place, CHECKPOINT)
            config = load_config(place / "treegraft" / "config.json", overrides)
    elif config is None:
        raise CheckpointError(
            f"'{checkpoint}' is a plain model without settings; say with --recipe what to ask it.",
            code="model-without-settings",
        )
    return with_value(config, "model.lora.rank", 0), place


def open_agent(
    checkpoint: Path | str | None, config: Config | None, overrides: Sequence[str]
) -> tuple[Config, Path | str | None]:
    """Returns what `open_checkpoint` does; without a checkpoint those of the model that
    `config` itself names, as training begins, whose place is None."""
    if checkpoint is not None:
        return open_checkpoint(checkpoint, config, overrides)
    return with_value(config or Config(), "model.lora.rank", 0), None


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
    config, model_path = open_agent(checkpoint, config, overrides)
    if objects.get("model") is not None and checkpoint is not None:
        raise SettingError(
            f"model: got one beside the checkpoint '{checkpoint}'; expected one of the two. Pass"
            " None as the checkpoint.",
            code="model-beside-checkpoint",
        )
    named = {"held_out" if name == "tasks" else name: one for name, one in objects.items()}
    config, given = with_objects(config, named, replaces=True)
    return config, model_path, given
