"""The registry of extensions: what recipes name apart from the core's own parts.

An extension is a module with a function `register(registry)`, which registers objects, or their
import paths "package.module:name", by the names that recipes use. Treegraft's own are listed in
`treegraft.extras`; those of other packages are found by the entry point group `treegraft.plugins`:

    [project.entry-points."treegraft.plugins"]
    mine = "my_package.extension"

It is loaded with the settings, before anything that needs torch, so it imports `treegraft.parts`
alone and names what is heavy by import path.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final, Literal, TypedDict, Unpack

from treegraft.core.errors import SettingError, nearest
from treegraft.core.import_paths import imported, pick
from treegraft.core.kinds import ExplorerKind
from treegraft.core.text import describe

GROUP: Final = "treegraft.plugins"
"""The group of entry points that names other people's extensions."""
SWITCH: Final = "TREEGRAFT_PLUGINS"
"""The environment variable that leaves other people's extensions out if it is "off"."""
EXTRAS: Final = "treegraft.extras"
"""The package whose `BUILT_IN` lists the modules of our own extensions; it may be missing."""

CORE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "explorer": ("independent", "entropy", "graft"),
    "advantage": ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"),
    "attribution": ("soft", "hard"),
    "objective": ("clip", "gspo", "cispo", "gppo"),
    "tasks": ("search_world", "dataset"),
    "tool": ("search",),
    "sampler": ("epochs",),
    "engine": ("native", "vllm"),
    "format": ("tags", "chat"),
    "reward": ("hierarchical", "exact_match", "f1", "math", "environment", "overlong"),
    "warning": (
        "no_tool_calls",
        "no_variance",
        "entropy_collapse",
        "truncated",
        "violated",
        "failed",
        "branch_unused",
        "graft_unused",
        "graft_untrue",
        "held_out_differs",
        "engine_drift",
        "tool_broken",
        "not_finite",
    ),
    "command": (
        "init",
        "train",
        "sft",
        "eval",
        "run",
        "compare",
        "buffer",
        "view",
        "doctor",
        "config",
    ),
}
"""Names of the core by seam, which no extension may take."""

PARTS: Final = (
    "engine",
    "format",
    "sampler",
    "search",
    "toolset",
    "tracker",
    "placement",
    "choice",
    "comparison",
    "finding",
    "agent",
)
"""Seams of `Registry.part`; the page says what each object is called with."""


class Brings(TypedDict, total=False):
    """What any entry may bring with it."""

    table: type
    """Settings of an explorer, a tool or tasks, as a class of `Settings` whose docstring is its
    meaning. The table is below [explore], [tools] or [tasks], has the entry's name, and an effect
    only if a recipe names the entry."""
    settings: Mapping[str, type | str]
    """Classes of settings, or their import paths, whose fields join the table of this dotted name,
    "" for the root. A field whose type is a table of settings is a table of its own."""
    checks: tuple[Callable[[Any], Iterable[Any]], ...]
    """Functions of the configuration that yield a `Contradiction` for settings that do not fit each
    other."""
    needs: Callable[[Any], Iterable[tuple[str, str]]]
    """A function of the configuration that yields, for each thing that needs packages which a plain
    installation lacks, its name in messages and the modules with spaces between them."""
    metrics: Mapping[str, str]
    """Keys of metrics, and what each means."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered object by its name, such as Entry("reward", "bonus", "mine:bonus")."""

    seam: str
    name: str
    value: Any
    """The object, or its import path, which is loaded on first use."""
    owner: str = ""
    """The extension that registered it, for messages."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    brings: Brings = field(default_factory=Brings)

    def load(self) -> Any:
        """Returns the object. Raises `SettingError` for an import path that leads to nothing."""
        return loaded(self.value)


def loaded(value: Any) -> Any:
    """Returns the object at an import path, any other value as it is.

    Raises:
        SettingError: the import path leads to nothing.
    """
    # Not from the working directory: extensions are installed.
    return imported(value) if isinstance(value, str) else value


class Registry:
    """The registrations of one extension. A value may be an import path "package.module:name"."""

    def __init__(self, owner: str) -> None:
        """Begins without entries; `owner` names the extension in messages."""
        self.owner = owner
        self.entries: list[Entry] = []

    def explorer(self, name: str, kind: ExplorerKind, **brings: Unpack[Brings]) -> None:
        """Registers an explorer by its name in `explore.explorers`."""
        self._add("explorer", name, kind, brings)

    def credit(
        self,
        name: str,
        value: Any,
        role: Literal["advantage", "attribution", "refinement"] = "advantage",
        **brings: Unpack[Brings],
    ) -> None:
        """Registers an `OutcomeKind` or an attribution by its name in [credit], or a refinement by
        the setting of [credit] that is its weight."""
        self._add(role, name, value, brings)

    def objective(
        self,
        name: str,
        value: Any,
        role: Literal["objective", "factor"] = "objective",
        **brings: Unpack[Brings],
    ) -> None:
        """Registers a policy-gradient objective by its name in `loss.objective`, or a factor of
        advantages by the setting of [loss] that is its weight."""
        self._add(role, name, value, brings)

    def reward(self, name: str, function: Any, **brings: Unpack[Brings]) -> None:
        """Registers a reward function by its name in `reward.funcs`."""
        self._add("reward", name, function, brings)

    def tool(self, name: str, make: Any, **brings: Unpack[Brings]) -> None:
        """Registers the maker of a tool by its name in `tools.use`."""
        self._add("tool", name, make, brings)

    def environment(self, name: str, make: Any, **brings: Unpack[Brings]) -> None:
        """Registers the maker of an environment kind by its name in `environment.kind`."""
        self._add("environment", name, make, brings)

    def tasks(
        self,
        name: str,
        make: Any,
        *,
        generated: bool = False,
        **brings: Unpack[Brings],
    ) -> None:
        """Registers the maker of a task source by its name in `tasks.kind`.

        Args:
            generated: the tasks are made one by one, so that their number is limited.
        """
        self._add("tasks", name, make, brings, generated=generated)

    def command(self, name: str, path: str, help: str, **brings: Unpack[Brings]) -> None:
        """Registers a command; "eval mine" is `treegraft eval mine`.

        Args:
            path: import path of a typer function, or of a `typer.Typer` with commands below it.
            help: one sentence for the list of commands.
        """
        self._add("command", name, path, brings, help=help)

    def part(
        self,
        seam: str,
        name: str,
        value: Any,
        facts: Mapping[str, Any] | None = None,
        **brings: Unpack[Brings],
    ) -> None:
        """Registers an object of any other seam. Raises `SettingError` for an unknown one."""
        if seam not in PARTS:
            raise SettingError(
                f"part '{name}': got seam '{seam}', expected one of {', '.join(PARTS)}."
                f"{nearest(seam, PARTS)}",
                code="plugin-seam-unknown",
            )
        self._add(seam, name, value, brings, **(facts or {}))

    def _add(self, seam: str, name: str, value: Any, brings: Brings, **facts: Any) -> None:
        self.entries.append(Entry(seam, name, value, self.owner, facts, brings))
        for key, meaning in brings.get("metrics", {}).items():
            self.entries.append(Entry("metric", key, meaning, self.owner))


# --- all extensions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extensions:
    """The entries of all extensions."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    """One sentence for each extension that was left out."""

    @functools.cached_property
    def by_seam(self) -> Mapping[str, Mapping[str, Entry]]:
        """Entries by seam and name."""
        found: dict[str, dict[str, Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.seam, {})[entry.name] = entry
        return found


@functools.cache
def extensions(listed: str = "BUILT_IN") -> Extensions:
    """Returns the extensions of this process: ours, then other people's, each loaded once.

    Args:
        listed: the list in `treegraft.extras` that names ours.
    """
    entries: list[Entry] = []
    problems: list[str] = []
    for where, owner, path in _listed(listed):
        try:
            # Each alone: a broken one leaves its own names out, and no others.
            found = _registered_by(owner, path)
            _refuse_taken(found, entries)
        # Whatever foreign code raises, an exit too, the message has to name the extension.
        except (Exception, SystemExit) as error:
            what = error if isinstance(error, SettingError) else f"it raised {describe(error)}."
            problems.append(
                f"{where}: {what} Mend it, or uninstall the extension; {SWITCH}=off leaves other"
                " people's extensions out."
            )
        else:
            entries += found
    return Extensions(tuple(entries), tuple(problems))


def registered(seam: str) -> Mapping[str, Entry]:
    """Returns the entries that extensions have registered for a seam, by name."""
    return extensions().by_seam.get(seam, {})


def registered_with_commands(seam: str) -> Mapping[str, Entry]:
    """Returns the same of commands, or of what goes with them; of our own extensions, it loads only
    those that bring a command."""
    return extensions("WITH_COMMANDS").by_seam.get(seam, {})


def weighed(seam: str, table: Any) -> list[tuple[Any, float]]:
    """Returns the objects of a seam whose names are settings of `table`, with the weights that
    these are; those of weight 0 are left out."""
    weights = [(entry, getattr(table, name, 0.0)) for name, entry in registered(seam).items()]
    return [(entry.load(), weight) for entry, weight in weights if weight]


def find(name: str, core: Mapping[str, Any], seam: str, setting: str) -> Any:
    """Returns the core's object of that name, an extension's, or the object at an import path.

    Raises:
        SettingError: as `pick`; or the extension's import path leads to nothing.
    """
    # An extension never has a name of the core, which was refused.
    found = pick(name, {**core, **registered(seam)}, setting)
    return found.load() if isinstance(found, Entry) else found


def _listed(name: str) -> Iterator[tuple[str, str, str]]:
    """The extensions that there are: each in words, its owner in messages, and its import path."""
    try:
        built_in: Iterable[str] = getattr(importlib.import_module(EXTRAS), name)
    except ModuleNotFoundError as error:
        # The core alone: the folder of extensions may be missing as a whole.
        if error.name != EXTRAS:
            raise
        built_in = ()
    for path in built_in:
        yield f"extension '{path}'", path, path
    if os.environ.get(SWITCH) != "off":
        for point in sorted(metadata.entry_points(group=GROUP), key=lambda one: one.name):
            package = "" if point.dist is None else f" of the package '{point.dist.name}'"
            # By name, so that which of two that collide is refused does not change.
            yield f"extension '{point.name}'{package}", point.name, point.value


def _registered_by(owner: str, path: str) -> list[Entry]:
    """The entries of one extension."""
    # Its own, so that nothing of an extension that fails half-way is taken.
    registry = Registry(owner)
    imported(path if ":" in path else f"{path}:register")(registry)
    return registry.entries


def _refuse_taken(entries: Iterable[Entry], others: Iterable[Entry]) -> None:
    """Refuses names that the core, another extension or the same one has taken."""
    owners = {(seam, name): "treegraft" for seam, names in CORE_NAMES.items() for name in names}
    owners |= {(one.seam, one.name): one.owner for one in others}
    for entry in entries:
        place = (entry.seam, entry.name)
        if place in owners:
            raise SettingError(
                f"it registers the {entry.seam} '{entry.name}', a name that '{owners[place]}' has"
                " taken; expected a name of its own.",
                code="plugin-name-taken",
            )
        owners[place] = entry.owner
