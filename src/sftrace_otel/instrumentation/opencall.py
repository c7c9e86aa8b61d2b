# SPDX-License-Identifier: Apache-2.0
"""A call being recorded that a boundary of ours makes a span for: the journal entry, the span and the scope inside.

Decision: the event's id is drawn before the span starts, so that the span carries its references from the start: one
attribute at a time costs four times as much, and a processor knows at once whose span it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sftrace_otel.core.prepare import Prepared
from sftrace_otel.instrumentation import tracing
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.recorder import Call, Recorder, current_scope, enter, inner, leave

if TYPE_CHECKING:
    from opentelemetry.trace import SpanKind

__all__ = ["OpenCall", "Replayed"]


class Replayed(NamedTuple):
    """What a replay has found out about a call that runs: its place, its span's marks, whether it was let out."""

    lineage: str | None
    marks: Mapping[str, Any]
    live: bool


class OpenCall:
    """Begun by its constructor, which may raise for a fault of ours; its methods do not."""

    __slots__ = ("call", "recorder", "scope", "span")

    def __init__(
        self,
        recorder: Recorder,
        kind: str,
        name: str,
        prepared: Prepared,
        *,
        tracer: str,
        span_name: str,
        span_kind: SpanKind,
        attributes: Mapping[str, Any],
        policy: str,
        provider: str | None = None,
        model: str | None = None,
        replayed: Replayed | None = None,
    ) -> None:
        self.recorder = recorder
        self.call: Call | None = None
        outer = current_scope()
        lineage = outer.place() if replayed is None else replayed.lineage
        around = tracing.current_ids()
        run = recorder.run_for(outer, around[1])
        event_id = run.new_id()
        marks: dict[str, Any] = {
            **attributes,
            "sftrace.run.id": run.id,
            "sftrace.event.id": event_id,
            "sftrace.input_hash": prepared.digest,
        }
        named = run.named
        if replayed is not None:
            marks.update(replayed.marks)
        if not around[1] and named:
            marks["sftrace.bundle"] = run.name
        self.span = tracing.start_span(tracer, span_name, span_kind, marks)
        ids = tracing.ids_of(self.span)
        self.call = recorder.begin(
            kind,
            name,
            prepared,
            scope=outer,
            lineage=lineage,
            provider=provider,
            model=model,
            policy=policy,
            span=ids,
            run=run,
            event_id=event_id,
        )
        if self.call is not None:
            recorder.refer(ids[1], self.call)
            if not named:
                tracing.name_root(self.span, run.name)
        self.scope = inner(self.call, lineage, outer, live=replayed is not None and replayed.live)

    @fails_open("entering a call", None)
    def enter(self) -> tuple[Any, Any] | None:
        """Make the call's span and scope current; give the result to `leave` in the same function."""
        self.scope.claim()
        return enter(self.scope), tracing.attached(self.span)

    @staticmethod
    @fails_open("leaving a call", None, replay_too=True)
    def leave(tokens: tuple[Any, Any] | None) -> None:
        """Undo `enter`."""
        if tokens is None:
            return
        tracing.detach(tokens[1])
        leave(tokens[0])

    @fails_open("ending a span", None, replay_too=True)
    def end_span(self, error: BaseException | None) -> None:
        """End the span; `error` is what the call raised."""
        try:
            tracing.end_span(self.span, error)
        except Exception as fault:  # a span processor of the program's own
            self.fault("ending a span", fault)

    def fault(self, what: str, error: BaseException) -> None:
        """Count a loss of ours on the call's run."""
        self.recorder.fault(what, error, None if self.call is None else self.call.run)

    def note_output(self, digest: str | None) -> None:
        """Put the output's hash on the span."""
        if digest is not None:
            self.span.set_attribute("sftrace.output_hash", digest)
