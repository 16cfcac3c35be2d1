"""An engine as an actor: it has its own weights, and all else that the trees need which grow
there.

Between processes travel JSON, bytes and Ray's own handles; nothing of ours is pickled.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from treegraft import Config, SettingError, TreegraftError
from treegraft.parts import (
    assemble_engine,
    errors,
    files,
    interfaces,
    plain,
    remote,
)

PIECE_BYTES = 1 << 26
"""Size from which a piece of published weights is complete, in bytes."""
MAX_LOGGED = 100
"""Warnings that an actor collects until its state is read; later ones are left out."""

# ------------------------------------------------------------------ the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What an actor needs to resemble the run's own process, as sent to it."""

    cwd: str
    """The folder that relative paths of the recipe begin at."""
    path: Sequence[str]
    """Where Python looks for packages: import paths of a recipe."""
    token: str
    """A file in the folder of runs, which every machine has to see."""
    alike: Mapping[str, str]
    """What every machine must have alike, see `look`."""
    config: str
    """The settings, in JSON."""
    model_path: str | None = None
    """Where weights and tokenizer are read; None for model.path."""


def look(token: str) -> dict[str, str]:
    """Returns what this machine has of what every machine must have alike.

    Args:
        token: path of a file that all should see.
    """
    path = Path(token)
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "treegraft": f"with checksum {files.code_checksum()}",
        "token": path.read_bytes().hex() if path.exists() else "",
    }


def refuse_other(where: str, seen: Mapping[str, str], place: Place) -> None:
    """Raises `SettingError` for a machine with other versions or code, or that does not see the
    run's folders."""
    own = place.alike
    # Other versions round otherwise, and the trees would depend on the machine.
    for name in ("python", "torch", "transformers", "treegraft"):
        if seen[name] != own[name]:
            raise SettingError(
                f"cluster: {where} has {name} {seen[name]}, expected {own[name]} as rank 0 has."
                " Install the same on every machine.",
                code="cluster-version-differs",
            )
    if seen["token"] != own["token"] or not os.path.isdir(place.cwd):
        raise SettingError(
            f"cluster: {where} does not see the folders {Path(place.token).parent} and {place.cwd}"
            " of rank 0; expected both on a disk that all machines share, under the same path. Set"
            " run.dir to such a folder, and start the command in one.",
            code="cluster-folder-unseen",
        )


# ------------------------------------------------------------------ what travels


def replying(method: Callable[..., Awaitable[Any]]) -> Callable[..., Coroutine[Any, Any, str]]:
    """Lets a method answer in JSON, errors of ours included; `value_of` reads it."""

    @functools.wraps(method)
    async def reply(*args: Any) -> str:
        try:
            return json.dumps({"value": await method(*args)})
        except TreegraftError as error:
            said = {"error": type(error).__name__, "code": error.code, "text": str(error)}
            return json.dumps(said)

    return reply


def value_of(reply: str) -> Any:
    """Returns what an actor has answered.

    Raises:
        TreegraftError: what it has raised.
    """
    found = json.loads(reply)
    if "error" not in found:
        return found["value"]
    # By name, since nothing of ours is pickled.
    kind = getattr(errors, found["error"], TreegraftError)
    raise kind(found["text"], code=found["code"])


class Weights(NamedTuple):
    """Published weights: what they are, and where Ray has their pieces."""

    edition: int
    """Number of the publish, from 1 on: a warm-up publishes one version several times, with other
    weights each time."""
    version: int
    fingerprint: str
    names: Sequence[str]
    pieces: list[Any]
    """Handles of bytes, each a safetensors file; none if every engine has these weights from its
    beginning."""


def pieces_of(source: interfaces.WeightSource) -> Iterator[bytes]:
    """Yields weights as safetensors files of about `PIECE_BYTES`; a tensor is in one piece."""
    from safetensors.torch import save

    piece: dict[str, Any] = {}
    size = 0
    for name, tensor in source:
        # Copied: tied weights share their memory, which the format does not know.
        piece[name] = tensor.detach().cpu().contiguous().clone()
        size += piece[name].nbytes
        if size >= PIECE_BYTES:
            yield save(piece)
            piece = {}
            size = 0
    if piece:
        yield save(piece)


class _Pieces:
    """Weights on their way as a `WeightSource`; each piece is fetched when its turn comes, so that
    they are never twice on a machine."""

    def __init__(self, weights: Weights) -> None:
        self.names = weights.names
        self.fingerprint = weights.fingerprint
        self._pieces = weights.pieces

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        import ray
        from safetensors.torch import load

        if not self._pieces:
            raise errors.EngineError(
                "engine: it lacks the weights that every engine was to begin with",
                code="first-weights-missing",
            )
        for piece in self._pieces:
            yield from load(ray.get(piece)).items()


# ------------------------------------------------------------------ the actor


class EngineActor:
    """An engine with prompts, tools and rewards of its own. Trees grow by an edition of the weights
    that has been published to it."""

    def __init__(self, number: int, place: str) -> None:
        """Makes nothing yet: `open` can report a fault."""
        self.name = f"engine {number}"
        self.place = Place(**json.loads(place))
        self._said: list[str] = []
        logging.getLogger("treegraft").addHandler(_Collector(self._said))
        self._stack = AsyncExitStack()
        self._engine: interfaces.Engine | None = None
        self._host: remote.TreeHost | None = None
        self._publishing = asyncio.Lock()
        self._edition = 0
        """Of its weights; 0 before the first publish, and while they change."""

    @replying
    async def open(self) -> dict[str, Any]:
        """Reads the weights and makes tools and rewards; returns the engine's limit and checksum.

        Raises:
            TreegraftError: this machine is not like that of rank 0, or a part cannot be made.
        """
        place = self.place
        where = f"{self.name} on {socket.gethostname()}"
        refuse_other(where, look(place.token), place)
        # Relative paths of a recipe, such as its corpus, begin there.
        os.chdir(place.cwd)
        # Import paths of a recipe, such as a tool of the user's.
        sys.path.extend(one for one in place.path if one not in sys.path)
        config = Config.model_validate_json(place.config)
        opening = assemble_engine(alone(config), model_path=place.model_path)
        engine = self._engine = await self._stack.enter_async_context(opening)
        making = remote.TreeHost.opened(config, engine, model_path=place.model_path)
        self._host = await self._stack.enter_async_context(making)
        return {"max_context": engine.max_context, "fingerprint": engine.fingerprint}

    async def state(self) -> str:
        """Returns its machine, whether another actor has to take its place, and its warnings since
        the last call, in JSON."""
        said = list(self._said)
        self._said.clear()
        is_dead = self._engine is not None and self._engine.death is not None
        return json.dumps({"host": socket.gethostname(), "is_dead": is_dead, "said": said})

    @replying
    async def publish(self, *weights: Any) -> str:
        """Takes over `Weights` once running completions are done; returns the checksum of its
        weights then."""
        due = Weights(*weights)
        async with self._publishing:
            engine = self._opened()
            if self._edition != due.edition:
                # Until the end its weights may be half of each.
                self._edition = 0
                await engine.publish(_Pieces(due), due.version)
                self._edition = due.edition
            return engine.fingerprint

    @replying
    async def grow(self, order: str) -> dict[str, Any]:
        """Returns one tree, scored, and what was counted for it; see `TreeHost.grow`."""
        asked = json.loads(order)
        # A publish under way may be the one of the weights that the order names.
        async with self._publishing:
            self._refuse_older(asked["edition"])
        assert self._host is not None
        found = await self._host.grow(asked)
        if self._opened().death is not None:
            # The tree's failures are those of its engine. Another engine grows it.
            os._exit(1)
        return found

    async def close(self) -> str:
        """Ends tools and environments, the engine and its servers."""
        return await replying(self._stack.aclose)()

    def _refuse_older(self, edition: int) -> None:
        if self._edition < edition:
            raise errors.EngineError(
                f"engine: its weights are of edition {self._edition}, expected {edition}",
                code="other-edition",
            )

    def _opened(self) -> interfaces.Engine:
        if self._engine is None:
            raise errors.EngineError("engine: it is not open yet", code="engine-not-open")
        return self._engine


class _Collector(logging.Handler):
    """Keeps warnings of a process for rank 0, whose log is the run's."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        # A tool that warns at each call must not fill the memory.
        if len(self._said) < MAX_LOGGED:
            self._said.append(plain(record.getMessage(), 1000))


def alone(config: Config) -> Config:
    """Returns the settings of one engine of several: servers on the GPUs that Ray has assigned,
    one on each, or on as many together as their options take."""
    if config.engine.kind != "vllm":
        return config
    vllm = config.engine.vllm
    gpus = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    own = [",".join(gpus[n : n + vllm.gpus_each]) for n in range(0, len(gpus), vllm.gpus_each)]
    vllm = vllm.model_copy(update={"gpus": own})
    engine = config.engine.model_copy(update={"vllm": vllm})
    return config.model_copy(update={"engine": engine})


def start(number: int, place: Place, num_gpus: float) -> Any:
    """Starts an actor on whichever machine has room, and returns its handle at once."""
    import ray

    return (
        ray.remote(EngineActor)
        .options(
            num_cpus=1,
            num_gpus=num_gpus,
            # Ends with the process that started it, whatever that one's end.
            lifetime="non_detached",
            # The supervisor makes a lost one anew: by then the weights may be others.
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=10_000,
            scheduling_strategy="SPREAD",
        )
        .remote(number, json.dumps(asdict(place)))
    )
