# SPDX-License-Identifier: Apache-2.0
"""Interop with the reference, stepfork 0.2.1: what it writes we read and fork, what we write it reads and forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stepfork
import stepfork.fork
import stepfork.replay
import stepfork.trace

from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.trace import (
    ErrorEvent,
    LLMRequest,
    LLMResponse,
    RunEnd,
    RunStart,
    StateChange,
    ToolCall,
    ToolResult,
    Trace,
    validate_bundle,
)

PAYLOADS: list[Any] = [
    None,
    -0.0,
    1e-7,
    1e16,
    1.5e300,
    2**53 + 1,
    2**70,
    "é\u2028\U0001f600\x00\x7f",
    {"b": 1, "a": {"\U0001f600": [], "\uffff": {}}, "": [1.0, True, None]},
    [[[[[["deep"]]]]]],
]


def test_the_reference_loads_verifies_and_forks_ours(tmp_path: Path) -> None:
    trace = Trace(agent_name="a")
    start = trace.add(RunStart(input=PAYLOADS))
    for payload in PAYLOADS:
        call = trace.add(ToolCall(name="f", input={"v": payload}, parent_id=start.id))
        trace.add(ToolResult(name="f", output=payload, parent_id=call.id, duration_ms=3))
    request = trace.add(LLMRequest(model="m", provider="openai", input={"method": "x"}, parent_id=start.id))
    trace.add(LLMResponse(model="m", output={}, parent_id=request.id, prompt_tokens=1, cost_usd=0.5))
    trace.add(StateChange(key="k", before={"password": "hunter2-x"}, after=None, parent_id=start.id))
    trace.add(ErrorEvent(error_type="E", message="m", details=None, parent_id=start.id))
    trace.add(RunEnd(run_status="completed", output="done"))
    path = trace.save(tmp_path / "ours.sftrace", status="completed")
    result = stepfork.trace.validate_bundle(path, strict=True, verify_integrity=True)
    assert result.issues == []
    theirs = stepfork.trace.Trace.load(path)
    assert [event.id for event in theirs.events] == [event.id for event in trace.events]
    forked = stepfork.fork.fork_trace(
        path,
        stepfork.fork.ForkPoint(event_id=None, step=4),
        overrides=[stepfork.fork.OverrideSpec(step=4, output={"new": 1})],
        output_path=tmp_path / "theirs.sftrace",
    )
    assert forked.success, forked.error_message
    assert validate_bundle(tmp_path / "theirs.sftrace", verify_integrity=True).exit_code == 0
    assert Trace.load(tmp_path / "theirs.sftrace").events[4].output == {"new": 1}  # type: ignore[attr-defined]


def record_theirs(path: Path) -> None:
    @stepfork.trace_tool(name="inner")
    def inner(x: float) -> Any:
        return {"x": x, "list": [1, 2.5, None]}

    @stepfork.trace_tool(name="outer")
    def outer(x: int) -> Any:
        return [inner(x * 1.0), inner(1e-7), inner(1e22)]

    @stepfork.trace_tool(name="boom")
    def boom() -> Any:
        raise KeyError("Bearer abcdefghijklmnop")

    with pytest.raises(KeyError), stepfork.record("theirs", output=path, run_input={"q": "é"}):
        outer(3)
        boom()


def test_we_load_verify_save_and_fork_what_the_reference_records(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sftrace"
    record_theirs(path)
    assert validate_bundle(path, verify_integrity=True).exit_code == 0
    trace = Trace.load(path)
    again = trace.save(tmp_path / "again.sftrace")
    for name in ("manifest.json", "events.jsonl", "redactions.json"):
        assert (again / name).read_bytes() == (path / name).read_bytes()
    for event in trace.events:
        fork = tmp_path / f"fork{event.step}.sftrace"
        overrides = [OverrideSpec(step=event.step, output={"new": 1})] if isinstance(event, ToolResult) else []
        fork_trace(path, ForkPoint(event_id=event.id), overrides=overrides, output_path=fork)
        assert validate_bundle(fork, verify_integrity=True).exit_code == 0
        assert stepfork.trace.validate_bundle(fork, strict=True, verify_integrity=True).issues == []


def test_the_reference_replays_our_fork_with_its_override(tmp_path: Path) -> None:
    calls: list[int] = []

    @stepfork.trace_tool(name="get_value")
    def get_value(x: int) -> dict[str, int]:
        calls.append(x)
        return {"value": x}

    with stepfork.record("agent", output=tmp_path / "original.sftrace"):
        get_value(42)
    override = OverrideSpec(step=2, output={"value": 999})
    fork_trace(
        tmp_path / "original.sftrace", ForkPoint(step=2), overrides=[override], output_path=tmp_path / "forked.sftrace"
    )
    with stepfork.replay.ReplaySession.from_trace(tmp_path / "forked.sftrace", mode="frozen"):
        assert get_value(42) == {"value": 999}
    assert calls == [42]
