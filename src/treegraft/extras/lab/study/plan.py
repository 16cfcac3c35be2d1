"""From a study's file to its runs, with the warm-ups and buffers that they need, in the order in
which they are made."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft import Config, SettingError, load_config
from treegraft.extras.lab.study.file import SMOKE, Arm, Buffer, StudyFile, read_study
from treegraft.extras.lab.text import counted, quoted
from treegraft.parts import errors, recipe, setting_rows, value_of

Tables = Mapping[str, Any]

LABELS = ("run.name", "run.dir", "run.seed")
"""Settings that tell runs of one method apart."""
_WORK = ("run.num_threads", "model.", "tasks.", "format.", "tools.", "environment.", "reward.")
# Stored warm-ups and buffers are found by these names, so an added one makes all of them anew.
_LIMITS = (
    "rollout.max_completion_tokens",
    "rollout.max_agent_steps",
    "rollout.max_tool_calls",
    "rollout.deadline_s",
)
OF_WARMUP = (*_WORK, *_LIMITS, "warmup.", "learn.")
"""Beginnings of the names of the settings that tell warm-ups apart; others cannot matter there."""
OF_EXPERT = (*_WORK, *_LIMITS, "buffer.encoder")
"""The same of buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A part of the work: Job(title="warm-up boundary, pair 0", place="warmups/boundary-0-1f3a",
    ...)"""

    title: str
    place: str
    """File or folder, in the study's folder."""
    config: Config
    fingerprint: str
    """Equal for jobs that are one and the same, such as the runs of an arm without a buffer in two
    worlds that differ in the expert alone."""
    source: BufferPlan | None = None
    """The buffer that this one is made from."""
    warmup: WarmupPlan | None = None
    """The one whose checkpoint it starts from, or its maker gets."""
    buffer: BufferPlan | None = None
    """The one that a run reads."""

    @property
    def needs(self) -> list[Job]:
        """What has to be there before it can begin."""
        return [one for one in (self.source, self.warmup, self.buffer) if one is not None]


class WarmupPlan(Job):
    """The warm-up of one pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan(Job):
    """The buffer of one world and pair."""

    own: Buffer
    """Its table in the study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Job):
    """One run, whose settings have the recipe's model and buffer; those of the study replace
    them."""

    world: str
    arm: str
    pair: int
    own: Arm
    """Its table in the study."""
    shown: Mapping[str, Any]
    """The settings in which runs of the study differ, by dotted name."""

    @property
    def key(self) -> tuple[str, str, int]:
        """World, arm and pair."""
        return self.world, self.arm, self.pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A study, ready to be run."""

    path: Path
    study: StudyFile
    runs: Sequence[RunPlan]
    """Pair after pair, so that a budget that ends early leaves complete pairs."""
    removed: Collection[tuple[str, str, int]]
    """World, arm and pair of the runs of `StudyFile.removed`."""


def make_plan(
    path: Path, *, smoke: bool = False, only: Sequence[str] = (), pairs: int | None = None
) -> Plan:
    """Returns the runs of a study; every recipe of every arm in every world is loaded and checked.

    Args:
        smoke: with the study's table [smoke].
        only: names of arms and worlds that are run; of the kind that none is named of, those that
            the study names itself, or all.
        pairs: the first so many of the study's pairs; None for all.

    Raises:
        SettingError: a fault in the study or in the settings of one of its runs.
    """
    study = read_study(path, smoke=smoke)
    if pairs is not None and pairs > study.pairs:
        raise SettingError(
            f"command line: --pairs: got {pairs}; {path} has {counted(study.pairs, 'pair')},"
            " expected at most as many.",
            code="pairs-too-many",
        )
    _refuse_unknown(only, study, path)
    planner = _Planner(study, path)
    num_pairs = study.pairs if pairs is None else pairs
    worlds = _chosen(study.worlds, only, study.only)
    arms = _chosen(study.arms, only, study.only)
    # Who names arms wants those alone.
    removed = () if any(name in study.arms for name in only) else study.removed
    runs = []
    gone = set()
    for pair in range(num_pairs):
        for world in worlds:
            for arm in arms:
                runs.append(planner.run(world, arm, pair))
            for arm in removed:
                gone.add((world, arm, pair))
    return Plan(path=path, study=study, runs=runs, removed=gone)


def _chosen(every: Iterable[str], *choices: Sequence[str]) -> list[str]:
    """The names of the first choice that has some of this kind; all where none has."""
    for only in choices:
        if found := [name for name in every if name in only]:
            return found
    return list(every)


def _refuse_unknown(only: Sequence[str], study: StudyFile, path: Path) -> None:
    known = [*study.arms, *study.worlds]
    for name in only:
        if name not in known:
            raise SettingError(
                f"command line: --only '{name}': {path} has no arm or world of this name; it has"
                f" {quoted(known)}.{errors.nearest(name, known)}",
                code="unknown-arm",
            )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Settings that all pairs share but for the seed."""

    config: Config
    told: Mapping[str, Any]
    """The values of those that are not at their default."""
    idle: Mapping[str, Sequence[str]]
    """Why settings have no effect, by their names."""

    @property
    def reads_buffer(self) -> bool:
        """Whether a buffer has an effect."""
        return "buffer.path" not in self.idle

    def told_of(self, beginnings: tuple[str, ...]) -> Mapping[str, Any]:
        """Of these, those whose names begin so."""
        return {name: value for name, value in self.told.items() if name.startswith(beginnings)}

    def seeded(self, seed: int) -> Config:
        """With a pair's seed."""
        run = self.config.run.model_copy(update={"seed": seed})
        return self.config.model_copy(update={"run": run})


class _Planner:
    def __init__(self, study: StudyFile, path: Path) -> None:
        self._study = study
        self._path = path
        self._loaded: dict[str, _Loaded] = {}
        """By what they are the settings of."""
        place = path.parent / study.recipe
        try:
            self._recipe = recipe.read_based(place if place.is_file() else Path(study.recipe))
            # The study has a smoke test of its own.
            self._recipe.pop(SMOKE, None)
        except SettingError as error:
            raise SettingError(f"{path}: 'recipe': {error}", code="study-recipe-invalid") from error
        named: set[str] = set()
        for kind in (study.worlds, study.arms, study.buffers):
            for one in kind.values():
                named |= recipe.flatten(one.settings).keys()
        # Free keys of a setting's table are no settings.
        self._differing = sorted(named & {row.name for row in setting_rows(Config())})

    def run(self, world: str, arm: str, pair: int) -> RunPlan:
        """One run with all that it needs."""
        own = self._study.arm(arm)
        warmup = self._warmup(world, pair)
        buffer = None if own.buffer is None else self._buffer(own.buffer, world, pair, warmup)
        loaded = self._of_run(world, arm, is_warm=warmup is not None)
        is_used = buffer is not None or loaded.reads_buffer
        # Whose steps are retrieved is said by the buffer's settings, not by the run's.
        source = loaded.config if buffer is None else buffer.config
        shown = {}
        for name in self._differing:
            if is_used or name not in _sources():
                shown[name] = value_of(source if name in _sources() else loaded.config, name)
        told = dict(loaded.told)
        if not is_used:
            # So a run without a buffer is one and the same in worlds that differ in the expert.
            for name in _sources():
                told.pop(name, None)
        seed = self._study.first_seed + pair
        needed = [one and one.fingerprint for one in (warmup, buffer)]
        # Names of arms and worlds are no part of it: renaming one must not make its runs anew.
        fingerprint = _hash([own.command or "train", seed, told, *needed])
        return RunPlan(
            title=f"{arm}, {world}, pair {pair}",
            place=f"runs/{slug(world, arm, pair)}-{fingerprint}",
            config=loaded.seeded(seed),
            fingerprint=fingerprint,
            world=world,
            arm=arm,
            pair=pair,
            own=own,
            warmup=warmup,
            buffer=buffer,
            shown=shown,
        )

    def _of_run(self, world: str, arm: str, *, is_warm: bool) -> _Loaded:
        where = f"arm '{arm}' in world '{world}'"
        tables = self._tables(self._study.worlds[world].settings)
        if is_warm:
            # What the recipe says there has been done by the study's warm-up.
            tables.pop("warmup", None)
        loaded = self._load(recipe.merged(tables, self._study.arm(arm).settings), where)
        self._refuse_idle(arm, loaded, where)
        return loaded

    def _tables(self, *more: Tables) -> dict[str, Any]:
        # Sums over several threads depend on their number, and workers have one each.
        own = {"run": {"num_threads": 1}}
        return recipe.merged(own, self._recipe, self._study.settings, *more)

    def _load(self, tables: Tables, where: str) -> _Loaded:
        # A study of 20 arms and 10 pairs would check the same settings ten times.
        if where in self._loaded:
            return self._loaded[where]
        try:
            config = load_config(tables)
        except SettingError as error:
            faults = []
            for line in str(error).splitlines():
                faults.append(f"{self._path}: {where}: {line.removeprefix('settings: ')}")
            raise SettingError("\n".join(faults), code="study-invalid") from error
        told = {}
        idle = {}
        for row in setting_rows(config):
            if row.name in LABELS:
                continue
            # Without those at their default, so that settings of later versions change nothing.
            if not row.is_default:
                told[row.name] = row.value
            if row.idle:
                idle[row.name] = row.idle
        # One by one, as in stored lines of results.
        for name, value in told.pop("health", {}).items():
            told[f"health.{name}"] = value
        self._loaded[where] = _Loaded(config, told, idle)
        return self._loaded[where]

    def _refuse_idle(self, arm: str, loaded: _Loaded, where: str) -> None:
        """Refuses settings of an arm that would change nothing in its run."""
        for name in recipe.flatten(self._study.arms[arm].settings):
            for known, reasons in loaded.idle.items():
                # Below a setting are the free keys of its table.
                if f"{name}.".startswith(f"{known}."):
                    raise SettingError(
                        f"{self._path}: {where}: '{name}' would have no effect: {reasons[0]}.",
                        code="override-idle",
                    )

    def _warmup(self, world: str, pair: int) -> WarmupPlan | None:
        study = self._study
        name = study.worlds[world].warmup
        if name is None:
            name = next(iter(study.warmups), "")
        if not name:
            return None
        loaded = self._load(self._tables(study.warmups[name].settings), f"warm-up '{name}'")
        if not loaded.config.warmup.num_steps:
            raise SettingError(
                f"{self._path}: warm-up '{name}': warmup.num_steps is 0; expected at least 1,"
                f" in the recipe or in [warmups.{name}.settings.warmup].",
                code="nothing-to-imitate",
            )
        # A seed of its own, so that all arms of a pair begin with the same weights.
        seed = study.first_warmup_seed + pair
        fingerprint = _hash(["warmup", seed, loaded.told_of(OF_WARMUP)])
        return WarmupPlan(
            title=f"warm-up {name}, pair {pair}",
            place=f"warmups/{slug(name, pair)}-{fingerprint}",
            config=loaded.seeded(seed),
            fingerprint=fingerprint,
        )

    def _buffer(self, name: str, world: str, pair: int, warmup: WarmupPlan | None) -> BufferPlan:
        study = self._study
        own = study.buffers[name]
        seed = study.first_seed + pair
        source = None
        parts: list[Any]
        if own.source is None:
            tables = self._tables(study.worlds[world].settings, own.settings)
            loaded = self._load(tables, f"buffer '{name}' in world '{world}'")
            config = loaded.seeded(seed)
            # Two keys of a buffer in 0.8's development, so that its lines of results count.
            work = own.model_dump(include={"samples", "keep", "min_reward"})
            work |= {"agent": "expert", "num_tasks": None}
            parts = ["buffer", seed, loaded.told_of(OF_EXPERT), work]
        else:
            source = self._buffer(own.source, world, pair, warmup)
            config = source.config
            parts = [own.maker.rpartition(":")[2], seed, source.fingerprint]
        if own.by_warmup:
            if source is None or warmup is None:
                raise SettingError(
                    f"{self._path}: buffer '{name}' is made with the weights of a warm-up, and"
                    f" world '{world}' has none; name one there.",
                    code="warmup-missing",
                )
            # The numbers are those of options of 0.8's development.
            parts = [parts[0], source.fingerprint, warmup.fingerprint, [0.0, False]]
        fingerprint = _hash(parts)
        return BufferPlan(
            title=f"buffer {name}, {world}, pair {pair}",
            place=f"buffers/{slug(name, world, pair)}-{fingerprint}.sqlite",
            config=config,
            fingerprint=fingerprint,
            own=own,
            source=source,
            warmup=warmup if own.by_warmup else None,
        )


@functools.cache
def _sources() -> set[str]:
    """The settings that decide whose steps are retrieved."""
    return {row.name for row in setting_rows(Config()) if row.is_source}


def _hash(parts: Any) -> str:
    # Sorted, since the order of settings has changed between versions.
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def slug(*parts: str | int) -> str:
    """Returns parts of a file's name as letters, digits and "-"; it need not tell two apart."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", str(one).lower()).strip("-") for one in parts)
