# SPDX-License-Identifier: Apache-2.0
"""`.flight` bundles as users type them: write a chain event by event, read one, verify one.

A thin façade: the format is `formats.flight`, the files are `bundle.flight`. For recording a run, set
`OTEL_SFTRACE_FORMATS`; the writer here is for programs that make their own events.

    with FlightWriter("run.flight", run_id="run_1") as chain:
        start = chain.append("run.start", {"agent": "mine"})
        chain.append("tool.call", {"name": "search", "input": {"q": "x"}}, parents=[start])
"""

from __future__ import annotations

from sftrace_otel.bundle.flight import FlightBundle, FlightValidation, FlightWriter, open_flight, verify_flight
from sftrace_otel.formats.flight import (
    GENESIS,
    Finding,
    FlightEvent,
    FlightManifest,
    body_hash,
    redacted,
    unrepr,
)

__all__ = [
    "GENESIS",
    "Finding",
    "FlightBundle",
    "FlightEvent",
    "FlightManifest",
    "FlightValidation",
    "FlightWriter",
    "body_hash",
    "open_flight",
    "redacted",
    "unrepr",
    "verify_flight",
]
