"""The processes that torchrun has started: how they find each other, what they share, and how they
end.

Every rank runs the same loop. What rank 0 alone knows it shares: values as JSON, trees as JSON and
bytes, tensors by collectives. Nothing is unpickled. Every wait for a collective has a deadline, and
every wait ends as soon as a process that it needs has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import treegraft
from treegraft.core.errors import RankError, SettingError
from treegraft.core.files import code_checksum
from treegraft.core.interrupt import Interrupted
from treegraft.core.types import Tree
from treegraft.policy.learn.sent_trees import packed, unpacked
from treegraft.policy.load import has_cuda
from treegraft.settings.config import Config
from treegraft.settings.load import config_json, differences

_untyped: Any = dist
"""Parts of torch.distributed that its types leave out."""
START_S = 300.0
"""Longest wait for all ranks to have started."""
DEADLINE_S = 600.0
"""Longest wait of one rank for another inside a pass, a publish or a checkpoint."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: a signal at the parent's end."""
LOOK_S = 1.0
"""Time between two looks at whether rank 0 lives."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself before any work."""

    host: str
    pid: int
    software: str
    """Versions, and a checksum of the package's files."""
    config: str
    """Its resolved settings as JSON."""
    space: str
    """Names the running system and the namespace in which `pid` is its number."""


class Peer:
    """Another rank, as this process sees it."""

    def __init__(self, rank: int, hello: Hello, store: Any) -> None:
        self.rank = rank
        self._store = store
        self.name = f"rank {rank} ({hello.host}, process {hello.pid})"
        self._pidfd: int | None = None
        if hello.space == _process_space():
            with contextlib.suppress(OSError, AttributeError):
                self._pidfd = os.pidfd_open(hello.pid)

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone; of one on another host, whether it has left last words."""
        if self._pidfd is None:
            return bool(self._store.check([f"words/{self.rank}"]))
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def last_words(self) -> str:
        """Its last error, for a message."""
        key = f"words/{self.rank}"
        if self._store.check([key]):
            return f"its last words: {self._store.get(key).decode()}"
        return "no last words (killed from outside, or out of memory)"


class Ranks:
    """This process among the others; a `Team` of the learner."""

    def __init__(
        self,
        config: Config,
        meeting: str = "env://",
        started: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        """Joins the others.

        Args:
            meeting: where, as an address of torch's `rendezvous`: by torchrun's environment
                variables, or at a file of this machine.
            started: the ranks from 1 on that this process has started; empty for none.

        Raises:
            RankError: a rank has not come, or runs other code or another torch.
            SettingError: ranks have other settings, or numbers that do not divide.
        """
        _end_with_torchrun()
        is_cuda = has_cuda()
        if is_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        is_here = meeting != "env://"
        if is_here or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # All on one machine: nothing has to listen on a network.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self._started = started
        self._store, self.rank, self.size = next(
            _untyped.rendezvous(meeting, timeout=timedelta(seconds=START_S))
        )
        self._store.set_timeout(timedelta(seconds=START_S))
        self.device = torch.device("cuda" if is_cuda else "cpu")
        self._num_shared = 0
        self.is_done = False
        """Whether the work has come to its end, so that other ranks may have ended."""
        self._peers = self._meet(config)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=_untyped.PrefixStore("ranks", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=DEADLINE_S),
        )

    # ------------------------------------------------------------------ meeting

    def _meet(self, config: Config) -> list[Peer]:
        """Tells the others of this process, and returns them once rank 0 has found all alike."""
        hello = Hello(
            socket.gethostname(),
            os.getpid(),
            f"torch {torch.__version__}, treegraft {treegraft.__version__} ({code_checksum()})",
            config_json(config),
            _process_space(),
        )
        self._store.set(f"hello/{self.rank}", json.dumps(asdict(hello)))
        # All of them on each rank, so that each can name the one that ends.
        hellos = []
        for n in range(self.size):
            hellos.append(Hello(**json.loads(self._awaited(f"hello/{n}", n))))
        if self.rank == 0:
            problem = _difference(config, hellos)
            self._store.set("verdict", problem)
            if problem:
                raise SettingError(problem, code="ranks-differ")
        elif self._awaited("verdict", 0):
            # Rank 0 says why.
            raise SystemExit(2)
        peers = []
        for n, hello in enumerate(hellos):
            if n != self.rank:
                peers.append(Peer(n, hello, self._store))
        return peers

    def _awaited(self, key: str, rank: int) -> str:
        while self._started and rank and not self._store.check([key]):
            if (status := self._started[rank - 1].poll()) is not None:
                raise RankError(
                    f"rank {rank} has ended with status {status} before it came; its own output"
                    " says why.",
                    code="rank-ended",
                )
            time.sleep(0.05)
        try:
            return bytes(self._store.get(key)).decode()
        except dist.DistStoreError as error:
            raise RankError(
                f"rank {rank} has not come within {START_S:.0f} s; expected {self.size} ranks that"
                " torchrun starts together. Its own output says what keeps it.",
                code="rank-not-come",
            ) from error

    # ------------------------------------------------------------------ what rank 0 shares

    def share(self, value: Any = None) -> Any:
        """Returns rank 0's value, which has to fit JSON, on every rank, however late it comes.

        Raises:
            Interrupted: rank 0 stops here to save (on the other ranks).
            RankError: a rank has ended.
        """
        if self.rank:
            return self._received()
        self.check()
        self._send({"value": value})
        return value

    def share_trees(self, trees: Sequence[Tree] = ()) -> list[Tree]:
        """Returns rank 0's trees on every rank: on rank 0 themselves. Raises as `share`."""
        texts, columns = packed(trees)
        head = torch.frombuffer(bytearray(json.dumps(texts).encode()), dtype=torch.uint8)
        # The sizes alone: what goes through the store stays in it.
        num_head, num_columns = self.share((head.numel(), columns.numel()))
        sent = torch.cat([head, columns])
        if self.rank:
            sent = torch.empty(num_head + num_columns, dtype=torch.uint8)
        with self.blaming():
            dist.broadcast(sent, 0)
        if not self.rank:
            return list(trees)
        found: list[str] = json.loads(sent[:num_head].numpy().tobytes())
        return unpacked(found, sent[num_head:])

    def call_off(self) -> None:
        """Lets the others, who wait for something shared, stop in order to save with rank 0."""
        if not self.rank:
            self._send({"stops": True})

    def finish(self) -> None:
        """Notes that the work has come to its end, so that `close` ends nobody's work."""
        self.is_done = True

    def _send(self, message: Mapping[str, Any]) -> None:
        self._num_shared += 1
        self._store.set(f"shared/{self._num_shared}", json.dumps(message))

    def _received(self) -> Any:
        """The next value that rank 0 shares."""
        self._num_shared += 1
        key = f"shared/{self._num_shared}"
        looked = time.monotonic()
        nap = 0.001
        while not self._store.check([key]):
            time.sleep(nap)
            # A value follows another at once, or after a rollout.
            nap = min(0.05, 1.2 * nap)
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self._refuse_leaderless(key)
        message = json.loads(self._store.get(key))
        if "stops" in message:
            raise Interrupted
        return message["value"]

    def _refuse_leaderless(self, key: str) -> None:
        """Ends this rank where rank 0 has ended, or failed and said so itself."""
        if self._store.check(["failed"]):
            raise SystemExit(0)
        leader = self._peers[0]
        if leader.has_ended and not self._store.check([key]):
            raise RankError(f"{leader.name} has ended without a last word", code="leader-gone")

    def last_words(self, error: BaseException) -> None:
        """Leaves an error for the others' messages."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"words/{self.rank}", f"{type(error).__name__}: {error}"[:500])

    # ------------------------------------------------------------------ life and death

    def check(self) -> None:
        """Raises RankError where a rank has ended."""
        said = []
        for peer in self._peers:
            if peer.has_ended:
                said.append(f"{peer.name} has ended: {peer.last_words}")
        if said:
            raise RankError(
                f"{'; '.join(said)}. Its part of the weights is lost. Go on from the last"
                " checkpoint with --resume, also with another number of ranks.",
                code="rank-lost",
            )

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Lets a failure of a collective in the block name the rank that caused it."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError | torch.OutOfMemoryError):
                raise
            if self.rank > 0 and self._store.check(["failed"]):
                # Rank 0 says why.
                raise SystemExit(0) from error
            # Its connections close before its process is gone.
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline:
                try:
                    self.check()
                except RankError as found:
                    raise found from error
                time.sleep(0.1)
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise RankError(
                    f"no answer from another rank within {DEADLINE_S:.0f} s. End the job and go on"
                    " from the last checkpoint with --resume.",
                    code="rank-silent",
                ) from error
            raise

    def close(self) -> None:
        """Ends the connections. Where rank 0's work has not come to its end, the others end too:
        at once if they wait for it, else when their collectives fail."""
        with contextlib.suppress(RuntimeError):
            if self.rank == 0 and not self.is_done:
                self._store.set("failed", "1")
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    # ------------------------------------------------------------------ results

    def gather(self, values: Tensor) -> list[Tensor]:
        """Returns each rank's values, 1-D on the CPU, in the order of ranks."""
        own = values.cpu().contiguous()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([own.numel()]))
        most = max(int(count) for count in counts)
        if not most:
            return [own] * self.size
        # all_gather knows tensors of one size alone.
        padded = torch.zeros(most, dtype=own.dtype)
        padded[: own.numel()] = own
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [part[: int(count)] for part, count in zip(found, counts, strict=True)]


def _end_with_torchrun() -> None:
    """Lets this process end where torchrun is killed and cannot end it."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # Rank 0 has tools to end; the others hold nothing.
        number = signal.SIGTERM if os.environ["RANK"] == "0" else signal.SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _process_space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _difference(config: Config, hellos: Sequence[Hello]) -> str:
    """Why the ranks cannot work together, empty where they can."""
    first = hellos[0]
    for rank, hello in enumerate(hellos[1:], start=1):
        where = f"rank {rank} on {hello.host}"
        if hello.software != first.software:
            return (
                f"{where}: got {hello.software}, expected that of rank 0, {first.software}."
                " Install the same on every host."
            )
        if hello.config != first.config:
            other = differences(config, Config.model_validate_json(hello.config))
            return (
                f"{where}: its settings differ from those of rank 0: {'; '.join(other)} there. Give"
                " every rank the same recipe and overrides."
            )
    return ""


@contextlib.contextmanager
def deaf_to_ends() -> Iterator[None]:
    """Ignores the signals that ask for an end, for the time of the block: rank 0 gets them too,
    saves with the others' help, and then ends them."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {}
    for number in numbers:
        before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
