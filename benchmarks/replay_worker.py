# SPDX-License-Identifier: Apache-2.0
"""One turn of a replay row: `make|call|open|floor|make-http|http CONTENDER FOLDER N`. Prints JSON.

`make` records N tool calls of 1 KB in and 1 KB out, no two alike. `call` replays them without a TracerProvider and
gives the CPU time of a call in the caller's thread, µs: of the best twentieth of the calls in a row, and the median of
the first and last tenth. `open`: the CPU time until a replay of them is ready to start, ms. `make-http` records N
exchanges of 1 KB with a server of this process, `http` answers them at the transport from prepared requests, in µs.
`floor`: what one event of 1 KB costs as JSON, hash and buffered write, µs, the best twentieth.
Contenders: `ours`, `stepfork`, `vcrpy`, `agenttape`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TEXT = ("the quick brown fox jumps over the lazy dog while it rains " * 18)[:990]
WARM_UP = 20


def lookup(query: str, page: int) -> dict[str, object]:
    """A tool with 1 KB in and 1 KB out."""
    return {"page": page, "text": query.upper()}


def queries(calls: int) -> list[str]:
    """The questions, made ahead."""
    return [f"{page} {TEXT}" for page in range(calls + WARM_UP)]


def timed(act: Callable[[Any], object], asked: Sequence[Any]) -> dict[str, float]:
    """Time `act` on each of `asked` but the first ones, which warm up."""
    times = []
    for one in asked:
        started = time.thread_time()
        act(one)
        times.append(time.thread_time() - started)
    times = times[WARM_UP:]
    tenth, part = max(1, len(times) // 10), max(1, len(times) // 20)
    return {
        "all": min(sum(times[at : at + part]) for at in range(0, len(times) - part + 1, part)) / part * 1e6,
        "first": sorted(times[:tenth])[tenth // 2] * 1e6,
        "last": sorted(times[-tenth:])[tenth // 2] * 1e6,
    }


# --- tools ------------------------------------------------------------------------------------------------------------


def _api(contender: str) -> tuple[Any, Any, Any]:
    if contender == "ours":
        import sftrace_otel as package
    else:
        import stepfork as package
    return package.record, package.trace_tool, package.ReplaySession


def make(contender: str, folder: Path, calls: int) -> dict[str, float]:
    """Record."""
    record, trace_tool, _ = _api("ours")
    tool = trace_tool(lookup)
    with record("bench", output=folder / f"{calls}.sftrace"):
        for page, query in enumerate(queries(calls)):
            tool(query, page)
    return {"all": 0.0}


def call(contender: str, folder: Path, calls: int) -> dict[str, float]:
    """Replay every call once."""
    _, trace_tool, session = _api(contender)
    tool = trace_tool(lookup)
    asked = list(enumerate(queries(calls)))
    with session.from_trace(folder / f"{calls}.sftrace") as replay:
        result = timed(lambda one: tool(one[1], one[0]), asked)
        replay.verify_complete()
    return result


def opened(contender: str, folder: Path, calls: int) -> dict[str, float]:
    """Open the bundle for a replay, integrity checked where the contender does."""
    _, _, session = _api(contender)
    started = time.process_time()
    session.from_trace(folder / f"{calls}.sftrace")
    return {"all": (time.process_time() - started) * 1e3}


def floor(contender: str, folder: Path, calls: int) -> dict[str, float]:
    """One event of 1 KB as sorted JSON, its SHA-256, and a buffered write."""
    import orjson

    options = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER | orjson.OPT_APPEND_NEWLINE
    event = {"id": "evt_0123456789abcdef", "type": "tool_call", "step": 1, "name": "lookup", "input": {"query": TEXT}}
    best = float("inf")
    with (folder / "floor").open("wb", buffering=1 << 18) as file:
        for _ in range(20):
            started = time.process_time()
            for _ in range(calls // 20):
                line = orjson.dumps(event, option=options)
                hashlib.sha256(line).hexdigest()
                file.write(line)
            best = min(best, (time.process_time() - started) / (calls // 20) * 1e6)
    return {"all": best}


# --- HTTP -------------------------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        """1 KB of JSON that tells the request."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps({"page": asked["page"], "text": TEXT}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def _session(contender: str, folder: Path, *, replay: bool) -> Iterator[None]:
    if contender == "ours":
        from sftrace_otel import ReplaySession, record

        session: Any = (
            ReplaySession.from_trace(folder / "ours.sftrace")
            if replay
            else record("bench", output=folder / "ours.sftrace")
        )
    elif contender == "vcrpy":
        import vcr

        mode = "none" if replay else "all"
        session = vcr.use_cassette(
            str(folder / "vcr.yaml"), record_mode=mode, match_on=["method", "scheme", "host", "port", "path", "body"]
        )
    else:
        import agenttape

        session = agenttape.use_cassette("bench", mode="none" if replay else "record", cassette_dir=str(folder))
    with session:
        yield


def _requests(port: int, calls: int) -> list[Any]:
    import httpx

    url = f"http://127.0.0.1:{port}/search"
    pages = range(calls + WARM_UP)
    return [httpx.Request("POST", url, json={"page": page, "query": TEXT}) for page in pages]


def _sender(contender: str) -> Callable[[Any], bytes]:
    """Sends a prepared request and reads the answer, at the lowest place where the contender answers."""
    import httpx

    if contender == "agenttape":  # it takes the place of Client.send
        client = httpx.Client()
        return lambda request: client.send(request).read()
    transport = httpx.HTTPTransport()
    return lambda request: transport.handle_request(request).read()


def make_http(contender: str, folder: Path, calls: int) -> dict[str, float]:
    """Record."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with _session(contender, folder, replay=False):
        send = _sender(contender)
        for request in _requests(server.server_port, calls):
            send(request)
    (folder / f"{contender}.port").write_text(str(server.server_port))
    return {"all": 0.0}


def http(contender: str, folder: Path, calls: int) -> dict[str, float]:
    """Answer every exchange once, no server there."""
    port = int((folder / f"{contender}.port").read_text())
    with _session(contender, folder, replay=True):
        send = _sender(contender)
        asked = _requests(port, calls)
        pages: list[int] = []

        def act(request: Any) -> None:
            pages.append(len(send(request)))

        result = timed(act, asked)
    assert len(pages) == calls + WARM_UP and min(pages) > 900, pages[:3]
    return result


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    what = {"make": make, "call": call, "open": opened, "floor": floor, "make-http": make_http, "http": http}[
        sys.argv[1]
    ]
    gc.collect()
    print(json.dumps(what(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
