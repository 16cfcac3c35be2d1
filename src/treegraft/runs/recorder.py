"""What a run records: trees and metrics in its folder, trackers, health, the display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


class LastingDisplay:
    """A display whose end is not the run's: a terminal that is closed, a log on a full disk."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display
        self.inner = display
        """The display itself."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns the display's method, which from the first OSError on does nothing."""

        def show(*args: Any, **kwargs: Any) -> None:
            try:
                if self._display is not None:
                    getattr(self._display, name)(*args, **kwargs)
            except OSError:
                self._display = None

        return show


class BackgroundWriter:
    """Writes in one thread of its own, so that an update's trees become JSON while the next update
    is sampled. After a failure nothing more is written: what was asked for later may say that the
    earlier is there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treegraft-record")
        self._last: Future[None] = self._thread.submit(lambda: None)

    def submit(self, write: Callable[[], object]) -> None:
        """Asks for a write. Raises what an earlier one has failed with."""
        before = self._last
        if before.done():
            before.result()

        def write_after() -> None:
            before.result()
            write()

        self._last = self._thread.submit(write_after)

    def drain(self) -> None:
        """Waits until all is written. Raises what a write has failed with."""
        self._last.result()

    def close(self) -> None:
        """Ends the thread once all is written; a failure is not raised."""
        self._thread.shutdown()


class Recorder:
    """Records what happens in a run, from the opening of its folder to its end. `callbacks` are
    further trackers, or functions of an update's number and metrics.

    Raises:
        TreegraftError: a tracker that cannot be used.
    """

    def __init__(self, config: Config, display: Display, callbacks: Sequence[Any] = ()) -> None:
        self.display: Display = LastingDisplay(display)
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
        self._writer = BackgroundWriter()
        with ExitStack() as ends:
            ends.callback(self._writer.close)
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
            if self._health.standing:
                standing = ", ".join(self._health.standing)
                display.note(f"warnings that stood when the run stopped: {standing}")
            yield

    def update(self, number: int, trees: Sequence[Tree]) -> None:
        """Records the trees of an update and shows one of them."""
        # A failed leaf is otherwise a number among many.
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        failed = [leaf for leaf in leaves if leaf.status is Status.FAILED]
        if failed and "failed" not in self._health.standing:
            self.display.warn(
                f"{len(failed)} of {len(leaves)} trajectories failed and left their groups; the"
                f" first: {failed[0].error}"
            )
        # One update's trees wait at most: a slow disk would fill the memory with more.
        self.written()
        self.trees(number, trees)
        self.display.sample(trees[0])
        self._trackers.sample(number, trees)

    def trees(self, update: int, trees: Sequence[Tree], kind: str = "") -> None:
        """Has trees written where the recipe asks for it; `kind` names those of an evaluation.
        They are there before the update's line of metrics and before a checkpoint."""
        if self._config.track.record_trees:
            path = self._folder.trees_path(update, kind)
            keep = self._config.track.keep_trees

            def write() -> None:
                write_trees(path, trees)
                if keep is not None:
                    drop_parts(self._folder.trees_dir, update - keep)

            self._writer.submit(write)

    def metrics(self, update: int, metrics: Mapping[str, float]) -> None:
        """Writes a line of metrics, with the warnings that stand after it."""
        full = {**metrics, "policy_version": float(update)}
        found, began, over = self._health.take({"update": update, **full})
        full |= {warning.key: warning.value for warning in found}
        # Behind the update's trees: a line of metrics says that they are there.
        self._writer.submit(lambda: self._folder.append_metrics(update, full))
        self.latest = update_latest(self.latest, full)
        self._trackers.log(update, full, began)
        # Update 0 is the evaluation before the first update: no progress to show.
        if update:
            self.display.update(update, self._config.run.num_updates, full)
        for warning in began:
            self.display.warn(explained(warning, update))
        for text in over:
            self.display.note(text)

    def written(self) -> None:
        """Waits for all trees and metrics so far to be in the run folder."""
        self._writer.drain()

    def finish(self) -> None:
        """Waits for all that was told, and hands trackers the last metrics."""
        self.written()
        self._trackers.finish(self.latest)
