# SPDX-License-Identifier: Apache-2.0
"""LLM calls that a bare HTTP client makes: an exchange whose request is one, without an SDK's boundary above it.

Decision: such an exchange is one LLM call in the form that an SDK's boundary records, so that verdicts, forks and spans
do not depend on how the program calls its model; each retry is a call of its own, since nothing here tells a retry from
a second question. Its span lives as long as the exchange, streams included, and is never made current: it ends where
the body does. Rejected: an LLM call beside the HTTP call (two events for one exchange), and a span around the client's
method (none is common to all clients).

A bundle of before holds such an exchange as an HTTP call. Under replay it is asked for in both forms then.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from sftrace_otel import recorder as recording
from sftrace_otel.core.mapping import dialects
from sftrace_otel.core.session import LiveCall
from sftrace_otel.errors import ReplayError
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.exchange import Head, Pairs, call_name, request_payload
from sftrace_otel.instrumentation.llm import LlmCall
from sftrace_otel.instrumentation.outcomes import Answer, GoesOut, answers_of
from sftrace_otel.recorder import Recorder, Scope, current_scope

__all__ = ["answer", "begun"]

_SCOPE = "sftrace_otel.http"


class _BareCall(LlmCall):
    """An LLM call whose one exchange is all there is: it ends with it."""

    def exchange_done(
        self,
        status: int | None,
        headers: Pairs,
        body: bytes,
        end: str,
        error: BaseException | None,
        first: float | None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """The body ended, or there was no answer."""
        if status is None and error is not None:
            self.raised(error)
            return
        self._returned = True
        super().exchange_done(status, headers, body, end, error, first, extra)


def begun(recorder: Recorder, head: Head, body: bytes, scope: Scope, lineage: str | None) -> LlmCall | None:
    """The LLM call that a request is, its span started; None where it is none."""
    found = dialects.recognised(head.method, head.url, head.headers, body)
    if found is None:
        return None
    asked, provider = found
    span = tracing.start_span(_SCOPE, _name(asked), tracing.CLIENT, _attributes(asked, provider, head))
    host = urlsplit(head.url).hostname or ""
    return _BareCall(recorder, asked.endpoint, provider, host, span, scope, lineage)


def _name(asked: dialects.Inference) -> str:
    return f"{asked.endpoint.operation} {asked.model}"


def _attributes(asked: dialects.Inference, provider: str, head: Head) -> dict[str, object]:
    """Span attributes known before the request is sent."""
    known = dialects.request_attributes(asked, provider)
    parts = urlsplit(head.url)
    known["server.address"] = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    if port is not None:
        known["server.port"] = port
    return known


# --- replaying --------------------------------------------------------------------------------------------------------


def answer(replay: replaying.Active, head: Head, body: bytes) -> Answer | GoesOut | None:
    """The recorded answer to a request that is an LLM call, or that it goes out; None where it is none.

    Raises a ReplayError where there is no answer.
    """
    found = dialects.recognised(head.method, head.url, head.headers, body)
    if found is None:
        return None
    asked, provider = found
    attributes = {**_attributes(asked, provider, head), "sftrace.replay.active": True}
    span = tracing.start_span(_SCOPE, _name(asked), tracing.CLIENT, attributes)
    lineage = current_scope().place()
    try:
        decision = replay.decide(
            "llm",
            asked.endpoint.method,
            replay.prepare(asked.payload),
            lineage=lineage,
            provider=provider,
            model=asked.model,
            method=asked.endpoint.method,
            otherwise=_as_http(replay, head, body, lineage),
        )
    except ReplayError as error:
        tracing.end_span(span, error)
        raise
    if decision.action == "live":
        if recording._active is None:  # else its recording has a span too, that of the exchange
            span.set_attributes(replaying.marks(decision))
        tracing.end_span(span)
        return GoesOut(lineage)
    assert decision.call is not None
    if span.is_recording():
        span.set_attributes(replaying.marks(decision))
        if decision.call.kind == "llm":
            span.set_attributes(dialects.answered(asked.endpoint, decision.call.outcome.output).attributes)
    tracing.end_span(span)
    return answers_of(decision.call, framing=asked.framing, blob=replay.blob)[-1]


def _as_http(replay: replaying.Active, head: Head, body: bytes, lineage: str | None) -> LiveCall | None:
    """The request as an HTTP call, where the recording holds one of an endpoint like its own."""
    if not replay.holds_bare:
        return None
    prepared = replay.prepare(request_payload(head, body, replay.policy))
    name = call_name(head, replay.policy)
    return LiveCall(kind="http", name=name, payload=prepared.value, lineage=lineage, digest=prepared.digest)
