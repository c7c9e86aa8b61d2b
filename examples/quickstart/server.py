# SPDX-License-Identifier: Apache-2.0
"""The model of the quickstart: an OpenAI-compatible server on a free loopback port, standard library only.

    python examples/quickstart/server.py          # prints its two addresses and serves until it is interrupted

`POST /v1/chat/completions` answers from the messages it is sent, whole or streamed, so a changed prompt gets another
answer. `GET /policy.json` is an ordinary JSON endpoint of the shop.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

POLICY = {"shop": "Lamps & Co", "currency": "EUR", "refund_days": 30}


def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What this "model" says next, decided by the messages alone."""
    request = _last(messages, "user")
    if "Check this reply" in request:
        aspect = "tone" if "tone" in request else "facts"
        return _say(
            f"Looked at the {aspect}: fine." if len(request) > 40 else f"Looked at the {aspect}: nothing there."
        )
    if "Rewrite" in request:
        return _say("Dear customer, " + request.partition("\n")[2].strip() + " Kind regards, Lamps & Co")
    results = {
        message["tool_call_id"]: json.loads(message["content"]) for message in messages if message["role"] == "tool"
    }
    order_id = re.search(r"A-\d+", request)
    if order_id is None:
        return _say("Which order is it about?")
    if "call_order" not in results:
        return _call("call_order", "find_order", {"order_id": order_id[0]})
    if "call_refund" not in results:
        price = results["call_order"]["price"]
        return _call("call_refund", "refund", {"order_id": order_id[0], "amount": price})
    return _say(
        f"we have refunded {results['call_refund']['refunded']:.2f} EUR for your {results['call_order']['item']}."
    )


def _last(messages: list[dict[str, Any]], role: str) -> str:
    return next((str(message["content"]) for message in reversed(messages) if message["role"] == role), "")


def _say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(id_: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id_, "type": "function", "function": function}]}


def completion(request: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    finish = "tool_calls" if "tool_calls" in message else "stop"
    words = len(json.dumps(request["messages"]).split())
    said = len(json.dumps(message).split())
    return {
        "id": "chatcmpl-quickstart",
        "object": "chat.completion",
        "created": 1767225600,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": words, "completion_tokens": said, "total_tokens": words + said},
    }


def chunks(request: dict[str, Any], message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same answer as stream chunks, one word each."""
    head = {**completion(request, message), "object": "chat.completion.chunk"}
    del head["usage"]
    deltas = [
        {"role": "assistant", "content": ""},
        *({"content": word} for word in re.findall(r"\s*\S+", message["content"])),
    ]
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The shop's JSON endpoint."""
        if self.path == "/policy.json":
            self._send(200, POLICY)
        else:
            self._send(404, {"error": {"message": f"no such page: {self.path}"}})

    def do_POST(self) -> None:
        """A chat completion."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": f"no such endpoint: {self.path}"}})
            return
        message = answer(request["messages"])
        if request.get("stream"):
            self._stream(request, message)
        else:
            self._send(200, completion(request, message))

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, request: dict[str, Any], message: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in (*map(json.dumps, chunks(request, message)), "[DONE]"):
            data = f"data: {part}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        """Say nothing per request."""


def main() -> None:
    """Serve on the port given as the only argument, or on a free one."""
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    origin = f"http://127.0.0.1:{server.server_port}"
    print(f"export OPENAI_BASE_URL={origin}/v1 SHOP_URL={origin}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
