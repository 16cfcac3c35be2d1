"""The trackers of a run, whose faults never end it."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


# --- from names and callbacks to trackers ---------------------------------------------------------

Maker = Callable[[Path], Tracker]
"""Makes a tracker from the path of the run folder."""
SETTING = "track.trackers"
_METHODS = ("log", "sample", "warn", "close")


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
        tracker: Any = callback if has_methods else SimpleNamespace(log=callback)
        name = f"callback {getattr(callback, '__name__', type(callback).__name__)}"
        if name in makers:
            name = f"{name} {number}"
        makers[name] = partial(lambda tracker, run_dir: tracker, tracker)
    return makers


# --- the trackers of a run ------------------------------------------------------------------------


class Trackers:
    """The trackers of a run.

    Each gets every update once, whether the run is resumed or not. One that fails is named in a
    sentence, and left alone until the run is resumed.
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
        self._warn = warn
        self._trackers: dict[str, Any] = {}
        """By name, without those that have failed."""
        self.wants_end = False
        """Whether one has answered an update of this process with False."""
        if not makers:
            return
        self._tracked = Tracked.of(run_dir)
        self._tracked.write()
        for name, maker in makers.items():
            with self._guarding(name):
                self._trackers[name] = maker(run_dir)
                if place := getattr(self._trackers[name], "place", ""):
                    note(f"{name}: {plain(place)}")
        for line in history:
            metrics = dict(line)
            self.log(int(metrics.pop("update")), metrics, ())
        # Answers to updates of an earlier process ended that process.
        self.wants_end = False

    def sample(self, update: int, trees: Sequence[Tree]) -> None:
        """Hands over the trees of an update that is learned."""
        for name in self._lacking(update):
            self._call(name, "sample", update, trees)

    def log(
        self, update: int, metrics: Mapping[str, float], warnings: Sequence[HealthWarning]
    ) -> None:
        """Hands over the metrics of an update, and the warnings that begin with it."""
        for name in self._lacking(update):
            if self._call(name, "log", update, metrics) is False:
                self.wants_end = True
            # Only once `log` has returned: a resumed run sends an update that failed again.
            if name in self._trackers:
                self._tracked.updates[name] = update
                self._tracked.write()
            for warning in warnings:
                self._call(name, "warn", update, warning.name, explained(warning, update))

    def close(self) -> None:
        """Closes them all; never raises."""
        for name in [*self._trackers]:
            self._call(name, "close")

    def _lacking(self, update: int) -> list[str]:
        """The trackers that have not had an update: a resumed run repeats some, which are equal."""
        return [name for name in self._trackers if update > self._tracked.updates.get(name, -1)]

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """The answer of a method, which a tracker may lack."""
        found = getattr(self._trackers.get(name), method, None)
        with self._guarding(name):
            return None if found is None else found(*arguments)

    @contextmanager
    def _guarding(self, name: str) -> Iterator[None]:
        try:
            yield
        except SettingError:
            raise
        # Whatever a tracker of others raises: no network, no login, a full disk at its side.
        except Exception as error:
            self._trackers.pop(name, None)
            text = plain(str(error).strip().partition("\n")[0], 300)
            self._warn(
                f"tracker '{name}' failed ({type(error).__name__}: {text}); the run goes on"
                " without it, metrics.jsonl has everything, and a resumed run sends what it lacks"
            )
