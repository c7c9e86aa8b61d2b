# SPDX-License-Identifier: Apache-2.0
"""An MCP server with a tool for each kind of answer, for mcp 1.x and 2.x: a program on stdio, or on HTTP in a thread.

As a program it takes the name of a file, to which it adds a line for each tool that ran.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp.types as types
import uvicorn

try:
    from mcp.server.mcpserver import Context, Image, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    NEW = True
except ImportError:
    from mcp.server.fastmcp import Context, Image
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp.exceptions import ToolError

    NEW = False

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ran: list[str] = []
counter = itertools.count(1)
waiting = threading.Event()
journal: list[Path] = []


def _ran(name: str) -> None:
    ran.append(name)
    for path in journal:
        with path.open("a") as file:
            print(name, file=file)


def make() -> Any:
    """A server with all tools."""
    server = MCPServer("things")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        _ran("add")
        return a + b

    @server.tool()
    def count() -> dict[str, Any]:
        """A different answer each time."""
        _ran("count")
        return {"count": next(counter)}

    @server.tool()
    def fail(why: str) -> str:
        """Raise."""
        _ran("fail")
        raise ToolError(why)

    @server.tool()
    def picture() -> Image:
        """An image."""
        _ran("picture")
        return Image(data=PNG, format="png")

    @server.tool()
    async def slow(ctx: Context) -> str:
        """Tell of its progress."""
        _ran("slow")
        await ctx.report_progress(1, 2, "half")
        await ctx.report_progress(2, 2, "whole")
        return "done"

    @server.tool()
    async def wait() -> str:
        """Never end."""
        _ran("wait")
        waiting.set()
        await asyncio.get_running_loop().create_future()
        return ""

    @server.tool()
    async def ask(question: str, ctx: Context) -> str:
        """Have the client's model answer."""
        _ran("ask")
        asked = types.SamplingMessage(role="user", content=types.TextContent(type="text", text=question))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and still answered
            answer = await ctx.request_context.session.create_message(messages=[asked], max_tokens=10)
        return json.dumps(answer.content.text)

    @server.tool()
    def variables() -> str:
        """The variables of this process that are ours."""
        found = {name: value for name, value in os.environ.items() if name.startswith("OTEL_SFTRACE_")}
        return json.dumps(found, sort_keys=True)

    @server.resource("note://one")
    def note() -> str:
        return "a note"

    @server.prompt()
    def hello(name: str) -> str:
        return f"Hello, {name}"

    return server


@contextlib.contextmanager
def serving(kind: str = "streamable") -> Iterator[str]:
    """The URL of a server in a thread, by streamable HTTP or by the older SSE."""
    server = make()
    app = server.sse_app() if kind == "sse" else server.streamable_http_app()
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{'sse' if kind == 'sse' else 'mcp'}"
    finally:
        running.should_exit = True
        thread.join()
        listener.close()


if __name__ == "__main__":
    logging.disable(logging.INFO)
    journal += [Path(name) for name in sys.argv[1:]]
    make().run()
