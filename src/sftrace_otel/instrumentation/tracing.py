# SPDX-License-Identifier: Apache-2.0
"""What boundaries need of OpenTelemetry's API: a span around a call, the span that is current, suppression.

Decision: the API only, never the SDK; without a provider these cost next to nothing. A span is started with all its
attributes at once and is never held attached across a yield (`facts/otel.md` §7, row 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from sftrace_otel.version import __version__

__all__ = [
    "CLIENT", "INTERNAL", "NO_SPAN", "attached", "current_ids", "detach", "end_span", "exporting", "http_span_id",
    "is_current", "is_traced",
    "name_root", "provider", "span_here", "start_span", "suppress", "suppressed", "traceparent", "traceparent_ids",
]  # fmt: skip

CLIENT = SpanKind.CLIENT
INTERNAL = SpanKind.INTERNAL
NO_SPAN = trace.INVALID_SPAN
_SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
_ERROR = StatusCode.ERROR

_tracers: dict[str, tuple[object, trace.Tracer]] = {}


def _tracer(scope: str) -> trace.Tracer:
    """A tracer of the current provider; asked anew when the program sets another one."""
    provider = trace.get_tracer_provider()
    known = _tracers.get(scope)
    if known is None or known[0] is not provider:
        known = _tracers[scope] = (provider, provider.get_tracer(scope, __version__, schema_url=_SCHEMA))
    return known[1]


def is_traced(scope: str) -> bool:
    """Whether a span of this scope goes anywhere: without a provider there is none to describe.

    The API's own question for the provider looks into the environment each time; here once.
    """
    if getattr(trace, "_TRACER_PROVIDER", scope) is None and scope in _tracers:
        return False
    _tracer(scope)
    return getattr(trace, "_TRACER_PROVIDER", scope) is not None


def provider() -> object:
    """The tracer provider of the program."""
    return trace.get_tracer_provider()


def start_span(scope: str, name: str, kind: SpanKind, attributes: Mapping[str, Any]) -> Span:
    """Start a span under the current one; not made current."""
    return _tracer(scope).start_span(name, kind=kind, attributes=attributes)


def attached(span: Span) -> object:
    """Make `span` current; give the result to `detach` in the same function."""
    if not span.get_span_context().is_valid:  # no provider: nothing to make current
        return None
    return otel_context.attach(trace.set_span_in_context(span))


def is_current(span: Span) -> bool:
    """Whether `span` is the current one: in another context than it was attached in, it is not ours to detach."""
    return trace.get_current_span() is span


def span_here() -> Span | None:
    """The current span, None without one."""
    if not otel_context.get_current():
        return None
    span = trace.get_current_span()
    return span if span.get_span_context().is_valid else None


def detach(token: object) -> None:
    """Undo `attached`."""
    if token is None:
        return
    otel_context.detach(token)  # type: ignore[arg-type]


def end_span(span: Span, error: BaseException | str | None = None) -> None:
    """End a span; `error` is an exception or the name of a class. The message stays out: it may hold content."""
    if error is not None and span.is_recording():
        name = error if isinstance(error, str) else type(error).__qualname__
        span.set_attribute("error.type", name)
        span.set_status(Status(_ERROR, name))
    span.end()


def name_root(span: Span, bundle: str) -> None:
    """Put the bundle's name on a span of ours that is a local root and lacks it."""
    parent = getattr(span, "parent", span)
    root = parent is None or getattr(parent, "is_remote", False)
    if root and span.is_recording() and "sftrace.bundle" not in (getattr(span, "attributes", None) or ()):
        span.set_attribute("sftrace.bundle", bundle)


def ids_of(span: Span) -> tuple[int, int]:
    """(trace id, span id); zeros for a span that is none."""
    context = span.get_span_context()
    return (context.trace_id, context.span_id)


def current_ids() -> tuple[int, int]:
    """(trace id, span id) of the current span."""
    return ids_of(trace.get_current_span())


def http_span_id() -> int:
    """The id of the current span if an HTTP instrumentation made it for the request under way, else 0."""
    span = trace.get_current_span()
    if getattr(span, "kind", None) is not SpanKind.CLIENT:
        return 0
    attributes = getattr(span, "attributes", None) or {}
    if "http.request.method" in attributes or "http.method" in attributes:
        return span.get_span_context().span_id
    return 0


def traceparent(value: str) -> tuple[int, int] | None:
    """(trace id, span id) of a W3C traceparent header; None where it is none."""
    parts = value.strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:3]] != [2, 32, 16] or parts[0] == "ff":
        return None
    try:
        ids = int(parts[1], 16), int(parts[2], 16)
    except ValueError:
        return None
    return ids if all(ids) else None


def traceparent_ids(value: str) -> int:
    """The span id in a W3C traceparent header, 0 where there is none."""
    parts = value.split("-")
    try:
        return int(parts[2], 16) if len(parts) >= 4 and len(parts[2]) == 16 else 0
    except ValueError:
        return 0


_EXPORTING = (
    "suppress_instrumentation",
    getattr(otel_context, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation"),
)
_SUPPRESSING = (
    *_EXPORTING,
    getattr(otel_context, "_SUPPRESS_HTTP_INSTRUMENTATION_KEY", "suppress_instrumentation"),
)
"""Context keys by which exporters keep their own requests out; the API's are made with a UUID at import."""
_SUPPRESSING_KEYS = frozenset(_SUPPRESSING)


def exporting() -> bool:
    """As `suppressed`, less what an instrumentation of an HTTP client sets for those below it: it is no exporter."""
    here = otel_context.get_current()
    return bool(here) and any(here.get(key) for key in _EXPORTING)


def suppress() -> object:
    """From now on what is sent here is telemetry, and no instrumentation's business; give the result to `detach`."""
    return otel_context.attach(otel_context.set_value(_EXPORTING[1], True))


def suppressed() -> bool:
    """True where OpenTelemetry's own work (an exporter's request) is under way."""
    here = otel_context.get_current()
    if not here or _SUPPRESSING_KEYS.isdisjoint(here):
        return False
    return any(here.get(key) for key in _SUPPRESSING)
