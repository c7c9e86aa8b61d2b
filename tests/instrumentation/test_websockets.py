# SPDX-License-Identifier: Apache-2.0
"""The `websockets` library, asyncio and threading: its connections work, and the verdict names them."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import websockets.asyncio.client
import websockets.client
import websockets.sync.client
import websockets.sync.server

from sftrace_otel import ReplayPolicyError, ReplaySession, instrumentation, record, recorder, trace_tool
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.instrumentation import guard
from sftrace_otel.instrumentation import websockets as boundary
from sftrace_otel.settings import Settings

Run = Callable[..., Any]


@pytest.fixture
def _collect() -> Iterator[None]:
    """A connection that is stopped leaves a socket for the collector."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def server() -> Iterator[Any]:
    """A server that says each message back."""
    opened: list[str] = []

    def talk(ws: Any) -> None:
        opened.append(ws.request.path)
        for message in ws:
            ws.send(message)

    with websockets.sync.server.serve(talk, "127.0.0.1", 0) as serving:
        serving.opened = opened
        serving.url = f"ws://127.0.0.1:{serving.socket.getsockname()[1]}/v1?key=hunter2"
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def threaded(url: str) -> str:
    with websockets.sync.client.connect(url, proxy=None) as ws:
        ws.send("hello")
        return str(ws.recv())


def asynchronous(url: str) -> str:
    async def talk() -> str:
        async with websockets.asyncio.client.connect(url, proxy=None) as ws:
            await ws.send("hello")
            return str(await ws.recv())

    return asyncio.run(talk())


@pytest.mark.parametrize("program", [threaded, asynchronous])
def test_a_websocket_is_noted_by_its_host(program: Run, server: Any, recorded: Run, read: Run) -> None:
    assert recorded(program, server.url) == "hello"
    (obstacle,) = read().run["verdict"]["obstacles"]
    assert obstacle["what"] == "a websocket to 127.0.0.1 was seen and is not recorded"
    assert "hunter2" not in str(read().run)


@pytest.mark.parametrize("program", [threaded, asynchronous])
def test_it_is_told_once_beside_the_connections(program: Run, server: Any, tmp_path: Any) -> None:
    @trace_tool
    def one() -> int:
        return 1

    instrumentation.install()
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    made.connections = guard.connections
    guard.notice_connections()
    one()
    assert program(server.url) == "hello"
    made.close()
    (path,) = (tmp_path / "out").glob("*.sftrace")
    assert [item["library"] for item in open_bundle(path).run["connections"]] == ["websockets"]
    assert [item["kind"] for item in open_bundle(path).run["verdict"]["obstacles"]] == ["websocket"]


def test_inside_a_tool_it_is_no_obstacle(server: Any, recorded: Run, frozen: Run, read: Run) -> None:
    talk = trace_tool(threaded)
    assert recorded(talk, server.url) == "hello"
    assert read().run["verdict"]["offline"] is True
    assert frozen(talk, server.url) == "hello"
    assert len(server.opened) == 1


@pytest.mark.parametrize("program", [threaded, asynchronous])
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_collect")
def test_under_replay_the_guard_stops_it(program: Run, server: Any, bundle_path: Any) -> None:
    with record("agent", output=bundle_path):
        pass
    with pytest.raises(ReplayPolicyError, match="websockets tried to connect"), ReplaySession.from_trace(bundle_path):
        program(server.url)
    assert server.opened == []


def test_a_process_that_talks_to_a_model_over_a_websocket_alone_says_so(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = recorder.acquire(Settings(dir=tmp_path / "out", quiet=True))
    made.websocket("api.openai.com")
    made.close()
    assert "connected to api.openai.com and NO call was captured" in caplog.text
    assert not (tmp_path / "out").exists()


def test_installing_twice_is_once_and_uninstalling_restores() -> None:
    before = vars(websockets.client.ClientProtocol)["__init__"]
    instrumentation.install()
    instrumentation.install()
    assert vars(websockets.client.ClientProtocol)["__init__"].__wrapped__ is before
    assert len(boundary.patched()) == 1
    instrumentation.uninstall()
    assert vars(websockets.client.ClientProtocol)["__init__"] is before
