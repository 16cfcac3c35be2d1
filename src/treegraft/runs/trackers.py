"""The trackers of a run, whose faults never end it."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.files import write_atomically
from treegraft.core.import_paths import make, pick
from treegraft.core.interfaces import Tracker
from treegraft.core.packages import is_installed, not_installed
from treegraft.core.registry import registered
from treegraft.core.text import plain
from treegraft.core.types import Tree
from treegraft.runs.health import HealthWarning, explained


@dataclass(slots=True)
class Tracked:
    """The updates that the trackers of a run already have, as `trackers.json` in its folder."""

    run_dir: Path
    id: str
    """Random name of the run in all trackers, the same after a resume."""
    updates: dict[str, int] = field(default_factory=dict)
    """The last update of each tracker by its name in the recipe."""

    @classmethod
    def of(cls, run_dir: Path) -> Tracked:
        """Returns the record in the run folder, or an empty one with a new id.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = run_dir / "trackers.json"
        if not path.exists():
            return cls(run_dir, uuid.uuid4().hex[:12])
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            updates = {str(name): int(update) for name, update in data["updates"].items()}
            return cls(run_dir, str(data["id"]), updates)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"'{path}' could not be read ({type(error).__name__}: {error}); expected what a run"
                " with trackers writes. Remove it, and the trackers begin a new run.",
                code="tracked-unreadable",
            ) from error

    def write(self) -> None:
        """Writes the file."""
        data = {"id": self.id, "updates": self.updates}
        write_atomically(self.run_dir / "trackers.json", json.dumps(data, indent=1) + "\n")

    def settings(self) -> dict[str, Any]:
        """Returns the run's resolved settings, as tables."""
        settings: dict[str, Any] = json.loads((self.run_dir / "config.json").read_text("utf-8"))
        return settings


# --- from names and callbacks to trackers ---------------------------------------------------------

Maker = Callable[[Path], Tracker]
"""Makes a tracker from the path of the run folder."""
SETTING = "track.trackers"
_METHODS = ("log", "sample", "warn", "finish", "close")


def find_trackers(names: Sequence[str]) -> dict[str, Maker]:
    """Returns the makers of a recipe's trackers by name.

    Raises:
        SettingError: an unknown name, or an extra that is not installed.
    """
    makers: dict[str, Maker] = {}
    for name in names:
        known = registered("tracker")
        found = pick(name, known, SETTING)
        if name not in known:
            makers[name] = partial(_make_own, found, name)
            continue
        module = found.facts.get("module", "")
        if module and not is_installed(module):
            raise SettingError(
                not_installed(f"{SETTING}: '{name}'", [module], found.facts["install"]),
                code="package-missing",
            )
        # Only if the recipe names it: packages such as wandb take seconds to load.
        makers[name] = found.load()
    return makers


def _make_own(found: Any, name: str, run_dir: Path) -> Tracker:
    try:
        tracker = found(run_dir)
    except TypeError as error:
        raise SettingError(
            f"{SETTING}: '{name}' could not be called with the run folder: {error}",
            code="tracker-call",
        ) from error
    checked: Tracker = make(lambda: tracker, Tracker, name, SETTING)
    return checked


def as_trackers(callbacks: Sequence[Any]) -> dict[str, Maker]:
    """Returns makers of trackers, by name, for callbacks: functions, or objects with some of a
    tracker's methods.

    Raises:
        SettingError: one is neither.
    """
    makers: dict[str, Maker] = {}
    for number, callback in enumerate(callbacks):
        has_methods = any(callable(getattr(callback, name, None)) for name in _METHODS)
        is_wrong = isinstance(callback, type) or inspect.iscoroutinefunction(callback)
        if is_wrong or not (has_methods or callable(callback)):
            raise SettingError(
                f"callbacks: entry {number} is {callback!r:.80}; expected a function of (update,"
                f" metrics), or an object with some of the methods {', '.join(_METHODS)}.",
                code="callback-invalid",
            )
        tracker = callback if has_methods else SimpleNamespace(log=callback)
        name = f"callback {getattr(callback, '__name__', type(callback).__name__)}"
        if name in makers:
            name = f"{name} {number}"
        makers[name] = partial(_given, tracker)
    return makers


def _given(tracker: Any, run_dir: Path) -> Any:
    return tracker


# --- the trackers of a run ------------------------------------------------------------------------

Entry = tuple[int, Mapping[str, float], Sequence[HealthWarning]]


@dataclass(slots=True)
class _Member:
    """One tracker."""

    name: str
    maker: Maker
    tracker: Any = None
    """None before it could be made."""
    is_failing: bool = False


class Trackers:
    """The trackers of a run.

    Each gets every update once, whether the run is resumed or not. One that fails is named in a
    sentence and tried again with each later update, with all that it has missed.
    """

    def __init__(
        self,
        makers: Mapping[str, Maker],
        run_dir: Path,
        history: Sequence[Mapping[str, float]],
        warn: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """Args:
            history: the lines of metrics logged so far; a tracker gets those that it lacks.
            warn, note: print a sentence in the terminal.

        Raises:
            SettingError: a tracker of the user's own cannot be called or lacks a method.
            CheckpointError: `trackers.json` is damaged.
        """
        self._run_dir = run_dir
        self._warn = warn
        self._note = note
        self.wants_end = False
        """Whether one has answered an update of this process with False."""
        self._entries: list[Entry] = []
        """All updates so far, for a tracker that lacks some."""
        self._members = [_Member(name, maker) for name, maker in makers.items()]
        if not self._members:
            return
        self._tracked = Tracked.of(run_dir)
        self._tracked.write()
        for line in history:
            metrics = dict(line)
            self._entries.append((int(metrics.pop("update")), metrics, ()))
        for member in self._members:
            self._try(member, self._catch_up)
        # Answers to updates of an earlier process ended that process.
        self.wants_end = False

    def sample(self, update: int, trees: Sequence[Tree]) -> None:
        """Hands over the trees of an update that is learned."""
        for member in self._members:
            if not self._has_had(member, update):
                self._try(member, lambda m: _call(m.tracker, "sample", update, trees))

    def log(
        self, update: int, metrics: Mapping[str, float], warnings: Sequence[HealthWarning]
    ) -> None:
        """Hands over the metrics of an update, and the warnings that begin with it."""
        if self._members:
            self._entries.append((update, metrics, warnings))
        for member in self._members:
            self._try(member, self._catch_up)

    def finish(self, latest: Mapping[str, float]) -> None:
        """Hands over the latest value of every metric at the end of a run that has done its
        work."""
        for member in self._members:
            # The last chance for what was missed.
            self._try(member, self._catch_up)
            self._try(member, lambda m: _call(m.tracker, "finish", latest))

    def close(self) -> None:
        """Closes them all; never raises."""
        for member in self._members:
            if member.tracker is not None:
                self._try(member, lambda m: _call(m.tracker, "close"))

    def _has_had(self, member: _Member, update: int) -> bool:
        return update <= self._tracked.updates.get(member.name, -1)

    def _catch_up(self, member: _Member) -> None:
        for update, metrics, warnings in self._entries:
            # A resumed run repeats updates; the repetitions are equal.
            if self._has_had(member, update):
                continue
            if _call(member.tracker, "log", update, metrics) is False:
                self.wants_end = True
            # Only once `log` has returned: an update that failed is sent again.
            self._tracked.updates[member.name] = update
            self._tracked.write()
            for warning in warnings:
                _call(member.tracker, "warn", update, warning.name, explained(warning, update))

    def _try(self, member: _Member, work: Callable[[_Member], None]) -> None:
        try:
            if member.tracker is None:
                member.tracker = member.maker(self._run_dir)
                if place := getattr(member.tracker, "place", ""):
                    self._note(f"{member.name}: {plain(place)}")
            work(member)
        except SettingError:
            raise
        # Whatever a tracker of others raises: no network, no login, a full disk at its side.
        except Exception as error:
            if not member.is_failing:
                text = plain(str(error).strip().partition("\n")[0], 300)
                self._warn(
                    f"tracker '{member.name}' failed ({type(error).__name__}: {text}); the run goes"
                    " on, metrics.jsonl has everything, and later updates try again"
                )
            member.is_failing = True
            return
        if member.is_failing:
            member.is_failing = False
            self._note(f"tracker '{member.name}' works again and has all updates")


def _call(tracker: Any, method: str, *arguments: Any) -> Any:
    """Calls a method that a tracker may lack."""
    found = getattr(tracker, method, None)
    return None if found is None else found(*arguments)
