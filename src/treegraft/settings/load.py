"""Reads a recipe into a `Config`, checks it as a whole, and explains it.

    config = load_config("recipes/demo.toml", ["learn.lr=1e-5", "run.name=first"])

Everything that can be known to be wrong before any work starts is refused here, one paragraph for
each fault: keys that do not exist, values of the wrong type or range, settings that contradict each
other, and overrides that would have no effect."""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from treegraft.core.errors import SettingError, nearest
from treegraft.settings.config import BUILT_IN, Config
from treegraft.settings.foreign import FOREIGN_NAMES
from treegraft.settings.idle import EVALUATION_IGNORES, IDLE_RULES
from treegraft.settings.table import Settings

COMMAND_LINE = "command line"


# --- the tree of settings -------------------------------------------------------------------------


def _table(field: FieldInfo) -> type[Settings] | None:
    """Returns the model of a field that is a table, None for a leaf."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None


def _walk(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        table = _table(field)
        if table is None:
            yield prefix + name, field
        else:
            yield from _walk(table, f"{prefix}{name}.")


@functools.cache
def known_settings() -> Mapping[str, FieldInfo]:
    """Returns every setting by its dotted name, in the order of the tree."""
    return dict(_walk(Config))


def _options(field: FieldInfo) -> tuple[Any, ...]:
    """Returns the members of a union, or the one type."""
    annotation: Any = field.annotation
    is_union = (
        isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    )
    return typing.get_args(annotation) if is_union else (annotation,)


def suggestion(name: str) -> str:
    """Returns a sentence that names the known setting nearest to the unknown `name`, or an empty
    string."""
    table, _, last = name.rpartition(".")
    leaves = list(known_settings())
    foreign = FOREIGN_NAMES.get(last)
    if foreign is not None:
        return f" What others call '{last}' is {foreign} here."
    same = [leaf for leaf in leaves if leaf.rpartition(".")[2] == last]
    if same:
        same = difflib.get_close_matches(name, same, n=1, cutoff=0.7) or same
        return f" Did you mean {' or '.join(repr(leaf) for leaf in same)}?"
    siblings = [leaf for leaf in leaves if table and leaf.startswith(f"{table}.")]
    tables = {leaf.rpartition(".")[0] for leaf in leaves}
    by_last: dict[str, str] = {}
    for leaf in leaves:
        by_last.setdefault(leaf.rpartition(".")[2], leaf)
    close = [] if table else difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)
    if close:
        return f" Did you mean '{by_last[close[0]]}'?"
    for candidates in (siblings, [*leaves, *sorted(tables)]):
        found = nearest(name, candidates)
        if found:
            return found
    found = nearest(last, by_last)
    return f" Did you mean '{by_last[found.split(chr(39))[1]]}'?" if found else ""


def _unknown(data: Mapping[str, Any], model: type[Settings], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            inner = value if isinstance(value, Mapping) else {}
            yield from [f"{prefix}{key}.{last}" for last in inner] or [prefix + key]
        elif (table := _table(field)) is not None and isinstance(value, Mapping):
            yield from _unknown(value, table, f"{prefix}{key}.")


# --- overrides ------------------------------------------------------------------------------------


def _literal(text: str, field: FieldInfo | None) -> Any:
    """Returns the value of an override: a TOML literal where it is one, otherwise the text
    itself."""
    options = _options(field) if field is not None else ()
    if types.NoneType in options and text.lower() == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"] if set(parsed) == {"value"} else text
    # `run.name=2026` and `run.name=2026-11-21` are names, although TOML reads a number and a date.
    wants_text = str in options and not any(typing.get_origin(option) is list for option in options)
    return text if wants_text and not isinstance(value, str) else value


def _put(data: dict[str, Any], name: str, value: Any) -> None:
    *tables, last = name.split(".")
    place = data
    for table in tables:
        inner = place.setdefault(table, {})
        if not isinstance(inner, dict):
            raise SettingError(
                f"{COMMAND_LINE}: '{name}' goes into '{table}', which is {inner!r} and not a table."
            )
        place = inner
    if isinstance(value, dict) and isinstance(place.get(last), dict):
        place[last] = {**place[last], **value}
    else:
        place[last] = value


def _whole_name(name: str) -> str:
    """Returns the dotted name of a setting typed by its last part alone, where only one setting has
    it."""
    same = [known for known in known_settings() if known.rpartition(".")[2] == name]
    return same[0] if len(same) == 1 and name not in Config.model_fields else name


def _apply(data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Puts overrides into `data`; returns the dotted names they set."""
    names: list[str] = []
    for override in overrides:
        name, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not all(name.split(".")):
            raise SettingError(
                f"{COMMAND_LINE}: '{override}' is no override; expected table.setting=value, such"
                " as learn.lr=1e-5."
            )
        name = _whole_name(name)
        value = _literal(text, known_settings().get(name))
        added = (
            [f"{name}.{key}" for key in value]
            if isinstance(value, dict) and name not in known_settings()
            else [name]
        )
        for one in added:
            if one in names:
                raise SettingError(
                    f"{COMMAND_LINE}: '{one}' is given twice, and only the last would count; keep"
                    " one of them."
                )
        _put(data, name, value)
        names += added
    return names


def _names_under(prefix: str, names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if f"{name}.".startswith(prefix if prefix.endswith(".") else f"{prefix}.")
    ]


def _idle(config: Config, names: Sequence[str]) -> Iterator[str]:
    for rule in IDLE_RULES:
        for name in _names_under(rule.prefix, names):
            if name != rule.besides and rule.is_idle(config):
                yield (
                    f"{COMMAND_LINE}: '{name}' would have no effect:"
                    f" {rule.reason.format(c=config)}."
                )


def refuse_ignored(overrides: Sequence[str], command: str) -> None:
    """Refuses overrides that an evaluating command takes no notice of."""
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name in known_settings() and name.startswith(EVALUATION_IGNORES):
            raise SettingError(
                f"{COMMAND_LINE}: '{name}' would have no effect: `treegraft {command}` neither"
                " trains nor branches. Leave it out, or give it to `treegraft train`."
            )


# --- settings that must fit each other ------------------------------------------------------------


def _names_wrong(config: Config) -> Iterator[str]:
    for dotted, known in BUILT_IN.items():
        table, _, last = dotted.partition(".")
        value = getattr(getattr(config, table), last)
        for name in [value] if isinstance(value, str) else value:
            module, _, attribute = name.partition(":")
            if name not in known and not (module and attribute):
                yield (
                    f"{dotted}: got '{name}', expected one of {', '.join(known)}, or an import path"
                    f" 'package.module:name'.{nearest(name, known)}"
                )
        if not isinstance(value, str) and len(set(value)) < len(value):
            yield f"{dotted}: got {value}, expected each name once."


def _model_wrong(config: Config) -> Iterator[str]:
    tiny = config.model.tiny
    if config.model.path != "tiny":
        return
    if config.format.kind == "chat":
        yield (
            "format.kind: got 'chat', but the \"tiny\" model has no chat template; name a real"
            " model, or take 'tags'."
        )
    if tiny.num_heads % tiny.num_kv_heads:
        yield (
            f"model.tiny.num_kv_heads: got {tiny.num_kv_heads}, expected a divisor of num_heads ="
            f" {tiny.num_heads}."
        )
    if tiny.hidden_size % (2 * tiny.num_heads):
        yield (
            f"model.tiny.hidden_size: got {tiny.hidden_size}, expected a multiple of twice"
            f" num_heads, which is {tiny.num_heads}: heads share the width, and rotary positions"
            " need an even width each."
        )
    for name in ("rollout", "eval"):
        limit = getattr(config, name).max_completion_tokens
        if limit is not None and limit >= tiny.max_context:
            yield (
                f"{name}.max_completion_tokens: got {limit}, expected less than"
                f" model.tiny.max_context, which is {tiny.max_context} and has to hold the prompt"
                " too."
            )


def _tasks_wrong(config: Config) -> Iterator[str]:
    hops = config.tasks.search_world.hops
    if not hops or not all(1 <= n <= 5 for n in hops):
        yield (
            f"tasks.search_world.hops: got {hops}, expected one or more lengths from 1 to 5, such"
            " as [1, 2, 3]."
        )
    if (
        config.tasks.kind in ("arithmetic", "dataset")
        and not (config.tools.use or config.tools.mcp or config.environment.kind)
        and config.rollout.max_tool_calls > 0
    ):
        yield (
            f"tools.use: got no tool, and tasks of kind '{config.tasks.kind}' bring none, so the"
            ' agent could call nothing. Name one, such as tools.use = ["python"], or say that it'
            " has none: rollout.max_tool_calls = 0."
        )
    if config.tools.replay and not (config.tools.cache and config.tools.cache_path):
        yield (
            "tools.replay: answers come from tools.cache_path alone; name the file, and leave"
            " tools.cache on."
        )
    if not config.reward.funcs:
        yield "reward.funcs: got none, expected at least one, such as exact_match."
    yield from _mcp_wrong(config)
    weights = config.reward.weights
    if weights is not None and len(weights) != len(config.reward.funcs):
        yield (
            f"reward.weights: got {len(weights)} ({weights}), expected one for each of"
            f" reward.funcs, which has {len(config.reward.funcs)} ({config.reward.funcs})."
        )


def _mcp_wrong(config: Config) -> Iterator[str]:
    servers = config.tools.mcp
    names = [server.name for server in servers]
    if len(set(names)) < len(names):
        yield f"tools.mcp: got servers named {names}, expected each name once."
    for server in servers:
        if bool(server.command) == bool(server.url):
            both = "both" if server.url else "neither"
            yield (
                f"tools.mcp: server '{server.name}' has {both} of command and url; expected one of"
                " them."
            )
        unused = (
            "token_env"
            if server.command and server.token_env
            else "env"
            if server.url and server.env
            else ""
        )
        if unused:
            kind = "command" if server.command else "url"
            yield f"tools.mcp: server '{server.name}': {unused} would have no effect beside {kind}."


def _run_wrong(config: Config) -> Iterator[str]:
    name = config.run.name
    if name is not None and (name in ("", ".", "..") or set(name) & set("/\\\0")):
        yield (
            f"run.name: got {name!r}, expected the name of one folder; run.dir says where it is"
            " made."
        )
    yield from _explore_wrong(config)
    if config.explore.num_leaves > config.engine.max_rows:
        yield (
            f"explore.num_leaves: got {config.explore.num_leaves}, expected at most"
            f" engine.max_rows, which is {config.engine.max_rows}, so that the leaves of one tree"
            " fit in the engine together."
        )
    if config.learn.num_minibatches > config.run.tasks_per_update:
        yield (
            f"learn.num_minibatches: got {config.learn.num_minibatches}, expected at most"
            f" run.tasks_per_update, which is {config.run.tasks_per_update}: a mini-batch holds"
            " whole trees."
        )
    if not all(0 <= beta < 1 for beta in config.learn.betas):
        yield (
            f"learn.betas: got {list(config.learn.betas)}, expected two numbers from 0 up to, not"
            " including, 1."
        )
    evaluates = config.eval.every or config.eval.at_start or config.eval.at_end
    if evaluates and not config.eval.greedy and not config.eval.num_samples:
        yield (
            "eval: neither greedy nor samples are measured; set eval.greedy = true or"
            " eval.num_samples to at least 1."
        )
    probabilities = config.warmup.continue_prob
    if not probabilities or not all(0 <= p <= 1 for p in probabilities):
        yield (
            f"warmup.continue_prob: got {probabilities}, expected one or more probabilities from 0"
            " to 1."
        )


def _explore_wrong(config: Config) -> Iterator[str]:
    explore = config.explore
    if not explore.explorers:
        yield "explore.explorers: got none, expected at least one, such as independent."
    if "entropy" in explore.explorers and explore.entropy.num_starts > explore.num_leaves:
        yield (
            f"explore.entropy.num_starts: got {explore.entropy.num_starts}, expected at most"
            f" explore.num_leaves, which is {explore.num_leaves}: starts are leaves, and branches"
            " take what they leave."
        )
    if "entropy" in explore.explorers[1:]:
        yield (
            f"explore.explorers: got {explore.explorers}, where the first one opens all leaves and"
            ' leaves nothing to branch; expected "entropy" in the first place.'
        )
    if "graft" not in explore.explorers:
        return
    if explore.graft.num_hybrid > explore.num_leaves:
        yield (
            f"explore.graft.num_hybrid: got {explore.graft.num_hybrid}, expected at most"
            f" explore.num_leaves, which is {explore.num_leaves}."
        )
    yield from _buffer_wrong(config)


def _buffer_wrong(config: Config) -> Iterator[str]:
    settings = config.buffer
    if settings.encoder not in ("hashing", "minilm") and not any(
        sign in settings.encoder for sign in "/:~."
    ):
        known = ("hashing", "minilm")
        yield (
            f'buffer.encoder: got \'{settings.encoder}\', expected "minilm", "hashing", a folder, a'
            f' hub id, or "pypi:PACKAGE".{nearest(settings.encoder, known)}'
        )
    if settings.grow.num_best and settings.sources and "self" not in settings.sources:
        yield (
            f"buffer.sources: got {settings.sources}, but buffer.grow.num_best is"
            f" {settings.grow.num_best}: the agent's own traces would be added and never found;"
            ' add "self", or set buffer.grow.num_best to 0.'
        )
    if not settings.path:
        yield (
            'buffer.path: got none, but explore.explorers has "graft", which retrieves from a'
            " Step-Trace Buffer. Make one with `treegraft buffer build RECIPE` and name its file,"
            ' or take "expert" where the tasks have a scripted expert.'
        )


def contradictions(config: Config) -> list[str]:
    """Returns one sentence for each pair of settings that do not fit each other."""
    return [
        fault
        for check in (_names_wrong, _model_wrong, _tasks_wrong, _run_wrong)
        for fault in check(config)
    ]


# --- loading --------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("recipes")
        others = (
            [str(folder / other.name) for other in folder.glob("*.toml")] if folder.is_dir() else []
        )
        what = "is a folder" if path.is_dir() else "does not exist"
        raise SettingError(
            f"recipe '{path}' {what}; expected a .toml or .json file.{nearest(str(path), others)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SettingError(
            f"recipe '{path}' is no valid {kind}: {error}. Texts need quotes, lists square"
            " brackets."
        ) from error
    if not isinstance(data, dict):
        raise SettingError(
            f"recipe '{path}': got a {type(data).__name__}, expected tables of settings."
        )
    return data


def _type_fault(
    loc: tuple[int | str, ...], message: str, got: Any, where: Callable[[str], str]
) -> str:
    """Returns one paragraph for one fault that pydantic found."""
    name = ""
    model: type[Settings] = Config
    field: FieldInfo | None = None
    items = ""
    for part in loc:
        if field is not None and _table(field) is None:
            # Past a leaf, numbers are places in a list; texts are members of a union or, behind a
            # number, settings of a table.
            items += f"[{part}]" if isinstance(part, int) else f".{part}" if items else ""
            continue
        field = model.model_fields[str(part)]
        name = f"{name}.{part}" if name else str(part)
        model = _table(field) or model
    expected = (
        message.replace("Field required", "one more entry")
        .removeprefix("Input should be ")
        .removeprefix("Value error, ")
    )
    expected = expected.replace("an object", "a table").replace("a valid array", "a list")
    fault = (
        f"{where(name)}: setting '{name}{items}': got {got!r}, expected"
        f" {expected[0].lower() + expected[1:]}."
    )
    if field is not None and field.description:
        fault += f" It means: {' '.join(field.description.split())}"
    if isinstance(got, str) and got.startswith("["):
        fault += (
            " The shell takes the quotes of texts in a list away unless the whole is quoted:"
            f" '{name}=[\"...\"]'."
        )
    return fault


def _validate(data: Mapping[str, Any], where: Callable[[str], str]) -> Config:
    unknown = list(_unknown(data, Config))
    if unknown:
        raise SettingError(
            "\n".join(
                f"{where(name)}: unknown setting '{name}'.{suggestion(name)}" for name in unknown
            )
        )
    try:
        # Through JSON, where strict types and lists for tuples go together; `default` turns dates
        # into texts.
        return Config.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        faults: dict[str, str] = {}
        for found in error.errors():
            fault = _type_fault(found["loc"], found["msg"], found["input"], where)
            # Members of a union fail one by one; the last, a list, is the general case.
            faults[fault.partition(": got ")[0]] = fault
        raise SettingError("\n".join(faults.values())) from error


def load_config(
    source: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()
) -> Config:
    """Returns the settings of `source` with `overrides` applied, checked as a whole.

    Args:
        source: a `Config`, nested tables, or the path of a recipe (.toml) or of a resolved
            config.json.
        overrides: each "table.setting=value", the value a TOML literal or else a text; "none" for
            None.
    """
    data: dict[str, Any]
    if isinstance(source, Config):
        origin, data = "settings", source.model_dump(mode="json")
    elif isinstance(source, Mapping):
        origin, data = "settings", json.loads(json.dumps(source, default=str))
    else:
        origin, data = str(source), _read(Path(source))
    names = _apply(data, overrides)

    def where(name: str) -> str:
        return (
            COMMAND_LINE if any(f"{name}.".startswith(f"{typed}.") for typed in names) else origin
        )

    config = _validate(data, where)
    faults = [f"{origin}: {fault}" for fault in contradictions(config)] + list(_idle(config, names))
    if faults:
        raise SettingError("\n".join(faults))
    return config


def config_json(config: Config) -> str:
    """Returns the resolved settings as JSON that `load_config` reads back equal."""
    return json.dumps(config.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def _value(config: Config, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), config)


def differences(own: Config, other: Config) -> list[str]:
    """Returns a phrase for each setting that differs: "learn.lr was 0.1, now 0.2"."""
    pairs = ((name, _value(own, name), _value(other, name)) for name in known_settings())
    return [f"{name} was {was!r}, now {now!r}" for name, was, now in pairs if was != now]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """SettingRow(name="run.seed", value=1, is_default=False, meaning="Seed of everything: ...")"""

    name: str
    value: Any
    is_default: bool
    meaning: str


def describe(config: Config) -> list[SettingRow]:
    """Returns one row for each setting, in the order of the tree."""
    default = Config()
    rows = []
    for name, field in known_settings().items():
        value, usual = _value(config, name), _value(default, name)
        rows.append(
            SettingRow(name, value, value == usual, " ".join((field.description or "").split()))
        )
    return rows
