"""Settings of the sampler by difficulty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.parts import Contradiction, Registry, Settings, setting, when

_BY_DIFFICULTY = when("sampler.kind", "difficulty")


class _SamplerFields(Settings):
    temperature: float = setting(1e-3, gt=0, idle_unless=_BY_DIFFICULTY)
    """How far from 1/2 the success rates of the dealt tasks may be (tau in the paper): a task's
    chance is proportional to exp(-|rate - 1/2| / temperature). A rate is the mean of the rollouts'
    rewards, each taken between 0 and 1."""
    encoder: str = setting("", acts="reads", idle_unless=_BY_DIFFICULTY)
    """Compares questions, so that a task's rate is predicted from those of tasks like it:
    "hashing", "minilm", a folder, a hub id or "pypi:PACKAGE"; "" compares nothing, and a task that
    was not rolled out yet has the mean rate."""
    num_references: int = setting(0, ge=0, idle_unless=_BY_DIFFICULTY)
    """Tasks, drawn evenly, that are rolled out for their rates alone (K, 256 in the paper, with 512
    tasks an update), every second update; 0 means the rates of training itself, at no
    cost."""


def _wrong(config: Any) -> Iterator[Contradiction]:
    own = config.sampler
    if own.kind == "difficulty" and own.num_references and not own.encoder:
        yield Contradiction(
            ("sampler.num_references", "sampler.encoder"),
            f"sampler.num_references: got {own.num_references}, but without sampler.encoder they"
            ' tell nothing of other tasks; take "hashing" or "minilm", or 0 references.',
        )


def register(registry: Registry) -> None:
    """Registers the sampler by difficulty."""
    registry.part(
        "sampler",
        "difficulty",
        "treegraft.extras.methods.dots.sampler:Difficulty",
        settings={"sampler": _SamplerFields},
        checks=(_wrong,),
    )
