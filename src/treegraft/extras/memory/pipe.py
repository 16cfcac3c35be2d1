"""Published weights from memory to memory, in buckets, without files: over a process group of
their own, or beside each other on one GPU by handles of its memory. What is said about them is
JSON; nothing is unpickled.

A server's workers and the run make a group apart from either side's own. It ends with the first
fault, so no half of a publish is ever taken for a whole one.

On GPUs (NCCL, handles) nothing of this has been run; over gloo it is what tests and CPUs run.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 1 << 28
"""Size from which a bucket is sent."""
_ALIGNED = 16
"""Every tensor of a bucket begins at a multiple of so many bytes, whatever its type."""
_untyped: Any = dist
_untyped_storage: Any = torch.UntypedStorage

Meta = list[tuple[str, str, list[int]]]
"""(name, type, shape) of the tensors of a bucket, in their order; an empty one ends a publish."""


class Bucket(NamedTuple):
    """Tensors on their way."""

    flat: Tensor
    """[bytes] all of them."""
    meta: Meta


class Pipe:
    """One end of a group of which number 0 sends."""

    def __init__(
        self, host: str, port: int, rank: int, size: int, kind: str, timeout_s: float
    ) -> None:
        """Args:
        host: of number 0, which listens on that interface alone.
        port: of number 0, which takes a free one for 0.
        kind: "gloo", "nccl", or "ipc" for processes on one GPU.

        Raises RuntimeError where number 0 cannot be reached.
        """
        self.rank, self._size, self._kind, self._num = rank, size, kind, 0
        self._host, self._wait = host, timedelta(seconds=timeout_s)
        self._group: Any = None
        # A store that listens by itself does so on all interfaces.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family) if rank == 0 else None
        self._store: Any = _untyped.TCPStore(
            host,
            port if listening is None else listening.getsockname()[1],
            size,
            listening is not None,
            timeout=self._wait,
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
        self.port = self._store.port

    def meet(self) -> None:
        """Waits for the others. Raises RuntimeError where they do not come in time."""
        store = _untyped.PrefixStore("weights", self._store)
        if self._kind == "nccl":
            self._group = _untyped.ProcessGroupNCCL(store, self.rank, self._size, self._wait)
        elif self._kind == "gloo":
            options = _untyped.ProcessGroupGloo._Options()
            options._timeout = self._wait
            own = address_towards(self._host)
            options._devices = [_untyped.ProcessGroupGloo.create_device(hostname=own)]
            self._group = _untyped.ProcessGroupGloo(store, self.rank, self._size, options)

    def close(self) -> None:
        """Ends it: whoever waits for a bucket is told so by an error."""
        self._group = self._store = None

    def send(self, bucket: Bucket) -> None:
        """Gives the others a bucket, and returns once its memory may change. Raises RuntimeError
        where one of them is lost."""
        number, self._num = self._num, self._num + 1
        flat, meta = bucket
        handle = handle_of(flat) if meta and self._kind == "ipc" else None
        self._store.set(f"bucket-{number}", json.dumps({"meta": meta, "handle": handle}))
        if handle is not None:
            self._store.wait([f"taken-{number}-{one}" for one in range(1, self._size)])
        elif meta:
            self._broadcast(flat)

    def receive(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a publish, on `device`. Raises RuntimeError where the sender is
        lost."""
        while True:
            number, self._num = self._num, self._num + 1
            said = json.loads(self._store.get(f"bucket-{number}"))
            if not said["meta"]:
                return
            if said["handle"] is not None:
                # The sender uses its memory again.
                flat = opened(said["handle"]).clone()
                torch.cuda.synchronize()
                self._store.set(f"taken-{number}-{self.rank}", "")
            else:
                size = _places(said["meta"])[-1][0]
                flat = torch.empty(size, dtype=torch.uint8, device=device)
                self._broadcast(flat)
            yield from parts_of(flat, said["meta"])

    def _broadcast(self, flat: Tensor) -> None:
        options = _untyped.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([flat], options).wait()
        if flat.is_cuda:
            torch.cuda.synchronize()


def address_towards(host: str) -> str:
    """Returns this machine's address on the network by which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, 9))  # nothing is sent
        found: str = asking.getsockname()[0]
    return found


# ------------------------------------------------------------------ buckets


def buckets(source: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yields a source's tensors in buckets of at least `size` bytes, but for the last two; the last
    one is empty and ends a publish."""
    held: list[tuple[str, Tensor]] = []
    for name, tensor in source:
        held.append((name, tensor.detach()))
        if sum(one.nbytes for _, one in held) >= size:
            yield bucket_of(held)
            held = []
    if held:
        yield bucket_of(held)
    yield bucket_of(())


def bucket_of(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """Returns the bytes of named tensors, on the device of the first one."""
    meta: Meta = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors]
    places = _places(meta)
    device = tensors[0][1].device if tensors else None
    flat = torch.empty(places[-1][0], dtype=torch.uint8, device=device)
    for (at, count), (_, tensor) in zip(places, tensors, strict=False):
        flat[at : at + count] = tensor.contiguous().view(-1).view(torch.uint8)
    return Bucket(flat, meta)


def _places(meta: Meta) -> list[tuple[int, int]]:
    """(first byte, bytes) of each tensor, and of the end."""
    found, at = [], 0
    for _, dtype, shape in meta:
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        found.append((at, size))
        at += size + -size % _ALIGNED
    return [*found, (at, 0)]


def parts_of(flat: Tensor, meta: Meta) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a bucket, which share its memory."""
    for (at, size), (name, dtype, shape) in zip(_places(meta), meta, strict=False):
        yield name, flat[at : at + size].view(getattr(torch, dtype)).view(shape)


# ------------------------------------------------------------------ memory of one GPU


def handle_of(flat: Tensor) -> list[Any]:
    """Returns what another process needs to open a GPU's memory: integers, and bytes in base64."""
    shared: tuple[Any, ...] = flat.untyped_storage()._share_cuda_()
    return [
        {"bytes": base64.b64encode(one).decode()} if isinstance(one, bytes) else one
        for one in shared
    ]


def opened(handle: Sequence[Any]) -> Tensor:
    """Returns the bytes that a handle names, of another process on the GPU of this one."""
    values = [base64.b64decode(one["bytes"]) if isinstance(one, dict) else one for one in handle]
    # The sender may see this GPU under another number.
    shared = _untyped_storage._new_shared_cuda(torch.cuda.current_device(), *values[1:])
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(shared)
