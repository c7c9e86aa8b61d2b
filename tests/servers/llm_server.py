# SPDX-License-Identifier: Apache-2.0
"""A loopback server that answers with what it is told to, whatever the path: the wire of any LLM service.

Decision: replies are queued as bytes, so that a test shows what a service sends, and what reached the server is kept in
`requests`. A reply can wait for an event between two pieces, so that a client is left in the middle of a stream without
a clock.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer. `parts` go out as HTTP chunks; before the part `wait_at` the server waits for `LlmServer.go`.

    `cut`: the connection ends after the parts as if it broke.
    """

    parts: Sequence[bytes]
    status: int = 200
    media: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_at: int | None = None
    cut: bool = False


def whole(value: Any, status: int = 200, **headers: str) -> Reply:
    """A JSON body."""
    return Reply(parts=[json.dumps(value).encode()], status=status, headers=headers)


def named_events(*values: Mapping[str, Any], **members: Any) -> Reply:
    """Anthropic's stream: each event is named by its type."""
    parts = [f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode() for value in values]
    return Reply(parts=parts, media="text/event-stream; charset=utf-8", **members)


def events(*values: Any, done: bool = False, **members: Any) -> Reply:
    """Server-sent events with data only; `done` ends them as OpenAI does."""
    parts = [f"data: {json.dumps(value)}\r\n\r\n".encode() for value in values]
    return Reply(parts=[*parts, *([b"data: [DONE]\n\n"] if done else [])], media="text/event-stream", **members)


def lines(*values: Any, **members: Any) -> Reply:
    """One JSON object a line."""
    parts = [json.dumps(value).encode() + b"\n" for value in values]
    return Reply(parts=parts, media="application/x-ndjson", **members)


def array(*values: Any, **members: Any) -> Reply:
    """One JSON array that grows, as Google streams without `alt=sse`."""
    parts = [(b"[" if at == 0 else b",\r\n") + json.dumps(value, indent=2).encode() for at, value in enumerate(values)]
    return Reply(parts=[*parts, b"\n]\n"], media="application/json; charset=UTF-8", **members)


class LlmServer:
    """A context manager around the server thread. `url` is the origin; `replies` are taken in turn."""

    def __init__(self) -> None:
        self.replies: deque[Reply] = deque()
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.go = threading.Event()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening; a second call does nothing."""
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, owner: LlmServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is part of some tests and no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        """Keep the test output clean."""

    def do_POST(self) -> None:
        """Send the next reply."""
        owner = self.server.owner
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        owner.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        reply = owner.replies.popleft()
        self.send_response(reply.status)
        self.send_header("content-type", reply.media)
        self.send_header("transfer-encoding", "chunked")
        for name, value in reply.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        for at, part in enumerate(reply.parts):
            if at == reply.wait_at:
                owner.go.wait()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
        if reply.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")
