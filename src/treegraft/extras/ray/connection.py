"""The connection to Ray, and what is checked before any actor starts."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treegraft import Config, SettingError
from treegraft.extras.ray.settings import cluster_settings, num_engines
from treegraft.parts import packages, plain

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
    # Ray's own choice in coming versions: the variable of a process without GPUs stays as it is.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def refuse_without_ray() -> None:
    """Raises `SettingError` if Ray is missing."""
    if not packages.is_installed("ray"):
        raise SettingError(
            "cluster: Ray is not installed in this environment. Install it on every machine with"
            ' pip install "treegraft[ray]", or use `treegraft train`.',
            code="package-missing",
        )


def refuse_unfit(config: Config) -> None:
    """Raises `SettingError` for settings that do not fit a cluster."""
    if config.engine.kind == "vllm" and config.engine.vllm.servers:
        raise SettingError(
            f"engine.vllm.servers: got {config.engine.vllm.servers} on a cluster, whose engines"
            " start servers of their own; expected none. Leave it out, or use `treegraft train`.",
            code="servers-on-cluster",
        )
    count = num_engines(config)
    gpus = cluster_settings(config).server_gpus
    if gpus and max(gpus, count) % min(gpus, count):
        raise SettingError(
            f"cluster.engines: got {count} for cluster.server_gpus = {gpus}, expected a divisor or"
            " a multiple of it, so that each engine has as many, or each GPU as many engines.",
            code="engines-invalid",
        )


@contextmanager
def connected(config: Config) -> Iterator[Path]:
    """Connects to the cluster of `cluster.address`, checks its size, and leaves it at the end.

    Yields the path of a file in run.dir that exists as long, for machines to show that they see it.

    Raises:
        SettingError: settings that do not fit a cluster, no cluster at that address, or one that is
            too small.
    """
    refuse_unfit(config)
    refuse_without_ray()
    os.environ.update(_QUIET)
    address = cluster_settings(config).address
    needs = {
        "CPU": float(num_engines(config)),
        "GPU": float(cluster_settings(config).server_gpus),
    }
    with _local(needs) if address == "local" else _joined(address):
        import ray

        refuse_small(address, needs, ray.cluster_resources())
        runs = Path(config.run.dir).expanduser().absolute()
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".cluster-", dir=runs) as token:
            token.write(secrets.token_bytes(16))
            token.flush()
            yield Path(token.name)


@contextmanager
def _joined(address: str) -> Iterator[None]:
    """Connects to a cluster that runs already, and leaves it at the end of the block."""
    import ray

    try:
        _join(address=address)
    except (ConnectionError, ValueError, RuntimeError, AssertionError) as error:
        raise SettingError(
            f"cluster.address: no Ray cluster was reached at '{address}'"
            f" ({plain(str(error), 300)}); expected the head of one that runs, with the same token."
            ' Start it with `ray start --head`, correct the address, or leave it at "local".',
            code="cluster-not-reached",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _local(needs: Mapping[str, float]) -> Iterator[None]:
    """A cluster of this machine alone, on its loopback interface, which ends with the block."""
    # Before Ray is imported: it reads them once.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    # Short: the path of a socket in it has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tg-ray-"))
    # Ray makes its own folder one that all users of this machine may write to; ours around it is
    # for us alone.
    try:
        _join(
            num_cpus=int(max(os.cpu_count() or 1, needs.get("CPU", 0))),
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder / "r"),
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _join(**options: Any) -> None:
    """Connects this process, whose signals and output stay as they are."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    ray.init(
        namespace="treegraft",
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.WARNING,
        **options,
    )
    if threading.current_thread() is threading.main_thread():
        # Ray's own would end this process without saving.
        signal.signal(signal.SIGTERM, before)
    # Of each process that dies Ray prints pages, log_to_driver or not; the supervisor logs a line.
    with contextlib.suppress(AttributeError):
        ray._private.engine.print_to_stdstream = lambda *_, **__: None


def refuse_small(address: str, needs: Mapping[str, float], has: Mapping[str, float]) -> None:
    """Raises `SettingError` for a cluster with fewer CPUs or GPUs than the run needs."""
    for name, setting in (("CPU", "cluster.engines"), ("GPU", "cluster.server_gpus")):
        if has.get(name, 0.0) < needs[name]:
            raise SettingError(
                f"cluster: the cluster at '{address}' has {has.get(name, 0.0):g} {name}s, expected"
                f" at least {needs[name]:g} for what [cluster] asks for. Lower {setting}, or add"
                " nodes.",
                code="cluster-too-small",
            )
