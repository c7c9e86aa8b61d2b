# SPDX-License-Identifier: Apache-2.0
"""A loopback server that says exactly the bytes that a test writes, one script for each connection.

    def script(peer): peer.request(); peer.send(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
    with ScriptServer(script) as srv: ...

A connection is closed when its script returns. `srv.requests` has (request line, headers, body) of every request.
"""

import socket
import threading


class Peer:
    """The client's end of one connection; `number` counts connections from 0."""

    def __init__(self, server, conn, number):
        self.server, self.conn, self.number = server, conn, number
        self.file = conn.makefile("rb")

    def request(self):
        """Read one request; None where the client closed instead."""
        line = self.file.readline()
        if not line:
            return None
        headers = {}
        while (row := self.file.readline().strip()) != b"":
            name, _, value = row.partition(b":")
            headers[name.lower().decode("latin-1")] = value.strip().decode("latin-1")
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while (size := int(self.file.readline(), 16)) > 0:
                body += self.file.read(size + 2)[:-2]
            self.file.readline()
        else:
            body = self.file.read(int(headers.get("content-length", "0")))
        self.server.requests.append((line.strip().decode("latin-1"), headers, body))
        return self.server.requests[-1]

    def send(self, data):
        self.conn.sendall(data)

    def reset(self):
        """Close so that the client gets a connection reset."""
        self.conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def wait_closed(self):
        """Wait until the client has closed."""
        try:
            while self.conn.recv(65536):
                pass
        except OSError:
            pass


class ScriptServer:
    def __init__(self, script):
        self.script = script
        self.requests = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = 0
        self.closed = False

    def __enter__(self):
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()
        return self

    def _accept(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            if self.closed:
                conn.close()
                return
            number, self.connections = self.connections, self.connections + 1
            threading.Thread(target=self._talk, args=(conn, number), daemon=True).start()

    def _talk(self, conn, number):
        peer = Peer(self, conn, number)
        try:
            self.script(peer)
        except (OSError, ValueError):  # the client is gone, or talks something else
            pass
        finally:
            peer.file.close()
            conn.close()

    def stop(self):
        """Take no connection any more."""
        if not self.closed:
            self.closed = True
            socket.create_connection(("127.0.0.1", self.port)).close()
            self.thread.join()
            self.listener.close()

    def __exit__(self, *a):
        self.stop()
