"""The latest metrics of a process, for a Prometheus server that asks for them."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from treegraft.core.errors import SettingError
from treegraft.core.listener import is_own_name
from treegraft.runs.metrics import METRICS, find_entry

SETTING = "track.prometheus"


def family_of(key: str) -> str:
    """Returns the name under which Prometheus knows a metric of the table: "reward/mean" is
    treegraft_reward_mean; "tools/{name}_calls" is treegraft_tools_calls, with a label `name`."""
    return re.sub(r"[^a-z0-9]+", "_", "treegraft_" + re.sub(r"\{\w+\}", "_", key)).rstrip("_")


@functools.cache
def label_of(family: str) -> str | None:
    """Returns the label of a family that stands for the {name} of its metrics, None without."""
    found = (re.search(r"\{(\w+)\}", key) for key in METRICS if family_of(key) == family)
    return next((match[1] for match in found if match), None)


def _address(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingError(
            f"{SETTING}: got '{place}', expected a host and a port such as \"127.0.0.1:9464\"."
        )
    return host.strip("[]"), int(port)


def check_exporter(place: str | None) -> None:
    """Refuses a place where nothing can be answered.

    Raises:
        SettingError: no host and port, or prometheus-client is not installed.
    """
    if place is None:
        return
    _address(place)
    if importlib.util.find_spec("prometheus_client") is None:
        raise SettingError(
            f"{SETTING}: got '{place}', but prometheus-client is not installed; run: pip install"
            ' "treegraft[prometheus]"'
        )


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
            known, name = find_entry(key) or (key, "")
            family = family_of(known)
            label = label_of(family)
            if family not in families:
                names = [*self._labels, *([label] if label else [])]
                told = METRICS.get(known, "of an own part")
                families[family] = GaugeMetricFamily(family, told, labels=names)
            own = [*self._labels.values(), *([name] if label else [])]
            families[family].add_metric(own, float(value))
        yield from families.values()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Says nothing: a request comes every few seconds."""


class Exporter:
    """Answers with a process's metrics under /metrics, until it is closed."""

    def __init__(
        self, place: str, read: Callable[[], Mapping[str, float]], *, run: str, role: str
    ) -> None:
        """Args:
            place: host and port; port 0 takes a free one.
            read: returns the metrics of the moment by their keys; called in other threads.
            run, role: labels of every metric, such as the run's name and "rank 0".

        Raises:
            SettingError: nothing can be answered there.
        """
        check_exporter(place)
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(read, {"run": run, "role": role}))
        ProcessCollector(registry=registry)
        answer = make_wsgi_app(registry)
        host, port = _address(place)

        def app(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
            # A page in a browser can give this machine a name of its own (DNS rebinding).
            if is_own_name(environment.get("HTTP_HOST", ""), host):
                return answer(environment, start)
            start("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [b"refused: this server answers to names of its own machine only"]

        try:
            self._server = make_server(host, port, app, _Server, _Quiet)
        except OSError as error:
            raise SettingError(
                f"{SETTING}: cannot listen on {place}: {error.strerror or error}; choose another"
                " port (port 0 takes a free one)."
            ) from error
        self.address = f"http://{host}:{self._server.server_port}/metrics"
        threading.Thread(
            target=self._server.serve_forever, name="treegraft-metrics", daemon=True
        ).start()

    def close(self) -> None:
        """Gives the port up."""
        self._server.shutdown()
        self._server.server_close()
