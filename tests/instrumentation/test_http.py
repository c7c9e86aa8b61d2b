# SPDX-License-Identifier: Apache-2.0
"""httpx and httpx2, sync and async: exact on the wire, unnoticed by the program, answered offline."""

from __future__ import annotations

import asyncio
import copy
import gc
import gzip
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest

from sftrace_otel import (
    ReplayError,
    ReplayMismatchError,
    ReplaySession,
    instrumentation,
    record,
    recorder,
    trace_tool,
)
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.instrumentation import httpx as boundary
from sftrace_otel.instrumentation.exchange import Exchange
from sftrace_otel.settings import Settings

Run = Callable[..., Any]
MODULES = [httpx, httpx2]


def rows(bundle: Any) -> list[dict[str, Any]]:
    return list(bundle.wire())


def ends(bundle: Any) -> list[str]:
    return [row["end"] for row in bundle.calls]


def body_of(bundle: Any, row: dict[str, Any]) -> bytes:
    body = row["body"]
    if isinstance(body, dict):
        return bytes(bundle.blob(body["$blob"]))
    return b"" if body is None else str(body).encode()


@pytest.mark.parametrize("module", MODULES)
def test_bodies_of_every_kind_are_exact_and_replay(
    module: ModuleType, srv: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    def program() -> list[Any]:
        seen: list[Any] = []
        with module.Client(base_url=srv.url) as client:
            for method, path in [
                ("GET", "/json"), ("GET", "/gzip"), ("GET", "/binary"), ("GET", "/204"), ("HEAD", "/json"),
                ("GET", "/latin1"), ("GET", "/gzip-empty"), ("HEAD", "/gzip-empty"), ("GET", "/nowhere"),
            ]:  # fmt: skip
                answer = client.request(method, path)
                seen.append([path, answer.status_code, answer.content, answer.headers.get("content-type"), answer.text])
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


@pytest.mark.parametrize("module", MODULES)
def test_every_spelling_of_a_streamed_call(module: ModuleType, srv: Any, recorded: Run, frozen: Run) -> None:
    async def asynchronous() -> list[Any]:
        async with module.AsyncClient() as client:
            async with client.stream("GET", srv.url + "/sse") as answer:
                first = [line async for line in answer.aiter_lines()]
            answer = await client.send(client.build_request("GET", srv.url + "/sse"), stream=True)
            second = await answer.aread()
            await answer.aclose()
        return [first, second]

    def program() -> list[Any]:
        with module.stream("GET", srv.url + "/sse") as answer:
            first = list(answer.iter_lines())
        with module.Client() as client:
            request = client.build_request("GET", srv.url + "/sse")
            answer = client.send(request=request, stream=True)
            second = answer.read()
            answer.close()
            with client.stream("GET", srv.url + "/gzip") as answer:
                raw = b"".join(answer.iter_raw())
                unpacked = gzip.decompress(raw) if answer.headers.get("content-encoding") == "gzip" else raw
        return [first, second, unpacked, *asyncio.run(asynchronous())]

    want = recorded(program)
    assert frozen(program) == want


@pytest.mark.parametrize("module", MODULES)
def test_chunks_keep_their_boundaries(module: ModuleType, srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    def program() -> list[bytes]:
        with module.stream("GET", srv.url + "/sse") as answer:
            return list(answer.iter_raw())

    want = recorded(program)
    assert frozen(program) == want
    chunks = rows(read())[0]["chunks"]
    assert [size for size, _ in chunks] == [len(part) for part in want]
    offsets = [offset for _, offset in chunks]
    assert offsets == sorted(offsets) and offsets[0] > 0


@pytest.mark.parametrize("module", MODULES)
def test_the_first_chunk_is_not_held_back(module: ModuleType, srv: Any, recorded: Run) -> None:
    def program() -> int:
        with module.stream("GET", srv.url + "/slow-sse") as answer:
            next(answer.iter_raw())
            return len([hit for hit in srv.hits if hit[1] == "/slow-sse"])

    assert recorded(program) == 1


@pytest.mark.parametrize("module", MODULES)
def test_streams_end_once_and_say_how(module: ModuleType, srv: Any, recorded: Run, read: Run) -> None:
    def program() -> None:
        with module.Client() as client:
            answer = client.send(client.build_request("GET", srv.url + "/slow-sse"), stream=True)
            next(answer.iter_raw())
            answer.close()
            answer.close()
            answer = client.send(client.build_request("GET", srv.url + "/slow-sse"), stream=True)
            next(answer.iter_raw())
            del answer
            gc.collect()
            with pytest.raises(module.ConnectError):
                client.get("http://127.0.0.1:9/refused")

    recorded(program)
    assert ends(read())[0] == "closed"
    assert ends(read())[1] in ("abandoned", "closed")
    assert ends(read())[2] == "failed"


@pytest.mark.parametrize("module", MODULES)
def test_transport_errors_come_back_as_the_same_class(module: ModuleType, recorded: Run, frozen: Run) -> None:
    def program() -> list[str]:
        try:
            module.get("http://127.0.0.1:9/refused", timeout=1)
        except module.HTTPError as error:
            return [type(error).__name__, str(error), str(error.request.url)]
        return []

    want = recorded(program)
    assert want[0] == "ConnectError"
    assert frozen(program) == want


@pytest.mark.parametrize("module", MODULES)
def test_uploads(module: ModuleType, srv: Any, recorded: Run, frozen: Run, read: Run) -> None:
    data = bytes(range(256))

    def parts() -> Iterator[bytes]:
        yield b"one "
        yield b"two"

    async def asynchronous() -> Any:
        async def aparts() -> Any:
            yield b"three "
            yield b"four"

        async with module.AsyncClient() as client:
            return (await client.post(srv.url + "/echo", content=aparts())).json()

    def program() -> list[Any]:
        return [
            module.post(srv.url + "/echo", content=data).json(),
            module.post(srv.url + "/echo", content=parts()).json(),
            module.post(srv.url + "/echo", json={"a": [1, 2.5, None]}).json(),
            module.post(srv.url + "/echo", data={"q": "a b", "r": "é"}).json(),
            asyncio.run(asynchronous()),
        ]

    want = recorded(program)
    hits = len(srv.hits)
    assert frozen(program) == want
    assert len(srv.hits) == hits
    sent = [row["request"]["body"] for row in rows(read())]
    assert sent[1] == "one two" and sent[4] == "three four"
    assert bytes(read().blob(sent[0]["$blob"])) == data


@pytest.mark.parametrize("module", MODULES)
def test_multipart_compares_by_its_parts(module: ModuleType, srv: Any, recorded: Run, frozen: Run) -> None:
    def program(content: bytes) -> int:
        return int(module.post(srv.url + "/echo", files={"f": ("a.bin", content)}).status_code)

    recorded(program, b"\x00one")
    assert frozen(program, b"\x00one") == 200
    with pytest.raises(ReplayMismatchError):
        frozen(program, b"\x00two")


@pytest.mark.parametrize("module", MODULES)
def test_redirects_are_exchanges_of_their_own(
    module: ModuleType, srv: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    def program() -> list[Any]:
        answer = module.get(srv.url + "/redirect?q=cats", follow_redirects=True)
        return [answer.status_code, [str(hop.status_code) for hop in answer.history], answer.json()]

    want = recorded(program)
    assert frozen(program) == want
    assert [row["status"] for row in rows(read())] == [307, 200]


@pytest.mark.parametrize("module", MODULES)
def test_custom_transports_are_recorded_once(module: ModuleType, recorded: Run, frozen: Run, read: Run) -> None:
    seen: list[str] = []

    def handler(request: Any) -> Any:
        seen.append(str(request.url))
        return module.Response(200, json={"n": len(seen)})

    async def asynchronous() -> Any:
        async with module.AsyncClient(transport=module.MockTransport(handler)) as client:
            return (await client.get("http://h.test/b")).json()

    def program() -> list[Any]:
        with module.Client(transport=module.MockTransport(handler)) as client:
            return [client.get("http://h.test/a").json(), asyncio.run(asynchronous())]

    want = recorded(program)
    assert len(seen) == 2
    assert frozen(program) == want
    assert len(seen) == 2
    assert len(read().calls) == 2


@pytest.mark.parametrize("module", MODULES)
def test_polling_gives_each_recorded_answer_once(module: ModuleType, srv: Any, recorded: Run, frozen: Run) -> None:
    def program() -> int:
        for turn in range(10):
            if module.get(srv.url + "/poll").json()["state"] == "ready":
                return turn
        return -1

    assert recorded(program) == 2
    assert frozen(program) == 2


def test_calls_inside_a_tool_hang_on_it_and_are_skipped_with_it(
    srv: Any, recorded: Run, frozen: Run, read: Run
) -> None:
    @trace_tool
    def fetch(path: str) -> Any:
        return httpx.get(srv.url + path).json()

    want = recorded(lambda: fetch("/json"))
    tool, http = [event for event in read().events if event.type == "tool_call"]
    assert http.parent_id == tool.id and http.name.startswith("http GET http://127.0.0.1")
    assert frozen(lambda: fetch("/json")) == want


def test_clients_stay_what_they_were() -> None:
    client = httpx2.Client()
    before = (type(client), type(client._transport))
    instrumentation.install()
    assert (type(client), type(client._transport)) == before
    assert isinstance(httpx2.HTTPTransport(), httpx2.BaseTransport)
    assert copy.copy(httpx2.Timeout(3)) == httpx2.Timeout(3)


def test_installing_twice_is_once_and_uninstalling_restores() -> None:
    before = vars(httpx2.HTTPTransport)["handle_request"]
    instrumentation.install()
    instrumentation.install()
    chain = vars(httpx2.HTTPTransport)["handle_request"]
    assert chain.__wrapped__ is before
    assert len(boundary.patched()) == 8
    instrumentation.uninstall()
    assert vars(httpx2.HTTPTransport)["handle_request"] is before
    assert boundary.patched() == []


def test_uninstalling_takes_ours_from_under_others(srv: Any) -> None:
    import wrapt

    before = vars(httpx.HTTPTransport)["handle_request"]
    instrumentation.install()
    calls: list[str] = []

    def theirs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append("theirs")
        return wrapped(*args, **kwargs)

    handle = wrapt.wrap_function_wrapper(httpx.HTTPTransport, "handle_request", theirs)
    instrumentation.uninstall()
    assert httpx.get(srv.url + "/json").status_code == 200
    assert calls == ["theirs"]
    wrapt.unwrap_object(httpx.HTTPTransport, "handle_request", handle)
    assert vars(httpx.HTTPTransport)["handle_request"] is before


def test_nothing_active_passes_through(srv: Any, tmp_path: Path) -> None:
    instrumentation.install()
    assert httpx.get(srv.url + "/json").status_code == 200
    assert list(tmp_path.glob("**/*.sftrace")) == []


def test_a_client_made_before_is_recorded(srv: Any, bundle_path: Path, read: Run) -> None:
    with httpx.Client() as client:
        instrumentation.install()
        with record("agent", output=bundle_path):
            client.get(srv.url + "/json")
    assert len(read().calls) == 1


def test_a_full_disk_leaves_the_program_alone(
    srv: Any, bundle_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sftrace_otel.bundle import journal

    instrumentation.install()

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with record("agent", output=bundle_path) as session:
        monkeypatch.setattr(journal.os, "write", full)
        answers = [httpx.get(srv.url + "/json").json() for _ in range(3)]
        monkeypatch.undo()
    assert len(answers) == 3
    assert "No space left on device" in caplog.text
    assert session.path is None or session.path.exists()


@pytest.mark.parametrize("module", MODULES)
def test_a_transport_that_answers_by_itself_is_recorded_and_replayed(
    module: ModuleType, recorded: Run, frozen: Run
) -> None:
    answered: list[int] = []

    class Canned(module.HTTPTransport):  # type: ignore[misc, name-defined]
        def handle_request(self, request: Any) -> Any:
            answered.append(1)
            if request.url.path == "/quota":
                raise RuntimeError("quota")
            return module.Response(200, json={"n": len(answered)})

    def program() -> list[Any]:
        with module.Client(transport=Canned()) as client:
            first = client.get("http://x.invalid/").json()
            try:
                client.get("http://x.invalid/quota")
            except RuntimeError as error:
                return [first, type(error).__name__, str(error)]
        return []

    want = recorded(program)
    assert want == [{"n": 1}, "RuntimeError", "quota"]
    assert frozen(program) == want
    assert len(answered) == 2


@pytest.mark.parametrize("module", MODULES)
def test_headers_and_cookies_are_what_they_were(module: ModuleType, srv: Any, recorded: Run, frozen: Run) -> None:
    def program() -> list[Any]:
        with module.Client(base_url=srv.url) as client:
            head, get = client.head("/json"), client.get("/json")
            return [head.headers["content-length"], get.headers["content-length"], sorted(client.cookies)]

    assert recorded(program) == frozen(program)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_body_generator_that_fails_fails_again(
    module: ModuleType, openai_server: Any, recorded: Run, frozen: Run
) -> None:
    def parts() -> Iterator[bytes]:
        yield b"one"
        raise KeyError("mine")

    def program() -> list[Any]:
        try:
            module.post(openai_server.url + "/json", content=parts())
        except KeyError as error:
            return [str(error), module.get(openai_server.url + "/json").json()]
        return []

    want = recorded(program)
    assert want[0] == "'mine'"
    openai_server.stop()
    assert frozen(program) == want


@pytest.mark.parametrize("module", MODULES)
def test_what_is_beyond_the_limit_is_cut_and_refused_under_replay(
    module: ModuleType, srv: Any, tmp_path: Path, bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_MAX_PAYLOAD_BYTES", "1000")
    instrumentation.install()
    with record("agent", output=bundle_path):
        assert len(module.get(srv.url + "/binary").content) > 1000
    (row,) = open_bundle(bundle_path).calls
    assert row["truncated"] is True
    with pytest.raises(ReplayError, match="cut"), ReplaySession.from_trace(bundle_path):
        module.get(srv.url + "/binary")


def test_a_large_async_exchange_is_recorded_off_the_loop(recorded: Run, frozen: Run, read: Run) -> None:
    big = {"text": "the quick brown fox " * 10_000}
    here = threading.get_ident()
    threads: set[int] = set()

    def handler(request: Any) -> Any:
        return httpx2.Response(200, json=big)

    async def run() -> list[Any]:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handler)) as client:
            return [(await client.post("http://h.test/a", json=big)).json()["text"][:9]]

    original = Exchange.begin

    def noting(self: Exchange, body: bytes) -> None:
        threads.add(threading.get_ident())
        original(self, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "begin", noting)
        want = recorded(lambda: asyncio.run(run()))
    assert threads and here not in threads
    assert frozen(lambda: asyncio.run(run())) == want
    assert [row["end"] for row in read().calls] == ["finished"]


@pytest.mark.parametrize("module", MODULES)
def test_an_answer_that_nobody_reads_on_holds_up_no_exit(
    module: ModuleType, srv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder_module = sys.modules["sftrace_otel.recorder.recorder"]
    slept: list[float] = []
    monkeypatch.setattr(recorder_module.time, "sleep", slept.append)
    made = recorder.acquire(Settings.from_environ({}, dir=tmp_path / "out", quiet=True))
    instrumentation.install()
    client = module.Client()
    answer = client.send(client.build_request("GET", srv.url + "/json"), stream=True)
    made.close()
    answer.close()
    client.close()
    [path] = (tmp_path / "out").glob("*.sftrace")
    assert ends(open_bundle(path)) == ["cut"] and slept == []


@pytest.mark.parametrize("module", MODULES)
def test_an_answer_that_another_thread_reads_is_waited_for(
    module: ModuleType, srv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = module.stream
    recorder_module = sys.modules["sftrace_otel.recorder.recorder"]
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(recorder_module.time, "sleep", lambda _: go_on.set() or thread.join())
    made = recorder.acquire(Settings.from_environ({}, dir=tmp_path / "out", quiet=True))
    instrumentation.install()

    def read_on() -> None:
        with stream("GET", srv.url + "/json") as answer:
            begun.set()
            go_on.wait(60)
            answer.read()

    thread = threading.Thread(target=read_on)
    thread.start()
    assert begun.wait(60)
    made.close()
    [path] = (tmp_path / "out").glob("*.sftrace")
    assert ends(open_bundle(path)) == ["finished"]
