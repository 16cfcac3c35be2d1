"""A Model Context Protocol server written by hand that answers badly, over standard input, or with
a port as argument over HTTP. Each tool is a way to do so."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MIB = 2**20
GOOD = "good"
WAYS = {
    "huge": "larger than max_answer_mb = 1",
    "no_line": "larger than max_answer_mb = 1",
    "surrogates": "cannot be read",
    "nested": "cannot be read",
    "bad_bytes": "cannot be read",
    "cut_off": "cannot be read",
    "id_last": "cannot be read",
    "no_id": "cannot be read",
    "shape": "unknown shape",
    "twice": GOOD,
    "trash": GOOD,
    "json_log": GOOD,
    "errors": GOOD,
    "questions": GOOD,
    "good": GOOD,
}
"""Tools, and what a call of each is to say."""
OVER_HTTP = {
    **WAYS,
    **dict.fromkeys(("bad_bytes", "cut_off", "id_last", "nested", "no_id"), "Invalid JSON"),
    **dict.fromkeys(("surrogates", "trash", "json_log", "questions"), "Invalid JSON"),
    "no_line": "1048576 byte limit",
    "twice": "which was not asked for",
}
"""The same over HTTP, where an answer is one message: "twice" packs it."""
TOOLS = [{"name": name, "inputSchema": {"type": "object", "properties": {}}} for name in WAYS]


def framed(number: Any, text: bytes) -> bytes:
    """An answer whose text is given as JSON writes it."""
    return b'{"jsonrpc":"2.0","id":%s,"result":{"content":[{"type":"text","text":"%s"}]}}' % (
        json.dumps(number).encode(),
        text,
    )


def lines(number: Any, name: str) -> Iterator[bytes]:
    """What a call writes, in pieces."""
    good = framed(number, f"{GOOD} {os.getpid()}".encode())
    if name == "huge":
        yield framed(number, b"x" * 100 * MIB)
    elif name == "no_line":
        yield from [b"x" * MIB] * 40
    elif name == "surrogates":
        yield framed(number, rb"\ud800")
    elif name == "nested":
        deep = b"[" * 100_000 + b"]" * 100_000
        yield good.replace(b'"content"', b'"structuredContent":%s,"content"' % deep)
    elif name == "bad_bytes":
        yield framed(number, b"\xff\xfe")
    elif name == "cut_off":
        yield good[:-3]
    elif name == "id_last":
        yield b'{"jsonrpc":"2.0","result":{"x":"%s\xff"},"id":%d}' % (b"y" * 10_000, number)
    elif name == "no_id":
        yield b'{"jsonrpc":"2.0","result":\xff}'
    elif name == "shape":
        yield b'{"jsonrpc":"2.0","id":%d,"result":{"content":5}}' % number
    elif name == "twice":
        yield good + b"\n" + good
    elif name == "trash":
        yield b"Listening ...\n\xff\x00\n\n[1]\n" * 5000 + good
    elif name == "json_log":
        yield b'{"level": "info", "id": 1}\n' * 100 + good
    elif name == "errors":
        for _ in range(60):
            os.write(2, b"e" * MIB)
        yield good
    elif name == "questions":
        ask = {"jsonrpc": "2.0", "method": "sampling/createMessage", "params": {}}
        for other in range(2000):
            yield json.dumps(ask | {"id": other}).encode() + b"\n"
        yield good
    else:
        yield good


def reply(request: dict[str, Any]) -> Iterator[bytes]:
    """The answer to a request, in pieces; none to a notification."""
    number = request.get("id")
    method = request.get("method")
    result: dict[str, Any] | None = None
    if number is None or method is None:
        return
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "hostile", "version": "1"}
    elif method == "tools/list":
        result = {"tools": TOOLS}
    elif method == "tools/call":
        yield from lines(number, request["params"]["name"])
        return
    if result is None:
        error = {"code": -32601, "message": "no such method"}
        yield json.dumps({"jsonrpc": "2.0", "id": number, "error": error}).encode()
    else:
        yield json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()


class Door(BaseHTTPRequestHandler):
    """The same over HTTP: one answer a request."""

    def do_POST(self) -> None:
        """Answers a request."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        parts = list(reply(request))
        name = request.get("params", {}).get("name")
        self.send_response(200 if parts else 202)
        kind = "application/json"
        body = b"".join(parts)
        if name == "no_line":
            kind = "text/event-stream"
            body = b"data: " + body
        if name == "twice":
            body = gzip.compress(body)
            self.send_header("content-encoding", "gzip")
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def do_GET(self) -> None:
        """There is no stream of messages from here."""
        self.send_error(405)

    def log_message(self, *args: Any) -> None:
        """Nothing is written."""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Door).serve_forever()
    for line in sys.stdin.buffer:
        written = False
        for part in reply(json.loads(line)):
            sys.stdout.buffer.write(part)
            written = True
        if written:
            sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
