"""The entropies of a step's first tokens, passed on once: while it is sampled, or when it is
done."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Probe:
    """Passes on one probe: a step is probed while it is sampled or, if short, when it is done."""

    def __init__(self, function: Callable[[Sequence[float]], None]) -> None:
        self._function: Callable[[Sequence[float]], None] | None = function
        self._error: Exception | None = None

    def early(self, probe: Sequence[float]) -> None:
        """Passes the probe on and keeps an error."""
        try:
            self(probe)
        except Exception as error:
            # This is a callback, where it would be lost; the call that comes with the
            # completion raises it on the leaf's own task.
            self._error = error

    def __call__(self, probe: Sequence[float]) -> None:
        if self._error is not None:
            raise self._error
        function, self._function = self._function, None
        if function is not None:
            function(probe)
