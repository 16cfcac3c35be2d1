"""Part 3: weights from one process to another, by every way that this machine has, and checksums.

Random weights, two processes, torch alone: no server is needed.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.card.bench import Bench, Work, check
from treegraft.extras.memory.pipe import Pipe, buckets
from treegraft.policy.engine.vllm.folder import WeightsFolder, write_folder
from treegraft.policy.weights import ModelWeights, plain_weights, weights_fingerprint

SMALL, LARGE = "qwen2.5-1.5b", "qwen2.5-7b"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_WAIT_S = 60.0


def works(bench: Bench) -> list[Work]:
    """Returns the works of this part."""
    if bench.device.type == "cpu":
        kinds: tuple[tuple[str, str, bool], ...] = (("gloo", SMALL, False),)
    else:
        kinds = (
            ("ipc", SMALL, False),
            ("ipc", SMALL, True),
            ("ipc", LARGE, False),
            ("gloo", SMALL, False),
            ("nccl", SMALL, False),
            ("nccl", LARGE, False),
        )
    return [
        Work("checksums", _checksums),
        *(
            Work(
                f"{kind}, {name}" + (", segments that grow" if grows else ""),
                functools.partial(_sent, kind=kind, name=name, grows=grows),
                60.0,
            )
            for kind, name, grows in kinds
        ),
        Work("files", _files, 60.0),
    ]


def _checksums(bench: Bench) -> None:
    for name in bench.pick((SMALL, LARGE), (SMALL,)):
        what = f"checksum, {name}"
        with bench.measure(what, "s"):
            weights = bench.model(name).state_dict()
            on_host = {key: tensor.cpu() for key, tensor in list(weights.items())[:8]}
            weights_fingerprint(weights)
            seconds = bench.timed(functools.partial(weights_fingerprint, weights))
            bench.add(what, seconds, "s", bound=1.0, note="goal: under 1 s")
            own = {key: weights[key] for key in on_host}
            wrong = float(weights_fingerprint(own) != weights_fingerprint(on_host))
            check(bench, f"{what}: unlike that of the same weights on a CPU", wrong, 0.0, "sums")


def _sent(bench: Bench, *, kind: str, name: str, grows: bool) -> None:
    """Three publishes of bfloat16 weights by a pipe, of which the first one is apart: it meets."""
    what = f"publish by {kind}, {name}" + (", segments that grow" if grows else "")
    where = str(bench.device)
    if kind == "nccl":
        if torch.cuda.device_count() < 2:
            note = "left out: one GPU here, and NCCL refuses two processes on one"
            bench.add(what, None, "s", note=note)
            return
        where = "cuda:1"
    if bench.device.type == "cuda":
        # Before anything lies on the card.
        growing = f"expandable_segments:{grows}"
        torch.cuda.memory._set_allocator_settings(growing)
    source = ModelWeights(plain_weights(bench.model(name)))
    num_bytes = sum(tensor.nbytes for _, tensor in source)
    pipe = Pipe("127.0.0.1", 0, 0, 2, kind, _WAIT_S)
    with _receiver(bench, pipe.port, kind, where, name) as other:
        seconds, spent = _meets(pipe, other), []
        bench.add(f"{what}: meeting, with the other process's start", seconds, "s")
        for number in range(3):
            for tensor in source.tensors.values():
                # Other weights each time, so that a publish that does nothing shows.
                tensor.mul_(1.5)
            source = ModelWeights(source.tensors)
            bench.wait()
            begun = time.perf_counter()
            other.say("receive")
            for bucket in buckets(source):
                pipe.send(bucket)
            found = other.answer()
            seconds = time.perf_counter() - begun
            wrong = float(found["fingerprint"] != source.fingerprint)
            check(bench, f"{what}, number {number + 1}: checksum is another", wrong, 0.0, "sums")
            spent.append(seconds)
        speed = num_bytes / min(spent) / 1e9
        note = f"{num_bytes / 1e9:.2f} GB, {speed:.1f} GB/s; the first {spent[0]:.3f} s"
        bench.add(what, min(spent), "s", bound=1.0, note=f"{note}; goal: under 1 s")
    pipe.close()


def _files(bench: Bench) -> None:
    """The way that stays for CPUs and adapters: a folder in shared memory, written and read."""
    name = SMALL
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else None
    source = ModelWeights(plain_weights(bench.model(name)))
    num_bytes = sum(tensor.nbytes for _, tensor in source)
    if parent and shutil.disk_usage(parent).free < 2 * num_bytes:
        parent = None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        begun = time.perf_counter()
        written = write_folder(Path(folder) / "weights", source)
        middle = time.perf_counter()
        read = {key: tensor.to(bench.device) for key, tensor in WeightsFolder(written.path)}
        bench.wait()
        ended = time.perf_counter()
        wrong = float(weights_fingerprint(read) != source.fingerprint)
    what = f"publish by files, {name}"
    check(bench, f"{what}: checksum is another", wrong, 0.0, "sums")
    place = "shared memory" if parent else "a disk"
    note = f"{place}: {middle - begun:.2f} s written, {ended - middle:.2f} s read by one process"
    bench.add(what, ended - begun, "s", note=note)


class _Receiver:
    """The other process: what is said to it, and what it answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def say(self, line: str) -> None:
        """Tells it one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, str]:
        """Returns its next line; raises RuntimeError where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the receiver ended with status {self.process.wait(10.0)}")
        said: dict[str, str] = json.loads(line)
        return said


@contextmanager
def _receiver(bench: Bench, port: int, kind: str, where: str, name: str) -> Iterator[_Receiver]:
    fields = json.dumps(bench.fields(name))
    command = [sys.executable, "-m", "benchmarks.card.receiver", "127.0.0.1", str(port)]
    command += [kind, where, fields]
    # The receiver allocates as a server does: by torch's default.
    environment = {key: one for key, one in os.environ.items() if key != ALLOCATOR}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
        try:
            yield _Receiver(process)
        except Exception as error:
            process.kill()
            process.wait()
            errors.seek(0)
            said = (errors.read().strip().splitlines() or [""])[-1]
            raise RuntimeError(f"{error} (the receiver: {said[:160]})") from error
        finally:
            process.kill()
            process.wait()


def _meets(pipe: Pipe, other: _Receiver) -> float:
    """Seconds until both are there; raises RuntimeError where the other one has ended."""
    begun = time.perf_counter()
    faults: list[BaseException] = []

    def meet() -> None:
        try:
            pipe.meet()
        except Exception as error:
            faults.append(error)

    meeting = threading.Thread(target=meet, daemon=True)
    meeting.start()
    while meeting.is_alive():
        meeting.join(0.1)
        if other.process.poll() is not None:
            raise RuntimeError(f"the receiver ended with status {other.process.returncode}")
    if faults:
        raise faults[0]
    return time.perf_counter() - begun
