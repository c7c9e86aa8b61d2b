# SPDX-License-Identifier: Apache-2.0
"""`sftrace_otel.trace` and `sftrace_otel.fork` as users type them; the code of the field's fork page (seed 003)."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sftrace_otel.bundle import read, store, write
from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.errors import CanonicalizationError, PayloadError, TraceStorageError
from sftrace_otel.fork import ForkEngine, ForkError, ForkPoint, ForkResult, OverrideSpec, fork_trace
from sftrace_otel.formats import sidecars
from sftrace_otel.trace import (
    ErrorEvent,
    FailureInfo,
    LLMRequest,
    LLMResponse,
    RunEnd,
    RunStart,
    ToolCall,
    ToolResult,
    Trace,
    validate_bundle,
)

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "sftrace"
SECRET = "hunter2-" + "correct-horse"


def failing_run(path: Path | str = "failure.sftrace") -> Trace:
    """Ten events, steps 0 to 9; step 5 is a tool result."""
    trace = Trace(agent_name="booking-agent", policy=RedactionPolicy.reference())
    start = trace.add(RunStart(input={"city": "Oslo"}))
    for name in ("a", "b"):
        call = trace.add(ToolCall(name=name, input={"n": name}, parent_id=start.id))
        trace.add(ToolResult(name=name, output={"value": name}, parent_id=call.id))
    trace.add(ToolResult(name="late", output={"value": 0}, parent_id=start.id, duration_ms=5))
    request = trace.add(LLMRequest(model="m", provider="openai", input={"method": "x"}, parent_id=start.id))
    trace.add(LLMResponse(model="m", output={"text": "hi"}, parent_id=request.id, total_tokens=3))
    error = trace.add(ErrorEvent(error_type="ValueError", message="no room", parent_id=start.id))
    trace.add(RunEnd(run_status="failed", output=None))
    trace.save(path, status="failed", failure=FailureInfo(type="ValueError", message="no room", step=error.step))
    return trace


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    failing_run()
    return tmp_path


# The field's page, block by block


def test_quick_start(here: Path) -> None:
    result = fork_trace(
        Path("failure.sftrace"),
        ForkPoint(event_id=None, step=5),
        overrides=[OverrideSpec(step=5, output={"status": "success", "value": 100})],
        output_path=Path("forked.sftrace"),
    )
    assert isinstance(result, ForkResult)
    assert (result.success, result.overrides_applied, result.error_message) == (True, 1, None)
    assert (result.original_event_count, result.forked_event_count) == (10, 6)
    assert (result.fork_point_step, result.forked_trace_path) == (5, "forked.sftrace")
    forked = Trace.load("forked.sftrace")
    assert forked.events[5].output == {"status": "success", "value": 100}  # type: ignore[attr-defined]
    assert result.fork_point_event_id == forked.events[5].id
    assert validate_bundle("forked.sftrace", verify_integrity=True).exit_code == 0


def test_paths_may_be_text_and_the_other_target_left_out(here: Path) -> None:
    result = fork_trace(
        "failure.sftrace",
        ForkPoint(step=5),
        overrides=[OverrideSpec(step=5, output={"results": list(range(100))})],
        output_path="forked.sftrace",
    )
    assert result.success and Path("forked.sftrace").is_dir()
    assert fork_trace("failure.sftrace", ForkPoint(step=3)).forked_trace_path is None


def test_override_targets(here: Path) -> None:
    event = Trace.load("failure.sftrace").events[5]
    override1 = OverrideSpec(step=5, output={"new": "value"})
    override2 = OverrideSpec(event_id=event.id, output={"count": 100, "items": ["a", "b"]})
    result = fork_trace("failure.sftrace", ForkPoint(step=5), overrides=[override1, override2], output_path="x.sftrace")
    assert result.overrides_applied == 1
    assert Trace.load("x.sftrace").events[5].output == {"count": 100, "items": ["a", "b"]}  # type: ignore[attr-defined]


def test_an_override_keeps_the_order_of_its_keys_and_has_the_right_hash(here: Path) -> None:
    output = {"zeta": 1, "alpha": {"y": 1.0, "b": [1]}, "mid": "é"}
    fork_trace(
        "failure.sftrace", ForkPoint(step=5), overrides=[OverrideSpec(step=5, output=output)], output_path="x.sftrace"
    )
    forked = Trace.load("x.sftrace").events[5].output  # type: ignore[attr-defined]
    assert forked == output and list(forked) == list(output)
    assert validate_bundle("x.sftrace", verify_integrity=True).exit_code == 0


def test_validation_of_overrides(here: Path) -> None:
    with pytest.raises(ForkError) as caught:
        fork_trace(Path("failure.sftrace"), ForkPoint(step=5), overrides=[OverrideSpec(step=999, output={})])
    assert str(caught.value) == "invalid overrides: override targets step 999 but trace only has 10 steps"


def test_provenance(here: Path) -> None:
    original_trace = Trace.load("failure.sftrace")
    engine = ForkEngine(original_trace, ForkPoint(event_id=None, step=5), parent_trace_path="failure.sftrace")
    forked_trace, fork_info = engine.fork()
    assert fork_info.parent_run_id == original_trace.run_id
    assert fork_info.parent_trace_path == "failure.sftrace"
    assert fork_info.fork_point_step == 5
    assert fork_info.fork_point_event_id == original_trace.events[5].id
    assert datetime.now(UTC) - fork_info.fork_timestamp < timedelta(minutes=5)
    assert fork_info.overrides_applied == 0
    assert forked_trace.run_id != original_trace.run_id
    assert forked_trace.events[0].id == original_trace.events[0].id
    assert {event.run_id for event in forked_trace.events} == {forked_trace.run_id}
    assert len(original_trace.events) == 10


def test_isolating_a_failure(here: Path) -> None:
    for step in range(10):
        result = fork_trace("failure.sftrace", ForkPoint(step=step), output_path=f"s{step}.sftrace")
        assert result.forked_event_count == step + 1
        assert validate_bundle(f"s{step}.sftrace", verify_integrity=True).exit_code == 0
    assert Trace.load("s7.sftrace").status == "running"
    assert Trace.load("s8.sftrace").failure == Trace.load("failure.sftrace").failure


def test_complete_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sftrace_otel import record, trace_tool

    monkeypatch.chdir(tmp_path)

    # 1. Record original trace
    @trace_tool(name="get_value")
    def get_value(x: int) -> dict[str, int]:
        return {"value": x}

    with record("test-agent", output="original.sftrace"):
        result = get_value(42)
        assert result == {"value": 42}

    # 2. Fork and override the tool result
    fork_trace(
        Path("original.sftrace"),
        ForkPoint(event_id=None, step=2),  # step 2 is the ToolResult
        overrides=[OverrideSpec(step=2, output={"value": 999})],
        output_path=Path("forked.sftrace"),
    )

    # 3. Verify the fork
    forked = Trace.load("forked.sftrace")
    tool_result = forked.events[2]
    assert tool_result.output == {"value": 999}  # type: ignore[attr-defined]
    for name in ("original.sftrace", "forked.sftrace"):
        assert validate_bundle(name, verify_integrity=True).exit_code == 0


# Beyond the page


def test_provenance_is_in_the_bundle_and_chains(here: Path) -> None:
    override = OverrideSpec(step=2, output={"value": "other"})
    fork_trace("failure.sftrace", ForkPoint(step=7), overrides=[override], output_path="q.sftrace")
    fork_trace("q.sftrace", ForkPoint(step=2), output_path="r.sftrace")
    first, second = (read.open_bundle(name).provenance for name in ("q.sftrace", "r.sftrace"))
    original = Trace.load("failure.sftrace")
    digest = hashlib.sha256(Path("failure.sftrace/events.jsonl").read_bytes()).hexdigest()
    assert first["parents"] == [{"run_id": original.run_id, "name": "failure.sftrace", "events_sha256": digest}]
    assert first["fork_point"] == {"step": 7, "event_id": original.events[7].id}
    (row,) = first["overrides"]
    assert (row["event_id"], row["was"]) == (original.events[2].id, original.events[2].output_hash)
    assert row["now"] == Trace.load("q.sftrace").events[2].output_hash
    assert first["origin"] == second["origin"] == "forked"
    assert second["parents"][0]["run_id"] == Trace.load("q.sftrace").run_id
    assert Trace.load("r.sftrace").provenance == second
    assert str(here) not in Path("q.sftrace/provenance.json").read_text()


def test_the_parent_is_left_alone(here: Path) -> None:
    before = {path.name: path.read_bytes() for path in Path("failure.sftrace").iterdir()}
    fork_trace(
        "failure.sftrace", ForkPoint(step=5), overrides=[OverrideSpec(step=5, output=1)], output_path="x.sftrace"
    )
    assert {path.name: path.read_bytes() for path in Path("failure.sftrace").iterdir()} == before


def test_an_existing_output_is_only_replaced_on_request(here: Path) -> None:
    fork_trace("failure.sftrace", ForkPoint(step=1), output_path="x.sftrace")
    with pytest.raises(TraceStorageError, match="already exists"):
        fork_trace("failure.sftrace", ForkPoint(step=2), output_path="x.sftrace")
    assert len(Trace.load("x.sftrace").events) == 2
    fork_trace("failure.sftrace", ForkPoint(step=2), output_path="x.sftrace", overwrite=True)
    assert len(Trace.load("x.sftrace").events) == 3


def test_a_missing_or_changed_parent_is_refused(here: Path) -> None:
    with pytest.raises(TraceStorageError, match="no such bundle"):
        fork_trace("none.sftrace", ForkPoint(step=1))
    events = Path("failure.sftrace/events.jsonl")
    events.write_bytes(events.read_bytes().replace(b'"value":"a"', b'"value":"z"'))
    with pytest.raises(TraceStorageError, match="changed bundle") as caught:
        fork_trace("failure.sftrace", ForkPoint(step=5), output_path="x.sftrace")
    assert caught.value.code == "integrity_mismatch" and not Path("x.sftrace").exists()


def test_an_override_passes_the_policy(here: Path) -> None:
    fork_trace(
        "failure.sftrace",
        ForkPoint(step=5),
        overrides=[OverrideSpec(step=5, output={"password": SECRET, "n": (1, 2)})],
        output_path="x.sftrace",
    )
    trace = Trace.load("x.sftrace")
    assert trace.events[5].output == {"password": "[REDACTED]", "n": [1, 2]}  # type: ignore[attr-defined]
    assert trace.events[5].redactions == ("/output/password",)
    assert [entry.path for entry in trace.redactions] == ["/output/password"]
    assert all(SECRET.encode() not in path.read_bytes() for path in Path("x.sftrace").iterdir())


def test_sidecars_follow_a_fork_without_the_rows_that_no_longer_hold(here: Path) -> None:
    trace = Trace.load("failure.sftrace")
    ids = [event.id for event in trace.events]
    rows = [
        {
            "call": 0, "kind": "tool", "request": ids[1], "response": ids[2], "error": None, "lineage": "0",
            "start_ns": 1, "end_ns": 2, "end": "failed", "tags": {"/input/x": "bytes", "/output": "tuple"},
            "exception": {"qualname": "E"}, "awaitable": "coroutine", "tool_call_ids": ["c"],
        },
        {"call": 1, "kind": "tool", "request": ids[3], "response": ids[4], "end": "finished"},
        {"call": 2, "kind": "llm", "request": ids[6], "response": ids[7], "lineage": "2", "start_ns": 5, "end_ns": 9},
    ]  # fmt: skip
    extra = {"calls.jsonl": sidecars.dump_rows("calls", rows), "of_a_later_version.json": b'{ "x": 1 }\n'}
    write.save(trace, Path("full.sftrace"), sidecars=extra)
    override = OverrideSpec(step=2, output="other")
    fork_trace("full.sftrace", ForkPoint(step=6), overrides=[override], output_path="x.sftrace")
    assert read.open_bundle("x.sftrace").calls == (
        {
            "call": 0, "kind": "tool", "request": ids[1], "response": ids[2], "error": None, "lineage": "0",
            "start_ns": 1, "end_ns": 2, "end": "finished", "tags": {"/input/x": "bytes"}, "awaitable": "coroutine",
            "tool_call_ids": ["c"],
        },
        rows[1],
        {
            "call": 2, "kind": "llm", "request": ids[6], "response": None, "lineage": "2", "start_ns": 5,
            "end_ns": None, "end": "open",
        },
    )  # fmt: skip
    assert Path("x.sftrace/of_a_later_version.json").read_bytes() == b'{ "x": 1 }\n'
    fork_trace("x.sftrace", ForkPoint(step=4), output_path="y.sftrace")
    assert [row["call"] for row in read.open_bundle("y.sftrace").calls] == [0, 1]
    engine = ForkEngine(Trace.load("full.sftrace"), ForkPoint(step=4))
    again, _ = ForkEngine(engine.fork()[0], ForkPoint(step=2)).fork()
    again.save("z.sftrace")
    assert [row["call"] for row in read.open_bundle("z.sftrace").calls] == [0]
    for name in ("x", "y", "z"):
        assert validate_bundle(f"{name}.sftrace", verify_integrity=True).exit_code == 0


def test_a_blob_named_where_two_pieces_of_a_sidecar_meet_goes_along(here: Path) -> None:
    trace = Trace.load("failure.sftrace")
    body = b"\x00" * 20_000
    digest = hashlib.sha256(body).hexdigest()
    name = f"blobs/{digest[:2]}/{digest[2:4]}/{digest}"
    start, end = b'{"x":"', b'sha256:%s"}\n' % digest.encode()
    extra = {"other.json": start + b" " * (store.CHUNK - len(start) - 30) + end}
    write.save(trace, Path("full.sftrace"), sidecars=extra, blobs={name: [body]})
    fork_trace("full.sftrace", ForkPoint(step=9), output_path="x.sftrace")
    assert Path("x.sftrace", name).read_bytes() == body


@pytest.mark.parametrize("name", [path.name for path in sorted(VECTORS.glob("*.sftrace"))])
def test_bundles_of_the_reference_fork_at_every_step(name: str, tmp_path: Path) -> None:
    trace = Trace.load(VECTORS / name)
    whole = validate_bundle(VECTORS / name).exit_code
    for event in trace.events:
        fork_trace(VECTORS / name, ForkPoint(step=event.step), output_path=tmp_path / "x.sftrace", overwrite=True)
        assert validate_bundle(tmp_path / "x.sftrace").exit_code == whole


# Traces


def test_add_sets_what_the_user_left_out(tmp_path: Path) -> None:
    trace = Trace(agent_name="a")
    call = ToolCall(name="f", input={"x": 1})
    first, second = trace.add(call), trace.add(call)
    assert (first.step, second.step) == (0, 1)
    assert first.id != second.id and first.id.startswith("evt_")
    assert first.run_id == trace.run_id and trace.run_id.startswith("run_")
    assert first.input_hash == hashlib.sha256(b'{"x":1}').hexdigest()
    assert call.id == "" and call.run_id == ""
    assert datetime.now(UTC) - first.timestamp < timedelta(minutes=5)
    assert trace.totals.tool_calls == trace.totals.events == 2
    kept = trace.add(ToolCall(id="mine", timestamp=datetime(2026, 5, 1, tzinfo=UTC), name="f", input=None))
    assert (kept.id, kept.timestamp.year, trace.events[2]) == ("mine", 2026, kept)


def test_add_redacts_before_anything_is_kept(tmp_path: Path) -> None:
    trace = Trace(agent_name="a", events=[RunStart(input={"password": SECRET})])
    trace.add(ErrorEvent(error_type="E", message="Authorization: Bearer " + SECRET, details={"api_key": SECRET}))
    assert trace.events[0].input == {"password": "[REDACTED]"}  # type: ignore[attr-defined]
    assert trace.events[1].redactions == ("/details/api_key", "/message")
    path = trace.save(tmp_path / "x.sftrace")
    assert all(SECRET.encode() not in file.read_bytes() for file in path.iterdir())
    entries = json.loads((path / "redactions.json").read_bytes())["entries"]
    assert [entry["path"] for entry in entries] == ["/input/password", "/details/api_key", "/message"]


def test_events_that_break_the_format_are_refused() -> None:
    trace = Trace(agent_name="a")
    broken: list[Any] = [
        ToolCall(name="", input=1),
        ToolCall(name="f", input=1, duration_ms=-1),
        ToolCall(name="f", input=1, timestamp=datetime(2026, 1, 1)),
        RunEnd(run_status="odd"),  # type: ignore[arg-type]
    ]
    for event in broken:
        with pytest.raises(PayloadError):
            trace.add(event)
    with pytest.raises(CanonicalizationError):
        ToolCall(name="f", input={"x": object()})  # type: ignore[dict-item]
    assert trace.events == ()


def test_save_and_load(tmp_path: Path) -> None:
    trace = failing_run(tmp_path / "x.sftrace")
    loaded = Trace.load(str(tmp_path / "x.sftrace"))
    assert loaded.events == trace.events
    assert (loaded.status, loaded.agent_name) == ("failed", "booking-agent")
    assert loaded.created_at == trace.created_at and loaded.environment == trace.environment
    again = loaded.save(tmp_path / "y.sftrace")
    for path in (tmp_path / "x.sftrace").iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
    loaded.save(tmp_path / "x.sftrace", overwrite=True)
    assert validate_bundle(tmp_path / "x.sftrace", verify_integrity=True).exit_code == 0


def test_save_refuses_a_manifest_that_is_not_valid(tmp_path: Path) -> None:
    trace = Trace(agent_name="a")
    trace.status = "failed"
    with pytest.raises(TraceStorageError, match="failure"):
        trace.save(tmp_path / "x.sftrace")
    with pytest.raises(TraceStorageError, match=r"ends in \.sftrace"):
        trace.save(tmp_path / "x.other", status="running")
    assert list(tmp_path.iterdir()) == []
