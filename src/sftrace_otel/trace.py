# SPDX-License-Identifier: Apache-2.0
"""Traces as users type them: `Trace`, the events, and the errors of loading and saving.

A thin façade: the models are in `formats.sftrace`, loading and saving in `bundle`.
"""

from __future__ import annotations

from sftrace_otel.bundle.read import Validation, iter_events, validate_bundle
from sftrace_otel.bundle.trace import Trace
from sftrace_otel.errors import PayloadError, TraceStorageError
from sftrace_otel.formats.sftrace import (
    Environment,
    ErrorEvent,
    Event,
    EventBase,
    EventStatus,
    EventType,
    Failure,
    Issue,
    LLMRequest,
    LLMResponse,
    Manifest,
    RedactionEntry,
    ReplayPolicy,
    RunEnd,
    RunStart,
    RunStatus,
    StateChange,
    ToolCall,
    ToolResult,
    Totals,
    validate,
)

EnvironmentInfo = Environment
FailureInfo = Failure
TraceManifest = Manifest
TraceTotals = Totals

__all__ = [
    "Environment",
    "EnvironmentInfo",
    "ErrorEvent",
    "Event",
    "EventBase",
    "EventStatus",
    "EventType",
    "Failure",
    "FailureInfo",
    "Issue",
    "LLMRequest",
    "LLMResponse",
    "Manifest",
    "PayloadError",
    "RedactionEntry",
    "ReplayPolicy",
    "RunEnd",
    "RunStart",
    "RunStatus",
    "StateChange",
    "ToolCall",
    "ToolResult",
    "Totals",
    "Trace",
    "TraceManifest",
    "TraceStorageError",
    "TraceTotals",
    "Validation",
    "iter_events",
    "validate",
    "validate_bundle",
]
