"""From a recipe to the engine "vllm": which Python, which servers, with which options."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

import treegraft
from treegraft.core.addresses import expanded
from treegraft.core.errors import SettingError
from treegraft.core.locate import locate
from treegraft.policy.checkpoint import write_model
from treegraft.policy.engine.vllm.checks import identity_of_model
from treegraft.policy.engine.vllm.engine import VllmEngine
from treegraft.policy.engine.vllm.replies import PLUGIN, TESTED
from treegraft.policy.engine.vllm.server import Process, Server
from treegraft.policy.load import ALLOCATOR, DTYPES
from treegraft.policy.output_head import base_model, end_token_ids, max_context
from treegraft.policy.shapes import PREFIX
from treegraft.policy.weights import ModelWeights, named_weights, plain_weights
from treegraft.settings.config import Config
from treegraft.settings.policy import VllmSettings

MODEL_NAME = "policy"
SHARED_MEMORY = Path("/dev/shm")
CPU_CACHE_GIB = "1"
"""Memory of a server on a CPU for keys and values; VLLM_CPU_KVCACHE_SPACE sets another."""
_OF_TORCHRUN = re.compile(
    r"TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$"
)
"""Variables by which a server would join the learner's ranks instead of its own processes."""


def build_engine(config: Config, model: Any, tokenizer: Any, model_path: Path | str) -> VllmEngine:
    """Returns the engine; nothing is started yet.

    Args:
        model: with weights if `needs_weights` says so, else its shape alone.
        model_path: where model and tokenizer come from.

    Raises:
        SettingError: no Python for servers, or no place for weights.
    """
    settings = config.engine.vllm
    urls = []
    for url in settings.servers:
        urls.append(expanded(url, "engine.vllm.servers").rstrip("/").removesuffix("/v1"))
    python = None if urls else find_python(settings)
    runs = Path(config.run.dir).expanduser().absolute()
    runs.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".servers-", dir=runs))
    folders = [work]
    try:
        weights = _folder_for_weights(config, model, work)
        folders.append(weights)
        if python is None:
            http = client({})
            servers = [Server(url, http) for url in urls]
        else:
            place = str(model_path)
            if needs_weights(config, model_path):
                place = str(work / "model")
                write_model(Path(place), model, named_weights(model))
                tokenizer.save_pretrained(place)
            # Not in `work`: the path of a socket has at most 107 characters.
            folders.append(Path(tempfile.mkdtemp(prefix="treegraft-")))
            http, servers = _own_servers(config, python, place, folders)
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    longest = max(config.rollout.max_completion_tokens, config.eval.max_completion_tokens or 0)
    return VllmEngine(
        servers,
        http,
        tokenizer,
        config.engine,
        expected=identity_of_model(
            base_model(model),
            dtype=config.model.dtype,
            max_context=1 + longest,
            entropies=settings.entropies,
        ),
        end_ids=end_token_ids(model, tokenizer.eos_token_id),
        max_context=max_context(model),
        weights=weights,
        folders=folders,
        initial=None if python else ModelWeights(plain_weights(model)),
    )


def client(sockets: Mapping[str, Path]) -> httpx.AsyncClient:
    """Returns the connection to servers.

    Args:
        sockets: by address, those of servers that listen at a file: the folder is ours alone, while
            any user of this machine can reach a port.
    """
    # Idle connections are closed before the server does so, after 5 s in vLLM: a request sent at
    # that moment would be lost.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    mounts = {}
    for url, path in sockets.items():
        mounts[url] = httpx.AsyncHTTPTransport(uds=str(path), limits=limits, trust_env=False)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, mounts=mounts)


def needs_weights(config: Config, model_path: Path | str) -> bool:
    """Returns whether this process has to read the model's weights before servers can have them:
    servers that run already get them published, and not every source is one that vLLM reads."""
    path = str(model_path)
    if config.engine.vllm.servers or path == "tiny" or path.startswith((PREFIX, "pypi:")):
        return True
    return locate(path)[1] is not None


def find_python(settings: VllmSettings) -> str:
    """Returns the Python that starts servers.

    Raises:
        SettingError: there is none.
    """
    if settings.python is None:
        # The working directory, and the clone that this package is run from.
        roots = (Path.cwd(), Path(__file__).parents[5])
        places = [root / ".vllm-env/bin/python" for root in roots]
    else:
        places = [Path(settings.python).expanduser().absolute()]
    for place in places:
        if place.exists():
            return str(place)
    raise SettingError(
        f"engine.vllm.python: there is no {' or '.join(map(str, places))}; expected the Python of"
        f" an environment with vLLM {TESTED} or later. Run `make vllm-env` in a clone of Treegraft,"
        " or name the Python of another environment.",
        code="vllm-python-missing",
    )


def _folder_for_weights(config: Config, model: Any, work: Path) -> Path:
    """Where published weights go: publish.folder, or shared memory if the servers are this run's
    own and it has room, or else a folder in run.dir."""
    parent = work
    if config.publish.folder:
        parent = Path(config.publish.folder).expanduser().absolute()
    elif not config.engine.vllm.servers and os.access(SHARED_MEMORY, os.W_OK):
        # Tied weights by each of their names, under all of which they are written.
        num_weights = sum(weight.numel() for weight in base_model(model).state_dict().values())
        num_bytes = num_weights * DTYPES[config.model.dtype].itemsize
        # A publish writes the new copy next to the former one.
        if shutil.disk_usage(SHARED_MEMORY).free > 2 * num_bytes:
            parent = SHARED_MEMORY
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"treegraft-weights-{os.getpid()}-", dir=parent))
    except OSError as error:
        raise SettingError(
            f"publish.folder: '{parent}' cannot be written to ({error.strerror}); expected a"
            " folder for two copies of the weights, which the servers see too.",
            code="publish-folder-unwritable",
        ) from error


def _own_servers(
    config: Config, python: str, model: str, folders: Sequence[Path]
) -> tuple[httpx.AsyncClient, list[Server]]:
    """The servers to start, and the connection to the sockets that they listen at."""
    settings = config.engine.vllm
    work = folders[0]
    sockets = folders[-1]
    # A link of its own: the folder with our package may have others, which would shadow those
    # of the servers' environment.
    packages = work / "packages"
    packages.mkdir()
    (packages / "treegraft").symlink_to(Path(treegraft.__file__).parent)
    each = settings.gpus or [""]
    paths = {f"http://server-{n}": sockets / f"http-{n}" for n in range(len(each))}
    http = client(paths)
    servers = []
    for number, (url, path) in enumerate(paths.items()):
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model]
        process = Process(
            [*command, *options(config, path)],
            environment=_environment(settings, each[number], packages, sockets),
            log=work / f"server-{number}.log",
            folders=folders,
        )
        servers.append(Server(url, http, process))
    return http, servers


def options(config: Config, path: Path) -> list[str]:
    """Returns the options of `vllm serve`, those of the recipe last, so that they win."""
    settings = config.engine.vllm
    found = ["--served-model-name", MODEL_NAME, "--uds", str(path)]
    found += ["--dtype", config.model.dtype, "--max-num-seqs", str(config.engine.max_rows)]
    found += ["--enable-scale-out"]
    # Of the distribution that was drawn from: after temperature and filters.
    found += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", PLUGIN]
    if config.model.trust_remote_code:
        found += ["--trust-remote-code"]
    if not torch.cuda.is_available():
        # Compiling takes minutes and gains little there.
        found += ["--enforce-eager"]
    return [*found, *settings.server_args]


def _environment(
    settings: VllmSettings, gpus: str, packages: Path, sockets: Path
) -> Mapping[str, str]:
    found = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.match(name)}
    # Both are for this process's Python and torch, and may break another's.
    for name in ("PYTHONHOME", ALLOCATOR):
        found.pop(name, None)
    found |= {
        "PYTHONPATH": str(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        # The routes for publishing; the server listens at a file that nobody else reaches.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        "TMPDIR": str(sockets),
    }
    if settings.entropies == "measured":
        found["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if gpus:
        found["CUDA_VISIBLE_DEVICES"] = gpus
    elif not torch.cuda.is_available():
        found.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
    return found
