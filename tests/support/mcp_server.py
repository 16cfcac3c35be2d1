"""A Model Context Protocol server for the tests, over standard input, or with a port as argument
over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("tests")


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def getWeather(city: str) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    """Always fails."""
    raise ToolError(reason)


@server.tool()
def crash() -> str:
    """Ends the server."""
    print("the end is near", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def slow(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "done"


@server.tool()
def picture() -> Image:
    """Draws."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def flood() -> str:
    """Answers too much."""
    return "x" * 5_000_000


@server.tool()
def start() -> str:
    """Starts processes that stay: one in the server's group, one in a session of its own, and one
    that ignores SIGTERM and whose parent has ended."""
    sleep = "import time; time.sleep(600)"
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {sleep}"
    parent = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
        " start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    command = [sys.executable, "-c"]
    pids = [
        subprocess.Popen([*command, sleep], stdout=subprocess.DEVNULL).pid,
        subprocess.Popen([*command, sleep], stdout=subprocess.DEVNULL, start_new_session=True).pid,
        int(subprocess.check_output([*command, parent, stubborn])),
    ]
    return " ".join(map(str, [os.getpid(), *pids]))


@server.tool()
def about() -> str:
    """Tells the process and what it was given."""
    return (
        f"{os.getpid()} {os.environ.get('MCP_TEST_KEY', 'no key')}"
        f" {os.environ.get('MCP_OTHER_KEY', 'no other')}"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
