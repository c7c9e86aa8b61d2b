# SPDX-License-Identifier: Apache-2.0
"""Resume through every kind of client: what the fork holds is served, what comes after goes out or is stopped, and the
server counts what reaches it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests
from openai import AsyncOpenAI, OpenAI

from sftrace_otel import ReplayPolicyError, ReplaySession, llm_request, record, trace_tool
from sftrace_otel.analysis.lineage import lineage
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.errors import ReplayError, ReplayMismatchError, SettingsError, TraceStorageError
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.instrumentation.frameworks import again
from sftrace_otel.instrumentation.tools import Tool
from sftrace_otel.trace import Trace

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Run = Callable[..., Any]
RAN: list[Any] = []


@pytest.fixture(autouse=True)
def _none_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    RAN.clear()
    monkeypatch.setenv("OTEL_SFTRACE_QUIET", "true")


@trace_tool
def lookup(city: str) -> str:
    RAN.append(city)
    return f"{city}: {len(RAN)} degrees"


@trace_tool
async def alookup(city: str) -> str:
    RAN.append(city)
    await asyncio.sleep(0)
    return f"{city}: {len(RAN)} degrees"


@trace_tool
def pages(server: str, path: str) -> Any:
    RAN.append(path)
    return httpx.get(server + path).json()


def body(text: str, stream: bool = False) -> dict[str, Any]:
    return {"model": "gpt-5", "messages": [{"role": "user", "content": text}], "stream": stream}


def said(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


def forked(bundle: Path, step: int, **overrides: Any) -> Path:
    out = bundle.with_name("fork.sftrace")
    specs = [OverrideSpec(step=int(at[1:]), output=value) for at, value in overrides.items()]
    fork_trace(bundle, ForkPoint(step=step), overrides=specs, output_path=out)
    assert validate_bundle(out, verify_integrity=True).exit_code == 0
    return out


def step_of(bundle: Path, kind: str, nth: int = 0) -> int:
    """The step of the nth event of a type."""
    return [event.step for event in open_bundle(bundle).events if event.type == kind][nth]


def resumed(bundle: Path, program: Callable[[], Any], code: int = 0, **options: Any) -> tuple[Any, Any, Path]:
    """(result, report, the new bundle), which is valid and replays."""
    with ReplaySession.from_trace(bundle, mode="resume", **options) as session:
        result = program()
        session.verify_complete()
    report = session.report()
    assert report.exit_code == code, report.text()
    assert session.recorded is not None
    check = validate_bundle(session.recorded, verify_integrity=True)
    assert check.exit_code == 0, check.issues
    with ReplaySession.from_trace(session.recorded) as again:
        assert program() == result
        again.verify_complete()
    return result, report, session.recorded


# --- one question through each kind of client -------------------------------------------------------------------------


def by_sdk(server: Any, text: str) -> str:
    with OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        return client.chat.completions.create(**body(text)).choices[0].message.content  # type: ignore[no-any-return]


def by_stream(server: Any, text: str) -> str:
    with OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**body(text, stream=True)))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def by_async_sdk(server: Any, text: str) -> str:
    async def ask() -> str:
        async with AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
            return (await client.chat.completions.create(**body(text))).choices[0].message.content  # type: ignore[no-any-return]

    return asyncio.run(ask())


def by_async_stream(server: Any, text: str) -> str:
    async def ask() -> str:
        async with AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(**body(text, stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    return asyncio.run(ask())


def by_httpx(server: Any, text: str) -> str:
    return said(httpx.post(f"{server.base_url}/chat/completions", json=body(text)).json())


def by_async_httpx(server: Any, text: str) -> str:
    async def ask() -> str:
        async with httpx.AsyncClient() as client:
            return said((await client.post(f"{server.base_url}/chat/completions", json=body(text))).json())

    return asyncio.run(ask())


def by_httpx2(server: Any, text: str) -> str:
    return said(httpx2.post(f"{server.base_url}/chat/completions", json=body(text)).json())


def by_requests(server: Any, text: str) -> str:
    return said(requests.post(f"{server.base_url}/chat/completions", json=body(text), timeout=20).json())


def by_aiohttp(server: Any, text: str) -> str:
    raw = json.dumps(body(text)).encode()

    async def parts() -> AsyncIterator[bytes]:
        yield raw[:9]
        yield raw[9:]

    async def ask() -> str:
        headers = {"content-type": "application/json", "content-length": str(len(raw))}
        url = f"{server.base_url}/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=parts(), headers=headers) as answer:
            return said(await answer.json())

    return asyncio.run(ask())


def by_hand(server: Any, text: str) -> str:
    return llm_request(model="gpt-5", provider="openai", input={"q": text}, call=lambda: by_sdk(server, text))


def _each(first: Any, *others: Any) -> list[Any]:
    """The first always, the others in the full run."""
    return [first, *(pytest.param(other, marks=pytest.mark.full) for other in others if other is not first)]


WAYS = (
    by_sdk, by_stream, by_async_sdk, by_async_stream, by_httpx, by_async_httpx, by_httpx2, by_requests, by_aiohttp,
    by_hand,
)  # fmt: skip


@pytest.mark.parametrize("ask", WAYS)
def test_after_the_fork_the_model_is_asked_and_before_it_is_not(
    ask: Run, recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    def program() -> str:
        city = ask(openai_server, "where")
        return ask(openai_server, f"weather: {lookup(city)}")  # type: ignore[no-any-return]

    recorded(program)
    fork = forked(bundle_path, at := step_of(bundle_path, "tool_result"), **{f"s{at}": "snow"})
    reached = len(openai_server.requests)
    result, report, made = resumed(fork, program)
    assert result == "1: weather: snow"
    assert [b"snow" in one.body for one in openai_server.requests[reached:]] == [True]
    assert RAN == ["1: where"], "once, when it was recorded"
    assert report.served == 2 and report.live == (2 if ask is by_hand else 1)
    assert open_bundle(made).provenance["resumed"]["went_live"] in {
        event.id for event in open_bundle(made).events if event.type == "llm_request"
    }


@pytest.mark.parametrize("ask", _each(by_async_sdk, *WAYS))
def test_a_model_that_is_blocked_is_not_asked(ask: Run, recorded: Run, bundle_path: Path, openai_server: Any) -> None:
    def program() -> str:
        lookup("Oslo")
        return ask(openai_server, "where")  # type: ignore[no-any-return]

    recorded(program)
    reached = len(openai_server.requests)
    session = ReplaySession.from_trace(forked(bundle_path, 2), mode="resume", policies=["llm:openai/*=block"])
    with pytest.raises(ReplayPolicyError) as caught, session:
        program()
    assert (caught.value.code, len(openai_server.requests)) == ("blocked", reached)
    assert (session.report().exit_code, session.report().live) == (4, 0)
    assert session.recorded is not None and open_bundle(session.recorded).manifest.status == "failed"
    assert validate_bundle(session.recorded, verify_integrity=True).exit_code == 0


@pytest.mark.parametrize("ask", _each(by_async_stream, *WAYS))
def test_a_stub_speaks_through_every_client(ask: Run, recorded: Run, bundle_path: Path, openai_server: Any) -> None:
    def program() -> str:
        lookup("Oslo")
        return ask(openai_server, "where")  # type: ignore[no-any-return]

    recorded(program)
    reached = len(openai_server.requests)
    result, report, made = resumed(forked(bundle_path, 2), program, policies={"llm:*": 'stub:"a stub"'})
    assert (result, len(openai_server.requests)) == ("a stub", reached)
    assert (report.live, sum(report.stubbed.values())) == (0, 1)
    [event_id] = open_bundle(made).provenance["resumed"]["stubbed"]
    assert event_id in {event.id for event in open_bundle(made).events if event.type == "llm_request"}


@pytest.mark.parametrize("ask", _each(by_stream, *WAYS))
def test_a_call_that_was_in_flight_at_the_fork_is_made(
    ask: Run, recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    def program() -> str:
        lookup("Oslo")
        return ask(openai_server, "where")  # type: ignore[no-any-return]

    recorded(program)
    fork = forked(bundle_path, step_of(bundle_path, "llm_request"))
    reached = len(openai_server.requests)
    result, report, _ = resumed(fork, program)
    assert (result, len(openai_server.requests)) == ("1: where", reached + 1)
    assert (report.served, report.replaced) == (1, 1)


# --- HTTP and tools ---------------------------------------------------------------------------------------------------


def get_httpx(url: str) -> Any:
    return httpx.get(url).json()


def get_async_httpx(url: str) -> Any:
    async def get() -> Any:
        async with httpx.AsyncClient() as client:
            return (await client.get(url)).json()

    return asyncio.run(get())


def get_httpx2(url: str) -> Any:
    return httpx2.get(url).json()


def get_requests(url: str) -> Any:
    return requests.get(url, timeout=20).json()


def get_aiohttp(url: str) -> Any:
    async def get() -> Any:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return await answer.json()

    return asyncio.run(get())


GETS = [get_httpx, get_async_httpx, get_httpx2, get_requests, get_aiohttp]


@pytest.mark.parametrize("get", _each(*GETS))
def test_an_exchange_after_the_fork_is_blocked_stubbed_or_made(
    get: Run, recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    openai_server.pages.update({"/a": {"n": 1}, "/b": {"n": 2}})

    def program() -> Any:
        return [get(openai_server.url + "/a"), get(openai_server.url + "/b")]

    assert recorded(program) == [{"n": 1}, {"n": 2}]
    fork = forked(bundle_path, 2)
    reached = len(openai_server.requests)
    session = ReplaySession.from_trace(fork, mode="resume")
    with pytest.raises(ReplayPolicyError, match=r"/b comes after the recording had ended"), session:
        program()
    assert (session.report().exit_code, len(openai_server.requests)) == (4, reached)
    result, report, _ = resumed(fork, program, policies=['http:127.0.0.1=stub:{"n": 3}'])
    assert (result, len(openai_server.requests)) == ([{"n": 1}, {"n": 3}], reached)
    assert sum(report.stubbed.values()) == 1
    openai_server.pages["/b"] = {"n": 4}
    result, report, _ = resumed(fork, program, policies=["http:GET http://127.0.0.1:*/b=live"])
    assert result == [{"n": 1}, {"n": 4}]
    assert [one.path for one in openai_server.requests[reached:]] == ["/b"]
    assert (report.served, report.live) == (1, 1)


def test_a_tool_after_the_fork_runs_only_where_it_is_let(recorded: Run, bundle_path: Path) -> None:
    def program() -> list[str]:
        return [lookup("Oslo"), lookup("Bergen")]

    recorded(program)
    fork = forked(bundle_path, 2)
    RAN.clear()
    session = ReplaySession.from_trace(fork, mode="resume")
    with pytest.raises(ReplayPolicyError), session:
        try:
            program()
        except ReplayPolicyError:
            lookup("Voss")  # latched: a program that goes on meets it again
    assert RAN == []
    for policies, want, ran in (
        (["tool:*=stub"], None, []),
        (['tool:lookup=stub:"rain"'], "rain", []),
        (["tool:look*=live"], "Bergen: 1 degrees", ["Bergen"]),
    ):
        result, _, _ = resumed(fork, program, policies=policies)
        assert (result[1], RAN) == (want, ran)


def test_what_a_live_tool_does_is_done(recorded: Run, bundle_path: Path, openai_server: Any) -> None:
    openai_server.pages.update({"/a": {"n": 1}, "/b": {"n": 2}})

    def program() -> Any:
        return [pages(openai_server.url, "/a"), pages(openai_server.url, "/b")]

    recorded(program)
    fork = forked(bundle_path, step_of(bundle_path, "tool_result", 1))
    RAN.clear()
    reached = len(openai_server.requests)
    result, report, _ = resumed(fork, program, policies=["tool:pages=live"])
    assert result == [{"n": 1}, {"n": 2}]
    assert (RAN, [one.path for one in openai_server.requests[reached:]]) == (["/b"], ["/b"])
    assert report.live == 2


def test_a_fork_inside_a_tool_serves_what_the_tool_had_done(
    recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    openai_server.pages.update({"/a": {"n": 1}, "/b": {"n": 2}})

    @trace_tool
    def both() -> list[Any]:
        RAN.append("both")
        return [get_httpx(openai_server.url + "/a"), get_httpx(openai_server.url + "/b")]

    recorded(both)
    fork = forked(bundle_path, step_of(bundle_path, "tool_result"))  # the first exchange inside
    reached = len(openai_server.requests)
    with pytest.raises(ReplayPolicyError), ReplaySession.from_trace(fork, mode="resume"):
        both()
    openai_server.pages["/a"] = {"n": 9}
    session = ReplaySession.from_trace(fork, mode="resume", policies=["tool:both=live"])
    with session:
        assert both() == [{"n": 1}, {"n": 2}]
        session.verify_complete()
    assert [one.path for one in openai_server.requests[reached:]] == ["/b"]
    assert RAN == ["both", "both"]


def test_a_connection_outside_the_boundaries_is_stopped_after_the_fork_too(
    recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    address = ("127.0.0.1", int(openai_server.url.rpartition(":")[2]))

    @trace_tool
    def connects() -> str:
        with socket.create_connection(address):
            return "connected"

    def program() -> None:
        lookup("Oslo")
        by_sdk(openai_server, "q")
        socket.create_connection(address).close()

    recorded(lambda: lookup("Oslo"))
    with (
        pytest.raises(ReplayPolicyError, match="no boundary answers"),
        ReplaySession.from_trace(bundle_path, mode="resume", policies=["http:*=live", "tool:*=live"]),
    ):
        program()
    with ReplaySession.from_trace(bundle_path, mode="resume", policies=["tool:connects=live"]):
        lookup("Oslo")
        assert connects() == "connected", "what a live tool does is done"


# --- threads and tasks ------------------------------------------------------------------------------------------------


def test_threads_past_the_end_each_ask_for_themselves(recorded: Run, bundle_path: Path, openai_server: Any) -> None:
    def program() -> list[str]:
        lookup("Oslo")
        with ThreadPoolExecutor(4) as pool:
            return sorted(pool.map(lambda number: by_httpx(openai_server, f"q{number}"), range(5)))

    want = recorded(program)
    fork = forked(bundle_path, 2)
    reached = len(openai_server.requests)
    result, report, _ = resumed(fork, program)
    assert (result, len(openai_server.requests), report.live) == (want, reached + 5, 5)


@pytest.mark.parametrize("first", ["a", "b"])
def test_equal_calls_in_flight_at_the_end_get_their_own_answers(
    first: str, recorded: Run, bundle_path: Path, openai_server: Any, server_module: Any
) -> None:
    """Two equal questions are in flight; the recording is cut when b has its answer and a has none."""
    arrived, answered = threading.Event(), threading.Event()
    record_order = {"a": answered, "b": arrived}
    numbers = iter(range(1, 100))

    def answer(received: Any) -> Any:
        name = received.headers["x-name"]
        if name == "a":
            arrived.set()
        record_order[name].wait(20)
        return server_module.json_reply(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "gpt-5", "choices": [
                {"index": 0, "message": {"role": "assistant", "content": f"{name}{next(numbers)}"},
                 "finish_reason": "stop"}]})  # fmt: skip

    openai_server.replies["POST /v1/chat/completions"] = answer

    def program(order: str = "") -> dict[str, str]:
        """`order`: who asks first; without it both ask at once."""
        got: dict[str, str] = {}
        turn = threading.Event()

        def ask(name: str) -> None:
            if order and order[0] != name:
                turn.wait(20)
            with OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
                answer = client.chat.completions.create(**body("same"), extra_headers={"x-name": name})
            got[name] = str(answer.choices[0].message.content)
            turn.set()
            if name == "b":
                answered.set()

        threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return got

    with record("agent", output=bundle_path):
        assert program() == {"b": "b1", "a": "a2"}
    fork = forked(bundle_path, step_of(bundle_path, "llm_response"))
    with ReplaySession.from_trace(fork, mode="resume") as session:
        assert program(first) == {"b": "b1", "a": "a3"}, "whoever asks first"
        session.verify_complete()
    report = session.report()
    assert (report.served, report.live, report.replaced, report.exit_code) == (1, 1, 1, 0)


@pytest.mark.parametrize("cut", _each(2, 0, 1, 3, 4, 5))
def test_tasks_pass_the_end_one_by_one(cut: int, recorded: Run, bundle_path: Path, openai_server: Any) -> None:
    async def chain(client: AsyncOpenAI, name: str, turns: int) -> str:
        said = name
        for _ in range(turns):
            answer = await client.chat.completions.create(**body(said))
            said = f"{answer.choices[0].message.content}"
        return said

    def program() -> list[str]:
        async def main() -> list[str]:
            async with AsyncOpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0) as client:
                return await asyncio.gather(chain(client, "a", 3), chain(client, "b", 2), chain(client, "c", 1))

        return asyncio.run(main())

    want = recorded(program)
    fork = forked(bundle_path, step_of(bundle_path, "llm_response", cut))
    reached = len(openai_server.requests)
    result, report, _ = resumed(fork, program)
    assert result == want
    assert (report.served, len(openai_server.requests) - reached) == (cut + 1, 5 - cut)


async def test_async_tools_and_the_async_block(recorded: Run, bundle_path: Path) -> None:
    async def program() -> list[str]:
        return [await alookup("Oslo"), *await asyncio.gather(alookup("a"), alookup("b"))]

    with record("agent", output=bundle_path):
        await program()
    fork = forked(bundle_path, 2)
    RAN.clear()
    async with ReplaySession.from_trace(fork, mode="resume", policies=["tool:alookup=live"]) as session:
        await program()
        session.verify_complete()
    assert (sorted(RAN), session.report().served) == (["a", "b"], 1)
    with pytest.raises(ReplayPolicyError):
        async with ReplaySession.from_trace(fork, mode="resume"):
            await program()
    async with ReplaySession.from_trace(fork, mode="resume", policies=["tool:*=stub:7"]):
        assert await program() == ["Oslo: 1 degrees", 7, 7]


def test_generators_are_stubbed_with_their_items(recorded: Run, bundle_path: Path) -> None:
    @trace_tool
    def counted(to: int) -> Iterator[int]:
        RAN.append(to)
        yield from range(to)

    recorded(lambda: list(counted(2)))
    for policy, want in (("stub", []), ("stub:[5, 6]", [5, 6]), ("live", [0, 1, 2])):
        with ReplaySession.from_trace(bundle_path, mode="resume", policies=[f"tool:counted={policy}"]):
            assert list(counted(2)) == [0, 1]
            assert list(counted(3)) == want
    assert RAN == [2, 3]


async def test_what_a_framework_runs_by_its_own_code_goes_by_what_it_calls(recorded: Run, bundle_path: Path) -> None:
    """A handoff is no effect: it needs no policy, what it calls does, and all of it is recorded."""
    handoff = Tool(lambda to: None, "handoff", None, "frozen")

    async def hand_over(to: str) -> str:
        return await again(handoff, (to,), lambda: alookup(to), str.upper)

    async def program() -> list[str]:
        return [await hand_over("Oslo"), await hand_over("Bergen")]

    with record("agent", output=bundle_path):
        first = await program()
    fork = forked(bundle_path, step_of(bundle_path, "tool_result", 1))
    RAN.clear()
    with pytest.raises(ReplayPolicyError, match="tool 'alookup'"):
        async with ReplaySession.from_trace(fork, mode="resume"):
            await program()
    assert RAN == []
    async with ReplaySession.from_trace(fork, mode="resume", policies=["tool:alookup=live"]) as session:
        assert await program() == [first[0], "Bergen: 1 degrees"]
    assert session.recorded is not None
    assert validate_bundle(session.recorded, verify_integrity=True).exit_code == 0
    outputs = [event.output for event in open_bundle(session.recorded).events if event.type == "tool_result"]
    assert outputs == [first[0], first[0].upper(), "Bergen: 1 degrees", "BERGEN: 1 DEGREES"]
    async with ReplaySession.from_trace(session.recorded) as session:
        assert await program() == [first[0], "Bergen: 1 degrees"]
        session.verify_complete()


# --- divergence, reuse, redaction, where it is recorded ---------------------------------------------------------------


def test_something_else_inside_the_prefix_stops_as_frozen_does(
    recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    def program(city: str) -> str:
        lookup(city)
        return by_sdk(openai_server, "q")

    recorded(program, "Oslo")
    reached = len(openai_server.requests)
    session = ReplaySession.from_trace(bundle_path, mode="resume", policies=["tool:*=live"])
    with pytest.raises(ReplayMismatchError) as caught, session:
        program("Bergen")
    assert caught.value.code == "input_differs"
    assert (session.report().exit_code, RAN, len(openai_server.requests)) == (1, ["Oslo"], reached)


@pytest.fixture
def agent(recorded: Run, bundle_path: Path, openai_server: Any) -> Any:
    """A program of four calls, recorded, and forked after the first of them with another result."""

    def program() -> list[Any]:
        weather = lookup("Oslo")
        return [by_sdk(openai_server, weather), by_sdk(openai_server, "unchanged"), lookup("Bergen")]

    openai_server.answer = lambda body: {"role": "assistant", "content": f"on {body['messages'][-1]['content']}"}
    recorded(program)
    fork = forked(bundle_path, 2, s2="snow")
    RAN.clear()
    openai_server.requests.clear()
    return program, fork


@pytest.mark.parametrize("parent", ["beside", "renamed", "elsewhere"])
def test_calls_of_the_parent_with_the_same_input_are_reused(
    parent: str, agent: Any, bundle_path: Path, openai_server: Any, tmp_path: Path
) -> None:
    program, fork = agent
    reuse: Any = True
    if parent == "renamed":
        bundle_path.rename(bundle_path.with_name("other.sftrace"))
    if parent == "elsewhere":
        (tmp_path / "away").mkdir()
        reuse = bundle_path.rename(tmp_path / "away" / "run.sftrace")
        with pytest.raises(ReplayError, match=r"its parent \(run.sftrace\) is not beside it; name it: --reuse"):
            ReplaySession.from_trace(fork, mode="resume", reuse=True)
    with ReplaySession.from_trace(fork, mode="resume", reuse=reuse) as session:
        result = program()
        session.verify_complete()
    assert result == ["on snow", "on unchanged", "Bergen: 2 degrees"]
    assert (RAN, len(openai_server.requests)) == ([], 1), "only what the override changed went out"
    report = session.report()
    assert (report.exit_code, report.served, report.live, report.reused) == (0, 1, 1, 2)
    parents = [path for path in tmp_path.rglob("*.sftrace") if path.name in ("run.sftrace", "other.sftrace")]
    known = [event for event in open_bundle(parents[0]).events if event.type == "llm_response"][1].total_tokens
    assert report.reused_tokens == known > 0
    assert f"reused 2 of the parent's calls, which took {known} tokens" in report.text()
    assert session.recorded is not None
    told = open_bundle(session.recorded).provenance
    assert len(told["resumed"]["reused"]) == 2
    assert [one["run_id"] for one in told["parents"]] == [
        Trace.load(fork).run_id, Trace.load(fork).provenance["parents"][0]["run_id"],
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_of_the_parent_is_read_there(
    stream: bool, recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    """Its body is a file of its own in the parent, which the fork does not hold."""
    openai_server.answer = lambda body: {"role": "assistant", "content": ("words" * 8_000 + " ") * 3}

    def program() -> str:
        lookup("Oslo")
        return (by_stream if stream else by_sdk)(openai_server, "tell me more")

    want = recorded(program)
    fork = forked(bundle_path, 2)
    assert not (fork / "blobs").exists() and (bundle_path / "blobs").exists()
    reached = len(openai_server.requests)
    result, report, _ = resumed(fork, program, reuse=True)
    assert (result, report.reused, len(openai_server.requests)) == (want, 1, reached)


def test_a_parent_that_is_another_or_was_changed_is_refused(agent: Any, bundle_path: Path, tmp_path: Path) -> None:
    _, fork = agent
    with pytest.raises(ReplayError, match="names no parent"):
        ReplaySession.from_trace(bundle_path, mode="resume", reuse=True)
    with record("agent", output="another.sftrace"):
        lookup("x")
    with pytest.raises(ReplayError, match="was not made of it"):
        ReplaySession.from_trace(fork, mode="resume", reuse="another.sftrace")
    trace = Trace.load(bundle_path)
    trace.save("copy.sftrace")
    again = Path("copy.sftrace")
    lines = (again / "events.jsonl").read_bytes()
    (again / "events.jsonl").write_bytes(lines.replace(b"Bergen", b"Jotunh"))
    with pytest.raises(TraceStorageError):
        ReplaySession.from_trace(fork, mode="resume", reuse=again)


def test_redacted_values_are_counted_before_and_stop_a_tool(
    recorded: Run, bundle_path: Path, openai_server: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_QUIET", "false")

    @trace_tool
    def login() -> dict[str, str]:
        return {"user": "ada", "password": "hunter2-hunter2"}

    @trace_tool
    def use(value: str) -> str:
        RAN.append(value)
        return "used"

    def program() -> list[str]:
        secret = login()["password"]
        return [by_sdk(openai_server, f"the password is {secret}"), use(f"with {secret}")]

    recorded(program)
    fork = forked(bundle_path, 2)
    RAN.clear()
    openai_server.requests.clear()
    capfd.readouterr()
    session = ReplaySession.from_trace(fork, mode="resume", policies=["tool:use=live"])
    assert session.redacted == 1
    with pytest.raises(ReplayPolicyError) as caught, session:
        assert "1 value is [REDACTED] in what is served" in capfd.readouterr().err
        program()
    assert (caught.value.code, RAN) == ("redacted_input", [])
    assert b"[REDACTED]" in openai_server.requests[0].body, "a model is asked with the placeholder"
    report = session.report()
    assert (report.redacted, report.carried, report.exit_code) == (1, 1, 4)
    with ReplaySession.from_trace(fork, mode="resume", policies=["tool:use=live"], allow_redacted=True) as session:
        program()
    assert (RAN, session.report().carried) == (["with [REDACTED]"], 2)


def test_it_is_always_recorded_and_says_where_it_came_from(agent: Any, bundle_path: Path, openai_server: Any) -> None:
    program, fork = agent
    names = []
    for _ in range(2):
        with ReplaySession.from_trace(fork, mode="resume", policies=["tool:*=live"]) as session:
            program()
        assert session.recorded is not None
        names.append(session.recorded.name)
    assert names == ["fork-resumed.sftrace", "fork-resumed-2.sftrace"]
    bundle = open_bundle(session.recorded)
    told = bundle.provenance
    last = open_bundle(fork).events[-1]
    assert (told["origin"], told["fork_point"]) == ("resumed", {"step": last.step, "event_id": last.id})
    assert told["resumed"]["policies"] == ["tool:*=live"]
    live = next(event for event in bundle.events if event.id == told["resumed"]["went_live"])
    assert live.type == "llm_request" and live.step == 3
    [root] = lineage([bundle_path.parent])
    [below] = root.children
    assert [(node.name, node.how) for node in below.children] == [
        ("fork-resumed-2.sftrace", "resumed after step 2"), ("fork-resumed.sftrace", "resumed after step 2"),
    ]  # fmt: skip
    with pytest.raises(TraceStorageError, match="exists"):
        ReplaySession.from_trace(fork, mode="resume", record=session.recorded)


def test_a_fork_in_memory_names_its_own_place(agent: Any, bundle_path: Path, openai_server: Any) -> None:
    program, _ = agent
    trace = fork_trace(bundle_path, ForkPoint(step=2), overrides=[OverrideSpec(step=2, output="hail")]).trace
    with pytest.raises(SettingsError, match="give record=PATH"):
        ReplaySession.from_trace(trace, mode="resume")
    with ReplaySession.from_trace(
        trace, mode="resume", record="mine.sftrace", reuse=bundle_path, policies=["tool:*=live"]
    ) as session:
        assert program()[:2] == ["on hail", "on unchanged"]
    assert session.report().reused == 2
    told = open_bundle("mine.sftrace").provenance
    assert told["parents"][0]["run_id"] == trace.run_id
    trace.save("saved.sftrace")
    nodes = [node for root in lineage([Path("saved.sftrace")]) for node in root.walk()]
    saved = next(node for node in nodes if node.name == "saved.sftrace")
    assert [(node.name, node.how) for node in saved.children] == [("mine.sftrace", "resumed after step 2, 2 reused")]
    assert not saved.changed


def test_a_callback_is_asked(recorded: Run, bundle_path: Path) -> None:
    recorded(lambda: lookup("Oslo"))
    heard: list[Any] = []

    def ask(live: Any) -> bool:
        heard.append((live.kind, live.name, live.payload))
        return live.payload == {"city": "Bergen"}

    session = ReplaySession.from_trace(bundle_path, mode="resume", policies=["tool:*=ask"], ask=ask)
    with pytest.raises(ReplayPolicyError), session:
        lookup("Oslo")
        lookup("Bergen")
        lookup("Voss")
    assert RAN == ["Oslo", "Bergen"]
    assert heard == [("tool", "lookup", {"city": "Bergen"}), ("tool", "lookup", {"city": "Voss"})]
