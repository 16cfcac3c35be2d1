"""Sockets, Host headers and the end of our HTTP servers: the viewer and the retrieval server.

A page in a browser can make its own name point to this machine (DNS rebinding). Servers therefore
check the name in a request's Host header.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from treegraft.core.errors import SettingError

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application: of scope, receive and send."""
_NAME_AND_PORT = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::\d+)?")


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at the host and port; port 0 takes a free port.

    Raises:
        SettingError: the address is in use or not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            # So that a server can start again while the connections of the last one expire.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # From here on requests queue up, so the address can be told before the server is ready.
            listener.listen(512)
            opened.pop_all()
    except OSError as error:
        raise SettingError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or"
            " --port (--port 0 takes a free one).",
            code="port-unusable",
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Returns the address of the server that listens there, seen from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def is_loopback(host: str) -> bool:
    """Returns whether a server on this address is reachable from this machine only."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_name(header: str, host: str) -> bool:
    """Returns whether a Host header names a server that was started for `host`.

    Its names are "localhost", `host`, and the numeric addresses that it can have been reached by:
    those of loopback, and any where it listens beyond loopback, as the machine's own name is there.
    """
    name = header.strip().lower()
    # A bare IPv6 address has more colons than fit, and is a name as it stands.
    if found := _NAME_AND_PORT.fullmatch(name):
        name = found[1] or found[2] or ""
    # "localhost" cannot be pointed elsewhere: browsers resolve it themselves.
    if name in ("localhost", host.lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not is_loopback(host) and name == socket.gethostname().lower()
    return address.is_loopback or not is_loopback(host)


class OwnNames:
    """An ASGI application that refuses requests whose Host header names another server."""

    def __init__(self, app: Application, host: str) -> None:
        """Args:
        host: where the server listens.
        """
        self._app = app
        self._host = host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers with status 421 or lets the application answer."""
        # Start and end of the server have no headers.
        if scope["type"] == "http":
            # Two Host headers are refused: others may read the one that is not checked here.
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not is_own_name(hosts[0], self._host):
                headers = [(b"content-type", b"text/plain; charset=utf-8")]
                await send({"type": "http.response.start", "status": 421, "headers": headers})
                refusal = b"refused: this server answers to names of its own machine only"
                await send({"type": "http.response.body", "body": refusal})
                return
        await self._app(scope, receive, send)


def serve(
    app: Application,
    listener: socket.socket,
    *,
    grace_s: int,
    on_ready: Callable[[], None] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Answers requests until Ctrl-C, or until `is_over` is true, which is asked ten times a second;
    requests under way then have `grace_s` seconds to finish.

    Raises:
        KeyboardInterrupt: at the end, after Ctrl-C.
    """
    import uvicorn

    class Server(uvicorn.Server):
        is_interrupted = False

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or is_over()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # uvicorn raises the signal again at its end, which does nothing where a script's `&`
            # had it ignored.
            self.is_interrupted |= sig == signal.SIGINT
            super().handle_exit(sig, frame)

    server = Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            ws="none",  # else uvicorn looks for a library of websockets
            timeout_graceful_shutdown=grace_s,
        )
    )
    with contextlib.closing(listener):
        server.run(sockets=[listener])
    if server.is_interrupted:
        raise KeyboardInterrupt
