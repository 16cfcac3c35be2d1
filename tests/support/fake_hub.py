"""A hub on loopback with the few calls that an upload makes: repositories, branches, commits, large
files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = (".safetensors",)
TOKEN = "hf_of_the_test"


class FakeHub(ThreadingHTTPServer):
    """What was committed lies in `branches`; requests that begin with `refused`'s path fail."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, Any]] = {}
        self.branches: dict[tuple[str, str], dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.refused: tuple[str, int, str] | None = None

    def commit(self, repo: str, branch: str, body: bytes) -> None:
        files = self.branches[repo, branch]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None: ...

    def _say(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rsplit("/", 1)[1]] = self._body()
        self._say(200)

    def do_POST(self) -> None:
        hub = self.server
        body = self._body()
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._say(401, {"error": "Invalid token"})
        if hub.refused and path.startswith(hub.refused[0]):
            return self._say(hub.refused[1], {"error": hub.refused[2]})
        if path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            repo = f"{owner}/{asked['name']}"
            is_new = repo not in hub.repos
            hub.repos.setdefault(repo, asked)
            hub.branches.setdefault((repo, "main"), {})
            return self._say(200 if is_new else 409, {"url": f"{hub.address}/{repo}"})
        if path == "/api/validate-yaml":
            return self._say(200, {"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            return self._say(200, self._large(json.loads(body)))
        _, _, _, owner, name, action, branch = path.split("/")
        repo = f"{owner}/{name}"
        if action == "branch":
            hub.branches.setdefault((repo, branch), dict(hub.branches[repo, "main"]))
            return self._say(200, {})
        if action == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._say(200, {"files": files})
        hub.commit(repo, branch, body)
        return self._say(
            200,
            {"commitUrl": f"{hub.address}/{repo}/commit/1", "commitOid": "1", "success": True},
        )

    def _large(self, asked: dict[str, Any]) -> dict[str, Any]:
        place = f"{self.server.address}/blobs"
        return {
            "transfer": "basic",
            "objects": [
                {**one, "actions": {"upload": {"href": f"{place}/{one['oid']}"}}}
                for one in asked["objects"]
            ],
        }


@contextmanager
def hub_running() -> Iterator[FakeHub]:
    """Yields a hub that answers for the time of the block."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
