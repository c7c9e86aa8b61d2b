# SPDX-License-Identifier: Apache-2.0
"""Modes and policies of the session alone: what goes out, whose place it takes, and what is then out of order."""

from __future__ import annotations

from typing import Any

import pytest

from sftrace_otel.core.match import PATH
from sftrace_otel.core.plan import Outcome
from sftrace_otel.core.session import RunOutcome, Session
from sftrace_otel.errors import ReplayError, ReplayExhaustedError, ReplayMismatchError, ReplayPolicyError

DONE = RunOutcome(status="completed")
NAMED: dict[str, Any] = {"mode": "hybrid", "live_llms": ["openai/m"]}


def conversation(build: Any) -> list[Any]:
    """llm, tool, llm, tool."""
    return [
        build.llm(0, {"q": "a"}, lineage="0"),
        build.tool(1, payload={"x": 1}, lineage="1"),
        build.llm(2, {"q": "b"}, lineage="2"),
        build.tool(3, payload={"x": 2}, lineage="3"),
    ]


def asked(build: Any, call: Any, **payload: Any) -> Any:
    return build.live(call, payload={"method": "chat.completions.create", "request": payload})


def place(decision: Any) -> tuple[str, int | None, str | None]:
    return decision.action, None if decision.call is None else decision.call.index, decision.rung


@pytest.mark.parametrize("order", ["causal", "strict", "any"])
def test_a_call_that_goes_out_takes_the_place_of_its_counterpart(build: Any, order: str) -> None:
    calls = conversation(build)
    session = Session(calls, order=order, **NAMED)
    rung = "name" if order == "strict" else "lineage"
    assert place(session.decide(asked(build, calls[0], q="other"))) == ("live", 0, rung)
    assert place(session.decide(build.live(calls[1]))) == ("serve", 1, "lineage")
    assert place(session.decide(asked(build, calls[2], q="other"))) == ("live", 2, rung)
    assert place(session.decide(build.live(calls[3]))) == ("serve", 3, "lineage")
    report = session.report(outcome=DONE, expected=DONE)
    assert (report.exit_code, report.live, report.replaced, report.served) == (0, 2, 2, 2)
    assert report.live_calls == {"LLM openai/m chat.completions.create": 2}


def test_without_lineage_an_equal_call_comes_before_the_next_of_its_name(build: Any) -> None:
    calls = conversation(build)
    session = Session(calls, order="any", **NAMED)
    assert place(session.decide(build.live(calls[2], lineage=None))) == ("live", 2, "digest")
    assert place(session.decide(build.live(calls[2], lineage=None))) == ("live", 0, "name")
    assert place(session.decide(build.live(calls[2], lineage=None))) == ("live", None, None)


def test_a_live_call_that_skips_a_tool_leaves_what_waited_for_it_out_of_order(build: Any) -> None:
    calls = conversation(build)
    session = Session(calls, **NAMED)
    session.decide(asked(build, calls[0], q="x"))
    session.decide(asked(build, calls[2], q="y"))
    with pytest.raises(ReplayMismatchError) as caught:
        session.decide(build.live(calls[3]))
    assert caught.value.code == "out_of_order"


def test_strict_order_holds_for_calls_that_go_out(build: Any) -> None:
    calls = conversation(build)
    session = Session(calls, order="strict", **NAMED)
    session.decide(asked(build, calls[0], q="x"))
    with pytest.raises(ReplayMismatchError) as caught:
        session.decide(asked(build, calls[2], q="y"))
    assert caught.value.code == "out_of_order"
    session = Session(calls[:1], order="strict", **NAMED)
    session.decide(asked(build, calls[0], q="x"))
    with pytest.raises(ReplayExhaustedError):
        session.decide(asked(build, calls[0], q="y"))


def test_tools_inside_a_live_llm_call_are_served_and_its_exchanges_are_not_missed(build: Any) -> None:
    calls = [
        build.llm(0, {"q": 1}, lineage="0", span=(0, 9)),
        build.http(1, "POST", "http://h.test/x", lineage="0/0", parent=0, span=(1, 2)),
        build.tool(2, payload=1, lineage="0/1", parent=0, span=(3, 4)),
    ]
    session = Session(calls, **NAMED)
    session.decide(asked(build, calls[0], q=2))
    assert place(session.decide(build.live(calls[2]))) == ("serve", 2, "lineage")
    session.verify_complete()


def test_live_mode_replaces_what_is_inside_a_named_tool(build: Any) -> None:
    calls = [
        build.tool(0, "work", 1, lineage="0", span=(0, 9)),
        build.tool(1, "inner", 2, lineage="0/0", parent=0, span=(1, 2)),
    ]
    session = Session(calls, mode="live", live_tools=["work"])
    session.decide(build.live(calls[0]))
    session.verify_complete()
    with pytest.raises(ReplayPolicyError) as caught:
        session.decide(build.live(calls[1]))
    assert caught.value.code == "not_named"


def test_an_exchange_is_the_same_at_a_mapped_host(build: Any) -> None:
    calls = [build.http(0, "GET", "http://a.test/x?q=1"), build.http(1, "GET", "http://a.test/y")]
    session = Session(calls, mode="live", live_tools=["http GET *"], map_hosts={"a.test": "b.test:8"}, order="any")
    live = build.http(0, "GET", "http://b.test:8/y?other=1")
    assert place(session.decide(build.live(live))) == ("live", 1, "name")


def test_derived_is_served_to_who_cannot_run_it(build: Any) -> None:
    calls = [build.tool(0, policy="derived")]
    assert Session(calls).decide(build.live(calls[0])).action == "serve"
    session = Session(calls)
    decision = session.decide(build.live(calls[0]), runs=True)
    assert decision.action == "derived" and decision.call is not None
    session.returned(decision.call, 0)
    assert session.report(outcome=DONE, expected=DONE).exit_code == 0
    with pytest.raises(ReplayMismatchError) as caught:
        session.returned(decision.call, 1)
    assert caught.value.code == "derived_differs"
    with pytest.raises(ReplayError):  # latched
        session.decide(build.live(calls[0]))


@pytest.mark.parametrize("held", ["[REDACTED]", {"key": "[REDACTED]"}])
def test_what_was_redacted_in_a_derived_result_is_not_compared(build: Any, held: Any) -> None:
    call = build.tool(0, policy="derived", outcome=Outcome(status="ok", held=held))
    now = {"key": "other"} if isinstance(held, dict) else "other"
    Session([call]).returned(call, now)


@pytest.mark.parametrize(
    ("text", "left"),
    [("in /tmp/a1/x.txt now", "in  now"), (r"C:\Users\me\x", ""), ("https://h.test/a/b", "https://h.test/a/b"),
     ("a/b/c", "a/b/c"), ("1/2/3", "1/2/3"), ("file:///a/b", ""), ("/x", "/x"), ('"/a/b"', '""')],
)  # fmt: skip
def test_absolute_paths_are_known(text: str, left: str) -> None:
    assert PATH.sub("", text) == left
