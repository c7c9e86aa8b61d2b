# SPDX-License-Identifier: Apache-2.0
"""The aiohttp client: exact on the wire, unnoticed by the program, answered offline by aiohttp's own types."""

from __future__ import annotations

import asyncio
import gc
import gzip
import importlib.util
import io
import json
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import aiohttp.web
import httpx
import pytest
from opentelemetry import context

from sftrace_otel import (
    ReplayError,
    ReplayExhaustedError,
    ReplayMismatchError,
    ReplayPolicyError,
    ReplaySession,
    instrumentation,
    record,
    trace_tool,
)
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.instrumentation import aiohttp as boundary
from sftrace_otel.instrumentation import aiohttp_served, guard
from sftrace_otel.instrumentation.exchange import Exchange

Run = Callable[..., Any]
Program = Callable[[], Coroutine[Any, Any, Any]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
MIDDLEWARES = tuple(int(part) for part in aiohttp.__version__.split(".")[:2]) >= (3, 12)


def _server(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "servers" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MINI, SCRIPTED = _server("mini_server"), _server("script_server")


@pytest.fixture
def srv() -> Iterator[Any]:
    with MINI.MiniServer() as server:
        server.stop = server.__exit__
        yield server


@pytest.fixture
def raw() -> Iterator[Callable[[Callable[[Any], None]], Any]]:
    """`raw(script)` runs a server whose connections each run `script`."""
    running: list[Any] = []

    def start(script: Callable[[Any], None]) -> Any:
        running.append(SCRIPTED.ScriptServer(script).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def both(recorded: Run, frozen: Run) -> Callable[..., Any]:
    """`both(program, server)` records `program`, stops the server, replays it, and gives the equal results once."""

    def run(program: Program, *servers: Any) -> Any:
        want = recorded(lambda: asyncio.run(program()))
        for server in servers:
            server.stop()
        assert frozen(lambda: asyncio.run(program())) == want
        return want

    return run


def rows(bundle: Any) -> list[dict[str, Any]]:
    return list(bundle.wire())


def ends(bundle: Any) -> list[str]:
    return [row["end"] for row in bundle.calls]


def body_of(bundle: Any, row: dict[str, Any]) -> bytes:
    body = row["body"]
    if isinstance(body, dict):
        return bytes(bundle.blob(body["$blob"]))
    return b"" if body is None else str(body).encode()


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def repeating(data: bytes) -> Callable[[Any], None]:
    """A script that answers every request of a connection with `data`."""

    def script(peer: Any) -> None:
        while peer.request() is not None:
            peer.send(data)

    return script


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_bodies_of_every_kind_are_exact_and_replay(srv: Any, both: Run, read: Run) -> None:
    async def program() -> list[Any]:
        seen: list[Any] = []
        async with aiohttp.ClientSession(base_url=srv.url) as session:
            for method, path in [
                ("GET", "/json"), ("GET", "/gzip"), ("GET", "/binary"), ("GET", "/204"), ("HEAD", "/json"),
                ("GET", "/latin1"), ("GET", "/gzip-empty"), ("HEAD", "/gzip-empty"), ("GET", "/nowhere"),
            ]:  # fmt: skip
                async with session.request(method, path) as got:
                    assert type(got) is aiohttp.ClientResponse
                    assert isinstance(got.content, aiohttp.StreamReader)
                    seen.append([path, got.status, got.reason, await got.read(), await got.text(errors="replace")])
                    seen[-1] += [got.content_type, got.charset, sorted(got.cookies), got.method, str(got.url)]
        return seen

    want = both(program, srv)
    bundle = read()
    exact = {row["url"].rpartition("/")[2]: body_of(bundle, row) for row in rows(bundle) if row["method"] == "GET"}
    assert exact["json"] == b'{"z": 1,  "a": [1, 2.0], "u": "\\u00e9"}'
    assert exact["gzip"] == b'{"ok": true}' == want[1][3]
    assert exact["binary"] == want[2][3] == MINI.BINARY
    assert want[5][4] == "café"
    gzipped = next(row for row in rows(bundle) if row["url"].endswith("/gzip"))
    assert gzipped["encoding_removed"] == "gzip" and gzipped["reason"] == "OK"
    assert ["content-encoding", "gzip"] in gzipped["headers"]
    assert set(ends(bundle)) == {"finished"}
    names = [event.name for event in bundle.events if event.type == "tool_call"]
    assert names[0] == f"http GET {srv.url}/json"


READERS: dict[str, Callable[[Any], Any]] = {
    "read": lambda got: got.read(),
    "text": lambda got: got.text(),
    "iter_any": lambda got: _all(got.content.iter_any()),
    "iter_chunked": lambda got: _all(got.content.iter_chunked(7)),
    "iter_chunks": lambda got: _pieces(_all(got.content.iter_chunks())),
    "lines": lambda got: _all(got.content),
    "readline": lambda got: _until(got.content.readline, b""),
    "readuntil": lambda got: _until(lambda: got.content.readuntil(b"\n\n"), b""),
    "readchunk": lambda got: _pieces(_until(got.content.readchunk, (b"", False))),
    "readany": lambda got: _until(got.content.readany, b""),
    "read_n": lambda got: _until(lambda: got.content.read(11), b""),
    "readexactly": lambda got: _exactly(got.content),
}


async def _all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def _until(read_one: Callable[[], Any], last: Any) -> list[Any]:
    found: list[Any] = []
    while (part := await read_one()) != last:
        found.append(part)
    return found


async def _pieces(chunks: Any) -> list[bytes]:
    """Without the flag that tells the end of an HTTP chunk: it comes a moment after its data, or with it."""
    return [data for data, _ in await chunks if data]


async def _exactly(content: Any) -> list[Any]:
    try:
        return [await content.readexactly(5), await content.readexactly(5), await content.readexactly(10**6)]
    except asyncio.IncompleteReadError as error:
        return [error.partial, error.expected]


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("path", ["/sse", "/gzip", "/json"])
def test_every_way_to_read_gives_the_same_pieces_again(how: str, path: str, srv: Any, both: Run, read: Run) -> None:
    async def program() -> Any:
        async with aiohttp.ClientSession() as session, session.get(srv.url + path) as got:
            return await READERS[how](got)

    want = both(program, srv)
    assert want
    assert ends(read()) == ["finished"]
    (row,) = rows(read())
    assert sum(size for size, _ in row["chunks"]) == len(body_of(read(), row))
    offsets = [offset for _, offset in row["chunks"]]
    assert offsets == sorted(offsets) and offsets[0] > 0
    if how in ("iter_any", "iter_chunked"):
        assert [size for size, _ in row["chunks"]] == [len(part) for part in want]


@pytest.mark.parametrize("framing", ["length", "chunked", "eof"])
def test_a_large_body_is_whole_under_every_framing(framing: str, raw: Run, both: Run, read: Run) -> None:
    data = bytes(range(256)) * 8000

    def script(peer: Any) -> None:
        peer.request()
        if framing == "chunked":
            parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in (data[:1000], data[1000:])]
            peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n")
        else:
            peer.send(answer(data) if framing == "length" else b"HTTP/1.1 200 OK\r\n\r\n" + data)

    server = raw(script)

    async def program() -> Any:
        async with aiohttp.ClientSession() as session:
            async with session.get(server.url) as got:
                whole = await got.read()
            async with session.get(server.url) as got:
                parts = [len(part) async for part in got.content.iter_any()]
        return [zlib.crc32(whole), parts]

    assert both(program, server)[0] == zlib.crc32(data)
    assert [body_of(read(), row) for row in rows(read())] == [data, data]


def test_repeated_headers_keep_their_order_and_name(raw: Run, both: Run, read: Run) -> None:
    server = raw(repeating(answer(b"x", "Link: <a>; rel=one", "X-B: 1", "Link: <b>; rel=two", "x-b: 2")))

    async def program() -> Any:
        async with aiohttp.ClientSession() as session, session.get(server.url) as got:
            links = {key: str(value["url"]) for key, value in got.links.items()}
            return [got.headers.getall("x-b"), got.headers.getall("LINK"), links, got.headers["Content-Length"]]

    want = both(program, server)
    assert want[:2] == [["1", "2"], ["<a>; rel=one", "<b>; rel=two"]]
    names = [name for name, _ in rows(read())[0]["headers"]]
    assert names == ["link", "x-b", "link", "x-b", "content-length"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate", "unknown"])
@pytest.mark.parametrize("decompress", [True, False])
def test_encodings_fit_the_bundle_and_the_replay(
    encoding: str, decompress: bool, raw: Run, both: Run, read: Run
) -> None:
    plain = b'{"text": "' + b"the quick brown fox " * 50 + b'"}'
    packer = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "raw deflate": packer.compress(plain) + packer.flush(),
        "unknown": plain,
    }[encoding]
    server = raw(repeating(answer(packed, f"content-encoding: {encoding.split()[-1]}")))

    async def program() -> Any:
        async with aiohttp.ClientSession(auto_decompress=decompress) as session, session.get(server.url) as got:
            body = await got.read()
            if not decompress and got.headers.get("content-encoding") in ("gzip", "deflate"):
                body = zlib.decompress(body, -15 if encoding == "raw deflate" else 47)
            return body

    assert both(program, server) == plain
    (row,) = rows(read())
    if encoding == "unknown" or (encoding == "raw deflate" and not decompress):
        assert "encoding_removed" not in row
        assert body_of(read(), row) == packed
    else:
        assert row["encoding_removed"] == encoding.split()[-1]
        assert body_of(read(), row) == plain


def test_the_first_chunk_is_not_held_back(raw: Run, both: Run, read: Run) -> None:
    first_seen = threading.Event()

    def script(peer: Any) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        assert first_seen.wait(10)
        peer.send(b"6\r\nsecond\r\n0\r\n\r\n")

    server = raw(script)

    async def program() -> Any:
        async with aiohttp.ClientSession() as session, session.get(server.url) as got:
            first = await got.content.readany()
            first_seen.set()
            return [first, await got.content.readany(), await got.content.readany()]

    assert both(program, server) == [b"first", b"second", b""]
    first, second = rows(read())[0]["chunks"]
    assert (first[0], second[0]) == (5, 6) and first[1] < second[1]


# --- how exchanges end ------------------------------------------------------------------------------------------------


def half(peer: Any) -> None:
    """Half of a body, then nothing until the client goes; all of it for `/all`."""
    line, _, _ = peer.request()
    peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf\n" + (b"done\n" if "/all" in line else b""))
    peer.wait_closed()


async def _closed(session: Any, url: str) -> None:
    got = await session.get(url)
    await got.content.readline()
    got.close()
    got.close()


async def _released(session: Any, url: str) -> None:
    got = await session.get(url)
    await got.content.readline()
    got.release()


async def _left(session: Any, url: str) -> None:
    async with session.get(url) as got:
        await got.content.readline()


async def _unread(session: Any, url: str) -> None:
    async with session.get(url):
        pass


async def _broken(session: Any, url: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with session.get(url) as got:
            await got.content.readline()
            raise ZeroDivisionError


async def _forgotten(session: Any, url: str) -> None:
    got = await session.get(url + "/all")
    await got.content.readline()
    await got.content.wait_eof()  # before that, the connection holds the response; then only the stream, while idle
    del got
    gc.collect()


async def _cancelled(session: Any, url: str) -> None:
    async with session.get(url) as got:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(got.read(), 0.05)


async def _cancelled_readline(session: Any, url: str) -> None:
    async with session.get(url) as got:
        await got.content.readline()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(got.content.readline(), 0.05)


async def _session_closed(session: Any, url: str) -> None:
    got = await session.get(url)
    await got.content.readline()
    await session.close()
    assert ends_now == ["closed"]
    got.close()


async def _timed_out(session: Any, url: str) -> None:
    with pytest.raises(TimeoutError):
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=0.2)) as got:
            await got.read()


async def _read_timed_out(session: Any, url: str) -> None:
    with pytest.raises(aiohttp.SocketTimeoutError):
        async with session.get(url, timeout=aiohttp.ClientTimeout(sock_read=0.05)) as got:
            await got.read()


ends_now: list[str] = []


@pytest.mark.parametrize(
    ("leave", "end"),
    [
        (_closed, "closed"), (_released, "closed"), (_left, "closed"), (_unread, "closed"), (_broken, "closed"),
        (_forgotten, "abandoned"), (_cancelled, "cancelled"), (_cancelled_readline, "cancelled"),
        (_session_closed, "closed"), (_timed_out, "failed"), (_read_timed_out, "failed"),
    ],
)  # fmt: skip
def test_a_body_that_is_left_ends_once_and_says_how(
    leave: Callable[[Any, str], Any], end: str, raw: Run, recorded: Run, frozen: Run, read: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = raw(half)
    ends_now.clear()
    finish = Exchange._finish

    def noting(self: Exchange, how: str, error: BaseException | None) -> None:
        ends_now.append(how)
        finish(self, how, error)

    monkeypatch.setattr(Exchange, "_finish", noting)

    async def program() -> None:
        async with aiohttp.ClientSession() as session:
            await leave(session, server.url)

    recorded(lambda: asyncio.run(program()))
    server.stop()
    assert ends_now == ends(read()) == [end]
    (row,) = rows(read())
    assert body_of(read(), row) == (b"" if leave is _unread else b"half\n")
    ends_now[:] = [end]
    frozen(lambda: asyncio.run(program()))


def test_a_read_that_is_cancelled_and_made_again_goes_on(raw: Run, recorded: Run, frozen: Run, read: Run) -> None:
    asked_again = threading.Event()

    def script(peer: Any) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf\n")
        assert asked_again.wait(10)
        peer.send(b"done\n")

    server = raw(script)

    async def program(patience: float) -> list[Any]:
        async with aiohttp.ClientSession() as session, session.get(server.url) as got:
            lines = [await got.content.readline()]
            try:
                lines.append(await asyncio.wait_for(got.content.readline(), patience))
            except TimeoutError:
                asked_again.set()
                lines.append(await got.content.readline())
            return lines

    want = recorded(lambda: asyncio.run(program(0.05)))
    assert want == [b"half\n", b"done\n"] and asked_again.is_set()
    assert ends(read()) == ["finished"]
    server.stop()
    assert frozen(lambda: asyncio.run(program(60))) == want


def test_reading_on_where_the_recording_was_closed_stops_the_replay(raw: Run, recorded: Run, frozen: Run) -> None:
    server = raw(half)

    async def program(lines: int) -> list[bytes]:
        async with aiohttp.ClientSession() as session, session.get(server.url) as got:
            return [await got.content.readline() for _ in range(lines)]

    assert recorded(lambda: asyncio.run(program(1))) == [b"half\n"]
    server.stop()
    with pytest.raises(ReplayExhaustedError, match="was left before its end"):
        frozen(lambda: asyncio.run(program(2)))


def test_what_is_open_when_the_interpreter_goes_is_in_the_bundle(raw: Run, tmp_path: Path) -> None:
    server = raw(half)
    code = f"""
    import asyncio, aiohttp
    from sftrace_otel import instrumentation, recorder
    from sftrace_otel.settings import Settings
    from pathlib import Path
    instrumentation.install()
    recorder.acquire(Settings(dir=Path("out"), quiet=True))
    kept = []
    async def main():
        session = aiohttp.ClientSession()
        got = await session.get({server.url!r})
        kept.extend([session, got, await got.content.readline()])
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "sftrace:" not in done.stderr
    (path,) = (tmp_path / "out").glob("*.sftrace")
    assert ends(open_bundle(path)) == ["cut"]
    assert body_of(open_bundle(path), rows(open_bundle(path))[0]) == b"half\n"


# --- errors -----------------------------------------------------------------------------------------------------------


class _Names(aiohttp.abc.AbstractResolver):
    """A resolver that knows no name, or that never comes back."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        raise OSError(-2, "Name or service not known")

    async def close(self) -> None:
        """Nothing is open."""


def _seen(error: BaseException) -> list[Any]:
    """What a program may look at, class and members."""
    names = ("errno", "strerror", "host", "port", "ssl", "status", "message")
    chain = [kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith(("aiohttp", "builtins"))]
    members = {name: getattr(error, name, None) for name in names}
    if isinstance(error, aiohttp.ClientConnectorError):
        members["os_error"] = [type(error.os_error).__name__, str(error.os_error)]
    return [type(error).__name__, type(error).__module__, chain, str(error), members]


def disconnects(peer: Any) -> None:
    peer.request()


def resets(peer: Any) -> None:
    peer.request()
    peer.reset()


def stops_midway(peer: Any) -> None:
    peer.request()
    peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf\n")


def stops_in_a_chunk(peer: Any) -> None:
    peer.request()
    peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhalf\n\r\n5\r\nha")


def packs_badly(peer: Any) -> None:
    peer.request()
    data = gzip.compress(b"the quick brown fox " * 100)
    peer.send(answer(data[:40] + b"\0" * 40, "content-encoding: gzip"))


def talks_nonsense(peer: Any) -> None:
    peer.request()
    peer.send(b"SSH-2.0-nonsense\r\n\r\n")


def says_nothing(peer: Any) -> None:
    peer.request()
    peer.wait_closed()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (disconnects, aiohttp.ServerDisconnectedError), (resets, aiohttp.ClientOSError),
        (stops_midway, aiohttp.ClientPayloadError), (stops_in_a_chunk, aiohttp.ClientPayloadError),
        (packs_badly, aiohttp.ClientPayloadError), (talks_nonsense, aiohttp.ClientResponseError),
        (says_nothing, aiohttp.SocketTimeoutError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["read", "iter_any"])
def test_errors_of_the_connection_come_back_as_aiohttps_own(
    script: Callable[[Any], None], kind: type[BaseException], how: str, raw: Run, both: Run, read: Run
) -> None:
    server = raw(script)

    async def program() -> list[Any]:
        got: list[Any] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_read=0.3)) as session:
            try:
                async with session.post(server.url, data=b"x") as response:
                    if how == "read":
                        got.append(await response.read())
                    async for part in response.content.iter_any():
                        got.append(part)
            except aiohttp.ClientError as error:
                got.extend([isinstance(error, kind), *_seen(error)])
        return got

    want = both(program, server)
    assert True in want and ends(read()) == ["failed"]
    (row,) = rows(read())
    assert (row["module"], row["exception"]["qualname"]) == ("aiohttp", kind.__name__)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, aiohttp.ClientConnectorError),
        ({"connector": {"resolver": _Names()}, "url": "http://no.such.name:81/"}, aiohttp.ClientConnectorError),
        ({"proxy": "http://127.0.0.1:9"}, aiohttp.ClientProxyConnectionError),
        (
            {
                "connector": {"resolver": _Names(hangs=True)},
                "url": "http://no.such.name/",
                "timeout": aiohttp.ClientTimeout(connect=0.05),
            },
            aiohttp.ConnectionTimeoutError,
        ),
        (
            {
                "connector": {"resolver": _Names(hangs=True)},
                "url": "http://no.such.name/",
                "timeout": aiohttp.ClientTimeout(total=0.05),
            },
            TimeoutError,
        ),
    ],
)
def test_errors_before_there_is_a_connection(
    options: dict[str, Any], kind: type[BaseException], both: Run, read: Run
) -> None:
    async def program() -> list[Any]:
        given = dict(options)
        connector = aiohttp.TCPConnector(**given.pop("connector", {}))
        async with aiohttp.ClientSession(connector=connector) as session:
            try:
                await session.get(given.pop("url", "http://127.0.0.1:9/x"), **given)
            except (aiohttp.ClientError, TimeoutError) as error:
                # where aiohttp has no class of its own, a replayed error also is a RecordedDependencyError
                seen = _seen(error)
                return [isinstance(error, kind), seen[0], *(seen[1:] if kind is not TimeoutError else [str(error)])]
        return []

    assert both(program)[0] is True
    assert ends(read()) == ["failed"]
    assert rows(read())[0]["exception"]["qualname"] == both(program)[1]


def test_raise_for_status(srv: Any, both: Run, read: Run) -> None:
    async def refuse(response: aiohttp.ClientResponse) -> None:
        raise LookupError(await response.text())

    async def program() -> list[Any]:
        seen: list[Any] = []
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for call in (
                session.get(srv.url + "/nowhere"),
                session.get(srv.url + "/nowhere", raise_for_status=refuse),
            ):
                try:
                    await call
                except (aiohttp.ClientResponseError, LookupError) as error:
                    seen.append(_seen(error))
            async with session.get(srv.url + "/nowhere", raise_for_status=False) as got:
                try:
                    got.raise_for_status()
                except aiohttp.ClientResponseError as error:
                    seen.append([*_seen(error), str(error.request_info.real_url), error.headers["content-type"]])
        return seen

    want = both(program, srv)
    assert [seen[0] for seen in want] == ["ClientResponseError", "LookupError", "ClientResponseError"]
    assert ends(read()) == ["closed", "finished", "closed"]


def test_a_body_that_is_no_json_fails_in_aiohttp(srv: Any, both: Run) -> None:
    async def program() -> list[Any]:
        async with aiohttp.ClientSession() as session, session.get(srv.url + "/sse") as got:
            try:
                await got.json()
            except aiohttp.ContentTypeError as error:
                return [error.status, error.message, str(error)]
        return []

    assert both(program, srv)[0] == 200


# --- requests ---------------------------------------------------------------------------------------------------------


def test_uploads_are_recorded_as_sent(srv: Any, both: Run, read: Run, tmp_path: Path) -> None:
    data = bytes(range(256))
    (tmp_path / "f.bin").write_bytes(data)

    async def parts() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async def program() -> list[Any]:
        form = aiohttp.FormData()
        form.add_field("note", "with a file")
        form.add_field("f", io.BytesIO(data), filename="a.bin", content_type="application/octet-stream")
        seen: list[Any] = []
        async with aiohttp.ClientSession(base_url=srv.url) as session:
            with open(tmp_path / "f.bin", "rb") as file:
                for body in (
                    {"data": data}, {"data": "täxt"}, {"json": {"a": [1, 2.5, None]}}, {"data": {"q": "a b"}},
                    {"data": parts()}, {"data": file}, {"data": io.BytesIO(b"stream")}, {"data": form}, {},
                    {"json": {"packed": "x" * 100}, "compress": "gzip"}, {"data": io.StringIO("text file")},
                ):  # fmt: skip
                    async with session.post("/echo", **body) as got:
                        seen.append((await got.json())["len"])
        return seen

    want = both(program, srv)
    assert want[0] == want[5] == 256 and want[4] == 7 and want[8] == 0
    sent = [row["request"]["body"] for row in rows(read())]
    assert bytes(read().blob(sent[0]["$blob"])) == data == bytes(read().blob(sent[5]["$blob"]))
    assert sent[1:5] == ["täxt", '{"a": [1, 2.5, null]}', "q=a+b", "one two"]
    assert sent[6] == "stream" and sent[8] is None and sent[10] == "text file"
    assert b"with a file" in bytes(read().blob(sent[7]["$blob"]))
    assert sent[9] == json.dumps({"packed": "x" * 100})
    headers = dict(map(tuple, rows(read())[4]["request"]["headers"]))
    assert headers["transfer-encoding"] == "chunked" and headers["host"] == srv.url.removeprefix("http://")
    assert dict(map(tuple, rows(read())[9]["request"]["headers"]))["content-encoding"] == "gzip"


def test_multipart_compares_by_its_parts(srv: Any, recorded: Run, frozen: Run) -> None:
    async def program(content: bytes) -> int:
        form = aiohttp.FormData()
        form.add_field("f", io.BytesIO(content), filename="a.bin")
        async with aiohttp.ClientSession() as session, session.post(srv.url + "/echo", data=form) as got:
            return int(got.status)

    recorded(lambda: asyncio.run(program(b"\x00one")))
    srv.stop()
    assert frozen(lambda: asyncio.run(program(b"\x00one"))) == 200
    with pytest.raises(ReplayMismatchError):
        frozen(lambda: asyncio.run(program(b"\x00two")))


def test_a_body_generator_that_fails_fails_again(srv: Any, both: Run, read: Run) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        raise KeyError("mine")

    async def program() -> list[Any]:
        async with aiohttp.ClientSession() as session:
            try:
                await session.post(srv.url + "/echo", data=parts())
            except aiohttp.ClientConnectionError as error:
                async with session.get(srv.url + "/json") as got:
                    return [type(error).__name__, repr(error.__cause__), await got.json()]
        return []

    assert both(program, srv)[1] == "KeyError('mine')"
    assert ends(read()) == ["failed", "finished"]


def test_the_server_asks_for_the_body(raw: Run, both: Run) -> None:
    def script(peer: Any) -> None:
        line = peer.file.readline()
        while (row := peer.file.readline().strip()) != b"":
            line += row
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        peer.send(answer(peer.file.read(4)))

    server = raw(script)

    async def program() -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.post(server.url, data=b"body", expect100=True) as got,
        ):
            return await got.read()

    assert both(program, server) == b"body"


@pytest.mark.parametrize("method", ["get", "post"])
def test_redirects_are_exchanges_of_their_own(method: str, srv: Any, both: Run, read: Run) -> None:
    async def program() -> list[Any]:
        body = {"json": {"a": 1}} if method == "post" else {}
        async with (
            aiohttp.ClientSession() as session,
            getattr(session, method)(srv.url + "/redirect?q=cats", **body) as got,
        ):
            return [got.status, [(hop.status, str(hop.url)) for hop in got.history], await got.json(), str(got.url)]

    want = both(program, srv)
    assert want[2]["q"] == "q=cats" and want[2]["len"] == (8 if method == "post" else 0)
    assert [row["status"] for row in rows(read())] == [307, 200]
    assert [row["end"] for row in rows(read())] == ["finished", "finished"]


def test_a_dropped_connection_that_aiohttp_tries_again_is_two_attempts(raw: Run, both: Run, read: Run) -> None:
    def script(peer: Any) -> None:
        peer.request()
        peer.send(OK)
        if peer.number == 0:
            peer.request()  # and goes, as a server does that has just closed an idle connection
        else:
            peer.wait_closed()

    server = raw(script)

    async def program() -> list[Any]:
        async with aiohttp.ClientSession() as session:
            seen = []
            for _ in range(2):
                async with session.get(server.url) as got:
                    seen.append(await got.text())
            return seen

    assert both(program, server) == ["ok", "ok"]
    assert ends(read()) == ["finished", "failed", "finished"]
    assert rows(read())[1]["exception"]["qualname"] == "ServerDisconnectedError"


def test_a_proxy_is_no_exchange(raw: Run, both: Run, read: Run) -> None:
    proxy = raw(repeating(OK))

    async def program() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            login = aiohttp.BasicAuth("user", "hunter2-of-the-proxy")
            async with (
                aiohttp.ClientSession() as session,
                session.get("http://far.invalid/x", proxy=proxy.url, proxy_auth=login) as got,
            ):
                return await got.text()

    assert both(program, proxy) == "ok"
    (row,) = rows(read())
    assert row["url"] == "http://far.invalid/x"
    assert "proxy-authorization" in proxy.requests[0][1]
    assert "hunter2" not in json.dumps(row) and "dXNlcjpodW50" not in json.dumps(row)


# --- what programs put around it --------------------------------------------------------------------------------------


@pytest.mark.skipif(not MIDDLEWARES, reason="aiohttp 3.12 has them first")
def test_middlewares_run_again_and_their_retries_are_attempts(srv: Any, both: Run, read: Run) -> None:
    async def middleware(request: Any, handler: Any) -> Any:
        request.headers["x-step"] = "one"
        response = await handler(request)
        if response.status == 429:
            await response.read()
            request.headers["x-step"] = "two"
            response = await handler(request)
        return response

    async def program() -> Any:
        async with aiohttp.ClientSession(middlewares=(middleware,)) as session, session.get(srv.url + "/flaky") as got:
            return [got.status, (await got.json())["object"]]

    assert both(program, srv) == [200, "chat.completion"]
    assert [row["status"] for row in rows(read())] == [429, 200]
    steps = [dict(map(tuple, row["request"]["headers"]))["x-step"] for row in rows(read())]
    assert steps == ["one", "two"]


class _Polite(aiohttp.ClientResponse):  # noqa: PLW1641
    """A response class of a program's own, that cannot be hashed."""

    def __eq__(self, other: object) -> bool:
        return False

    async def start(self, connection: Any) -> Any:
        self.started_by_us = True
        return await super().start(connection)

    async def json(self, **options: Any) -> Any:
        return {"please": await super().json(**options)}


class _Connector(aiohttp.TCPConnector):
    """A connector of a program's own."""

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        return await super().connect(*args, **kwargs)


def test_classes_of_the_program_keep_working(srv: Any, both: Run, read: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)

        class Session(aiohttp.ClientSession):
            async def _request(self, *args: Any, **kwargs: Any) -> Any:
                return await super()._request(*args, **kwargs)

    async def program() -> Any:
        traced: list[str] = []
        config = aiohttp.TraceConfig()

        async def started(session: Any, context: Any, params: Any) -> None:
            traced.append("start")

        async def sent(session: Any, context: Any, params: Any) -> None:
            traced.append(params.chunk.decode())

        async def received(session: Any, context: Any, params: Any) -> None:
            traced.append(f"{len(params.chunk)} bytes")

        config.on_request_start.append(started)
        config.on_request_chunk_sent.append(sent)
        config.on_response_chunk_received.append(received)

        async def parts() -> AsyncIterator[bytes]:
            yield b"part"

        async with (
            Session(response_class=_Polite, connector=_Connector(), trace_configs=[config]) as session,
            session.post(srv.url + "/echo", data=parts()) as got,
        ):
            assert type(got) is _Polite and got.started_by_us
            return [await got.json(), traced]

    want = both(program, srv)
    assert want[0]["please"]["len"] == 4
    assert want[1][:2] == ["start", "part"] and want[1][2].endswith("bytes")
    assert ends(read()) == ["finished"]


def test_a_connector_that_connects_all_by_itself_is_recorded_and_lets_nothing_out(
    srv: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    used: list[str] = []

    class Own(aiohttp.BaseConnector):
        async def connect(self, request: Any, traces: Any, timeout: Any) -> Any:
            used.append("connect")
            loop = asyncio.get_running_loop()
            if len(used) > 1:
                protocol = self._factory()
                protocol.connection_made(aiohttp_served._Nowhere())
            else:
                with guard.inside():
                    _, protocol = await loop.create_connection(self._factory, "127.0.0.1", srv.port)
            self._acquired.add(protocol)
            return aiohttp.connector.Connection(self, request.connection_key, protocol, loop)

    async def program() -> Any:
        async with aiohttp.ClientSession(connector=Own()) as session, session.get(srv.url + "/gzip") as got:
            return await got.text()

    want = recorded(lambda: asyncio.run(program()))
    assert want == '{"ok": true}' and ends(read()) == ["finished"]
    srv.stop()
    assert frozen(lambda: asyncio.run(program())) == want
    assert used == ["connect", "connect"]


def test_unix_sockets(both: Run, read: Run, tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()

    def serve() -> None:
        conn, _ = listener.accept()
        with conn, conn.makefile("rb") as file:
            while file.readline().strip():
                pass
            conn.sendall(OK)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()

    class Listener:
        def stop(self) -> None:
            thread.join()
            listener.close()
            Path(place).unlink()

    async def program() -> Any:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=place)) as session,
            session.get("http://docker/info") as got,
        ):
            return await got.text()

    assert both(program, Listener()) == "ok"
    assert rows(read())[0]["url"] == "http://docker/info"


def test_a_session_made_before_is_recorded(srv: Any, bundle_path: Path, read: Run) -> None:
    async def program() -> None:
        async with aiohttp.ClientSession() as session:
            instrumentation.uninstall()
            async with session.get(srv.url + "/json") as got:
                await got.read()
            instrumentation.install()
            with record("agent", output=bundle_path):
                async with session.get(srv.url + "/json") as got:
                    await got.read()

    asyncio.run(program())
    assert len(read().calls) == 1


@pytest.mark.parametrize("first", ["aiohttp", "sftrace_otel"])
def test_whichever_is_imported_first(first: str, srv: Any, tmp_path: Path) -> None:
    second = {"aiohttp": "sftrace_otel", "sftrace_otel": "aiohttp"}[first]
    code = f"""
    import sys
    import {first}
    if {first!r} == "sftrace_otel":
        sftrace_otel.instrument()
        assert "aiohttp" not in sys.modules and "websockets" not in sys.modules and "httpx" not in sys.modules
    import {second}
    import asyncio
    async def main():
        async with aiohttp.ClientSession() as session, session.get({srv.url + "/json"!r}) as got:
            await got.read()
    with sftrace_otel.record("agent", output="run.sftrace"):
        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=True)
    assert ends(open_bundle(tmp_path / "run.sftrace")) == ["finished"]


def test_installing_twice_is_once_and_uninstalling_restores() -> None:
    owners = (
        (aiohttp.BaseConnector, "connect"), (aiohttp.BaseConnector, "close"), (aiohttp.ClientRequest, "send"),
        (aiohttp.ClientRequest, "write_bytes"), (aiohttp.ClientResponse, "start"), (aiohttp.ClientResponse, "close"),
        (aiohttp.ClientResponse, "release"), (aiohttp.client_proto.ResponseHandler, "set_response_params"),
    )  # fmt: skip
    before = [vars(owner)[name] for owner, name in owners]
    instrumentation.install()
    instrumentation.install()
    assert [vars(owner)[name].__wrapped__ for owner, name in owners] == before
    assert len(boundary.patched()) == 8
    instrumentation.uninstall()
    assert [vars(owner)[name] for owner, name in owners] == before
    assert boundary.patched() == []


def test_nothing_active_passes_through(srv: Any, tmp_path: Path) -> None:
    instrumentation.install()

    async def program() -> Any:
        async with aiohttp.ClientSession() as session, session.get(srv.url + "/json") as got:
            assert type(got.content) is aiohttp.StreamReader
            return (await got.json())["z"]

    assert asyncio.run(program()) == 1
    assert list(tmp_path.glob("**/*.sftrace")) == []


@pytest.mark.parametrize("key", ["suppress_instrumentation", context._SUPPRESS_INSTRUMENTATION_KEY], ids=["old", "new"])
def test_an_exporters_own_request_is_not_recorded(key: str, srv: Any, bundle_path: Path, recorded: Run) -> None:
    async def program() -> Any:
        token = context.attach(context.set_value(key, True))
        try:
            async with aiohttp.ClientSession() as session, session.get(srv.url + "/json") as got:
                return (await got.json())["z"]
        finally:
            context.detach(token)

    assert recorded(lambda: asyncio.run(program())) == 1
    assert not open_bundle(bundle_path).calls
    hits = len(srv.hits)
    with pytest.raises(ReplayMismatchError), ReplaySession.from_trace(bundle_path):
        asyncio.run(program())
    assert len(srv.hits) == hits


def test_a_transport_of_httpx_over_aiohttp_is_recorded_once(srv: Any, both: Run, read: Run) -> None:
    class Stream(httpx.AsyncByteStream):
        def __init__(self, response: aiohttp.ClientResponse) -> None:
            self.response = response

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self.response.content.iter_any():
                yield part

        async def aclose(self) -> None:
            self.response.release()

    class Transport(httpx.AsyncBaseTransport):
        def __init__(self) -> None:
            self.session = aiohttp.ClientSession(auto_decompress=False)

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            got = await self.session.request(request.method, str(request.url), headers=dict(request.headers))
            headers = [(name.decode(), value.decode()) for name, value in got.raw_headers]
            return httpx.Response(got.status, headers=headers, stream=Stream(got))

        async def aclose(self) -> None:
            await self.session.close()

    async def program() -> Any:
        async with httpx.AsyncClient(transport=Transport()) as client:
            one = (await client.get(srv.url + "/gzip")).json()
            async with client.stream("GET", srv.url + "/sse") as got:
                two = b"".join([part async for part in got.aiter_raw()])
        return [one, two]

    assert both(program, srv) == [{"ok": True}, b"".join(MINI.SSE_PARTS)]
    assert [row["module"] for row in rows(read())] == ["httpx", "httpx"]
    assert len(read().calls) == 2


def test_another_instrumentation_with_trace_configs_gives_its_span_to_the_call(
    srv: Any, bundle_path: Path, read: Run
) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanKind, set_span_in_context

    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("theirs")
    config = aiohttp.TraceConfig()
    spans: list[Any] = []

    async def started(session: Any, held: Any, params: Any) -> None:
        span = tracer.start_span("GET", kind=SpanKind.CLIENT, attributes={"http.request.method": "GET"})
        params.headers["traceparent"] = f"00-{'ab' * 16}-{span.get_span_context().span_id:016x}-01"
        held.token = context.attach(set_span_in_context(span))
        spans.append(span)

    async def ended(session: Any, held: Any, params: Any) -> None:
        context.detach(held.token)

    config.on_request_start.append(started)
    config.on_request_end.append(ended)
    instrumentation.install()

    async def program() -> None:
        async with aiohttp.ClientSession(trace_configs=[config]) as session, session.get(srv.url + "/json") as got:
            await got.read()

    with record("agent", output=bundle_path):
        asyncio.run(program())
    (row,) = read().calls
    assert row["span_id"] == f"{spans[0].get_span_context().span_id:016x}"
    assert dict(map(tuple, rows(read())[0]["request"]["headers"]))["traceparent"].startswith("00-abab")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_model_is_one(stream: bool, srv: Any, both: Run, read: Run) -> None:
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}

    async def program() -> list[Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(srv.url + "/v1/chat/completions", json=body) as got,
        ):
            return [line async for line in got.content]

    want = both(program, srv)
    assert len(want) == (14 if stream else 1)
    (asked,) = [event for event in read().events if event.type == "llm_request"]
    (told,) = [event for event in read().events if event.type == "llm_response"]
    assert asked.model == "m"
    assert told.output["choices"][0]["message"]["content"] == ("Hello world" if stream else "answer 1 to 1 messages")
    assert [row["module"] for row in rows(read())] == ["aiohttp"]


# --- many, large, secret ----------------------------------------------------------------------------------------------


def test_a_hundred_requests_at_once(raw: Run, both: Run, read: Run) -> None:
    all_here = threading.Barrier(100)

    def script(peer: Any) -> None:
        line, _, body = peer.request()
        all_here.wait(30)
        peer.send(answer(line.split()[1].encode() + b" " + body))

    server = raw(script)

    async def program() -> list[Any]:
        async with aiohttp.ClientSession() as session:

            async def one(number: int) -> Any:
                async with session.post(server.url + f"/echo?n={number % 10}", json={"n": number}) as got:
                    return await got.text()

            return await asyncio.gather(*[one(number) for number in range(100)])

    assert both(program, server) == [f'/echo?n={number % 10} {{"n": {number}}}' for number in range(100)]
    assert ends(read()) == ["finished"] * 100


def test_nothing_is_held_of_what_is_over(srv: Any, raw: Run, both: Run) -> None:
    left = raw(half)
    kept = (boundary._watched, aiohttp_served.feeds)

    async def program() -> int:
        async with aiohttp.ClientSession() as session:
            for path in ("/json", "/sse", "/gzip", "/204", "/nowhere"):
                async with session.post(srv.url + path, data=io.BytesIO(b"x")) as got:
                    await got.read()
                async with session.get(left.url) as got:
                    await got.content.readany()
        return 1

    both(program, srv, left)
    gc.collect()
    assert [len(held) for held in kept] == [0, 0]


def test_the_lineage_of_what_follows_does_not_depend_on_connections(srv: Any, recorded: Run, bundle_path: Path) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x"

    async def program() -> list[Any]:
        seen = []
        for _ in range(3):
            async with aiohttp.ClientSession() as session:
                try:
                    await session.post("http://127.0.0.1:9/", data=b"x")
                except aiohttp.ClientConnectorError:
                    pass
                async with session.post(srv.url + "/echo", data=parts()) as got:
                    seen.append((await got.json())["len"])
            seen.append(await asyncio.create_task(_poll()))
        return seen

    async def _poll() -> int:
        async with aiohttp.ClientSession() as session, session.get(srv.url + "/poll") as got:
            return int((await got.json())["n"])

    want = recorded(lambda: asyncio.run(program()))
    srv.stop()
    with ReplaySession.from_trace(bundle_path) as replay:
        assert asyncio.run(program()) == want
        replay.verify_complete()
    assert replay.report().matched == {"lineage": 9, "digest": 0, "redacted": 0}


def test_a_large_exchange_is_recorded_off_the_loop(raw: Run, both: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"text": "the quick brown fox " * 10_000}
    server = raw(repeating(answer(json.dumps(big).encode(), "content-type: application/json")))
    here = threading.get_ident()
    threads: dict[str, set[int]] = {"begin": set(), "_finish": set()}
    for name, found in threads.items():
        original = getattr(Exchange, name)

        def noting(self: Exchange, *args: Any, _original: Any = original, _found: Any = found) -> None:
            _found.add(threading.get_ident())
            _original(self, *args)

        monkeypatch.setattr(Exchange, name, noting)

    async def program() -> Any:
        async with aiohttp.ClientSession() as session, session.post(server.url, json=big) as got:
            return (await got.json())["text"][:9]

    assert both(program, server) == "the quick"
    assert all(found and here not in found for found in threads.values())


def test_what_is_beyond_the_limit_is_cut_and_refused_under_replay(
    srv: Any, bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_MAX_PAYLOAD_BYTES", "1000")
    instrumentation.install()

    async def program() -> int:
        async with aiohttp.ClientSession() as session, session.get(srv.url + "/binary") as got:
            return len(await got.read())

    with record("agent", output=bundle_path):
        assert asyncio.run(program()) > 1000
    (row,) = open_bundle(bundle_path).calls
    assert row["truncated"] is True
    with pytest.raises(ReplayError, match="cut"), ReplaySession.from_trace(bundle_path):
        asyncio.run(program())


SECRETS = ("hunter2-in-the-url", "hunter2-in-the-query", "sk-abcdefghijklmnopqrstuvwx", "hunter2-in-a-cookie",
           "hunter2-in-the-answer", "hunter2-of-the-proxy", "aHVudGVyMi", "hunter2-in-the-login")  # fmt: skip


def test_secrets_reach_no_bundle(raw: Run, recorded: Run, bundle_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = answer(
        b'{"password": "hunter2-in-the-answer"}',
        "content-type: application/json",
        "set-cookie: sid=hunter2-in-a-cookie; Path=/",
    )

    def script(peer: Any) -> None:
        while (request := peer.request()) is not None:
            if request[0].startswith("CONNECT"):
                peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
                peer.file.read(1)
                peer.send(b"this is no TLS")
                return
            peer.send(told)

    server = raw(script)
    failed: list[str] = []
    where = server.url.removeprefix("http://")

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"api_key": "sk-abcdefghij'
        yield b'klmnopqrstuvwx"}'
        if len(server.requests) == 1:
            raise KeyError("mine")

    async def program() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            login = aiohttp.BasicAuth("user", "hunter2-in-the-login")
            proxy = {"proxy_auth": aiohttp.BasicAuth("user", "hunter2-of-the-proxy")}
            async with aiohttp.ClientSession() as session:
                async with session.post(
                    f"http://me:hunter2-in-the-url@{where}/x?api_key=hunter2-in-the-query",
                    json={"token": "sk-abcdefghijklmnopqrstuvwx"},
                    headers={"x-api-key": "sk-abcdefghijklmnopqrstuvwx"},
                ) as got:
                    await got.read()
                for options in (
                    {"url": server.url, "auth": login, "proxy": server.url, **proxy},
                    {"url": server.url, "auth": login, "proxy": "http://127.0.0.1:9", **proxy},
                    {"url": "https://far.invalid", "proxy": "http://me:hunter2-in-the-url@127.0.0.1:9"},
                    {"url": "https://far.invalid", "proxy": server.url, **proxy},
                ):
                    try:
                        async with session.post(data=parts(), **options) as got:
                            await got.read()
                    except aiohttp.ClientError as error:
                        failed.append(type(error).__name__)

    recorded(lambda: asyncio.run(program()))
    assert "hunter2-in-the-url" not in json.dumps(server.requests[0][0])
    assert ends(open_bundle(bundle_path)) == ["finished"] + 4 * ["failed"]
    assert failed[:3] == ["ClientConnectionError", "ClientProxyConnectionError", "ClientProxyConnectionError"]
    assert failed[3] == "ClientConnectorSSLError"  # with the proxy's login in its arguments
    stored = b"".join(path.read_bytes() for path in bundle_path.rglob("*") if path.is_file())
    for secret in SECRETS:
        assert secret.encode() not in stored, secret
        assert secret not in caplog.text


# --- websockets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ws_server() -> Iterator[Any]:
    """A server of websockets that says each message back, in a thread of its own."""
    ready = threading.Event()
    place: dict[str, Any] = {"opened": 0}

    async def handle(request: aiohttp.web.Request) -> aiohttp.web.WebSocketResponse:
        place["opened"] += 1
        ws = aiohttp.web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            await ws.send_str(message.data)
        return ws

    async def main() -> None:
        app = aiohttp.web.Application()
        app.router.add_get("/ws", handle)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        place["port"] = runner.addresses[0][1]
        place["stop"] = asyncio.Event()
        place["loop"] = asyncio.get_running_loop()
        ready.set()
        await place["stop"].wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    ready.wait()
    yield place
    place["loop"].call_soon_threadsafe(place["stop"].set)
    thread.join()


async def _talk(port: int) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}/ws?api_key=hunter2") as ws,
    ):
        await ws.send_str("hello")
        return str((await ws.receive()).data)


def test_a_websocket_works_and_is_named_as_not_recorded(ws_server: Any, recorded: Run, read: Run) -> None:
    async def program() -> list[str]:
        return [await _talk(ws_server["port"]) for _ in range(2)]

    guard.notice_connections()
    assert recorded(lambda: asyncio.run(program())) == ["hello", "hello"]
    assert not read().calls and guard.connections() == []
    verdict = read().run["verdict"]
    assert verdict["offline"] is False
    (obstacle,) = verdict["obstacles"]
    assert obstacle["what"] == "2 websockets to 127.0.0.1 were seen and are not recorded"
    assert (obstacle["kind"], obstacle["count"]) == ("websocket", 2)


def test_a_websocket_inside_a_tool_is_skipped_with_it(ws_server: Any, both: Run, read: Run) -> None:
    @trace_tool
    async def talk() -> str:
        return await _talk(ws_server["port"])

    assert both(talk) == "hello"
    assert ws_server["opened"] == 1
    assert read().run["verdict"] == {"offline": True, "obstacles": []}


def test_a_websocket_is_refused_under_replay(ws_server: Any, recorded: Run, bundle_path: Path) -> None:
    async def nothing() -> None:
        """Make no call."""

    recorded(lambda: asyncio.run(nothing()))
    with (
        pytest.raises(ReplayPolicyError, match=r"opens a websocket to 127\.0\.0\.1:.*REPLAY_ALLOW") as raised,
        ReplaySession.from_trace(bundle_path),
    ):
        try:
            asyncio.run(_talk(ws_server["port"]))
        except Exception:
            pass
    assert "hunter2" not in str(raised.value)
    assert ws_server["opened"] == 0
    with ReplaySession.from_trace(bundle_path, allow=[f"127.0.0.1:{ws_server['port']}"]):
        assert asyncio.run(_talk(ws_server["port"])) == "hello"


def test_the_last_line_says_what_a_websocket_means(
    ws_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"""
    import asyncio, aiohttp
    from sftrace_otel import instrumentation, recorder, trace_tool
    from sftrace_otel.settings import Settings
    from pathlib import Path
    instrumentation.install()
    recorder.acquire(Settings(dir=Path("out")))
    @trace_tool
    def one():
        return 1
    async def main():
        one()
        async with aiohttp.ClientSession() as session, session.ws_connect("http://127.0.0.1:{ws_server["port"]}/ws"):
            pass
    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "does not replay offline: a websocket to 127.0.0.1 was seen and is not recorded" in done.stderr
