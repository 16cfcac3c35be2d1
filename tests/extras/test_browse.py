"""The browse tool against real servers on loopback: what is fetched, what is refused, and what is
shown of a page."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extras.test_remote_search import Answer, web_server
from tests.support.error_codes import raises_code
from tests.support.examples import at_most
from tests.support.tiny import table_class

from treegraft.core.types import Task
from treegraft.extras.browse import extract, fetch
from treegraft.extras.browse.extract import ExtractPool
from treegraft.extras.browse.fetch import Fetcher, NotFetched, Page, is_public, read_robots
from treegraft.extras.browse.passages import GAP, choose, cut, most_relevant
from treegraft.extras.browse.plugin import BrowseToolSettings
from treegraft.extras.browse.tool import BrowseTool, read_call
from treegraft.tools.build import build_tools

pytest.importorskip("protego", reason="the extra 'web' is not installed")
pytest.importorskip("trafilatura", reason="the extra 'web' is not installed")
pytest.importorskip("pypdf", reason="the extra 'web' is not installed")

TASK = Task(id="t", question="?", reference=())


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_BYTES", 100_000)
    monkeypatch.setattr(fetch, "MAX_REDIRECTS", 3)


def get(url: str, *, allow_private: bool = True) -> Page:
    return asyncio.run(Fetcher(BrowseToolSettings(allow_private=allow_private)).fetch(url))


def refused(url: str, *codes: str, allow_private: bool = True) -> None:
    with pytest.raises(NotFetched) as caught:
        get(url, allow_private=allow_private)
    assert caught.value.code in codes, caught.value


def site(pages: dict[str, Answer]) -> Any:
    """Answers by path; 404 for any other."""
    return lambda method, path, headers, body: pages.get(path, (404, {}, b"nothing here"))


HTML = {"Content-Type": "text/html; charset=utf-8"}

# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "192.0.2.1",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12:3456::1",
        "ff02::1",
        "fec0::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2001:db8::1",
        "not an address",
        # Not public, or not certain to be; releases of Python differ on them.
        "::127.0.0.1",
        "::8.8.8.8",
        "64:ff9b:1::7f00:1",
        "64:ff9b::808:808",
        "::ffff:0:7f00:1",
        "::ffff:8.8.8.8",
        "2002:808:808::1",
        "2001::1",
        "2001:1::1",
        "2001:20::1",
        "3fff::1",
        "5f00::1",
        "100::1",
        "100:0:0:1::1",
        "4000::1",
        "fe80::1%1",
        "ff0e::1",
        "2001:2::1",
        "192.0.0.192",
        "192.0.0.9",
        "192.88.99.1",
        "168.63.129.16",
        "100.100.100.200",
        "198.51.100.1",
        "203.0.113.9",
        "240.0.0.1",
        "233.252.0.1",
        "",
        "8.8.8",
        "8.8.8.8/32",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "172.32.0.1",
        "1.1.1.1",
        "168.63.129.17",
        "100.128.0.1",
        "192.0.1.1",
        "223.255.255.255",
        "2606:4700::1111",
        "2001:4860:4860::8888",
        "2a00::1",
        "2001:200::1",
    ],
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses())
def test_public_addresses_are_a_part_of_what_python_calls_global(ip: Any) -> None:
    """Whatever its release: the tables of `ipaddress` grow, and ours refuse more."""
    assert not is_public(str(ip)) or (ip.is_global and not ip.is_multicast)
    if ip.version == 4:
        for embedded in (f"::ffff:{ip}", f"::{ip}", f"64:ff9b::{ip}", f"::ffff:0:{ip}"):
            assert not is_public(embedded)


def test_private_addresses_are_refused_however_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def secret(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        asked.append(path)
        return 200, HTML, b"secret"

    with web_server(secret) as url:
        port = url.rpartition(":")[2]
        hosts = (
            "127.0.0.1",
            "localhost",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
        )
        for host in hosts:
            refused(
                f"http://{host}:{port}/",
                "address-not-public",
                "page-not-fetched",
                "no-such-host",
                allow_private=False,
            )
        # A name that has a public address and another.
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", two_addresses)
        refused(
            f"http://two.example:{port}/",
            "address-not-public",
            allow_private=False,
        )
    assert asked == []


async def two_addresses(loop: Any, host: str, port: int, **options: Any) -> list[Any]:
    return [(2, 1, 6, "", ("8.8.8.8", port)), (2, 1, 6, "", ("127.0.0.1", port))]


def test_a_redirect_into_the_private_net_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host is taken for a public one; the second, on the same machine, is not."""
    with web_server(lambda *_: (200, HTML, b"secret")) as inner:
        port = inner.rpartition(":")[2]
        pages = {
            "/": (302, {"Location": f"http://127.0.0.2:{port}/"}, b""),
            "/robots.txt": (404, {}, b""),
        }
        with web_server(site(pages)) as outer:
            monkeypatch.setattr(
                "treegraft.extras.browse.fetch.is_public", lambda address: address == "127.0.0.1"
            )
            refused(
                outer + "/",
                "address-not-public",
                allow_private=False,
            )


def test_what_is_no_web_address_is_refused() -> None:
    for url in (
        "file:///etc/passwd",
        "ftp://x/",
        "gopher://x",
        "//x/",
        "http://",
        "x",
        "http://a b/",
        "http://[::1/",
        "http://x:99999/",
    ):
        refused(url, "no-web-address")
    refused("http://user:secret@localhost/", "address-with-password")
    refused("http://a..b/", "no-such-host")


def test_the_connection_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that points elsewhere at the second look: there is no second look, and the name stands
    in the Host header."""
    looks: list[str] = []
    hosts: list[str] = []

    async def once(loop: Any, host: str, port: int, **options: Any) -> list[Any]:
        looks.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        hosts.append(headers["host"])
        return 200, HTML, b"ok"

    with web_server(answer) as url:
        port = url.rpartition(":")[2]
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", once)
        get(f"http://Name.Example:{port}/")
    # One look-up for robots.txt, and one for the page.
    assert looks.count("name.example") == 2
    assert set(looks) <= {"name.example", "127.0.0.1"}
    assert hosts == [f"name.example:{port}"] * 2


# ---------------------------------------------------------------------- limits


def test_limits_of_size_kind_and_redirects() -> None:
    loop = {f"/r{n}": (302, {"Location": f"r{n + 1}"}, b"") for n in range(9)}
    pages: dict[str, Answer] = {
        **loop,
        "/r3": (200, HTML, b"three redirects"),
        "/large": (200, HTML, b"x" * 100_001),
        "/fits": (200, HTML, b"x" * 100_000),
        "/said": (200, HTML | {"Content-Length": "999999999"}, b""),
        "/bomb": (200, HTML | {"Content-Encoding": "gzip"}, gzip.compress(b"\0" * 50_000_000)),
        "/packed": (200, HTML | {"Content-Encoding": "gzip"}, gzip.compress(b"<p>packed</p>")),
        "/broken": (200, HTML | {"Content-Encoding": "gzip"}, b"no gzip"),
        "/odd": (200, HTML | {"Content-Encoding": "br"}, b"x"),
        "/film": (200, {"Content-Type": "video/mp4"}, b"x"),
        "/silent": (200, {}, b"%PDF-"),
    }
    with web_server(site(pages)) as url:
        page = get(f"{url}/r0")
        assert (page.url, page.content_type, page.charset, page.body) == (
            f"{url}/r3",
            "text/html",
            "utf-8",
            b"three redirects",
        )
        refused(f"{url}/r4", "too-many-redirects")
        for path in ("/large", "/said", "/bomb"):
            refused(url + path, "page-too-large")
        assert (
            len(get(f"{url}/fits").body) == 100_000
            and get(f"{url}/packed").body == b"<p>packed</p>"
        )
        refused(f"{url}/broken", "page-not-fetched")
        refused(f"{url}/odd", "page-packed")
        refused(f"{url}/film", "page-type")
        refused(f"{url}/missing", "page-status")
        assert get(f"{url}/silent#part").content_type == ""


def test_a_page_that_drips_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "TIMEOUT_S", 0.3)

    def drip(*_: Any) -> Answer:
        time.sleep(3)
        return 200, HTML, b"x"

    with web_server(drip) as url:
        refused(url, "page-not-loaded")


# ---------------------------------------------------------------------- robots.txt


ROBOTS = """
# a comment
User-agent: *
Disallow: /private/   # another
Allow: /private/open
Disallow: /*.cgi$
Disallow: /a*b*c

User-agent: Other
User-agent: Third/2.0
Disallow: /

user-agent: named
disallow:
"""


def allows(robots: str, agent: str, path: str) -> bool:
    return read_robots(robots.encode(), agent).can_fetch(f"https://x.example{path}", agent)


@pytest.mark.parametrize(
    ("agent", "path", "expected"),
    [
        ("Treegraft", "/", True),
        ("Treegraft", "/private/x", False),
        ("Treegraft", "/private/open/x", True),
        ("Treegraft", "/x.cgi", False),
        ("Treegraft", "/x.cgi?q", True),
        ("Treegraft", "/x.cgi.html", True),
        ("Treegraft", "/a1b2c3", False),
        ("Treegraft", "/acb", True),
        ("Treegraft", "/%70rivate/x", False),
        ("OTHER", "/x", False),
        ("third", "/", False),
        ("named", "/private/x", True),
        ("third", "/robots.txt", True),
        ("oth", "/x", True),
    ],
)
def test_rules_of_a_site(agent: str, path: str, expected: bool) -> None:
    assert allows(ROBOTS, agent, path) is expected


def test_rules_cannot_take_long() -> None:
    began = time.process_time()
    wildcards = "user-agent: *\n" + f"disallow: /{'*a' * 2000}b\n" * 50
    assert allows(wildcards, "x", "/" + "a" * 4000)
    # Every rule of a group counts for every program that it names.
    for key in ("User-agent:", "useragent", "user  agent"):
        names = "\u2028".join(f"{key} a{number}" for number in range(12_000))
        assert allows(names + "\n" + "disallow: /b\n" * 20_000, "x", "/b")
    assert time.process_time() - began < 20


@at_most(100)
@given(st.text("ab*$", max_size=8), st.text("ab", max_size=8))
def test_patterns_match_as_regular_expressions_do(pattern: str, path: str) -> None:
    import re

    body = pattern.removesuffix("$")
    regex = "".join(".*" if letter == "*" else re.escape(letter) for letter in "/" + body) + (
        "$" if pattern.endswith("$") else ""
    )
    assert allows(f"user-agent: *\ndisallow: /{pattern}", "x", f"/{path}") is (
        re.match(regex, "/" + path) is None
    )


def test_robots_are_respected() -> None:
    asked: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        asked.append(path)
        assert headers["user-agent"] == "Treegraft"
        return (
            (200, {}, b"User-agent: treegraft\nDisallow: /no")
            if path == "/robots.txt"
            else (200, HTML, b"ok")
        )

    with web_server(answer) as url:
        one = Fetcher(BrowseToolSettings(allow_private=True))

        async def work() -> None:
            await one.fetch(f"{url}/yes")
            with raises_code("robots-forbid"):
                await one.fetch(f"{url}/no")

        asyncio.run(work())
        assert asked == ["/robots.txt", "/yes"]
    with web_server(
        lambda method, path, *_: (503 if path == "/robots.txt" else 200, HTML, b"ok")
    ) as url:
        refused(url, "robots-status")


# ---------------------------------------------------------------------- text


ARTICLE = """<html><head><title>Trees</title></head><body><nav>Home About Contact</nav><article>
<h1>Trees</h1>
<p>An oak is a tree of the genus Quercus. Oaks can live for a thousand years in good soil and open
light.</p>
<p>A birch is a thin-leaved deciduous hardwood tree of the genus Betula, in the family
Betulaceae.</p>
<p>The larch is a conifer that drops its needles in autumn, which few others do. Larch wood is
tough.</p>
<p>Willows grow along rivers and are easy to grow from cuttings, so that basket makers plant
them.</p>
</article><footer>Imprint</footer></body></html>"""


def pdf(text: str) -> bytes:
    """A PDF of one page with one line of text, written out by hand."""
    stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        (
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1"
            b" 5 0 R>>>>>>"
        ),
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out = io.BytesIO()
    places = []
    out.write(b"%PDF-1.4\n")
    for number, one in enumerate(objects, start=1):
        places.append(out.tell())
        out.write(b"%d 0 obj" % number + one + b"endobj\n")
    start = out.tell()
    out.write(
        b"xref\n0 6\n0000000000 65535 f \n"
        + b"".join(b"%010d 00000 n \n" % place for place in places)
    )
    out.write(b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % start)
    return out.getvalue()


@pytest.fixture(scope="module")
def pool() -> Iterator[ExtractPool]:
    made = ExtractPool()
    yield made
    made.close()


def text_of(pool: ExtractPool, kind: str, charset: str | None, body: bytes, query: str = "") -> str:
    return "\n".join(pool.read(Page("http://x/", kind, charset, body), query).passages)


def test_text_of_pages_plain_text_and_pdf(pool: ExtractPool) -> None:
    html = pool.read(Page("http://x/", "text/html", "utf-8", ARTICLE.encode()), "")
    text = "\n".join(html.passages)
    assert html.title == "Trees" and "genus Quercus" in text
    assert "Imprint" not in text and "<p>" not in text
    assert text_of(pool, "text/plain", "latin-1", b"caf\xe9") == "café"
    assert text_of(pool, "text/plain", "no-such-code", b"plain") == "plain"
    for kind in ("application/pdf", ""):
        assert text_of(pool, kind, None, pdf("Grafting joins two plants.")) == (
            "Grafting joins two plants."
        )
    with raises_code("page-unreadable"):
        text_of(pool, "application/pdf", None, b"%PDF-1.4 broken")
    assert text_of(pool, "text/html", None, b"") == ""


@pytest.mark.parametrize("charset", ["unicode_escape", "utf-7", "utf-16", "utf-8", "punycode"])
def test_what_a_page_says_can_always_be_encoded(pool: ExtractPool, charset: str) -> None:
    """Some charsets of Python let a page write half a pair of surrogates."""
    body = b"one \\ud800 two \\ud83d\\ude00 +2AA- \xed\xa0\x80"
    text = text_of(pool, "text/plain", charset, body)
    assert text and text.encode()
    if charset == "unicode_escape":
        assert text.startswith("one \ufffd two \U0001f600")


def test_a_page_that_takes_too_long_or_kills_its_reader_costs_that_page_only(
    pool: ExtractPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Choosing takes seconds too: 900,000 words of which none was seen before.
    words = " ".join(f"w{number}" for number in range(900_000)).encode()
    assert text_of(pool, "text/plain", None, b"warm") == "warm"
    began = time.process_time()
    with monkeypatch.context() as patch:
        patch.setattr(extract, "READ_TIMEOUT_S", 0.5)
        with raises_code("page-late", match=r"could not be read within 0\.5 s"):
            text_of(pool, "text/plain", None, words, "w7 w8")
    assert len(pool._workers) == 0
    assert time.process_time() - began < 1.0
    assert text_of(pool, "text/plain", None, b"still here") == "still here"
    (worker,) = pool._workers
    worker.process.kill()
    worker.process.wait()
    assert text_of(pool, "text/plain", None, b"and again") == "and again"
    # Killed under a call: that call is an error, the next one works.
    (worker,) = pool._workers
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(text_of, pool, "text/plain", None, words, "w7")
        time.sleep(0.3)
        os.killpg(worker.process.pid, signal.SIGKILL)
        with raises_code("page-late", match="could not be read"):
            reading.result()
    assert text_of(pool, "text/plain", None, b"at last") == "at last"


def test_addresses_in_errors_are_short_and_can_be_encoded() -> None:
    for url in (
        "http://127.0.0.1:9/" + "x" * 10**6,
        "http://" + "a" * 10**6,
        "http://" + "a." * 10**5,
        "http://x/\ud800",
        "http://\udcff/",
        "http://x/\u202e" + "y" * 10**6,
        "gopher://" + "z" * 10**6,
    ):
        with pytest.raises(NotFetched) as caught:
            get(url)
        assert len(str(caught.value).encode()) < 1200


def test_the_passages_that_matter_are_shown_in_the_pages_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extract, "NUM_PASSAGES", 1)
    monkeypatch.setattr(extract, "PASSAGE_CHARS", 110)
    pages = {"/trees": (200, HTML, ARTICLE.encode()), "/empty": (200, HTML, b"<html></html>")}
    own = {"use": ["browse"], "browse": {"allow_private": True}}
    (tool,) = build_tools(table_class("tools").model_validate(own), ())
    assert isinstance(tool, BrowseTool)
    with web_server(site(pages)) as url:

        async def work() -> None:
            head, *rest = (
                await tool(f"{url}/trees which conifer drops its needles?", TASK)
            ).splitlines()
            assert head == f"Trees | {url}/trees"
            assert rest == [
                GAP,
                (
                    "The larch is a conifer that drops its needles in autumn, which few others do."
                    " Larch wood is tough."
                ),
                GAP,
            ]
            beginning = (await tool(f'{{"url": "{url}/trees"}}', TASK)).splitlines()
            assert "oak" in beginning[1] + beginning[2] and beginning[-1] == GAP
            assert (await tool(f"{url}/empty", TASK)).endswith("(no text)")
            for body, code in (
                ("", "address-empty"),
                ("{", "browse-arguments"),
                (f"{url}/nowhere", "page-status"),
            ):
                with raises_code(code):
                    await tool(body, TASK)
            await tool.close()

        asyncio.run(work())
    assert not BrowseToolSettings().allow_private


def test_calls_are_read() -> None:
    assert read_call(" https://x.example/a?b c  d ") == ("https://x.example/a?b", "c d")
    assert read_call("<https://x.example>\nwho?") == ("https://x.example", "who?")
    assert read_call("x.example/a what") == ("https://x.example/a", "what")
    assert read_call('{"url": "https://x.example", "query": "who"}') == ("https://x.example", "who")
    assert read_call("what is this")[0] == "what"


@at_most(80)
@given(st.text("ab .\n。", max_size=200), st.integers(3, 40))
def test_cutting_loses_no_word(text: str, max_chars: int) -> None:
    pieces = list(cut(text, max_chars))
    assert all(0 < len(piece) <= max_chars for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_long_texts_are_cut_in_time_that_grows_with_their_length() -> None:
    began = time.process_time()
    for text in ("x" * 5 * 10**6, "xy " * 10**5):
        assert sum(map(len, cut(text, 600))) >= 2 * 10**5
    assert time.process_time() - began < 3
    assert choose("one two. three four.", "three", 1, 10) == [GAP, "three", GAP]


def test_relevance() -> None:
    passages = ["oak", "elm elm", "fir", "elm"]
    assert most_relevant(passages, "elm", 1) == [1]
    assert most_relevant(passages, "elm", 3) == [1, 3]
    assert most_relevant(passages, "zebra", 2) == [0, 1]
    assert most_relevant(["...", "!"], "x", 3) == [0, 1]
