# SPDX-License-Identifier: Apache-2.0
"""urllib3: exact on the wire, unnoticed by the program, answered offline by urllib3's own answers and errors."""

from __future__ import annotations

import gc
import gzip
import http.client
import io
import itertools
import shutil
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
import wrapt
from opentelemetry import context
from urllib3.util import Retry, Timeout

from sftrace_otel import ReplayMismatchError, ReplaySession, instrumentation, record
from sftrace_otel.instrumentation import guard
from sftrace_otel.instrumentation import urllib3 as boundary

Run = Callable[..., Any]

TEXT = b'{"ok": true, "text": "' + b"abc " * 40 + b'"}'
NEVER = "http://127.0.0.1:9"


def rows(bundle: Any) -> list[dict[str, Any]]:
    return list(bundle.wire())


def ends(bundle: Any) -> list[str]:
    return [row["end"] for row in rows(bundle)]


def body_of(bundle: Any, row: dict[str, Any]) -> bytes:
    body = row["body"]
    if isinstance(body, dict):
        return bytes(bundle.blob(body["$blob"]))
    return b"" if body is None else str(body).encode()


def chain(error: BaseException | None) -> list[str]:
    """The classes of an error and of what is inside it, and its text."""
    found: list[str] = []
    while error is not None:
        found.append(f"{type(error).__module__}.{type(error).__qualname__}")
        inner = getattr(error, "reason", None)
        error = inner if isinstance(inner, BaseException) else None
    return found


def outcome(call: Callable[[], Any]) -> list[Any]:
    try:
        return ["ok", call()]
    except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as error:
        return [chain(error), str(error)]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_bodies_of_every_kind_are_exact_and_replay(srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program() -> list[Any]:
        seen: list[Any] = []
        with urllib3.PoolManager() as pool:
            for method, path in [
                ("GET", "/json"), ("GET", "/gzip"), ("GET", "/binary"), ("GET", "/204"), ("HEAD", "/json"),
                ("GET", "/latin1"), ("GET", "/gzip-empty"), ("HEAD", "/gzip-empty"), ("GET", "/nowhere"),
            ]:  # fmt: skip
                answer = pool.request(method, srv.url + path)
                seen.append([answer.status, answer.reason, answer.data, answer.headers.get("content-type")])
        return seen

    want = recorded(program)
    hits = len(srv.hits)
    assert frozen(program) == want
    assert len(srv.hits) == hits
    bundle = read()
    exact = {row["url"].rpartition("/")[2]: body_of(bundle, row) for row in rows(bundle) if row["method"] == "GET"}
    assert exact["json"] == b'{"z": 1,  "a": [1, 2.0], "u": "\\u00e9"}'
    assert exact["gzip"] == b'{"ok": true}'
    assert exact["binary"] == want[2][2]
    gzipped = next(row for row in rows(bundle) if row["url"].endswith("/gzip"))
    assert gzipped["encoding_removed"] == "gzip"
    assert set(ends(bundle)) == {"finished"}
    assert {row["module"] for row in rows(bundle)} == {"urllib3"}


def _by_readinto(answer: Any) -> list[bytes]:
    found, buffer = [], bytearray(50)
    while count := answer.readinto(buffer):
        found.append(bytes(buffer[:count]))
    return found


def _by_copyfileobj(answer: Any) -> list[bytes]:
    target = io.BytesIO()
    shutil.copyfileobj(answer, target, 64)
    return [target.getvalue()]


def _until_empty(read: Callable[[], bytes]) -> list[bytes]:
    return list(iter(read, b""))


READERS: dict[str, Callable[[Any], list[bytes]]] = {
    "read": lambda answer: [answer.read()],
    "read by parts": lambda answer: _until_empty(lambda: answer.read(33)),
    "stream by parts": lambda answer: list(answer.stream(33, decode_content=True)),
    "stream by large parts": lambda answer: list(answer.stream(100_000, decode_content=True)),
    "read1": lambda answer: _until_empty(answer.read1),
    "read1 by parts": lambda answer: _until_empty(lambda: answer.read1(33)),
    "readinto": _by_readinto,
    "copyfileobj": _by_copyfileobj,
    "lines": list,
    "data": lambda answer: [answer.data],
    "read, then drain": lambda answer: [answer.read(7), answer.drain_conn() or b""],
}


def _answers(raw: Any) -> dict[str, Any]:
    packed = gzip.compress(TEXT, mtime=0)
    members = gzip.compress(TEXT[:55], mtime=0) + gzip.compress(TEXT[55:], mtime=0)
    bare = zlib.compressobj(wbits=-15)
    return {
        "length": raw.whole(TEXT),
        "chunked": raw.chunked(TEXT[:10], TEXT[10:90], TEXT[90:]),
        "to the end": b"HTTP/1.0 200 OK\r\n\r\n" + TEXT,
        "gzip": raw.whole(packed, "Content-Encoding: gzip"),
        "gzip in chunks": raw.chunked(packed[:20], packed[20:40], packed[40:], headers=["Content-Encoding: gzip"]),
        "gzip in members": raw.whole(members, "Content-Encoding: gzip"),
        "deflate without a head": raw.whole(bare.compress(TEXT) + bare.flush(), "Content-Encoding: deflate"),
        "empty": raw.whole(b""),
        "chunked and empty": raw.chunked(),
    }


@pytest.mark.parametrize("reader", READERS)
def test_every_way_to_read_every_kind_of_body(reader: str, raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    answers = _answers(raw)

    def program(url: str) -> list[list[bytes]]:
        with urllib3.PoolManager() as pool:
            found = []
            for path in answers:
                answer = pool.request("GET", f"{url}/{path.replace(' ', '-')}", preload_content=False)
                found.append(READERS[reader](answer))
                answer.release_conn()
        return found

    with raw.RawServer({f"/{path.replace(' ', '-')}": answer for path, answer in answers.items()}) as server:
        want = recorded(program, server.url)
    assert frozen(program, server.url) == want
    bundle = read()
    assert set(ends(bundle)) == {"finished"}
    for path, row in zip(answers, rows(bundle), strict=True):
        assert body_of(bundle, row) == (b"" if path.endswith("empty") else TEXT)


def test_chunks_are_the_parts_that_the_program_read(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program(url: str) -> list[list[bytes]]:
        with urllib3.PoolManager() as pool:
            first = list(pool.request("GET", url + "/chunks", preload_content=False).stream(8))
            answer = pool.request("GET", url + "/whole", preload_content=False)
            second = [answer.read(3), answer.read(4), answer.read()]
        return [first, second]

    with raw.RawServer({"/chunks": raw.chunked(b"one", b"two and more", b"!"), "/whole": raw.whole(b"abcdefgh")}) as s:
        want = recorded(program, s.url)
    assert want == [[b"one", b"two and ", b"more", b"!"], [b"abc", b"defg", b"h"]]
    assert frozen(program, s.url) == want
    for row, parts in zip(rows(read()), want, strict=True):
        assert [size for size, _ in row["chunks"]] == [len(part) for part in parts]
        offsets = [offset for _, offset in row["chunks"]]
        assert offsets == sorted(offsets) and offsets[0] > 0


def test_the_first_chunk_is_not_held_back(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program(url: str) -> bytes:
        with urllib3.PoolManager() as pool:
            answer = pool.request("GET", url + "/", preload_content=False)
            first = next(answer.stream())
            answer.close()
            answer.close()
        return bytes(first)

    with raw.RawServer({"/": [*raw.chunked(b"data: 1\n\n", end=False), raw.HOLD]}) as server:
        assert recorded(program, server.url) == b"data: 1\n\n"
    assert frozen(program, server.url) == b"data: 1\n\n"
    assert ends(read()) == ["closed"]


def test_an_abandoned_answer_is_told_from_a_whole_one(raw: Any, recorded: Run, read: Run) -> None:
    def program(url: str) -> None:
        pool = urllib3.PoolManager()
        answer = pool.request("GET", url + "/", preload_content=False)
        answer.read(2)
        del answer
        gc.collect()
        pool.clear()

    with raw.RawServer({"/": raw.whole(b"abcdef")}) as server:
        recorded(program, server.url)
    assert ends(read())[0] in ("abandoned", "closed")
    assert body_of(read(), rows(read())[0]) == b"ab"


def test_headers_keep_their_order_and_repetitions(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    fields = ["Set-Cookie: a=1; Path=/", "X-B: 2", "Set-Cookie: b=2", "X-A: caf\u00e9", "x-b: 3"]

    def program(url: str) -> Any:
        with urllib3.PoolManager() as pool:
            answer = pool.request("GET", url + "/")
        return [answer.version, list(answer.headers.items()), answer.headers.getlist("x-b")]

    with raw.RawServer({"/": raw.whole(b"x", *fields)}) as server:
        want = recorded(program, server.url)
    again = frozen(program, server.url)
    names = [name for name, _ in want[1]]
    assert names == ["Set-Cookie", "Set-Cookie", "X-B", "x-b", "X-A", "Content-Length"] or len(names) == 6
    assert [name.lower() for name, _ in again[1]] == [name.lower() for name in names]
    assert again[2] == want[2] == ["2", "3"]
    recorded_names = [name for name, _ in rows(read())[0]["headers"]]
    assert recorded_names == ["set-cookie", "x-b", "set-cookie", "x-a", "x-b", "content-length"]


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_each_retry_is_an_exchange(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    busy = [raw.whole(b"later", "Retry-After: 0", status="503 Busy")]
    retries = Retry(4, status_forcelist=[503], backoff_factor=0)

    def program(url: str) -> Any:
        with urllib3.PoolManager() as pool:
            answer = pool.request("GET", url + "/", retries=retries)
        return [answer.status, answer.data, [item.status for item in answer.retries.history]]

    with raw.RawServer({"/": [busy, [raw.RESET], busy, [raw.whole(b"done")]]}) as server:
        want = recorded(program, server.url)
    assert want == [200, b"done", [503, None, 503]]
    assert frozen(program, server.url) == want
    assert [row.get("status") for row in rows(read())] == [503, None, 503, 200]
    assert ends(read()) == ["finished", "failed", "finished", "finished"]


def test_retries_that_run_out_run_out_again(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program(url: str) -> Any:
        with urllib3.PoolManager() as pool:
            return outcome(lambda: pool.request("GET", url + "/", retries=Retry(2, status_forcelist=[503])).data)

    with raw.RawServer({"/": raw.whole(b"no", status="503 Busy")}) as server:
        want = recorded(program, server.url)
    assert want[0][:2] == ["urllib3.exceptions.MaxRetryError", "urllib3.exceptions.ResponseError"]
    assert frozen(program, server.url) == want
    assert len(rows(read())) == 3


def test_redirects_are_exchanges_of_their_own(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program(url: str) -> Any:
        with urllib3.PoolManager() as pool:
            answer = pool.request("POST", url + "/a", body=b"sent")
            pooled = urllib3.connectionpool.connection_from_url(url)
            other = pooled.urlopen("GET", "/b")
            pooled.close()
        return [answer.data, answer.geturl(), other.data]

    answers = {
        "/a": raw.whole(b"", "Location: /b", status="303 See Other"),
        "/b": raw.whole(b"", "Location: /c?x=1", status="307 Temporary Redirect"),
        "/c": raw.whole(b"there"),
    }
    with raw.RawServer(answers) as server:
        want = recorded(program, server.url)
    assert frozen(program, server.url) == want
    assert [(row["method"], row["status"]) for row in rows(read())] == [
        ("POST", 303), ("GET", 307), ("GET", 200), ("GET", 307), ("GET", 200),
    ]  # fmt: skip


# --- failures ---------------------------------------------------------------------------------------------------------

FAILURES = [
    "refused", "no-answer", "reset", "garbage", "silent", "cut", "cut-chunks", "bad-chunk", "stalled", "stalled-chunks",
    "cut-gzip", "nameless",
]  # fmt: skip


@pytest.mark.parametrize("how", ["preloaded", "streamed", "by parts"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failures_come_back_as_they_were(
    failure: str, how: str, raw: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    packed = ["Content-Encoding: gzip"]
    answers = {
        "/no-answer": b"",
        "/reset": [raw.RESET],
        "/garbage": b"what is this?\r\n\r\n",
        "/silent": [raw.HOLD],
        "/cut": [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcd"],
        "/cut-chunks": raw.chunked(b"abcd", b"efgh", end=False),
        "/bad-chunk": [*raw.chunked(b"abcd", end=False), b"zz\r\n"],
        "/stalled": [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcd", raw.HOLD],
        "/stalled-chunks": [*raw.chunked(b"abcd", b"efgh", end=False), raw.HOLD],
        "/cut-gzip": [*raw.chunked(gzip.compress(TEXT, mtime=0)[:20], headers=packed, end=False)],
    }

    def program(url: str) -> Any:
        where = {"refused": NEVER, "nameless": "http://nowhere.invalid"}.get(failure, url)
        seen: list[bytes] = []

        def call() -> Any:
            answer = pool.request("GET", f"{where}/{failure}", preload_content=how == "preloaded")
            if how == "streamed":
                seen.extend(answer.stream(1000, decode_content=True))
            elif how == "by parts":
                seen.extend(iter(lambda: answer.read(3), b""))
            return answer.data

        patience = 0.3 if failure in ("silent", "stalled", "stalled-chunks") else 30
        with urllib3.PoolManager(retries=Retry(0), timeout=Timeout(connect=5, read=patience)) as pool:
            return [outcome(call), seen]

    with raw.RawServer(answers) as server:
        want = recorded(program, server.url)
    again = frozen(program, server.url)
    assert again[0][0] == want[0][0] != "ok"
    if failure not in ("bad-chunk", "cut-gzip"):  # there the text tells bytes of the wire that are not recorded
        assert again == want
    assert ends(read()) == ["failed"]


def test_a_body_that_stops_after_a_part_keeps_the_part(raw: Any, recorded: Run, read: Run) -> None:
    def program(url: str) -> Any:
        with urllib3.PoolManager(retries=False) as pool:
            return outcome(lambda: pool.request("GET", url + "/").data)

    with raw.RawServer({"/": [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcd"]}) as server:
        recorded(program, server.url)
    (row,) = rows(read())
    assert (row["status"], row["end"], row["body"]) == (200, "failed", "abcd")
    assert row["exception"]["qualname"] == "IncompleteRead"


# --- proxies ----------------------------------------------------------------------------------------------------------


def test_requests_through_a_proxy(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program(proxy: str) -> Any:
        headers = urllib3.make_headers(proxy_basic_auth="user:hunter2hunter2")
        with urllib3.ProxyManager(proxy, proxy_headers=headers) as pool:
            return pool.request("GET", "http://elsewhere.test:8080/path?q=1").data

    with raw.RawServer({"/path": raw.whole(b"by proxy")}) as server:
        want = recorded(program, server.url)
        assert server.requests[0][0] == "GET http://elsewhere.test:8080/path?q=1 HTTP/1.1"
    assert want == b"by proxy"
    assert frozen(program, server.url) == want
    assert rows(read())[0]["url"] == "http://elsewhere.test:8080/path?q=1"


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("failure", ["refused", "no-answer", "denied", "silent"])
def test_a_proxy_that_fails(scheme: str, failure: str, raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    denied = raw.whole(b"", status="407 Proxy Authentication Required")
    every = {"no-answer": b"", "denied": denied, "silent": [raw.HOLD]}.get(failure, b"")

    def program(proxy: str) -> Any:
        with urllib3.ProxyManager(proxy, retries=Retry(1), timeout=0.3 if failure == "silent" else 30) as pool:
            return outcome(lambda: pool.request("GET", f"{scheme}://elsewhere.test/x").status)

    with raw.RawServer({"/x": every, "elsewhere.test:443": every}) as server:
        address = NEVER if failure == "refused" else server.url
        want = recorded(program, address)
    assert frozen(program, address) == want
    assert len(rows(read())) == (1 if want[0] == "ok" else 2)
    assert rows(read())[0]["url"] == f"{scheme}://elsewhere.test/x"


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_uploads(srv: Any, tmp_path: Path, recorded: Run, frozen: Run, read: Run) -> None:
    data = bytes(range(256)) * 200
    (tmp_path / "upload.bin").write_bytes(data)

    def parts() -> Iterator[bytes]:
        yield b"one "
        yield b"two"

    def program() -> list[Any]:
        with urllib3.PoolManager() as pool, open("upload.bin", "rb") as file:
            bodies = [data, file, io.BytesIO(b"three"), io.StringIO("f\u00f6ur"), parts(), [b"a", b"b"], "te\u00fct",
                      bytearray(b"six"), memoryview(b"seven"), None]  # fmt: skip
            found = [pool.request("POST", srv.url + "/echo", body=body).json() for body in bodies]
            found.append(pool.request("POST", srv.url + "/echo", fields={"f": ("a.txt", b"multi")}).status)
            found.append(pool.request("POST", srv.url + "/echo", json={"a": 1}).json())
        return found

    want = recorded(program)
    assert want[1]["len"] == len(data)
    hits = len(srv.hits)
    assert frozen(program) == want
    assert len(srv.hits) == hits
    bundle = read()
    sent = [row["request"]["body"] for row in rows(bundle)]
    assert bytes(bundle.blob(sent[0]["$blob"])) == bytes(bundle.blob(sent[1]["$blob"])) == data
    assert sent[2:10] == ["three", "f\u00f6ur", "one two", "ab", "te\u00fct", "six", "seven", None]


def test_a_file_is_sent_again_with_a_retry(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    retries = Retry(2, status_forcelist=[503], allowed_methods=None)

    def program(url: str) -> Any:
        with urllib3.PoolManager() as pool:
            return pool.request("PUT", url + "/", body=io.BytesIO(b"content"), retries=retries).data

    with raw.RawServer({"/": [[raw.whole(b"", status="503 Busy")], [raw.whole(b"ok")]]}) as server:
        want = recorded(program, server.url)
        assert [body for _, _, body in server.requests] == [b"content", b"content"]
    assert frozen(program, server.url) == want
    assert [row["request"]["body"] for row in rows(read())] == ["content", "content"]


def test_a_body_generator_that_fails_fails_again(raw: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def parts() -> Iterator[bytes]:
        yield b"one"
        raise KeyError("mine")

    def program(url: str) -> Any:
        with urllib3.PoolManager() as pool:
            try:
                pool.request("POST", url + "/", body=parts())
            except KeyError as error:
                return str(error)

    with raw.RawServer({"/": raw.whole(b"")}) as server:
        assert recorded(program, server.url) == "'mine'"
    assert frozen(program, server.url) == "'mine'"
    assert ends(read()) == ["failed"]


def test_requests_made_while_a_body_is_sent_are_calls_too(srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program() -> Any:
        with urllib3.PoolManager() as pool:

            def parts() -> Iterator[bytes]:
                yield pool.request("GET", srv.url + "/json").data

            return pool.request("POST", srv.url + "/echo", body=parts()).json()

    want = recorded(program)
    assert frozen(program) == want
    assert sorted(row["method"] for row in rows(read())) == ["GET", "POST"]


# --- the program does not notice --------------------------------------------------------------------------------------


def test_a_pool_made_before_is_recorded_and_stays_what_it_was(srv: Any, bundle_path: Path, read: Run) -> None:
    pool = urllib3.PoolManager()
    first = pool.request("GET", srv.url + "/json")
    instrumentation.install()
    with record("agent", output=bundle_path):
        second = pool.request("GET", srv.url + "/json", preload_content=False)
        assert isinstance(second._original_response, http.client.HTTPResponse)
        second.read()
    assert type(first) is type(second)
    (inner,) = [pool.pools[key] for key in pool.pools.keys()]  # noqa: SIM118
    assert inner.num_connections == 1 and inner.num_requests == 2
    connection = inner.pool.get_nowait()
    assert "response_class" not in vars(connection)
    inner.pool.put(connection)
    pool.clear()
    assert len(read().calls) == 1


def test_installing_twice_is_once_and_uninstalling_restores() -> None:
    kind = urllib3.connectionpool.HTTPConnectionPool
    before = vars(kind)["_make_request"], vars(kind)["urlopen"]
    instrumentation.install()
    instrumentation.install()
    assert vars(kind)["_make_request"].__wrapped__ is before[0]
    assert len(boundary.patched()) == 3
    instrumentation.uninstall()
    assert (vars(kind)["_make_request"], vars(kind)["urlopen"]) == before
    assert boundary.patched() == []


def test_uninstalling_takes_ours_from_under_others(srv: Any) -> None:
    kind = urllib3.connectionpool.HTTPConnectionPool
    before = vars(kind)["_make_request"]
    instrumentation.install()
    calls: list[str] = []

    def theirs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append("theirs")
        return wrapped(*args, **kwargs)

    handle = wrapt.wrap_function_wrapper(kind, "_make_request", theirs)
    instrumentation.uninstall()
    with urllib3.PoolManager() as pool:
        assert pool.request("GET", srv.url + "/json").status == 200
    assert calls == ["theirs"]
    wrapt.unwrap_object(kind, "_make_request", handle)
    assert vars(kind)["_make_request"] is before


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_it_does_not_matter_what_is_imported_first(first: str, srv: Any, tmp_path: Path) -> None:
    imports = ["from sftrace_otel import instrumentation, record; instrumentation.install()", "import urllib3"]
    code = f"""
    import sys
    {imports[first == "theirs"]}
    assert {first != "ours"} or "urllib3" not in sys.modules
    {imports[first != "theirs"]}
    with record("agent", output="run.sftrace"):
        print(urllib3.PoolManager().request("GET", {srv.url + "/json"!r}).status)
    from sftrace_otel.bundle.read import open_bundle
    print(len(list(open_bundle("run.sftrace").wire())))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["200", "1"], done.stderr


def test_subclasses_of_pools_connections_and_answers_keep_working(srv: Any, recorded: Run, frozen: Run) -> None:
    made: list[str] = []

    class Answer(http.client.HTTPResponse):
        def begin(self) -> None:
            made.append("answer")
            super().begin()

    class Connection(urllib3.connection.HTTPConnection):
        response_class = Answer

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Connection

        def _make_request(self, conn: Any, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
            made.append("pool")
            return super()._make_request(conn, method, url, *args, **kwargs)

    def program() -> Any:
        host, _, port = srv.url.removeprefix("http://").partition(":")
        with Pool(host, int(port)) as pool:
            answers = [pool.request("GET", "/json", preload_content=False) for _ in range(2)]
            assert all(isinstance(answer, urllib3.HTTPResponse) for answer in answers)
            found = [answer.data for answer in answers]
            kinds = {type(answer._original_response).__name__ for answer in answers}
        return [found, len(kinds)]

    want = recorded(program)
    assert made == ["pool", "answer"] * 2
    assert frozen(program) == want
    assert made == ["pool", "answer"] * 2 + ["pool"] * 2


@pytest.mark.parametrize("preload", [True, False])
def test_a_connection_that_chooses_its_answer_late(
    preload: bool, raw: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    class Connection(urllib3.connection.HTTPConnection):
        """As those of botocore."""

        def request(self, *args: Any, **kwargs: Any) -> None:
            self.response_class = http.client.HTTPResponse
            super().request(*args, **kwargs)

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Connection

    def program(port: int) -> Any:
        found = []
        with Pool("127.0.0.1", port) as pool:
            for path in ("/whole", "/chunks"):
                answer = pool.request("GET", path, preload_content=preload)
                found.append(answer.data if preload else list(answer.stream(20, decode_content=True)))
        return found

    packed = raw.whole(gzip.compress(TEXT, mtime=0), "Content-Encoding: gzip")
    with raw.RawServer({"/whole": packed, "/chunks": raw.chunked(b"one", b"two")}) as server:
        want = recorded(program, server.port)
    assert frozen(program, server.port) == want
    assert [body_of(read(), row) for row in rows(read())] == [TEXT, b"onetwo"]
    assert ends(read()) == ["finished", "finished"]


def test_what_is_no_body_is_refused_by_the_client(srv: Any, recorded: Run) -> None:
    def program(body: Any) -> str:
        with urllib3.PoolManager() as pool, pytest.raises(TypeError) as raised:
            pool.request("POST", srv.url + "/echo", body=body)
        return str(raised.value)

    assert recorded(program, 5) == program(5)


def test_nothing_active_passes_through(srv: Any, tmp_path: Path) -> None:
    instrumentation.install()
    with urllib3.PoolManager() as pool:
        assert pool.request("GET", srv.url + "/json").status == 200
    assert list(tmp_path.glob("**/*.sftrace")) == []


def test_threads_share_a_pool(srv: Any, recorded: Run, read: Run) -> None:
    def program() -> int:
        found: list[bytes] = []
        with urllib3.PoolManager(maxsize=4) as pool:

            def work() -> None:
                found.extend(pool.request("GET", srv.url + "/json").data for _ in range(5))

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return len(found)

    assert recorded(program) == 20
    assert ends(read()) == ["finished"] * 20


# --- replay lets nothing out ------------------------------------------------------------------------------------------


def test_a_pool_under_replay_opens_no_socket(raw: Any, recorded: Run, bundle_path: Path) -> None:
    with raw.RawServer({"/": raw.whole(b"once")}) as server:
        with urllib3.PoolManager() as pool:
            recorded(lambda: pool.request("GET", server.url + "/").data)
            with ReplaySession.from_trace(bundle_path):
                answer = pool.request("GET", server.url + "/", preload_content=False)
                (inner,) = [pool.pools[key] for key in pool.pools.keys()]  # noqa: SIM118
                assert answer.connection is not None
                assert answer.read() == b"once" and answer.connection is None
                connections = [inner.pool.get_nowait()]
            assert len(server.requests) == 1
            for connection in connections:
                connection.close()
        with pytest.raises(ReplayMismatchError), ReplaySession.from_trace(bundle_path), urllib3.PoolManager() as other:
            other.request("GET", server.url + "/unknown")
        assert len(server.requests) == 1


def test_https_under_replay_shakes_no_hands(recorded: Run, frozen: Run) -> None:
    def program() -> Any:
        with urllib3.PoolManager(retries=False) as pool:
            return outcome(lambda: pool.request("GET", "https://127.0.0.1:9/x").data)

    want = recorded(program)
    assert frozen(program) == want


def test_connections_of_the_boundary_are_no_strangers(srv: Any, recorded: Run) -> None:
    guard.notice_connections()

    def program() -> int:
        with urllib3.PoolManager() as pool:
            return int(pool.request("GET", srv.url + "/json").status)

    assert recorded(program) == 200
    assert guard.connections() == []


@pytest.mark.parametrize(
    ("key", "count"),
    [
        ("suppress_instrumentation", 0),
        (context._SUPPRESS_INSTRUMENTATION_KEY, 0),
        (context._SUPPRESS_HTTP_INSTRUMENTATION_KEY, 1),
    ],
    ids=["old", "new", "http"],
)
def test_an_exporters_own_request_is_not_recorded(key: str, count: int, srv: Any, recorded: Run, read: Run) -> None:
    def program() -> None:
        token = context.attach(context.set_value(key, True))
        try:
            with urllib3.PoolManager() as pool:
                pool.request("GET", srv.url + "/json")
        finally:
            context.detach(token)

    recorded(program)
    assert len(rows(read())) == count


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_secrets_reach_no_disk(raw: Any, recorded: Run, bundle_path: Path) -> None:
    secrets = [f"hunter2-{name}-0123456789abcdef" for name in ("query", "header", "body", "cookie", "answer", "proxy")]
    query, header, body, cookie, answer, _ = secrets

    def program(url: str) -> Any:
        with urllib3.PoolManager() as pool:
            return pool.request(
                "POST", f"{url}/?api_key={query}", json={"password": body},
                headers={"Authorization": f"Bearer {header}", "Cookie": f"sid={cookie}"},
            ).status  # fmt: skip

    said = raw.whole(b'{"access_token": "%b"}' % answer.encode(), f"Set-Cookie: sid={cookie}; Path=/",
                     "Content-Type: application/json")  # fmt: skip
    with raw.RawServer({"/": said}) as server:
        recorded(program, server.url)
    paths = itertools.chain([bundle_path], bundle_path.rglob("*"))
    written = b"".join(path.read_bytes() for path in paths if path.is_file())
    assert b"/?api_key=" in written and [secret for secret in secrets if secret.encode() in written] == []
