"""What all actors of a run have in common, and how they are started and answer.

Between actors travel JSON, bytes and Ray's own handles; nothing of ours is pickled. An actor is a
plain class with async methods; `supervisor` makes one that is lost anew.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegraft import SettingError, TreegraftError
from treegraft.parts import errors, files, plain, spans

MAX_LOGGED = 100
"""Warnings that an actor keeps until it is asked for them; later ones are left out."""


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
        "code": files.code_checksum(),
        "token": path.read_bytes().hex() if path.exists() else "",
    }


def refuse_other(where: str, seen: Mapping[str, str], place: Place) -> None:
    """Refuses a machine with other versions or code, or that does not see the run's folders.

    Raises:
        SettingError: the first difference.
    """
    own = place.alike
    for name in ("python", "torch", "transformers"):
        if seen[name] != own[name]:
            raise SettingError(
                f"cluster: {where} has {name} {seen[name]}, expected {own[name]} as rank 0 has."
                " Install the same on every machine.",
                code="cluster-version-differs",
            )
    if seen["code"] != own["code"]:
        raise SettingError(
            f"cluster: the treegraft package of {where} differs from that of rank 0 (checksum"
            f" {seen['code']}, expected {own['code']}). Install the same on every machine.",
            code="cluster-code-differs",
        )
    if seen["token"] != own["token"] or not os.path.isdir(place.cwd):
        raise SettingError(
            f"cluster: {where} does not see the folders {Path(place.token).parent} and {place.cwd}"
            " of rank 0; expected both on a disk that all machines share, under the same path. Set"
            " run.dir to such a folder, and start the command in one.",
            code="cluster-folder-unseen",
        )


# ------------------------------------------------------------------ answers


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


# ------------------------------------------------------------------ the actor


class Actor:
    """The part that all actors share: where they are, and what they have to say."""

    def __init__(self, role: str, number: int, place: str) -> None:
        """Makes nothing yet: `open` can tell of a fault."""
        self.role, self.number, self.name = role, number, f"{role} {number}"
        self.place = Place(**json.loads(place))
        self._said: list[str] = []
        logging.getLogger("treegraft").addHandler(_Collector(self._said))

    @replying
    async def open(self, *given: Any) -> Any:
        """Makes what it holds, and returns what an actor of its kind says of that.

        Raises:
            SettingError: this machine is not like that of rank 0.
        """
        where = f"{self.name} on {socket.gethostname()}"
        refuse_other(where, look(self.place.token), self.place)
        os.chdir(self.place.cwd)
        sys.path.extend(one for one in self.place.path if one not in sys.path)
        return await self.begin(*given)

    async def begin(self, *given: Any, **more: Any) -> Any:
        """Makes what an actor of its kind holds, on a machine that is sound."""

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
            # Made anew and asked again by ourselves: by then the weights may be others.
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=10_000,
            scheduling_strategy="SPREAD",
        )
        .remote(role, number, json.dumps(asdict(place)))
    )
