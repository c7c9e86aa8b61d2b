# SPDX-License-Identifier: Apache-2.0
"""One turn of the tool-call row: `ours|stepfork|idle N`.

Prints the CPU time of a call in the caller's thread in µs: the mean of all, the median of the first and last tenth.
Ours makes its span and hands it to our processor as well; stepfork makes none.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TEXT = ("the quick brown fox jumps over the lazy dog while it rains " * 18)[:990]
WARM_UP = 20


def lookup(query: str, page: int) -> dict[str, object]:
    """A tool with 1 KB in and 1 KB out that does next to nothing."""
    return {"page": page, "text": query.upper()}


def measure(tool: Callable[[str, int], object], calls: int) -> dict[str, float]:
    """Time every call; no two texts are the same, and the warm-up calls are not counted."""
    for page in range(WARM_UP):
        tool(f"warm {page} {TEXT}", page)
    times = []
    for page in range(calls):
        query = f"{page} {TEXT}"
        started = time.thread_time()
        tool(query, page)
        times.append(time.thread_time() - started)
    tenth = max(1, calls // 10)
    return {
        "all": sum(times) / calls * 1e6,
        "first": sorted(times[:tenth])[tenth // 2] * 1e6,
        "last": sorted(times[-tenth:])[tenth // 2] * 1e6,
    }


def ours(folder: Path, calls: int) -> dict[str, float]:
    """A `record()` block under a provider with our processor."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    from sftrace_otel import SftraceSpanProcessor, instrument, record, trace_tool

    provider = TracerProvider()
    provider.add_span_processor(SftraceSpanProcessor(dir=str(folder), quiet=True))
    trace.set_tracer_provider(provider)
    instrument()
    with record("bench", output=folder / "bench.sftrace"):
        result = measure(trace_tool(lookup), calls)
    provider.shutdown()
    totals = json.loads((folder / "bench.sftrace" / "manifest.json").read_text())["totals"]
    assert totals["tool_calls"] == calls + WARM_UP, totals
    return result


def stepfork(folder: Path, calls: int) -> dict[str, float]:
    """The same block of the reference."""
    from stepfork import record, trace_tool

    with record("bench", output=folder / "bench.sftrace"):
        return measure(trace_tool(lookup), calls)


def idle(folder: Path, calls: int) -> dict[str, float]:
    """What `@trace_tool` adds to a call of a function of two arguments while nothing records, in µs: best of seven."""
    import timeit

    from sftrace_otel import trace_tool

    def bare(query: str, page: int) -> str:
        return query

    traced = trace_tool(bare)
    best = [
        min(timeit.repeat(lambda tool=tool: tool("q", 1), number=calls, repeat=7)) / calls * 1e6  # type: ignore[misc]
        for tool in (bare, traced)
    ]
    return {"all": best[1] - best[0]}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        contender = {"ours": ours, "stepfork": stepfork, "idle": idle}[sys.argv[1]]
        print(json.dumps(contender(Path(scratch), int(sys.argv[2]))))
