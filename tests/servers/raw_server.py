# SPDX-License-Identifier: Apache-2.0
"""A loopback server that sends exactly the bytes it is told to, and breaks off where it is told to.

    with RawServer({"/cut": [b"HTTP/1.1 200 OK\\r\\nContent-Length: 9\\r\\n\\r\\nabc", RESET]}) as server: ...

Decision: sockets without an HTTP library, because that would correct what the tests want wrong. It takes a request with
an absolute target too, as a proxy gets it, and answers by the path alone.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

HOLD = object()
"""Send nothing more and keep the connection open, until the client closes it or the server stops."""
RESET = object()
"""Break the connection with a reset."""


def whole(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """An answer with its length."""
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(*parts: bytes, headers: Sequence[str] = (), end: bool = True) -> list[bytes]:
    """An answer in chunks; without its last one unless `end`."""
    head = "\r\n".join(["HTTP/1.1 200 OK", "Transfer-Encoding: chunked", *headers]).encode("latin-1") + b"\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), *([b"0\r\n\r\n"] if end else [])]


class RawServer:
    """`answers` maps a path to what is sent for it: bytes, or a list of bytes, HOLD and RESET.

    A list of lists is one answer per request, the last one for all further ones. A connection is closed after its
    answer, unless it told its length. `requests` holds (request line, headers in lower case, body) as they came.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self._counts: dict[str, int] = {}
        self._open: list[socket.socket] = []
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening and close every connection; a second call does nothing."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._thread.join()
            for connection in self._open:
                connection.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while self._one(connection, stream):
                    pass
        except OSError:
            pass

    def _one(self, connection: socket.socket, stream: Any) -> bool:
        line = stream.readline().decode("latin-1").strip()
        if not line:
            return False
        headers: dict[str, str] = {}
        while field := stream.readline().strip():
            name, _, value = field.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        self.requests.append((line, headers, _body(stream, headers)))
        target = line.split(" ")[1]
        path = "/" + target.split("/", 3)[3] if "://" in target else target
        return self._answer(connection, path.partition("?")[0])

    def _answer(self, connection: socket.socket, path: str) -> bool:
        answer = self.answers.get(path, whole(b"no such path", status="404 Not Found"))
        if isinstance(answer, list) and answer and isinstance(answer[0], list):
            turn = self._counts[path] = self._counts.get(path, 0) + 1
            answer = answer[min(turn, len(answer)) - 1]
        parts = answer if isinstance(answer, list) else [answer]
        for part in parts:
            if part is HOLD:
                connection.recv(1)
                return False
            if part is RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            connection.sendall(part)
        sent = b"".join(parts)
        return b"content-length: %d\r\n" % len(sent.partition(b"\r\n\r\n")[2]) in sent.lower()


def _body(stream: Any, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return bytes(stream.read(int(headers.get("content-length") or 0)))
    body = b""
    while size := int(stream.readline().partition(b";")[0] or b"0", 16):
        body += stream.read(size)
        stream.readline()
    stream.readline()
    return body
