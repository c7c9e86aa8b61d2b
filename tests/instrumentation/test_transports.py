# SPDX-License-Identifier: Apache-2.0
"""Transports of httpx and httpx2 beside the standard one: HTTP/2, proxies, mounts, ASGI, WSGI, aliases, one's own."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest

from sftrace_otel import ReplayMismatchError, SftraceTransport, instrumentation
from sftrace_otel.bundle.read import open_bundle

Run = Callable[..., Any]
MODULES = [httpx, httpx2]


def rows(bundle: Any) -> list[dict[str, Any]]:
    return list(bundle.wire())


@pytest.fixture
def h2_server(load_server: Any) -> Iterator[Any]:
    with load_server("h2_server").H2Server() as server:
        yield server


@pytest.mark.parametrize("module", MODULES)
def test_http2_is_recorded_as_such_and_replays(
    module: ModuleType, h2_server: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    def program() -> list[Any]:
        with module.Client(base_url=h2_server.url, http1=False, http2=True) as client:
            plain = client.post("/echo?n=1", json={"a": 1})
            with client.stream("GET", "/parts") as parts:
                body = list(parts.iter_raw())
        return [plain.http_version, plain.json(), plain.headers.get_list("x-part"), parts.http_version, body]

    want = recorded(program)
    assert want[0] == "HTTP/2" and b"".join(want[4]) == b"first second"
    came = h2_server.requests
    assert frozen(program) == want
    assert h2_server.requests == came
    assert [row["http_version"] for row in rows(read())] == ["HTTP/2", "HTTP/2"]


@pytest.mark.parametrize("module", MODULES)
def test_a_hundred_async_streams_over_one_http2_connection(
    module: ModuleType, h2_server: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    async def all_at_once() -> list[Any]:
        async with module.AsyncClient(base_url=h2_server.url, http1=False, http2=True) as client:
            answers = await asyncio.gather(*(client.post(f"/echo?n={n}", content=f"body {n}") for n in range(100)))
        return [answer.json()["body"] for answer in answers]

    want = recorded(lambda: asyncio.run(all_at_once()))
    assert want == [f"body {n}" for n in range(100)]
    assert frozen(lambda: asyncio.run(all_at_once())) == want
    assert len(read().calls) == 100


@pytest.mark.parametrize("module", MODULES)
def test_a_proxy_carries_the_request_and_is_not_an_exchange_of_its_own(
    module: ModuleType, load_server: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    raw = load_server("raw_server")
    with raw.RawServer({"/x": raw.whole(b"by proxy")}) as proxy:

        def program() -> list[Any]:
            with module.Client(proxy=f"http://kim:hunter2-secret@127.0.0.1:{proxy.port}") as client:
                return [client.get("http://shop.test/x").text]

        want = recorded(program)
        assert want == ["by proxy"] and proxy.requests[0][0] == "GET http://shop.test/x HTTP/1.1"
        proxy.stop()
        assert frozen(program) == want
    bundle = read()
    assert [row["url"] for row in rows(bundle)] == ["http://shop.test/x"]
    assert not any(b"hunter2-secret" in file.read_bytes() for file in bundle.path.rglob("*") if file.is_file())


@pytest.mark.parametrize("module", MODULES)
def test_mounts_choose_a_transport_and_each_is_recorded_once(
    module: ModuleType, recorded: Run, frozen: Run, read: Run
) -> None:
    def answering(text: str) -> Any:
        return module.MockTransport(lambda request: module.Response(200, text=text))

    class Cached(module.HTTPTransport):  # type: ignore[name-defined,misc]
        """A subclass of the standard transport that answers by itself."""

        def handle_request(self, request: Any) -> Any:
            return module.Response(200, text="from the cache")

    def program() -> list[str]:
        mounts = {"all://a.test": answering("a"), "all://b.test": Cached()}
        with module.Client(transport=answering("other"), mounts=mounts) as client:
            return [client.get(f"http://{host}.test/").text for host in "abc"]

    want = recorded(program)
    assert want == ["a", "from the cache", "other"]
    assert frozen(program) == want
    assert len(rows(read())) == 3


@pytest.mark.parametrize("module", MODULES)
def test_an_asgi_application_is_called_when_recording_and_not_under_replay(
    module: ModuleType, recorded: Run, frozen: Run, read: Run
) -> None:
    calls: list[str] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        calls.append(scope["path"])
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-app", b"asgi")]})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    async def parts() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async def ask() -> list[Any]:
        async with module.AsyncClient(transport=module.ASGITransport(app), base_url="http://app.test") as client:
            answer = await client.post("/in", content=parts())
        return [answer.status_code, answer.headers["x-app"], answer.content]

    want = recorded(lambda: asyncio.run(ask()))
    assert want == [201, "asgi", b"one two!"]
    assert frozen(lambda: asyncio.run(ask())) == want
    assert calls == ["/in"]
    [row] = rows(read())
    assert row["request"]["body"] == "one two" and row["body"] == "one two!"


@pytest.mark.parametrize("module", MODULES)
def test_a_wsgi_application_is_called_when_recording_and_not_under_replay(
    module: ModuleType, recorded: Run, frozen: Run, read: Run
) -> None:
    calls: list[str] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        calls.append(environ["PATH_INFO"])
        start_response("200 OK", [("x-app", "wsgi")])
        return [b"a", b"b", environ["wsgi.input"].read()]

    def program() -> list[Any]:
        with module.Client(transport=module.WSGITransport(app=app), base_url="http://app.test") as client:
            answer = client.post("/in", content=b"c")
        return [answer.headers["x-app"], answer.content]

    want = recorded(program)
    assert want == ["wsgi", b"abc"]
    assert frozen(program) == want
    assert calls == ["/in"] and len(rows(read())) == 1


class Retrying:
    """A transport of the program's own: no class of httpx, it calls another one twice."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.closed = False

    def handle_request(self, request: Any) -> Any:
        first = self.inner.handle_request(request)
        return self.inner.handle_request(request) if first.status_code == 503 else first

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Retrying:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("exported", [False, True])
def test_a_transport_of_ones_own_is_one_exchange(
    module: ModuleType, exported: bool, recorded: Run, frozen: Run, read: Run
) -> None:
    seen: list[str] = []

    def handler(request: Any) -> Any:
        seen.append(request.url.path)
        return module.Response(503 if len(seen) == 1 else 200, text=f"try {len(seen)}")

    def program() -> list[Any]:
        own = Retrying(module.MockTransport(handler))
        with module.Client(transport=SftraceTransport(own) if exported else own) as client:
            answer = client.get("http://h.test/x")
        return [answer.status_code, answer.text, own.closed]

    want = recorded(program)
    assert want == [200, "try 2", True]
    assert frozen(program) == want
    assert seen == ["/x", "/x"] and len(rows(read())) == 1


@pytest.mark.parametrize("module", MODULES)
def test_an_exported_transport_without_a_client(module: ModuleType, recorded: Run, frozen: Run, read: Run) -> None:
    def handler(request: Any) -> Any:
        return module.Response(200, content=request.read()[::-1])

    async def asynchronous() -> bytes:
        transport = SftraceTransport(module.MockTransport(handler))
        answer = await transport.handle_async_request(module.Request("PUT", "http://h.test/b", content=b"abc"))
        return bytes(await answer.aread())

    def program() -> list[Any]:
        transport = SftraceTransport(module.MockTransport(handler))
        assert isinstance(transport, module.BaseTransport) and isinstance(transport, module.MockTransport)
        answer = transport.handle_request(module.Request("PUT", "http://h.test/a", content=b"123"))
        return [answer.read(), asyncio.run(asynchronous())]

    want = recorded(program)
    assert want == [b"321", b"cba"]
    assert frozen(program) == want
    assert [row["url"] for row in rows(read())] == ["http://h.test/a", "http://h.test/b"]
    with pytest.raises(ReplayMismatchError):
        frozen(lambda: SftraceTransport(module.MockTransport(handler)).handle_request(
            module.Request("PUT", "http://h.test/a", content=b"999")))  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_a_standard_transport_is_recorded_after_somebody_popped_our_wrapper(
    module: ModuleType, load_server: Any, recorded: Run, read: Run
) -> None:
    original = module.HTTPTransport.handle_request.__wrapped__
    module.HTTPTransport.handle_request = original
    raw = load_server("raw_server")
    with raw.RawServer({"/x": raw.whole(b"seen")}) as server:
        recorded(lambda: module.get(server.url + "/x").text)
    assert [row["body"] for row in rows(read())] == ["seen"]
    instrumentation.uninstall()
    assert module.HTTPTransport.handle_request is original


ALIASED = """
import sys
import httpx2
from sftrace_otel import ReplaySession, instrument, record
if sys.argv[1] == "before":
    instrument()
httpx2.alias_httpx()
import httpx
assert httpx is httpx2
if sys.argv[1] == "after":
    instrument()
def answer(request):
    return httpx.Response(200, text="aliased")
def program():
    with httpx.Client(transport=httpx.MockTransport(answer)) as one:
        return one.get("http://h.test/x").text
with record("agent", output="run.sftrace"):
    want = program()
answer = None
with ReplaySession.from_trace("run.sftrace") as replay:
    assert program() == want == "aliased"
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_httpx_as_another_name_of_httpx2(order: str, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(ALIASED)
    command = [sys.executable, "-W", "error", str(script), order]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [row] = open_bundle(tmp_path / "run.sftrace").wire()
    assert row["module"] == "httpx2" and row["body"] == "aliased"


@pytest.mark.parametrize("module", MODULES)
def test_clients_made_before_and_pickled_parts_are_what_they_were(
    module: ModuleType, load_server: Any, read: Run, recorded: Run
) -> None:
    instrumentation.uninstall()
    raw = load_server("raw_server")
    with raw.RawServer({"/x": raw.whole(b"old client")}) as server, module.Client() as early:
        instrumentation.install()
        assert recorded(lambda: early.get(server.url + "/x").text) == "old client"
        answer = early.get(server.url + "/x")
        assert pickle.loads(pickle.dumps(answer)).text == "old client"
    assert len(rows(read())) == 1
