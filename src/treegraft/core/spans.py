"""Spans of OpenTelemetry: how an update spent its time, also in other processes. Nothing is
measured or imported unless a run asks for it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from treegraft.core.addresses import expanded
from treegraft.core.errors import SettingError
from treegraft.core.files import LineFile
from treegraft.core.packages import require

FILE = "file"
SETTING = "track.spans"
EXPORT_S = 5.0
"""Longest wait for a collector at the end of a process."""
_MODULES = {FILE: "opentelemetry.sdk", "": "opentelemetry.exporter.otlp.proto.http"}


class _Recording:
    """The spans of this process, on their way to a file or a collector."""

    def __init__(self, place: str, folder: str, role: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.place = place
        self.folder = folder
        facts: dict[str, str | int] = {"service.name": "treegraft", "treegraft.role": role}
        facts |= {"treegraft.run": Path(folder).name, "process.pid": os.getpid()}
        # As proposed in open-telemetry/semantic-conventions-genai#88.
        facts |= {"rl.system": "treegraft", "rl.run.id": Path(folder).name}
        self._provider = TracerProvider(resource=Resource.create(facts))
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter(role)))
        self.tracer = self._provider.get_tracer("treegraft")

    def _exporter(self, role: str) -> Any:
        if self.place != FILE:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter(endpoint=expanded(self.place, SETTING), timeout=EXPORT_S)
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        path = Path(self.folder) / f"spans-{re.sub('[^a-z0-9]+', '-', role)}.jsonl"
        LineFile(path).drop_cut()
        self._file = path.open("a", encoding="utf-8")
        return ConsoleSpanExporter(out=self._file, formatter=lambda one: one.to_json(None) + "\n")

    def end(self) -> None:
        """Sends what is left; later spans go nowhere."""
        self._provider.shutdown()
        if self.place == FILE:
            self._file.close()


_recording: _Recording | None = None
_starting = threading.Lock()


def check_place(place: str | None) -> None:
    """Refuses a place that spans cannot go to.

    Raises:
        SettingError: neither "file" nor an address, or OpenTelemetry is not installed.
    """
    if place is None:
        return
    if place != FILE and not place.startswith(("http://", "https://")):
        raise SettingError(
            f"{SETTING}: got '{place}', expected \"file\" or the address of a collector such as"
            " http://127.0.0.1:4318/v1/traces.",
            code="spans-place-invalid",
        )
    require(f"{SETTING} = '{place}'", _MODULES[FILE if place == FILE else ""])


@contextlib.contextmanager
def recorded(place: str | None, folder: Path, role: str) -> Iterator[None]:
    """Records the spans of this process for the time of the block.

    Args:
        place: "file" for spans-ROLE.jsonl in `folder`, or the address of a collector (OTLP over
            HTTP); None records nothing.
        folder: of the run.
        role: what this process does, such as "rank 0".
    """
    global _recording
    if place is None:
        yield
        return
    _recording = recording = _Recording(place, str(folder.resolve()), role)
    try:
        yield
    finally:
        _recording = None
        recording.end()


def span(name: str, **attributes: str | int | float) -> AbstractContextManager[Any]:
    """Returns a context that is one span, a child of the one around it; one without effect where
    nothing is recorded."""
    # Looked at once: another thread may work on after the recording has ended.
    recording = _recording
    if recording is None:
        return contextlib.nullcontext()
    return _recorded_span(recording, name, attributes)


@contextlib.contextmanager
def _recorded_span(
    recording: _Recording, name: str, attributes: Mapping[str, str | int | float]
) -> Iterator[Any]:
    from opentelemetry.trace import StatusCode

    with recording.tracer.start_as_current_span(name, attributes=attributes) as one:
        try:
            yield one
        except BaseException as error:
            # OpenTelemetry takes a cancelled task's span for one that went well.
            if not isinstance(error, Exception):
                one.set_status(StatusCode.ERROR, type(error).__name__)
            raise


def trace_headers() -> dict[str, str]:
    """Returns the present span as HTTP headers (W3C trace context); empty where nothing is
    recorded."""
    found: dict[str, str] = {}
    if _recording is not None:
        from opentelemetry.propagate import inject

        inject(found)
    return found


def carrier() -> dict[str, str]:
    """Returns what another process of the run needs to go on with the present span (`joined`);
    empty where nothing is recorded."""
    recording = _recording
    if recording is None:
        return {}
    return trace_headers() | {"place": recording.place, "folder": recording.folder}


@contextlib.contextmanager
def joined(carried: Mapping[str, str] | None, role: str) -> Iterator[None]:
    """Lets the spans of the block be children of another process's, whose `carrier` this is; the
    first one begins the recording, which ends with the process."""
    global _recording
    if not carried:
        yield
        return
    from opentelemetry import context
    from opentelemetry.propagate import extract

    with _starting:
        if _recording is None:
            _recording = _Recording(carried["place"], carried["folder"], role)
    token = context.attach(extract(carried))
    try:
        yield
    finally:
        context.detach(token)


def end_joined() -> None:
    """Ends the recording that `joined` has begun in this process, if any, and sends what is left;
    a later one begins another."""
    global _recording
    with _starting:
        recording = _recording
        _recording = None
    if recording is not None:
        recording.end()


class Clock:
    """Seconds of the parts of an update."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._cpu_began = time.process_time()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Adds the time of the block to a part."""
        began = time.monotonic()
        with span(part):
            yield
        self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - began

    def take_metrics(self) -> dict[str, float]:
        """Returns time/PART_s of each part, and time/update_s and time/cpu_s since the start."""
        return {f"time/{part}_s": seconds for part, seconds in self._parts.items()} | {
            "time/update_s": time.monotonic() - self._began,
            "time/cpu_s": time.process_time() - self._cpu_began,
        }
