"""`treegraft view`: the viewer in a browser, or the same in a terminal."""

from __future__ import annotations

import contextlib
import secrets
import sys
import webbrowser
from pathlib import Path

from rich.console import Console

from treegraft.core.errors import SettingError
from treegraft.core.listener import address_of, is_loopback, listen, serve
from treegraft.view.runs import open_runs
from treegraft.view.text import show


def view_text(paths: list[Path], place: str) -> None:
    """Prints a tree, or a trajectory.

    Raises:
        SettingError: several runs.
        DataError: there is no such tree or leaf.
    """
    runs = open_runs(paths)
    if len(runs) != 1:
        raise SettingError(
            f"--text: got {len(runs)} runs, expected one. Compare runs with: treegraft compare",
            code="one-run-for-text",
        )
    (run,) = runs.values()
    Console().print(show(run, place))


def view_pages(paths: list[Path], host: str, port: int, *, opens_browser: bool) -> None:
    """Serves the pages until Ctrl-C, and prints their address.

    Raises:
        SettingError: the address is not free.
        CheckpointError: one of the paths is no run folder.
    """
    # The text in a terminal needs no server.
    from treegraft.view.server import build_app

    token = secrets.token_urlsafe(16)
    app = build_app(open_runs(paths), host=host, token=token)
    made = listen(host, port)
    address = f"{address_of(made)}{token}/"

    def on_ready() -> None:
        print(f"viewer at {address}  (Ctrl-C ends it)", flush=True)
        if not is_loopback(host):
            print(
                f"warning: it listens on {host}; everyone who learns this address, which is sent"
                " unencrypted, can read these runs",
                file=sys.stderr,
                flush=True,
            )
        if opens_browser:
            webbrowser.open(address)

    with contextlib.suppress(KeyboardInterrupt):
        serve(app, made, grace_s=1, on_ready=on_ready)
    print("viewer ended", flush=True)
