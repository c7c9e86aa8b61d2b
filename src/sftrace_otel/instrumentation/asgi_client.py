# SPDX-License-Identifier: Apache-2.0
"""One request to an ASGI application in this process: how a recorded inbound request is sent again.

Decision: the few messages of an HTTP exchange, without a server and without a client library, since nothing here may
import one that the program did not. The lifespan is run where the application has one, so that what it opens at its
start is there. Rejected: a real server on a port (a replay connects nowhere), httpx's ASGITransport (it is a boundary,
and the program may have no httpx).

Source: ASGI 3.0, HTTP and lifespan protocols.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from sftrace_otel.formats import Json, canonical

__all__ = ["App", "InboundRequest", "exchange"]

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

_HOP = frozenset({"content-length", "transfer-encoding", "connection"})
"""Headers that described the recorded message on its wire."""


class InboundRequest(NamedTuple):
    """A recorded request: `url` is absolute or a path, with its query."""

    method: str
    url: str
    headers: list[tuple[str, str]]
    body: bytes

    @classmethod
    def of(cls, run_input: Json) -> InboundRequest:
        """The request that a run input is. Raises ValueError where it is none."""
        place = run_input.get("url", run_input.get("path")) if isinstance(run_input, dict) else None
        if not isinstance(run_input, dict) or not isinstance(place, str):
            raise ValueError("the recording holds no inbound request: it has to be of a run that one began")
        body = run_input.get("body")
        if isinstance(body, dict) and {"beginning", "size"} <= body.keys() <= {"beginning", "size", "sha256"}:
            raise ValueError("the body of the recorded request was cut, so it cannot be sent again")
        query = run_input.get("query")
        if isinstance(query, str) and query and "?" not in place:
            place = f"{place}?{query}"
        return cls(
            str(run_input.get("method") or "GET").upper(), place, _pairs(run_input.get("headers")), _bytes(run_input)
        )


def _pairs(headers: Json) -> list[tuple[str, str]]:
    items: Any = headers.items() if isinstance(headers, Mapping) else headers or ()
    return [(str(name).lower(), str(value)) for name, value in items if str(name).lower() not in _HOP]


def _bytes(run_input: Mapping[str, Json]) -> bytes:
    body = run_input.get("body")
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    if isinstance(body, Mapping) and set(body) == {"base64"} and isinstance(body["base64"], str):
        try:
            return base64.b64decode(body["base64"], validate=True)
        except (binascii.Error, ValueError):
            pass
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


async def exchange(app: App, request: InboundRequest) -> dict[str, Json]:
    """The answer to `request` as `{"status_code", "body"}`. Raises what the application raises."""
    async with _Lifespan(app) as state:
        return await _exchange(app, request, state)


async def _exchange(app: App, request: InboundRequest, state: dict[str, Any]) -> dict[str, Json]:
    parts = urlsplit(request.url)
    waiting = [{"type": "http.request", "body": request.body, "more_body": False}]
    gone = asyncio.Event()
    answer: dict[str, Any] = {"status": None, "headers": [], "body": []}

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer["status"], answer["headers"] = message["status"], message.get("headers", [])
        elif message["type"] == "http.response.body":
            answer["body"].append(bytes(message.get("body", b"")))
            if not message.get("more_body"):
                gone.set()

    host, port = parts.hostname or "testserver", parts.port or (443 if parts.scheme == "https" else 80)
    headers = [(name.encode("latin-1", "replace"), value.encode("utf-8")) for name, value in request.headers]
    if not any(name == b"host" for name, _ in headers):
        headers.insert(0, (b"host", (parts.netloc.rpartition("@")[2] or host).encode("utf-8")))
    if request.body:
        headers.append((b"content-length", str(len(request.body)).encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": parts.scheme or "http",
        "path": unquote(parts.path or "/"),
        "raw_path": (parts.path or "/").encode("utf-8"),
        "query_string": parts.query.encode("utf-8"),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": (host, port),
        "state": dict(state),
    }
    await app(scope, receive, send)
    if answer["status"] is None:
        raise RuntimeError("the ASGI application returned without an answer")
    return {"status_code": answer["status"], "body": _value(b"".join(answer["body"]))}


def _value(body: bytes) -> Json:
    """A body as recordings hold it: JSON where it is, else text, else base64."""
    if not body:
        return None
    try:
        return canonical.loads(body)
    except ValueError:
        pass
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}


class _Lifespan:
    """The application's lifespan; one that knows no lifespan raises or returns, and has none."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._state: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> dict[str, Any]:
        self._task = asyncio.ensure_future(self._run())
        failed = await self._step("startup")
        if failed is not None:
            raise RuntimeError(f"the ASGI application failed to start: {failed}")
        return self._state

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None and not self._task.done():
            await self._step("shutdown")
            await self._task

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self._state}
        try:
            await self._app(scope, self._asked.get, self._told.put)
        except Exception:  # as the protocol has it: no support, which servers pass over
            pass

    async def _step(self, name: str) -> str | None:
        """Begin or end; what it failed with, if it says so."""
        assert self._task is not None
        await self._asked.put({"type": f"lifespan.{name}"})
        answer = asyncio.ensure_future(self._told.get())
        await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            return None
        message = answer.result()
        return str(message.get("message", "")) if message["type"] == f"lifespan.{name}.failed" else None
