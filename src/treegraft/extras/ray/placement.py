"""The placement of a run: its engines on a Ray cluster."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from treegraft import Config
from treegraft.extras.ray.actor import Place, look, start
from treegraft.extras.ray.connection import connected
from treegraft.extras.ray.settings import cluster_settings, num_engines
from treegraft.extras.ray.supervisor import Member, Supervisor
from treegraft.parts import interfaces, remote


@contextmanager
def ray_placement(config: Config) -> Iterator[RayPlacement]:
    """Holds a connection to the cluster of a recipe, which has been checked.

    Raises:
        SettingError: no cluster that the run could use.
    """
    with connected(config) as token:
        yield RayPlacement(token)


@contextmanager
def lasting(checkpoint: Path) -> Iterator[Path]:
    """Holds a copy of a checkpoint's model in a folder next to it: an actor that starts later reads
    it, when the run may have removed the checkpoint."""
    # The next start removes a folder of this name that a killed process has left.
    copy = checkpoint.with_name(f".{checkpoint.name}.actors.partial")
    # Twice the size of the weights, and no engine reads it.
    leave_out = shutil.ignore_patterns("optimiser*")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, copy, ignore=leave_out, copy_function=_linked)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    """Makes a hard link, or a copy on a disk without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class RayPlacement:
    """A `Placement` on the cluster that this process is connected to."""

    def __init__(self, token: Path) -> None:
        """Args: token: see `connected`."""
        self._token = token
        self._trees: remote.RemoteTrees | None = None

    @asynccontextmanager
    async def engine(
        self, config: Config, model_path: Path | str | None
    ) -> AsyncIterator[interfaces.Engine]:
        """Holds the engines; see `Placement`."""
        with nullcontext() if model_path is None else lasting(Path(model_path)) as path:
            place = place_of(config, self._token, path)
            count = num_engines(config)
            gpus = cluster_settings(config).server_gpus / count
            supervisor = Supervisor(config)
            trees = self._trees = remote.RemoteTrees(config, supervisor.grown)
            try:
                await supervisor.open(
                    [Member(one, partial(start, one, place, gpus)) for one in range(count)]
                )
                yield supervisor
            finally:
                self._trees = None
                await supervisor.close()
                trees.close()

    def grower(self, *parts: Any, **more: Any) -> Any:
        """Returns a grower whose trees grow in the engines; see `Placement`."""
        assert self._trees is not None, "growers are made while the engines are open"
        return self._trees.grower(*parts, **more)

    def show_in(self, folder: Path) -> None:
        """Keeps the states of the trace buffer in this run folder."""
        if self._trees is not None:
            self._trees.show_in(folder)


def place_of(config: Config, token: Path, model_path: Path | None = None) -> Place:
    """Returns what an actor needs to be like this process.

    Args:
        token: see `connected`.
        model_path: where weights and tokenizer are read; None for model.path.
    """
    return Place(
        cwd=os.getcwd(),
        path=tuple(sys.path),
        token=str(token),
        alike=look(str(token)),
        config=config.model_dump_json(),
        model_path=None if model_path is None else str(model_path),
    )
