# SPDX-License-Identifier: Apache-2.0
"""The cases of `visible.md` that concern replay: A03 and G.

G01, G02 and G06 are elsewhere: `test_matching_recording.py` (mat-018, mat-019), `fork/`; G07 in `instrumentation/`.
"""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from case_helpers import (
    Divergence,
    U,
    ask,
    check,
    diverging,
    forked,
    frozen,
    n_http,
    n_llm,
    oa,
    outputs,
    rec,
    tool,
    tool_results,
    wire,
)  # fmt: skip
from case_server import Scripted

from sftrace_otel import ReplayError, ReplaySession, trace_tool
from sftrace_otel.bundle.read import open_bundle
from sftrace_otel.core.match import ISO_TIME, UUID


def sent(srv: Any) -> int:
    return len(srv.requests)


# --- A03 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.full)])
def test_a03_threads_get_their_own_answers(rounds: int, srv: Any, p: Path) -> None:
    def question(number: int) -> str | None:
        return ask(oa(srv.url), [U(str(number))])

    with rec(p):
        want = [question(number) for number in range(16)]
    reached = sent(srv)
    for _ in range(rounds):
        with frozen(p, order="any"), ThreadPoolExecutor(8) as pool:
            assert list(pool.map(question, range(16))) == want
    assert sent(srv) == reached


# --- G04 --------------------------------------------------------------------------------------------------------------


async def _aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url):
        pass


WAYS_OUT: dict[str, Callable[[Any], Any]] = {
    "httpx": lambda srv: httpx.get(srv.url + "/json"),
    "urllib": lambda srv: urllib.request.urlopen(srv.url + "/json"),
    "socket": lambda srv: socket.create_connection(("127.0.0.1", int(srv.url.rpartition(":")[2]))),
    "aiohttp": lambda srv: asyncio.run(_aiohttp(srv.url + "/json")),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that urllib leaves open
@pytest.mark.parametrize("way", WAYS_OUT)
def test_g04_frozen_lets_nothing_out_and_runs_no_recorded_tool(way: str, srv: Any, p: Path) -> None:
    ran: list[int] = []
    recorded_tool = tool(lambda: ran.append(1), "recorded_tool")
    with rec(p):
        recorded_tool()
    ran.clear()
    reached = sent(srv)
    session = ReplaySession.from_trace(p)
    with pytest.raises(ReplayError), session:
        recorded_tool()
        with pytest.raises(ReplayError):
            WAYS_OUT[way](srv)
    assert (ran, sent(srv)) == ([], reached)
    assert session.report().exit_code == 1
    gc.collect()  # where the warnings of sockets that were never connected are expected


# --- G05 --------------------------------------------------------------------------------------------------------------


def _agent(srv: Any, ran: list[str]) -> str:
    """llm → tool(x) → llm(uses the tool's result) → tool(y)."""

    @trace_tool
    def x() -> str:
        ran.append("x")
        return "first"

    @trace_tool
    def y() -> str:
        ran.append("y")
        return "second"

    ask(oa(srv.url), [U("begin")])
    answer = ask(oa(srv.url), [U(f"then {x()}")])
    return f"{answer} {y()}"


def test_g05_up_to_the_fork_all_is_served_and_nothing_behind_it(srv: Any, p: Path, q: Path) -> None:
    ran: list[str] = []
    with rec(p):
        _agent(srv, ran)
    ran.clear()
    reached = sent(srv)
    forked(p, 4, q, {4: "CHANGED"})
    session = ReplaySession.from_trace(q)
    with pytest.raises(Divergence) as caught, session:
        _agent(srv, ran)
    assert caught.value.code == "recording_ended"
    assert (session.report().served, session.report().exit_code) == (2, 4)
    assert (ran, sent(srv)) == ([], reached)


def test_g05_behind_the_fork_the_program_goes_on_for_real(srv: Any, p: Path, q: Path) -> None:
    ran: list[str] = []
    with rec(p):
        _agent(srv, ran)
    ran.clear()
    reached = sent(srv)
    forked(p, 4, q, {4: "CHANGED"})
    with ReplaySession.from_trace(q, mode="resume", policies=["tool:y=live"]) as session:
        _agent(srv, ran)
        session.verify_complete()
    assert ran == ["y"], "what the fork holds did not run"
    assert sent(srv) == reached + 1 and b"CHANGED" in srv.requests[-1].body
    report = session.report()
    assert (report.served, report.live, report.exit_code) == (2, 2, 0)
    assert report.live_calls == {"LLM openai/m chat.completions.create": 1, "tool 'y'": 1}
    assert session.recorded is not None
    made = session.recorded
    check(made)
    assert tool_results(made) == ["CHANGED", "second"]
    told = open_bundle(made).provenance
    assert told["origin"] == "resumed" and told["fork_point"]["step"] == 4
    assert [one["name"] for one in told["parents"]] == [q.name]
    with frozen(made):
        _agent(srv, ran)
    assert (ran, sent(srv)) == (["y"], reached + 1)


# --- G09 --------------------------------------------------------------------------------------------------------------


def _prompt() -> list[Any]:
    return [{"role": "system", "content": f"Now {datetime.now().isoformat()} run {uuid.uuid4()}"}, U("hi")]


def test_g09_what_changes_in_every_run_is_named_with_the_way_out(srv: Any, p: Path) -> None:
    with rec(p):
        want = ask(oa(srv.url), _prompt())
    with diverging(p), pytest.raises(Divergence) as caught:
        ask(oa(srv.url), _prompt())
    text = str(caught.value)
    assert "/request/messages/0/content" in text
    assert "ignore=" in text and "normalize=['iso_time', 'uuid']" in text
    assert '"hi"' not in text, "only the part that differs is shown"
    with frozen(p, normalize=["iso_time", "uuid"]) as session:
        assert ask(oa(srv.url), _prompt()) == want
    assert session.report().normalised == ("iso_time", "uuid")
    assert "normalised before matching: iso_time, uuid" in session.report().text()


def _no_digits(text: str) -> str:
    return re.sub(r"[0-9a-f]{4,}|\d", "", text)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"normalize": [ISO_TIME, UUID]}, ("iso_time", "uuid")),
        ({"normalize": [re.compile(r"^Now .*"), _no_digits]}, ("^Now .*", "_no_digits")),
        ({"ignore": ["/request/messages/0/content"]}, ()),
        ({"ignore": ["/request/messages/*/content"]}, ()),
    ],
)
def test_g09_each_kind_of_rule_applies_to_both_sides(
    options: dict[str, Any], names: tuple[str, ...], srv: Any, p: Path
) -> None:
    with rec(p):
        want = ask(oa(srv.url), _prompt())
    with frozen(p, **options) as session:
        assert ask(oa(srv.url), _prompt()) == want
    assert session.report().normalised == names


def test_g09_a_normaliser_hides_nothing_else_and_its_failure_is_said(srv: Any, p: Path) -> None:
    with rec(p):
        ask(oa(srv.url), [U("at 2026-01-01T10:00:00Z")])
    with diverging(p, normalize=["iso_time"]), pytest.raises(Divergence):
        ask(oa(srv.url), [U("on 2026-01-01T10:00:01Z")])

    def broken(text: str) -> str:
        raise LookupError(text)

    with (
        pytest.raises(ReplayError, match="LookupError") as caught,
        ReplaySession.from_trace(p, normalize=[broken]),
    ):
        ask(oa(srv.url), [U("at 2026-01-01T10:00:02Z")])
    assert caught.value.code == "ignore_rule_failed"


# --- G10 --------------------------------------------------------------------------------------------------------------


def _a() -> str:
    return "a"


def _b() -> str:
    return "b"


@pytest.mark.parametrize("order", ["causal", "strict"])
def test_g10_another_order_is_reported_at_its_own_step(order: str, p: Path) -> None:
    a, b = tool(_a), tool(_b)
    with rec(p):
        a(), b()
    session = ReplaySession.from_trace(p, order=order)
    with pytest.raises(Divergence) as caught, session:
        b(), a()
    assert caught.value.code == "out_of_order"
    assert "call 1 of 2" in str(caught.value)


def test_g10_missing_steps_are_found_at_the_end(p: Path) -> None:
    a, b = tool(_a), tool(_b)
    with rec(p):
        a(), b()
    with pytest.raises(Divergence) as caught, frozen(p):
        a()
    assert caught.value.code == "unused_calls" and "'_b'" in str(caught.value)


# --- G11 --------------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    (1, 2), {1, 2}, b"x", datetime(2026, 1, 1, tzinfo=UTC), Decimal("1.10"), 2**70, float("inf"), {1: 2},
    frozenset({3}), uuid.UUID(int=5), -0.0, True, None, Path("/a"),
]  # fmt: skip


def test_g11_values_come_back_with_their_types(p: Path) -> None:
    tools = [tool(lambda value=value: value, f"t{at}") for at, value in enumerate(VALUES)]
    with rec(p):
        live = [one() for one in tools]
    with frozen(p):
        for was, one in zip(live, tools, strict=True):
            now = one()
            assert (type(now), repr(now)) == (type(was), repr(was))


# --- G12 --------------------------------------------------------------------------------------------------------------


class Declined(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def test_g12_a_failure_is_raised_again_with_its_members(p: Path) -> None:
    def pay() -> None:
        raise Declined(51, "no funds")

    traced = tool(pay)
    with rec(p), pytest.raises(Declined):
        traced()
    with frozen(p), pytest.raises(Declined) as caught:
        traced()
    assert (caught.value.code, str(caught.value)) == (51, "no funds")


def test_g12_errors_of_sdk_and_network_are_their_own_classes(srv: Any, p: Path, q: Path) -> None:
    with rec(p), pytest.raises(openai.APIStatusError) as first:
        ask(oa(srv.url), [U("BOOM")])
    reached = sent(srv)
    with frozen(p), pytest.raises(type(first.value)) as again:
        ask(oa(srv.url), [U("BOOM")])
    assert again.value.status_code == first.value.status_code
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/x"
        with rec(q), pytest.raises(httpx.ConnectError):
            httpx.get(url)
    with frozen(q), pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert sent(srv) == reached


# --- G14 --------------------------------------------------------------------------------------------------------------


def test_g14_what_is_recorded_is_the_answer_and_not_what_became_of_it(srv: Any, p: Path) -> None:
    def program() -> tuple[str, str | None]:
        clean = (ask(oa(srv.url), [U("  Raw  ")]) or "").strip().upper()
        return clean, ask(oa(srv.url), [U(clean)])

    with rec(p):
        want = program()
    with frozen(p):
        assert program() == want
    [first, *_] = [output for output in outputs(p) if isinstance(output, dict) and "choices" in output]
    assert first["choices"][0]["message"]["content"].strip().upper() == want[0]
    assert first["choices"][0]["message"]["content"] != want[0]


# --- G16 --------------------------------------------------------------------------------------------------------------


def test_g16_a_failure_and_its_success_come_in_order_and_without_waiting(srv: Any, p: Path) -> None:
    def get() -> int:
        with httpx.Client() as client:
            for attempt in range(3):
                answer = client.get(srv.url + "/flaky")
                if answer.status_code == 200:
                    return attempt
        raise AssertionError("it never came up")

    with rec(p):
        tries = get()
    reached = sent(srv)
    with frozen(p):
        assert get() == tries == 1
    assert (n_http(p), sent(srv)) == (2, reached)


def test_g16_attempts_of_one_llm_call_are_one_step(srv: Any, p: Path) -> None:
    def question() -> str | None:
        return ask(oa(srv.url, max_retries=2), [U("hi")])

    busy = (("content-type", "application/json"), ("retry-after", "0"))
    srv.script.append(Scripted(status=429, headers=busy, body=b'{"error": {"message": "busy"}}'))
    with rec(p):
        want = question()
    assert (n_llm(p), [row["status"] for row in wire(p)]) == (1, [429, 200])
    reached = sent(srv)
    with frozen(p):
        assert question() == want
    assert sent(srv) == reached
