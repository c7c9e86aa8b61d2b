# SPDX-License-Identifier: Apache-2.0
"""`SftraceSpanProcessor`: hears of every span at its start and at its end, in the thread of the program.

Decision: inline, and so none is lost, not in a burst and not when the process is killed. A queue
with a thread behind it loses spans when full and costs the program more through the interpreter lock
(`facts/performance.md` §0). The SDK calls processors without any guard, so nothing may be raised from here.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.otel.exporter import SftraceExporter, is_replayed
from sftrace_otel.otel.opening import Holder

__all__ = ["SftraceSpanProcessor"]


class SftraceSpanProcessor(SpanProcessor):
    """Records spans as they end and knows local roots from their start.

    `exporter`: an `SftraceExporter` whose destination to share; otherwise `settings`, as the exporter takes them (the
    environment where there are none). A span that also reaches an exporter with the same destination is recorded once.
    Raises SettingsError for a wrong keyword and TypeError for another exporter: give that one its own processor.
    """

    def __init__(self, exporter: SftraceExporter | None = None, **settings: Any) -> None:
        if exporter is not None and not isinstance(exporter, SftraceExporter):
            raise TypeError(f"{type(exporter).__name__} is no SftraceExporter; wrap it in a processor of the SDK")
        if exporter is not None and settings:
            raise TypeError("settings belong to the exporter when one is given")
        self.exporter = exporter
        self.holder = exporter.holder if exporter is not None else Holder(settings)

    @fails_open("following a span", None, replay_too=True)
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Follow the span; a local root gets the attribute `sftrace.bundle`."""
        if self.holder.open and self.holder.intake is not None and replaying._active is None:
            self.holder.intake.started(span)

    @fails_open("recording a span", None, replay_too=True)
    def on_end(self, span: ReadableSpan) -> None:
        """Record the span now."""
        if self.holder.open and self.holder.intake is not None and not is_replayed(span):
            self.holder.intake.ended(span)

    @fails_open("closing the recording", None, replay_too=True)
    def shutdown(self) -> None:
        """Close the open runs if nobody else records to the same destination. Twice is once."""
        self.holder.release()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """True: nothing is queued."""
        return True
