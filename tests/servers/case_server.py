# SPDX-License-Identifier: Apache-2.0
"""The loopback server that the cases call `srv`: pages of every awkward kind, and chat completions that misbehave.

Decision: what has to be still under way (a stream, an answer) waits for an event that the test sets, so that no test
measures time. All that reached the server is kept, bodies included: "nothing went out" and "the request is what the
program sends without us" can both be asserted.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

JSON = b'{"z": 1,  "a": [1, 2.0], "u": "\\u00e9"}'
"""Odd on purpose: unsorted, two spaces, a float that is whole, an escape."""

BINARY = bytes(range(256)) * 4 + b"\xff\xfe\x00%PDF\x89PNG"

SSE = (
    b": hello\n\n",
    b'data: {"n": 1}\n\nda',
    b'ta: {"n": 2}\n\n',
    b"event: x\ndata: caf\xc3",
    b"\xa9\n\n",
    b"data: [DONE]\n\n",
)
"""Events cut at awkward places: inside a field name and inside a character."""

Chunks = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request that reached the server; header names in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """An answer that the next request gets, whatever it asks for. With `parts` its body is a stream of them."""

    status: int = 200
    body: bytes = b""
    headers: Sequence[tuple[str, str]] = (("content-type", "text/plain"),)
    parts: Sequence[bytes] | None = None


def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chat completion chunk with one choice."""
    choice = {"index": 0, "delta": dict(delta), "finish_reason": finish}
    return {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m-1", "choices": [choice], **more
    }  # fmt: skip


def text_chunks(words: Iterable[str] = ("Hel", "lo", " wor", "ld")) -> Iterator[dict[str, Any]]:
    """A streamed answer, word by word."""
    yield chunk({"role": "assistant", "content": ""})
    for word in words:
        yield chunk({"content": word})
    yield chunk({}, "stop")


def tool_chunks() -> Iterator[dict[str, Any]]:
    """Two tool calls whose arguments arrive interleaved; id and name come once."""

    def part(index: int, **more: Any) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": index, **more}]})

    yield chunk({"role": "assistant", "content": None})
    yield part(0, id="call_a", type="function", function={"name": "lookup", "arguments": ""})
    yield part(0, function={"arguments": '{"city":'})
    yield part(1, id="call_b", type="function", function={"name": "add", "arguments": ""})
    yield part(1, function={"arguments": '{"x": 1'})
    yield part(0, function={"arguments": ' "Oslo"}'})
    yield part(1, function={"arguments": ', "y": 2}'})
    yield chunk({}, "tool_calls")


USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def completion(message: Mapping[str, Any] | str, finish: str = "stop") -> dict[str, Any]:
    """An answer that does not stream."""
    if isinstance(message, str):
        message = {"role": "assistant", "content": message, "refusal": None}
    choice = {"index": 0, "finish_reason": finish, "logprobs": None, "message": dict(message)}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m-1", "choices": [choice],
        "usage": USAGE,
    }  # fmt: skip


def _answer(body: Mapping[str, Any], number: int) -> Mapping[str, Any] | str:
    if (body.get("response_format") or {}).get("type") == "json_schema":
        return '{"name": "fair", "day": 5}'
    return f"answer {number} to {body['messages'][-1].get('content')}"


class CaseServer:
    """A context manager around the server's thread.

    `url` is the origin. `requests` holds what reached it, `script` answers for the next requests. `gate` lets a stream
    or an answer that waits go on; leaving the block sets it. `answer` makes the message of a chat completion, `chunks`
    its stream.
    """

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.script: deque[Scripted] = deque()
        self.counts: dict[str, int] = {}
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.answer: Callable[[Mapping[str, Any], int], Mapping[str, Any] | str] = _answer
        self.chunks: Callable[[Mapping[str, Any]], Chunks] | None = None
        self.lock = threading.Lock()
        self._server = _Server(self)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def hits(self) -> list[tuple[str, str]]:
        """(method, path) of each request."""
        return [(one.method, one.path) for one in self.requests]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, owner: CaseServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is part of some cases and no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        """Keep the test output clean."""

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # -- what came

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = []
        while True:
            size = int(self.rfile.readline().split(b";")[0], 16)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if size == 0:
                return b"".join(parts)

    def _any(self) -> None:
        path, _, query = self.path.partition("?")
        received = Received(
            method=self.command,
            path=path,
            query=query,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self._body(),
        )
        owner = self.server.owner
        with owner.lock:
            owner.requests.append(received)
            number = owner.counts[path] = owner.counts.get(path, 0) + 1
            scripted = owner.script.popleft() if owner.script else None
        page = _PAGES.get(path)
        if scripted is not None:
            self._scripted(scripted)
        elif page is not None:
            page(self, received, number)
        elif path.startswith("/v1/"):
            self._model(received, number)
        else:
            self._send(404, b'{"error": {"message": "no such path"}}')

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_PATCH = _any

    # -- what goes

    def _scripted(self, answer: Scripted) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked") if answer.parts is not None else self.send_header(
            "content-length", str(len(answer.body))
        )
        self.end_headers()
        for part in answer.parts or ():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n" if answer.parts is not None else answer.body)

    def _send(self, status: int, data: bytes, media: str = "application/json", **headers: Any) -> None:
        self.send_response(status)
        if media:
            self.send_header("content-type", media)
        self.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            for one in value if isinstance(value, list) else [value]:
                self.send_header(name.replace("_", "-"), one)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _stream(self, parts: Iterable[bytes], media: str = "text/event-stream", **headers: str) -> None:
        self.send_response(200)
        self.send_header("content-type", media)
        self.send_header("transfer-encoding", "chunked")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        try:
            for part in parts:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _wait(self) -> None:
        self.server.owner.waiting.set()
        self.server.owner.gate.wait(30)

    def _model(self, received: Received, number: int) -> None:
        owner = self.server.owner
        body = received.json
        if received.path.endswith("/embeddings"):
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            self._json({"object": "list", "data": [vector], "model": "m-1", "usage": usage})
        elif received.path.endswith("/responses"):
            self._response(body)
        elif received.path.endswith("/moderations"):
            self._json({"id": "modr-1", "model": "m-1", "results": []})
        elif not received.path.endswith("/chat/completions"):
            choice = {"index": 0, "text": "a text", "finish_reason": "stop", "logprobs": None}
            whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m-1", "usage": USAGE}
            self._json({**whole, "choices": [choice]})
        elif body["messages"][-1].get("content") == "BOOM":
            self._send(400, b'{"error": {"message": "bad prompt", "type": "invalid_request_error"}}')
        elif body.get("stream"):
            self._stream(self._events(body))
        else:
            if body["messages"][-1].get("content") == "WAIT":
                self._wait()
            self._json(completion(owner.answer(body, number)))

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _events(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        owner = self.server.owner
        if owner.chunks is not None:
            chunks = owner.chunks(body)
        elif (body.get("response_format") or {}).get("type") == "json_schema":
            chunks = text_chunks(('{"name": ', '"fair", ', '"day": 5}'))
        else:
            chunks = tool_chunks() if body.get("tools") else text_chunks()
        for position, one in enumerate(chunks):
            if position == 2 and body["messages"][-1].get("content") == "WAIT":
                self._wait()
            yield b"data: " + json.dumps(one).encode() + b"\n\n"
        if (body.get("stream_options") or {}).get("include_usage"):
            yield b"data: " + json.dumps({**chunk({}), "choices": [], "usage": USAGE}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _response(self, body: Mapping[str, Any]) -> None:
        wanted = ((body.get("text") or {}).get("format") or {}).get("type")
        words = ('{"name": "fair", ', '"day": 5}') if wanted == "json_schema" else ("hi ", "there")
        text = {"type": "output_text", "text": "".join(words), "annotations": []}
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
        whole = {
            "id": "resp_1", "object": "response", "created_at": 1, "model": "m-1", "status": "completed",
            "output": [message], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
            "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3,
                      "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                      "output_tokens_details": {"reasoning_tokens": 0}},
        }  # fmt: skip
        if not body.get("stream"):
            self._json(whole)
            return
        empty = {**whole, "status": "in_progress", "output": []}
        open_message = {**message, "status": "in_progress", "content": []}
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": empty},
            {"type": "response.output_item.added", "output_index": 0, "item": open_message},
            {"type": "response.content_part.added", **at, "part": {**text, "text": ""}},
            *({"type": "response.output_text.delta", **at, "delta": word, "logprobs": []} for word in words),
            {"type": "response.output_text.done", **at, "text": "".join(words), "logprobs": []},
            {"type": "response.content_part.done", **at, "part": text},
            {"type": "response.output_item.done", "output_index": 0, "item": message},
            {"type": "response.completed", "response": whole},
        ]
        self._stream(
            f"event: {one['type']}\ndata: {json.dumps({**one, 'sequence_number': number})}\n\n".encode()
            for number, one in enumerate(events)
        )

    # -- pages

    def _page_json(self, received: Received, number: int) -> None:
        self._send(200, JSON, Set_Cookie=["sid=abc; Path=/", "t=1"], X_Twice=["one", "two"])

    def _page_huge(self, received: Received, number: int) -> None:
        self._send(200, b'{"v": 1e400, "w": 1234567890123456789012345}')

    def _page_echo(self, received: Received, number: int) -> None:
        sent = {
            "len": len(received.body),
            "b64": base64.b64encode(received.body).decode(),
            "q": received.query,
            "n": number,
        }
        self._send(200, json.dumps(sent).encode())

    def _page_gzip(self, received: Received, number: int) -> None:
        self._send(200, gzip.compress(b'{"ok": true}', mtime=0), Content_Encoding="gzip")

    def _page_deflate(self, received: Received, number: int) -> None:
        self._send(200, zlib.compress(b'{"ok": true}'), Content_Encoding="deflate")

    def _page_gzip_sse(self, received: Received, number: int) -> None:
        packer = zlib.compressobj(wbits=31)
        parts = [packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in SSE] + [packer.flush()]
        self._stream(parts, Content_Encoding="gzip")

    def _page_binary(self, received: Received, number: int) -> None:
        self._send(200, BINARY, "application/octet-stream")

    def _page_poll(self, received: Received, number: int) -> None:
        self._send(200, json.dumps({"state": "ready" if number >= 3 else "starting", "n": number}).encode())

    def _page_flaky(self, received: Received, number: int) -> None:
        if number == 1:
            self._send(429, b'{"error": {"message": "slow down"}}', Retry_After="5")
        else:
            self._send(200, b'{"ok": true}')

    def _page_redirect(self, received: Received, number: int) -> None:
        self._send(307, b"", Location="/echo?" + received.query)

    def _page_sse(self, received: Received, number: int) -> None:
        self._stream(SSE)

    def _page_gated(self, received: Received, number: int) -> None:
        def parts() -> Iterator[bytes]:
            yield b"data: 0\n\n"
            self._wait()
            for position in range(1, 50):
                yield b"data: %d\n\n" % position

        self._stream(parts())

    def _page_wait(self, received: Received, number: int) -> None:
        self._wait()
        self._send(200, b'{"ok": true}')

    def _page_login(self, received: Received, number: int) -> None:
        token = received.query.partition("=")[2] or "t"
        answer = {"access_token": token, "expires_in": 3600, "token_type": "bearer"}
        self._send(200, json.dumps(answer).encode(), Set_Cookie=f"session={token}; HttpOnly")

    def _page_large(self, received: Received, number: int) -> None:
        self._stream((b"x" * 65536 for _ in range(int(received.query))), "application/octet-stream")

    def _page_empty(self, received: Received, number: int) -> None:
        self.send_response(204)
        self.end_headers()


_PAGES: dict[str, Callable[[_Handler, Received, int], None]] = {
    "/json": _Handler._page_json,
    "/huge-number": _Handler._page_huge,
    "/echo": _Handler._page_echo,
    "/gzip": _Handler._page_gzip,
    "/deflate": _Handler._page_deflate,
    "/gzip-sse": _Handler._page_gzip_sse,
    "/binary": _Handler._page_binary,
    "/poll": _Handler._page_poll,
    "/flaky": _Handler._page_flaky,
    "/redirect": _Handler._page_redirect,
    "/sse": _Handler._page_sse,
    "/slow-sse": _Handler._page_gated,
    "/wait": _Handler._page_wait,
    "/login": _Handler._page_login,
    "/large": _Handler._page_large,
    "/204": _Handler._page_empty,
}
