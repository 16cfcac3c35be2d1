"""Plugins: what extends the package without changing a line of it; and from names in recipes to
objects: built-in names, those of plugins, and import paths "package.module:name".

A plugin is a module with an object `plugin`. Treegraft's own are listed in `treegraft.extras`;
those of other packages are found by the entry point group `treegraft.plugins`:

    [project.entry-points."treegraft.plugins"]
    mine = "my_package.treegraft_plugin"

A plugin is loaded with the settings, before anything that needs torch. Its module therefore imports
`treegraft.parts` alone, and names what is heavy by an import path "package.module:name".
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from importlib import metadata
from inspect import get_annotations
from pathlib import Path
from typing import Any, Final

from treegraft.core.errors import SettingError, TreegraftError, about, nearest
from treegraft.core.given import GIVEN, find_given

INTERFACE: Final = 1
"""Version of the plugin interface; it grows when plugins have to be rewritten."""
GROUP: Final = "treegraft.plugins"
"""The group of entry points that names other people's plugins."""
SWITCH: Final = "TREEGRAFT_PLUGINS"
"""The environment variable that leaves other people's plugins out, where it is "off"."""
EXTRAS: Final = "treegraft.extras"
"""The package whose `BUILT_IN` lists the modules of our own plugins; it may be missing."""


def _never(config: Any) -> bool:
    return False


def _nothing(config: Any) -> Iterable[Any]:
    return ()


def _unmade(explore: Any, facts: ExplorerFacts) -> Any:
    raise NotImplementedError("ExplorerKind.make: got none; expected a maker of an explorer.")


@dataclass(frozen=True, kw_only=True)
class ExplorerFacts:
    """Facts that an explorer gets beside its settings."""

    vocab_size: int
    """The tokenizer's."""
    penalty: float = 0.0
    """Weight of the reward "overlong", whose differences do not count as success."""


@dataclass(frozen=True, kw_only=True)
class ExplorerKind:
    """An explorer by its name in `explore.explorers`: its maker, and the facts that settings and
    checks use."""

    make: Callable[[Any, ExplorerFacts], Any] | str = _unmade
    """Called with the table [explore] and the facts of a run; returns an `Explorer`. Or its import
    path."""
    title: str | Callable[[Any], str] = ""
    """The method's name in the field, for model cards; or a function of the table [explore]."""
    leads: bool = False
    """Whether it has to stand first, since its starts and its `fill` make the method."""
    leaves: str = ""
    """The setting that counts the leaves it opens itself, such as "explore.axpo.num_starts": at
    most explore.num_leaves. Empty for none."""
    plans_starts: bool = True
    """False where the number of first-level rollouts is known only as the tree grows."""
    opens_at_once: bool = False
    """Whether `leaves` is the number of first-level rollouts that are opened at once; otherwise all
    leaves are."""
    branches: bool = False
    """Whether a step may get several children."""
    retrieves: bool = False
    """Whether it needs a Step-Trace Buffer."""
    begins_below: bool = False
    """Whether rollouts begin below stored or finished steps, so that [credit] restarts counts."""
    compares_together: bool = False
    """Whether such rollouts are compared with the whole tree by default."""
    teaches: Callable[[Any], bool] = _never
    """Whether, under a configuration, it puts tokens into trees that can be imitated."""
    stored_from: str = ""
    """The setting with the least reward of stored trajectories that it begins below."""
    tool: str = ""
    """The setting that names the tool whose calls it begins; empty for none."""
    idle: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    """For settings of others by their dotted names: why they have no effect beside it, a function
    of the configuration that returns "" where they have one."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of settings of others, by their dotted names."""


@dataclass(frozen=True, kw_only=True)
class OutcomeKind:
    """A way to compare outcomes, by its name in `credit.advantage`."""

    compare: Callable[..., Any] | str
    """Called with the trajectories of one group and `eps`; returns [trajectories] advantages. Or
    its import path."""
    finish: Callable[[Any], Any] | str | None = None
    """Takes the credited tree and returns the one that is learned from, or its import path; None
    for the same."""
    attributions: tuple[str, ...] = ()
    """The only values of credit.attribution that go with it; empty for all."""


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """A tracker by its name in `track.trackers`."""

    path: str
    """Import path of the class, which is made with the run folder."""
    module: str
    """The package that it needs."""
    install: str
    """What pip installs that package by."""


@dataclass(frozen=True, kw_only=True)
class PlacementKind:
    """A place for engines and growers, by its name in `train(placement=)`."""

    path: str
    """Import path of a function from the configuration to a context manager that holds the
    `Placement`."""
    command: str
    """The command that goes on with its runs, such as "cluster"."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `treegraft`, loaded when it is called."""

    path: str
    """Import path of a typer function, or of a `typer.Typer` with commands below it."""
    help: str
    """One sentence for the list of commands."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The parts that one extension brings, by their names in recipes. A value that is an import
    path, "package.module:name", is loaded on first use."""

    name: str
    """Its name in messages."""
    interface: int = INTERFACE
    """The version of this interface that it was written for."""
    explorers: Mapping[str, ExplorerKind] = field(default_factory=dict)
    outcomes: Mapping[str, OutcomeKind] = field(default_factory=dict)
    attributions: Mapping[str, Any] = field(default_factory=dict)
    """By names in `credit.attribution`, what steps have beside the mean of their trajectories: each
    called with the trajectories of a group, the table [credit] and the outcome's scale; returns
    advantages by (number of the trajectory, step id). Or import paths."""
    refinements: Mapping[str, Any] = field(default_factory=dict)
    """By the setting of [credit] that is their weight, 0 for none: each called with credited trees,
    whose entropies are exact, and the weight; returns the trees. Or import paths."""
    factors: Mapping[str, Any] = field(default_factory=dict)
    """By the setting of [loss] that is their weight, 0 for none: each called with the table [loss],
    [C] log-ratios, owners, advantages and positions on their paths; returns [C] factors of the
    advantages. Or import paths."""
    objectives: Mapping[str, Any] = field(default_factory=dict)
    """Policy-gradient objectives by their names in `loss.objective`: each called with the table
    [loss], [C] log-probabilities, old ones, advantages, owners and shaping; returns
    `SurrogateTerms`. Or import paths."""
    losses: Mapping[str, Any] = field(default_factory=dict)
    """Further losses, by the setting of [loss] that is their weight, 0 for none: each called in
    every optimiser step with its trees, the table [loss], the learner and its `MetricSums`; adds
    the gradient of its loss and returns the loss. Or import paths."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Reward functions or their import paths."""
    formats: Mapping[str, Any] = field(default_factory=dict)
    """Makers of formats, called as `TagsFormat` is; or their import paths."""
    engines: Mapping[str, Any] = field(default_factory=dict)
    """Makers of engines, called with tokenizer, settings and model_path; or import paths."""
    senders: Mapping[str, Any] = field(default_factory=dict)
    """Makers of ways to publish to vLLM servers, called with the longest wait in seconds; or import
    paths."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """Makers of environment kinds, called with the table [environment]; or import paths."""
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """Makers of task sources, called with the table [tasks] and the seed; or import paths."""
    generated: tuple[str, ...] = ()
    """Kinds of tasks that are made one by one, so that their number is limited."""
    toolless: tuple[str, ...] = ()
    """Kinds of tasks that bring no tools."""
    needs: Callable[[Any], Iterable[tuple[str, str]]] = _nothing
    """A function of the configuration that yields, for each thing that needs packages which a
    plain installation lacks, its name in messages and the modules with spaces between them."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Makers of tools by their names in `tools.use`, called with the table [tools]; or import
    paths."""
    toolsets: Mapping[str, Any] = field(default_factory=dict)
    """By the setting of [tools] whose value asks for them: makers of several tools, called with the
    value and `taken`, the names that others have. Or import paths."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """By settings whose value "auto" leaves a choice to this machine: each called with the
    configuration, returns the value, which a run shows, records and keeps when it is resumed. Or
    import paths."""
    searches: Mapping[str, Any] = field(default_factory=dict)
    """By names in `tools.search.kind`: makers of a `SearchBackend`, called with the table
    [tools.search]; or import paths."""
    samplers: Mapping[str, Any] = field(default_factory=dict)
    """Makers of samplers, called with tasks, seed and the table [sampler]; or import paths."""
    trackers: Mapping[str, Any] = field(default_factory=dict)
    """Each a `TrackerKind`."""
    services: Mapping[str, Any] = field(default_factory=dict)
    """By the setting whose value asks for it, None for not: what runs beside a run, called with the
    value, the run folder and a function that returns the latest metrics; has `place`, a sentence
    for the display, and `close()`. Or import paths."""
    placements: Mapping[str, PlacementKind] = field(default_factory=dict)
    warnings: Mapping[str, Any] = field(default_factory=dict)
    """Warnings about a run by name, each a `Rule`, whose limit is the setting of that name in
    [health]; or import paths."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Keys of metrics, and what each means."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """By name; "eval mine" is `treegraft eval mine`."""
    comparisons: Mapping[str, Any] = field(default_factory=dict)
    """By a file that marks folders of its kind: what `treegraft compare` calls with folders of
    which one has that file, and with whether JSON is asked for. Or import paths. Of a plugin with
    commands."""
    examinations: Mapping[str, Any] = field(default_factory=dict)
    """Sections of `treegraft doctor RECIPE` by their titles: each called with the configuration and
    a `Machine`; returns `Finding`s, in place of the core's section of that title, or None for
    nothing. Or import paths."""
    trials: Mapping[str, Any] = field(default_factory=dict)
    """Further sections, of what needs the recipe's tools and tasks: each a coroutine function,
    called with `judging.Parts`; returns `Finding`s. Or import paths."""
    findings: Callable[[Any], Iterable[Any]] = _nothing
    """A function of the configuration that yields a `Finding` for each key or address that doctor
    shows beside the data."""
    settings: Mapping[str, type | str] = field(default_factory=dict)
    """Classes of settings whose fields join the table of this dotted name ("" for the root): a
    field whose type is a table of settings is a table of the plugin's own. Or import paths."""
    checks: tuple[Callable[[Any], Iterable[Any]], ...] = ()
    """Functions of the configuration that yield a `Contradiction` for settings that do not fit each
    other."""


CORE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "explorers": ("independent", "entropy", "graft"),
    "outcomes": ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"),
    "attributions": ("soft", "hard"),
    "objectives": ("clip", "gspo", "cispo", "gppo"),
    "tasks": ("search_world", "dataset"),
    "tools": ("search",),
    "searches": ("bm25", "dense"),
    "samplers": ("epochs",),
    "engines": ("native", "vllm", "auto"),
    "senders": ("auto", "shared", "disk", "adapter", "external"),
    "formats": ("tags", "chat"),
    "rewards": ("hierarchical", "exact_match", "f1", "math", "environment", "overlong"),
    "commands": (
        *("init", "train", "sft", "eval", "run", "compare", "buffer", "view", "doctor", "config"),
    ),
}
"""Names of the core, which no plugin may take."""


KINDS: Final = tuple(
    one.name for one in fields(Plugin) if one.type.startswith("Mapping[") and one.name != "settings"
)
"""What plugins bring by name."""


@dataclass(frozen=True)
class Plugins:
    """All plugins that there are."""

    members: tuple[Plugin, ...]
    problems: tuple[str, ...]
    """One sentence for each plugin that could not be taken."""

    def offered(self, kind: str) -> Mapping[str, Any]:
        """Returns what all plugins bring of one of `KINDS`, by name."""
        return self._offered[kind]

    @functools.cached_property
    def _offered(self) -> dict[str, dict[str, Any]]:
        return {
            kind: {
                name: one for member in self.members for name, one in getattr(member, kind).items()
            }
            for kind in KINDS
        }


@functools.cache
def plugins(listed: str = "BUILT_IN") -> Plugins:
    """Returns the plugins of this process: ours, then other people's, each loaded once.

    Args:
        listed: the list in `treegraft.extras` that names ours.
    """
    members: list[Plugin] = []
    problems: list[str] = []
    for where, path in _listed(listed):
        try:
            found = _loaded(where, path)
            _refuse_twice(where, found, members)
        except SettingError as error:
            problems.append(f"{error} {SWITCH}=off leaves other people's plugins out.")
        else:
            members.append(found)
    return Plugins(tuple(members), tuple(problems))


def offered(kind: str) -> Mapping[str, Any]:
    """Returns what all plugins bring of one of `KINDS`, by name."""
    return plugins().offered(kind)


def offered_commands() -> Mapping[str, Command]:
    """Returns the commands of all plugins, by name; of ours, it loads only those that bring one."""
    return plugins("WITH_COMMANDS").offered("commands")


def offered_comparisons() -> Mapping[str, Any]:
    """Returns what `treegraft compare` calls for folders that are no runs, by the file in them; of
    ours, as `offered_commands`."""
    return plugins("WITH_COMMANDS").offered("comparisons")


def loaded(entry: Any) -> Any:
    """Returns what a plugin brings: the object at its import path where it gives one.

    Raises:
        SettingError: the import path leads to nothing.
    """
    return load_object(entry) if isinstance(entry, str) else entry


def weighed(kind: str, table: Any) -> list[tuple[Any, float]]:
    """Returns what plugins bring of a kind whose names are settings of `table`, with the weights
    that these are; those of weight 0 are left out."""
    weights = {name: getattr(table, name, 0.0) for name in offered(kind)}
    return [(loaded(offered(kind)[name]), weight) for name, weight in weights.items() if weight]


def chosen(name: str, core: Mapping[str, Any], kind: str, setting: str) -> Any:
    """Returns the core's entry of that name, what a plugin brings under it, or the object at an
    import path.

    Raises:
        SettingError: as `pick`; or the plugin's import path leads to nothing.
    """
    plugged = offered(kind)
    found = pick(name, {**core, **plugged}, setting)
    return loaded(found) if name in plugged else found


def _listed(name: str) -> Iterator[tuple[str, str]]:
    """The plugins that there are: each in words, and its import path."""
    try:
        built_in: Iterable[str] = getattr(importlib.import_module(EXTRAS), name)
    except ModuleNotFoundError as error:
        # The core alone: the folder of extensions may be missing as a whole.
        if error.name != EXTRAS:
            raise
        built_in = ()
    for path in built_in:
        yield f"plugin '{path}'", path
    if os.environ.get(SWITCH) != "off":
        for point in sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name):
            package = "" if point.dist is None else f" of the package '{point.dist.name}'"
            yield f"plugin '{point.name}'{package}", point.value


def _loaded(where: str, path: str) -> Plugin:
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{where}: it needs '{error.name}', which is not installed; run: pip install"
            f" {(error.name or '').partition('.')[0]}, or uninstall the plugin.",
            code="plugin-package-missing",
        ) from error
    # Foreign code: whatever it raises, an exit too, the message has to name the plugin.
    except (Exception, SystemExit) as error:
        raise SettingError(
            f"{where}: importing '{module}' failed: {type(error).__name__}: {error}; mend it, or"
            " uninstall the plugin.",
            code="plugin-broken",
        ) from error
    found = getattr(found, attribute or "plugin", None)
    if not isinstance(found, Plugin):
        raise SettingError(
            f"{where}: '{module}' has no object '{attribute or 'plugin'}' that is a"
            f" treegraft.parts.Plugin, but {type(found).__name__}; mend it, or uninstall the"
            " plugin.",
            code="plugin-object-invalid",
        )
    if found.interface != INTERFACE:
        raise SettingError(
            f"{where}: it was written for version {found.interface} of the plugin interface, and"
            f" this is version {INTERFACE}; take a version of the plugin, or of Treegraft, that"
            " fits the other.",
            code="plugin-version",
        )
    return found


def _refuse_twice(where: str, plugin: Plugin, others: Iterable[Plugin]) -> None:
    for kind in KINDS:
        for name in getattr(plugin, kind):
            owner = next((one.name for one in others if name in getattr(one, kind)), None)
            if name in CORE_NAMES.get(kind, ()):
                owner = "treegraft"
            if owner is not None:
                raise SettingError(
                    f"{where}: it brings '{name}' as one of its {kind}, a name that '{owner}' has"
                    " taken; expected a name of its own. Rename it, or uninstall one of the two.",
                    code="plugin-name-taken",
                )


# --- names and import paths ----------------------------------------------------------------------


def unknown_name(name: str, known: Iterable[str], setting: str) -> str:
    """Returns the sentence that refuses `name` as the value of a setting, "" where it is known or
    has the shape of an import path."""
    known = list(known)
    module, _, attribute = name.partition(":")
    if name in known or (module and attribute):
        return ""
    return (
        f"{setting}: got '{name:.99}', expected one of {', '.join(known)}, or an import path"
        f" 'package.module:name'.{nearest(name, known)}"
    )


def pick(name: str, table: Mapping[str, Any], setting: str) -> Any:
    """Returns the entry of that name in `table`, or else the object at an import path.

    Args:
        setting: dotted name of the setting, for errors.

    Raises:
        SettingError: an unknown name, with the nearest known one; an import path to nothing.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise SettingError(
            unknown_name(name, table, setting), settings=[setting], code="unknown-name"
        )
    with about(setting):
        return load_object(name)


@contextmanager
def blaming(path: str, setting: str, doing: str = "") -> Iterator[None]:
    """Turns an error of the user's code at `path` that the block runs into a `SettingError` that
    says where it was raised; the package's own errors pass.

    Args:
        doing: what the code was asked for, such as " in fill, at task 'x'".
    """
    try:
        yield
    except TreegraftError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingError(
            f"{setting}: '{path}' raised {type(error).__name__}{doing}: {error} ({last.filename},"
            f" line {last.lineno}); mend it there.",
            settings=[setting],
            code="own-code-raised",
        ) from error


def make(maker: Any, protocol: type, path: str, setting: str, **arguments: Any) -> Any:
    """Returns the object that the user's class or function at `path` makes of the arguments.

    Args:
        protocol: whose members it has to have.
        setting: dotted name of the setting, for errors.

    Raises:
        SettingError: it cannot be called so, it raises, or members are missing.
    """
    try:
        # Bound first, so that a TypeError of the user's own code is told as such.
        with suppress(ValueError):  # some built-in callables have no signature
            inspect.signature(maker).bind(**arguments)
    except TypeError as error:
        raise SettingError(
            f"{setting}: '{path}' could not be called with"
            f" {', '.join(arguments) or 'no arguments'}: {error}",
            settings=[setting],
            code="own-code-call",
        ) from error
    with blaming(path, setting):
        found = maker(**arguments)
    members = {name for base in protocol.__mro__ for name in (*vars(base), *get_annotations(base))}
    missing = sorted(
        name for name in members if not name.startswith("_") and not hasattr(found, name)
    )
    if missing:
        raise SettingError(
            f"{setting}: '{path}' gives a {type(found).__name__} without {', '.join(missing)};"
            f" expected every member of {protocol.__module__}.{protocol.__qualname__}.",
            settings=[setting],
            code="members-missing",
        )
    return found


def load_object(path: str) -> Any:
    """Returns the object at "package.module:name" (dots after the colon go into attributes), or the
    one that was given as "given:name".

    Modules in the working directory are found. Raises `SettingError` when the path has another
    shape, the module does not exist or fails to import, or the module has no such name.
    """
    if path.startswith(GIVEN):
        try:
            return find_given(path)
        except KeyError:
            raise SettingError(
                f"'{path}' is the name of a Python object that a script or notebook gave to"
                " Treegraft; got no such object here. Pass it again, for example"
                " treegraft.train(resume=..., rewards=...).",
                code="object-not-given",
            ) from None
    module_name, colon, attributes = path.partition(":")
    if colon and module_name.endswith(".py"):
        raise SettingError(
            f"'{path}' names a file; write '{Path(module_name).stem}:{attributes}', and start from"
            " the folder that holds it.",
            code="import-path-file",
        )
    if not colon or not all(
        part.isidentifier() for part in (*module_name.split("."), *attributes.split("."))
    ):
        raise SettingError(
            f"'{path}' is no import path; write 'package.module:name'.", code="import-path-invalid"
        )
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        # A console script does not see its working directory. Appended, it cannot shadow an
        # installed module.
        sys.path.append(directory)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself or a package around it, or one that it imports?
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise SettingError(
                f"'{path}': there is no module '{error.name}'; install it, or start from the folder"
                " that holds it.",
                code="import-module-missing",
            ) from error
        raise SettingError(
            f"'{path}': importing '{module_name}' needs '{error.name}', which is not installed.",
            code="import-needs-package",
        ) from error
    except Exception as error:
        raise SettingError(
            f"'{path}': importing '{module_name}' failed: {type(error).__name__}: {error}",
            code="import-failed",
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise SettingError(
                f"'{path}': no '{attribute}' in '{module_name}'.{nearest(attribute, dir(found))}",
                code="import-name-missing",
            )
        found = getattr(found, attribute)
    return found
