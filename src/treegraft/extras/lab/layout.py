"""Which GPUs of a recipe hold ranks of the learner, the native engine, and servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treegraft import Config

SERVER_SHARE = 0.92
"""Of each of its GPUs that a server takes where nothing else is asked: vLLM 0.32's default of
--gpu-memory-utilization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """GPUs by number, from 0. Layout(num_gpus=2, ranks=1, servers=((1,),), is_native=False)"""

    num_gpus: int
    ranks: int
    """Those of the learner, on the first GPUs."""
    servers: tuple[tuple[int, ...], ...]
    """The GPUs of each engine: the native one on the first GPU, or each server that a run
    starts."""
    is_native: bool

    @classmethod
    def of(cls, config: Config, num_gpus: int) -> Layout:
        """Returns the layout that a recipe has on so many GPUs of one machine."""
        vllm, ranks = config.engine.vllm, config.learn.ranks
        is_native = config.engine.kind != "vllm"
        if is_native:
            servers: tuple[tuple[int, ...], ...] = ((0,),)
        elif vllm.servers:
            # They were started elsewhere, on GPUs that are not this run's.
            servers = ()
        else:
            named = _numbered(vllm.gpus) or [(one,) for one in range(num_gpus)]
            servers = tuple(named[n % len(named)] for n in range(vllm.num_servers))
        if ranks == "auto":
            # As many as torchrun is given: all GPUs, but for those that a recipe names for servers.
            taken = {one for gpus in servers for one in gpus} if vllm.gpus else set()
            ranks = len(set(range(num_gpus)) - taken) or num_gpus
        return cls(num_gpus=num_gpus, ranks=ranks, servers=servers, is_native=is_native)

    def num_servers_on(self, gpu: int) -> int:
        """Returns how many engines share a GPU."""
        return sum(gpu in gpus for gpus in self.servers)

    def kinds(self) -> dict[str, list[int]]:
        """Returns the GPUs that hold the same, by what they hold in words."""
        found: dict[str, list[int]] = {}
        for gpu in range(self.num_gpus):
            parts = ["learner"] if gpu < self.ranks else []
            if count := self.num_servers_on(gpu):
                one = "engine" if self.is_native else "server"
                parts.append(one if count == 1 else f"{count} {one}s")
            found.setdefault(" and ".join(parts) or "nothing", []).append(gpu)
        return found

    def problem(self, config: Config) -> str:
        """Returns why this layout cannot be, "" where it can."""
        highest = max((gpu for gpus in self.servers for gpu in gpus), default=0)
        if self.ranks > self.num_gpus:
            return (
                f"learn.ranks: got {self.ranks} with {self.num_gpus} GPUs; expected a GPU for each"
                " rank"
            )
        if highest >= self.num_gpus:
            return (
                f"engine.vllm.gpus: names GPU {highest}, expected numbers from 0 to"
                f" {self.num_gpus - 1}"
            )
        if self.ranks % config.learn.replicate:
            return (
                f"learn.replicate: got {config.learn.replicate} with {self.ranks} ranks; expected a"
                " divisor of the number of ranks"
            )
        return ""


def _numbered(gpus: Sequence[str]) -> list[tuple[int, ...]]:
    """The entries of engine.vllm.gpus as numbers; those that are names count on from 0."""
    names: dict[str, int] = {}
    return [
        tuple(
            int(one) if one.isdecimal() else names.setdefault(one, len(names))
            for one in (part.strip() for part in entry.split(","))
        )
        for entry in gpus
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a recipe's options of `vllm serve` say of its memory."""

    share: float | None
    """Of each of its GPUs, 0..1; None if the next says how much it is."""
    cache: float
    """Bytes for keys and values."""
    tensor_parallel: int

    @classmethod
    def of(cls, config: Config) -> ServerOptions:
        """Returns those of engine.vllm.server_args; values that are not numbers count as absent."""
        given = config.engine.vllm.server_args
        share = _option(given, "--gpu-memory-utilization")
        cache = _option(given, "--kv-cache-memory-bytes")
        if share is None and cache is None:
            share = SERVER_SHARE
        return cls(share=share, cache=cache or 0.0, tensor_parallel=config.engine.vllm.gpus_each)


def _option(arguments: Sequence[str], *names: str) -> float | None:
    for n, word in enumerate(arguments):
        name, is_joined, value = word.partition("=")
        if name in names:
            text = value if is_joined else (*arguments[n + 1 :], "")[0]
            try:
                return float(text)
            except ValueError:
                return None
    return None
