"""`treegraft train` and `treegraft sft`: runs of a recipe, or runs gone on with."""

from __future__ import annotations

from treegraft.cli.commands import RunAsked, run_command
from treegraft.core.errors import SettingError


@run_command
def train(asked: RunAsked) -> None:
    """Train an agent with a recipe.

    Writes a run folder with metrics, trees and checkpoints.
    """
    # After the settings are checked: it loads torch, which takes seconds.
    from treegraft.train import train as run_training

    with asked.carried_out() as arguments:
        run_training(asked.config, **arguments)


@run_command
def sft(asked: RunAsked) -> None:
    """Run only the supervised warm-up of a recipe, its table [warmup].

    It imitates the tasks' expert, or with warmup.traces=FILE a buffer or a JSONL file.
    """
    if asked.config.warmup.num_steps == 0:
        raise SettingError(
            f"{asked.recipe or asked.resume}: warmup.num_steps is 0, so there is nothing to"
            " fine-tune; add warmup.num_steps=300."
        )
    from treegraft.train import sft as run_fine_tuning

    with asked.carried_out() as arguments:
        run_fine_tuning(asked.config, **arguments)
