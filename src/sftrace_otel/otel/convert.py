# SPDX-License-Identifier: Apache-2.0
"""An SDK span as a `SpanRecord`.

Decision: only public members, and `attributes.copy()` instead of `dict(attributes)`, which costs six times as much
through the SDK's mapping class. Resources are shared by identity, so a bundle can write each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from sftrace_otel.core.mapping import SpanEvent, SpanLink, SpanRecord

__all__ = ["to_record"]

_KINDS = {kind: kind.name for kind in SpanKind}
_CODES = {code: code.name for code in StatusCode}
_EMPTY: Mapping[str, Any] = {}
_NONE = (0, 0, 0)


def to_record(span: ReadableSpan) -> SpanRecord:
    """The span as it ended. The record shares no mutable state with the span."""
    context = span.get_span_context()
    parent = span.parent
    status = span.status
    scope = span.instrumentation_scope
    events, links = span.events, span.links
    start = span.start_time or 0
    return SpanRecord(
        trace_id=format(context.trace_id, "032x") if context else "0" * 32,
        span_id=format(context.span_id, "016x") if context else "0" * 16,
        parent_id=format(parent.span_id, "016x") if parent else None,
        parent_is_remote=parent.is_remote if parent else False,
        name=span.name,
        kind=_KINDS[span.kind],
        start_ns=start,
        end_ns=span.end_time or start,
        attributes=_copied(span.attributes),
        events=tuple([_event(event) for event in events]) if events else (),
        links=tuple([_link(link.context, link.attributes) for link in links]) if links else (),
        status_code=_CODES[status.status_code],
        status_description=status.description,
        scope_name=scope.name if scope else None,
        scope_version=scope.version if scope else None,
        resource=span.resource.attributes,
        dropped=_dropped(span),
        sampled=context.trace_flags.sampled if context else True,
    )


def _copied(attributes: Any) -> Mapping[str, Any]:
    return attributes.copy() if attributes else _EMPTY


def _event(event: Event) -> SpanEvent:
    return SpanEvent(event.name, event.timestamp, _copied(event.attributes))


def _link(context: SpanContext, attributes: Any) -> SpanLink:
    return SpanLink(format(context.trace_id, "032x"), format(context.span_id, "016x"), _copied(attributes))


def _dropped(span: ReadableSpan) -> tuple[int, int, int]:
    attributes, events, links = span.dropped_attributes, span.dropped_events, span.dropped_links
    return (attributes, events, links) if attributes or events or links else _NONE
