"""The placement of a run: its engines on a Ray cluster."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from treegraft import Config
from treegraft.extras.ray.actors import Place, look, start
from treegraft.extras.ray.engines import EngineActor
from treegraft.extras.ray.ray import connected
from treegraft.extras.ray.settings import cluster_settings, num_engines
from treegraft.extras.ray.supervisor import Keeper, Member
from treegraft.parts import interfaces, remote


def needs_of(config: Config) -> Mapping[str, float]:
    """Returns what all actors of a run take up together, by Ray's names."""
    return {
        "CPU": float(num_engines(config)),
        "GPU": float(cluster_settings(config).server_gpus),
    }


@contextmanager
def ray_placement(config: Config) -> Iterator[RayPlacement]:
    """Holds a connection to the cluster of a recipe, which has been checked.

    Raises:
        SettingError: no cluster that the run could use.
    """
    with connected(config, needs_of(config)) as token:
        yield RayPlacement(token)


@contextmanager
def lasting(checkpoint: Path) -> Iterator[Path]:
    """Holds the model of a checkpoint in a folder of its own beside it: an actor that starts anew
    reads it, when the run may have removed the checkpoint long ago."""
    # A name that the next start removes, where this process is killed.
    held = checkpoint.with_name(f".{checkpoint.name}.actors.partial")
    leave_out = shutil.ignore_patterns("optimiser*")
    shutil.rmtree(held, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, held, ignore=leave_out, copy_function=_linked)
        yield held
    finally:
        shutil.rmtree(held, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    """A second name for a file; a copy on a disk without such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class RayPlacement:
    """A `Placement` on the cluster that this process is connected to."""

    def __init__(self, token: Path) -> None:
        """Args: token: see `connected`."""
        self._token = token
        self._keeper: Keeper | None = None
        self._trees: remote.RemoteTrees | None = None

    @asynccontextmanager
    async def engine(
        self, config: Config, model_path: Path | str | None
    ) -> AsyncIterator[interfaces.Engine]:
        """Holds the engines; see `Placement`."""
        with nullcontext() if model_path is None else lasting(Path(model_path)) as path:
            place, count = place_of(config, self._token, path), num_engines(config)
            keeper = Keeper(config)
            self._keeper = keeper
            trees = self._trees = remote.RemoteTrees(config, keeper.grown)
            takes = {"num_cpus": 1, "num_gpus": cluster_settings(config).server_gpus / count}
            try:
                await keeper.open(
                    [
                        Member(one, partial(start, EngineActor, "engine", one, place, takes))
                        for one in range(count)
                    ]
                )
                yield keeper
            finally:
                self._keeper = self._trees = None
                await keeper.close()
                trees.close()

    def grower(self, *parts: Any, **more: Any) -> Any:
        """Returns a grower whose trees grow in the engines; see `Placement`."""
        assert self._trees is not None, "growers are made while the engines are held"
        return self._trees.grower(*parts, **more)

    def show_in(self, folder: Path) -> None:
        """Keeps the state of all engines in this run folder, and the states of its buffer."""
        if self._trees is not None:
            self._trees.show_in(folder)
        if self._keeper is not None:
            self._keeper.show_in(folder)


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
