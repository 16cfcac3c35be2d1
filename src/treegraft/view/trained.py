"""A trained checkpoint, and what is known of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import CheckpointError
from treegraft.core.text import plain
from treegraft.runs.checkpoint import TrainState, read_state
from treegraft.runs.open import find_checkpoint
from treegraft.settings.config import Config
from treegraft.settings.explore import chosen_kinds
from treegraft.settings.load import load_config


@dataclass(frozen=True, slots=True)
class Trained:
    """A checkpoint with the settings and state of its run."""

    checkpoint: Path
    run_dir: Path | None
    """None if the checkpoint is outside its run folder."""
    config: Config
    state: TrainState

    @classmethod
    def of(cls, path: Path) -> Trained:
        """Returns the checkpoint at `path`, or the latest one of a run folder.

        Raises:
            CheckpointError: no such folder, no checkpoint in it, or a damaged one.
        """
        checkpoint = find_checkpoint(path)
        state = read_state(checkpoint)
        run_dir = checkpoint.resolve().parent.parent
        has_run = (run_dir / "config.json").is_file() and (run_dir / "metrics.jsonl").is_file()
        try:
            config = load_config(checkpoint / "treegraft" / "config.json")
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"checkpoint '{path}': its settings, treegraft/config.json, could not be read"
                f" ({error})",
                code="checkpoint-settings-unreadable",
            ) from error
        return cls(checkpoint, run_dir if has_run else None, config, state)

    @property
    def method(self) -> str:
        """The method in the field's words, as `explore.explorers` gives it."""
        if self.state.update == 0:
            return "supervised fine-tuning" if self.state.warmup_steps else "no training"
        kinds = chosen_kinds(self.config)
        words = []
        for name in self.config.explore.explorers:
            title = kinds[name].title if name in kinds else plain(name)
            words.append(title if isinstance(title, str) else title(self.config.explore))
        return " + ".join(words)
