# SPDX-License-Identifier: Apache-2.0
"""`SftraceExporter`: a `SpanExporter` that turns spans into bundles.

Decision: it only listens. It never patches and never raises, it may stand behind any span processor, and its settings
come from `OTEL_SFTRACE_*` variables or keywords that YAML can spell, since `OTEL_TRACES_EXPORTER=sftrace` calls it with
no argument and a configuration file with a mapping. Behind `BatchSpanProcessor` spans can be lost before they reach it
(the SDK's queue drops when full); `SftraceSpanProcessor` loses none.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from sftrace_otel.instrumentation import replaying
from sftrace_otel.instrumentation.failopen import fails_open
from sftrace_otel.otel.opening import Holder

__all__ = ["SftraceExporter"]


def is_replayed(span: ReadableSpan) -> bool:
    """Whether a span is of a replay, under which nothing is recorded by way of spans."""
    return replaying._active is not None or "sftrace.replay.active" in (span.attributes or ())


class SftraceExporter(SpanExporter):
    """Records the spans it is given: `SftraceExporter("traces", agent="shop")`.

    Without arguments it goes by the environment. `dir`: folder for bundles; given here, a span alone makes a bundle,
    while under the default a run without a call leaves nothing. `settings`: the other settings, `OTEL_SFTRACE_<NAME>`
    in lower case. Raises SettingsError for an unknown or wrong keyword; a wrong variable is one log line, and nothing
    is recorded.
    """

    def __init__(self, dir: str | PathLike[str] | None = None, **settings: Any) -> None:  # noqa: A002
        self.refused = 0
        """Spans that came after `shutdown`."""
        self.holder = Holder({"dir": None if dir is None else fspath(dir), **settings}, exporter=self)

    @fails_open("recording a span", SpanExportResult.FAILURE, replay_too=True)
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take ended spans, children before parents. FAILURE where one could not be taken, or after `shutdown`."""
        intake = self.holder.intake
        if intake is None:
            return SpanExportResult.SUCCESS
        if not self.holder.open:
            self.refused += len(spans)
            return SpanExportResult.FAILURE
        taken = [intake.ended(span) for span in spans if not is_replayed(span)]
        return SpanExportResult.SUCCESS if all(taken) else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """True: every span is handed over when `export` returns."""
        return True

    @fails_open("closing the recording", None, replay_too=True)
    def shutdown(self) -> None:
        """Close the open runs if nobody else records to the same destination. Twice is once."""
        self.holder.release()
