# SPDX-License-Identifier: Apache-2.0
"""One LLM call made through an SDK: its span, its attempts on the wire, its end.

Decision: the SDK boundary opens the call and its span, the HTTP boundary below it supplies what was really sent and
received; the first attempt's body is the request. The call ends with the SDK's own verdict (returned or raised), a
streamed one with its body. Rejected: recording at the SDK alone (typed objects lack bytes, timing and attempts) and at
the wire alone (retries of one call would look like calls).

Sources: GenAI semantic conventions (`facts/otel.md` §3.2); `design.md`, "From calls and spans to events".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from sftrace_otel import recorder as recording
from sftrace_otel.core.mapping import dialects, parts
from sftrace_otel.core.mapping.wire import Endpoint
from sftrace_otel.core.prepare import Prepared
from sftrace_otel.core.redact import Vouched
from sftrace_otel.errors import ReplayError
from sftrace_otel.instrumentation import replaying, tracing
from sftrace_otel.instrumentation.exchange import Head, Pairs, body_value, header, vouched_for
from sftrace_otel.instrumentation.outcomes import Answer, GoesOut, answers_of
from sftrace_otel.recorder import Call, Recorder, Scope

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["LlmCall", "ServedLlmCall", "attributes_of"]


class LlmCall:
    """A recorded LLM call. Everything but the constructor fails open."""

    def __init__(
        self,
        recorder: Recorder,
        endpoint: Endpoint,
        provider: str,
        host: str,
        span: Span,
        scope: Scope,
        lineage: str | None = None,
    ) -> None:
        self.recorder = recorder
        self.endpoint = endpoint
        self.provider = provider
        self.attempts = 0
        self._host = host
        self._redirected = False
        self.span = span
        self.scope = scope
        self.lineage = scope.place() if lineage is None else lineage
        self.call: Call | None = None
        self.vouched: Vouched | None = None
        """What the policy says of the body of the attempt under way (`RedactionPolicy.vouched`)."""
        self._answer: tuple[bytes, object, Prepared] | None = None
        self._begun = False
        self._streams = False
        self._returned = False
        self._done = False
        self._extra: Mapping[str, object] | None = None
        self._last: tuple[int | None, Pairs, bytes, str, BaseException | None] | None = None

    def owns(self, head: Head) -> bool:
        """Whether this request is the SDK's own; token providers, hooks and log handlers may send theirs meanwhile."""
        return self._redirected or is_own(head, self.endpoint, self._host)

    def attempt(self, head: Head, body: bytes | None) -> Call | None:
        """An attempt is about to be sent; the first begins the call with its body. Gives the call."""
        self._last = None
        self._redirected = False
        self.vouched = None
        self.attempts += 1
        if not self._begun:
            self._begun = True
            request = body_value(body, head.media() or "application/json", self.recorder.policy)
            self._begin(dialects.ask(self.endpoint, head.url, request), body)
        return self.call

    def _begin(self, asked: dialects.Inference, body: bytes | None) -> None:
        self._streams = bool(asked.framing)
        prepared = self.recorder.prepare(asked.payload)
        self.vouched = vouched_for(self.recorder, prepared, b"request", body or b"", [])
        ids = tracing.ids_of(self.span)
        self.call = self.recorder.begin(
            "llm",
            self.endpoint.method,
            prepared,
            scope=self.scope,
            lineage=self.lineage,
            provider=self.provider,
            model=asked.model,
            span=ids,
            sends=True,
        )
        if self.call is None:
            return
        self.recorder.refer(ids[1], self.call)
        tracing.name_root(self.span, self.call.run.name)
        self._note_answers(asked.request)
        if self.span.is_recording():
            self.span.set_attributes(
                {
                    "sftrace.run.id": self.call.run.id,
                    "sftrace.event.id": self.call.id,
                    "sftrace.input_hash": self.call.hash,
                }
            )
            if self.recorder.settings.content == "span" and isinstance(prepared.value, dict):
                self._show(parts.request_content(prepared.value.get("request")))

    def _show(self, content: Mapping[str, object]) -> None:
        self.span.set_attributes({name: orjson.dumps(value).decode() for name, value in content.items()})

    def _note_answers(self, request: object) -> None:
        assert self.call is not None
        answered = self.call.run.answered
        for call_id, name, content in dialects.tool_answers(self.endpoint.method, request):
            if not answered.known(call_id):
                digests = [self.recorder.prepare(value).digest for value in dialects.results_of(content)]
                answered.answer(call_id, name, digests)

    def read(self, body: bytes, media: str) -> Vouched | None:
        """Read the answer of an attempt, and give what the policy says of it (`RedactionPolicy.vouched`).

        That of a stream is put together: of its own bytes nothing is known by that.
        """
        self._answer = None
        try:
            framed, output, prepared = self._read(body, media)
            self._answer = (body, output, prepared)
            return None if framed else vouched_for(self.recorder, prepared, None, body, [])
        except Exception:  # it is read again when the call ends, which says so
            return None

    def _read(self, body: bytes, media: str) -> tuple[bool, object, Prepared]:
        """Whether `body` is a stream, its value or what it amounts to, and that prepared."""
        framing = dialects.framing_of(self.endpoint, media, body)
        if framing:
            output = dialects.assemble(self.endpoint, body, framing)
        else:
            output = body_value(body, media, self.recorder.policy)
        return bool(framing), output, self.recorder.prepare(output)

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
        """An attempt's body ended. It is the call's last unless the SDK tries again, which only its return tells."""
        self._last = (status, headers, body, end, error)
        self._extra = extra
        self._redirected = status is not None and 300 <= status < 400
        if first is not None and self._streams and (status or 0) < 400 and self.span.is_recording():
            self.span.set_attribute("gen_ai.response.time_to_first_chunk", first)
        if self._returned:
            self._complete()

    def returned(self) -> None:
        """The SDK gave its result to the program; of a stream the body is still to come."""
        self._returned = True
        if self._last is not None:
            self._complete()
        elif not self._begun:
            self._finish_span(None)

    def raised(self, error: BaseException) -> None:
        """The SDK raised. An answer that it could not use, such as one cut off by its length, is still the answer."""
        if self._last is not None and self._last[0] is not None and self._last[0] < 400 and self._last[4] is None:
            self._complete(error)
        elif not self._done:
            self._done = True
            self._last = None  # it may hold `error`, whose traceback holds the frames that hold this
            self.recorder.fail(self.call, error)
            self._finish_span(error)

    def _complete(self, raised: BaseException | None = None) -> None:
        if self._done or self._last is None:
            return
        self._done = True
        status, headers, body, end, error = self._last
        self._last = None
        try:
            self._end_call(status, headers, body, end, raised or error)
        except Exception as fault:
            self.recorder.fault("recording an answer", fault)
            self.recorder.end(self.call, None, end=end)
            self._finish_span(raised or error)

    def _end_call(self, status: int | None, headers: Pairs, body: bytes, end: str, error: BaseException | None) -> None:
        known, self._answer = self._answer, None
        if known is not None and known[0] is body:
            _, output, prepared = known
        else:
            _, output, prepared = self._read(body, header(headers, "content-type"))
        answered = dialects.answered(self.endpoint, output)
        for call_id, name in dialects.tool_calls(self.endpoint.method, output):
            if self.call is not None:
                self.call.run.answered.called(call_id, name)
        described = self.recorder.describe_error(error) if error is not None else self._said(answered, status)
        digest = self.recorder.end(
            self.call,
            prepared,
            end=end,
            status="ok" if described is None and (status or 0) < 400 else "error",
            error=described,
            model=answered.model,
            tokens=answered.tokens,
            cached=answered.cached,
            extra=self._extra,
        )
        if self.span.is_recording():
            if digest is not None:
                answered.attributes["sftrace.output_hash"] = digest
            self.span.set_attributes(answered.attributes)
            if self.recorder.settings.content == "span":
                self._show(parts.response_content(prepared.value))
        self._finish_span(error if error is not None or described is None else described["type"])

    def _said(self, answered: dialects.Answered, status: int | None) -> dict[str, Any] | None:
        """The failure that the answer itself tells of."""
        failure = answered.error
        if failure is None and (status or 0) >= 400:
            failure = (str(status), f"HTTP status {status}")
        if failure is None:
            return None
        kind, message = (self.recorder.policy.redact_text(text) for text in failure)
        if not self.recorder.has_content:
            message = kind
        return {"type": kind[0], "message": message[0], "findings": sorted({item.reason for item in message[1]})}

    def _finish_span(self, error: BaseException | str | None) -> None:
        try:
            tracing.end_span(self.span, error)
        except Exception as fault:  # a span processor of the program's own
            self.recorder.fault("ending a span", fault)


class ServedLlmCall:
    """An LLM call under replay: matched with its first attempt, then answered attempt by attempt."""

    def __init__(
        self, active: replaying.Active, endpoint: Endpoint, provider: str, host: str, span: Span, scope: Scope
    ) -> None:
        self.active = active
        self.endpoint = endpoint
        self.provider = provider
        self.span = span
        self.lineage = scope.place()
        self._host = host
        self._answers: list[Answer] | None = None
        self._next = 0
        self._redirected = False
        self._scope = scope
        self._goes_out = False
        self.recording: LlmCall | None = None
        """The recording of a call that goes out, where the replay is recorded."""

    def owns(self, head: Head) -> bool:
        """As `LlmCall.owns`."""
        return self._redirected or is_own(head, self.endpoint, self._host)

    def serve(self, head: Head, body: bytes | None) -> Answer | GoesOut:
        """The answer of the next attempt, or that it goes out. Raises ReplayStop with the error of the session."""
        try:
            if self._answers is None and not self._goes_out:
                self._answers = self._match(head, body)
        except ReplayError as error:
            raise replaying.ReplayStop(error) from None
        if self._answers is None:
            return GoesOut(self.lineage)
        answer = self._answers[min(self._next, len(self._answers) - 1)]
        self._next += 1
        self._redirected = answer.status is not None and 300 <= answer.status < 400
        return answer

    def _match(self, head: Head, body: bytes | None) -> list[Answer] | None:
        """The answers of its attempts; None where it goes out."""
        request = body_value(body, head.media() or "application/json", self.active.policy)
        asked = dialects.ask(self.endpoint, head.url, request)
        prepared = self.active.prepare(asked.payload)
        decision = self.active.decide(
            "llm",
            self.endpoint.method,
            prepared,
            lineage=self.lineage,
            provider=self.provider,
            model=asked.model,
            method=self.endpoint.method,
        )
        if self.span.is_recording():
            self.span.set_attributes(replaying.marks(decision))
        if decision.action == "live":
            self._goes_out = True
            recorder = recording._active
            if recorder is not None:
                self.recording = LlmCall(
                    recorder, self.endpoint, self.provider, self._host, self.span, self._scope, self.lineage
                )
            return None
        assert decision.call is not None
        if self.span.is_recording():
            self.span.set_attributes(dialects.answered(self.endpoint, decision.call.outcome.output).attributes)
        return answers_of(decision.call, framing=asked.framing, blob=self.active.blob)

    def ended(self, error: BaseException | None) -> None:
        """The SDK returned or raised."""
        if self.recording is None:
            tracing.end_span(self.span, error)
        elif error is None:
            self.recording.returned()
        else:
            self.recording.raised(error)


def is_own(head: Head, endpoint: Endpoint, host: str) -> bool:
    """Whether a request goes to `endpoint` at `host`."""
    return urlsplit(head.url).hostname == host.lower().strip("[]") and dialects.is_at(endpoint, head.method, head.url)


def attributes_of(endpoint: Endpoint, body: object, provider: str, host: str, port: int | None) -> dict[str, Any]:
    """Span attributes known before the request is sent."""
    known = dialects.request_attributes(dialects.ask(endpoint, "", body), provider)
    known["server.address"] = host
    if port is not None:
        known["server.port"] = port
    return known
