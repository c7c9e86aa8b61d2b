# SPDX-License-Identifier: Apache-2.0
"""From events and sidecar rows to calls: pairing, errors, order, nesting; the bundles that stepfork 0.2.1 wrote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.core.plan import RecordedCall, extract_calls
from sftrace_otel.core.session import LiveCall, RunOutcome, Session
from sftrace_otel.formats.sftrace import (
    ErrorEvent,
    EventBase,
    LLMRequest,
    LLMResponse,
    RunStart,
    ToolCall,
    ToolResult,
    parse_event,
    with_hashes,
)

VECTORS = Path(__file__).resolve().parent.parent / "data" / "vectors" / "sftrace"


def events_of(name: str) -> list[EventBase]:
    lines = (VECTORS / f"{name}.sftrace" / "events.jsonl").read_bytes().splitlines()
    return [parse_event(line) for line in lines]


def vector(name: str) -> list[RecordedCall]:
    return extract_calls(events_of(name))


def call(event_id: str, name: str = "t", parent: str | None = None, **more: Any) -> ToolCall:
    return ToolCall(id=event_id, name=name, parent_id=parent, input=more.pop("input", {}), **more)


def result(event_id: str, parent: str | None = None, name: str = "t", output: Any = None, **more: Any) -> ToolResult:
    return ToolResult(id=event_id, name=name, parent_id=parent, output=output, **more)


def row(request: str, start: int, end: int | None, **more: Any) -> Any:
    return {"call": 0, "kind": "tool", "request": request, "start_ns": start, "end_ns": end, "end": "finished", **more}


# --- stepfork's bundles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["completed", "legacy", "hashless"])
def test_a_run_with_a_tool_an_llm_call_and_a_tool_inside_a_tool(name: str) -> None:
    calls = vector(name)
    assert [(c.kind, c.name, c.parent, c.outcome.status) for c in calls] == [
        ("tool", "get_value", None, "ok"),
        ("llm", "gpt-4o-mini", None, "ok"),
        ("tool", "outer", None, "ok"),
        ("tool", "inner", 2, "ok"),
    ]
    assert (calls[1].provider, calls[1].model, calls[1].method) == ("openai", "gpt-4o-mini", "chat.completions.create")
    assert calls[0].input == {"scale": 1.0, "x": 42}
    assert calls[0].outcome.output == {"value": 42.0}
    assert (calls[0].input_hash is None) == (name == "hashless")
    assert [c.lineage for c in calls] == [None] * 4
    assert calls[2].started < calls[3].started < calls[3].ended < calls[2].ended  # type: ignore[operator]


def test_overlapping_calls_get_their_own_results() -> None:
    calls = vector("parallel")
    assert [(c.input, c.outcome.output) for c in calls] == [({"i": 0}, 0), ({"i": 1}, 1), ({"i": 2}, 4)]
    assert all(a.ended > b.started for a in calls for b in calls if a.ended is not None)


def test_a_failed_tool_keeps_its_error() -> None:
    fine, failed = vector("failed_tool")
    assert (fine.outcome.status, failed.outcome.status) == ("ok", "error")
    assert failed.outcome.error_type == "ValueError"
    assert failed.outcome.error_message == failed.outcome.output["message"]  # type: ignore[index,call-overload]


def test_a_call_that_was_cut_has_no_result() -> None:
    (cut,) = vector("partial")
    assert (cut.outcome.status, cut.outcome.output, cut.ended) == ("missing", None, None)


@pytest.mark.parametrize("name", ["completed", "legacy", "hashless", "parallel", "numbers", "secrets", "failed_tool"])
@pytest.mark.parametrize("order", ["causal", "strict"])
def test_they_replay_from_their_own_payloads(name: str, order: str) -> None:
    calls = vector(name)
    session = Session(calls, order=order)
    for c in calls:
        if c.parent is None:
            live = LiveCall(c.kind, c.name, c.provider, c.model, c.method, c.input, None)
            assert session.decide(live).call is c
    done = RunOutcome(status="completed")
    report = session.report(outcome=done, expected=done)
    assert report.exit_code == 0
    assert (report.unhashed > 0) == (name == "hashless")
    assert ("not verified" in report.text()) == (name == "hashless")


# --- pairing ----------------------------------------------------------------------------------------------------------


def test_legacy_results_go_to_the_first_open_call_of_their_name() -> None:
    events = [
        call("a"),
        call("b"),
        call("c", "u"),
        result("d", None, "u", 3),
        result("e", None, "t", 1),
        result("f", None, "t", 2),
    ]
    assert [c.outcome.output for c in extract_calls(events)] == [1, 2, 3]


def test_a_parent_beats_the_name_and_a_wrong_parent_does_not_count() -> None:
    events = [RunStart(id="r"), call("a"), call("b"), result("x", "b", output=2), result("y", "r", output=1)]
    assert [c.outcome.output for c in extract_calls(events)] == [1, 2]


def test_legacy_llm_answers_name_another_model() -> None:
    events = [
        LLMRequest(id="a", model="m", input={}),
        LLMRequest(id="b", model="m", input={}),
        LLMResponse(id="c", model="m-2026", output="first"),
        LLMResponse(id="d", output="second"),
    ]
    assert [c.outcome.output for c in extract_calls(events)] == ["first", "second"]


def test_the_first_result_counts_and_a_stray_one_does_not() -> None:
    events = [result("s", None, "t", 0), call("a"), result("x", "a", output=1), result("y", "a", output=2)]
    assert [c.outcome.output for c in extract_calls(events)] == [1]


def test_errors_under_requests_and_under_results() -> None:
    events = [
        LLMRequest(id="a", model="m", provider="openai", input={"method": "x.create", "request": {}}),
        ErrorEvent(id="b", parent_id="a", error_type="BadRequestError", message="no"),
        call("c"),
        ErrorEvent(id="d", parent_id="c", error_type="CancelledError", message="CancelledError"),
        call("e"),
        result("f", "e", output={"unlike": "the rest"}, status="error"),
        ErrorEvent(id="g", parent_id="f", error_type="KeyError", message="'k'"),
        call("h"),
        result("i", "h", output=1),
        ErrorEvent(id="j", parent_id="i", error_type="Late", message="after the answer"),
        call("k"),
        result("l", "k", output=None, status="error"),
    ]
    outcomes = [(c.outcome.status, c.outcome.error_type, c.outcome.error_message) for c in extract_calls(events)]
    assert outcomes == [
        ("error", "BadRequestError", "no"),
        ("error", "CancelledError", "CancelledError"),
        ("error", "KeyError", "'k'"),
        ("ok", None, None),
        ("error", "Exception", ""),
    ]


def test_http_calls_are_told_by_their_name() -> None:
    events = [call("a", "http GET http://h.test/x"), call("b", "http get"), call("c", "http client")]
    assert [(c.kind, c.method) for c in extract_calls(events)] == [("http", "GET"), ("tool", None), ("tool", None)]


def test_a_parent_event_encloses_only_what_began_before_its_result() -> None:
    """Some recorders hang each call on the one before; then the first must not swallow the rest."""
    events = [
        call("a"),
        result("b", "a"),
        call("c", parent="b"),
        call("d", parent="a"),
        call("e", parent="d"),
        result("f", "d"),
    ]
    assert [c.parent for c in extract_calls(events)] == [None, None, None, 2]


# --- sidecars ---------------------------------------------------------------------------------------------------------


def test_rows_add_lineage_times_tags_and_how_it_ended() -> None:
    events = [with_hashes(call("a", input={"p": [1, 2]})), with_hashes(result("b", "a", output=[1, 2]))]
    rows = [
        row("a", 100, 900, lineage="t1/0", truncated=True, exception={"module": "m", "qualname": "E", "args": [1]},
            tags={"/input/p": "tuple", "/output": "tuple", "/outputs": "x"}),
        row("nobody", 1, 2),
        row("a", 5, 6, lineage="9"),
    ]  # fmt: skip
    blob = {"sha256:aa": b"body"}
    wires = [{"event_id": "a", "attempt": 2}, {"event_id": "zzz", "attempt": 1}, {"event_id": "a", "attempt": 1}]
    (got,) = extract_calls(events, rows, wires, lambda ref: blob[ref["$blob"]])  # type: ignore[arg-type]
    assert (got.lineage, got.started, got.ended) == ("t1/0", (100, 0), (900, 1))
    assert got.input_tags == {"/p": "tuple"}
    assert got.outcome.output_tags == {"": "tuple"}
    assert (got.outcome.truncated, got.outcome.end) == (True, "finished")
    assert got.outcome.exception == {"module": "m", "qualname": "E", "args": [1]}
    assert [attempt["attempt"] for attempt in got.outcome.wire] == [1, 2]
    assert got.outcome.read_blob is not None and got.outcome.read_blob({"$blob": "sha256:aa"}) == b"body"


def test_rows_tell_what_was_awaited_and_what_a_generator_returned() -> None:
    events = [call("a"), call("b"), call("c")]
    returned = {"value": 5, "tags": {}}
    rows = [
        row("a", 1, 2, awaitable="future"),
        row("b", 1, 2, returned=returned),
        row("c", 1, 2, awaitable=7, returned=[1]),
    ]
    outcomes = [got.outcome for got in extract_calls(events, rows)]
    assert [outcome.awaitable for outcome in outcomes] == ["future", None, None]
    assert [outcome.returned for outcome in outcomes] == [None, returned, None]


def test_times_decide_the_order_only_where_every_call_has_one() -> None:
    events = [call("a"), call("b"), result("x", "a"), result("y", "b")]
    timed = extract_calls(events, [row("a", 20, 30), row("b", 10, None)])
    assert [(c.request_id, c.started[0], c.ended) for c in timed] == [("b", 10, None), ("a", 20, (30, 2))]
    untimed = extract_calls(events, [row("a", 20, 30)])
    assert [(c.request_id, c.started, c.ended) for c in untimed] == [("a", (0, 0), (0, 2)), ("b", (0, 1), (0, 3))]


@pytest.mark.parametrize("lineage", ["", "t1", "1/t2", "x/0", "0/", "/0", "0\n", "-1", "１", "9" * 10, None])
def test_a_lineage_that_names_no_call_is_no_lineage(lineage: str | None) -> None:
    (got,) = extract_calls([call("a")], [row("a", 1, 2, lineage=lineage)])
    assert got.lineage is None
    Session([got])


def test_lineage_tells_what_a_tool_enclosed_even_when_it_outlived_the_tool() -> None:
    events = [call("a"), call("b", parent="a"), result("x", "a"), call("c"), result("y", "b"), result("z", "c")]
    rows = [row("a", 1, 3, lineage="0"), row("b", 2, 5, lineage="0/0"), row("c", 4, 6, lineage="0/t1/0")]
    assert [c.parent for c in extract_calls(events, rows)] == [None, 0, 0]


def test_payloads_cannot_be_changed_through_what_they_show() -> None:
    (got,) = extract_calls([call("a", input={"x": [1]})])
    shown: Any = got.input
    shown["x"].append(2)
    assert got.input == {"x": [1]}


def test_a_long_recording_opens_in_linear_time() -> None:
    def seconds(count: int) -> float:
        events: list[EventBase] = []
        for number in range(count):
            events += [call(f"a{number}"), result(f"b{number}", None if number % 2 else f"a{number}")]
        began = time.process_time()
        assert len(extract_calls(events)) == count
        return time.process_time() - began

    assert min(seconds(20_000) for _ in range(2)) < 40 * max(min(seconds(2_000) for _ in range(3)), 0.001)
