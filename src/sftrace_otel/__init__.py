# SPDX-License-Identifier: Apache-2.0
"""sftrace-otel: record a run of an AI agent through OpenTelemetry, replay it offline, fork it at a step.

The names below are imported when they are first used: `import sftrace_otel` loads no SDK and no client library.
"""

from __future__ import annotations

from sftrace_otel.version import __version__

TYPE_CHECKING = False  # type checkers take it for true; importing typing would cost every start 5 ms

if TYPE_CHECKING:
    from sftrace_otel.core.redact import RedactionPolicy
    from sftrace_otel.errors import (
        RecordedDependencyError,
        ReplayError,
        ReplayExhaustedError,
        ReplayMismatchError,
        ReplayPolicyError,
        SftraceError,
    )
    from sftrace_otel.instrumentation.api import (
        RecordingSession,
        allm_request,
        keep,
        llm_request,
        record,
        record_state_change,
        set_input,
        set_output,
    )
    from sftrace_otel.instrumentation.httpx import SftraceTransport
    from sftrace_otel.instrumentation.servers import SftraceASGI, SftraceWSGI
    from sftrace_otel.instrumentation.tools import trace_tool
    from sftrace_otel.otel import instrument, uninstrument
    from sftrace_otel.otel.exporter import SftraceExporter
    from sftrace_otel.otel.processor import SftraceSpanProcessor
    from sftrace_otel.otel.replay_processor import ReplaySpanProcessor
    from sftrace_otel.replay import ReplaySession
    from sftrace_otel.trace import ToolCall, Trace

_WHERE = {
    "RecordedDependencyError": "errors",
    "RecordingSession": "instrumentation.api",
    "RedactionPolicy": "core.redact",
    "ReplayError": "errors",
    "ReplayExhaustedError": "errors",
    "ReplayMismatchError": "errors",
    "ReplayPolicyError": "errors",
    "ReplaySession": "replay",
    "ReplaySpanProcessor": "otel.replay_processor",
    "SftraceASGI": "instrumentation.servers",
    "SftraceError": "errors",
    "SftraceExporter": "otel.exporter",
    "SftraceSpanProcessor": "otel.processor",
    "SftraceTransport": "instrumentation.httpx",
    "SftraceWSGI": "instrumentation.servers",
    "ToolCall": "trace",
    "Trace": "trace",
    "allm_request": "instrumentation.api",
    "instrument": "otel",
    "keep": "instrumentation.api",
    "llm_request": "instrumentation.api",
    "record": "instrumentation.api",
    "record_state_change": "instrumentation.api",
    "set_input": "instrumentation.api",
    "set_output": "instrumentation.api",
    "trace_tool": "instrumentation.tools",
    "uninstrument": "otel",
}

__all__ = [
    "RecordedDependencyError",
    "RecordingSession",
    "RedactionPolicy",
    "ReplayError",
    "ReplayExhaustedError",
    "ReplayMismatchError",
    "ReplayPolicyError",
    "ReplaySession",
    "ReplaySpanProcessor",
    "SftraceASGI",
    "SftraceError",
    "SftraceExporter",
    "SftraceSpanProcessor",
    "SftraceTransport",
    "SftraceWSGI",
    "ToolCall",
    "Trace",
    "__version__",
    "allm_request",
    "instrument",
    "keep",
    "llm_request",
    "record",
    "record_state_change",
    "set_input",
    "set_output",
    "trace_tool",
    "uninstrument",
]


def __getattr__(name: str) -> object:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
