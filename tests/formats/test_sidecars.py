# SPDX-License-Identifier: Apache-2.0
"""Rows and objects of the sidecars: checked where known, untouched where not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sftrace_otel.errors import TraceStorageError
from sftrace_otel.formats import sidecars

CALL = {
    "call": 0,
    "kind": "tool",
    "request": "evt_1",
    "response": "evt_2",
    "error": None,
    "lineage": "0/t1/2",
    "tags": {"/input/a": "tuple"},
    "exception": {"module": "builtins", "qualname": "ValueError", "args": ["x"]},
    "of_a_later_version": {"deep": [1, 2.5]},
}
WIRE = {
    "event_id": "evt_1",
    "call": 0,
    "attempt": 1,
    "method": "POST",
    "url": "http://localhost/v1",
    "request": {"headers": [["a", "b"]], "body": "{}"},
    "status": 200,
    "headers": [["content-type", "text/plain"]],
    "body": {"$blob": "sha256:" + "0" * 64, "media_type": "text/plain", "size": 3},
    "chunks": [[3, 100]],
}


def lines(sidecar: str, *rows: dict[str, Any]) -> list[bytes]:
    return sidecars.dump_rows(sidecar, rows).split(b"\n")[:-1]


def test_rows_come_back_with_what_is_not_known() -> None:
    assert list(sidecars.parse_calls(lines("calls", CALL))) == [CALL]
    assert list(sidecars.parse_wire(lines("wire", WIRE))) == [WIRE]
    assert list(sidecars.parse_spans(lines("spans", {"any": 1}))) == [{"any": 1}]


def test_objects_come_back() -> None:
    run = {"schema_version": "1", "verdict": {"offline": True, "obstacles": []}, "trace_ids": ["ab"], "new": None}
    assert sidecars.parse_run(sidecars.dump_object(run)) == run
    origin = {"schema_version": "1", "origin": "forked", "parents": [{"run_id": "r"}], "x": 1}
    assert sidecars.parse_provenance(json.dumps(origin).encode()) == origin


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([b"{}"], ":1: .*header"),
        ([b'{"schema_version":"1","sidecar":"wire"}'], ":1: .*header"),
        ([sidecars.header("calls"), b"not json"], ":2: .*malformed"),
        ([sidecars.header("calls"), b'{"call":1,"call":2}'], ":2: .*duplicate"),
        ([sidecars.header("calls"), b"[]"], ":2: .*object"),
        ([sidecars.header("calls"), b'{"call":"one"}'], r":2: .*\$\.call"),
    ],
)
def test_a_broken_row_is_refused_with_its_line(data: list[bytes], words: str) -> None:
    with pytest.raises(TraceStorageError, match=words):
        list(sidecars.parse_calls(data))


def test_rows_about_removed_events_go_and_the_others_stay_as_they_are() -> None:
    spelled = b'{ "call":1, "request":"evt_5","response":null}'
    given = [*lines("calls", CALL), spelled]
    assert list(sidecars.without_events("calls", given, {"evt_2"})) == [spelled]
    assert list(sidecars.without_events("calls", given, {"evt_9"})) == given[1:]
    assert list(sidecars.without_events("wire", lines("wire", WIRE), {"evt_1"})) == []
