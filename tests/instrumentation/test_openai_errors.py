# SPDX-License-Identifier: Apache-2.0
"""Retries, errors and broken, left and forgotten streams of the openai SDK: one call, one end, one span end."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from sftrace_otel.bundle.read import open_bundle

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "one two three four"}]}
CHAT = "POST /v1/chat/completions"


def sync_client(server: Any, **members: Any) -> OpenAI:
    return OpenAI(**{"base_url": server.base_url, "api_key": "k", "max_retries": 0, **members})


def async_client(server: Any, **members: Any) -> AsyncOpenAI:
    return AsyncOpenAI(**{"base_url": server.base_url, "api_key": "k", "max_retries": 0, **members})


def chunk(content: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def shown(error: BaseException) -> list[Any]:
    """What a program sees of an error of the SDK."""
    response = getattr(error, "response", None)
    return [
        type(error).__name__,
        str(error),
        getattr(error, "body", None),
        getattr(error, "status_code", None),
        getattr(error, "request_id", None),
        None if response is None else response.headers.get("x-note"),
        type(error.__cause__).__name__ if isinstance(error, openai.OpenAIError) else None,
    ]


def tried(call: Callable[[], Any]) -> list[Any]:
    try:
        return [call()]
    except openai.OpenAIError as error:
        return shown(error)


async def atried(call: Callable[[], Any]) -> list[Any]:
    try:
        return [await call()]
    except openai.OpenAIError as error:
        return shown(error)


def only(bundle: Any, spans: Any) -> tuple[dict[str, Any], list[Any], Any]:
    """The one call's row, its result events and its one span."""
    [row] = bundle.calls
    results = [event for event in bundle.events if event.type in ("llm_response", "error")]
    [span] = spans
    assert {event.parent_id for event in results} <= {row["request"], row["response"]}
    assert len({event.type for event in results}) == len(results)
    return row, results, span


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_attempts_of_every_kind_are_one_call_and_come_back_in_order(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run
) -> None:
    fault = server_module.Fault
    openai_server.faults += [
        fault(status=429, headers={"retry-after": "0.01"}),
        fault(status=500, headers={"retry-after-ms": "1"}),
        fault(drop=True),
        fault(status=409, headers={"retry-after-ms": "1"}),
    ]

    def program() -> Any:
        raw = sync_client(openai_server, max_retries=4).chat.completions.with_raw_response.create(**ASK)
        return [raw.parse().to_dict(), raw.retries_taken]

    want = exact(program)
    assert want[1] == 4
    rows = list(read().wire())
    assert [(row["attempt"], row.get("status")) for row in rows] == [(0, 429), (1, 500), (2, None), (3, 409), (4, 200)]
    assert rows[2]["end"] == "failed"
    row, results, span = only(read(), spans()[:1])
    assert (row["end"], [event.type for event in results]) == ("finished", ["llm_response"])
    assert span.status.is_ok or span.status.is_unset


def test_async_attempts_are_one_call_and_come_back_in_order(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    openai_server.faults += [
        server_module.Fault(status=503, headers={"retry-after-ms": "1"}),
        server_module.Fault(drop=True),
    ]

    async def program() -> Any:
        async with async_client(openai_server, max_retries=2) as client:
            stream = await client.chat.completions.create(**ASK, stream=True)
            return [part.to_dict() async for part in stream]

    exact(lambda: asyncio.run(program()))
    assert [row.get("status") for row in read().wire()] == [503, None, 200]
    assert len(read().calls) == 1


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 429, 500])
def test_an_error_status_comes_back_as_the_same_error(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run, status: int, retries: int
) -> None:
    body = {"error": {"message": f"no: {status}", "type": "t", "param": "p", "code": "c", "more": [1.0]}}
    headers = {"x-note": "n", "x-request-id": "req_1", "retry-after-ms": "1"}
    openai_server.replies[CHAT] = server_module.json_reply(body, status=status, headers=headers)

    def program() -> Any:
        return tried(lambda: sync_client(openai_server, max_retries=retries).chat.completions.create(**ASK))

    name, _, got, *_ = exact(program)
    assert got == body["error"]
    row, results, span = only(read(), spans()[:1])
    assert row["end"] == "failed"
    assert [(event.type, event.error_type) for event in results] == [("error", name)]
    assert span.attributes["error.type"] == name
    assert len(list(read().wire())) == 1 + (retries if status in (409, 429, 500) else 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_async_error_status_comes_back_as_the_same_error(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run, stream: bool
) -> None:
    body = {"error": {"message": "no", "type": "t", "param": None, "code": "context_length_exceeded"}}
    openai_server.replies[CHAT] = server_module.json_reply(body, status=400)

    async def program() -> Any:
        async with async_client(openai_server) as client:
            return await atried(lambda: client.chat.completions.create(**ASK, stream=stream))

    assert exact(lambda: asyncio.run(program()))[0] == "BadRequestError"
    row, results, span = only(read(), spans()[:1])
    assert (row["end"], [event.type for event in results]) == ("failed", ["error"])
    assert "gen_ai.response.time_to_first_chunk" not in span.attributes


def test_no_connection_comes_back_as_the_same_error(
    recorded: Run, frozen: Run, openai_server: Any, read: Run, spans: Run
) -> None:
    openai_server.stop()

    def program() -> Any:
        return tried(lambda: sync_client(openai_server, max_retries=1).chat.completions.create(**ASK))

    want = recorded(program)
    assert want[0] == "APIConnectionError"
    row, _, span = only(read(), spans())
    assert (row["end"], span.attributes["error.type"]) == ("failed", "APIConnectionError")
    assert len(list(read().wire())) == 2
    assert frozen(program) == want


@pytest.mark.parametrize("started", [False, True], ids=["before the answer", "within it"])
def test_a_timeout_comes_back_as_the_same_error(
    exact: Run, openai_server: Any, server_module: Any, read: Run, started: bool
) -> None:
    def held(received: Any) -> Any:
        if not started:
            openai_server.stopping.wait()
        return server_module.sse_reply([chunk("a")], hold=True)

    openai_server.replies[CHAT] = held

    def program() -> Any:
        client = sync_client(openai_server, timeout=0.3)
        seen: list[Any] = []
        try:
            seen.extend(part.to_dict() for part in client.chat.completions.create(**ASK, stream=True))
        except Exception as error:  # within a stream older SDKs let the transport's own error through
            seen.append([type(error).__name__, str(error)])
        return seen

    got = exact(program)
    assert got[-1][0] in ("APITimeoutError", "ReadTimeout")
    [row] = read().calls
    assert row["end"] == "failed"


def test_an_async_timeout_comes_back_as_the_same_error(
    exact: Run, openai_server: Any, server_module: Any, read: Run
) -> None:
    def held(received: Any) -> Any:
        openai_server.stopping.wait()
        return server_module.json_reply({})

    openai_server.replies[CHAT] = held

    async def program() -> Any:
        async with async_client(openai_server, timeout=0.3) as client:
            return await atried(lambda: client.chat.completions.create(**ASK))

    assert exact(lambda: asyncio.run(program()))[0] == "APITimeoutError"


# --- streams that end badly -------------------------------------------------------------------------------------------


def read_stream(stream: Any) -> list[Any]:
    seen: list[Any] = []
    try:
        seen.extend(part.choices[0].delta.content for part in stream)
    except Exception as error:
        seen.append(shown(error))
    return seen


async def aread_stream(stream: Any) -> list[Any]:
    seen: list[Any] = []
    try:
        async for part in stream:
            seen.append(part.choices[0].delta.content)
    except Exception as error:
        seen.append(shown(error))
    return seen


OVERLOADED = {"error": {"message": "overloaded", "type": "server_error", "code": None}}
BROKEN: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "an error in it": ({"events": [chunk("a"), OVERLOADED]}, "finished", "server_error"),
    "cut off": ({"events": [chunk("a"), chunk("b")], "cut": True}, "failed", "RemoteProtocolError"),
    "without its end": ({"events": [chunk("a"), chunk("b")]}, "finished", None),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_stream(exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run, how: str) -> None:
    members, end, error_type = BROKEN[how]
    openai_server.replies[CHAT] = server_module.sse_reply(**members)

    def program() -> list[Any]:
        return read_stream(sync_client(openai_server).chat.completions.create(**ASK, stream=True))

    assert exact(program)[0] == "a"
    row, results, span = only(read(), spans()[:1])
    assert row["end"] == end
    assert [event.error_type for event in results if event.type == "error"] == ([error_type] if error_type else [])
    assert results[0].output["choices"][0]["message"]["content"].startswith("a")
    assert span.attributes.get("error.type") == error_type


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_async_stream(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run, how: str
) -> None:
    members, end, error_type = BROKEN[how]
    openai_server.replies[CHAT] = server_module.sse_reply(**members)

    async def program() -> list[Any]:
        async with async_client(openai_server) as client:
            return await aread_stream(await client.chat.completions.create(**ASK, stream=True))

    assert exact(lambda: asyncio.run(program()))[0] == "a"
    row, results, span = only(read(), spans()[:1])
    assert row["end"] == end
    assert [event.error_type for event in results if event.type == "error"] == ([error_type] if error_type else [])
    assert span.attributes.get("error.type") == error_type


# --- streams that are left --------------------------------------------------------------------------------------------


def leave_by_close(stream: Any) -> None:
    next(iter(stream))
    stream.close()
    stream.close()


def leave_by_with(stream: Any) -> None:
    with stream:
        next(iter(stream))


def leave_by_raising(stream: Any) -> None:
    try:
        with stream:
            for _ in stream:
                raise KeyError("of the program's own")
    except KeyError:
        pass


def leave_by_break(stream: Any) -> None:
    for _ in stream:
        break


def never_read(stream: Any) -> None:
    pass


LEAVING = {"close": leave_by_close, "with": leave_by_with, "raise": leave_by_raising, "break": leave_by_break,
           "never": never_read}  # fmt: skip


@pytest.mark.parametrize("collected", [True, False], ids=["collected", "not collected"])
@pytest.mark.parametrize("how", LEAVING)
def test_a_stream_that_is_left_ends_once(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run, how: str, collected: bool
) -> None:
    openai_server.replies[CHAT] = server_module.sse_reply([chunk("a"), chunk("b")], hold=True)
    kept: list[Any] = []

    def program() -> str:
        stream = sync_client(openai_server).chat.completions.create(**ASK, stream=True)
        LEAVING[how](stream)
        if not collected:
            kept.append(stream)  # somebody holds it beyond the end of the run
        del stream
        if collected:
            gc.collect()
        return how

    exact(program)
    row, results, _ = only(read(), spans()[:1])
    gone = how in ("close", "with", "raise") or collected
    assert row["end"] in (("closed", "abandoned") if gone else ("cut",))
    assert [event.type for event in results] == ["llm_response"]
    kept.clear()
    gc.collect()
    assert len(spans()) == 2  # the recorded call's and the replayed one's, each once


@pytest.mark.parametrize("how", ["close", "break", "never"])
def test_an_async_stream_that_is_left_ends_once(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run, how: str
) -> None:
    openai_server.replies[CHAT] = server_module.sse_reply([chunk("a"), chunk("b")], hold=True)

    async def program() -> str:
        client = async_client(openai_server)
        stream = await client.chat.completions.create(**ASK, stream=True)
        if how != "never":
            async for _ in stream:
                break
        if how == "close":
            await stream.close()
        return how

    exact(lambda: asyncio.run(program()))
    row, results, _ = only(read(), spans()[:1])
    assert row["end"] in ("closed", "abandoned", "cut")
    assert [event.type for event in results] == ["llm_response"]


@pytest.mark.parametrize("reading", [False, True], ids=["waiting for the answer", "reading it"])
def test_a_cancelled_call_is_cancelled_again(
    exact: Run, openai_server: Any, server_module: Any, read: Run, spans: Run, reading: bool
) -> None:
    def held(received: Any) -> Any:
        if not reading:
            openai_server.stopping.wait()
        return server_module.sse_reply([chunk("a")], hold=True)

    openai_server.replies[CHAT] = held

    async def program() -> list[str]:
        began = asyncio.Event()
        seen: list[str] = []

        async def call(client: AsyncOpenAI) -> None:
            if not reading:
                asyncio.get_running_loop().call_later(0.2, began.set)
            stream = await client.chat.completions.create(**ASK, stream=True)
            async for part in stream:
                seen.append(str(part.choices[0].delta.content))
                asyncio.get_running_loop().call_later(0.05, began.set)

        async with async_client(openai_server) as client:
            task = asyncio.create_task(call(client))
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return seen

    assert exact(lambda: asyncio.run(program())) == (["a"] if reading else [])
    row, results, span = only(read(), spans()[:1])
    assert row["end"] == "cancelled"
    assert [event.error_type for event in results if event.type == "error"] == ["CancelledError"]
    assert span.attributes["error.type"] == "CancelledError"


AT_EXIT = """
import sys
import openai
from sftrace_otel import instrument
from sftrace_otel.otel.exporter import SftraceExporter
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter
import json
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: json.dumps(
    [span.name, span.attributes.get("sftrace.output_hash") is not None]) + "\\n")))
provider.add_span_processor(SimpleSpanProcessor(SftraceExporter()))
trace.set_tracer_provider(provider)
instrument()
client = openai.OpenAI(base_url=sys.argv[1], api_key="k", max_retries=0)
stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
print(json.dumps(next(iter(stream)).choices[0].delta.content))
"""


def test_a_stream_open_when_the_interpreter_exits_has_an_end(
    openai_server: Any, server_module: Any, tmp_path: Path
) -> None:
    openai_server.replies[CHAT] = server_module.sse_reply([chunk("a"), chunk("b")], hold=True)
    script = tmp_path / "agent.py"
    script.write_text(AT_EXIT)
    done = subprocess.run(
        [sys.executable, str(script), openai_server.base_url],
        capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == ["a", ["chat m", True]]
    [path] = (tmp_path / "sftraces").glob("*.sftrace")
    bundle = open_bundle(path)
    [row] = bundle.calls
    assert row["end"] == "cut"
    assert [event.type for event in bundle.events if event.type == "llm_response"] == ["llm_response"]
