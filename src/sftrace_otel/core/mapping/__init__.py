# SPDX-License-Identifier: Apache-2.0
"""From spans to calls: one file per dialect, all pure.

Decision: dialects are asked from the most specific to the most general, and the first that recognises a call wins;
a span that none of them takes is no call and is kept as it is. Rejected: merging what several dialects find on one
span, since a request made of two spellings is a request that nobody sent.
"""

from __future__ import annotations

from collections.abc import Callable

from sftrace_otel.core.mapping.genai import map_genai
from sftrace_otel.core.mapping.genai_events import map_genai_events
from sftrace_otel.core.mapping.http import http_name, map_http
from sftrace_otel.core.mapping.langfuse import map_langfuse
from sftrace_otel.core.mapping.logfire import is_begun_stream, is_log, is_pending, map_logfire
from sftrace_otel.core.mapping.mcp import is_served, map_mcp
from sftrace_otel.core.mapping.model import MappedCall, SpanEvent, SpanLink, SpanRecord
from sftrace_otel.core.mapping.openinference import map_openinference
from sftrace_otel.core.mapping.pydantic_ai import map_pydantic_ai
from sftrace_otel.core.mapping.select import Past, Selected, looks_like_call, select_calls
from sftrace_otel.core.mapping.traceloop import map_traceloop
from sftrace_otel.core.mapping.values import Attributes, failure

__all__ = [
    "MappedCall",
    "Past",
    "Selected",
    "SpanEvent",
    "SpanLink",
    "SpanRecord",
    "failure",
    "http_name",
    "is_log",
    "is_pending",
    "is_reference",
    "looks_like_call",
    "map_content",
    "map_span",
    "select_calls",
]

_Dialect = Callable[[SpanRecord, Attributes], MappedCall | None]

_FLAT = frozenset(
    {"gen_ai.prompt.0.content", "gen_ai.prompt.0.role", "gen_ai.completion.0.content", "gen_ai.completion.0.role"}
)
_DIALECTS: tuple[tuple[frozenset[str], _Dialect], ...] = (
    (frozenset({"mcp.method.name"}), map_mcp),
    (frozenset({"langfuse.observation.type"}), map_langfuse),
    (frozenset({"request_data"}), map_logfire),
    (frozenset({"openinference.span.kind"}), map_openinference),
    (frozenset({"tool_arguments", "tool_response", "events", "model_request_parameters"}), map_pydantic_ai),
    (_FLAT | {"traceloop.span.kind", "llm.request.type"}, map_traceloop),
    (frozenset({"gen_ai.operation.name", "gen_ai.system"}), map_genai_events),
    (frozenset({"gen_ai.operation.name"}), map_genai),
    (frozenset({"http.method", "http.request.method", "http.request.method_original"}), map_http),
)
"""Dialects with the attributes of which a span of theirs has at least one: most spans are none of most of them."""

_SIGNS = frozenset().union(*(signs for signs, _ in _DIALECTS)) | {
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.tool.name",
}


def is_reference(record: SpanRecord) -> bool:
    """Whether the span only points at a call that our boundaries recorded (`sftrace.event.id`)."""
    return "sftrace.event.id" in record.attributes


def map_span(record: SpanRecord) -> MappedCall | None:
    """The call that a span describes, or None: it is none, only refers to one, or names no model. Never raises."""
    return None if is_reference(record) else map_content(record)


def map_content(record: SpanRecord, failed: Callable[[Exception], None] | None = None) -> MappedCall | None:
    """As `map_span`, also for a span that refers to a recorded call: what the span itself says of it.

    `failed` is told why a dialect that recognised its span could not read it.
    """
    if _SIGNS.isdisjoint(record.attributes) or is_pending(record.attributes) or is_begun_stream(record):
        return None
    if is_served(record):
        return None
    attributes = Attributes(record.attributes)
    for signs, dialect in _DIALECTS:
        if signs.isdisjoint(record.attributes):
            continue
        call = _tried(dialect, record, attributes, failed)
        if call is not None:
            return call
    return None


def _tried(
    dialect: _Dialect, record: SpanRecord, attributes: Attributes, failed: Callable[[Exception], None] | None
) -> MappedCall | None:
    # Attributes are other people's data: one that has an unforeseen shape must not cost the other spans.
    try:
        return dialect(record, attributes)
    except Exception as error:
        if failed is not None:
            failed(error)
        return None
