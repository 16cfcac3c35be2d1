"""The viewer opened from Python: a server of this process, and a window onto it."""

from __future__ import annotations

import secrets
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from treegraft.core.listener import address_of, listen, serve
from treegraft.view.runs import open_runs
from treegraft.view.server import build_app

_HEIGHT = 720
"""Of the window in a notebook, in pixels."""


class Viewer:
    """The viewer, served by a thread on the loopback address until `close` or the end of the
    process."""

    def __init__(self, paths: Sequence[Path], *, opens: bool = True, port: int = 0) -> None:
        """Args: paths: run folders. opens: shows it, in a notebook below the cell, else in the
        browser. port: 0 takes a free one.

        Raises:
            CheckpointError: one of the paths is no run folder.
            SettingError: the port is not free.
        """
        is_notebook = Console().is_jupyter
        token = secrets.token_urlsafe(16)
        app = build_app(open_runs(paths), token=token, is_framed=is_notebook)
        listener = listen("127.0.0.1", port)
        # A thread cannot be interrupted, so the server asks ten times a second.
        self._ended = threading.Event()
        self.url = f"{address_of(listener)}{token}/"
        self._thread = threading.Thread(
            target=lambda: serve(app, listener, grace_s=1, is_over=self._ended.is_set),
            name="treegraft-viewer",
            daemon=True,
        )
        self._thread.start()
        if opens and is_notebook:
            from IPython.display import IFrame, display

            display(IFrame(self.url, "100%", _HEIGHT))
        elif opens:
            webbrowser.open(self.url)

    def close(self) -> None:
        """Ends the server; returns once it has ended."""
        self._ended.set()
        self._thread.join()

    def __repr__(self) -> str:
        return f"<Viewer at {self.url}{' (closed)' if self._ended.is_set() else ''}>"
