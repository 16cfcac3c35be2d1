"""Files that are written beside the run, in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class BackgroundWriter:
    """Writes in one thread of its own, so that an update's trees become JSON while the next update
    is sampled. After a failure nothing more is written: what was asked for later may say that the
    earlier is there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treegraft-record")
        self._fault: BaseException | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Asks for a write. Raises what an earlier one has failed with."""
        self._check()
        self._thread.submit(self._written, write)

    def _written(self, write: Callable[[], object]) -> None:
        if self._fault is None:
            try:
                write()
            except BaseException as error:
                self._fault = error

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def drain(self) -> None:
        """Waits until all is written. Raises what a write has failed with."""
        self._thread.submit(lambda: None).result()
        self._check()

    def close(self) -> None:
        """Ends the thread once all is written; a failure is not raised."""
        self._thread.shutdown()
