# SPDX-License-Identifier: Apache-2.0
"""A loopback server that speaks enough of OpenAI's chat API for the tests, and misbehaves on demand.

Decision: the answer is a function of the request body, so that a changed prompt gets a changed answer, and everything
that reached the server is kept in `requests`, so that "no connection was tried" can be asserted. A mock transport was
rejected: the recording boundary sits on the transports, and only real sockets show what a client does with them.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Message = dict[str, Any]
Answer = Callable[[Mapping[str, Any]], Message]


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request that reached the server; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What the next request gets instead of its answer.

    `status` alone is an HTTP error with OpenAI's error body; `cut_after` lets that many stream chunks out and then
    drops the connection; `drop` closes the connection before any byte.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    drop: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A scripted answer: a body of known length, or with `events` a stream of them, one chunk each.

    `cut`: the connection is dropped after the last event. `hold`: after the last event nothing comes, and the
    connection stays open until the server stops.
    """

    status: int = 200
    media: str = "application/json"
    body: bytes = b""
    events: Sequence[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    hold: bool = False


def json_reply(value: Any, **members: Any) -> Reply:
    """A reply with a JSON body."""
    return Reply(body=json.dumps(value).encode(), **members)


def sse_reply(events: Sequence[Any], *, done: bool = False, named: bool = False, **members: Any) -> Reply:
    """A reply with a stream of JSON events, `named` by their type; with `done` the line that ends OpenAI's streams."""
    parts = []
    for event in events:
        name = f"event: {event['type']}\n" if named else ""
        parts.append(f"{name}data: {json.dumps(event)}\n\n".encode())
    return Reply(events=[*parts, b"data: [DONE]\n\n"] if done else parts, media="text/event-stream", **members)


def text(content: str) -> Message:
    """An assistant message that only says something."""
    return {"role": "assistant", "content": content}


def tool_calls(*calls: tuple[str, str, Mapping[str, Any]]) -> Message:
    """An assistant message that asks for tools; each call is (id, name, arguments)."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id_, name, arguments in calls
        ],
    }


def echo(body: Mapping[str, Any]) -> Message:
    """The default answer: the number of messages and the last one, so that any change of the prompt shows."""
    last = body["messages"][-1].get("content")
    return text(f"{len(body['messages'])}: {last}")


class OpenAIServer:
    """A context manager around the server thread.

    `url` is the origin (`http://127.0.0.1:port`), `base_url` what an OpenAI client wants (`…/v1`). `pages` maps a path
    to the JSON value that a GET of it returns. `replies` maps `METHOD /path` to what answers it: a `Reply`, or a
    function of what was received that gives one; it goes before everything else but the queued faults.
    """

    def __init__(self, answer: Answer = echo, *, chunk_delay: float = 0.0, compress: bool = False) -> None:
        self.answer = answer
        self.chunk_delay = chunk_delay
        self.compress = compress
        self.pages: dict[str, Any] = {"/json": {"ok": True, "items": [1, 2.5, "three"]}}
        self.replies: dict[str, Reply | Callable[[Received], Reply]] = {}
        self.faults: deque[Fault] = deque()
        self.stopping = threading.Event()
        self.requests: list[Received] = []
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.base_url = f"{self.url}/v1"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening; a second call does nothing."""
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take_fault(self) -> Fault:
        """The fault that the next request gets; a harmless one when none is queued."""
        return self.faults.popleft() if self.faults else Fault()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, owner: OpenAIServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is part of some tests and no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        """Keep the test output clean."""

    def do_GET(self) -> None:
        """Serve one of the `pages`."""
        fault = self._receive()[1]
        path = self.path.partition("?")[0]
        pages = self.server.owner.pages
        if self._failed(fault) or self._replied(self.server.owner.requests[-1]):
            return
        if path in pages:
            self._send(200, pages[path])
        else:
            self._send(404, {"error": {"message": f"no page {path}", "type": "not_found"}})

    def do_POST(self) -> None:
        """Answer a chat completion, whole or as a stream; echo any other body."""
        received, fault = self._receive()
        if self._failed(fault) or self._replied(received):
            return
        if not self.path.endswith("/chat/completions"):
            self._send(200, {"method": "POST", "path": self.path, "length": len(received.body)})
            return
        body = received.json
        message = self.server.owner.answer(body)
        if body.get("stream"):
            self._stream(list(stream_chunks(body, message)), fault)
        else:
            self._send(200, completion(body, message))

    def do_DELETE(self) -> None:
        """Answer as scripted, else that it is deleted."""
        received, fault = self._receive()
        if not self._failed(fault) and not self._replied(received):
            self._send(200, {"id": self.path.rpartition("/")[2], "deleted": True, "object": "deleted"})

    def _replied(self, received: Received) -> bool:
        """Send the scripted reply, if there is one."""
        reply = self.server.owner.replies.get(f"{received.method} {received.path.partition('?')[0]}")
        if reply is None:
            return False
        if not isinstance(reply, Reply):
            reply = reply(received)
        self.send_response(reply.status)
        self.send_header("content-type", reply.media)
        for name, content in reply.headers.items():
            self.send_header(name, content)
        if reply.events is None:
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)
            return True
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in reply.events:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
        if reply.hold:
            self.server.owner.stopping.wait()
        self.close_connection = reply.cut or reply.hold
        if not self.close_connection:
            self.wfile.write(b"0\r\n\r\n")
        return True

    def _receive(self) -> tuple[Received, Fault]:
        length = int(self.headers.get("content-length") or 0)
        chunked = "chunked" in self.headers.get("transfer-encoding", "")
        received = Received(
            method=self.command,
            path=self.path,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self._chunks() if chunked else self.rfile.read(length),
        )
        self.server.owner.requests.append(received)
        return received, self.server.owner.take_fault()

    def _chunks(self) -> bytes:
        """A body that was sent without its length."""
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _failed(self, fault: Fault) -> bool:
        if fault.drop:
            self.close_connection = True
            return True
        if fault.status < 400:
            return False
        error = {"error": {"message": f"scripted status {fault.status}", "type": "scripted", "code": None}}
        self._send(fault.status, error, fault.headers)
        return True

    def _send(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        if self.server.owner.compress:
            data = gzip.compress(data, mtime=0)
            self.send_header("content-encoding", "gzip")
        for name, content in (headers or {}).items():
            self.send_header(name, content)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chunks: Sequence[Mapping[str, Any]], fault: Fault) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        parts = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]
        for part in parts[: fault.cut_after]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
            time.sleep(self.server.owner.chunk_delay)
        if fault.cut_after is None:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True


def completion(body: Mapping[str, Any], message: Message) -> dict[str, Any]:
    """The answer's body for a request that does not stream."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 1700000000,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": _usage(body, message),
    }


def stream_chunks(body: Mapping[str, Any], message: Message) -> Iterator[dict[str, Any]]:
    """The same answer as a stream: one delta a word, tool-call arguments in two pieces."""
    yield _chunk(body, {"role": "assistant", "content": "" if message.get("content") else None})
    for index, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        opening = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
        yield _chunk(body, {"tool_calls": [{"index": index, **opening}]})
        for piece in (arguments[:half], arguments[half:]):
            yield _chunk(body, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    words = (message.get("content") or "").split(" ")
    for position, word in enumerate(words if message.get("content") else ()):
        yield _chunk(body, {"content": word if position == 0 else " " + word})
    yield _chunk(body, {}, finish="tool_calls" if message.get("tool_calls") else "stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**_chunk(body, {}), "choices": [], "usage": _usage(body, message)}


def _chunk(body: Mapping[str, Any], delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {
        "id": "chatcmpl-test",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": body["model"],
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}],
    }


def _usage(body: Mapping[str, Any], message: Message) -> dict[str, int]:
    prompt, answer = len(json.dumps(body["messages"])) // 4, len(json.dumps(message)) // 4
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def response(body: Mapping[str, Any], *output: Mapping[str, Any], **members: Any) -> dict[str, Any]:
    """An answer of the Responses API with the items `output`."""
    return {
        "id": "resp_test",
        "object": "response",
        "created_at": 1700000000,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": body["model"],
        "output": [dict(item) for item in output],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": 30,
            "input_tokens_details": {"cached_tokens": 10, "cache_write_tokens": 0},
            "output_tokens": 12,
            "output_tokens_details": {"reasoning_tokens": 4},
            "total_tokens": 42,
        },
        **members,
    }


def output_message(content: str, **members: Any) -> dict[str, Any]:
    """A message item of the Responses API."""
    part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
    return {
        "id": "msg_test",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
        **members,
    }


def response_events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The stream that amounts to a response: each text, reasoning summary and argument string in two pieces."""
    number = iter(range(1_000_000))

    def event(kind: str, **members: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(number), **members}

    started = {**whole, "status": "in_progress", "output": [], "usage": None, "error": None, "incomplete_details": None}
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for at, item in enumerate(whole["output"]):
        place = {"item_id": item.get("id"), "output_index": at}
        empty = {"content": []} if "content" in item else {"summary": []} if "summary" in item else {}
        empty |= {name: "" for name in ("arguments", "input") if name in item}
        yield event("response.output_item.added", output_index=at, item={**item, **empty, "status": "in_progress"})
        for part_at, part in enumerate(item.get("content") or ()):
            name = "refusal" if part["type"] == "refusal" else "text"
            kind = "response.refusal" if name == "refusal" else f"response.{part['type']}"
            here = {**place, "content_index": part_at}
            extra = {"logprobs": []} if part["type"] == "output_text" else {}
            yield event("response.content_part.added", **here, part={**part, name: ""})
            for piece in _halves(part[name]):
                yield event(f"{kind}.delta", **here, delta=piece, **extra)
            yield event(f"{kind}.done", **here, **{name: part[name]}, **extra)
            yield event("response.content_part.done", **here, part=part)
        for part_at, part in enumerate(item.get("summary") or ()):
            here = {**place, "summary_index": part_at}
            yield event("response.reasoning_summary_part.added", **here, part={**part, "text": ""})
            for piece in _halves(part["text"]):
                yield event("response.reasoning_summary_text.delta", **here, delta=piece)
            yield event("response.reasoning_summary_text.done", **here, text=part["text"])
            yield event("response.reasoning_summary_part.done", **here, part=part)
        if "arguments" in item:
            for piece in _halves(item["arguments"]):
                yield event("response.function_call_arguments.delta", **place, delta=piece)
            arguments = {"arguments": item["arguments"], "name": item.get("name")}
            yield event("response.function_call_arguments.done", **place, **arguments)
        if "input" in item:
            yield event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            yield event("response.custom_tool_call_input.done", **place, input=item["input"])
        yield event("response.output_item.done", output_index=at, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def _halves(value: str) -> tuple[str, str]:
    half = len(value) // 2
    return value[:half], value[half:]
