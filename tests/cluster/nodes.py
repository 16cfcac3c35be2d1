"""Ray clusters of several nodes on the loopback interface, and runs on them that tests disturb."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.tiny import tiny, write_recipe

ROOT = Path(__file__).resolve().parents[2]
TOKEN = secrets.token_hex(16)
"""Of every cluster that tests start: Ray keeps the first one that a process has had."""
NODE = {"num_cpus": 2, "object_store_memory": 100_000_000}


class Nodes:
    """A head without CPUs, and nodes with two each."""

    def __init__(self, num: int = 2) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": 100_000_000,
            },
        )
        self.nodes = [self.add() for _ in range(num)]

    def add(self) -> Any:
        """Adds a node and returns it."""
        return self.cluster.add_node(**NODE)

    def remove(self, pid: int) -> None:
        """Kills all processes of the node that this process belongs to."""
        above = {*ancestors(pid)}
        (lost,) = (one for one in self.nodes if one.all_processes["raylet"][0].process.pid in above)
        self.cluster.remove_node(lost, allow_graceful=False)


def ancestors(pid: int) -> Iterator[int]:
    """Yields the process that has started this one, that which has started it, and so on."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def variables() -> dict[str, str]:
    """Returns Ray's variables for a cluster on loopback that asks for a token."""
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }


@contextmanager
def three_nodes(**more: str) -> Iterator[Nodes]:
    """Holds a head and two nodes.

    Args:
        more: environment variables of all processes there.
    """
    before = dict(os.environ)
    os.environ.update(variables() | more)
    nodes = None
    try:
        nodes = Nodes()
        yield nodes
    finally:
        if nodes is not None:
            nodes.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


class Disturbed:
    """A run of `treegraft cluster` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.run = folder / "cluster"
        self.folder = folder
        self.log = folder / "cluster.log"
        self.mark = f"TREEGRAFT_TEST_MARK={secrets.token_hex(8)}"
        self.process = self.start(*arguments)

    @classmethod
    def at(cls, folder: Path, address: str, **tables: Mapping[str, Any]) -> Disturbed:
        """Starts a run of a tiny recipe with three engines."""
        table = {"address": address, "engines": 3, **tables.pop("cluster", {})}
        run = {"dir": str(folder), "name": "cluster", **tables.pop("run", {})}
        recipe = tiny(run=run, cluster=table, **tables)
        return cls(folder, str(write_recipe(folder / "cluster.json", recipe)))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts `treegraft cluster` with these arguments; its output is added to the log."""
        name, _, value = self.mark.partition("=")
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "treegraft", "cluster", *arguments],
                cwd=self.folder,
                env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **os.environ, name: value},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> dict[int, str]:
        """Returns the processes of the run, those of Ray that it started included: they have its
        mark in their environment."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace")[:200]
        return found

    def until_gone(self, timeout_s: float) -> dict[int, str]:
        """Returns the processes that are left after so long; none as soon as all have ended."""
        end = time.monotonic() + timeout_s
        while (found := self.processes()) and time.monotonic() < end:
            time.sleep(0.5)
        return found

    def engines(self) -> list[int]:
        """Returns the processes of the engines, each of which works in the folder of the run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_engine = (entry / "cmdline").read_bytes().startswith(b"ray::EngineActor")
                if is_engine and (entry / "cwd").resolve() == self.folder.resolve():
                    found.append(int(entry.name))
        return sorted(found)

    def kill(self) -> None:
        """Kills the process of an engine."""
        os.kill(self.engines()[0], signal.SIGKILL)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
        """Returns the condition's first true value; fails when the run ends before it, or late."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if found := condition():
                return found
            assert self.process.poll() is None, f"ended before {what}: {self.log.read_text()}"
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {timeout_s} s: {self.log.read_text()}")

    def num_lines(self) -> int:
        """Returns the updates that are done."""
        with suppress(OSError):
            return len((self.run / "metrics.jsonl").read_text().splitlines())
        return 0

    def wait(self, timeout_s: float = 300.0) -> int:
        """Returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        finally:
            self.end()

    def end(self) -> None:
        """Ends the run, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
