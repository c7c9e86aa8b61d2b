# SPDX-License-Identifier: Apache-2.0
"""The mock API that the suites of the SDKs expect beside them: any method and path gets the same small JSON object.

Decision: an answer that is a function of nothing, so that two runs of a suite see the same. It is enough for the tests
that parse leniently; those that hold an answer against the API's schema fail with it, with and without us alike.
Rejected: the schema-driven mock that the SDKs' own CI starts, which is another ecosystem's program.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

BODY = json.dumps({"id": "id", "object": "object", "data": [], "has_more": False}).encode()


class ApiServer:
    """A context manager around the server's thread; `url` is its origin."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        """Keep the test output clean."""

    def _answer(self) -> None:
        self._read_body()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(BODY)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(BODY)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _answer

    def _read_body(self) -> None:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                self.rfile.read(size + 2)
            while self.rfile.readline() not in (b"\r\n", b"\n", b""):
                pass
        else:
            self.rfile.read(int(self.headers.get("content-length") or 0))
