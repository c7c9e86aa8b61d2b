# SPDX-License-Identifier: Apache-2.0
"""Small loopback server that the case snippets call `srv`. Standard library only.
    with MiniServer() as srv: httpx.get(srv.url + "/json")
srv.hits is a list of (method, path) that reached it: empty after a frozen replay.
"""

import base64
import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BINARY = bytes(range(256)) * 4 + b"\xff\xfe\x00%PDF\x89PNG"
SSE_PARTS = [
    b": hello\n\n",
    b'data: {"n": 1}\n\nda',
    b'ta: {"n": 2}\n\n',
    b"event: x\ndata: caf\xc3",
    b"\xa9\n\n",
    b"data: [DONE]\n\n",
]


def chunk(i, delta, fin=None, usage=None, choices=True):
    d = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": fin}] if choices else [],
    }
    if usage:
        d["usage"] = usage
    return d


def tool_deltas():
    def tc(i, **k):
        return {"tool_calls": [dict(index=i, **k)]}

    yield chunk(0, {"role": "assistant", "content": None})
    yield chunk(1, tc(0, id="call_a", type="function", function={"name": "lookup", "arguments": ""}))
    yield chunk(2, tc(0, function={"arguments": '{"city":'}))
    yield chunk(3, tc(1, id="call_b", type="function", function={"name": "add", "arguments": ""}))
    yield chunk(4, tc(1, function={"arguments": '{"x": 1'}))
    yield chunk(5, tc(0, function={"arguments": ' "Oslo"}'}))
    yield chunk(6, tc(1, function={"arguments": ', "y": 2}'}))
    yield chunk(7, {}, fin="tool_calls")


def text_deltas(words=("Hel", "lo", " wor", "ld")):
    yield chunk(0, {"role": "assistant", "content": ""})
    for i, w in enumerate(words):
        yield chunk(i + 1, {"content": w})
    yield chunk(9, {}, fin="stop")


class H(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *a):
        pass

    def body(self):
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            out = b""
            while True:
                n = int(self.rfile.readline().split(b";")[0], 16)
                out += self.rfile.read(n)
                self.rfile.readline()
                if n == 0:
                    return out
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def send(self, code, data=b"", ctype="application/json", **hdr):
        self.send_response(code)
        self.send_header("content-type", ctype)
        self.send_header("content-length", str(hdr.pop("_len", len(data))))
        for k, v in hdr.items():
            for one in v if isinstance(v, list) else [v]:
                self.send_header(k.replace("_", "-"), one)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def stream(self, parts, ctype="text/event-stream", delay=0.0):
        self.send_response(200)
        self.send_header("content-type", ctype)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for p in parts:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(p), p))
                self.wfile.flush()
                time.sleep(delay)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def do_any(self):
        s = self.server
        path, _, q = self.path.partition("?")
        body = self.body()
        with s.lock:
            s.hits.append((self.command, path))
            n = s.counts[path] = s.counts.get(path, 0) + 1
        if path == "/json":
            return self.send(200, b'{"z": 1,  "a": [1, 2.0], "u": "\\u00e9"}', Set_Cookie=["sid=abc", "t=1"])
        if path == "/echo":
            return self.send(
                200, json.dumps({"len": len(body), "b64": base64.b64encode(body).decode(), "q": q}).encode()
            )
        if path == "/gzip":
            return self.send(200, gzip.compress(b'{"ok": true}', mtime=0), content_encoding="gzip")
        if path == "/gzip-empty":
            return self.send(200, b"", content_encoding="gzip", _len=0 if self.command != "HEAD" else 37)
        if path == "/binary":
            return self.send(200, BINARY, "application/octet-stream")
        if path == "/latin1":
            return self.send(200, "caf\u00e9".encode("latin-1"), "text/plain; charset=iso-8859-1")
        if path == "/204":
            self.send_response(204)
            return self.end_headers()
        if path == "/poll":
            return self.send(200, json.dumps({"state": "ready" if n >= 3 else "starting", "n": n}).encode())
        if path == "/flaky":
            return (
                self.send(429, b'{"error": {"message": "slow down"}}', retry_after="0")
                if n == 1
                else self.send(200, json.dumps(completion("ok")).encode())
            )
        if path == "/redirect":
            return self.send(307, b"", location="/echo?" + (q or ""))
        if path == "/sse":
            return self.stream(SSE_PARTS)
        if path == "/slow-sse":
            return self.stream((b"data: %d\n\n" % i for i in range(50)), delay=0.05)
        if path == "/login":
            return self.send(
                200,
                json.dumps(
                    {"access_token": q.partition("=")[2] or "t", "expires_in": 3600, "token_type": "bearer"}
                ).encode(),
            )
        if path.endswith("/chat/completions"):
            r = json.loads(body)
            if r.get("stream"):
                ch = list(tool_deltas() if r.get("tools") else text_deltas())
                if (r.get("stream_options") or {}).get("include_usage"):
                    ch.append(
                        chunk(
                            0, {}, usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}, choices=False
                        )
                    )
                return self.stream(
                    [b"data: " + json.dumps(c).encode() + b"\n\n" for c in ch] + [b"data: [DONE]\n\n"], delay=s.delay
                )
            if r["messages"] and r["messages"][-1].get("content") == "BOOM":
                return self.send(400, b'{"error": {"message": "bad prompt", "type": "invalid_request_error"}}')
            fmt = (r.get("response_format") or {}).get("type")
            return self.send(
                200,
                json.dumps(
                    completion(
                        '{"name": "fair", "day": 5}'
                        if fmt == "json_schema"
                        else f"answer {n} to {len(r['messages'])} messages"
                    )
                ).encode(),
            )
        self.send(404, b'{"error": {"message": "no such path"}}')

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_PATCH = do_any


def completion(text):
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "logprobs": None,
                "message": {"role": "assistant", "content": text, "refusal": None},
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }


class MiniServer:
    def __init__(self, delay=0.0):
        self.delay = delay

    def __enter__(self):
        self.s = ThreadingHTTPServer(("127.0.0.1", 0), H)
        self.s.daemon_threads = True
        self.s.hits, self.s.counts, self.s.lock, self.s.delay = [], {}, threading.Lock(), self.delay
        self.hits = self.s.hits
        self.port = self.s.server_port
        self.url = "http://127.0.0.1:%d" % self.s.server_port
        threading.Thread(target=self.s.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *a):
        self.s.shutdown()
        self.s.server_close()
