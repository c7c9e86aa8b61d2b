# SPDX-License-Identifier: Apache-2.0
"""MCP sessions, mcp 1.x and 2.x: each request recorded once, and answered under replay with no server at all."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import mcp
import mcp.types as types
import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared import exceptions

from sftrace_otel import instrumentation, trace_tool
from sftrace_otel.bundle.read import validate_bundle
from sftrace_otel.errors import ReplayError, ReplayMismatchError, ReplayPolicyError
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.instrumentation import mcp as boundary
from sftrace_otel.recorder import Recorder
from sftrace_otel.replay import ReplaySession

Run = Callable[..., Any]

SERVER = Path(__file__).resolve().parent.parent / "servers" / "mcp_server.py"
NEW = hasattr(mcp, "Client")
Refusal: Any = exceptions.MCPError if NEW else exceptions.McpError


@pytest.fixture
def things(load_server: Run) -> Any:
    module = load_server("mcp_server")
    module.ran.clear()
    module.waiting.clear()
    return module


class Stdio:
    """A server process for each session. `ran()` are the tools that ran in any of them."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "ran.txt"
        self.command = sys.executable

    def stop(self) -> None:
        self.command = "/nowhere/to/be/found"

    def ran(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def connect(self) -> Any:
        return stdio_client(StdioServerParameters(command=self.command, args=[str(SERVER), str(self.log)]))


class Http:
    """A server in a thread of this process, until it is stopped."""

    def __init__(self, things: Any, kind: str) -> None:
        self.things = things
        self._serving = things.serving(kind)
        self._client = sse_client if kind == "sse" else streamable_http_client
        self.url = self._serving.__enter__()
        self.up = True

    def stop(self) -> None:
        if self.up:
            self.up = False
            self._serving.__exit__(None, None, None)

    def ran(self) -> list[str]:
        return list(self.things.ran)

    def connect(self) -> Any:
        return self._client(self.url)


@pytest.fixture(params=["stdio", "streamable", "sse"])
def server(request: pytest.FixtureRequest, tmp_path: Path, things: Any) -> Iterator[Any]:
    made = Stdio(tmp_path) if request.param == "stdio" else Http(things, request.param)
    yield made
    made.stop()


def session_of(server: Any, use: Run, **options: Any) -> Run:
    """A program that opens a session, uses it, and gives what that gave."""

    async def talk() -> Any:
        async with server.connect() as streams, ClientSession(*streams[:2], **options) as session:
            await session.initialize()
            return await use(session)

    return lambda: asyncio.run(talk())


def names(bundle: Any) -> list[str]:
    return [event.name for event in bundle.events if event.type == "tool_call"]


def wire(result: Any) -> Any:
    return result.model_dump(by_alias=True, mode="json", exclude_unset=True)


@pytest.fixture
def exactly(recorded: Run, frozen: Run, read: Run, bundle_path: Path) -> Run:
    """`exactly(server, use)` records `use` of a session, stops the server and replays it: the same, or it fails."""

    def run(server: Any, use: Run, **options: Any) -> Any:
        program = session_of(server, use, **options)

        want = recorded(lambda: _plain(program()))
        foreign = Path(sys.executable).with_name("stepfork")
        if foreign.exists() and server.__class__ is Stdio:
            assert subprocess.run([foreign, "validate", bundle_path, "--verify-integrity"], check=False).returncode == 0
        assert validate_bundle(bundle_path, strict=True, verify_integrity=True).issues == ()
        assert read().run["verdict"]["offline"] is True
        ran = server.ran()
        server.stop()
        assert frozen(lambda: _plain(program())) == want
        assert server.ran() == ran
        return want

    return run


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return [type(value).__name__, wire(value)] if hasattr(value, "model_dump") else value


@pytest.fixture
def web(things: Any) -> Iterator[Any]:
    made = Http(things, "streamable")
    yield made
    made.stop()


async def _refused(pending: Any) -> Any:
    try:
        await pending
    except Refusal as error:
        return [type(error).__name__, error.error.code, error.error.message, error.error.data, str(error)]
    return "not refused"


# --- answers ----------------------------------------------------------------------------------------------------------


async def everything(session: Any) -> Any:
    tools = await session.list_tools()
    added = await session.call_tool("add", {"a": 2, "b": 3})
    counted = await session.call_tool("count")
    image = await session.call_tool("picture")
    failed = await session.call_tool("fail", {"why": "no luck"})
    uri: Any = "note://one" if NEW else types.AnyUrl("note://one")
    resource = await session.read_resource(uri)
    prompt = await session.get_prompt("hello", {"name": "you"})
    return [tools, added, counted, image, failed, resource, prompt]


def test_a_session_replays_without_its_server(server: Any, exactly: Run, read: Run) -> None:
    _, added, counted, image, failed, *_ = exactly(server, everything)
    assert [item[0] for item in (added, counted, image, failed)] == ["CallToolResult"] * 4
    assert added[1]["structuredContent"] == {"result": 5}
    assert image[1]["content"][0]["mimeType"] == "image/png"
    assert failed[1]["isError"] is True
    assert server.ran() == ["add", "count", "picture", "fail"]
    assert names(read()) == [
        "mcp initialize", "mcp tools/list", "add", "count", "picture", "fail", "mcp resources/read", "mcp prompts/get",
    ]  # fmt: skip


def test_what_a_tool_reports_as_its_failure_is_a_result_and_an_error(web: Any, exactly: Run, read: Run) -> None:
    async def use(session: Any) -> Any:
        return await session.call_tool("fail", {"why": "no luck"})

    exactly(web, use)
    *_, result, error, _ = read().events
    assert (result.type, result.status, result.output["isError"]) == ("tool_result", "error", True)
    assert (error.type, error.error_type) == ("error", "tool_error")
    assert "no luck" in error.message


def test_a_protocol_error_is_the_sdks_own(web: Any, exactly: Run, read: Run) -> None:
    async def use(session: Any) -> Any:
        uri: Any = "note://none" if NEW else types.AnyUrl("note://none")
        return [await _refused(session.read_resource(uri)), await _refused(session.get_prompt("none"))]

    first, second = exactly(web, use)
    assert first[0] == second[0] == Refusal.__name__
    results = [event for event in read().events if event.type == "tool_result" and event.status == "error"]
    assert [event.output["error"]["code"] for event in results] == [first[1], second[1]]


def test_a_request_that_took_too_long_does_so_again_at_once(web: Any, exactly: Run) -> None:
    limit: Any = 0.2 if NEW else timedelta(seconds=0.2)

    async def use(session: Any) -> Any:
        return await _refused(session.call_tool("wait", read_timeout_seconds=limit))

    assert "imed out" in exactly(web, use)[2]


def test_a_cancelled_call_is_cancelled_again(web: Any, exactly: Run, read: Run, things: Any) -> None:
    async def use(session: Any) -> Any:
        call = asyncio.ensure_future(session.call_tool("wait"))
        await asyncio.to_thread(things.waiting.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return (await session.call_tool("add", {"a": 1, "b": 1})).content[0].text

    assert exactly(web, use) == "2"
    assert [row["end"] for row in read().calls if row["kind"] == "tool"][1] == "cancelled"


def test_calls_in_flight_on_one_session_get_their_own_answers(web: Any, exactly: Run) -> None:
    async def use(session: Any) -> Any:
        return await asyncio.gather(*(session.call_tool("count") for _ in range(5)))

    answers = exactly(web, use)
    assert len({answer[1]["structuredContent"]["count"] for answer in answers}) == 5


def test_two_sessions_at_once(web: Any, recorded: Run, frozen: Run) -> None:
    async def use(session: Any) -> Any:
        return _plain(await session.call_tool("count"))

    async def talk() -> Any:
        async def one() -> Any:
            async with web.connect() as streams, ClientSession(*streams[:2]) as session:
                await session.initialize()
                return await use(session)

        return await asyncio.gather(one(), one(), one())

    want = recorded(lambda: asyncio.run(talk()))
    web.stop()
    assert frozen(lambda: asyncio.run(talk())) == want


def test_progress_is_told_again(web: Any, exactly: Run, read: Run) -> None:
    async def use(session: Any) -> Any:
        told: list[Any] = []

        async def progress(*what: Any) -> None:
            told.append(list(what))

        result = await session.call_tool("slow", {}, progress_callback=progress)
        return [told, result.content[0].text]

    assert exactly(web, use) == [[[1.0, 2.0, "half"], [2.0, 2.0, "whole"]], "done"]
    assert "progressToken" not in str(read().events)


def test_what_the_server_asks_back_is_part_of_the_call(web: Any, exactly: Run, read: Run) -> None:
    @trace_tool
    def model(question: str) -> str:
        return question[::-1]

    async def sample(context: Any, params: Any) -> Any:
        content: Any = params.messages[0].content
        text = types.TextContent(type="text", text=model(content.text))
        return types.CreateMessageResult(role="assistant", content=text, model="m")

    async def use(session: Any) -> Any:
        return (await session.call_tool("ask", {"question": "abc"})).content[0].text

    assert exactly(web, use, sampling_callback=sample) == '"cba"'
    calls = {event.name: event for event in read().events if event.type == "tool_call"}
    assert calls["model"].parent_id == calls["ask"].id


# --- identity ---------------------------------------------------------------------------------------------------------


def _with_meta(**meta: Any) -> Run:
    async def use(session: Any) -> Any:
        return (await session.call_tool("add", {"a": 1, "b": 2}, meta=meta)).content[0].text

    return use


def test_trace_context_is_no_part_of_a_request(web: Any, recorded: Run, frozen: Run, read: Run) -> None:
    recorded(session_of(web, _with_meta(traceparent=f"00-{'1' * 32}-{'2' * 16}-01", tenant="a")))
    web.stop()
    assert frozen(session_of(web, _with_meta(traceparent=f"00-{'3' * 32}-{'4' * 16}-01", tenant="a"))) == "3"
    [call] = [event for event in read().events if event.type == "tool_call" and event.name == "add"]
    assert call.input == {"arguments": {"a": 1, "b": 2}, "_meta": {"tenant": "a"}}


@pytest.mark.parametrize("meta", [{"tenant": "b"}, {}])
def test_other_metadata_is(web: Any, recorded: Run, frozen: Run, meta: dict[str, str]) -> None:
    recorded(session_of(web, _with_meta(tenant="a")))
    with pytest.raises(ReplayMismatchError):
        _unwrapped(frozen, session_of(web, _with_meta(**meta)))


def _unwrapped(run: Run, program: Run) -> Any:
    """`run(program)`; an error in a group of one is that error."""
    try:
        return run(program)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


def test_another_request_stops_the_replay(web: Any, recorded: Run, frozen: Run, things: Any) -> None:
    def use(b: int) -> Run:
        async def add(session: Any) -> Any:
            return await session.call_tool("add", {"a": 1, "b": b})

        return add

    recorded(lambda: _plain(session_of(web, use(2))()))
    with pytest.raises(ReplayMismatchError, match="/b"):
        _unwrapped(frozen, session_of(web, use(3)))
    assert things.ran == ["add"]


def test_secrets_reach_no_disk(web: Any, recorded: Run, frozen: Run, bundle_path: Path) -> None:
    key = "sk-proj-" + "a1B2" * 10

    async def use(session: Any) -> Any:
        return (await session.call_tool("fail", {"why": f"key {key}"})).content[0].text

    assert key in recorded(session_of(web, use))
    assert not [path for path in bundle_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert "[REDACTED]" in frozen(session_of(web, use))


@pytest.mark.parametrize("output", [3, {"sum": 3}])
def test_an_answer_of_another_form_is_refused(
    output: Any, web: Any, recorded: Run, read: Run, bundle_path: Path, tmp_path: Path
) -> None:
    async def use(session: Any) -> Any:
        return (await session.call_tool("add", {"a": 1, "b": 2})).content[0].text

    program = session_of(web, use)
    recorded(program)
    changed = tmp_path / "changed.sftrace"
    [answer] = [event for event in read().events if event.type == "tool_result" and event.name == "add"]
    override = OverrideSpec(event_id=answer.id, output=output)
    fork_trace(bundle_path, ForkPoint(event_id=answer.id), overrides=[override], output_path=changed)
    with pytest.raises(ReplayError, match="form"), ReplaySession.from_trace(changed):
        _unwrapped(lambda run: run(), program)


# --- spans ------------------------------------------------------------------------------------------------------------


def test_spans_have_the_attributes_of_the_conventions(web: Any, recorded: Run, spans: Run) -> None:
    async def use(session: Any) -> Any:
        await session.call_tool("fail", {"why": "no luck"})
        await session.get_prompt("hello", {"name": "you"})
        return (await _refused(session.get_prompt("none")))[1]

    code = recorded(session_of(web, use))
    mine = {span.name: span for span in spans() if span.instrumentation_scope.name == "sftrace_otel.mcp"}
    assert sorted(mine) == ["execute_tool fail", "initialize", "prompts/get"]
    call = mine["execute_tool fail"]
    assert call.kind.name == "CLIENT" and call.status.status_code.name == "ERROR"
    said = {key: call.attributes[key] for key in call.attributes if not key.startswith("sftrace.")}
    said.pop("mcp.protocol.version", None)
    assert said == {
        "mcp.method.name": "tools/call",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "fail",
        "error.type": "tool_error",
    }
    assert {"sftrace.run.id", "sftrace.event.id", "sftrace.input_hash", "sftrace.output_hash"} <= set(call.attributes)
    refused = mine["prompts/get"].attributes
    assert refused["error.type"] == refused["rpc.response.status_code"] == str(code)
    assert "no luck" not in str([span.to_json() for span in mine.values()])


# --- mcp 2.x alone ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not NEW, reason="mcp 1.x has no Client")
def test_the_client_of_2(web: Any, recorded: Run, frozen: Run, read: Run) -> None:
    async def talk() -> Any:
        async with mcp.Client(web.url) as client:
            return _plain([await client.list_tools(), await client.call_tool("count")])

    want = recorded(lambda: asyncio.run(talk()))
    web.stop()
    assert frozen(lambda: asyncio.run(talk())) == want
    assert names(read()) == ["mcp server/discover", "mcp tools/list", "count"]


@pytest.mark.skipif(not NEW, reason="mcp 1.x has no Client")
def test_what_a_server_in_this_process_calls_is_part_of_the_call(recorded: Run, frozen: Run, read: Run) -> None:
    from mcp.server.mcpserver import MCPServer

    ran = []

    @trace_tool
    def inner(x: int) -> int:
        ran.append(x)
        return x + 1

    server = MCPServer("here")

    @server.tool()
    def outer(x: int) -> int:
        return inner(x)

    async def talk() -> Any:
        async with mcp.Client(server) as client:
            return (await client.call_tool("outer", {"x": 1})).structured_content

    assert recorded(lambda: asyncio.run(talk())) == {"result": 2}
    assert frozen(lambda: asyncio.run(talk())) == {"result": 2}
    assert ran == [1]
    calls = {event.name: event for event in read().events if event.type == "tool_call"}
    assert calls["inner"].parent_id == calls["outer"].id


# --- patching ---------------------------------------------------------------------------------------------------------


def test_in_a_resumed_run_a_request_is_served_stubbed_or_stopped(
    web: Any, recorded: Run, bundle_path: Path, things: Any
) -> None:
    """Past the end it cannot go out: the session is connected to nothing."""

    async def once(session: Any) -> Any:
        return wire(await session.call_tool("add", {"a": 1, "b": 1}))

    async def twice(session: Any) -> Any:
        return [await once(session), wire(await session.call_tool("add", {"a": 2, "b": 3}))]

    want = recorded(session_of(web, once))
    web.stop()
    ran = web.ran()
    answer = {"content": [{"type": "text", "text": "a stub"}], "structuredContent": {"result": 7}}
    for policy, code in (("block", "blocked"), ("live", "policy")):
        replay = ReplaySession.from_trace(bundle_path, mode="resume", policies=[f"tool:add={policy}"])
        with pytest.raises(ReplayPolicyError) as caught, replay:
            session_of(web, twice)()
        assert caught.value.code == code
    with ReplaySession.from_trace(
        bundle_path, mode="resume", policies=[f"tool:add=stub:{json.dumps(answer)}"]
    ) as session:
        first, second = session_of(web, twice)()
    assert (first, second["content"][0]["text"]) == (want, "a stub")
    assert (session.report().exit_code, web.ran()) == (0, ran)


def test_twice_is_once_and_uninstall_restores() -> None:
    before = dict(vars(ClientSession))
    instrumentation.install()
    instrumentation.install()
    here = boundary.patched()
    assert len(here) == len(set(here)) and any("send_request" in name for name in here)
    instrumentation.uninstall()
    assert boundary.patched() == []
    assert dict(vars(ClientSession)) == before


@pytest.mark.parametrize("broken", ["prepare", "begin", "end", "describe_error"])
def test_a_fault_of_ours_leaves_the_session_alone(
    web: Any, recorded: Run, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(session: Any) -> Any:
        added = await session.call_tool("add", {"a": 2, "b": 3})
        uri: Any = "note://none" if NEW else types.AnyUrl("note://none")
        return [added.content[0].text, (await _refused(session.read_resource(uri)))[0]]

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ours")

    program = session_of(web, use)

    def run() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, broken, fail)
            return program()

    assert recorded(run) == ["5", Refusal.__name__]
