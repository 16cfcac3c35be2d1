"""Reads a recipe into a `Config`, checks it as a whole, and explains it.

    config = load_config("recipes/demo.toml", ["learn.lr=1e-5", "run.name=first"])

Everything that can be known to be wrong before any work starts is refused here, one paragraph for
each fault: keys that do not exist, values of the wrong type or range, settings that contradict each
other, and overrides that would have no effect."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from treegraft.core.errors import SettingError, TreegraftError
from treegraft.core.removed import instead
from treegraft.settings.config import (
    LEFT_OUT,
    Config,
    known_settings,
    settings_with,
    tables_and_settings,
)
from treegraft.settings.contradictions import contradictions
from treegraft.settings.explore import defaults_told, idle_told
from treegraft.settings.names import find_answer, find_value
from treegraft.settings.plain import (
    MAX_DEPTH,
    parse_value,
    shortened,
    shown,
)
from treegraft.settings.recipe import BASE, SMOKE, merged, read_recipe
from treegraft.settings.table import value_of
from treegraft.settings.unknown import suggestion, unknown_settings

COMMAND_LINE = "command line"


# --- overrides ------------------------------------------------------------------------------------


def _literal(text: str, annotation: Any) -> Any:
    """Returns the value of an override: a TOML literal where it is one, otherwise the text
    itself."""
    is_union = isinstance(annotation, types.UnionType)
    options = get_args(annotation) if is_union else (annotation,)
    # TOML has no word for None.
    if types.NoneType in options and text.lower() == "none":
        return None
    value = parse_value(text)
    # `run.name=2026` and `run.name=2026-11-21` are names, although TOML reads a number and a date.
    wants_text = str in options and not any(get_origin(option) is list for option in options)
    return text if wants_text and not isinstance(value, str) else value


def _put(data: dict[str, Any], name: str, value: Any) -> None:
    *tables, last = name.split(".")
    place = data
    for table in tables:
        # A value in the place of a table is refused with the types.
        if not isinstance(place.get(table), dict):
            place[table] = {}
        place = place[table]
    # Two overrides of one table go together; of a value the last counts.
    both_tables = isinstance(value, dict) and isinstance(place.get(last), dict)
    place[last] = {**place[last], **value} if both_tables else value


def _set_by(name: str, value: Any) -> Iterator[str]:
    found = tables_and_settings().get(name)
    if isinstance(value, dict) and found is not None and found.table is not None:
        for key, inner in value.items():
            yield from _set_by(f"{name}.{key}", inner)
    else:
        yield name


def _whole_name(name: str) -> str:
    """Returns the dotted name: the last part alone will do where only one setting has it."""
    same: list[str] = []
    for known, found in known_settings().items():
        # A setting that follows another of its name is not meant: the other one is.
        if known.rpartition(".")[2] == name and not found.facts.follows:
            same.append(known)
    if len(same) != 1 or name in tables_and_settings():
        return name
    # TRL's `top_p` is about training, ours about evaluation: refused as unknown, with the reason.
    return name if same[0].startswith("eval.") and find_answer(name) else same[0]


def _apply(data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Puts overrides into `data`; returns the dotted names they set."""
    names: list[str] = []
    for override in overrides:
        name, equals, text = (part.strip() for part in override.partition("="))
        # A dot too many would make a table without a name.
        if not equals or not all(name.split(".")) or name.count(".") > MAX_DEPTH:
            raise SettingError(
                f"{COMMAND_LINE}: '{shortened(override)}' is not an override; expected"
                " table.setting=value, such as learn.lr=1e-5.",
                code="override-invalid",
            )
        name = _whole_name(name)
        found = tables_and_settings().get(name)
        try:
            value = _literal(text, found.field.annotation if found else None)
        except SettingError as error:
            raise SettingError(
                f"{COMMAND_LINE}: setting '{shortened(name)}': {error}", code="override-value"
            ) from error
        for one in _set_by(name, value):
            # Silently the last would win, whatever the first was typed for.
            if one in names:
                raise SettingError(
                    f"{COMMAND_LINE}: '{shortened(one)}' is given twice, and only the last would"
                    " count; keep one of them.",
                    code="override-twice",
                )
            names.append(one)
        _put(data, name, value)
    return names


def _no_effect(name: str, reason: str) -> str:
    return f"{COMMAND_LINE}: '{name}' would have no effect: {reason}."


def _refuse(overrides: Sequence[str], ignored: tuple[str, ...], reason: str) -> None:
    for name in _apply({}, overrides):
        if name.startswith(ignored):
            raise SettingError(_no_effect(name, reason), code="override-idle")


def refuse_ignored(overrides: Sequence[str], command: str) -> None:
    """Refuses overrides that an evaluating command ignores."""
    reason = f"`treegraft {command}` neither trains nor branches; give it to `treegraft train`"
    _refuse(overrides, settings_with("ignored_by_eval"), reason)


def refuse_foreign(overrides: Sequence[str], command: str) -> None:
    """Refuses overrides that only another command reads."""
    for name in settings_with("only_for"):
        owner = tables_and_settings()[name.rstrip(".")].facts.only_for
        if owner != command:
            _refuse(overrides, (name,), f"only `treegraft {owner}` takes notice of it")


def refuse_sampling(overrides: Sequence[str], reason: str, *also: str) -> None:
    """Refuses overrides of how evaluations sample, and those named in `also`, for a `reason` that
    begins "the answer is greedy"."""
    _refuse(overrides, ("eval.temperature", "eval.top_k", "eval.top_p", *also), reason)


# --- loading --------------------------------------------------------------------------------------


def _read(path: Path, *, smoke: bool) -> dict[str, Any]:
    """Returns the settings of a recipe, or of a run's config.json, which has no smoke test."""
    data, overlay = read_recipe(path)
    if not smoke:
        return data
    if overlay is None:
        raise SettingError(
            f"{path}: --smoke: this file has no table [{SMOKE}]; expected the settings of a"
            f" recipe's smoke test there, such as [{SMOKE}.model].",
            code="no-smoke-table",
        )
    return merged(data, overlay)


def _type_fault(found: ErrorDetails, where: Callable[[str], str]) -> str:
    """Returns one paragraph for one fault that pydantic found."""
    got = found["input"]
    # Pydantic's place: tables, the setting, and what is within its value.
    name, *inner = map(str, found["loc"])
    while inner and tables_and_settings()[name].table is not None:
        name = f"{name}.{inner.pop(0)}"
    # Past a setting: places in a list, keys of free tables, and members of a union, which say
    # nothing.
    if get_origin(tables_and_settings()[name].field.annotation) not in (list, tuple, dict):
        inner = []
    items = ""
    for part in inner:
        items += f"[{part}]" if part.isdigit() else f".{part}"
    expected = re.sub("^(Input should be|Value error,|List should have) ", "", found["msg"])
    for theirs, ours in (
        ("Field required", "one more entry"),
        ("an object", "a table"),
        ("a valid array", "a list"),
        (" after validation, not 0", ""),
    ):
        expected = expected.replace(theirs, ours)
    fault = (
        f"{where(name)}: setting '{name}{items}': got {shown(got)}, expected"
        f" {expected[0].lower() + expected[1:]}."
    )
    # Only words have other names elsewhere; a number is just out of range.
    if isinstance(got, str):
        fault += instead(f"{name}.{got}") or find_value(name, got)
        if expected == "a list":
            entries = got.strip("[]").replace(" ", "").replace(",", '", "')
            fault += f' Write {name} = ["{shortened(entries)}"]; in a shell, quote the whole.'
    meaning = tables_and_settings()[name].meaning
    return f"{fault} It means: {meaning}" if meaning else fault


def _validate(data: Mapping[str, Any], where: Callable[[str], str]) -> Config:
    # Before the types, since pydantic cannot say which known name is the nearest.
    if unknown := list(unknown_settings(data)):
        lines = [
            f"{where(name)}: unknown setting '{shortened(name)}'.{suggestion(name, value)}"
            for name, value in unknown
        ]
        raise SettingError("\n".join(lines), code="unknown-setting")
    try:
        # Through JSON, where strict types and lists for tuples go together; `default` turns dates
        # into texts.
        return Config.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        by_setting: dict[str, str] = {}
        for found in error.errors():
            if not found["loc"]:
                raise SettingError(
                    f"{where('')}: a value that no setting can have: {found['msg']}.",
                    code="impossible-value",
                ) from error
            fault = _type_fault(found, where)
            # Members of a union fail one by one; the last, a list, is the general case.
            by_setting[fault.partition(": got ")[0]] = fault
        raise SettingError("\n".join(by_setting.values()), code="invalid-setting") from error


_ABSENT = object()


def _at(data: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name, `_ABSENT` without one."""
    place: Any = data
    for part in name.split("."):
        if not isinstance(place, Mapping):
            return _ABSENT
        place = place.get(part, _ABSENT)
    return place


def idle_reasons(name: str, config: Config, used: Sequence[str] = ()) -> list[str]:
    """Returns a sentence for each reason why a setting has no effect under `config`.

    Args:
        used: tables that have an effect whatever their own conditions say.
    """
    told = idle_told(config) | dict.fromkeys(used, lambda _: "")
    return list(known_settings()[name].idle_reasons(config, told))


def default_of(config: Config, name: str) -> Any:
    """Returns the default of a setting if the other settings are these."""
    told = defaults_told(config)
    if name in told:
        return told[name]
    follows = known_settings()[name].facts.default_of
    return value_of(_defaults(), name) if follows is None else follows(config)


@functools.cache
def _defaults() -> Config:
    """The default configuration; it is frozen, and slow to make."""
    return Config()


def _filled_in(data: dict[str, Any], config: Config, where: Callable[[str], str]) -> Config:
    """Returns `config`, made of `data`, with the defaults that follow other settings."""
    told = defaults_told(config)
    following: list[str] = []
    for name, known in known_settings().items():
        if (known.facts.default_of or name in told) and _at(data, name) is _ABSENT:
            following.append(name)
            _put(data, name, default_of(config, name))
    # Once more: a default that follows others has limits too.
    config = _validate(data, where)
    for name in following:
        table, _, last = name.rpartition(".")
        # A later load fills it in anew, since nobody has set it.
        value_of(config, table).model_fields_set.discard(last)
    return config


@dataclass(frozen=True, slots=True)
class Default:
    """A value for a setting that the source leaves open."""

    value: Any


def _give(data: dict[str, Any], given: Mapping[str, Any], origin: str, *, replaces: bool) -> None:
    """Puts the settings of given objects into `data`."""
    for name, value in given.items():
        there = _at(data, name)
        if isinstance(value, Default):
            if there is _ABSENT:
                _put(data, name, value.value)
            continue
        if there is not _ABSENT and there != value and not replaces:
            raise SettingError(
                f"{origin}: setting '{name}' is {shown(there)}, and an argument gives"
                f" {shown(value)} for it; expected one of the two. Leave the other out.",
                settings=[name],
                code="argument-and-setting",
            )
        _put(data, name, value)


def load_config(
    source: Config | Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    smoke: bool = False,
    used: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    replaces: bool = False,
) -> Config:
    """Returns the settings of `source` with `overrides` applied, checked as a whole.

    Args:
        source: a `Config`, nested tables (over those of a recipe, with {"base": "demo", ...}), the
            path of a recipe (.toml) or of a resolved config.json, or the name of a shipped recipe.
        overrides: each "table.setting=value". The value is a TOML literal, else a text; "none"
        means None.
        smoke: whether the recipe's table [smoke] overrides the others, to run the same code in
        seconds.
        used: tables that the caller uses and a run would not, so that overrides of their settings
        have an effect.
        given: Python objects by the dotted names of their settings; see `with_objects`. None
        means none.
        replaces: whether they replace the source's own; otherwise the two must agree.
    """
    # Before the recipe: its settings may be those of the extension.
    if LEFT_OUT:
        raise SettingError("\n".join(LEFT_OUT), code="plugins-broken")
    data: dict[str, Any]
    if isinstance(source, Config):
        # Only what was given: the rest may follow from overrides.
        origin = "settings"
        data = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, Mapping):
        # A copy: overrides are put into it.
        origin = "settings"
        data = json.loads(json.dumps(source, default=str))
        if isinstance(base := data.get(BASE), str):
            del data[BASE]
            data = merged(_read(Path(base), smoke=smoke), data)
    else:
        origin = str(source)
        data = _read(Path(source), smoke=smoke)
    _give(data, given or {}, origin, replaces=replaces)
    names = _apply(data, overrides)
    typed = tuple(f"{name}." for name in names)

    def where(name: str) -> str:
        return COMMAND_LINE if f"{name}.".startswith(typed) else origin

    config = _validate(data, where)
    config = _filled_in(data, config, where)
    idle: list[str] = []
    for name in names:
        idle += [_no_effect(name, why) for why in _why_idle(name, config, used)]
    found = contradictions(config)
    # Contradictions first: they may be why the override has no effect.
    if idle and not found:
        raise SettingError("\n".join(idle), code="override-idle")
    if found:
        faults = [f"{_blamed(fault.settings, typed, origin)}: {fault.text}" for fault in found]
        raise SettingError(
            "\n".join([*faults, *idle]),
            settings=[n for one in found for n in one.settings],
            code="settings-contradict",
        )
    return config


def _why_idle(name: str, config: Config, used: Sequence[str]) -> list[str]:
    # Below a setting are the free keys of its table.
    known = next(one for one in known_settings() if f"{name}.".startswith(f"{one}."))
    return idle_reasons(known, config, used)


def _blamed(settings: Sequence[str], typed: Sequence[str], origin: str) -> str:
    """Where a fault comes from: the command line where one of its settings was typed."""
    return COMMAND_LINE if any(f"{one}.".startswith(tuple(typed)) for one in settings) else origin


def traced(error: TreegraftError, origin: str, overrides: Sequence[str]) -> str:
    """Returns the message of an error that came up after loading, preceded by the setting that it
    is about, unless it names that, and by where this was set; unchanged where it knows none."""
    # Where it knows no setting, no place in a recipe is to blame.
    if not error.settings:
        return str(error)
    typed = [f"{_whole_name(one.partition('=')[0].strip())}." for one in overrides]
    name = "" if any(one in str(error) for one in error.settings) else f"{error.settings[0]}: "
    return f"{_blamed(error.settings, typed, origin)}: {name}{error}"


def config_json(config: Config) -> str:
    """Returns the resolved settings as JSON that `load_config` reads back equal."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def differences(own: Config, other: Config) -> list[str]:
    """Returns a phrase for each setting that differs: "learn.lr was 0.1, now 0.2"."""
    found: list[str] = []
    for name in known_settings():
        was = value_of(own, name)
        now = value_of(other, name)
        if was != now:
            found.append(f"{name} was {shown(was)}, now {shown(now)}")
    return found


@dataclass(frozen=True, slots=True)
class SettingRow:
    """SettingRow(name="run.seed", value=1, default=0, meaning="Seed of everything: ...")"""

    name: str
    value: Any
    default: Any
    """Its value where nothing names it, under these other settings."""
    meaning: str
    idle: tuple[str, ...] = ()
    """A sentence for each reason why it has no effect under these settings."""
    is_source: bool = False
    """Whether it decides whose steps are retrieved."""

    @property
    def is_default(self) -> bool:
        """Whether it has its default."""
        return bool(self.value == self.default)


def setting_rows(config: Config) -> list[SettingRow]:
    """Returns one row for each setting, in the order of the tree."""
    told = idle_told(config)
    return [
        SettingRow(
            name=name,
            value=value_of(config, name),
            default=default_of(config, name),
            meaning=setting.meaning,
            idle=tuple(setting.idle_reasons(config, told)),
            is_source=setting.facts.retrieval_source,
        )
        for name, setting in known_settings().items()
    ]
