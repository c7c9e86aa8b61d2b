# SPDX-License-Identifier: Apache-2.0
"""What a replay lets out, and what it never does: hybrid and live mode, policies, calls in threads and tasks, and a
replay that is recorded itself."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from openai import AsyncOpenAI, OpenAI

from sftrace_otel import ReplayMismatchError, ReplayPolicyError, ReplaySession, llm_request, record, trace_tool
from sftrace_otel.bundle.read import open_bundle, validate_bundle
from sftrace_otel.errors import ReplayError, SettingsError, TraceStorageError

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Run = Callable[..., Any]
RAN: list[Any] = []
LIVE = "openai/gpt-5"


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    RAN.clear()


@trace_tool
def lookup(city: str) -> str:
    RAN.append(city)
    return f"{city}: {len(RAN)} degrees"


@trace_tool
async def alookup(city: str) -> str:
    RAN.append(city)
    await asyncio.sleep(0)
    return f"{city}: {len(RAN)} degrees"


@trace_tool(replay_policy="derived")
def total(values: list[int]) -> int:
    RAN.append("total")
    return sum(values) + EXTRA[0]


EXTRA = [0]


def body(text: str, stream: bool = False) -> dict[str, Any]:
    return {"model": "gpt-5", "messages": [{"role": "user", "content": text}], "stream": stream}


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
            answer = await client.chat.completions.create(**body(text))
            return answer.choices[0].message.content  # type: ignore[no-any-return]

    return asyncio.run(ask())


def by_httpx(server: Any, text: str) -> str:
    def parts() -> Iterator[bytes]:
        raw = json.dumps(body(text)).encode()
        yield raw[:9]
        yield raw[9:]

    answer = httpx.post(
        f"{server.base_url}/chat/completions",
        content=parts(),
        headers={"authorization": "Bearer k", "content-type": "application/json",
                 "content-length": str(len(json.dumps(body(text))))},
    )  # fmt: skip
    return answer.json()["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


def by_requests(server: Any, text: str) -> str:
    answer = requests.post(f"{server.base_url}/chat/completions", json=body(text), timeout=20)
    return answer.json()["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


def by_aiohttp(server: Any, text: str) -> str:
    async def ask() -> str:
        url = f"{server.base_url}/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body(text)) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]  # type: ignore[no-any-return]

    return asyncio.run(ask())


def by_aiohttp_stream(server: Any, text: str) -> str:
    raw = json.dumps(body(text)).encode()

    async def parts() -> AsyncIterator[bytes]:
        yield raw[:9]
        yield raw[9:]

    async def ask() -> str:
        headers = {"content-type": "application/json", "content-length": str(len(raw))}
        url = f"{server.base_url}/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=parts(), headers=headers) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]  # type: ignore[no-any-return]

    return asyncio.run(ask())


def by_hand(server: Any, text: str) -> str:
    return llm_request(model="gpt-5", provider="openai", input={"q": text}, call=lambda: by_sdk(server, text))


WAYS = [by_sdk, by_stream, by_async_sdk, by_httpx, by_requests, by_aiohttp, by_aiohttp_stream, by_hand]


@pytest.mark.parametrize("ask", WAYS)
def test_hybrid_mode_asks_the_named_llm_again_and_serves_the_tools(
    ask: Run, recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    def program(question: str) -> tuple[str, str]:
        answer = ask(openai_server, question)
        return answer, lookup("Oslo")

    first = recorded(program, "one")
    assert len(openai_server.requests) == 1
    with ReplaySession.from_trace(bundle_path, mode="hybrid", live_llms=[LIVE]) as replay:
        again = program("another question")
        replay.verify_complete()
    assert len(openai_server.requests) == 2
    assert again[0] != first[0] and "another question" in again[0]
    assert again[1] == first[1]
    assert RAN == ["Oslo"]
    report = replay.report()
    assert (report.live, report.served, report.replaced) == (2 if ask is by_hand else 1, 1, 2 if ask is by_hand else 1)
    assert "went out" in report.text()


@pytest.mark.parametrize("ask", WAYS)
def test_what_hybrid_mode_does_not_name_stays_frozen(
    ask: Run, recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    def program(question: str) -> str:
        assert by_sdk(openai_server, "first")
        return ask(openai_server, question)  # type: ignore[no-any-return]

    with record("agent", output=bundle_path):
        program("one")
        other = OpenAI(base_url=openai_server.base_url, api_key="k", max_retries=0)
        other.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    received = len(openai_server.requests)
    with (
        pytest.raises(ReplayMismatchError),
        ReplaySession.from_trace(bundle_path, mode="hybrid", live_llms=["openai/gpt-4"]),
    ):
        program("two")
    assert len(openai_server.requests) == received


def test_what_follows_a_live_answer_is_in_the_recording_or_diverges(
    recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    def program(question: str) -> str:
        return lookup(by_sdk(openai_server, question))

    recorded(program, "Oslo")
    session = ReplaySession.from_trace(bundle_path, mode="hybrid", live_llms=["openai/*"])
    with pytest.raises(ReplayMismatchError) as caught, session:
        program("Bergen")
    assert caught.value.code == "input_differs"
    assert len(RAN) == 1, "the tool ran when it was recorded, and not again"
    assert session.report().exit_code == 1


def test_a_live_answer_may_ask_for_less_and_that_is_said(recorded: Run, bundle_path: Path, openai_server: Any) -> None:
    def program(calls: int) -> None:
        for number in range(calls):
            by_sdk(openai_server, f"q{number}")

    recorded(program, 3)
    with ReplaySession.from_trace(bundle_path, mode="hybrid", live_llms=[LIVE]) as session:
        program(2)
    report = session.report()
    assert (report.exit_code, len(report.unused)) == (1, 1)
    with ReplaySession.from_trace(bundle_path, mode="hybrid", live_llms=[LIVE]) as session:
        program(4)  # one more than was recorded goes out too
    assert (session.report().exit_code, session.report().live, session.report().replaced) == (0, 4, 3)


# --- live -------------------------------------------------------------------------------------------------------------


def test_live_mode_runs_only_the_tools_that_are_named(
    recorded: Run, bundle_path: Path, openai_server: Any, srv: Any
) -> None:
    @trace_tool
    def fetch(path: str) -> Any:
        with socket.create_connection(("127.0.0.1", srv.port)):
            RAN.append(path)
        return httpx.get(srv.url + path).json()

    def program() -> list[Any]:
        return [by_sdk(openai_server, "q"), fetch("/json"), lookup("Oslo")]

    recorded(program)
    hits = len(srv.hits)
    with ReplaySession.from_trace(bundle_path, mode="live", allow_live_tools=["fetch", "look*"]) as session:
        program()
        session.verify_complete()
    assert RAN == ["/json", "Oslo"] * 2
    assert len(srv.hits) > hits and len(openai_server.requests) == 2
    assert session.report().served == 0
    session = ReplaySession.from_trace(bundle_path, mode="live", allow_live_tools=["fetch"])
    with pytest.raises(ReplayPolicyError, match="allow-live-tool") as caught, session:
        program()
    assert caught.value.code == "not_named"
    assert RAN == ["/json", "Oslo"] * 2 + ["/json"]


@pytest.mark.parametrize("get", [httpx.get, lambda url: requests.get(url, timeout=20)])
def test_an_http_exchange_is_let_out_by_the_name_of_its_event(
    get: Run, recorded: Run, bundle_path: Path, srv: Any
) -> None:
    recorded(lambda: get(srv.url + "/json").json())
    hits = len(srv.hits)
    with pytest.raises(ReplayPolicyError), ReplaySession.from_trace(bundle_path, mode="live"):
        get(srv.url + "/json")
    assert len(srv.hits) == hits
    with ReplaySession.from_trace(bundle_path, mode="live", allow_live_tools=["http GET */json"]) as session:
        assert get(srv.url + "/json").status_code == 200
        session.verify_complete()
    assert len(srv.hits) == hits + 1


def test_beside_a_live_call_nothing_else_connects(
    recorded: Run, bundle_path: Path, openai_server: Any, srv: Any
) -> None:
    recorded(lambda: by_sdk(openai_server, "q"))
    hits = len(srv.hits)
    session = ReplaySession.from_trace(bundle_path, mode="hybrid", live_llms=[LIVE])
    with pytest.raises(ReplayPolicyError, match="tried to connect"), session:
        by_sdk(openai_server, "q")
        socket.create_connection(("127.0.0.1", srv.port))
    assert len(srv.hits) == hits


async def test_async_tools_threads_and_executors_follow_the_mode(recorded: Run, bundle_path: Path) -> None:
    async def turn() -> list[str]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(2) as pool:
            found = await asyncio.gather(
                alookup("a"), asyncio.to_thread(lookup, "b"), loop.run_in_executor(pool, lookup, "c")
            )
        return list(found)

    with record("agent", output=bundle_path):
        first = await turn()
    RAN.clear()
    async with ReplaySession.from_trace(bundle_path) as session:
        assert await turn() == first
        session.verify_complete()
    assert RAN == []
    async with ReplaySession.from_trace(bundle_path, mode="live", allow_live_tools=["alookup", "lookup"]) as session:
        await turn()
        session.verify_complete()
    assert sorted(RAN) == ["a", "b", "c"]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "hybrid"}, "needs the LLM calls"),
        ({"mode": "hybrid", "live_llms": ["openai/other"]}, "openai/gpt-5"),
        ({"mode": "frozen", "live_llms": [LIVE]}, "hybrid mode"),
        ({"mode": "hybrid", "live_llms": [LIVE], "allow_live_tools": ["lookup"]}, "live mode"),
        ({"mode": "live", "allow_live_tools": ["nothing"]}, "is not in the recording, which has lookup"),
        ({"mode": "sideways"}, "frozen, hybrid, live, resume"),
        ({"mode": "resume", "policies": ["refund=live"]}, "KIND:NAME=POLICY"),
        ({"mode": "resume", "policies": ["tool:refund=maybe"]}, "live, stub, block, ask"),
        ({"mode": "resume", "policies": ["call:refund=live"]}, "tool, llm, http"),
        ({"mode": "resume", "policies": ["tool:refund=live:1"]}, "only a stub"),
        ({"mode": "resume", "policies": ["tool:refund=stub:{"]}, "no JSON"),
        ({"mode": "resume", "policies": "tool:refund=live"}, "one string"),
        ({"policies": ["tool:refund=live"]}, "for resume mode"),
        ({"mode": "hybrid", "live_llms": [LIVE], "reuse": True}, "for resume mode"),
        ({"normalize": ["times"]}, "iso_time, uuid, path"),
        ({"normalize": "iso_time"}, "one string"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_program_runs(
    options: dict[str, Any], says: str, recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    recorded(lambda: (by_sdk(openai_server, "q"), lookup("Oslo")))
    with pytest.raises(SettingsError, match=says):
        ReplaySession.from_trace(bundle_path, **options)


# --- policies ---------------------------------------------------------------------------------------------------------


def test_a_derived_tool_runs_again_and_is_compared(recorded: Run, bundle_path: Path) -> None:
    recorded(lambda: total([1, 2]))
    RAN.clear()
    with ReplaySession.from_trace(bundle_path) as session:
        assert total([1, 2]) == 3
        session.verify_complete()
    assert RAN == ["total"]
    assert (session.report().derived, session.report().served) == (1, 0)
    EXTRA[0] = 1
    try:
        with pytest.raises(ReplayMismatchError) as caught, ReplaySession.from_trace(bundle_path) as session:
            try:
                total([1, 2])
            except ReplayError:
                pass
    finally:
        EXTRA[0] = 0
    assert caught.value.code == "derived_differs"
    assert "recorded 3, live 4" in str(caught.value)


def test_a_derived_tool_is_no_hole(recorded: Run, bundle_path: Path, srv: Any) -> None:
    @trace_tool(replay_policy="derived")
    def sneaky() -> int:
        return int(httpx.get(srv.url + "/json").status_code)

    recorded(sneaky)
    hits = len(srv.hits)
    with ReplaySession.from_trace(bundle_path) as session:
        assert sneaky() == 200  # what it asks for is answered from the recording
        session.verify_complete()
    assert len(srv.hits) == hits


def derived(kind: str) -> Any:
    """A derived tool of each kind."""
    if kind == "async":

        @trace_tool(replay_policy="derived")
        async def work(n: int) -> int:
            RAN.append(n)
            return n

        return lambda: asyncio.run(work(3))
    if kind == "generator":

        @trace_tool(name="work", replay_policy="derived")
        def items(n: int) -> Iterator[int]:
            RAN.append(n)
            yield from range(n)

        return lambda: list(items(3))
    if kind == "async generator":

        @trace_tool(name="work", replay_policy="derived")
        async def aitems(n: int) -> AsyncIterator[int]:
            RAN.append(n)
            for item in range(n):
                yield item

        async def collect() -> list[int]:
            return [item async for item in aitems(3)]

        return lambda: asyncio.run(collect())

    @trace_tool(name="work", replay_policy="derived")
    def fails(n: int) -> int:
        RAN.append(n)
        raise KeyError(n)

    def caught() -> str:
        with pytest.raises(KeyError):
            fails(3)
        return "KeyError"

    return caught


@pytest.mark.parametrize("kind", ["async", "generator", "async generator", "failing"])
def test_derived_tools_of_every_kind(kind: str, recorded: Run, frozen: Run) -> None:
    program = derived(kind)
    want = recorded(program)
    assert frozen(program) == want
    assert RAN == [3, 3]


def test_a_derived_tool_that_fails_now_diverges(recorded: Run, bundle_path: Path) -> None:
    fails: list[bool] = []

    @trace_tool(replay_policy="derived")
    def work() -> int:
        if fails:
            raise KeyError("now")
        return 1

    recorded(work)
    fails.append(True)
    with pytest.raises(ReplayMismatchError, match="raised KeyError"), ReplaySession.from_trace(bundle_path):
        work()


@pytest.mark.parametrize(
    ("said", "ran", "code"),
    [(True, False, None), ("frozen", False, None), ("derived", True, None), ("live", False, "manual_live"),
     (False, False, "manual_refused"), ("forbidden", False, "manual_refused"), (None, False, "manual_refused"),
     ("other", False, "manual_failed")],
)  # fmt: skip
def test_a_callback_decides_on_manual_calls(
    said: Any, ran: bool, code: str | None, recorded: Run, bundle_path: Path
) -> None:
    @trace_tool(replay_policy="manual")
    def pay(amount: int) -> str:
        RAN.append(amount)
        return "paid"

    recorded(lambda: pay(5))
    RAN.clear()
    asked: list[Any] = []

    def decide(call: Any, live: Any) -> Any:
        asked.append((call.name, live.payload))
        return said

    session = ReplaySession.from_trace(bundle_path, manual=decide)
    if code is None:
        with session:
            assert pay(5) == "paid"
    else:
        with pytest.raises(ReplayError) as caught, session:
            pay(5)
        assert caught.value.code == code
    assert asked == [("pay", {"amount": 5})]
    assert ([5] if ran else []) == RAN


def test_manual_calls_stop_without_a_callback_and_one_that_fails_is_said(recorded: Run, bundle_path: Path) -> None:
    @trace_tool(replay_policy="manual")
    def pay(amount: int) -> str:
        return "paid"

    recorded(lambda: pay(5))
    with pytest.raises(ReplayPolicyError, match="manual=") as stopped, ReplaySession.from_trace(bundle_path):
        pay(5)
    assert stopped.value.code == "manual"
    session = ReplaySession.from_trace(bundle_path, manual=lambda call, live: 1 / 0 > 0)
    with pytest.raises(ReplayError, match="ZeroDivisionError"), session:
        pay(5)


def test_live_is_approved_where_the_mode_lets_anything_out(
    recorded: Run, bundle_path: Path, openai_server: Any
) -> None:
    @trace_tool(replay_policy="manual")
    def pay(amount: int) -> str:
        RAN.append(amount)
        return "paid"

    recorded(lambda: (by_sdk(openai_server, "q"), pay(5)))
    options: dict[str, Any] = {"mode": "hybrid", "live_llms": [LIVE], "manual": lambda call, live: "live"}
    with ReplaySession.from_trace(bundle_path, **options) as session:
        by_sdk(openai_server, "q")
        pay(5)
        session.verify_complete()
    assert RAN == [5, 5]


@pytest.mark.parametrize("mode", ["frozen", "live"])
def test_forbidden_calls_stop_in_every_mode(mode: str, recorded: Run, bundle_path: Path) -> None:
    @trace_tool(replay_policy="forbidden")
    def wipe() -> str:
        RAN.append("wiped")
        return "wiped"

    recorded(wipe)
    options: dict[str, Any] = {"allow_live_tools": ["wipe"]} if mode == "live" else {}
    with pytest.raises(ReplayPolicyError) as caught, ReplaySession.from_trace(bundle_path, mode=mode, **options):
        wipe()
    assert caught.value.code == "forbidden"
    assert RAN == ["wiped"]


# --- the replay is recorded -------------------------------------------------------------------------------------------


def valid(path: Path) -> None:
    result = validate_bundle(path, strict=True, verify_integrity=True)
    assert result.exit_code == 0 and not result.issues, result.issues


def test_a_replay_writes_nothing_unless_it_is_asked_to(recorded: Run, bundle_path: Path, frozen: Run) -> None:
    recorded(lambda: lookup("Oslo"))
    before = sorted(bundle_path.parent.rglob("*"))
    frozen(lambda: lookup("Oslo"))
    assert sorted(bundle_path.parent.rglob("*")) == before


@pytest.mark.parametrize("ask", WAYS)
def test_a_recorded_replay_replays_as_its_recording_did(
    ask: Run, recorded: Run, bundle_path: Path, tmp_path: Path, openai_server: Any
) -> None:
    @trace_tool
    def fails(code: int) -> None:
        raise ValueError(f"code {code}")

    @trace_tool
    def pair(n: int) -> Any:
        return {"t": (n, {n}), "b": b"\x00"}

    def program() -> Any:
        with pytest.raises(ValueError, match="code 7"):
            fails(7)
        return [ask(openai_server, "q"), repr(pair(2))]

    first = recorded(program)
    openai_server.stop()
    copy = tmp_path / "copy.sftrace"
    with ReplaySession.from_trace(bundle_path, record=copy) as session:
        with record("agent") as inert:
            result = program()
            inert.set_output(result)
        session.verify_complete()
    assert result == first and session.recorded == copy
    valid(copy)
    old, new = open_bundle(bundle_path), open_bundle(copy)
    kept = [event.type for event in old.events if event.parent_id is not None]
    if ask is not by_hand:  # the call inside a served one did not happen again
        assert [event.type for event in new.events if event.parent_id is not None] == kept
    assert old.manifest.run_id != new.manifest.run_id
    with ReplaySession.from_trace(copy) as session:
        assert program() == first
        session.verify_complete()
    assert session.report().exit_code == 0


def test_what_went_out_is_in_the_new_recording(
    recorded: Run, bundle_path: Path, tmp_path: Path, openai_server: Any
) -> None:
    def program(question: str) -> Any:
        return by_sdk(openai_server, question), lookup("Oslo")

    recorded(program, "old")
    copy = tmp_path / "copy.sftrace"
    with ReplaySession.from_trace(bundle_path, mode="hybrid", live_llms=[LIVE], record=copy):
        second = program("new")
    valid(copy)
    openai_server.stop()
    with ReplaySession.from_trace(copy) as session:
        assert program("new") == second
        session.verify_complete()
    assert [call.lineage for call in session._session.calls] == ["0", "1"]
    with pytest.raises(TraceStorageError, match="exists"):
        ReplaySession.from_trace(bundle_path, record=copy)
