"""The latest metrics of a process, for a Prometheus server that asks for them."""

from __future__ import annotations

import functools
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from treegraft import SettingError
from treegraft.extras.trackers.plugin import SETTING, address_of
from treegraft.parts import RunReader, listener, metrics


def _is_up(role: Any) -> float:
    return float(role.state == "live")


ROLES: Mapping[str, tuple[str, Callable[[Any], float | None]]] = {
    "treegraft_role_up": ("1 for an actor that is asked, 0 for one that is not", _is_up),
    "treegraft_role_starts": ("how often the actor was started", lambda one: one.num_starts),
    "treegraft_role_trees": ("trees that grow in an engine", lambda one: one.num_trees),
    "treegraft_role_version": ("policy version that an engine holds", lambda one: one.version),
    "treegraft_role_cpu_seconds": ("CPU time of the actor's process", lambda one: one.cpu_s),
    "treegraft_role_memory_bytes": ("memory of its process", lambda one: one.memory_bytes),
}
"""Family -> its meaning, and its value for an actor of a cluster; None for none."""
WAITS = "treegraft_role_waits"


def family_of(key: str) -> str:
    """Returns the name under which Prometheus knows a metric of the table: "reward/mean" is
    treegraft_reward_mean; "tools/{name}_calls" is treegraft_tools_calls, with a label `name`."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", "treegraft_" + re.sub(r"\{\w+\}", "_", key)).rstrip("_")


@functools.cache
def label_of(family: str) -> str | None:
    """Returns the label of a family that stands for the {name} of its metrics, None without."""
    found = (
        re.search(r"\{(\w+)\}", key) for key in metrics.known_metrics() if family_of(key) == family
    )
    return next((match[1] for match in found if match), None)


class _Collector:
    """Makes gauges of metrics at each request."""

    def __init__(self, read: Callable[[], Mapping[str, float]], labels: Mapping[str, str]) -> None:
        self._read, self._labels = read, labels

    def collect(self) -> Iterator[Any]:
        """Yields the families that have a value now."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for key, value in self._read().items():
            # A metric of the user's own keeps its name.
            known, name = metrics.find_entry(key) or (key, "")
            family = family_of(known)
            label = label_of(family)
            if family not in families:
                names = [*self._labels, *([label] if label else [])]
                told = metrics.known_metrics().get(known, "of an own part")
                families[family] = GaugeMetricFamily(family, told, labels=names)
            own = [*self._labels.values(), *([name] if label else [])]
            families[family].add_metric(own, float(value))
        yield from families.values()


class _RoleCollector:
    """Makes gauges of the actors of a cluster at each request, with the label `host` besides."""

    def __init__(self, read: Callable[[], Sequence[Any]], run: str) -> None:
        self._read, self._run = read, run

    def collect(self) -> Iterator[Any]:
        """Yields the families that have a value now."""
        from prometheus_client.core import GaugeMetricFamily

        roles = [((self._run, f"{one.name} {one.number}", one.host), one) for one in self._read()]
        names = ["run", "role", "host"]
        for family, (told, value_of) in ROLES.items():
            made = GaugeMetricFamily(family, told, labels=names)
            for labels, one in roles:
                if (value := value_of(one)) is not None:
                    made.add_metric(labels, float(value))
            if made.samples:
                yield made
        told = "what the actor waits for, and how often at once"
        made = GaugeMetricFamily(WAITS, told, labels=[*names, "owner"])
        for labels, one in roles:
            for owner, num in one.waits.items():
                made.add_metric((*labels, owner), float(num))
        if made.samples:
            yield made


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Says nothing: a request comes every few seconds."""


class Exporter:
    """Answers with a process's metrics under /metrics, until it is closed."""

    def __init__(
        self,
        place: str,
        read: Callable[[], Mapping[str, float]],
        *,
        run: str,
        role: str,
        roles: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        """Args:
            place: host and port; port 0 takes a free one.
            read: returns the metrics of the moment by their keys; called in other threads.
            run, role: labels of every metric, such as the run's name and "rank 0".
            roles: returns the actors of a cluster, whose own state is answered too; called in
                other threads.

        Raises:
            SettingError: nothing can be answered there.
        """
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(read, {"run": run, "role": role}))
        registry.register(_RoleCollector(roles, run))
        ProcessCollector(registry=registry)
        answer = make_wsgi_app(registry)
        address = address_of(place)
        assert address is not None, "checked with the settings"
        host, port = address

        def app(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
            # A page in a browser can give this machine a name of its own (DNS rebinding).
            if listener.is_own_name(environment.get("HTTP_HOST", ""), host):
                return answer(environment, start)
            start("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [b"refused: this server answers to names of its own machine only"]

        try:
            kind = _Server6 if ":" in host else _Server
            self._server = make_server(host, port, app, kind, _Quiet)
        except OSError as error:
            raise SettingError(
                f"{SETTING}: cannot listen on {place}: {error.strerror or error}; choose another"
                " port (port 0 takes a free one).",
                code="port-unusable",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_port}/metrics"
        self.place = f"metrics for Prometheus: {self.address}"
        threading.Thread(
            target=self._server.serve_forever, name="treegraft-metrics", daemon=True
        ).start()

    def close(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()


def prometheus(place: str, run_dir: Path, latest: Callable[[], Mapping[str, float]]) -> Exporter:
    """Returns what answers for the run in this folder; a "service" of the registry."""
    roles = RunReader(run_dir).roles
    return Exporter(place, latest, run=run_dir.name, role="rank 0", roles=roles)
