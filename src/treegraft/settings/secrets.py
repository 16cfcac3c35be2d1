"""Secrets that stand in settings, and would be written wherever these are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.core.addresses import public
from treegraft.settings.recipe import flatten
from treegraft.settings.table import Contradiction


def secrets_written(config: Any) -> Iterator[Contradiction]:
    """Yields a fault for each setting with an address that holds a password or a key."""
    for name, value in flatten(config.model_dump(mode="json")).items():
        if public(value) != value:
            yield Contradiction(
                (name,),
                f"{name}: an address in it holds a password or a key, which would be written into"
                " the run folder, checkpoints and trackers. Put the secret into an environment"
                " variable and write its name, such as https://user:${PASSWORD}@host/ or"
                " https://host/?key=${KEY}.",
            )
