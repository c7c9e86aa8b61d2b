# SPDX-License-Identifier: Apache-2.0
"""Inbound requests as runs, by ASGI and WSGI: what is stored of them, where they begin and end, whose calls are whose.

The application is driven as a server does, message by message; `test_uvicorn_…` does the same with a real server, and
`tests/processes` with servers and workers in processes of their own.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import stepfork
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind

from sftrace_otel import (
    ReplaySession,
    SftraceASGI,
    SftraceSpanProcessor,
    SftraceWSGI,
    instrumentation,
    keep,
    record,
    record_state_change,
    recorder,
    set_input,
    set_output,
    trace_tool,
)
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.instrumentation import servers
from sftrace_otel.settings import Settings

SECRET = "sk-abcdefghijklmnop1234567890"


@trace_tool
def double(x: int) -> int:
    return 2 * x


@trace_tool
async def adouble(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


class Recorded:
    """The bundles of a recorder with a clock that only the test moves."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.recorder = recorder.acquire(Settings(dir=folder, quiet=True, fsync="never", **settings))
        self.folder = folder

    def settle(self) -> None:
        """Close what is due, or wait for the thread that does."""
        self.recorder.sweep()

    def paths(self) -> list[Path]:
        self.settle()
        paths = sorted(
            self.folder.glob("*.sftrace"), key=lambda path: json.loads((path / "run.json").read_text())["kind"]
        )
        for path in paths:
            result = validate_bundle(path, verify_integrity=True)
            assert result.valid, result.issues
        return paths

    def one(self) -> Path:
        [path] = self.paths()
        return path


def events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "events.jsonl").read_bytes().splitlines()]
    return [event for event in lines if not kinds or event["type"] in kinds]


def started(path: Path) -> Any:
    [start] = events(path, "run_start")
    return start["input"]


def tools(path: Path) -> list[Any]:
    return [event["input"] for event in events(path, "tool_call")]


def document(path: Path, name: str = "run.json") -> dict[str, Any]:
    value: dict[str, Any] = json.loads((path / name).read_bytes())
    return value


@pytest.fixture
def recorded_runs(tmp_path: Path) -> Recorded:
    instrumentation.install()
    return Recorded(tmp_path / "runs")


# --- driving an application -------------------------------------------------------------------------------------------


def http_scope(path: str = "/ask", query: str = "", headers: dict[str, str] | None = None) -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": pairs,
    }


async def asked(app: Any, *parts: bytes, **scope: Any) -> list[dict[str, Any]]:
    """What `app` sends for a request whose body comes in `parts`."""
    waiting = [{"type": "http.request", "body": part, "more_body": True} for part in parts] or [
        {"type": "http.request"}
    ]
    waiting[-1]["more_body"] = False
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    await app(http_scope(**scope), receive, send)
    return sent


async def body_of(receive: Any) -> bytes:
    data, more = b"", True
    while more:
        message = await receive()
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return data


async def answer(send: Any, status: int = 200, body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def plain(scope: Any, receive: Any, send: Any) -> None:
    n = json.loads(await body_of(receive))["n"]
    await answer(send, body=str(await adouble(n)).encode())


# --- ASGI -------------------------------------------------------------------------------------------------------------


def test_a_request_is_a_run_with_the_request_as_its_input(recorded_runs: Recorded) -> None:
    headers = {"content-type": "application/json", "authorization": f"Bearer {SECRET}", "x-user": "ann"}
    sent = asyncio.run(
        asked(
            SftraceASGI(plain),
            b'{"n":',
            b' 4, "api_key": "',
            SECRET.encode(),
            b'"}',
            query=f"token={SECRET}",
            headers=headers,
        )
    )
    assert sent[1]["body"] == b"8"
    path = recorded_runs.one()
    assert started(path) == {
        "method": "POST",
        "path": "/ask?token=[REDACTED]",
        "headers": [["content-type", "application/json"], ["authorization", "[REDACTED]"], ["x-user", "ann"]],
        "body": {"n": 4, "api_key": "[REDACTED]"},
    }
    assert SECRET not in "".join(file.read_text() for file in path.iterdir() if file.is_file())
    assert tools(path) == [{"x": 4}]
    assert document(path, "manifest.json")["status"] == "completed"
    assert document(path)["kind"] == "request"
    assert stepfork.Trace.load(path).events[0].type == "run_start"


def test_the_body_is_stored_as_far_as_the_application_read_it(recorded_runs: Recorded) -> None:
    async def after(scope: Any, receive: Any, send: Any) -> None:
        await adouble(1)
        await body_of(receive)
        await answer(send)

    async def partly(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await adouble(2)
        await answer(send)

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await adouble(3)
        await answer(send)

    for app in (after, partly, never):
        asyncio.run(asked(SftraceASGI(app), b"one ", b"two", headers={"content-type": "text/plain"}))
    found = {tools(path)[0]["x"]: started(path)["body"] for path in recorded_runs.paths()}
    assert found == {1: "one two", 2: "one ", 3: None}


def test_a_body_beyond_the_limit_is_stored_by_its_beginning(tmp_path: Path) -> None:
    runs = Recorded(tmp_path / "runs", max_payload_bytes=65_536)
    asyncio.run(asked(SftraceASGI(plain), b'{"n": 1, "pad": "', b"x" * 100_000, b'"}'))
    body = started(runs.one())["body"]
    assert body["size"] == 100_019
    assert body["beginning"].startswith('{"n": 1, "pad": "xxx')
    assert len(body["beginning"]) < 65_536


def test_a_streamed_answer_ends_the_run_with_its_last_byte(recorded_runs: Recorded) -> None:
    open_until: list[bool] = []

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for n in range(3):
            await adouble(n)
            await send({"type": "http.response.body", "body": b"x", "more_body": n < 2})
            recorded_runs.settle()
            open_until.append(not list(recorded_runs.folder.glob("*.sftrace")))

    asyncio.run(asked(SftraceASGI(streaming)))
    assert open_until == [True, True, False]
    assert tools(recorded_runs.one()) == [{"x": 0}, {"x": 1}, {"x": 2}]


def test_trailers_are_part_of_the_answer(recorded_runs: Recorded) -> None:
    async def with_trailers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [], "trailers": True})
        await send({"type": "http.response.body", "body": b"x"})
        await adouble(1)
        await send({"type": "http.response.trailers", "headers": []})

    asyncio.run(asked(SftraceASGI(with_trailers)))
    assert tools(recorded_runs.one()) == [{"x": 1}]


def test_what_is_called_after_the_answer_is_a_run_linked_to_it(recorded_runs: Recorded) -> None:
    async def background(scope: Any, receive: Any, send: Any) -> None:
        await adouble(1)
        await answer(send)
        await adouble(2)
        await asyncio.to_thread(double, 3)

    asyncio.run(asked(SftraceASGI(background)))
    first, second = sorted(recorded_runs.paths(), key=lambda path: len(tools(path)))
    assert (tools(first), tools(second)) == ([{"x": 1}], [{"x": 2}, {"x": 3}])
    assert document(second)["origin"] == {"continues": document(first, "manifest.json")["run_id"]}
    assert document(first)["origin"] == {}


def test_a_call_that_is_open_when_the_answer_ends_is_waited_for(recorded_runs: Recorded) -> None:
    async def main() -> None:
        go = asyncio.Event()

        @trace_tool
        async def slow(x: int) -> int:
            await go.wait()
            return x

        async def app(scope: Any, receive: Any, send: Any) -> None:
            pending = asyncio.create_task(slow(1))
            await asyncio.sleep(0)
            await answer(send)
            assert not recorded_runs.paths()
            await adouble(2)
            go.set()
            await pending

        await asked(SftraceASGI(app))

    asyncio.run(main())
    waited, linked = sorted(recorded_runs.paths(), key=lambda path: tools(path)[0]["x"])
    assert [event["output"] for event in events(waited, "tool_result")] == [1]
    assert tools(linked) == [{"x": 2}]


def test_a_call_that_does_not_end_is_waited_for_one_second(recorded_runs: Recorded) -> None:
    now = [0]
    recorded_runs.recorder.ticks = lambda: now[0]

    async def main() -> None:
        go = asyncio.Event()

        @trace_tool
        async def slow() -> None:
            await go.wait()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            pending = asyncio.create_task(slow())
            await asyncio.sleep(0)
            await answer(send)
            now[0] += 999_000_000
            assert not recorded_runs.paths()
            now[0] += 1_000_000
            [path] = recorded_runs.paths()
            assert document(path)["losses"]["open_calls"] == 1
            go.set()
            await pending

        await asked(SftraceASGI(app))

    asyncio.run(main())
    assert len(recorded_runs.paths()) == 1


@pytest.mark.parametrize(
    ("status", "raises", "failure"),
    [
        (200, None, None),
        (404, None, None),
        (503, None, {"type": "503", "message": "the request was answered with 503"}),
        (500, ValueError(f"no {SECRET}"), {"type": "ValueError", "message": "no [REDACTED]"}),
        (0, asyncio.CancelledError(), {"type": "CancelledError", "message": "CancelledError"}),
    ],
)
def test_how_a_request_failed(
    recorded_runs: Recorded, status: int, raises: BaseException | None, failure: dict[str, str] | None
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await adouble(1)
        if status:
            await answer(send, status)
        if raises is not None:
            raise raises

    if raises is None:
        asyncio.run(asked(SftraceASGI(app)))
    else:
        with pytest.raises(type(raises)) as caught:
            asyncio.run(asked(SftraceASGI(app)))
        assert isinstance(raises, asyncio.CancelledError) or caught.value is raises
    manifest = document(recorded_runs.one(), "manifest.json")
    assert manifest["status"] == ("completed" if failure is None else "failed")
    found = manifest["failure"]
    assert (found and {key: found[key] for key in ("type", "message")}) == failure


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_what_is_no_request_is_no_run(recorded_runs: Recorded, kind: str) -> None:
    given: list[Any] = []

    async def app(*args: Any) -> None:
        given.extend(args)
        await adouble(1)

    scope, receive, send = {"type": kind}, object(), object()
    asyncio.run(SftraceASGI(app)(scope, receive, send))  # type: ignore[arg-type]
    assert given == [scope, receive, send]
    recorder.close_all()
    assert document(recorded_runs.one())["kind"] == "process"


def test_with_nothing_active_the_application_gets_what_the_server_gave() -> None:
    given: list[Any] = []

    async def app(*args: Any) -> str:
        given.extend(args)
        return "result"

    scope, receive, send = http_scope(), object(), object()
    assert asyncio.run(SftraceASGI(app)(scope, receive, send)) == "result"  # type: ignore[arg-type]
    assert all(a is b for a, b in zip(given, [scope, receive, send], strict=True))


def test_two_boundaries_are_one_run(recorded_runs: Recorded) -> None:
    asyncio.run(asked(SftraceASGI(SftraceASGI(plain)), b'{"n": 4}'))
    assert started(recorded_runs.one())["body"] == {"n": 4}


@pytest.mark.parametrize("scope", ["process", "trace"])
def test_other_scopes_know_no_requests(tmp_path: Path, scope: str) -> None:
    runs = Recorded(tmp_path / "runs", scope=scope)
    asyncio.run(asked(SftraceASGI(plain), b'{"n": 4}'))
    recorder.close_all()
    assert document(runs.one())["kind"] == "process"


def test_without_content_nothing_of_the_request_is_stored(tmp_path: Path) -> None:
    runs = Recorded(tmp_path / "runs", capture="metadata")
    asyncio.run(asked(SftraceASGI(plain), b'{"n": 4711}'))
    path = runs.one()
    assert started(path) is None
    assert "4711" not in "".join(file.read_text() for file in path.iterdir() if file.is_file())


def test_a_request_without_a_call_leaves_nothing(recorded_runs: Recorded) -> None:
    async def health(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, 204)

    asyncio.run(asked(SftraceASGI(health)))
    assert recorded_runs.paths() == []
    assert not recorded_runs.folder.exists()


def test_the_callers_trace_is_kept(recorded_runs: Recorded) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    asyncio.run(asked(SftraceASGI(plain), b'{"n": 4}', headers={"traceparent": parent}))
    path = recorded_runs.one()
    remote = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": "00f067aa0ba902b7"}
    assert document(path)["origin"] == {"remote_parent": remote}
    assert remote["trace_id"] in document(path)["trace_ids"]
    assert "-4bf92f35-" in path.name


@pytest.mark.parametrize(
    "value",
    ["", "00", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-" + "x" * 32 + "-" + "1" * 16 + "-01"],
)
def test_a_header_that_is_no_traceparent_is_left_alone(recorded_runs: Recorded, value: str) -> None:
    asyncio.run(asked(SftraceASGI(plain), b'{"n": 4}', headers={"traceparent": value}))
    assert document(recorded_runs.one())["origin"] == {}


def test_the_functions_of_the_program_act_on_the_requests_own_run(recorded_runs: Recorded) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        n = json.loads(await body_of(receive))["n"]
        with record(f"agent-{n}", run_input={"n": n}):  # joins the request's run
            if n % 2:
                set_input({"odd": n})
            await asyncio.sleep(0)
            await adouble(n)
            await asyncio.to_thread(record_state_change, key="n", before=None, after=n)
        set_output({"doubled": 2 * n})
        keep(f"because {n}")
        await answer(send)

    async def main() -> None:
        await asyncio.gather(*(asked(SftraceASGI(app), b'{"n": %d}' % n) for n in range(4)))

    asyncio.run(main())
    paths = recorded_runs.paths()
    assert len(paths) == 4
    for path in paths:
        [call] = tools(path)
        n = call["x"]
        assert started(path) == ({"odd": n} if n % 2 else {"n": n})
        assert [event["after"] for event in events(path, "state_change")] == [n]
        assert [event["output"] for event in events(path, "run_end")] == [{"doubled": 2 * n}]
        assert document(path)["kept"] == f"because {n}"
        assert document(path, "manifest.json")["agent_name"] == f"agent-{n}"


def test_fifty_requests_in_flight_are_fifty_bundles(recorded_runs: Recorded) -> None:
    count = 50

    async def main() -> None:
        all_here = asyncio.Barrier(count)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            n = json.loads(await body_of(receive))["n"]
            await all_here.wait()
            await asyncio.gather(adouble(n), asyncio.create_task(adouble(n)))
            await asyncio.to_thread(double, n)
            await all_here.wait()
            await adouble(n)
            await answer(send)

        boundary = SftraceASGI(app)
        await asyncio.gather(*(asked(boundary, b'{"n": %d}' % n) for n in range(count)))

    asyncio.run(main())
    paths = recorded_runs.paths()
    seen = []
    for path in paths:
        n = started(path)["body"]["n"]
        assert tools(path) == [{"x": n}] * 4
        seen.append(n)
    assert sorted(seen) == list(range(count))


def test_a_request_replays(recorded_runs: Recorded) -> None:
    ran: list[int] = []

    @trace_tool
    async def effect(x: int) -> int:
        ran.append(x)
        return x + len(ran)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        n = json.loads(await body_of(receive))["n"]
        found = await asyncio.gather(effect(n), effect(n))
        await answer(send, body=json.dumps(found).encode())

    boundary = SftraceASGI(app)
    live = asyncio.run(asked(boundary, b'{"n": 4}'))
    assert ran == [4, 4]
    path = recorded_runs.one()
    with ReplaySession.from_trace(path) as replay:
        again = asyncio.run(asked(boundary, b'{"n": 4}'))
        replay.verify_complete()
    assert again == live
    assert ran == [4, 4]


# --- beside a server instrumentation ----------------------------------------------------------------------------------


@pytest.fixture
def server_tracer(recorded_runs: Recorded, monkeypatch: pytest.MonkeyPatch) -> Iterator[trace.Tracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SftraceSpanProcessor(dir=str(recorded_runs.folder)))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield provider.get_tracer("server instrumentation")
    provider.shutdown()


def server_middleware(app: Any, tracer: trace.Tracer, ended: list[Any] | None = None) -> Any:
    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        with tracer.start_as_current_span("POST /ask", kind=SpanKind.SERVER) as span:
            await app(scope, receive, send)
        if ended is not None:
            ended.append(span.attributes["sftrace.bundle"])  # type: ignore[attr-defined]

    return middleware


@pytest.mark.parametrize("outside", [True, False])
def test_a_server_span_and_the_boundary_are_one_run(
    recorded_runs: Recorded, server_tracer: trace.Tracer, outside: bool
) -> None:
    named: list[Any] = []
    if outside:
        app = SftraceASGI(server_middleware(plain, server_tracer, named))
    else:
        app = server_middleware(SftraceASGI(plain), server_tracer, named)
    asyncio.run(asked(app, b'{"n": 4}'))
    path = recorded_runs.one()
    assert started(path)["body"] == {"n": 4}
    assert tools(path) == [{"x": 4}]
    assert named == [path.name]
    rows = [json.loads(line) for line in (path / "spans.jsonl").read_bytes().splitlines()]
    assert [row["name"] for row in rows if "name" in row] == ["POST /ask"]


def test_a_run_with_a_server_span_ends_with_it(recorded_runs: Recorded, server_tracer: trace.Tracer) -> None:
    async def background(scope: Any, receive: Any, send: Any) -> None:
        await answer(send)
        await adouble(2)  # inside the span: its tree has not ended

    asyncio.run(asked(SftraceASGI(server_middleware(background, server_tracer))))
    assert tools(recorded_runs.one()) == [{"x": 2}]


# --- a real server ----------------------------------------------------------------------------------------------------


class UvicornServer:
    """uvicorn in a thread of this process."""

    def __init__(self) -> None:
        self.server: Any = None
        self.thread = threading.Thread(target=self._run)
        self.ready = threading.Event()

    def start(self, app: Any) -> str:
        """Serve `app`; gives the URL."""
        import uvicorn

        here = self

        class Server(uvicorn.Server):
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                here.ready.set()

        self.server = Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
        self.thread.start()
        assert self.ready.wait(30)
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def _run(self) -> None:
        self.server.run()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.server.should_exit = True
            self.thread.join(30)
            assert not self.thread.is_alive()


@pytest.fixture
def uvicorn_server() -> Iterator[UvicornServer]:
    server = UvicornServer()
    yield server
    server.stop()


def test_uvicorn_with_coroutines_threads_streams_and_background_tasks(
    recorded_runs: Recorded, uvicorn_server: UvicornServer
) -> None:
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    count = 12
    together = threading.Barrier(count)

    async def in_coroutine(request: Request) -> Response:
        n = (await request.json())["n"]
        return JSONResponse(await adouble(n))

    def in_thread(request: Request) -> Response:
        n = int(request.query_params["n"])
        together.wait(30)
        return JSONResponse(double(n))

    async def streaming(request: Request) -> Response:
        n = (await request.json())["n"]

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(2):
                yield str(await adouble(n)).encode()

        return StreamingResponse(parts())

    async def later(request: Request) -> Response:
        n = (await request.json())["n"]
        await adouble(n)
        return Response(background=BackgroundTask(adouble, n + 1))

    async def fails(request: Request) -> Response:
        await adouble((await request.json())["n"])
        raise ValueError("no")

    routes = [
        Route("/coroutine", in_coroutine, methods=["POST"]),
        Route("/thread", in_thread),
        Route("/streaming", streaming, methods=["POST"]),
        Route("/later", later, methods=["POST"]),
        Route("/fails", fails, methods=["POST"]),
    ]
    url = uvicorn_server.start(Starlette(routes=routes))

    with ThreadPoolExecutor(count) as pool:
        threads = list(pool.map(lambda n: fetch(f"{url}/thread?n={n}"), range(count)))
    posted = [fetch(f"{url}/{path}", {"n": n}) for n, path in ((100, "coroutine"), (200, "streaming"), (300, "later"))]
    assert fetch(f"{url}/fails", {"n": 400}) == (500, "Internal Server Error")
    assert threads == [(200, str(2 * n)) for n in range(count)]
    assert posted == [(200, "200"), (200, "400400"), (200, "")]

    uvicorn_server.stop()
    runs = {json.dumps(tools(path)): document(path, "manifest.json")["status"] for path in recorded_runs.paths()}
    done = [[{"x": n}] for n in range(count)] + [[{"x": 100}], [{"x": 200}] * 2, [{"x": 300}], [{"x": 301}]]
    assert runs == {**{json.dumps(calls): "completed" for calls in done}, json.dumps([{"x": 400}]): "failed"}


def fetch(url: str, body: Any = None) -> tuple[int, str]:
    """Status and text, by a client that has no boundary: it is in the server's process."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# --- WSGI -------------------------------------------------------------------------------------------------------------


def environ(body: bytes = b"", path: str = "/ask", query: str = "", **members: Any) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_AUTHORIZATION": f"Bearer {SECRET}",
        "wsgi.input": io.BytesIO(body),
        **members,
    }


def served(app: Any, environ: dict[str, Any]) -> bytes:
    """What a WSGI server sends for `app`'s answer."""

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        return lambda data: None

    result = app(environ, start_response)
    try:
        return b"".join(result)
    finally:
        if hasattr(result, "close"):
            result.close()


def read_whole(body: Any) -> bytes:
    return bytes(body.read())


def read_lines(body: Any) -> bytes:
    return b"".join([body.readline(), *body.readlines()])


def read_steps(body: Any) -> bytes:
    return b"".join(body)


def read_into(body: Any) -> bytes:
    room = bytearray(7)
    return bytes(room[: body.readinto(room)]) + bytes(body.read1(100))


@pytest.mark.parametrize("read", [read_whole, read_lines, read_steps, read_into])
def test_a_wsgi_request_is_a_run_however_its_body_is_read(
    recorded_runs: Recorded, read: Callable[[Any], bytes]
) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        n = json.loads(read(environ["wsgi.input"]))["n"]
        start_response("200 OK", [])
        return [str(double(n)).encode()]

    assert served(SftraceWSGI(app), environ(b'{"n":\n 4\n}', query=f"token={SECRET}")) == b"8"
    path = recorded_runs.one()
    assert started(path) == {
        "method": "POST",
        "path": "/ask?token=[REDACTED]",
        "headers": [["content-type", "application/json"], ["content-length", "10"], ["authorization", "[REDACTED]"]],
        "body": {"n": 4},
    }
    assert tools(path) == [{"x": 4}]


def test_a_wsgi_answer_that_is_made_as_it_is_sent(recorded_runs: Recorded) -> None:
    closed: list[bool] = []

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        try:
            for n in range(3):
                yield str(double(n)).encode()
        finally:
            double(99)
            closed.append(True)

    assert served(SftraceWSGI(app), environ()) == b"024"
    assert closed == [True]
    assert tools(recorded_runs.one()) == [{"x": 0}, {"x": 1}, {"x": 2}, {"x": 99}]


def test_a_wsgi_answer_left_half_way_ends_with_its_close(recorded_runs: Recorded) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        for n in range(3):
            yield str(double(n)).encode()

    result = SftraceWSGI(app)(environ(), lambda *_: None)
    assert next(iter(result)) == b"0"
    assert recorded_runs.paths() == []
    result.close()  # type: ignore[attr-defined]
    assert tools(recorded_runs.one()) == [{"x": 0}]


def test_wsgi_answers_that_are_whole_are_given_as_they_are(recorded_runs: Recorded) -> None:
    from wsgiref.util import FileWrapper

    answers: list[Any] = [[b"x"], (b"x",), FileWrapper(io.BytesIO(b"x"))]
    waiting = list(answers)

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        double(1)
        start_response("200 OK", [])
        return waiting.pop(0)

    for given in answers:
        assert SftraceWSGI(app)(environ(), lambda *_: None) is given
    assert len(recorded_runs.paths()) == 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_how_a_wsgi_request_failed(recorded_runs: Recorded, streamed: bool, fails: bool) -> None:
    def answered(start_response: Any) -> Iterator[bytes]:
        double(1)
        if fails:
            raise ValueError(f"no {SECRET}")
        start_response("502 Bad Gateway", [])
        yield b""

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        return answered(start_response) if streamed else list(answered(start_response))

    if fails:
        with pytest.raises(ValueError, match="no sk-"):
            served(SftraceWSGI(app), environ())
    else:
        served(SftraceWSGI(app), environ())
    failure = document(recorded_runs.one(), "manifest.json")["failure"]
    want = ("ValueError", "no [REDACTED]") if fails else ("502", "the request was answered with 502")
    assert (failure["type"], failure["message"]) == want


def test_wsgi_requests_in_threads_do_not_mix(recorded_runs: Recorded) -> None:
    count = 20
    together = threading.Barrier(count)

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        n = json.loads(environ["wsgi.input"].read())["n"]
        together.wait(30)
        start_response("200 OK", [])
        yield str(double(n)).encode()
        together.wait(30)
        yield str(double(n)).encode()

    boundary = SftraceWSGI(app)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda n: served(boundary, environ(b'{"n": %d}' % n)), range(count)))
    paths = recorded_runs.paths()
    assert sorted(started(path)["body"]["n"] for path in paths) == list(range(count))
    assert all(tools(path) == [{"x": started(path)["body"]["n"]}] * 2 for path in paths)


# --- faults, on and off -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new_run", "end_run", "joinable", "prepare", "span_run"])
def test_a_fault_of_ours_leaves_requests_alone(
    recorded_runs: Recorded, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(recorded_runs.recorder, name, broken)
    assert asyncio.run(asked(SftraceASGI(plain), b'{"n": 4}'))[1]["body"] == b"8"

    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield environ["wsgi.input"].read()

    assert served(SftraceWSGI(app), environ(b"as it is")) == b"as it is"


def test_servers_get_a_boundary_once_and_lose_it(recorded_runs: Recorded) -> None:
    import uvicorn

    load = uvicorn.Config.load
    instrumentation.uninstall()
    plain_load = uvicorn.Config.load
    assert plain_load is not load
    for _ in range(2):
        servers.install()
    assert sorted(name for name in servers.patched() if name.startswith("uvicorn")) == [
        "uvicorn.config.load",
        "uvicorn.server.capture_signals",
    ]
    config = uvicorn.Config(plain, log_config=None)
    config.load()
    assert isinstance(config.loaded_app, SftraceASGI)
    instrumentation.uninstall()
    assert uvicorn.Config.load is plain_load
    asyncio.run(asked(config.loaded_app, b'{"n": 4}'))
    recorder.close_all()
    assert all(document(path)["kind"] == "process" for path in recorded_runs.paths())
