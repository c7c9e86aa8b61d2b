# SPDX-License-Identifier: Apache-2.0
"""The pure part of forking."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftrace_otel.core.fork import Forked, ForkPoint, OverrideSpec, fork
from sftrace_otel.core.prices import Prices
from sftrace_otel.errors import ForkError
from sftrace_otel.formats import canonical, sftrace
from sftrace_otel.formats.sftrace import (
    ErrorEvent,
    EventBase,
    Failure,
    LLMRequest,
    LLMResponse,
    Manifest,
    RedactionEntry,
    RunEnd,
    RunStart,
    StateChange,
    ToolCall,
    ToolResult,
    TraceData,
    validate,
)


def clean(value: Any) -> tuple[bytes, list[tuple[str, str]]]:
    """Stands for a redaction policy: hides the member `password`."""
    if isinstance(value, dict) and "password" in value:
        return canonical.dumps({**value, "password": "[REDACTED]"}), [("/password", "sensitive_key")]
    return canonical.dumps(value), []


def trace_of(*parts: EventBase, **manifest: Any) -> TraceData:
    events = tuple(
        sftrace.with_hashes(part.replace(id=f"evt_{step}", step=step, run_id="run_p"))
        for step, part in enumerate(parts)
    )
    made = Manifest(
        **{
            "run_id": "run_p",
            "agent_name": "a",
            "created_at": "2026-01-01T00:00:00Z",
            "status": "completed",
            "totals": sftrace.Totals(cost_usd=9.0, duration_ms=50),
            **manifest,
        }
    )
    return TraceData(manifest=made.replace(totals=sftrace.totals(events, known=made.totals)), events=events)


def completed() -> TraceData:
    return trace_of(
        RunStart(input=1),
        ToolCall(name="f", input={"x": 1}, parent_id="evt_0"),
        ToolResult(name="f", output={"v": 1}, parent_id="evt_1", duration_ms=7, replay_policy="live"),
        LLMRequest(model="m", input={}, parent_id="evt_0"),
        LLMResponse(
            model="m", output={"text": "hi"}, parent_id="evt_3", duration_ms=8, prompt_tokens=1, completion_tokens=2,
            total_tokens=3, cost_usd=0.25,
        ),
        StateChange(key="k", before=1, after=2, parent_id="evt_0"),
        RunEnd(run_status="completed", output="done"),
    )  # fmt: skip


def failed() -> TraceData:
    return trace_of(
        RunStart(input=None),
        ToolCall(name="boom", input={}, parent_id="evt_0"),
        ToolResult(
            name="boom", output={"error_type": "ValueError", "message": "bad"}, status="error", parent_id="evt_1"
        ),
        ErrorEvent(error_type="ValueError", message="bad", parent_id="evt_2"),
        ErrorEvent(error_type="ValueError", message="bad", parent_id="evt_0"),
        RunEnd(run_status="failed", output=None),
        status="failed",
        failure=Failure(type="ValueError", message="bad", step=4),
    )


def cut(trace: TraceData, step: int, *overrides: OverrideSpec) -> Forked:
    return fork(trace, ForkPoint(step=step), overrides, run_id="run_f", clean=clean)


@pytest.mark.parametrize("make", [completed, failed])
def test_every_fork_is_valid_and_keeps_ids_and_payloads(make: Any) -> None:
    trace = make()
    for step in range(len(trace.events)):
        forked = cut(trace, step).data
        assert validate(forked.manifest, forked.events, verify_hashes=True) == []
        assert [event.id for event in forked.events] == [event.id for event in trace.events[: step + 1]]
        assert {event.run_id for event in forked.events} == {"run_f"}
        assert [event.replace(run_id="run_p") for event in forked.events] == list(trace.events[: step + 1])


def test_status_says_what_the_fork_holds() -> None:
    assert [cut(failed(), step).data.manifest.status for step in range(6)] == ["running"] * 4 + ["failed"] * 2
    assert [cut(failed(), step).data.manifest.failure is None for step in range(6)] == [True] * 4 + [False] * 2
    assert [cut(completed(), step).data.manifest.status for step in range(7)] == ["running"] * 6 + ["completed"]


def test_totals_are_those_of_the_kept_events() -> None:
    assert cut(completed(), 1).data.manifest.totals == sftrace.Totals(events=2, tool_calls=1)
    assert cut(completed(), 5).data.manifest.totals.cost_usd == 0.25
    assert cut(completed(), 6).data.manifest.totals == completed().manifest.totals


def test_a_fork_point_can_be_an_event() -> None:
    forked = fork(completed(), ForkPoint(event_id="evt_2"), run_id="run_f", clean=clean)
    assert (forked.event_id, forked.step, len(forked.data.events)) == ("evt_2", 2, 3)


def test_events_of_one_step_go_together() -> None:
    trace = completed()
    together = tuple(event.replace(step=min(event.step, 3)) for event in trace.events)
    trace = TraceData(manifest=trace.manifest, events=together)
    for point in (ForkPoint(step=3), ForkPoint(event_id="evt_3")):
        assert len(fork(trace, point, run_id="r", clean=clean).data.events) == 7
    assert len(cut(trace, 2).data.events) == 3


def test_an_override_changes_the_output_and_leaves_the_rest() -> None:
    forked = cut(
        completed(), 4, OverrideSpec(step=4, output={"text": "ho"}), OverrideSpec(event_id="evt_2", output=None)
    )
    tool, answer = forked.data.events[2], forked.data.events[4]
    assert isinstance(tool, ToolResult) and isinstance(answer, LLMResponse)
    assert (tool.output, answer.output) == (None, {"text": "ho"})
    assert tool.output_hash == hashlib.sha256(b"null").hexdigest()
    before = completed().events
    same = {"run_id": "run_p"}
    assert tool.replace(output={"v": 1}, output_hash=before[2].output_hash, **same) == before[2]
    assert answer.replace(output={"text": "hi"}, output_hash=before[4].output_hash, **same) == before[4]
    assert validate(forked.data.manifest, forked.data.events, verify_hashes=True) == []
    assert [(one.event_id, one.was, one.now) for one in forked.overridden] == [
        ("evt_2", before[2].output_hash, tool.output_hash),
        ("evt_4", before[4].output_hash, answer.output_hash),
    ]


def test_an_event_id_wins_over_a_step() -> None:
    by_step, by_id = OverrideSpec(step=2, output="step"), OverrideSpec(event_id="evt_2", output="id")
    for order in ([by_step, by_id], [by_id, by_step]):
        forked = cut(completed(), 2, *order)
        assert forked.data.events[2].output == "id"  # type: ignore[attr-defined]
        assert len(forked.overridden) == 1


def test_a_failed_result_that_is_given_an_output_counts_as_ok() -> None:
    assert cut(failed(), 2, OverrideSpec(step=2, output={"v": 1})).data.events[2].status == "ok"
    still = OverrideSpec(step=2, output={"error_type": "KeyError", "message": "x"})
    assert cut(failed(), 2, still).data.events[2].status == "error"
    assert cut(completed(), 2, OverrideSpec(step=2, output=1)).data.events[2].status == "ok"


def test_an_override_passes_the_policy_and_replaces_the_old_findings() -> None:
    trace = completed()
    marked = trace.events[2].replace(redactions=("/output/v", "/name"))
    entries = (
        RedactionEntry(event_id="evt_2", path="/output/v", reason="old"),
        RedactionEntry(event_id="evt_2", path="/name", reason="name"),
        RedactionEntry(event_id="evt_6", path="/output", reason="later"),
        RedactionEntry(event_id="__manifest__", path="/agent_name", reason="m"),
        RedactionEntry(event_id="__manifest__", path="/failure/message", reason="m"),
    )
    trace = TraceData(
        manifest=trace.manifest, events=(*trace.events[:2], marked, *trace.events[3:]), redactions=entries
    )
    forked = cut(trace, 2, OverrideSpec(step=2, output={"password": "hunter2", "a": 1}))
    assert forked.data.events[2].output == {"password": "[REDACTED]", "a": 1}  # type: ignore[attr-defined]
    assert forked.data.events[2].redactions == ("/name", "/output/password")
    assert [(entry.event_id, entry.path) for entry in forked.data.redactions] == [
        ("evt_2", "/name"),
        ("__manifest__", "/agent_name"),
        ("evt_2", "/output/password"),
    ]
    assert "hunter2" not in repr(forked)


def test_what_an_override_leaves_redacted_stays_marked() -> None:
    trace = completed()
    old = {"key": "[REDACTED]", "url": "x?k=[REDACTED]", "gone": "[REDACTED]"}
    pointers = tuple(f"/output/{name}" for name in old)
    marked = trace.events[2].replace(output=old, redactions=pointers)
    entries = tuple(RedactionEntry(event_id="evt_2", path=path, reason="sensitive_key") for path in pointers)
    trace = TraceData(
        manifest=trace.manifest, events=(*trace.events[:2], marked, *trace.events[3:]), redactions=entries
    )
    forked = cut(trace, 2, OverrideSpec(step=2, output={**old, "gone": 1, "password": "hunter2"})).data
    kept = ("/output/key", "/output/url", "/output/password")
    assert forked.events[2].redactions == kept and tuple(entry.path for entry in forked.redactions) == kept


def test_other_usage_makes_other_tokens_and_another_cost() -> None:
    prices = Prices.from_json('{"m": {"input": 1000000, "output": 2000000}}')
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    options: dict[str, Any] = {"run_id": "r", "clean": clean}
    override = [OverrideSpec(step=4, output={"usage": usage})]
    for table, cost in ((prices, 11.0), (None, None)):
        data = fork(completed(), ForkPoint(step=6), override, prices=table, **options).data
        answer: Any = data.events[4]
        assert (answer.prompt_tokens, answer.completion_tokens, answer.total_tokens) == (3, 4, 7)
        assert answer.cost_usd == data.manifest.totals.cost_usd == cost
        assert data.manifest.totals.duration_ms == 50 and answer.duration_ms == 8
        assert validate(data.manifest, data.events, verify_hashes=True) == []
    same: Any = fork(completed(), ForkPoint(step=6), [OverrideSpec(step=4, output="x")], prices=prices, **options).data
    assert (same.events[4].total_tokens, same.events[4].cost_usd, same.manifest.totals.cost_usd) == (3, 0.25, 9.0)


def test_rows_of_what_was_cut_or_replaced_are_stale_with_their_requests() -> None:
    assert cut(completed(), 3).stale == {"evt_4", "evt_3", "evt_5", "evt_6"}
    assert cut(completed(), 6).stale == set()
    assert cut(completed(), 6, OverrideSpec(step=2, output=1)).stale == {"evt_1", "evt_2"}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            [OverrideSpec(step=999, output={})],
            "invalid overrides: override targets step 999 but trace only has 7 steps",
        ),
        (
            [OverrideSpec(step=1, output={})],
            "invalid overrides: override targets step 1 (tool_call); "
            "only tool_result and llm_response can be overridden",
        ),
        (
            [OverrideSpec(event_id="evt_0", output={})],
            "invalid overrides: override targets run_start event evt_0; "
            "only tool_result and llm_response can be overridden",
        ),
        ([OverrideSpec(event_id="nope", output={})], "invalid overrides: override targets non-existent event nope"),
        ([OverrideSpec(step=5, output={}), OverrideSpec(step=5, output={})], "duplicate override for step 5"),
        (
            [OverrideSpec(event_id="evt_2", output={}), OverrideSpec(event_id="evt_2", output={})],
            "duplicate override for event evt_2",
        ),
        (
            [OverrideSpec(step=4, output={})],
            "invalid overrides: override targets step 4, which comes after the fork point (step 3)",
        ),
    ],
)
def test_overrides_that_do_not_fit(overrides: list[OverrideSpec], text: str) -> None:
    with pytest.raises(ForkError) as caught:
        cut(completed(), 3, *overrides)
    assert str(caught.value) == text


def test_all_misfits_are_named_at_once() -> None:
    with pytest.raises(ForkError, match=r"step 999.*; .*step 1 \(tool_call\)"):
        cut(completed(), 3, OverrideSpec(step=999, output=1), OverrideSpec(step=1, output=1))


def test_a_step_with_several_results_needs_an_event_id() -> None:
    trace = completed()
    together = tuple(event.replace(step=min(event.step, 2)) for event in trace.events)
    trace = TraceData(manifest=trace.manifest, events=together)
    with pytest.raises(ForkError, match="several results"):
        cut(trace, 2, OverrideSpec(step=2, output=1))
    assert len(cut(trace, 2, OverrideSpec(event_id="evt_4", output=1)).overridden) == 1


def test_a_step_that_no_event_has() -> None:
    trace = completed()
    gaps = TraceData(
        manifest=trace.manifest, events=tuple(event.replace(step=event.step * 2) for event in trace.events)
    )
    with pytest.raises(ForkError, match="step 3, which no event has"):
        cut(gaps, 12, OverrideSpec(step=3, output=1))
    with pytest.raises(ForkError, match="step 3 not found in trace"):
        cut(gaps, 3)


def test_fork_points_that_do_not_exist() -> None:
    with pytest.raises(ForkError, match=r"^step 999 not found in trace$"):
        cut(completed(), 999)
    with pytest.raises(ForkError, match=r"^event ID 'nope' not found in trace$"):
        fork(completed(), ForkPoint(event_id="nope"), run_id="r", clean=clean)


def test_a_parent_after_the_fork_point_breaks_it() -> None:
    trace = completed()
    orphan = trace.events[1].replace(parent_id="evt_5")
    trace = TraceData(manifest=trace.manifest, events=(trace.events[0], orphan, *trace.events[2:]))
    with pytest.raises(ForkError, match=r"fork at step 3 would break parent dependency: event evt_1 .* parent evt_5"):
        cut(trace, 3)


def test_exactly_one_target() -> None:
    for wrong in ({}, {"step": 1, "event_id": "e"}):
        with pytest.raises(ValueError, match="fork point"):
            ForkPoint(**wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="override"):
            OverrideSpec(**wrong, output=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fork point requires either event_id or step"):
        ForkPoint(event_id=None, step=None)
    assert ForkPoint(step=5) == ForkPoint(event_id=None, step=5)


@pytest.mark.parametrize("wrong", [{"step": "5"}, {"step": 5.0}, {"step": True}, {"event_id": 5}, {"event_id": b"e"}])
def test_targets_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fork point"):
        ForkPoint(**wrong)
    with pytest.raises(ValueError, match="override"):
        OverrideSpec(**wrong, output=1)


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=8), st.data())
def test_a_fork_of_a_fork_is_the_shorter_fork(rises: list[int], data: st.DataObject) -> None:
    steps = [sum(rises[: index + 1]) for index in range(len(rises))]
    events = tuple(
        ToolCall(id=f"e{index}", run_id="p", step=step, name="f", input={}) for index, step in enumerate(steps)
    )
    trace = TraceData(manifest=completed().manifest, events=events)
    early, late = sorted((data.draw(st.sampled_from(steps)), data.draw(st.sampled_from(steps))))
    twice = cut(cut(trace, late).data, early).data
    assert twice == cut(trace, early).data
    assert [event.step for event in twice.events] == [step for step in steps if step <= early]
