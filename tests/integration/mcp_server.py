"""An MCP server for tests: `python mcp_server.py [PORT]`, over its input and output or HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
seen: list[int] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Say that it failed."""
    raise ToolError("no such place")


@server.tool()
def count() -> str:
    """Count the calls."""
    seen.append(1)
    return f"call {len(seen)}"


@server.tool()
def leak() -> str:
    """Leave a process behind that is in no group of the server's; its number."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    return str(subprocess.Popen(sleep, start_new_session=True, stdin=subprocess.DEVNULL).pid)


@server.tool()
def hang() -> str:
    """Do not answer."""
    time.sleep(600)
    return ""


@server.tool()
def write(characters: int) -> str:
    """Write a long text."""
    return "x" * characters


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
