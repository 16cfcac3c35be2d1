"""Fetches a page from an address that an agent wrote: within limits, and never from inside one's
own network.

A name is resolved once; all of its addresses must be public, and the connection goes to one of
them, so that the name cannot point elsewhere between check and connection. All of this is done
again after each redirect.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import httpx

from treegraft import ToolError
from treegraft.extras.browse.plugin import BrowseToolSettings
from treegraft.parts import plain

if TYPE_CHECKING:
    from protego import Protego

CONTENT_TYPES = (
    "text/html",
    "application/xhtml+xml",
    "text/plain",
    "text/markdown",
    "application/pdf",
)
"""Types that can be read as text; a page without a type is read by its first bytes."""
KEPT_ROBOTS = 1_000
"""Sites whose robots.txt is remembered, for as long as the tool lives."""
TIMEOUT_S = 20.0
"""Longest time to fetch a page, redirects and robots.txt included; the agent can try another."""
MAX_BYTES = 5_000_000
"""Largest page after decompression; larger ones are rarely text."""
MAX_REDIRECTS = 5
"""Redirects followed, the least that a program should (RFC 1945)."""
USER_AGENT = "Treegraft"
"""Our name for sites, also in their robots.txt."""
ROBOTS_BYTES = 500 * 1024
"""What must be read of a robots.txt (RFC 9309, 2.5); the rest is ignored."""
_USER_AGENT = re.compile(r"\s*user(?:-|\s*)agent\s*:?\s*([\w-]+|\*)?.*", re.IGNORECASE)
SHOWN_CHARS = 200
"""Longest address in a message, in characters."""
_RESERVED_4 = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 168.63.129.16/32 169.254.0.0/16 172.16.0.0/12
192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24
224.0.0.0/3
"""
"""IANA's special-purpose registry, multicast and what was never assigned; and the address at which
Azure's hosts answer their guests."""
_RESERVED_6 = "2001::/23 2001:db8::/32 2002::/16 3fff::/20"
"""Protocol assignments (Teredo, ORCHID, benchmarks), documentation, 6to4."""
_GLOBAL: Mapping[int, tuple[Any, tuple[Any, ...]]] = {
    4: (ipaddress.ip_network("0.0.0.0/0"), tuple(map(ipaddress.ip_network, _RESERVED_4.split()))),
    6: (ipaddress.ip_network("2000::/3"), tuple(map(ipaddress.ip_network, _RESERVED_6.split()))),
}
"""By version: the space of global unicast addresses, and the exceptions within it."""
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class Page:
    """Page(url="https://example.org/", content_type="text/html", charset=None,
    body=b"<html>...")"""

    url: str
    """After redirects."""
    content_type: str
    """Without parameters, lower case; empty where the server sent none."""
    charset: str | None
    body: bytes


class NotFetched(ToolError):
    """A page is forbidden, missing, too large or too slow; the agent may try another."""


class Fetcher:
    """Fetches pages, one connection each; only the address and our name are sent."""

    def __init__(self, settings: BrowseToolSettings) -> None:
        self._allow_private = settings.allow_private
        self._robots: OrderedDict[str, Protego] = OrderedDict()
        self._tls = ssl.create_default_context()

    async def fetch(self, url: str) -> Page:
        """Returns the page behind an http(s) address.

        Raises:
            NotFetched: it is forbidden, not there, too large, of no readable kind, or does not come
                in time.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._follow(_checked(url.strip()))
        except TimeoutError:
            raise NotFetched(
                f"{_shown(url)} did not load within {TIMEOUT_S:g} s", code="page-not-loaded"
            ) from None

    async def _follow(self, url: str) -> Page:
        for _ in range(MAX_REDIRECTS + 1):
            if not (await self._rules(url)).can_fetch(url, USER_AGENT):
                raise NotFetched(
                    f"{_shown(url)} must not be fetched by programs, says the site's robots.txt",
                    code="robots-forbid",
                )
            status, headers, body = await self._get(url, is_page=True)
            if status == 200:
                return Page(url, *_content_type(headers), body)
            if "location" not in headers:
                raise NotFetched(f"{_shown(url)} answered with status {status}", code="page-status")
            url = _checked(urljoin(url, headers["location"]))
        raise NotFetched(
            f"{_shown(url)} lies behind more than {MAX_REDIRECTS} redirects",
            code="too-many-redirects",
        )

    async def _rules(self, url: str) -> Protego:
        parts = urlsplit(url)
        site = f"{parts.scheme}://{parts.netloc}"
        if site in self._robots:
            return self._robots[site]
        place = f"{site}/robots.txt"
        rules = b""
        for _ in range(MAX_REDIRECTS + 1):
            status, headers, body = await self._get(place, is_page=False)
            if status in _REDIRECTS and "location" in headers:
                place = _checked(urljoin(place, headers["location"]))
                continue
            if status >= 500 or status == 429:
                # RFC 9309, 2.3.1.4: a site whose rules cannot be read now is not visited now; it is
                # asked again next time.
                raise NotFetched(
                    f"{_shown(place)} answered with status {status}, so the site is left alone for"
                    " now",
                    code="robots-status",
                )
            # Any other status means that there are no rules (2.3.1.3), and so do too many
            # redirects (2.3.1.2).
            rules = body if status == 200 else b""
            break
        self._robots[site] = read_robots(rules, USER_AGENT)
        if len(self._robots) > KEPT_ROBOTS:
            self._robots.popitem(last=False)
        return self._robots[site]

    async def _get(self, url: str, *, is_page: bool) -> tuple[int, httpx.Headers, bytes]:
        """Returns status, headers and body; a page that cannot be read is an error, and the rest of
        a robots.txt beyond its limit is cut off."""
        max_bytes = MAX_BYTES if is_page else ROBOTS_BYTES
        parts = urlsplit(url)
        host = parts.hostname or ""
        address = await self._resolve(host, parts.port or (443 if parts.scheme == "https" else 80))
        target = parts._replace(netloc=_netloc(address, parts.port)).geturl()
        headers = {
            "Host": parts.netloc,
            "User-Agent": USER_AGENT,
            # The packings that `_decompressed` can unpack piece by piece.
            "Accept-Encoding": "gzip, deflate",
        }
        # The certificate is checked for the name, although the connection goes to the address.
        extensions = {"sni_hostname": host}
        try:
            async with (
                # Without the environment's proxy, which would look the name up once more.
                httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client,
                client.stream("GET", target, headers=headers, extensions=extensions) as response,
            ):
                if is_page:
                    _refuse_by_headers(url, response, max_bytes)
                body = bytearray()
                async for chunk in _decompressed(response, max_bytes + 1):
                    body += chunk
                    if len(body) > max_bytes:
                        if is_page:
                            raise NotFetched(
                                f"{_shown(url)} is larger than {max_bytes:,} bytes",
                                code="page-too-large",
                            )
                        break
                return response.status_code, response.headers, bytes(body[:max_bytes])
        except (httpx.HTTPError, httpx.InvalidURL, zlib.error) as error:
            raise NotFetched(
                f"{_shown(url)} cannot be fetched: {str(error) or type(error).__name__}",
                code="page-not-fetched",
            ) from error

    async def _resolve(self, host: str, port: int) -> str:
        """Returns one address of the host, after a check of all of them."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            raise NotFetched(
                f"there is no host '{_shown(host)}': {error}", code="no-such-host"
            ) from error
        addresses = [str(entry[4][0]) for entry in found]
        # One private address among them is enough to refuse: which one is taken is the host's
        # choice.
        for address in addresses:
            if not self._allow_private and not is_public(address):
                raise NotFetched(
                    f"'{_shown(host)}' is at {address}, which is no public address; such pages are"
                    " not fetched",
                    code="address-not-public",
                )
        return addresses[0]


def read_robots(body: bytes, agent: str) -> Protego:
    """Returns the rules of a robots.txt (RFC 9309) for one program.

    Args:
        agent: the program's name, compared without regard to case; the groups that name it count,
            or else those for all programs.
    """
    from protego import Protego

    def own_name(line: re.Match[str]) -> str:
        # Some sites write "Name/1.0". All others share one name, since a file that names thousands
        # would cost the product of its names and its rules.
        name = (line[1] or "").lower()
        return f"user-agent: {name if name in (agent.lower(), '*') else 'another program'}"

    lines = body.decode("utf-8-sig", "replace").splitlines()
    return Protego.parse("\n".join(_USER_AGENT.sub(own_name, line, count=1) for line in lines))


def is_public(address: str) -> bool:
    """Returns whether an IP address belongs to a host of the public internet.

    The tables are our own: those of `ipaddress` differ between releases of Python.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    # IPv6 that embeds an IPv4 address (mapped, compatible, translated, tunnelled) is outside or
    # among the exceptions: a translator would lead to the address inside.
    inside, reserved = _GLOBAL[ip.version]
    return ip in inside and not any(ip in network for network in reserved)


def _checked(url: str) -> str:
    """Returns the address in the form of a request. Raises `NotFetched` for anything but a plain
    http(s) address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError as error:
        raise NotFetched(
            f"'{_shown(url)}' is no web address: {error}", code="no-web-address"
        ) from error
    if parts.scheme not in ("http", "https") or not host:
        raise NotFetched(
            f"'{_shown(url)}' is no web address; expected one that begins with http:// or https://",
            code="no-web-address",
        )
    if parts.username is not None or parts.password is not None:
        raise NotFetched(
            "addresses with a user name or password are not fetched", code="address-with-password"
        )
    # A line break would add a header to the request; half a surrogate pair cannot be sent.
    if re.search(r"[\x00-\x20\x7f\ud800-\udfff]", url):
        raise NotFetched(
            f"'{_shown(url)}' is no web address: it holds spaces or control characters",
            code="no-web-address",
        )
    try:
        name = host if ":" in host else host.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise NotFetched(
            f"there is no host '{_shown(host)}': {error}", code="no-such-host"
        ) from error
    return parts._replace(netloc=_netloc(name, port), path=parts.path or "/", fragment="").geturl()


def _shown(url: str) -> str:
    return plain(url, SHOWN_CHARS)


def _netloc(host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port}" if port else shown


def _refuse_by_headers(url: str, response: httpx.Response, max_bytes: int) -> None:
    """Raises `NotFetched` where status and headers alone rule a page out."""
    if response.status_code in _REDIRECTS:
        return
    if response.status_code != 200:
        raise NotFetched(
            f"{_shown(url)} answered with status {response.status_code}", code="page-status"
        )
    kind, _ = _content_type(response.headers)
    if kind and kind not in CONTENT_TYPES:
        raise NotFetched(
            f"{_shown(url)} is of type '{kind[:80]}', which cannot be read; expected a page, plain"
            " text or a PDF",
            code="page-type",
        )
    # Before the download; a server that gives no length is cut off while it sends.
    length = response.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise NotFetched(f"{_shown(url)} is larger than {max_bytes:,} bytes", code="page-too-large")


async def _decompressed(response: httpx.Response, max_bytes: int) -> AsyncIterator[bytes]:
    """Yields the body in pieces, at most `max_bytes` of each: a small file may unpack to a very
    large one."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise NotFetched(
            f"the page is packed as '{encoding[:40]}', which was not asked for", code="page-packed"
        )
    # 47 bits: zlib tells gzip from deflate by the first bytes.
    unpack = None if encoding in ("", "identity") else zlib.decompressobj(wbits=47)
    async for chunk in response.aiter_raw():
        yield chunk if unpack is None else unpack.decompress(chunk, max_bytes)


def _content_type(headers: Mapping[str, Any]) -> tuple[str, str | None]:
    kind, _, parameters = str(headers.get("content-type", "")).partition(";")
    found = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", parameters, re.IGNORECASE)
    return kind.strip().lower(), found[1] if found else None
