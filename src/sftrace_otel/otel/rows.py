# SPDX-License-Identifier: Apache-2.0
"""Rows of `spans.jsonl`: spans that have no event of their own.

Decision: name and status are redacted as text, attributes and events go through `prepare` like any payload, and its
canonical bytes are spliced into the row as they are. The first row of a resource holds its attributes, later ones its
number. Source: formats/sidecars-v1.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from sftrace_otel.core.mapping import SpanRecord
from sftrace_otel.recorder import Recorder

__all__ = ["Resources", "span_row"]

# Attributes that name things and hold no content: all that a recording without payloads keeps beside numbers.
_NAMES = frozenset(
    {
        "error.type",
        "gen_ai.agent.name",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "gen_ai.tool.name",
        "openinference.span.kind",
        "traceloop.span.kind",
    }
)


class Resources:
    """Numbers of the resources that one run's rows refer to."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Mapping[str, Any]]] = {}

    def reference(self, recorder: Recorder, resource: Mapping[str, Any]) -> dict[str, object]:
        """`{"id": n}`, with the attributes the first time."""
        known = self._known.get(id(resource))
        if known is not None:
            return {"id": known[0]}
        # The mapping is kept, so that its id stays its own.
        self._known[id(resource)] = (len(self._known), resource)
        return {"id": len(self._known) - 1, "attributes": orjson.Fragment(recorder.prepare(dict(resource)).data)}


def span_row(
    recorder: Recorder, record: SpanRecord, resources: Resources, *, same_as: str | None = None
) -> dict[str, object]:
    """The row of a span. `same_as`: the event of the call that this span only repeats; its content is left out then."""
    content = recorder.settings.capture == "full" and same_as is None
    row: dict[str, object] = {
        "trace_id": record.trace_id,
        "span_id": record.span_id,
        "parent_id": record.parent_id,
        "name": _text(recorder, record.name),
        "kind": record.kind,
        "start_ns": record.start_ns,
        "end_ns": record.end_ns,
        "status": record.status_code,
        "scope": {"name": record.scope_name, "version": record.scope_version},
        "resource": resources.reference(recorder, record.resource),
    }
    if same_as is not None:
        row["same_as"] = same_as
    attributes = record.attributes if content else _contentless(record.attributes)
    if attributes:
        prepared = recorder.prepare(attributes)
        row["attributes"] = orjson.Fragment(prepared.data)
        if prepared.truncated:
            row["truncated"] = True
    if content:
        _add_details(recorder, record, row)
    return row


def _add_details(recorder: Recorder, record: SpanRecord, row: dict[str, object]) -> None:
    if record.status_description:
        row["status_description"] = _text(recorder, record.status_description)
    if record.events:
        events = [
            {"name": event.name, "time_ns": event.time_ns, "attributes": event.attributes} for event in record.events
        ]
        row["events"] = orjson.Fragment(recorder.prepare(events).data)
    if record.links:
        links = [
            {"trace_id": link.trace_id, "span_id": link.span_id, "attributes": link.attributes} for link in record.links
        ]
        row["links"] = orjson.Fragment(recorder.prepare(links).data)
    if any(record.dropped):
        row["dropped"] = list(record.dropped)


def _contentless(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key in _NAMES or isinstance(value, (bool, int, float))}


def _text(recorder: Recorder, text: str) -> str:
    clean: str = recorder.policy.redact_text(text)[0]
    # A lone surrogate has no UTF-8; it is spelled out, so that one odd name costs nothing but itself.
    return clean.encode("utf-8", "backslashreplace").decode()
