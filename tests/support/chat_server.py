"""A server of OpenAI's chat completions on the loopback whose replies a test writes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any], int], tuple[int, Any]]
"""From a request and its number to a status and a body: an object for JSON, bytes as they are, None
for a hang-up."""


@contextmanager
def serving(
    reply: Reply, models: list[str] | bytes | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Runs a server; gives its address and the requests it got, their headers under "headers". A
    failed request may be repeated at once."""
    seen: list[dict[str, Any]] = []
    lock = threading.Lock()
    listed = models if isinstance(models, bytes) else _listed(models or ["only"])

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, listed)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(seen)
                seen.append({**body, "headers": dict(self.headers), "path": self.path})
            self.answer(*reply(body, number))

        def answer(self, status: int, body: Any) -> None:
            if body is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            with suppress(OSError):  # the client has gone
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def _listed(models: list[str]) -> dict[str, Any]:
    return {"data": [{"id": name} for name in models]}


def said(text: str | None, **more: Any) -> tuple[int, Any]:
    """A reply with this text."""
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": "stop", **more}]}
