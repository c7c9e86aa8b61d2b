# SPDX-License-Identifier: Apache-2.0
"""A good bundle with sidecars and a blob, made without the recorder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sftrace_otel.bundle import write
from sftrace_otel.formats import sftrace, sidecars
from sftrace_otel.formats.sftrace import (
    EventBase,
    LLMRequest,
    LLMResponse,
    Manifest,
    RedactionEntry,
    RunEnd,
    RunStart,
    ToolCall,
    ToolResult,
    TraceData,
)

BODY = b"\x00binary body\xff"
BLOB = hashlib.sha256(BODY).hexdigest()
BLOB_NAME = f"blobs/{BLOB[:2]}/{BLOB[2:4]}/{BLOB}"
PARTS: tuple[EventBase, ...] = (
    RunStart(id="evt_0", input={"api_key": "[REDACTED]"}, redactions=("/input/api_key",)),
    ToolCall(id="evt_1", parent_id="evt_0", name="look_up", input={"x": 42, "scale": 1.0}),
    ToolResult(id="evt_2", parent_id="evt_1", name="look_up", output={"text": "MARKER-ORIG", "more": "MARKER-é"}),
    LLMRequest(id="evt_3", parent_id="evt_0", provider="openai", model="m", input={"method": "x", "request": {}}),
    LLMResponse(id="evt_4", parent_id="evt_3", model="m", output={"choices": []}, prompt_tokens=3, cost_usd=0.5),
    ToolCall(id="evt_5", parent_id="evt_0", name="http GET http://localhost/", input={"url": "http://localhost/"}),
    ToolResult(id="evt_6", parent_id="evt_5", name="http GET http://localhost/", output={"status_code": 200}),
    RunEnd(id="evt_7", run_status="completed", output="done"),
)
CALLS = [
    {"call": 0, "kind": "tool", "request": "evt_1", "response": "evt_2", "lineage": "0", "end": "finished"},
    {"call": 1, "kind": "llm", "request": "evt_3", "response": "evt_4", "lineage": "1", "end": "finished"},
    {"call": 2, "kind": "http", "request": "evt_5", "response": "evt_6", "lineage": "2", "end": "finished"},
]
WIRE = [
    {"event_id": "evt_3", "call": 1, "attempt": 1, "method": "POST", "url": "http://localhost/v1", "body": "{}"},
    {"event_id": "evt_5", "call": 2, "attempt": 1, "method": "GET", "url": "http://localhost/",
     "body": {"$blob": f"sha256:{BLOB}", "media_type": "application/octet-stream", "size": len(BODY)}},
]  # fmt: skip
RUN = {"schema_version": "1", "agent": "a", "trace_ids": ["ab" * 16], "verdict": {"offline": True, "obstacles": []}}


def data_of(parts: tuple[EventBase, ...] = PARTS, **manifest: object) -> TraceData:
    events = tuple(
        sftrace.with_hashes(
            part.replace(run_id="run_1", step=step, timestamp=sftrace.parse_time("2026-01-01T00:00:00Z"))
        )
        for step, part in enumerate(parts)
    )
    values = {"run_id": "run_1", "agent_name": "agent", "created_at": "2026-01-01T00:00:00Z", "status": "completed"}
    entry = RedactionEntry(event_id="evt_0", path="/input/api_key", reason="sensitive_key")
    return TraceData(manifest=Manifest(**{**values, **manifest}), events=events, redactions=(entry,))


def sidecars_of() -> dict[str, bytes]:
    return {
        "calls.jsonl": sidecars.dump_rows("calls", CALLS),
        "wire.jsonl": sidecars.dump_rows("wire", WIRE),
        "run.json": sidecars.dump_object(RUN),
        "of_a_later_version.bin": b"\x01\x02\r\n",
        BLOB_NAME: BODY,
    }


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write.save(data_of(), tmp_path / "good.sftrace", sidecars=sidecars_of(), fsync=False)
