"""The file of a study: worlds, arms, warm-ups and buffers, checked as a whole before any work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from treegraft import SettingError
from treegraft.extras.lab.text import quoted, shown
from treegraft.parts import errors, recipe

SMOKE = "smoke"
"""Table of a recipe or a study that --smoke puts over the others."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class World(_Table):
    """A family of tasks on which arms are compared."""

    settings: dict[str, Any] = {}
    """Tables of settings, as in a recipe."""
    warmup: str | None = None
    """Name of the warm-up of its runs; None means the only one there is, "" the recipe's model."""


class Arm(_Table):
    """One method."""

    base: str | None = None
    """Name of an arm whose settings, buffer and command it has unless it names its own."""
    settings: dict[str, Any] = {}
    """Tables of settings, as in a recipe. With a warm-up of the study, [warmup] is that of a
    further imitation: it starts from the defaults and num_steps = 0."""
    command: Literal["train", "sft"] | None = None
    """"train" (default), or "sft" for imitation alone."""
    buffer: str | None = None
    """Name of the buffer that buffer.path gets; None leaves the recipe's."""
    tuning_runs: int = Field(0, ge=0)
    """Development runs by which its settings were chosen; tables mark an arm with fewer than
    another."""
    tuning_calls: float = Field(0.0, ge=0)
    """Executed tool calls of these, which tables print with its results."""
    tuning_cpu_s: float = Field(0.0, ge=0)
    """The same in CPU seconds."""

    @property
    def tuning(self) -> dict[str, float]:
        """What choosing its settings took; empty if it took nothing."""
        found = {
            "runs": self.tuning_runs,
            "calls": self.tuning_calls,
            "cpu_s": self.tuning_cpu_s,
        }
        return found if any(found.values()) else {}


class Warmup(_Table):
    """A supervised warm-up, trained once for each pair and shared by arms and worlds."""

    settings: dict[str, Any] = {}
    """Tables of settings, as in a recipe."""


class Buffer(_Table):
    """How the Step-Trace Buffer of each world and pair is made."""

    settings: dict[str, Any] = {}
    """Tables of settings, as in a recipe: those of the expert."""
    samples: int = Field(16, ge=1)
    """Attempts at each training task."""
    keep: int = Field(5, ge=1)
    """Trajectories stored of each task, the best by reward."""
    min_reward: float = 0.0
    """Only trajectories with a reward above this are stored."""
    source: str | None = None
    """Name of a buffer that this one is made from by `maker`; None means the expert's."""
    maker: str = ""
    """Import path of a function that makes it: maker(source, out, config=, seed=, checkpoint=)
    writes the file `out` and returns counts, such as {"trajectories": 40, "cpu_s": 1.5}."""
    by_warmup: bool = False
    """The maker gets the checkpoint of the run's warm-up; else None."""


class StudyFile(_Table):
    """A whole study."""

    recipe: str
    """Recipe that all runs start from: a path from the study's folder, or the name of a shipped
    one. `base = "FILE"` loads the tables of another study below those of this one."""
    title: str = ""
    """A sentence above the tables."""
    pairs: int = Field(10, ge=1)
    """Pairs: runs of all arms in all worlds with the same seeds."""
    first_seed: int = Field(100, ge=0)
    """run.seed of the runs of pair 0 (tasks, noise); pair i has this + i."""
    first_warmup_seed: int = Field(0, ge=0)
    """run.seed of the warm-ups of pair 0; pair i has this + i."""
    baseline: str | None = None
    """Arm that the others' differences are taken from; None for the first."""
    primary: str | list[str] = []
    """Arm, or arms, that are each compared with all others; none for no such tests."""
    at_calls: list[float] = []
    """Executed calls at which tables compare arms; empty means, pair by pair, the total of the arm
    that makes the fewest."""
    at_cpu_s: list[float] = []
    """The same in CPU seconds."""
    only: list[str] = []
    """Worlds and arms that are run; of the kind that none is named of, all."""
    removed: list[str] = []
    """Former arms, whose method this version lacks: tables show their runs that the file of results
    has, and none is made."""
    results: str | None = None
    """File of results, from the study's folder, with a name that ends in .jsonl; None means the
    study's own name. Where studies share one, a run that several of them need is made once."""
    keep: Literal["none", "last", "all"] = "none"
    """What stays of a run's folder once its line is written: nothing, its settings, metrics and
    last checkpoint, or everything."""
    settings: dict[str, Any] = {}
    """Tables of settings of all runs and warm-ups, as in a recipe."""
    worlds: dict[str, World] = Field(min_length=1)
    """Worlds by name."""
    arms: dict[str, Arm] = Field(min_length=1)
    """Arms by name."""
    warmups: dict[str, Warmup] = {}
    """Warm-ups by name."""
    buffers: dict[str, Buffer] = {}
    """Buffers by name."""

    @property
    def primaries(self) -> list[str]:
        """The primary arms."""
        return [self.primary] if isinstance(self.primary, str) else self.primary

    def arm(self, name: str) -> Arm:
        """Returns an arm with what its bases add."""
        own = self.arms[name]
        if own.base is None:
            return own
        # `_circles` has refused bases that lead back here.
        base = self.arm(own.base)
        # Not what tuning took: that is of each arm alone.
        given = {one: getattr(own, one) for one in own.model_fields_set}
        whole = {one: getattr(base, one) for one in ("command", "buffer")}
        settings = recipe.merged(base.settings, own.settings)
        return Arm.model_validate({**whole, **given, "settings": settings})


def read_study(path: Path, *, smoke: bool = False) -> StudyFile:
    """Returns the study of a file, with its table [smoke] put over the others on request.

    Raises:
        SettingError: no such file, unknown keys, values of the wrong type, names that the file does
            not define, or --smoke without a table for it.
    """
    data = recipe.read_based(path, "study")
    overlay = data.pop(SMOKE, None)
    study = _checked(data, path)
    if overlay is not None:
        # Also without --smoke: a study is right as a whole or not at all.
        small = _checked(recipe.merged(data, overlay), path)
        return small if smoke else study
    if smoke:
        raise SettingError(
            f"{path}: --smoke: this study has no table [{SMOKE}]; expected what differs in its"
            f" smoke test there, such as pairs = 2 and [{SMOKE}.settings.run].",
            code="no-smoke-table",
        )
    return study


def _checked(data: Mapping[str, Any], path: Path) -> StudyFile:
    try:
        # As JSON and strictly: "3" for a number is a mistake.
        study = StudyFile.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        faults = []
        for one in error.errors():
            faults.append(f"{path}: {_fault(one['type'], one['loc'], one['msg'], one['input'])}")
        text = "\n".join(faults)
        # A code of its own, as for unknown settings of a recipe.
        if any(one["type"] == "extra_forbidden" for one in error.errors()):
            raise SettingError(text, code="unknown-setting") from error
        raise SettingError(text, code="study-invalid") from error
    if faults := list(_names_wrong(study)):
        raise SettingError("\n".join(f"{path}: {fault}" for fault in faults), code="study-invalid")
    return study


_NAMED: Mapping[Any, type[_Table]] = {
    "worlds": World,
    "arms": Arm,
    "warmups": Warmup,
    "buffers": Buffer,
}


def _fault(kind: str, place: Sequence[str | int], why: str, value: Any) -> str:
    """A sentence for a fault; for a key that does not exist one with the nearest that does."""
    name = ".".join(map(str, place))
    if kind != "extra_forbidden":
        return f"'{name}': got {shown(value)}; {why}."
    model = _NAMED[place[0]] if len(place) > 1 else StudyFile
    known = [*model.model_fields, *([] if len(place) > 1 else ["base", SMOKE])]
    hint = errors.nearest(str(place[-1]), known)
    return f"unknown key '{name}'; expected one of {', '.join(known)}.{hint}"


def _names_wrong(study: StudyFile) -> Iterator[str]:
    """A sentence for each name that nothing in the file has, or that its file must not have."""
    if study.results is not None and Path(study.results).suffix != ".jsonl":
        yield (
            f"'results': got {shown(study.results)}; expected the name of a file that ends"
            " in .jsonl."
        )
    # `only` may name both kinds.
    every = {**study.worlds, **study.arms}
    used: list[tuple[str, str | None, Mapping[str, Any], str]] = []
    used += [("only", one, every, "worlds] and [arms") for one in study.only]
    used.append(("baseline", study.baseline, study.arms, "arms"))
    used += [("primary", one, study.arms, "arms") for one in study.primaries]
    for name, world in study.worlds.items():
        used.append((f"worlds.{name}.warmup", world.warmup, study.warmups, "warmups"))
        if world.warmup is None and len(study.warmups) > 1:
            yield (
                f"'worlds.{name}.warmup' is missing; expected one of {quoted(study.warmups)}, or"
                ' "" for none.'
            )
    for name, buffer in study.buffers.items():
        yield from _buffer_wrong(name, buffer)
        used.append((f"buffers.{name}.source", buffer.source, study.buffers, "buffers"))
    for name, arm in study.arms.items():
        used.append((f"arms.{name}.base", arm.base, study.arms, "arms"))
        used.append((f"arms.{name}.buffer", arm.buffer, study.buffers, "buffers"))
    for place, value, known, kind in used:
        if value and value not in known:
            there = quoted(known) or "none"
            hint = errors.nearest(value, known)
            yield f"'{place}': got {shown(value)}; [{kind}] has {there}.{hint}"
    yield from _circles("arms", "base", {name: arm.base for name, arm in study.arms.items()})
    sources = {name: buffer.source for name, buffer in study.buffers.items()}
    yield from _circles("buffers", "source", sources)


def _circles(kind: str, key: str, above: Mapping[str, str | None]) -> Iterator[str]:
    """A sentence for each name that comes back to one below it."""
    for name in above:
        seen = [name]
        base = above[name] or ""
        while base in above and base not in seen:
            seen.append(base)
            base = above[base] or ""
        if base in seen:
            yield f"'{kind}.{name}.{key}': a circle: {' -> '.join([*seen, base])}."


def _buffer_wrong(name: str, made: Buffer) -> Iterator[str]:
    """A sentence if the keys of a buffer contradict each other."""
    if (made.source is None) != (made.maker == ""):
        yield f"'buffers.{name}': got one of source and maker; expected both, or none."
    # A setting without effect is an error, as in a recipe (law 10).
    idle = made.model_fields_set & {"settings", "samples", "keep", "min_reward"}
    if made.source is not None and idle:
        yield f"'buffers.{name}.{min(idle)}' would have no effect: it is made from a buffer."
