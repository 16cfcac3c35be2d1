"""How a setting is declared, once, on its field: type, default and limits, its meaning as the text
under it, and `Facts`: when it has no effect, what it does, and who may ignore or change it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from treegraft.core.errors import SettingError
from treegraft.core.registry import CORE_NAMES, registered


class Settings(BaseModel):
    """A frozen table of settings that refuses unknown keys."""

    # Frozen: parts hold a configuration and may go by it for a whole run.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        # A default outside its own limits is our mistake, found at import.
        validate_default=True,
        # JSON has neither, and config.json is read again.
        allow_inf_nan=False,
    )


_Settings = TypeVar("_Settings", bound="Settings")


def value_of(config: Settings, name: str) -> Any:
    """Returns the value of a setting by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def with_value(settings: _Settings, name: str, value: Any) -> _Settings:
    """Returns settings with another value of the one of a dotted name; it is not validated."""
    first, _, rest = name.partition(".")
    changed = with_value(getattr(settings, first), rest, value) if rest else value
    # A copy: the configuration of a checkpoint stays as it was.
    return settings.model_copy(update={first: changed})


def with_choices(config: _Settings, before: Settings | None = None) -> _Settings:
    """Returns a configuration with what it leaves to this machine, as extensions choose it.

    Args:
        before: the configuration of the run that goes on, which has chosen already; None chooses.
    """
    for name, choice in registered("choice").items():
        # A choice belongs to a machine, so a resumed run stays with the first one.
        if value_of(config, name) == "auto":
            value = value_of(before, name) if before else choice.load()(config)
            config = with_value(config, name, value)
    return config


class Contradiction(NamedTuple):
    """Settings that contradict each other, though each is right by type and range."""

    settings: tuple[str, ...]
    """Dotted names of those it is about."""
    text: str


# --- when a setting has no effect -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """A setting has an effect only where the value of another satisfies `counts`; called with the
    whole configuration, says why it has none, or ""."""

    other: str
    """Dotted name of the setting that decides; it always has an effect itself."""
    counts: Callable[[Any], bool]
    advice: str = ""
    """End of the sentence that begins with the other setting's value."""

    def __call__(self, config: Any) -> str:
        value = value_of(config, self.other)
        if self.counts(value):
            return ""
        # As a recipe would have it: 0.5, not 0.5000000000000001.
        said = f"{value:g}" if isinstance(value, float) else repr(value)
        said = {"False": "off", "''": "empty"}.get(said, said)
        return f"{self.other} is {said}{self.advice}"


def when(other: str, *values: str) -> Condition:
    """Returns the condition that another setting has one of the values. Without values the
    setting must not be empty, off or 0."""
    if not values:
        return Condition(other, bool)
    return Condition(other, values.__contains__, f"; add {other}={' or '.join(values)}")


def has(other: str, name: str, *, or_own: bool = False) -> Condition:
    """Returns the condition that a list has a name in it or, with `or_own`, an import path."""
    return Condition(
        other,
        lambda names: name in names or (or_own and any(":" in own for own in names)),
        f", without '{name}'",
    )


def takes_path(other: str) -> Condition:
    """Returns the condition that another setting is an import path."""
    return Condition(other, lambda value: ":" in value, ", which is no import path")


# --- defaults that follow other settings ---------------------------------------------------------


def by_model(*, tiny: Any, full: Any, lora: Any = None) -> Callable[[Any], Any]:
    """Returns a default that depends on the model: `tiny` for the tiny one, `lora` for a language
    model with adapters alone (None: as `full`), `full` for any other language model."""

    def default(config: Any) -> Any:
        # Random weights take larger steps and write shorter texts.
        if config.model.path == "tiny":
            return tiny
        return lora if config.model.lora.rank and lora is not None else full

    return default


# --- facts ----------------------------------------------------------------------------------------


Act = Literal["runs", "imports", "writes", "reads", "sends", "unknown", "nothing"]
"""What the value of a setting does: it "runs" a program, "imports" Python code or a template (or is
handed to such code), "writes" or "reads" files, "reads" an environment variable, "sends" to an
address or listens at one, or does "nothing". That of a value without a declaration is "unknown"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a setting, or all settings of a table, apart from type, limits and meaning."""

    seam: str = ""
    """The seam of the registry whose names it takes besides import paths; empty for a setting
    without such names."""
    idle_unless: tuple[Callable[[Any], str], ...] = ()
    """Each a `Condition`, or a function of the whole configuration that returns why the setting has
    no effect, "" where it has one. Typed on the command line without effect it is an error; in a
    recipe it is a preset."""
    resumable: bool = False
    """A resumed run may take it anew."""
    ignored_by_eval: bool = False
    """`treegraft eval` and `treegraft run` take no notice of it."""
    same_answers: bool = False
    """An evaluation of sets that differs in it may go on: its trajectories do not depend on it, or
    those that a deadline cut off are run again."""
    default_of: Callable[[Any], Any] | None = None
    """Its default as a function of the whole configuration, taken while loading; the default of the
    field is that of the default configuration."""
    only_for: str = ""
    """The one command that reads it; empty for all that train."""
    follows: bool = False
    """At None it has the value of the setting of its name elsewhere, which the bare name
    means."""
    retrieval_source: bool = False
    """Decides whose steps are retrieved."""
    acts: Act | None = None
    """What its value does. None: an import path in place of a name of `seam` imports; any other
    text of the writer's own is "unknown"; numbers and fixed words do nothing."""


def setting(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    min_length: int | None = None,
    idle_unless: Condition | tuple[Callable[[Any], str], ...] = (),
    **facts: Any,
) -> Any:
    """Returns a field with limits and `Facts`. The facts of a table apply to all its settings.

    Raises TypeError for a fact that `Facts` does not have.
    """
    field: FieldInfo = Field(default, ge=ge, gt=gt, le=le, lt=lt, min_length=min_length)
    conditions = (idle_unless,) if isinstance(idle_unless, Condition) else idle_unless
    # Pydantic leaves metadata alone that it does not know.
    field.metadata.append(Facts(idle_unless=conditions, **facts))
    return field


# --- all settings ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One setting, or one table of them."""

    name: str
    """Dotted, from the root."""
    field: FieldInfo
    above: tuple[Facts, ...]
    """Facts of the tables above it, from the root down."""

    @property
    def table(self) -> type[Settings] | None:
        """The model of a table, None for a setting."""
        kind = self.field.annotation
        return kind if _is_table(kind) else None

    @property
    def entries(self) -> type[Settings] | None:
        """The model of a table, or of each entry of a list of tables; None for another setting."""
        kinds = (self.field.annotation, *get_args(self.field.annotation))
        return next(filter(_is_table, kinds), None)

    @functools.cached_property
    def meaning(self) -> str:
        """The text under its field, on one line."""
        return " ".join((self.field.description or "").split())

    @functools.cached_property
    def facts(self) -> Facts:
        """Its own facts."""
        return next((one for one in self.field.metadata if isinstance(one, Facts)), Facts())

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it takes besides import paths, ours first, then those of extensions."""
        seam = self.facts.seam
        # Ours first, as the nearest name of two equally near ones.
        return (*CORE_NAMES.get(seam, ()), *registered(seam)) if seam else ()

    def act(self, value: Any) -> Act:
        """Returns what this value of it would do."""
        if self.facts.seam:
            named = [value] if isinstance(value, str) else value
            return "nothing" if all(one in self.names for one in named) else "imports"
        return self.facts.acts or ("unknown" if _takes_text(self.field.annotation) else "nothing")

    def idle_reasons(
        self, config: Settings, told: Mapping[str, Callable[[Any], str]]
    ) -> Iterator[str]:
        """Yields a sentence for each reason why it has no effect under `config`.

        Args:
            told: conditions that take the place of those of the settings and tables of these dotted
                names, see `ExplorerKind.idle`.
        """
        parts = self.name.split(".")
        for depth, facts in enumerate((*self.above, self.facts), 1):
            name = ".".join(parts[:depth])
            # The chosen explorer knows better than the table what it reads.
            for condition in (told[name],) if name in told else facts.idle_unless:
                # A table's condition may be one of its own settings, which has an effect always.
                decides = isinstance(condition, Condition) and condition.other == self.name
                if not decides and (reason := condition(config)):
                    yield reason


def _is_table(kind: Any) -> TypeGuard[type[Settings]]:
    return isinstance(kind, type) and issubclass(kind, Settings)


def _takes_text(kind: Any) -> bool:
    """Whether a type has values with texts of the writer's own."""
    parts = get_args(kind)
    if not parts:
        return isinstance(kind, type) and kind not in (bool, int, float, NoneType)
    return get_origin(kind) is not Literal and any(_takes_text(part) for part in parts)


def walk(
    model: type[Settings], prefix: str = "", above: tuple[Facts, ...] = ()
) -> Iterator[Setting]:
    """Yields all tables and settings below `model` in the order of the tree, each table before
    its settings."""
    for name, field in model.model_fields.items():
        found = Setting(prefix + name, field, above)
        yield found
        if found.table is not None:
            yield from walk(found.table, f"{prefix}{name}.", (*above, found.facts))


def acting(
    table: type[Settings], values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[Act, str, Any]]:
    """Yields, for each of the `values` that does something or that no setting declares, what it
    does, its dotted name and the value. Nobody has checked them; defaults are left out.

    Args:
        prefix: dotted name of `table` with a dot behind it, "" for the root.
    """
    for key, value in values.items():
        # A folder from elsewhere may be of another version: nothing is known of it.
        if key not in table.model_fields:
            yield "unknown", f"{prefix}{key!r}", value
            continue
        found = Setting(f"{prefix}{key}", table.model_fields[key], ())
        entries = value if isinstance(value, list) else [value]
        if found.entries and all(isinstance(one, Mapping) for one in entries):
            for one in entries:
                yield from acting(found.entries, one, f"{found.name}.")
        elif value != found.field.default and (act := found.act(value)) != "nothing":
            yield act, found.name, value


def holding(name: str, table: type[Settings], condition: Condition) -> type[Settings]:
    """Returns a class with one field: a table of this name, which has an effect if `condition`
    holds, and whose meaning is its docstring."""
    fields: dict[str, Any] = {name: (table, setting(table(), idle_unless=condition))}
    made: type[Settings] = create_model(
        table.__name__, __base__=Settings, __module__=table.__module__, **fields
    )
    # Where pydantic puts the text under a field, which a class without a source has not.
    made.model_fields[name].description = table.__doc__
    return made


def joined(
    table: type[Settings], place: str, more: type[Settings], home: str, above: str = ""
) -> type[Settings]:
    """Returns a table with the fields of another class in it, or in the table below it at the
    dotted name `place`, "" for `table` itself.

    Args:
        home: the module in which pickle finds the tables that are made, by their names.
        above: dotted name of `table` with a dot behind it.

    Raises:
        SettingError: a table that does not exist, or a name that is taken.
    """
    fields: dict[str, Any] = {}
    if place:
        name, _, rest = place.partition(".")
        field = table.model_fields.get(name)
        if field is None or not _is_table(field.annotation):
            raise SettingError(
                f"settings: there is no table '{above}{name}', to which {more.__module__} adds"
                " settings.",
                code="plugin-table-unknown",
            )
        grown = joined(field.annotation, rest, more, home, f"{above}{name}.")
        again = copy.copy(field)
        again.annotation = grown
        # Of the grown class, else pydantic refuses the default of its own field.
        again.default = grown.model_validate(field.default.model_dump(exclude_unset=True))
        fields[name] = (grown, again)
    else:
        for name, field in more.model_fields.items():
            if name in table.model_fields:
                raise SettingError(
                    f"settings: '{above}{name}' of {more.__module__} is there already; expected a"
                    " name of its own.",
                    code="plugin-setting-taken",
                )
            fields[name] = (field.annotation, field)
    made: type[Settings] = create_model(
        table.__name__, __base__=table, __module__=home, __doc__=table.__doc__, **fields
    )
    return made
