"""Search over HTTP and in the web: real servers on loopback, in each provider's documented shape,
and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from starlette.testclient import TestClient
from tests.support.error_codes import raises_code

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.interfaces import Passage
from treegraft.core.listener import address_of, listen
from treegraft.core.types import Task
from treegraft.extras.search.local import open_corpus
from treegraft.extras.search.remote import RemoteSearch, retrieve_url
from treegraft.extras.search.serve import search_app
from treegraft.extras.search.web import PROVIDERS, WebSearch
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.table import with_value
from treegraft.tools.build import build_tools
from treegraft.tools.search.tool import SearchTool

TOOLS = type(Config().tools)
"""The table [tools] with what plugins add."""
TASK = Task(id="t", question="?", reference=())
ROWS = [
    {"id": "0", "contents": '"Paris"\nParis is the capital of France.'},
    {"id": "1", "contents": '"Berlin"\nBerlin is the capital of Germany.'},
    {"id": 2, "contents": '"Banana"\nA yellow fruit.'},
]
Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def web_server(answer: Callable[[str, str, dict[str, str], bytes], Answer]) -> Iterator[str]:
    """A server on loopback that answers with what `answer(method, path, headers, body)` says; gives
    its address."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, data = answer(
                self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body
            )
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(data)
            except OSError:
                self.close_connection = True

        do_GET = do_POST = _handle

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def corpus(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def retrieval(tmp_path: Path) -> Iterator[str]:
    """A retrieval server over ROWS; gives its address."""
    import uvicorn

    listener = listen("127.0.0.1", 0)
    app = search_app(open_corpus(str(corpus(tmp_path))), default_top_k=2, host="127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"{address_of(listener)}retrieve"
    server.should_exit = True
    thread.join()
    listener.close()


# ---------------------------------------------------------------------- the retrieve protocol


def test_the_server_speaks_search_r1s_protocol(retrieval: str) -> None:
    asked = {"queries": ["capital of France", "yellow", "zebra"], "topk": 1, "return_scores": True}
    answer = httpx.post(retrieval, json=asked, timeout=60).json()
    first, second, third = answer["result"]
    assert (first[0]["document"], second[0]["document"], third) == (ROWS[0], ROWS[2], [])
    assert first[0]["score"] > 0 and set(first[0]) == {"document", "score"}
    bare = httpx.post(retrieval, json={"queries": ["capital"]}, timeout=60).json()
    assert bare == {"result": [ROWS[:2]]}  # without scores, and as many as the server's own top k
    health = retrieval.replace("/retrieve", "/health")
    assert httpx.get(health, timeout=60).json() == {"status": "ok"}
    assert httpx.post(retrieval, json={"queries": []}, timeout=60).json() == {"result": []}


def test_bad_requests_are_told_what_is_wrong(retrieval: str) -> None:
    bad = {
        b"{": "Expecting",
        b"[]": "expected an object",
        b"[" * 100_000: "nested",
        b'{"queries": "x"}': "'queries'",
        b'{"queries": [1]}': "'queries'",
        b'{"queries": ["x"], "topk": 0}': "'topk'",
        b'{"queries": ["x"], "topk": true}': "'topk'",
        b'{"queries": ["x"], "topk": 1001}': "'topk'",
        b'{"queries": ["' + b"x" * 10_001 + b'"]}': "got 10001 characters, expected 10000 at most",
        b'{"queries": ["x"' + b', "x"' * 100 + b'], "topk": 1000}': "ask for 101000 passages",
    }
    for body, part in bad.items():
        headers = {"content-type": "application/json; charset=utf-8"}
        answer = httpx.post(retrieval, content=body, headers=headers, timeout=60)
        assert answer.status_code == 422 and part in answer.json()["detail"], body[:40]
    # A page in a browser whose name was made to point here.
    assert (
        httpx.post(
            retrieval, json={"queries": ["x"]}, headers={"Host": "evil.example"}, timeout=60
        ).status_code
        == 421
    )
    assert httpx.get(retrieval, timeout=60).status_code == 405


def test_half_a_surrogate_pair_passes_both_ways() -> None:
    """A cut emoji, which JSON can hold and UTF-8 cannot."""

    class Odd:
        async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
            return [[Passage("1", f"{query} found", 1.0)] for query in queries]

        async def close(self) -> None:
            pass

    app = search_app(Odd(), default_top_k=1, host="127.0.0.1")
    with TestClient(app, base_url="http://127.0.0.1") as client:
        asked = {"content": b'{"queries": ["x \\ud83d", "y"]}'}
        found = client.post("/retrieve", **asked, headers={"content-type": "application/json"})
    assert [one[0]["contents"] for one in found.json()["result"]] == ["x \ud83d found", "y found"]

    def answers(seen: Any, *_: Any) -> Answer:
        return 200, {}, b'{"result": [[]]}'

    with web_server(answers) as url:
        assert asyncio.run(RemoteSearch(url, timeout_s=5).search(["x \ud83d"], 3)) == [[]]


def test_the_tool_asks_the_server(retrieval: str) -> None:
    tool = SearchTool(RemoteSearch(retrieval), top_k=2)
    expected = (
        'Doc 1: "Paris" Paris is the capital of France.\nDoc 2: "Berlin" Berlin is the capital of'
        " Germany."
    )

    async def work() -> None:
        answers = await asyncio.gather(*(tool("capital of France", TASK) for _ in range(20)))
        assert set(answers) == {expected}
        await tool.close()

    asyncio.run(work())
    # Another event loop, with the connections of the first one gone.
    asyncio.run(work())
    assert retrieve_url(retrieval.removesuffix("/retrieve")) == retrieval
    settings = TOOLS.model_validate(
        {"use": ["search"], "search": {"kind": "http", "url": retrieval}}
    )
    (built,) = build_tools(settings, ())
    asyncio.run(built.close())


def test_documents_in_other_servers_shapes() -> None:
    result: list[Any] = [
        {"document": {"id": "1", "contents": "one"}, "score": 0.5},
        {"document": {"title": "T", "text": "two"}, "score": "0.4"},
        {"text": "three"},
        {"id": 4, "contents": "four"},
    ]
    with web_server(lambda *_: (200, {}, json.dumps({"result": [result]}).encode())) as url:
        (found,) = asyncio.run(RemoteSearch(url).search(["x"], 4))
    assert [(p.id, p.contents, p.score) for p in found] == [
        ("1", "one", 0.5),
        ("", '"T"\ntwo', 0.4),
        ("", "three", 0.0),
        (4, "four", 0.0),
    ]


FLOOD = b"x" * 1_000_000


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((200, {}, b"<html>"), "service-no-json"),
        ((200, {}, b'{"results": []}'), "search-protocol"),
        ((200, {}, b'{"result": []}'), "search-answers-unequal"),
        ((200, {}, b'{"result": [[3]]}'), "search-protocol"),
        ((200, {}, b"[" * 100_000), "service-no-json"),
        ((422, {}, b'{"detail": "no"}'), "service-failed"),
        ((500, {}, b"Internal Server Error"), "service-failed"),
        ((429, {}, b""), "service-failed"),
        ((302, {"Location": "http://127.0.0.1:9/"}, b""), "service-failed"),
        ((200, {}, FLOOD * 12), "service-too-long"),
    ],
)
def test_a_broken_server_is_our_failure_not_the_agents(answer: Answer, code: str) -> None:
    with web_server(lambda *_: answer) as url, raises_code(code):
        asyncio.run(RemoteSearch(url).search(["x"], 3))


def test_a_slow_server_is_left_at_the_deadline() -> None:
    released = threading.Event()

    def slow(*_: Any) -> Answer:
        released.wait(20)
        return 200, {}, b'{"result": [[]]}'

    with web_server(slow) as url:
        began = time.monotonic()
        with raises_code("service-late"):
            asyncio.run(RemoteSearch(url, timeout_s=0.2).search(["x"], 3))
        released.set()
    assert time.monotonic() - began < 15


def test_a_server_that_is_not_there_is_noticed_before_the_run() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        settings = TOOLS.model_validate({"use": ["search"], "search": {"kind": "http", "url": url}})
        with raises_code(
            "search-not-there",
            match=r"tools\.search\.url: .* cannot be reached.*treegraft serve search CORPUS",
        ):
            build_tools(settings, ())
    for wrong in ("", "127.0.0.1:8000", "ftp://x/retrieve", "http:///retrieve"):
        with raises_code("address-invalid", match=r"tools\.search\.url: got"):
            RemoteSearch(wrong)


def test_only_json_is_carried_out(retrieval: str) -> None:
    # Another origin's page may send these without a preflight request.
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"content-type": kind}
        answer = httpx.post(retrieval, content=b'{"queries": ["x"]}', headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["detail"]) == (
            415,
            "expected the content type application/json",
        )


def test_a_client_that_hangs_up_leaves_no_traceback(
    retrieval: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = retrieval.removeprefix("http://").partition("/")[0].split(":")
    head = f"POST /retrieve HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    for _ in range(5):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n".encode() + b'{"queries"')
    answer = httpx.post(retrieval, json={"queries": ["capital"]}, timeout=60)
    assert answer.status_code == 200 and not caplog.records


def test_a_heavy_request_does_not_hold_up_the_others() -> None:
    class Slow:
        is_remote = False
        fingerprint = "slow"

        async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
            sizes.append(len(queries))
            await asyncio.sleep(0.01)
            return [[] for _ in queries]

        async def close(self) -> None: ...

    async def ask() -> list[str]:
        order: list[str] = []

        async def one(name: str, num: int) -> None:
            answer = await client.post("/retrieve", json={"queries": ["x"] * num})
            assert len(answer.json()["result"]) == num
            order.append(name)

        app = search_app(Slow(), default_top_k=1, host="127.0.0.1")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            heavy = asyncio.create_task(one("heavy", 1000))
            await asyncio.sleep(0.03)
            await one("light", 1)
            await heavy
        return order

    sizes: list[int] = []
    assert asyncio.run(ask()) == ["light", "heavy"]
    assert max(sizes) == 32 and sum(sizes) == 1001


def test_beyond_loopback_a_server_answers_to_any_name(tmp_path: Path) -> None:
    for host, status in (("0.0.0.0", 200), ("localhost", 421)):
        app = search_app(open_corpus(str(corpus(tmp_path))), default_top_k=2, host=host)
        with TestClient(app, base_url="http://search.cluster") as client:
            assert client.get("/health").status_code == status


def test_two_servers_cannot_share_a_port() -> None:
    listener = listen("127.0.0.1", 0)
    with raises_code("port-unusable"):
        listen("127.0.0.1", listener.getsockname()[1])
    listener.close()


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    # A shell without job control starts what stands before "&" with Ctrl-C ignored; the command
    # answers to it all the same.
    command = [
        sys.executable,
        "-m",
        "treegraft",
        "serve",
        "search",
        str(corpus(tmp_path)),
        "tools.search.kind=dense",
        "tools.search.encoder=hashing",
    ]
    command += ["--port", "0"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.startswith("3 passages of ") and "http://127.0.0.1:" in line
    url = next(word for word in line.split() if word.startswith("http"))
    ((entry,),) = httpx.post(
        url, json={"queries": [ROWS[1]["contents"]], "topk": 1}, timeout=60
    ).json()["result"]
    assert entry == ROWS[1]
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "")


# ---------------------------------------------------------------------- the web


SERPER = {
    "searchParameters": {"q": "q", "type": "search", "num": 2},
    "answerBox": {"title": "France / Capital", "answer": "Paris", "link": "https://a.example/"},
    "knowledgeGraph": {"title": "Paris", "attributes": {"Mayor": "x"}},
    "organic": [
        {
            "title": "Paris",
            "link": "https://b.example/",
            "snippet": "Capital of France",
            "position": 1,
        },
        {"title": "No snippet", "link": "https://c.example/", "position": 2},
    ],
    "credits": 1,
}
BRAVE = {
    "type": "search",
    "query": {"original": "q"},
    "web": {
        "type": "search",
        "results": [
            {
                "title": "Paris &amp; more",
                "url": "https://b.example/",
                "description": "The <strong>capital</strong> of France",
            },
            {"title": "Two", "url": "https://c.example/", "description": "1 < 2"},
        ],
    },
}
TAVILY = {
    "query": "q",
    "answer": None,
    "images": [],
    "results": [
        {
            "title": "Paris",
            "url": "https://b.example/",
            "content": "Capital of France",
            "score": 0.9,
            "raw_content": None,
        },
        {
            "title": "Two",
            "url": "https://c.example/",
            "content": "Second\nline",
            "score": 0.4,
            "raw_content": None,
        },
    ],
    "response_time": 1.2,
}
CASES: dict[str, tuple[Any, str, tuple[str, str], list[str]]] = {
    "serper": (
        SERPER,
        "POST /search",
        ("x-api-key", "KEY"),
        [
            "France / Capital | https://a.example/ | Paris",
            "Paris | https://b.example/ | Capital of France",
        ],
    ),
    "brave": (
        BRAVE,
        "GET /res/v1/web/search",
        ("x-subscription-token", "KEY"),
        [
            "Paris & more | https://b.example/ | The capital of France",
            "Two | https://c.example/ | 1 < 2",
        ],
    ),
    "tavily": (
        TAVILY,
        "POST /search",
        ("authorization", "Bearer KEY"),
        [
            "Paris | https://b.example/ | Capital of France",
            "Two | https://c.example/ | Second line",
        ],
    ),
}
"""Provider: its answer, what it must be asked by, the key's header, and what is read out of it."""


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for provider in PROVIDERS.values():
        monkeypatch.setenv(provider.key_variable, "KEY")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", CASES)
def test_each_provider_is_asked_and_read_as_it_documents(name: str, keys: None) -> None:
    answer, line, (header, key), expected = CASES[name]
    seen: list[tuple[str, dict[str, Any]]] = []

    def provider(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        parts = urlsplit(path)
        asked = json.loads(body) if body else {k: v[0] for k, v in parse_qs(parts.query).items()}
        seen.append((f"{method} {parts.path}", asked))
        assert headers[header] == key
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    with web_server(provider) as url:
        tool = SearchTool(WebSearch(name, base_url=url + "/"), top_k=2)
        text = asyncio.run(tool("capital of France?", TASK))
    assert text == "\n".join(f"Doc {rank}: {one}" for rank, one in enumerate(expected, start=1))
    ((asked_line, asked),) = seen
    assert asked_line == line
    query = asked.get("q") or asked.get("query")
    assert query == "capital of France?" and 2 in [
        int(v) for k, v in asked.items() if k in ("num", "count", "max_results")
    ]


@pytest.mark.parametrize("name", CASES)
def test_nothing_found_and_answers_of_another_shape(name: str, keys: None) -> None:
    with web_server(lambda *_: (200, {}, b"{}")) as url:
        assert asyncio.run(WebSearch(name, base_url=url).search(["x"], 3)) == [[]]
    with (
        web_server(lambda *_: (200, {}, b'["x"]')) as url,
        raises_code("service-other-shape"),
    ):
        asyncio.run(WebSearch(name, base_url=url).search(["x"], 3))


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (401, ToolUnavailable, "service-failed"),
        (402, ToolUnavailable, "service-failed"),
        (403, ToolUnavailable, "service-failed"),
        (429, ToolUnavailable, "service-failed"),
        (503, ToolUnavailable, "service-failed"),
        (422, ToolError, "service-refuses"),
        (400, ToolError, "service-refuses"),
    ],
)
def test_whose_fault_it_was(status: int, kind: type[ToolError], code: str, keys: None) -> None:
    with (
        web_server(lambda *_: (status, {}, b"reason")) as url,
        raises_code(code) as caught,
    ):
        asyncio.run(WebSearch("brave", base_url=url).search(["x"], 3))
    assert type(caught.value) is kind and "KEY" not in str(caught.value).replace("API key", "")


def test_a_missing_key_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, provider in PROVIDERS.items():
        monkeypatch.delenv(provider.key_variable, raising=False)
        settings = TOOLS.model_validate(
            {"use": ["search"], "search": {"kind": "web", "provider": name}}
        )
        with raises_code("key-unset"):
            build_tools(settings, ())
    monkeypatch.setenv("BRAVE_API_KEY", "a\nb")
    with raises_code("key-invalid"):
        WebSearch("brave")
    monkeypatch.setenv("BRAVE_API_KEY", "KEY")
    with raises_code("address-invalid"):
        WebSearch("brave", base_url="localhost:1")
    with raises_code("unknown-provider"):
        WebSearch("brve")


def test_a_missing_corpus_is_an_error_before_the_run(tmp_path: Path) -> None:
    for kind in ("bm25", "dense"):
        search = {"kind": kind, "corpus": str(tmp_path / "nowhere.jsonl"), "encoder": "hashing"}
        with raises_code("corpus-missing"):
            build_tools(TOOLS.model_validate({"use": ["search"], "search": search}), ())
    assert os.listdir(tmp_path) == []


def test_a_search_of_ones_own_at_an_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_search.py").write_text(
        "from treegraft.parts import interfaces\n"
        "class Echo:\n"
        "    is_remote, fingerprint = False, 'echo'\n"
        "    def __init__(self, search):\n"
        "        if search.top_k > 9:\n"
        "            raise ValueError('nine at most')\n"
        "    async def search(self, queries, top_k):\n"
        "        return [[interfaces.Passage('1', one.upper(), 1.0)] * top_k for one in queries]\n"
        "    async def close(self):\n"
        "        pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tables = {"use": ["search"], "search": {"kind": "own_search:Echo", "top_k": 2}}
    tools = load_config({"tools": tables, "tasks": {"kind": "dataset"}}).tools
    (tool,) = build_tools(tools, ())
    assert asyncio.run(tool("yes", TASK)) == "Doc 1: YES\nDoc 2: YES"
    with raises_code("own-code-raised"):
        build_tools(with_value(tools, "search.top_k", 10), ())
    with raises_code("settings-contradict", "tools.search.kind"):
        load_config({"tools": {"use": ["search"], "search": {"kind": "htp"}}})
