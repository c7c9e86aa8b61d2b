# SPDX-License-Identifier: Apache-2.0
"""A broad agent, run with one fault of ours injected at a time; `test_faults.py` starts this file as a program.

Decision: a fault is put into a function by giving it the code of one that raises, so that every reference to it fails:
methods, names imported elsewhere, hooks that wrapt or the SDK keep. What has to be injected is measured (a profile of
one recorded run), so each function is tried that such a run reaches and none that it does not. The process is one of
its own, since a fault may leave anything behind, and a hang ends it with a traceback.
Rejected: `monkeypatch.setattr` on modules (names imported before keep the old function) and a subprocess for each
fault (a second each).

Usage: python faults.py REQUEST, a JSON file (`Request`); one JSON line on stdout for each fault tried.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import contextvars
import errno
import faulthandler
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import logging
import os
import pkgutil
import shutil
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import aiohttp
import anthropic
import anyio.to_thread
import httpx
import httpx2
import openai
import requests
import urllib3
import websockets.sync.client
import websockets.sync.server
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.util._once import Once

import sftrace_otel
from sftrace_otel import (
    SftraceExporter,
    allm_request,
    instrument,
    instrumentation,
    keep,
    llm_request,
    record,
    record_state_change,
    recorder,
    set_input,
    set_output,
    trace_tool,
    uninstrument,
)
from sftrace_otel.bundle import read
from sftrace_otel.instrumentation import guard

SOURCE = Path(sftrace_otel.__file__).parent
ROOMS = ("instrumentation", "recorder", "otel", "core", "formats")
FILES = ("bundle.journal", "bundle.build", "bundle.write", "bundle.store", "bundle.records", "bundle.disk", "settings")
"""The recording path: these rooms, and these modules."""

HANG_SECONDS = 60.0


class Injected:
    """What the code put into a function calls: counts, and raises the fault."""

    def __init__(self) -> None:
        self.hits = 0
        self.make: Callable[[], BaseException] = RuntimeError

    def hit(self) -> None:
        self.hits += 1
        raise self.make()


INJECTED = Injected()
sys.modules["sftrace_faults_injected"] = INJECTED  # type: ignore[assignment]

ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("injected"),
    "MemoryError": MemoryError,
    "RecursionError": lambda: RecursionError("injected"),
    "OSError": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


# --- which functions --------------------------------------------------------------------------------------------------


def modules() -> list[ModuleType]:
    """The modules of the recording path, imported."""
    found = []
    for info in pkgutil.walk_packages([str(SOURCE)], "sftrace_otel."):
        name = info.name.removeprefix("sftrace_otel.")
        if name.partition(".")[0] in ROOMS or name in FILES:
            found.append(importlib.import_module(info.name))
    return found


def functions() -> dict[str, FunctionType]:
    """Every function and method that these modules define, by `module.qualname`."""
    found: dict[str, FunctionType] = {}
    for module in modules():
        for value in list(vars(module).values()):
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            if isinstance(value, type) and value.__module__ != module.__name__:
                continue
            for member in members:
                for function in _functions_in(member):
                    if function.__module__ == module.__name__ and Path(function.__code__.co_filename).is_relative_to(
                        SOURCE
                    ):
                        name = f"{module.__name__}.{function.__qualname__}".removeprefix("sftrace_otel.")
                        found[name] = function
    return dict(sorted(found.items()))


def _functions_in(member: Any) -> Iterator[FunctionType]:
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if isinstance(member, property):
        for part in (member.fget, member.fset):
            yield from _functions_in(part)
        return
    if isinstance(member, functools.cached_property):
        member = member.func
    while hasattr(member, "__wrapped__"):
        member = member.__wrapped__
    if isinstance(member, FunctionType):
        yield member


def raising(function: FunctionType) -> CodeType:
    """Code of the same kind (plain, coroutine, generator) and as many free variables that raises the fault."""
    code = function.__code__
    free = [f"free{number}" for number in range(len(code.co_freevars))]
    word = "async def" if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else "def"
    gives = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    source = [
        f"def around({', '.join(free)}):",
        f"    {word} fault(*args, **kwargs):",
        f"        ({''.join(name + ', ' for name in free)})",
        "        __import__('sys').modules['sftrace_faults_injected'].hit()",
        "        yield" if gives else "",
    ]
    scope: dict[str, Any] = {}
    exec("\n".join(source), scope)  # fixed text and generated names
    made = next(item for item in scope["around"].__code__.co_consts if isinstance(item, CodeType))
    return made.replace(co_name=code.co_name, co_qualname=code.co_qualname, co_filename="<injected fault>")


@contextlib.contextmanager
def fault(function: FunctionType | None, error: str) -> Iterator[None]:
    """Let `function` raise a new `error` on every call inside the block."""
    INJECTED.make = ERRORS[error]
    if function is None:
        yield
        return
    code = function.__code__
    function.__code__ = raising(function)
    try:
        yield
    finally:
        function.__code__ = code


@contextlib.contextmanager
def reached(seen: set[CodeType]) -> Iterator[None]:
    """Collect the code objects that run in the block, in any thread that starts in it."""

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


# --- the disk ---------------------------------------------------------------------------------------------------------


class Disk:
    """Counts what the package asks of the disk; from the `first` request on, or `once`, it fails with `code`."""

    names = ("open", "write", "mkdir", "rename", "replace", "unlink", "fsync", "ftruncate", "rmdir")

    def __init__(self, first: int | None = None, *, once: bool = False, code: int = errno.ENOSPC) -> None:
        self.first = first
        self.once = once
        self.code = code
        self.count = 0

    def __enter__(self) -> None:
        self._kept = [(module, name, getattr(module, name)) for module, name in self._places()]
        for module, name, real in self._kept:
            setattr(module, name, functools.partial(self._ask, real))

    def __exit__(self, *_: object) -> None:
        for module, name, real in self._kept:
            setattr(module, name, real)

    def _places(self) -> Iterator[tuple[Any, str]]:
        yield from ((os, name) for name in self.names)
        yield from ((io, "open"), (builtins, "open"))

    def _ask(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_ours():
            self.count += 1
            if self.first is not None and (self.count == self.first if self.once else self.count >= self.first):
                INJECTED.hits += 1
                raise OSError(self.code, os.strerror(self.code))
        return real(*args, **kwargs)

    @staticmethod
    def _is_ours() -> bool:
        frame, steps = sys._getframe(2), 0
        while frame is not None and steps < 6:
            if str(frame.f_globals.get("__name__", "")).startswith("sftrace_otel."):
                return True
            frame, steps = frame.f_back, steps + 1  # type: ignore[assignment]
        return False


# --- the agent --------------------------------------------------------------------------------------------------------


class Own:
    """A type without a JSON form."""

    def __init__(self, number: int) -> None:
        self.number = number


class Shop:
    @trace_tool
    def price(self, item: str, *, count: int = 1) -> dict[str, Any]:
        return {"item": item, "price": 2.5 * count}

    @classmethod
    @trace_tool(name="shop.open")
    def is_open(cls, day: str) -> bool:
        return day != "sunday"


@trace_tool
def lookup(city: str, unit: str = "C") -> dict[str, Any]:
    return {"city": city, "unit": unit, "when": (1, 2), "raw": b"\x00\xff"}


@trace_tool(serializer=lambda value: {"own": value.number} if isinstance(value, Own) else value)
def own(value: Own) -> Own:
    return value


@trace_tool
def outer(city: str) -> list[Any]:
    return [lookup(city)["city"], lookup(city, "F")["unit"]]


@trace_tool
def refuse(code: int) -> None:
    raise ValueError(f"bad code {code}")


@trace_tool
async def alookup(city: str) -> str:
    await asyncio.sleep(0)
    return city.upper()


@trace_tool
async def arefuse() -> None:
    raise LookupError("nothing there")


@trace_tool
def counted(limit: int) -> Iterator[int]:
    got = yield from range(limit)
    return got


@trace_tool
async def acounted(limit: int) -> Any:
    for number in range(limit):
        yield number


@trace_tool
def later(city: str) -> Any:
    return alookup.__wrapped__(city)


CLAUDE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-9", "stop_reason": "end_turn",
    "stop_sequence": None, "content": [{"type": "text", "text": "hello"}],
    "usage": {"input_tokens": 3, "output_tokens": 2},
}  # fmt: skip
EVENTS = [
    {"type": "message_start", "message": {**CLAUDE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hello"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 2},
    },
    {"type": "message_stop"},
]
LENGTH = {"content-length": "6"}
"""So that httpx sends a streamed body as it is."""
SECRET = "sk-" + "proj-" + "Zm9vYmFyYmF6cXV4" * 3


class Kit:
    """What the agent works with, made once: servers' address, clients, an event loop."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.url = server.url
        self.loop = asyncio.new_event_loop()
        self.model = openai.OpenAI(base_url=f"{self.url}/v1", api_key=SECRET, max_retries=1)
        self.amodel = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=SECRET, max_retries=0)
        self.web = httpx.Client()
        self.web2 = httpx2.Client()
        self.aweb = httpx.AsyncClient()
        self.mock = httpx.Client(
            transport=httpx.MockTransport(lambda request: httpx.Response(200, json={"in": "memory"}))
        )
        self.claude = anthropic.Anthropic(base_url=self.url, api_key=SECRET, max_retries=0)
        self.aclaude = anthropic.AsyncAnthropic(base_url=self.url, api_key=SECRET, max_retries=0)
        self.requests = requests.Session()
        self.pools = urllib3.PoolManager()
        self.proxied = urllib3.ProxyManager("http://127.0.0.1:9")
        helper = sys.modules["openai_server"]
        server.replies["GET /parts"] = helper.Reply(events=[b"one", b"two", b"three"], media="text/plain")
        server.replies["POST /v1/messages"] = lambda received: (
            helper.sse_reply(EVENTS, named=True) if received.json.get("stream") else helper.json_reply(CLAUDE)
        )
        self.sockets = websockets.sync.server.serve(_say_back, "127.0.0.1", 0)
        self.sockets_thread = threading.Thread(target=self.sockets.serve_forever, daemon=True)
        self.sockets_thread.start()
        self.sockets_url = f"ws://127.0.0.1:{self.sockets.socket.getsockname()[1]}/"
        self.unraisable: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.unraisable.append(str(context.get("exception"))))

    def close(self) -> None:
        for client in (self.model, self.claude, self.web, self.web2, self.mock, self.requests):
            client.close()
        for pools in (self.pools, self.proxied):
            pools.clear()
        self.sockets.shutdown()
        self.sockets_thread.join()

        async def close() -> None:
            await self.amodel.close()
            await self.aclaude.close()
            await self.aweb.aclose()

        self.loop.run_until_complete(close())
        self.loop.close()


def _say_back(connection: Any) -> None:
    for message in connection:
        connection.send(message)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


Say = Callable[[str, Callable[[], Any]], None]


def agent(kit: Kit, note: Say) -> None:
    """Calls of every kind, each noted with its result or its exception."""
    chat = kit.model.chat.completions
    note("chat", lambda: chat.create(model="m", messages=user(f"my key is {SECRET}")).model_dump())
    note("stream", lambda: [c.model_dump() for c in chat.create(model="m", messages=user("a b c"), stream=True)])
    note("stream left", lambda: _left(chat.create(model="m", messages=user("a b c"), stream=True)))
    note("raw", lambda: chat.with_raw_response.create(model="m", messages=user("raw")).parse().model_dump())
    note("refused", lambda: _failing(kit, 400, lambda: chat.create(model="m", messages=user("x"))))
    note("retried", lambda: _failing(kit, 500, lambda: chat.create(model="m", messages=user("x")).model_dump()))
    note("answers", lambda: chat.create(model="m", messages=_tool_messages()).model_dump())
    note("models", lambda: kit.model.models.list().model_dump())
    note("lookup", lambda: lookup("Oslo"))
    note("own", lambda: own(Own(3)).number)
    note("outer", lambda: outer("Rome"))
    note("price", lambda: Shop().price("tea", count=2))
    note("open", lambda: Shop.is_open("sunday"))
    note("refuse", lambda: refuse(7))
    note("wrong arguments", lambda: lookup(town="Oslo"))  # type: ignore[call-arg]
    note("generator", lambda: list(counted(3)))
    note("generator left", lambda: _stepped(counted(3)))
    note("get", lambda: _read(kit.web.get(f"{kit.url}/json?item=1&api_key={SECRET}")))
    note("get2", lambda: _read(kit.web2.get(f"{kit.url}/json", headers={"x-api-key": SECRET})))
    note("missing", lambda: _read(kit.web.get(f"{kit.url}/missing").raise_for_status()))
    note("unreachable", lambda: kit.web.get("http://127.0.0.1:9/"))
    note("posted", lambda: _read(kit.web.post(f"{kit.url}/form", json={"a": [1, 2.5], "b": "x" * 20_000})))
    note("uploaded", lambda: _read(kit.web.post(f"{kit.url}/form", content=iter([b"one", b"two"]), headers=LENGTH)))
    note("mock", lambda: _read(kit.mock.get("http://nowhere.test/")))
    note("downloaded", lambda: _streamed(kit))
    note("claude", lambda: kit.claude.messages.create(**_asking()).model_dump())
    note("claude stream", lambda: [e.model_dump() for e in kit.claude.messages.create(**_asking(), stream=True)])
    note("bare", lambda: _read(kit.web.post(f"{kit.url}/v1/chat/completions", json=_bare_body())))
    note("bare stream", lambda: _read(kit.requests.post(f"{kit.url}/v1/messages", json={**_asking(), "stream": True})))
    note("requests", lambda: _read(kit.requests.get(f"{kit.url}/json", headers={"x-api-key": SECRET})))
    note("requests sent", lambda: _read(kit.requests.post(f"{kit.url}/form", data=iter([b"one", b"two"]))))
    note("requests file", lambda: _read(kit.requests.post(f"{kit.url}/form", data=io.BytesIO(b"z" * 70_000))))
    note("requests refused", lambda: kit.requests.get("http://127.0.0.1:9/"))
    note("requests parts", lambda: _parts(kit))
    note("urllib3", lambda: _pooled(kit))
    note("urllib3 left", lambda: _left_open(kit, "/parts"))
    note("urllib3 closed", lambda: _left_open(kit, "/json"))
    note("proxied", lambda: kit.proxied.request("GET", "https://nowhere.test/", retries=False))
    note("websocket", lambda: _websocket(kit))
    note("described", lambda: llm_request(model="m", provider="p", input={"q": 1}, call=lambda: {"a": 2}))
    note("described badly", lambda: llm_request(model="m", input={"q": 1}, call=lambda: refuse.__wrapped__(8)))
    note("state", lambda: record_state_change(key="step", before=1, after={"two": 2}))
    note("output", lambda: set_output({"done": True}))
    note("kept", lambda: keep("because"))
    note("nested", _nested)
    note("spawned", _spawned)
    note("async", lambda: kit.loop.run_until_complete(_async(kit)))


def _left(stream: Any) -> Any:
    with stream:
        return next(iter(stream)).model_dump()


def _failing(kit: Kit, status: int, call: Callable[[], Any]) -> Any:
    kit.server.faults.append(sys.modules["openai_server"].Fault(status=status, headers={"retry-after-ms": "1"}))
    return call()


def _tool_messages() -> list[Any]:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Oslo"}'}},
        {"id": "c2", "type": "function", "function": {"name": "unknown", "arguments": "{}"}},
    ]
    return [
        *user("go"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": '{"city": "Oslo"}'},
        {"role": "tool", "tool_call_id": "c2", "content": "text"},
    ]


def _read(response: Any) -> list[Any]:
    return [response.status_code, response.text, type(response).__module__, response.headers.get("content-type")]


def _asking() -> dict[str, Any]:
    return {"model": "claude-9", "max_tokens": 9, "messages": user("hi")}


def _bare_body() -> dict[str, Any]:
    return {"model": "m", "messages": user("bare")}


def _parts(kit: Kit) -> list[Any]:
    with kit.requests.get(f"{kit.url}/parts", stream=True) as response:
        return [response.status_code, *(part.decode() for part in response.iter_content(2))]


def _pooled(kit: Kit) -> list[Any]:
    response = kit.pools.request("GET", f"{kit.url}/json")
    return [response.status, response.data.decode()]


def _left_open(kit: Kit, path: str) -> list[Any]:
    response = kit.pools.request("GET", kit.url + path, preload_content=False)
    first = response.read(2)
    response.close()
    return [response.status, first.decode()]


def _websocket(kit: Kit) -> str:
    with websockets.sync.client.connect(kit.sockets_url, proxy=None) as connection:
        connection.send("hello")
        return str(connection.recv())


def _streamed(kit: Kit) -> list[Any]:
    with kit.web.stream("GET", f"{kit.url}/json") as response:
        return [response.status_code, b"".join(response.iter_bytes(4)).decode()]


def _stepped(steps: Any) -> list[Any]:
    first = next(steps)
    steps.close()
    return [first]


def _spawned() -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(lookup("thread")))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(lookup, "job")
        found.append(job.result())
    job.add_done_callback(lambda done: found.append([done.result(), lookup("done")]))
    return found


def _nested() -> Any:
    with record("inner") as session:
        session.set_input("in")
        session.record_state_change(key="k", before=0, after=1)
        answer = lookup("Bern")["city"]
        session.set_output(answer)
    return answer


async def _async(kit: Kit) -> list[Any]:
    found: list[Any] = []

    async def note(name: str, call: Callable[[], Any]) -> None:
        try:
            found.append([name, plain(await call())])
        except Exception as error:
            found.append([name, *described(error)])

    async def stream() -> Any:
        chunks = await kit.amodel.chat.completions.create(model="m", messages=user("a b"), stream=True)
        return [chunk.model_dump() async for chunk in chunks]

    async def left() -> Any:
        async with kit.aweb.stream("GET", f"{kit.url}/json") as response:
            return response.status_code

    async def items() -> list[int]:
        return [item async for item in acounted(3)]

    async def stepped() -> list[int]:
        steps = acounted(3)
        first = await anext(steps)
        await steps.aclose()
        return [first]

    async def described_call() -> int:
        return 5

    async def together() -> list[Any]:
        return list(await asyncio.gather(alookup("a"), alookup("b")))

    async def called_back() -> Any:
        loop = asyncio.get_running_loop()
        soon, later, unsafe = loop.create_future(), loop.create_future(), loop.create_future()
        loop.call_soon(lambda: soon.set_result(lookup("soon")))
        loop.call_later(0, lambda: later.set_result(lookup("later")))
        loop.call_soon_threadsafe(lambda: unsafe.set_result(lookup("unsafe")))
        held = contextvars.copy_context()
        return [await soon, await later, await unsafe, await loop.create_task(alookup("held"), context=held)]

    async def threaded() -> Any:
        return [await asyncio.to_thread(lookup, "thread"), await anyio.to_thread.run_sync(lookup, "anyio")]

    async def cancelled() -> Any:
        task = asyncio.ensure_future(alookup("c"))
        await asyncio.sleep(0)
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    async def upload() -> Any:
        async def parts() -> Any:
            yield b"one"
            yield b"two"

        return _read(await kit.aweb.post(f"{kit.url}/form", content=parts(), headers=LENGTH))

    async def claude() -> Any:
        events = await kit.aclaude.messages.create(**_asking(), stream=True)
        return [event.model_dump() async for event in events]

    messages: Any = user("async")
    await note("chat", lambda: kit.amodel.chat.completions.create(model="m", messages=messages))
    await note("stream", stream)
    await note("claude", claude)
    await note("aiohttp", lambda: _aiohttp(kit))
    await note("tool", lambda: alookup("Oslo"))
    await note("refused", arefuse)
    await note("later", lambda: later("Rome"))
    await note("items", items)
    await note("stepped", stepped)
    await note("get", lambda: _aget(kit))
    await note("left", left)
    await note("large", lambda: _alarge(kit))
    await note("upload", upload)
    await note("described", lambda: allm_request(model="m", input="q", call=described_call))
    await note("together", together)
    await note("called back", called_back)
    await note("threaded", threaded)
    await note("cancelled", cancelled)
    return found


async def _aiohttp(kit: Kit) -> list[Any]:
    found: list[Any] = []

    async def parts() -> Any:
        yield b"one"
        yield b"two"

    async with aiohttp.ClientSession() as session:
        for method, path, data in (
            ("GET", "/json", None),
            ("GET", "/missing", None),
            ("POST", "/form", b"y" * 70_000),
            ("POST", "/form", parts()),
        ):
            async with session.request(method, kit.url + path, data=data) as response:
                found.append([response.status, await response.text(), type(response.content).__name__])
        async with session.get(f"{kit.url}/parts") as response:
            found.append([await response.content.read(2), await response.content.readuntil(b"e")])
        async with session.get(f"{kit.url}/parts") as response:
            found.append(b"".join([part async for part, _ in response.content.iter_chunks()]))
        response = await session.get(f"{kit.url}/json")
        response.close()
        try:
            await session.get("http://127.0.0.1:9/")
        except aiohttp.ClientError as error:
            found.append(described(error))
        async with session.ws_connect(kit.sockets_url) as connection:
            await connection.send_str("hello")
            found.append(await connection.receive_str())
    return found


async def _aget(kit: Kit) -> list[Any]:
    return _read(await kit.aweb.get(f"{kit.url}/json"))


async def _alarge(kit: Kit) -> list[Any]:
    return _read(await kit.aweb.post(f"{kit.url}/form", content=b"y" * 70_000))


def foreign_spans(tracer: trace.Tracer) -> None:
    """Spans of other instrumentations: a server's root, an agent, a model call with content, an internal one."""
    chat = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "ho"}]}]),
    }
    with tracer.start_as_current_span("GET /", kind=trace.SpanKind.SERVER):
        with tracer.start_as_current_span("invoke_agent a"), tracer.start_as_current_span("chat", attributes=chat):
            pass
        with tracer.start_as_current_span(
            "execute_tool",
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "weather",
                "gen_ai.tool.call.arguments": '{"city": "Oslo"}',
                "gen_ai.tool.call.result": "7",
            },
        ):
            pass
        with contextlib.suppress(KeyError), tracer.start_as_current_span("work"):
            raise KeyError("work")
        lookup("Paris")


# --- one run ----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A result as something that can be compared and printed."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return json.loads(json.dumps(value, default=repr))


def described(error: BaseException) -> list[str]:
    kind = type(error)
    return ["raised", f"{kind.__module__}.{kind.__qualname__}", str(error)]


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, entry: logging.LogRecord) -> None:
        self.lines.append(entry.getMessage())


class Ran:
    """What a run gave: the program's own results, what the server saw, what was said and written."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.requests: list[list[Any]] = []
        self.lines: list[str] = []
        self.leaks: list[str] = []
        self.events: dict[str, int] = {}
        self.losses: dict[str, int] = {}
        self.unplaced: dict[str, int] = {}
        self.broken: list[str] = []
        self.bundles = 0

    def note(self, name: str, call: Callable[[], Any]) -> None:
        try:
            self.results.append([name, plain(call())])
        except Exception as error:
            self.results.append([name, *described(error)])


def run(kit: Kit, folder: Path, **options: Any) -> Ran:
    """`run_here` in a context of its own: what a fault leaves current ends with it."""
    return contextvars.Context().run(functools.partial(run_here, kit, folder, **options))


def run_here(
    kit: Kit,
    folder: Path,
    *,
    recorded: bool,
    function: FunctionType | None = None,
    error: str = "RuntimeError",
    around: Any = None,
) -> Ran:
    """The whole program once: instrument, a run of its own, spans of others, the end of the process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recorder._said.clear()
    os.environ["OTEL_SFTRACE_DIR"] = str(folder / "traces")
    os.environ["OTEL_SFTRACE_QUIET"] = "true"
    trace._TRACER_PROVIDER, trace._TRACER_PROVIDER_SET_ONCE = None, Once()
    recorder.lineage.forget_place()
    guard.forget_connections()
    kit.server.requests.clear()
    kit.server.faults.clear()
    kit.unraisable.clear()
    ran, log = Ran(), Log()
    logger = logging.getLogger("sftrace_otel")
    logger.addHandler(log)
    logger.propagate = False
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda found: kit.unraisable.append(f"{found.err_msg} {found.object!r} {found.exc_value!r}")
    threading.excepthook = lambda found: kit.unraisable.append(f"thread {found.exc_value!r}")
    errors, sys.stderr = sys.stderr, io.StringIO()
    provider = TracerProvider(shutdown_on_exit=False)
    trace.set_tracer_provider(provider)
    try:
        with fault(function, error), around or contextlib.nullcontext():
            if recorded:
                _recorded(kit, ran, folder, provider)
            else:
                _bare(kit, ran, provider)
            if trace.get_current_span() is not trace.INVALID_SPAN or otel_context.get_current():
                ran.leaks.append("a span or context of the run is current after it")
            for holder in list(recorder._recorders.values()):
                ran.unplaced.update(holder._unplaced)
                for run_ in [holder._process]:
                    if run_ is not None:
                        ran.losses.update(run_.losses)
            gc.collect()
    finally:
        printed, sys.stderr = sys.stderr.getvalue(), errors
        sys.unraisablehook, threading.excepthook = hooks
        logger.removeHandler(log)
        _clean_up(provider)
    ran.lines = log.lines
    ran.leaks += kit.unraisable
    ran.leaks += [line for line in printed.splitlines() if "sftrace" in line.lower() and line.startswith("Traceback")]
    ran.requests = [[item.method, item.path, len(item.body)] for item in kit.server.requests]
    _read_bundles(ran, folder)
    return ran


def _recorded(kit: Kit, ran: Ran, folder: Path, provider: TracerProvider) -> None:
    ran.note("instrument", instrument)
    exporter: list[Any] = []
    ran.note("exporter", lambda: exporter.append(SftraceExporter()))
    if exporter:
        provider.add_span_processor(SimpleSpanProcessor(exporter[0]))
    ran.note("input", lambda: set_input("asked"))
    ran.note("block", lambda: _block(kit, ran, folder))
    ran.note("spans", lambda: foreign_spans(trace.get_tracer("other")))
    ran.note("lookup", lambda: lookup("outside of any run"))
    ran.note("shutdown", provider.shutdown)
    ran.note("uninstrument", uninstrument)
    ran.note("exit", recorder.close_all)


def _bare(kit: Kit, ran: Ran, provider: TracerProvider) -> None:
    for name in ("instrument", "exporter", "input"):
        ran.note(name, lambda: None)
    ran.note("block", lambda: _bare_block(kit, ran))
    ran.note("spans", lambda: foreign_spans(trace.get_tracer("other")))
    ran.note("lookup", lambda: lookup("outside of any run"))
    for name in ("shutdown", "uninstrument", "exit"):
        ran.note(name, lambda: None)


def _block(kit: Kit, ran: Ran, folder: Path) -> None:
    with record("agent", output=folder / "run.sftrace", run_input={"question": 1}) as session:
        session.set_input({"question": 2})
        agent(kit, ran.note)
        session.keep("wanted")
        session.set_output(["result"])
        raise KeyError("the end of the run")


def _bare_block(kit: Kit, ran: Ran) -> None:
    agent(kit, ran.note)
    raise KeyError("the end of the run")


def _clean_up(provider: TracerProvider) -> None:
    """Whatever the fault left behind is taken away, without faults."""
    for step in (uninstrument, instrumentation.uninstall, recorder.release, provider.shutdown):
        with contextlib.suppress(Exception):
            step()
    sftrace_otel.otel.provider._attached.clear()
    recorder._recorders.clear()
    recorder._active = None
    logging.getLogger("sftrace_otel").propagate = True


def _read_bundles(ran: Ran, folder: Path) -> None:
    for path in sorted(folder.rglob("*.sftrace")):
        if path.name.startswith("."):
            continue
        ran.bundles += 1
        report = read.validate_bundle(path, strict=False, verify_integrity=True)
        if report.exit_code != 0:
            ran.broken.append(f"{path.name}: {report.issues}"[:400])
            continue
        for event in read.iter_events(path):
            key = f"{event.type} {getattr(event, 'name', getattr(event, 'model', ''))} {event.status}"
            ran.events[key] = ran.events.get(key, 0) + 1
        document = read.open_bundle(path).run
        for name, count in (document.get("losses") or {}).items():
            ran.losses[name] = ran.losses.get(name, 0) + count


def differing(one: Any, two: Any) -> str:
    """Where two results differ, shortly."""
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return "; ".join(differing(a, b) for a, b in zip(one, two, strict=True) if a != b)
    return f"{str(one)[:200]} instead of {str(two)[:200]}"


def verdict(ran: Ran, want: Ran, whole: Ran) -> list[str]:
    """What is wrong with a run under a fault. `want`: the run without us; `whole`: the recorded one without a fault."""
    wrong = []
    for got, wanted in zip(ran.results, want.results, strict=False):
        if got != wanted:
            wrong.append(f"result: {wanted[0]}: {differing(got, wanted)}"[:1000])
    if len(ran.results) != len(want.results):
        wrong.append(f"{len(ran.results)} results instead of {len(want.results)}")
    if ran.requests != want.requests:
        wrong.append(f"the server saw {len(ran.requests)} requests instead of {len(want.requests)}, or others")
    wrong += [f"left behind: {leak[:300]}" for leak in ran.leaks]
    twice = {line for line in ran.lines if ran.lines.count(line) > 1}
    wrong += [f"logged {ran.lines.count(line)} times: {line}" for line in sorted(twice)]
    wrong += [f"broken bundle: {item}" for item in ran.broken]
    lost = {
        key: count - ran.events.get(key, 0) for key, count in whole.events.items() if ran.events.get(key, 0) < count
    }
    counted = ran.unplaced or any(count > whole.losses.get(name, 0) for name, count in ran.losses.items())
    if lost and not counted and not ran.lines:
        wrong.append(f"lost without a word: {str(lost)[:300]}")
    elif lost and not counted and ran.bundles == whole.bundles:
        wrong.append(f"lost and not counted: {str(lost)[:300]}")
    return wrong


# --- the program ------------------------------------------------------------------------------------------------------


def load_server() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "servers" / "openai_server.py"
    spec = importlib.util.spec_from_file_location("openai_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["openai_server"] = module
    spec.loader.exec_module(module)
    module._Handler.disable_nagle_algorithm = True  # heads and bodies go out apart; waiting for an ACK takes 40 ms
    return module


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def chosen(names: list[str], count: int) -> list[str]:
    """`count` of `names`, the same ones each time."""
    return sorted(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:count])


def main(request: dict[str, Any]) -> None:
    folder = Path(request["folder"])
    faulthandler.enable()
    warnings.simplefilter("ignore")
    with load_server().OpenAIServer() as server:
        kit = Kit(server)
        want = run(kit, folder, recorded=False)
        again = run(kit, folder, recorded=False)
        for one, two in zip(want.results, again.results, strict=True):
            assert one == two, f"the agent must do the same twice: {differing(one, two)}"
        run(kit, folder, recorded=True)
        seen: set[CodeType] = set()
        run(kit, folder, recorded=True, around=reached(seen))
        disk = Disk()
        whole = run(kit, folder, recorded=True, around=disk)
        gc.freeze()
        every = functions()
        names = [name for name, function in every.items() if function.__code__ in seen]
        say(kind="whole", wrong=verdict(whole, want, whole), events=sum(whole.events.values()), lines=whole.lines,
            functions=len(every), reached=names, disk=disk.count)  # fmt: skip
        if request.get("silent"):
            recorder.Recorder.fault = lambda *_: None  # type: ignore[assignment, method-assign]

        def tried(kind: str, **options: Any) -> None:
            INJECTED.hits = 0
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            ran = run(
                kit,
                folder,
                recorded=True,
                **{key: options[key] for key in ("function", "error", "around") if key in options},
            )
            faulthandler.cancel_dump_traceback_later()
            say(kind=kind, name=options["name"], error=options.get("error"), hits=INJECTED.hits,
                wrong=verdict(ran, want, whole), lines=ran.lines, losses=ran.losses)  # fmt: skip

        share, shares = request.get("share", [0, 1])
        for error, count in request.get("errors", {}).items():
            usual = [name for name in names if name not in request.get("leave_out", ())]
            if request.get("functions") or count:
                mine = (request.get("functions") or chosen(usual, count))[share::shares]
            else:  # by its name: what one process reached another one may not have
                mine = [name for name in usual if zlib.crc32(name.encode()) % shares == share]
            for name in mine:
                tried("fault", name=name, function=every[name], error=error)
        points = request.get("disk", 0)
        for number in range(points)[share::shares]:
            first = 1 + number * disk.count // points
            once, code = number % 2 == 1, (errno.ENOSPC, errno.EIO)[number % 4 // 2]
            tried(
                "disk",
                name=f"{'request' if once else 'from request'} {first}",
                around=Disk(first, once=once, code=code),
            )
        kit.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
