# SPDX-License-Identifier: Apache-2.0
"""A loopback server that speaks HTTP/2 in clear text, to clients that know so (RFC 9113, section 3.3).

It answers `/echo` with the request's method, path and body as JSON and everything else with a body in two frames.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded


class H2Server:
    """`requests` counts the streams that came."""

    def __init__(self) -> None:
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        h2.initiate_connection()
        streams: dict[int, tuple[dict[str, str], bytes]] = {}
        try:
            connection.sendall(h2.data_to_send())
            while data := connection.recv(65536):
                for event in h2.receive_data(data):
                    if isinstance(event, RequestReceived):
                        streams[event.stream_id] = (dict(event.headers), b"")
                    elif isinstance(event, DataReceived):
                        headers, body = streams[event.stream_id]
                        streams[event.stream_id] = (headers, body + event.data)
                        h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, StreamEnded):
                        self._answer(h2, event.stream_id, *streams.pop(event.stream_id))
                connection.sendall(h2.data_to_send())
        except OSError:
            pass

    def _answer(self, h2: Any, stream: int, headers: dict[str, str], body: bytes) -> None:
        self.requests += 1
        parts = [b"first ", b"second"]
        if headers[":path"].startswith("/echo"):
            seen = {"method": headers[":method"], "path": headers[":path"], "body": body.decode()}
            parts = [json.dumps(seen).encode()]
        h2.send_headers(stream, [(":status", "200"), ("x-part", "a"), ("x-part", "b")])
        for number, part in enumerate(parts):
            h2.send_data(stream, part, end_stream=number == len(parts) - 1)
