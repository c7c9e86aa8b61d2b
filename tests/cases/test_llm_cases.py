# SPDX-License-Identifier: Apache-2.0
"""Cases B of the public collection: instrumenting the model's SDK and tools, with the real openai client.

Beside these, the same ground is held by `instrumentation/test_tools.py` (what a decorated tool looks like, generators),
`prepare/test_prepare.py` (every value's form) and `instrumentation/test_llm.py` (attempts, token providers).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import hashlib
import inspect
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import httpx2
import openai
import pydantic
import pytest
import wrapt
from case_helpers import (
    U,
    aoa,
    ask,
    blob,
    calls,
    check,
    child,
    ends,
    events,
    frozen,
    n_http,
    n_llm,
    oa,
    outputs,
    rec,
    run,
    tool,
    tool_inputs,
    tool_results,
    wire,
    wire_bodies,
)
from case_server import BINARY, USAGE, Scripted, chunk
from openai import _base_client
from openai.resources.chat.completions import AsyncCompletions, Completions
from opentelemetry import trace
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor, HTTPXClientInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sftrace_otel import (
    ReplayError,
    SftraceSpanProcessor,
    instrument,
    instrumentation,
    llm_request,
    recorder,
    trace_tool,
    uninstrument,
)
from sftrace_otel.instrumentation import patching

pytestmark = [  # streams and clients are left open on purpose
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CHAT: dict[str, Any] = {"model": "m", "messages": [U("x")]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("lookup", "add")]


class Ev(pydantic.BaseModel):
    name: str
    day: int


# --- B01 --------------------------------------------------------------------------------------------------------------


def whole(stream: Any) -> None:
    list(stream)


def early(stream: Any) -> None:
    next(iter(stream))


def left(stream: Any) -> None:
    with stream as parts:
        next(iter(parts))


def closed(stream: Any) -> None:
    next(iter(stream))
    stream.close()


def raised(stream: Any) -> None:
    with contextlib.suppress(LookupError), stream as parts:
        for _ in parts:
            raise LookupError("of the program")


def ignored(stream: Any) -> None:
    pass


def test_b01_every_way_out_of_a_stream_ends_the_call_once(srv: Any, p: Path, spans: InMemorySpanExporter) -> None:
    uses = (whole, early, left, closed, raised, ignored)
    client = oa(srv.url)
    with rec(p):
        for use in uses:
            stream = client.chat.completions.create(**CHAT, stream=True)
            use(stream)
            del stream
    gc.collect()
    check(p)
    assert len(events(p, "llm_response")) == len(calls(p)) == len(uses)
    how = ends(p)
    assert how[0] == "finished" and set(how[1:]) <= {"closed", "abandoned", "cut"}
    assert how[2] == how[3] == "closed"
    texts = [(output or {}).get("choices", [{}])[0].get("message", {}).get("content") for output in outputs(p)]
    assert texts[0] == "Hello world" and set(texts[1:5]) == {""} and texts[5] is None
    assert [span.name for span in spans.get_finished_spans()] == ["chat m"] * len(uses)
    srv.requests.clear()
    with frozen(p):
        for use in uses:
            use(client.chat.completions.create(**CHAT, stream=True))
    assert srv.hits == []


def test_b01_every_way_out_of_an_async_stream_ends_the_call_once(
    srv: Any, p: Path, spans: InMemorySpanExporter
) -> None:
    async def awhole(stream: Any) -> None:
        _ = [part async for part in stream]

    async def aearly(stream: Any) -> None:
        await anext(aiter(stream))

    async def aleft(stream: Any) -> None:
        async with stream as parts:
            await anext(aiter(parts))

    async def aclosed(stream: Any) -> None:
        await anext(aiter(stream))
        await stream.close()

    async def acancelled(stream: Any) -> None:
        async def read() -> None:
            async for _ in stream:
                await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await stream.close()

    async def aignored(stream: Any) -> None:
        pass

    uses = (awhole, aearly, aleft, aclosed, acancelled, aignored)

    async def program() -> None:
        async with aoa(srv.url) as client:
            for use in uses:
                stream = await client.chat.completions.create(**CHAT, stream=True)
                await use(stream)
                del stream
                gc.collect()

    with rec(p):
        run(program)
    check(p)
    assert len(calls(p)) == len({row["response"] for row in calls(p)} - {None}) == len(uses)
    assert ends(p)[0] == "finished" and "finished" not in ends(p)[1:]
    assert [span.name for span in spans.get_finished_spans()] == ["chat m"] * len(uses)


# --- B02 --------------------------------------------------------------------------------------------------------------


def raw_ways(client: openai.OpenAI) -> list[Any]:
    create = client.chat.completions
    plain = create.with_raw_response.create(**CHAT)
    streamed = create.with_raw_response.create(**CHAT, stream=True)
    parsed = create.with_raw_response.parse(**CHAT, response_format=Ev)
    seen = [
        plain.parse().to_dict(), plain.headers["content-type"], plain.status_code, plain.http_response.is_success,
        [part.to_dict() for part in streamed.parse()], parsed.parse().choices[0].message.parsed,
    ]  # fmt: skip
    with create.with_streaming_response.create(**CHAT) as answer:
        seen.append(answer.read())
    with create.with_streaming_response.create(**CHAT) as answer:
        seen += [answer.parse().to_dict(), answer.headers["content-type"]]
    with create.with_streaming_response.create(**CHAT, stream=True) as answer:
        seen.append(list(answer.iter_lines()))
    with create.with_streaming_response.create(**CHAT, stream=True) as answer:
        seen.append([part.to_dict() for part in answer.parse()])
    return seen


async def araw_ways(client: openai.AsyncOpenAI) -> list[Any]:
    create = client.chat.completions
    plain = await create.with_raw_response.create(**CHAT)
    streamed = await create.with_raw_response.create(**CHAT, stream=True)
    parsed = await create.with_raw_response.parse(**CHAT, response_format=Ev)
    seen = [
        plain.parse().to_dict(), plain.headers["content-type"], plain.status_code, plain.http_response.is_success,
        [part.to_dict() async for part in streamed.parse()], parsed.parse().choices[0].message.parsed,
    ]  # fmt: skip
    async with create.with_streaming_response.create(**CHAT) as answer:
        seen.append(await answer.read())
    async with create.with_streaming_response.create(**CHAT) as answer:
        seen += [(await answer.parse()).to_dict(), answer.headers["content-type"]]
    async with create.with_streaming_response.create(**CHAT, stream=True) as answer:
        seen.append([line async for line in answer.iter_lines()])
    async with create.with_streaming_response.create(**CHAT, stream=True) as answer:
        seen.append([part.to_dict() async for part in await answer.parse()])
    return seen


@pytest.mark.parametrize("way", ["sync", "async"])
def test_b02_raw_and_streaming_responses_work_recorded_and_frozen(way: str, srv: Any, p: Path) -> None:
    async def asynchronous() -> list[Any]:
        async with aoa(srv.url) as client:
            return await araw_ways(client)

    def program() -> list[Any]:
        return raw_ways(oa(srv.url)) if way == "sync" else run(asynchronous)

    bare = program()
    srv.counts.clear()
    with rec(p):
        want = program()
    assert want == bare, "recording changes nothing"
    assert n_llm(p) == 7 and set(ends(p)) == {"finished"}
    contents = [output["choices"][0]["message"]["content"] for output in outputs(p)]
    assert all(contents) and contents[1] == '{"name": "fair", "day": 5}'
    assert sorted(contents).count("Hello world") == 3
    srv.requests.clear()
    with frozen(p):
        assert program() == want
    assert srv.hits == []


# --- B04, B05 ---------------------------------------------------------------------------------------------------------


def test_b04_types_are_what_they_were(srv: Any, p: Path) -> None:
    class Own(openai.OpenAI):
        pass

    def program() -> None:
        options: dict[str, Any] = {"api_key": "k", "base_url": f"{srv.url}/v1", "max_retries": 0}
        with Own(**options) as client:
            stream = client.chat.completions.create(**CHAT, stream=True)
            assert type(stream) is openai.Stream and type(stream.response) is httpx2.Response
            assert all(isinstance(part, openai.types.chat.ChatCompletionChunk) for part in stream)
            done = client.chat.completions.create(**CHAT)
            assert type(done) is openai.types.chat.ChatCompletion
            assert type(client) is Own and isinstance(client, openai.OpenAI)
            assert type(client.chat.completions) is Completions

        async def asynchronous() -> None:
            async with openai.AsyncOpenAI(**options) as client:
                pending = client.chat.completions.create(**CHAT, stream=True)
                assert inspect.iscoroutine(pending)
                stream = await pending
                assert type(stream) is openai.AsyncStream
                _ = [part async for part in stream]
                assert type(await client.chat.completions.create(**CHAT)) is openai.types.chat.ChatCompletion
                assert type(client.chat.completions) is AsyncCompletions

        asyncio.run(asynchronous())
        for module in (httpx, httpx2):
            with module.Client() as web:
                assert type(web) is module.Client and type(web._transport) is module.HTTPTransport
        for kind in (openai.OpenAI, httpx.Client, httpx2.AsyncClient, httpx2.HTTPTransport, openai.Stream):
            assert inspect.isclass(kind)
        assert issubclass(openai.AzureOpenAI, openai.OpenAI) and issubclass(Own, _base_client.SyncAPIClient)
        assert inspect.iscoroutinefunction(_base_client.AsyncAPIClient.request)
        assert not inspect.iscoroutinefunction(_base_client.SyncAPIClient.request)
        assert inspect.iscoroutinefunction(httpx2.AsyncHTTPTransport.handle_async_request)

    with rec(p):
        program()
    assert n_llm(p) == 4
    with frozen(p):
        program()


BROKEN = '{"city": "Os'


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_b05_streamed_tool_calls_are_joined_by_index(way: str, broken: bool, srv: Any, p: Path) -> None:
    if broken:
        part = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "lookup", "arguments": ""}}
        pieces = [
            {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in (BROKEN[:4], BROKEN[4:])
        ]
        chunks = [chunk({"role": "assistant", "tool_calls": [part]}), *map(chunk, pieces), chunk({}, "tool_calls")]
        srv.chunks = lambda body: chunks

    async def asynchronous() -> list[Any]:
        async with aoa(srv.url) as client:
            stream = await client.chat.completions.create(**CHAT, stream=True, tools=TOOLS)
            return [part.to_dict() async for part in stream]

    def program() -> list[Any]:
        if way == "async":
            found: list[Any] = run(asynchronous)
            return found
        stream = oa(srv.url).chat.completions.create(**CHAT, stream=True, tools=TOOLS)
        return [part.to_dict() for part in stream]

    with rec(p):
        want = program()
    (output,) = outputs(p)
    message = output["choices"][0]["message"]
    found = [
        (one["id"], one["type"], one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]
    ]
    if broken:
        assert found == [("call_a", "function", "lookup", BROKEN)]
    else:
        assert found == [
            ("call_a", "function", "lookup", '{"city": "Oslo"}'),
            ("call_b", "function", "add", '{"x": 1, "y": 2}'),
        ]
    assert output["choices"][0]["finish_reason"] == "tool_calls" and message["content"] is None
    srv.requests.clear()
    with frozen(p):
        assert program() == want
    assert srv.hits == []


# --- B06 --------------------------------------------------------------------------------------------------------------


class Part(pydantic.BaseModel):
    text: str


class Color(Enum):
    RED = "r"


@dataclass
class Data:
    key: str = "v"


class NumpyLike:
    """Compares item by item, as arrays do: a truth value is an error."""

    def __eq__(self, other: object) -> Any:
        return [False, True]

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
VALUES: list[Any] = [
    datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1), Decimal("1.10"), UUID(int=7), b"\x00\xff", {1, 2}, (1, 2),
    Part(text="x"), float("nan"), float("-inf"), 2**63, 10**5000, "\ud83d", Path("a"), Color.RED, object(), lambda: 0,
    {1: "a", "1": "b"}, Data(), NumpyLike(), range(3), None, Hostile(), CYCLE, ValueError("v"), ValueError, math,
    {Part(text="x").text: {"k": {2}}}, iter([1]),
]  # fmt: skip


@pytest.mark.parametrize("way", ["sync", "async", "generator", "async generator", "llm_request"])
def test_b06_no_value_makes_a_traced_call_fail_or_change(way: str, p: Path, caplog: pytest.LogCaptureFixture) -> None:
    def same(value: Any) -> Any:
        return value

    async def asame(value: Any) -> Any:
        return value

    def generate(value: Any) -> Iterator[Any]:
        yield value

    async def agenerate(value: Any) -> AsyncIterator[Any]:
        yield value

    async def first(items: Any) -> Any:
        return (await take(items))[0]

    async def take(items: Any) -> list[Any]:
        return [item async for item in items]

    through: dict[str, Callable[[Any], Any]] = {
        "sync": tool(same),
        "async": lambda value: asyncio.run(tool(asame)(value)),
        "generator": lambda value: next(iter(list(tool(generate)(value)))),
        "async generator": lambda value: asyncio.run(first(tool(agenerate)(value))),
        "llm_request": lambda value: llm_request(model="m", input=value, call=lambda: value),
    }
    with rec(p):
        for value in VALUES:
            assert through[way](value) is value
    check(p)
    assert len(calls(p)) == len(VALUES) and set(ends(p)) == {"finished"}
    assert not caplog.records


def test_b06_what_cannot_be_kept_is_a_marked_stand_in_without_secrets(p: Path) -> None:
    class Holder:
        def __repr__(self) -> str:
            return "<Holder password=swordfish-17>"

    with rec(p):
        tool(lambda value: None)(Holder())
    (row,) = calls(p)
    assert b"swordfish-17" not in blob(p) and b"Holder" in blob(p)
    assert row["tags"]["#/value"] == "lossy" if "#/value" in row["tags"] else "lossy" in row["tags"].values()


# --- B08 --------------------------------------------------------------------------------------------------------------

MESSAGES: Any = [U("x")]
SPELLINGS: dict[str, Callable[[Any], Any]] = {
    "create": lambda c: c.chat.completions.create(model="m", messages=MESSAGES),
    "create streamed": lambda c: c.chat.completions.create(model="m", messages=MESSAGES, stream=True),
    "parse": lambda c: c.chat.completions.parse(model="m", messages=MESSAGES, response_format=Ev),
    "stream": lambda c: c.chat.completions.stream(model="m", messages=MESSAGES, response_format=Ev),
    "beta parse": lambda c: c.beta.chat.completions.parse(model="m", messages=MESSAGES, response_format=Ev),
    "completions": lambda c: c.completions.create(model="m", prompt="x"),
    "embeddings": lambda c: c.embeddings.create(model="m", input="x"),
    "responses": lambda c: c.responses.create(model="m", input="x"),
    "responses streamed": lambda c: c.responses.create(model="m", input="x", stream=True),
    "responses parse": lambda c: c.responses.parse(model="m", input="x", text_format=Ev),
    "responses stream": lambda c: c.responses.stream(model="m", input="x", text_format=Ev),
    "post": lambda c: c.post("/chat/completions", cast_to=object, body={"model": "m", "messages": MESSAGES}),
    "with options": lambda c: c.with_options(timeout=9).chat.completions.create(model="m", messages=MESSAGES),
}
TYPED = {"parse", "beta parse", "responses parse"}


def plain(value: Any) -> Any:
    """A typed object with its type."""
    if not isinstance(value, pydantic.BaseModel):
        return (type(value).__name__, value)
    return (type(value).__name__, value.model_dump(mode="json", warnings=False))


def taken(value: Any) -> Any:
    """What a program gets of an SDK's result, streams and their managers read to the end."""
    if hasattr(value, "__enter__") and not isinstance(value, openai.Stream):
        with value as stream:
            return [[plain(event) for event in stream], *(plain(final) for final in finals(stream))]
    return [plain(part) for part in value] if isinstance(value, openai.Stream) else plain(value)


def finals(stream: Any) -> list[Any]:
    if hasattr(stream, "get_final_completion"):
        return [stream.get_final_completion().choices[0].message.parsed]
    return [stream.get_final_response().output_parsed]


async def ataken(value: Any) -> Any:
    if hasattr(value, "__aenter__") and not isinstance(value, openai.AsyncStream):
        async with value as stream:
            return [plain(event) async for event in stream]
    value = await value
    return [plain(part) async for part in value] if isinstance(value, openai.AsyncStream) else plain(value)


def parsed_of(name: str, value: Any) -> Any:
    return value.output_parsed if name.startswith("responses") else value.choices[0].message.parsed


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("way", ["sync", "async"])
def test_b08_every_spelling_is_recorded_once_and_replays_typed(way: str, name: str, srv: Any, p: Path) -> None:
    spelling = SPELLINGS[name]

    async def asynchronous() -> Any:
        async with aoa(srv.url) as client:
            return await ataken(spelling(client))

    def program() -> Any:
        return run(asynchronous) if way == "async" else taken(spelling(oa(srv.url)))

    bare = program()
    srv.counts.clear()
    with rec(p):
        want = program()
    assert want == bare, "recording changes nothing"
    assert (n_llm(p), n_http(p), ends(p)) == (1, 0, ["finished"])
    check(p)
    srv.requests.clear()
    with frozen(p):
        assert program() == want
    assert srv.hits == []


@pytest.mark.parametrize("name", sorted(TYPED))
def test_b08_parsed_answers_are_the_users_own_type(name: str, srv: Any, p: Path) -> None:
    with rec(p):
        first = parsed_of(name, SPELLINGS[name](oa(srv.url)))
    with frozen(p):
        again = parsed_of(name, SPELLINGS[name](oa(srv.url)))
    assert first == again == Ev(name="fair", day=5) and type(again) is Ev


def test_b08_other_methods_of_the_sdk_are_recorded_once(srv: Any, p: Path) -> None:
    with rec(p):
        want = oa(srv.url).moderations.create(model="m", input="x").to_dict()
    assert len(calls(p)) == 1
    with frozen(p):
        assert oa(srv.url).moderations.create(model="m", input="x").to_dict() == want
    assert len(srv.hits) == 1


# --- B09 --------------------------------------------------------------------------------------------------------------


@trace_tool
def add(a: int, b: int = 2) -> int:
    "Adds."
    return a + b


POOLED = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from sftrace_otel import record, trace_tool

@trace_tool
def add(a, b=2):
    return a + b

if __name__ == "__main__":
    with record("agent", output="run.sftrace"):
        for method in ("fork", "spawn"):
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
                assert list(pool.map(add, range(4))) == [2, 3, 4, 5]
"""


def test_b09_tools_and_results_copy_and_pickle(srv: Any, p: Path, tmp_path: Path) -> None:
    here = sys.modules[__name__]
    assert pickle.loads(pickle.dumps(add)) is here.add
    assert pickle.loads(pickle.dumps(add))(1) == 3
    assert copy.deepcopy({"tools": [add]})["tools"][0](1) == 3 and copy.copy(add)(1) == 3
    client = oa(srv.url)

    def program() -> Any:
        done = client.chat.completions.create(**CHAT)
        assert copy.deepcopy(done) == done and pickle.loads(pickle.dumps(done)) == done
        copied = client.copy().chat.completions.create(**CHAT)
        assert copied.choices[0].message.role == "assistant"
        return done

    with rec(p):
        want = program()
        agent = {"tools": [add], "client": client}
        assert copy.copy(agent)["tools"][0](1) == copy.deepcopy(agent["tools"])[0](1) == 3  # type: ignore[index]
    assert len(calls(p, "llm")) == 2 and len(calls(p, "tool")) == 2
    with frozen(p, all_used=False):
        assert program() == want


def test_b09_traced_tools_work_in_process_pools(tmp_path: Path) -> None:
    child(tmp_path, POOLED, OTEL_SFTRACE_DIR=str(tmp_path / "traces"))
    check(tmp_path / "run.sftrace")


# --- B10, B11 ---------------------------------------------------------------------------------------------------------


def test_b10_tools_in_threads_and_tasks_land_in_their_run(p: Path, provider: TracerProvider) -> None:
    tracer = trace.get_tracer("t")
    same = tool(lambda i: i)

    async def loop() -> None:
        async def one(number: int) -> None:
            same(number)

        await asyncio.gather(*(one(number) for number in range(10, 14)))
        await asyncio.to_thread(same, 14)
        async with asyncio.TaskGroup() as group:
            group.create_task(one(15))

    async def aside() -> None:
        await asyncio.gather(asyncio.to_thread(same, 16), asyncio.to_thread(same, 17))
        same(18)

    with rec(p), tracer.start_as_current_span("turn"):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(same, range(8)))
        threads = [threading.Thread(target=same, args=(number,)) for number in (8, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(loop())
        threaded = threading.Thread(target=lambda: asyncio.run(aside()))  # an event loop in a thread
        threaded.start()
        threaded.join()
    found = events(p, "tool_call")
    (root,) = events(p, "run_start")
    assert sorted(event["input"]["i"] for event in found) == list(range(19))
    assert {event["run_id"] for event in found} == {root["run_id"]}
    assert {event["parent_id"] for event in found} == {root["id"]}


def test_b10_tasks_and_to_thread_stay_in_the_trace(p: Path, provider: TracerProvider) -> None:
    same = tool(lambda i: i)

    async def loop() -> None:
        async def one(number: int) -> None:
            same(number)

        with trace.get_tracer("t").start_as_current_span("turn"):
            await asyncio.gather(*(one(number) for number in range(4)))
            await asyncio.to_thread(same, 4)

    with rec(p):
        asyncio.run(loop())
    assert len({row["trace_id"] for row in calls(p)}) == 1


def test_b10_threads_stay_in_the_trace(p: Path, provider: TracerProvider) -> None:
    same = tool(lambda i: i)
    with rec(p), trace.get_tracer("t").start_as_current_span("turn") as turn, ThreadPoolExecutor(4) as pool:
        list(pool.map(same, range(8)))
    assert {row["trace_id"] for row in calls(p)} == {f"{turn.get_span_context().trace_id:032x}"}


def test_b11_generators_end_in_any_task_without_noise(
    p: Path, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    @trace_tool
    async def agen() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    @trace_tool
    def gen() -> Iterator[int]:
        yield from range(3)

    def here() -> int:
        return trace.get_current_span().get_span_context().span_id

    async def program() -> None:
        outside = here()
        items = agen()
        await anext(items)
        assert here() == outside
        await asyncio.create_task(items.aclose())  # type: ignore[attr-defined]
        assert here() == outside
        await anext(agen())  # never closed: the loop does, at its end
        threaded = gen()
        assert next(threaded) == 0 and here() == outside
        await asyncio.to_thread(threaded.close)  # type: ignore[attr-defined]
        dropped = gen()
        next(dropped)
        del dropped

    with rec(p), caplog.at_level("WARNING"), trace.get_tracer("t").start_as_current_span("turn"):
        asyncio.run(program())
    gc.collect()
    assert not caplog.records
    assert len(events(p, "tool_call")) == 4 and set(ends(p)) == {"closed"}
    assert tool_results(p) == [[0]] * 4
    assert len([span for span in spans.get_finished_spans() if span.name.startswith("execute_tool")]) == 4


# --- B12, B13, B14 ----------------------------------------------------------------------------------------------------


def everything() -> dict[tuple[Any, str], Any]:
    """Every attribute that a boundary of ours may touch."""
    import asyncio.base_events
    import concurrent.futures.thread
    import socket

    import aiohttp
    import anthropic._base_client
    import requests
    import urllib3
    import urllib3.connectionpool

    owners: list[Any] = [
        openai.OpenAI, openai.AsyncOpenAI, Completions, AsyncCompletions, _base_client.SyncAPIClient,
        _base_client.AsyncAPIClient, _base_client, openai, anthropic._base_client.SyncAPIClient,
        anthropic._base_client.AsyncAPIClient, requests, requests.Session, requests.adapters.HTTPAdapter, urllib3,
        urllib3.connectionpool.HTTPConnectionPool, urllib3.PoolManager, urllib3.HTTPResponse, aiohttp,
        aiohttp.ClientSession, aiohttp.ClientResponse, threading.Thread, ThreadPoolExecutor,
        concurrent.futures.thread, asyncio.base_events.BaseEventLoop, asyncio, socket, socket.socket, subprocess, os,
        trace, sys,
    ]  # fmt: skip
    for module in (httpx, httpx2):
        owners += [
            module, module.Client, module.AsyncClient, module.HTTPTransport, module.AsyncHTTPTransport,
            module.Response, module.MockTransport,
        ]  # fmt: skip
    volatile = {"last_exc", "last_value", "last_type", "last_traceback", "exc_info"}
    return {
        (owner, name): inspect.getattr_static(owner, name)
        for owner in owners
        for name in sorted(vars(owner))
        if name not in volatile
    }


def changed(before: dict[tuple[Any, str], Any]) -> list[str]:
    now = everything()
    return [f"{owner}.{name}" for (owner, name), old in before.items() if now.get((owner, name)) is not old]


def test_b12_uninstrumenting_restores_every_attribute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_DIR", str(tmp_path / "traces"))
    instrument()  # whatever is imported on first use is imported now
    uninstrument()
    recorder.release()
    before = everything()
    instrument()
    assert changed(before), "something has to be patched, else this shows nothing"
    uninstrument()
    for _ in range(3):
        instrument()
        uninstrument()
    instrument()
    instrument()
    uninstrument()
    recorder.release()
    assert changed(before) == []


def test_b12_a_failure_half_way_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_DIR", str(tmp_path / "traces"))
    instrument()
    uninstrument()
    recorder.release()
    before = everything()
    original = patching.wrapt.wrap_function_wrapper
    for good in range(12):
        count = iter(range(100))

        def failing(*args: Any, good: int = good, count: Iterator[int] = count) -> Any:
            if next(count) >= good:
                raise RuntimeError("half-way")
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(patching.wrapt, "wrap_function_wrapper", failing)
            with contextlib.suppress(RuntimeError):
                instrument()
        uninstrument()
        recorder.release()
        assert changed(before) == []
    assert "putting the boundary on httpx.HTTPTransport.handle_request failed with RuntimeError" in caplog.text


def test_b13_clients_made_before_are_recorded_and_those_made_during_stop(srv: Any, p: Path) -> None:
    old = oa(srv.url)
    web = httpx.Client()
    with rec(p):
        new = oa(srv.url)
        ask(old)
        ask(new)
        web.get(srv.url + "/json")
        stream = new.chat.completions.create(**CHAT, stream=True)
        next(iter(stream))
    assert n_llm(p) == 3 and n_http(p) == 1
    stored = blob(p)
    assert ask(old) and ask(new) and web.get(srv.url + "/json").status_code == 200
    assert len(list(stream)) > 0  # goes on after the bundle was closed
    web.close()
    assert blob(p) == stored
    assert len(srv.hits) == 7
    check(p)


class _Foreign:
    """Two other layers on the same SDK: one wraps `create` (GenAI names), one `request` (OpenInference's)."""

    def __enter__(self) -> None:
        def created(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": kwargs["model"]}
            with trace.get_tracer("other.genai").start_as_current_span(
                "chat m", kind=trace.SpanKind.CLIENT, attributes={**attributes, "gen_ai.provider.name": "openai"}
            ) as span:
                done = wrapped(*args, **kwargs)
                span.set_attribute("gen_ai.response.model", done.model)
                return done

        def requested(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            attributes = {"openinference.span.kind": "LLM", "llm.model_name": "m"}
            with trace.get_tracer("openinference").start_as_current_span("ChatCompletion", attributes=attributes):
                return wrapped(*args, **kwargs)

        self.handles = [
            (Completions, "create", wrapt.wrap_function_wrapper(Completions, "create", created)),
            (openai.OpenAI, "request", wrapt.wrap_function_wrapper(openai.OpenAI, "request", requested)),
        ]
        HTTPXClientInstrumentor().instrument()
        HTTPX2ClientInstrumentor().instrument()

    def __exit__(self, *_: object) -> None:
        instrumentation.uninstall()  # the standard instrumentations pop whatever wrapper is outermost
        HTTPX2ClientInstrumentor().uninstrument()
        HTTPXClientInstrumentor().uninstrument()
        for owner, name, handle in self.handles:
            wrapt.unwrap_object(owner, name, handle)
        if "request" in vars(openai.OpenAI):
            del openai.OpenAI.request


@pytest.mark.parametrize("ours", ["first", "last"])
def test_b14_layers_on_one_sdk_are_one_call(ours: str, srv: Any, p: Path, provider: TracerProvider) -> None:
    provider.add_span_processor(SftraceSpanProcessor(dir=p.parent / "traces"))
    if ours == "first":
        instrument()
        instrument()
    with _Foreign():
        with rec(p):
            want = ask(oa(srv.url))
        check(p)
        assert n_llm(p) == 1 and n_http(p) == 0
        (request,) = events(p, "llm_request")
        assert request["input"]["request"]["messages"] == [U("x")]
        srv.requests.clear()
        with frozen(p):
            assert ask(oa(srv.url)) == want
    assert srv.hits == []
    uninstrument()


# --- B15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_b15_cancelled_calls_end_as_cancelled(stream: bool, srv: Any, p: Path, spans: InMemorySpanExporter) -> None:
    async def slow(client: openai.AsyncOpenAI) -> None:
        done = await client.chat.completions.create(model="m", messages=[U("WAIT")], stream=stream)
        if stream:
            async for _ in done:
                pass

    async def program() -> None:
        async with aoa(srv.url) as client:
            task = asyncio.create_task(slow(client))
            while not srv.waiting.is_set():
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(slow(client), 0.2)

    with rec(p):
        run(program)
    check(p)
    assert ends(p) == ["cancelled", "cancelled"]
    assert [event["error_type"] for event in events(p, "error")] == ["CancelledError", "CancelledError"]
    assert [span.attributes["error.type"] for span in spans.get_finished_spans()] == ["CancelledError"] * 2  # type: ignore[index]


class Left(SystemExit):
    """Asked for by a signal, in the middle of a call."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Left])
@pytest.mark.parametrize("where", ["answer", "stream", "plain http", "http body"])
def test_b15_interrupts_and_exits_pass_unchanged_and_end_the_call_as_cancelled(
    kind: type[BaseException], where: str, srv: Any, p: Path
) -> None:
    stopping = kind("now")
    stopped = threading.Event()

    def handler(number: int, frame: Any) -> None:
        while frame is not None and "httpcore" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and not stopped.is_set():  # in the call, not between its parts
            stopped.set()
            raise stopping

    def interrupt() -> None:
        assert srv.waiting.wait(20)
        while not stopped.wait(0.01):
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    helper = threading.Thread(target=interrupt)
    client = oa(srv.url)
    try:
        with rec(p), pytest.raises(kind) as caught:
            helper.start()
            if where == "plain http":
                httpx.get(srv.url + "/wait", timeout=20)
            elif where == "http body":
                httpx.get(srv.url + "/slow-sse", timeout=20)
            else:
                done = client.chat.completions.create(model="m", messages=[U("WAIT")], stream=where == "stream")
                list(done)
    finally:
        helper.join()
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is stopping
    check(p)
    assert ends(p) == ["cancelled"]


def test_b15_a_closed_generator_closes_what_it_reads(srv: Any, p: Path) -> None:
    def words() -> Iterator[str]:
        with oa(srv.url).chat.completions.create(**CHAT, stream=True) as stream:
            for part in stream:
                yield part.choices[0].delta.content or ""

    with rec(p):
        items = words()
        next(items)
        items.close()  # type: ignore[attr-defined]
    assert ends(p) == ["closed"]


# --- B17, B18, B19, B20 -----------------------------------------------------------------------------------------------


def test_b17_inputs_are_those_at_the_call_and_outputs_those_at_the_return(srv: Any, p: Path) -> None:
    messages = [U("hi")]
    returned: dict[str, list[int]] = {"r": []}
    client = oa(srv.url)

    def mutating(x: Any) -> Any:
        x["a"].append("inside")
        return x

    with rec(p):
        ask(client, messages)
        messages.append(U("later"))
        ask(client, messages)
        given: dict[str, list[Any]] = {"a": []}
        tool(lambda x: returned)(given)
        given["a"].append(1)
        returned["r"].append(1)
        tool(mutating)(given)
        asked: dict[str, Any] = {"m": []}
        answer = llm_request(model="m", input=asked, call=lambda: {"got": []})
        asked["m"].append(1)
        answer["got"].append(1)
    assert [len(one) for one in recorded_messages_of_chat(p)] == [1, 2]
    assert tool_inputs(p) == [{"x": {"a": []}}, {"x": {"a": [1]}}]
    assert tool_results(p) == [{"r": []}, {"a": [1, "inside"]}]
    assert events(p, "llm_request")[2]["input"] == {"m": []} and outputs(p)[2] == {"got": []}


def recorded_messages_of_chat(path: Path) -> list[Any]:
    return [
        event["input"]["request"]["messages"] for event in events(path, "llm_request") if "request" in event["input"]
    ]


def test_b18_the_request_on_the_wire_is_the_programs_own(srv: Any, p: Path) -> None:
    client = oa(srv.url)

    def program() -> list[list[int]]:
        asked: list[dict[str, Any]] = [{}, {"stream_options": {"include_usage": True}}, {"tools": TOOLS}]
        counts = []
        for more in asked:
            counts.append([len(part.choices) for part in client.chat.completions.create(**CHAT, stream=True, **more)])
        client.chat.completions.create(**CHAT)
        client.embeddings.create(model="m", input=["x"])
        httpx.post(srv.url + "/echo", json={"b": 1, "a": 2}, headers={"X-Mixed-Case": "1"})
        return counts

    bare = program()
    alone = [(one.method, one.path, one.query, one.headers, one.body) for one in srv.requests]
    srv.requests.clear()
    with rec(p):
        recorded = program()
    sent = [(one.method, one.path, one.query, one.headers, one.body) for one in srv.requests]
    assert sent == alone, "byte for byte what it sends without us"
    assert recorded == bare and 0 not in recorded[0] and recorded[1][-1] == 0
    assert b"stream_options" not in sent[0][4]
    assert [row["request"]["body"].encode() for row in wire(p)] == [one[4] for one in sent]


ODD: list[dict[str, Any]] = [
    chunk({}),
    {**chunk({}), "choices": []},
    {**chunk({"content": None, "role": "assistant"}), "new_field": {"deep": [1, None]}},
    {**chunk({"content": "a", "annotations": None}), "service_tier": None},
    {
        **chunk({"content": "b"}),
        "choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None, "novel": 7}],
    },
    {**chunk({}), "choices": [{"index": 1, "delta": {"content": "second"}, "finish_reason": "length"}]},
    chunk({}, "stop"),
    {**chunk({}), "choices": [], "usage": USAGE},
]


def test_b18_odd_chunks_are_recorded_as_they_are(srv: Any, p: Path) -> None:
    srv.chunks = lambda body: ODD
    client = oa(srv.url)

    def program() -> list[Any]:
        return [part.to_dict() for part in client.chat.completions.create(**CHAT, stream=True)]

    bare = program()
    with rec(p):
        want = program()
    assert want == bare
    sent = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in ODD) + b"data: [DONE]\n\n"
    assert wire_bodies(p) == [sent]
    (output,) = outputs(p)
    assert [choice["message"]["content"] for choice in output["choices"]] == ["ab", "second"]
    assert output["usage"] == USAGE and output["new_field"] == {"deep": [1, None]}
    with frozen(p):
        assert program() == want


@pytest.mark.parametrize("module", [httpx, httpx2])
def test_b19_a_streamed_answer_is_teed_and_never_read_ahead(module: Any, srv: Any, p: Path) -> None:
    with rec(p):
        with module.stream("GET", srv.url + "/binary") as answer:
            assert not answer.is_stream_consumed and not hasattr(answer, "_content")
            assert sum(len(part) for part in answer.iter_raw(64)) == len(BINARY)
        with module.stream("GET", srv.url + "/slow-sse") as answer:
            assert not srv.gate.is_set()  # here, although the server holds the rest back
            assert next(answer.iter_raw()) == b"data: 0\n\n"
    assert wire_bodies(p) == [BINARY, b"data: 0\n\n"]


LARGE = """
import hashlib, re, sys
from pathlib import Path
import httpx
from sftrace_otel import record

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

url, blocks = sys.argv[1], int(sys.argv[2])
with record("warm", output="warm.sftrace"):
    httpx.get(url + "/json")
before = peak()
digest, size = hashlib.sha256(), 0
with record("agent", output="run.sftrace"):
    with httpx.stream("GET", url + f"/large?{blocks}") as answer:
        for part in answer.iter_raw():
            digest.update(part)
            size += len(part)
print(size, digest.hexdigest(), (peak() - before) // 1024)
"""


def test_b19_a_huge_answer_is_cut_hashed_whole_and_refused_in_bounded_memory(srv: Any, tmp_path: Path) -> None:
    blocks = 3200  # of 64 KiB: 200 MiB
    done = child(tmp_path, LARGE, srv.url, str(blocks), OTEL_SFTRACE_QUIET="true")
    size, digest, mib = done.stdout.split()
    path = tmp_path / "run.sftrace"
    check(path)
    assert int(size) == blocks * 65536 and int(mib) < 64
    (row,) = calls(path)
    (exchange,) = wire(path)
    assert row["truncated"] and exchange["truncated"]
    assert exchange["full"] == {"sha256": digest, "size": int(size)}
    assert 0 < len(wire_bodies(path)[0]) <= 16 * 1024 * 1024
    with pytest.raises(ReplayError, match="cut"), frozen(path):
        httpx.get(srv.url + f"/large?{blocks}")


def test_b19_of_a_cut_body_with_a_secret_no_digest_is_kept(srv: Any, p: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_MAX_PAYLOAD_BYTES", "100")
    parts = [b"password=swordfish-17 ", b"x" * 1000]
    srv.script.append(Scripted(parts=parts))
    srv.script.append(Scripted(parts=[b"nothing to hide ", b"x" * 1000]))
    with rec(p):
        for _ in range(2):
            with httpx.stream("GET", srv.url + "/any") as answer:
                assert len(list(answer.iter_raw())) == 2
    first, second = wire(p)
    assert first["full"] == {"size": 1022} and len(second["full"]["sha256"]) == 64
    digests = [hashlib.sha256(text).hexdigest().encode() for text in (b"".join(parts), b"swordfish-17", parts[0])]
    assert not any(digest in blob(p) for digest in (*digests, b"swordfish-17"))


def plain_function(a: int, c: int = 7, *, b: str = "x") -> str:
    "Doc."
    return f"{a}{b}"


async def coroutine(a: int) -> int:
    return a


async def async_generator(a: int) -> AsyncIterator[int]:
    yield a


def generator(a: int) -> Iterator[int]:
    yield a


class Cls:
    """Methods of each kind."""

    def method(self, a: int) -> int:
        return a

    async def amethod(self, a: int) -> int:
        return a

    @classmethod
    def cm(cls, a: int) -> int:
        return a

    @staticmethod
    def sm(a: int) -> int:
        return a


class CallableObj:
    """Its call is the tool."""

    def __call__(self, a: int) -> int:
        return a


plain_function.extra = "kept"  # type: ignore[attr-defined]
CALLABLES = {
    "function": plain_function,
    "coroutine": coroutine,
    "async generator": async_generator,
    "generator": generator,
    "partial": functools.partial(plain_function, c=1),
    "async partial": functools.partial(coroutine, 1),
    "method": Cls().method,
    "async method": Cls().amethod,
    "classmethod": Cls.cm,
    "staticmethod": Cls.sm,
    "callable": CallableObj(),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_b20_wrapped_callables_look_as_before(name: str) -> None:
    function = CALLABLES[name]
    traced = trace_tool(function)
    for look in (
        inspect.signature, inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction,
    ):  # fmt: skip
        assert look(traced) == look(function), look
    for attribute in ("__module__", "__doc__", "__defaults__", "__kwdefaults__", "extra"):
        assert getattr(traced, attribute, None) == getattr(function, attribute, None), attribute
    assert traced.__annotations__ == getattr(function, "__annotations__", {})
    if hasattr(function, "__name__"):
        assert (traced.__name__, traced.__qualname__) == (function.__name__, function.__qualname__)


@pytest.mark.parametrize("name", CALLABLES)
def test_b20_a_callable_without_a_name_stays_without(name: str) -> None:
    function, traced = CALLABLES[name], trace_tool(CALLABLES[name])
    for attribute in ("__name__", "__qualname__"):
        assert getattr(traced, attribute, None) == getattr(function, attribute, None)
    assert hasattr(traced, "__name__") == (name not in ("partial", "async partial", "callable"))


def test_b20_arguments_are_recorded_by_name_and_self_is_bound(p: Path) -> None:
    class Own:
        @trace_tool
        def method(self, a: int, b: int = 2) -> tuple[bool, int]:
            return isinstance(self, Own), a + b

    with rec(p):
        assert trace_tool(plain_function)(1) == "1x" and trace_tool(plain_function)(a=1, b="y") == "1y"
        assert Own().method(1) == (True, 3)
        assert asyncio.run(trace_tool(coroutine)(7)) == 7
        assert list(trace_tool(generator)(3)) == [3]
    assert tool_inputs(p) == [
        {"a": 1, "c": 7, "b": "x"},
        {"a": 1, "c": 7, "b": "y"},
        {"a": 1, "b": 2},
        {"a": 7},
        {"a": 3},
    ]
