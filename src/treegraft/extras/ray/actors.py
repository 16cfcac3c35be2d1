"""What all actors of a run have in common, and how they are started and answer.

Between actors travel JSON, bytes and Ray's own handles; nothing of ours is pickled. An actor is a
plain class with async methods; Ray restarts one that has died, wherever there is room for it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft import TreegraftError
from treegraft.parts import errors, files, plain, spans

MAX_LOGGED = 100
"""Warnings that an actor keeps until it is asked for them; later ones are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What an actor needs to be like the run's own process, as it travels to it."""

    cwd: str
    """The folder that relative paths of the recipe begin at."""
    path: tuple[str, ...]
    """Where Python looks for packages: import paths of a recipe."""
    code: str
    """Checksum of this package's files."""
    config: str
    """The settings, in JSON."""
    model_path: str | None = None
    """Where weights and tokenizer are read; None for model.path."""


class Actor:
    """The part that all actors share: where they are, and what they have to say."""

    def __init__(self, role: str, number: int, place: str) -> None:
        """Raises:
        RuntimeError: this machine has other code, or does not see the run's folder."""
        self.role, self.number, self.name = role, number, f"{role} {number}"
        found = json.loads(place)
        self.place = Place(**{**found, "path": tuple(found["path"])})
        self._refuse_other_code()
        os.chdir(self.place.cwd)
        sys.path.extend(one for one in self.place.path if one not in sys.path)
        self._said: list[str] = []
        logging.getLogger("treegraft").addHandler(_Collector(self._said))

    def _refuse_other_code(self) -> None:
        where = f"{self.name} on {socket.gethostname()}"
        if (own := files.code_checksum()) != self.place.code:
            raise RuntimeError(
                f"{where}: its treegraft package differs from that of the run (checksum {own},"
                f" expected {self.place.code}). Install the same on every machine."
            )
        if not os.path.isdir(self.place.cwd):
            raise RuntimeError(
                f"{where}: there is no folder {self.place.cwd}; expected the run's, under the same"
                " path on every machine."
            )

    async def state(self) -> str:
        """Returns where it is, how it is, and its warnings since the last call, in JSON."""
        said, self._said[:] = list(self._said), []
        seen = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "cpu_s": time.process_time(),
            "memory_bytes": resident_bytes(),
            "said": said,
        }
        return json.dumps(seen | self.more())

    def more(self) -> dict[str, Any]:
        """Returns what an actor of its kind adds to its state."""
        return {}

    async def close(self) -> str:
        """Ends what it holds, and sends its last spans; replies like a method that is `replying`,
        without a value."""
        try:
            return await replying(type(self).end)(self)
        finally:
            spans.end_joined()

    async def end(self) -> None:
        """Ends what an actor of its kind holds: nothing."""


def resident_bytes() -> int | None:
    """Returns the memory that this process holds; None where the system does not tell (Linux
    does)."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class _Collector(logging.Handler):
    """Keeps warnings of a process for rank 0, whose log is the run's."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._said) < MAX_LOGGED:
            self._said.append(plain(record.getMessage(), 1000))


def replying(method: Callable[..., Awaitable[Any]]) -> Callable[..., Coroutine[Any, Any, str]]:
    """Lets a method answer in JSON, errors of ours included; `value_of` reads it."""

    @functools.wraps(method)
    async def reply(*args: Any) -> str:
        try:
            return json.dumps({"value": await method(*args)})
        except TreegraftError as error:
            return error_reply(error)

    return reply


def error_reply(error: TreegraftError) -> str:
    """Returns an error of ours as a reply."""
    return json.dumps({"error": type(error).__name__, "code": error.code, "text": str(error)})


def value_of(reply: str) -> Any:
    """Returns what an actor has answered.

    Raises:
        TreegraftError: what it has raised.
    """
    found = json.loads(reply)
    if "error" not in found:
        return found["value"]
    kind = getattr(errors, found["error"], TreegraftError)
    raise kind(found["text"], code=found["code"])


def start(
    kind: type[Actor], role: str, number: int, place: Place, resources: Mapping[str, float]
) -> Any:
    """Starts an actor on whichever machine has room, and returns its handle at once.

    Args:
        role: what it is called in logs and on pages.
        resources: what it takes up, by Ray's names ("num_cpus", "num_gpus").
    """
    import ray

    return (
        ray.remote(kind)
        .options(
            **resources,
            # Ends with the process that started it, whatever that one's end.
            lifetime="non_detached",
            max_restarts=-1,
            # We ask again ourselves: by then the weights may be others.
            max_task_retries=0,
            max_concurrency=10_000,
            scheduling_strategy="SPREAD",
        )
        .remote(role, number, json.dumps(asdict(place)))
    )
