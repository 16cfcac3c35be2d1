"""What a run records: trees and metrics in its folder, trackers, health, the display."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from treegraft.core.interfaces import Display
from treegraft.core.types import Status, Tree
from treegraft.runs.health import Monitor, explained
from treegraft.runs.record import RunFolder
from treegraft.runs.result import latest_of, update_latest
from treegraft.runs.trackers import Trackers, as_trackers, find_trackers
from treegraft.runs.tree_files import drop_parts, write_trees
from treegraft.settings.config import Config


class Recorder:
    """Records what happens in a run, from the opening of its folder to its end. `callbacks` are
    further trackers, or functions of an update's number and metrics.

    Raises:
        TreegraftError: a tracker that cannot be used.
    """

    def __init__(self, config: Config, display: Display, callbacks: Sequence[Any] = ()) -> None:
        self.display = display
        self.latest: dict[str, float] = {}
        """The latest value of every metric."""
        self._config = config
        self._make_trackers = find_trackers(self._config.track.trackers) | as_trackers(callbacks)

    @property
    def wants_end(self) -> bool:
        """Whether a callback has asked for the end of the run after this update."""
        return self._trackers.wants_end

    @contextmanager
    def opened(
        self, folder: RunFolder, history: Sequence[Mapping[str, float]], warnings: Iterable[str]
    ) -> Iterator[None]:
        """Holds what is written to.

        Args:
            history: the lines of metrics so far.
            warnings: what the user is told when the run begins, one sentence each.
        """
        display = self.display
        path = folder.path
        self._folder = folder
        with ExitStack() as ends:
            self._trackers = Trackers(
                self._make_trackers, path, history, display.warn, display.note
            )
            ends.callback(self._trackers.close)
            self.latest = latest_of(history)
            self._health = Monitor(self._config.health, history)
            for text in warnings:
                display.warn(text)
            title = f"{self._config.model.path} on {self._config.tasks.kind}"
            display.started(path, title, self._config.run.num_updates)
            yield

    def update(self, number: int, trees: Sequence[Tree]) -> None:
        """Records the trees of an update and shows one of them."""
        # A failed leaf is otherwise a number among many.
        num_leaves = 0
        errors = []
        for tree in trees:
            num_leaves += len(tree.leaves)
            for leaf in tree.leaves:
                if leaf.status is Status.FAILED:
                    errors.append(leaf.error)
        if errors and "failed" not in self._health.standing:
            self.display.warn(
                f"{len(errors)} of {num_leaves} trajectories failed and left their groups; the"
                f" first: {errors[0]}"
            )
        self.trees(number, trees)
        self.display.sample(trees[0])
        self._trackers.sample(number, trees)

    def trees(self, update: int, trees: Sequence[Tree], kind: str = "") -> None:
        """Writes trees if the recipe asks for it; `kind` names those of an evaluation. They come
        before the update's line of metrics, which says that they are there."""
        if self._config.track.record_trees:
            keep = self._config.track.keep_trees
            write_trees(self._folder.trees_path(update, kind), trees)
            if keep is not None:
                drop_parts(self._folder.trees_dir, update - keep)

    def metrics(self, update: int, metrics: Mapping[str, float]) -> None:
        """Writes a line of metrics, with the warnings that stand after it."""
        full = {**metrics, "policy_version": float(update)}
        found, began = self._health.take({"update": update, **full})
        # In the line, so that the viewer and a resumed run see the same warnings.
        full |= {warning.key: warning.value for warning in found}
        self._folder.append_metrics(update, full)
        self.latest = update_latest(self.latest, full)
        # After the file: a tracker that hangs must not cost the record.
        self._trackers.log(update, full, began)
        # Update 0 is the evaluation before the first update: no progress to show.
        if update:
            self.display.update(update, self._config.run.num_updates, full)
        for warning in began:
            self.display.warn(explained(warning, update))
