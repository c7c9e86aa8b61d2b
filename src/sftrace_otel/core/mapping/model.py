# SPDX-License-Identifier: Apache-2.0
"""A span and a call in our own words, so that the dialects need no OpenTelemetry SDK.

Decision: msgspec structs, since one `SpanRecord` is made per span on the caller's thread and a frozen dataclass costs
four times as much to build. Rejected: handing SDK spans to the dialects, because spans also come from OTLP files and
because the SDK's classes change between releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["MappedCall", "SpanEvent", "SpanLink", "SpanRecord"]


class SpanEvent(msgspec.Struct, frozen=True):
    """An event on a span; `time_ns` is Unix time in nanoseconds."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any]


class SpanLink(msgspec.Struct, frozen=True):
    """A link to another span, ids in lower-case hex."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Any]


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One ended span.

    `trace_id` (32 hex), `span_id` and `parent_id` (16 hex); `parent_is_remote`: the parent is in another process;
    `kind`: `INTERNAL`, `SERVER`, `CLIENT`, `PRODUCER` or `CONSUMER`; `start_ns` and `end_ns`: Unix time in nanoseconds;
    attribute values as the SDK keeps them (str, bool, int, float, bytes, None, tuples and mappings of these);
    `status_code`: `UNSET`, `OK` or `ERROR`; `resource`: shared by all spans of one resource; `dropped`: how many
    attributes, events and links the SDK's limits threw away; `sampled`: other exporters saw it too.
    """

    trace_id: str
    span_id: str
    parent_id: str | None = None
    parent_is_remote: bool = False
    name: str
    kind: str = "INTERNAL"
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = {}
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    status_code: str = "UNSET"
    status_description: str | None = None
    scope_name: str | None = None
    scope_version: str | None = None
    resource: Mapping[str, Any] = {}
    dropped: tuple[int, int, int] = (0, 0, 0)
    sampled: bool = True


class MappedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a span says about one call, in the shape of the events it becomes.

    `kind`: `llm`, `tool` or `http`; `input` and `output`: plain values, not yet redacted (they may hold bytes, NaN and
    the like); `error`: type and message when the call failed; `missing`: `input` and/or `output` where the span carried
    no content; `cut`: the same words where a length limit of the SDK cut the content; `tool_call_id` and `response_id`:
    the provider's ids; `dialect`: the file that read the span.
    """

    kind: str
    name: str
    provider: str | None = None
    model: str | None = None
    method: str | None = None
    input: object
    output: object = None
    error: tuple[str, str] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    response_model: str | None = None
    response_id: str | None = None
    tool_call_id: str | None = None
    missing: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    dialect: str = ""
