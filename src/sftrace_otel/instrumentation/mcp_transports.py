# SPDX-License-Identifier: Apache-2.0
"""What is below an MCP session: a server's process, HTTP exchanges, a stream of events.

Decision: nothing of it is a call of its own, since the session's requests are. While recording, a transport stands
inside the boundary: its exchanges and connections are not recorded and what it spawns takes no place in the lineage;
the events that a server may send at any time end no run late. Under replay nothing is started: a process is one that
says nothing until it is closed, a stream of events only tells where to post. The seams are inside the transports, at
what they look up when they run, so that a program which imported `stdio_client` earlier is seen as well.
Rejected: replacing the transports' own functions (a name imported earlier stays), and recording the exchanges below
(the stream of events is open for as long as the session, and under replay nobody would ask for it).

A server's process gets our own variables beside the few that the SDK passes on, so that a server which is instrumented
records where its client does, as a child of its run; what the program set for it stands.

Source: ADR 14; `design.md`, "Runs".
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Token
from types import SimpleNamespace
from typing import Any

from sftrace_otel import recorder as recording
from sftrace_otel.instrumentation import guard, replaying, tracing
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.instrumentation.patching import Patches
from sftrace_otel.recorder import Recorder, current_scope

__all__ = ["add"]

_OURS = "OTEL_SFTRACE_"


def add(patches: Patches) -> None:
    """Want the transports of the SDK wrapped."""
    patches.add("mcp.client.stdio", "_create_platform_compatible_process", _process)
    http = "mcp.client.streamable_http"
    for method in ("_handle_post_request", "_handle_resumption_request", "handle_get_stream", "terminate_session"):
        patches.add(http, f"StreamableHTTPTransport.{method}", _exchange)
    for name in ("sse_within_origin", "aconnect_sse"):  # the first from 1.29 on
        patches.add("mcp.client.sse", name, _events, optional=True)


# --- HTTP -------------------------------------------------------------------------------------------------------------


async def _exchange(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a transport asks of the server by HTTP, as long as the answer is read."""
    token = _enter()
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _leave(token)


@fails_open("entering an MCP transport", None)
def _enter() -> Token[bool] | None:
    return None if recording._active is None and replaying._active is None else guard.enter()


@fails_open("leaving an MCP transport", None, replay_too=True)
def _leave(token: Token[bool] | None) -> None:
    if token is not None:
        guard.leave(token)


def _events(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The stream of events of the older HTTP transport, whose client has no other use."""
    if replaying._active is not None:
        return _NoEvents()
    if recording._active is not None:
        _mark(args[0] if args else kwargs.get("client"))
    return wrapped(*args, **kwargs)


@fails_open("entering an MCP transport", None)
def _mark(client: Any) -> None:
    if "send" in vars(client):
        return
    send = client.send

    async def inside(*args: Any, **kwargs: Any) -> Any:
        return await _exchange(send, client, args, kwargs)

    client.send = inside


class _NoEvents:
    """A connection that names the address to post to, and then is silent."""

    response = SimpleNamespace(raise_for_status=lambda: None)

    async def __aenter__(self) -> _NoEvents:
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Nothing is open."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(event="endpoint", data="/", id="", retry=None)
        await sys.modules["anyio"].sleep_forever()

    aiter_sse = __aiter__


# --- a process --------------------------------------------------------------------------------------------------------


async def _process(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Start a server. Its pipes are the transport's: what asyncio spawns to connect them is not the program's."""
    if replaying._active is not None:
        return _NoProcess()
    recorder = recording._active
    if recorder is not None and isinstance(kwargs.get("env"), dict):
        kwargs = {**kwargs, "env": {**(_ours(recorder) or {}), **kwargs["env"]}}
    return await _exchange(wrapped, instance, args, kwargs)


@fails_open("telling an MCP server of its run", None)
def _ours(recorder: Recorder) -> dict[str, str]:
    """Our own settings, and the run that the server is started in, where processes are told of theirs."""
    if not recorder.propagate:
        return {}
    found = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    found[f"{_OURS}PARENT"] = recorder.run_for(current_scope(), tracing.current_ids()[1]).id
    return found


class _NoProcess:
    """A process that reads what it is sent and writes nothing; it ends when its input is closed."""

    def __init__(self) -> None:
        self._anyio = sys.modules["anyio"]
        self._closed = self._anyio.Event()
        self.pid = 0
        self.returncode: int | None = None
        self.stdin = self.stdout = self
        self.stderr = None

    async def send(self, item: bytes) -> None:
        """Read what the client sends."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for the end, and tell of it as a stream does."""
        await self._closed.wait()
        raise self._anyio.EndOfStream

    async def aclose(self) -> None:
        """Close the input, or all of it."""
        self.returncode = 0
        self._closed.set()

    async def wait(self) -> int:
        """Wait for the end."""
        await self._closed.wait()
        return 0

    def terminate(self) -> None:
        """End it."""
        self.returncode = 0
        self._closed.set()

    kill = terminate

    async def __aenter__(self) -> _NoProcess:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()
