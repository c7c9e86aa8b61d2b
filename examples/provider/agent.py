# SPDX-License-Identifier: Apache-2.0
"""A program that sets up OpenTelemetry by hand and adds sftrace beside the exporter it already has.

    python examples/quickstart/server.py &                    # and export the two addresses it prints
    OPENAI_API_KEY=none python examples/provider/agent.py

`SftraceExporter` alone records what spans carry. `instrument()` adds the boundaries that see the calls themselves, so
that the recording holds the exact requests and answers although no span carries them.
"""

from __future__ import annotations

from openai import OpenAI
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from sftrace_otel import SftraceExporter, SftraceSpanProcessor, instrument, trace_tool


def one_line(span: ReadableSpan) -> str:
    """How the other exporter shows a span."""
    return f"span: {span.name}\n"


def set_up() -> TracerProvider:
    """A provider with two exporters: the console, and a bundle under `sftraces/`."""
    provider = TracerProvider(resource=Resource.create({"service.name": "provider-example"}))
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=one_line)))
    provider.add_span_processor(SftraceSpanProcessor(SftraceExporter()))
    trace.set_tracer_provider(provider)
    instrument()
    return provider


@trace_tool
def celsius(fahrenheit: float) -> float:
    """A tool."""
    return round((fahrenheit - 32) / 1.8, 1)


def main() -> str:
    """One tool call and one chat completion under a span of the program's own."""
    provider = set_up()
    with trace.get_tracer("provider-example").start_as_current_span("weather report"):
        degrees = celsius(71.6)
        answer = OpenAI().chat.completions.create(
            model="gpt-5-mini", messages=[{"role": "user", "content": f"Rewrite as a letter:\nIt is {degrees} °C."}]
        )
    text = answer.choices[0].message.content or ""
    print(text)
    provider.shutdown()
    return text


if __name__ == "__main__":
    main()
