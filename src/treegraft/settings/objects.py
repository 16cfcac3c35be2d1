"""From Python objects, as `treegraft.train` takes them, to the settings that name them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypedDict

from treegraft.core.errors import SettingError, nearest
from treegraft.core.given import GIVEN, GivenObjects, giving
from treegraft.core.interfaces import Explorer, TaskSource, Tool
from treegraft.core.types import Tree
from treegraft.settings.config import Config
from treegraft.settings.load import Default, load_config
from treegraft.settings.tasks import MAX_TASKS

Named = Callable[..., Any] | str
"""A function or class, or the name that settings have for one."""


class Objects(TypedDict, total=False):
    """Python objects that take the place of settings; each is optional, and None counts as not
    given."""

    model: str | PathLike[str] | tuple[Any, Any] | None
    """A path or hub id, or a pair (model, tokenizer) of transformers objects, which is copied."""
    tasks: str | PathLike[str] | Iterable[object] | TaskSource | Callable[..., object] | None
    """A list of rows, a `datasets.Dataset`, a DataFrame, a file, {"train": rows, "eval": rows}, or
    a task source (an object, its class, or a function that makes one)."""
    rewards: Named | Sequence[Named] | None
    """Reward functions, with TRL's keywords or verl's, sync or async; one or a list."""
    tools: Named | Tool | Mapping[str, Any] | Sequence[Named | Tool | Mapping[str, Any]] | None
    """Functions with type hints and a docstring, tools, names, and MCP servers as dicts of their
    settings; one or a list."""
    environment: Named | None
    """A class whose public methods are the agent's tools, or a function that makes such objects."""
    agent: Named | Sequence[str] | None
    """An agent that owns its loop: `async def agent(task, client)`, or a command."""
    explorer: Named | Explorer | Sequence[Named | Explorer] | None
    """An explorer (an object, its class or a function that makes one) or a name; one or a list."""
    credit: Callable[[Tree], Tree] | str | None
    """A function from a credited tree to the same with other advantages."""
    objective: Named | None
    """A policy-gradient objective as extensions register it, or the name of one."""


Source = Config | Mapping[str, Any] | str | Path
HELD_OUT: Final = ("eval", "test", "validation")
"""Names of held-out rows in a dict of rows, by precedence."""
_MAY_BE_ASYNC = ("rewards", "tools", "agent")


def with_objects(
    source: Source,
    objects: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    replaces: bool = False,
) -> tuple[Config, GivenObjects]:
    """Returns the settings with the objects' names in place, and the objects by these names.

    Args:
        source: as `load_config` takes it; in a dict, functions and classes may replace import
            paths.
        objects: by the arguments of `treegraft.train`; None counts as not given.
        overrides: as `load_config` takes them.
        replaces: an object replaces what the settings say; otherwise the two must agree.

    Raises:
        SettingError: an object of the wrong kind, one for a setting that the source has too, or
            wrong settings.
    """
    # One set for both: an object in the dict and as an argument has one name.
    given = GivenObjects()
    if isinstance(source, Mapping):
        source = _named(source, given, "")
    settings: dict[str, Any] = {}
    for argument, value in objects.items():
        # Most often a setting in place of an argument.
        if argument not in _ARGUMENTS:
            known = Objects.__annotations__
            raise SettingError(
                f"got an argument '{argument}'; expected one of {', '.join(known)}."
                f"{nearest(argument, known)} Settings go into the first argument.",
                code="unknown-argument",
            )
        # None is "not given", as for any optional argument.
        if value is not None:
            if inspect.iscoroutinefunction(value) and argument not in _MAY_BE_ASYNC:
                fault = "got a coroutine function; expected a plain one. Leave out its async."
                raise SettingError(f"{argument}: {fault}", code="object-async")
            settings |= _ARGUMENTS[argument](value, given)
    # Checks of settings may look the objects up.
    with giving(given):
        config = load_config(source, overrides, given=settings, replaces=replaces)
    if config.model.path.startswith(GIVEN) and config.engine.kind == "vllm":
        raise SettingError(
            "model: got a pair (model, tokenizer) beside engine.kind = 'vllm', whose servers read"
            " files; expected a path. Save both with save_pretrained, and pass the folder.",
            code="model-needs-path",
        )
    return config, given


def _named(data: Any, given: GivenObjects, place: str) -> Any:
    """The same tables with names in place of functions, classes and other callables."""
    if isinstance(data, Mapping):
        return {
            key: _named(value, given, f"{place}.{key}".strip(".")) for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [_named(one, given, place) for one in data]
    return given.add(place, data) if callable(data) else data


# --- one function for each argument: (value, given) -> settings ---------------------------------


def _model(value: Any, given: GivenObjects) -> dict[str, Any]:
    if isinstance(value, str | PathLike):
        return {"model.path": str(value)}
    if not (isinstance(value, tuple) and len(value) == 2 and hasattr(value[1], "encode")):
        raise _wrong(
            "model", value, "a path, a hub id, or a pair (model, tokenizer) of transformers objects"
        )
    model = value[0]
    if not hasattr(model, "state_dict") or not hasattr(model, "config"):
        raise _wrong("model", model, "a transformers model as the first of the pair")
    # The run makes adapters itself, and would train these as weights.
    if hasattr(model, "peft_config"):
        raise SettingError(
            "model: got a model with adapters; expected the model below them. Pass"
            " model.merge_and_unload(), and set model.lora.rank for adapters of this run.",
            code="model-with-adapters",
        )
    return {"model.path": given.add("model", value, stem="model")}


def _tasks(value: Any, given: GivenObjects) -> dict[str, Any]:
    if isinstance(value, str | PathLike):
        return {"tasks.kind": "dataset", "tasks.dataset.train": [str(value)]}
    if isinstance(value, Mapping):
        return _split_tasks(value, given)
    # By its members, not its class: a protocol needs no base.
    if hasattr(value, "train_tasks") and hasattr(value, "eval_tasks"):
        if isinstance(value, type):
            return {"tasks.kind": given.add("tasks", value)}
        return {"tasks.kind": given.add("tasks", value, _maker_of(value), stem="tasks")}
    if callable(value):
        return {"tasks.kind": given.add("tasks", value)}
    return _split_tasks({"train": value}, given)


def _held_out(value: Any, given: GivenObjects) -> dict[str, Any]:
    """The tasks of an evaluation, all of which are run."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in HELD_OUT if name in value), value)
    if hasattr(value, "eval_tasks") or callable(value):
        return _tasks(value, given)
    is_file = isinstance(value, str | PathLike)
    name, num = (str(value), MAX_TASKS) if is_file else _rows("tasks", value, given, "tasks")
    return {"tasks.kind": "dataset", "tasks.dataset.eval": [name], "tasks.num_eval": num}


def _split_tasks(value: Mapping[Any, Any], given: GivenObjects) -> dict[str, Any]:
    """{"train": rows, "eval": rows}, as data sets of several splits are too."""
    held_out = [name for name in HELD_OUT if name in value]
    if "train" not in value or set(value) - {"train", *HELD_OUT}:
        raise SettingError(
            f"tasks: got a dict with {', '.join(map(repr, value)) or 'no keys'}; expected rows, or"
            " 'train' and, for held-out rows, 'eval'.",
            code="tasks-keys-invalid",
        )
    settings: dict[str, Any] = {"tasks.kind": "dataset"}
    for setting, name in (("train", "train"), ("eval", next(iter(held_out), ""))):
        if name and isinstance(value[name], str | PathLike):
            settings[f"tasks.dataset.{setting}"] = [str(value[name])]
        elif name:
            argument = "tasks" if len(value) == 1 else f"tasks['{name}']"
            spec, num = _rows(argument, value[name], given, "tasks" if name == "train" else "eval")
            settings[f"tasks.dataset.{setting}"] = [spec]
            settings[f"tasks.num_{setting}"] = Default(num)
    return settings


def _rows(argument: str, value: Any, given: GivenObjects, stem: str) -> tuple[str, int]:
    """The name of rows that are in memory, and how many there are."""
    if callable(getattr(value, "to_dict", None)) and hasattr(value, "columns"):  # pandas
        rows = value.astype(object).where(value.notna(), None).to_dict("records")
    elif isinstance(value, Sequence) or hasattr(value, "column_names"):
        rows = list(value)
    else:
        raise _wrong(
            argument,
            value,
            "a list of rows, a datasets.Dataset, a DataFrame, a file, or a task source; a generator"
            " can be read only once, so make a list of it",
        )
    # An empty list would only be found by a file's message.
    if not rows:
        raise SettingError(
            f"{argument}: got no rows; expected at least one question.", code="no-rows"
        )
    for one in rows:
        if not isinstance(one, Mapping):
            expected = 'a dict such as {"question": "1 + 1 ?", "answer": "2"}'
            raise _wrong(f"{argument}: a row", one, expected)
    return given.add(argument, value, list(map(_plain, rows)), stem=stem), len(rows)


def _plain(value: Any) -> Any:
    """The value with lists and numbers in place of those of numpy, and texts as keys."""
    value = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _rewards(value: Any, given: GivenObjects) -> dict[str, Any]:
    found = [value] if isinstance(value, str) or callable(value) else value
    if not isinstance(found, Sequence):
        raise _wrong("rewards", value, "a function, or a list of functions and names")
    return {"reward.funcs": [_callable("rewards", one, given) for one in found]}


def _tools(value: Any, given: GivenObjects) -> dict[str, Any]:
    found = [value] if isinstance(value, str | Mapping) or callable(value) else value
    if not isinstance(found, Sequence):
        raise _wrong("tools", value, "a list of functions, names, and MCP servers as dicts")
    servers: list[dict[str, Any]] = []
    names: list[str] = []
    for one in found:
        if isinstance(one, Mapping):
            servers.append(dict(one))
        else:
            names.append(_callable("tools", one, given))
    return ({"tools.use": names} if names else {}) | ({"tools.mcp": servers} if servers else {})


def _environment(value: Any, given: GivenObjects) -> dict[str, Any]:
    if isinstance(value, str):
        return {"environment.kind": value}
    # One object for all trajectories would mix up their states.
    is_one = not isinstance(value, type) and callable(getattr(value, "reset", None))
    if is_one or not callable(value):
        expected = "its class, or a function that makes one, since each trajectory has its own"
        raise _wrong("environment", value, expected)
    return {"environment.kind": given.add("environment", value)}


def _agent(value: Any, given: GivenObjects) -> dict[str, Any]:
    is_command = isinstance(value, Sequence) and not isinstance(value, str)
    return {"agent.run": list(value) if is_command else _callable("agent", value, given)}


def _explorer(value: Any, given: GivenObjects) -> dict[str, Any]:
    found = value if isinstance(value, list | tuple) else [value]
    return {"explore.explorers": [_one_explorer(one, given) for one in found]}


def _one_explorer(value: Any, given: GivenObjects) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, type) or not hasattr(value, "starts"):
        return _callable("explorer", value, given)
    return given.add("explorer", value, _maker_of(value))


def _credit(value: Any, given: GivenObjects) -> dict[str, Any]:
    return {"credit.rule": _callable("credit", value, given)}


def _objective(value: Any, given: GivenObjects) -> dict[str, Any]:
    return {"loss.objective": _callable("objective", value, given)}


_ARGUMENTS: Final[Mapping[str, Callable[[Any, GivenObjects], dict[str, Any]]]] = {
    "model": _model,
    "tasks": _tasks,
    "held_out": _held_out,
    "rewards": _rewards,
    "tools": _tools,
    "environment": _environment,
    "agent": _agent,
    "explorer": _explorer,
    "credit": _credit,
    "objective": _objective,
}


# --- helpers --------------------------------------------------------------------------------------


def _callable(argument: str, value: Any, given: GivenObjects) -> str:
    if isinstance(value, str):
        return value
    if not callable(value):
        raise _wrong(argument, value, "a function or a name")
    return given.add(argument, value)


def _maker_of(value: Any) -> Callable[..., Any]:
    """A function that makes copies of an object, so that two runs share nothing."""

    def make(**_: Any) -> Any:
        # The caller's object may be used for another run.
        return copy.deepcopy(value)

    return make


def _wrong(argument: str, value: Any, expected: str) -> SettingError:
    return SettingError(
        f"{argument}: got {_shown(value)}; expected {expected}.", code="argument-invalid"
    )


def _shown(value: Any) -> str:
    """The value of plain types, else the type's name."""
    if value is None or isinstance(value, bool | int | float | str):
        return f"{value!r:.60}"
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"
