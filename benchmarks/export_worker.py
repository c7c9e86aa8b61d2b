# SPDX-License-Identifier: Apache-2.0
"""One turn of the export row: `ours|otlp prose|json`. Prints CPU µs a span.

Measured from the first `export` to the end of `shutdown`. The spans are chat spans of another instrumentation: ten
attributes, one of 4 KB, no reference of ours.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SPANS, BATCH = 4096, 512
PROSE = ("It was raining when the order arrived, and nobody had asked for a lamp. " * 60)[:4000]
MESSAGES = json.dumps(
    [{"role": "user", "parts": [{"type": "text", "content": PROSE[i : i + 380]}]} for i in range(0, 3600, 380)]
)


def spans(content: str) -> list[ReadableSpan]:
    """One trace: chat spans under a root, children first, as the SDK exports them."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("bench")
    with tracer.start_as_current_span("invoke_agent bench", attributes={"gen_ai.operation.name": "invoke_agent"}):
        for number in range(SPANS - 1):
            with tracer.start_as_current_span("chat gpt-5-mini", attributes=attributes(content, number)):
                pass
    return list(memory.get_finished_spans())


def attributes(content: str, number: int) -> dict[str, str | int | float]:
    """Ten attributes, one of them 4 KB."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5-mini",
        "gen_ai.response.model": "gpt-5-mini",
        "gen_ai.response.id": f"chatcmpl-{number}",
        "gen_ai.usage.input_tokens": 800 + number % 100,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.input.messages": content,
        "server.address": "api.example",
        "server.port": 443,
    }


def exporter(name: str, folder: Path) -> SpanExporter:
    """The contender, writing into a folder of its own."""
    if name == "ours":
        from sftrace_otel import SftraceExporter

        return SftraceExporter(dir=str(folder), quiet=True)
    from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter

    return FileSpanExporter(path=folder / "spans.jsonl")


def measure(name: str, content: str) -> dict[str, float]:
    """CPU of the whole process, so that work moved to a thread counts."""
    with tempfile.TemporaryDirectory() as scratch:
        batch = spans(content)
        contender = exporter(name, Path(scratch))
        started = time.process_time()
        for start in range(0, len(batch), BATCH):
            contender.export(batch[start : start + BATCH])
        exported = time.process_time()
        contender.shutdown()
        closed = time.process_time()
        written = sum(path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file())
        assert written > 3000 * SPANS, f"{name} wrote only {written} bytes"
    return {"export": (exported - started) / SPANS * 1e6, "all": (closed - started) / SPANS * 1e6}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(measure(sys.argv[1], {"prose": PROSE, "json": MESSAGES}[sys.argv[2]])))
