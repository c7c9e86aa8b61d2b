# SPDX-License-Identifier: Apache-2.0
"""Set-ups of other vendors, with the lines that the README shows. Run where those packages are installed."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Child

pytestmark = pytest.mark.full

AGENT = """
with tracer.start_as_current_span("agent"):
    client = openai.OpenAI(api_key="none", base_url=URL)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    for chunk in client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}], stream=True):
        pass
"""

LOGFIRE = """
import logfire
from sftrace_otel import SftraceSpanProcessor
logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[SftraceSpanProcessor()])
logfire.instrument_openai()
"""

LOGFIRE_EXACT = """
import logfire
from sftrace_otel import SftraceSpanProcessor, instrument
instrument()
logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[SftraceSpanProcessor()])
logfire.instrument_openai(suppress_other_instrumentation=False)
"""

PHOENIX = """
from phoenix.otel import register
from openinference.instrumentation.openai import OpenAIInstrumentor
from sftrace_otel import SftraceSpanProcessor
tracer_provider = register(endpoint="http://127.0.0.1:9/v1/traces", protocol="http/protobuf", verbose=False)
tracer_provider.add_span_processor(SftraceSpanProcessor(), replace_default_processor=False)
OpenAIInstrumentor().instrument(tracer_provider=tracer_provider)
assert len(tracer_provider._active_span_processor._span_processors) == 2
"""

TRACELOOP = """
from traceloop.sdk import Traceloop
from sftrace_otel import SftraceSpanProcessor
Traceloop.init(app_name="shop", processor=SftraceSpanProcessor(), telemetry_enabled=False)
"""

LANGFUSE = """
from langfuse import Langfuse
from langfuse.openai import openai
from opentelemetry import trace
from sftrace_otel import SftraceSpanProcessor
Langfuse(public_key="pk-lf-none", secret_key="sk-lf-none", host="http://127.0.0.1:9")
trace.get_tracer_provider().add_span_processor(SftraceSpanProcessor())
"""

SETUPS = {
    "logfire": (LOGFIRE, ("logfire", "openai")),
    "logfire, our boundaries": (LOGFIRE_EXACT, ("logfire", "openai")),
    "phoenix": (PHOENIX, ("phoenix.otel", "openinference.instrumentation.openai", "openai")),
    "traceloop": (TRACELOOP, ("traceloop.sdk", "openai")),
    "langfuse": (LANGFUSE, ("langfuse", "openai")),
}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.filterwarnings("ignore")
def test_a_setup_records_each_call_once(child: Child, openai_server: Any, name: str) -> None:
    setup, needs = SETUPS[name]
    for module in needs:
        package, _, _ = module.partition(".")
        pytest.importorskip(package)
    program = "\n".join(
        [setup, "import openai", "from opentelemetry import trace", 'tracer = trace.get_tracer("test")', AGENT]
    )
    child.run(program.replace("URL", repr(f"{openai_server.url}/v1")), timeout=90)
    requests = child.bundles.events("llm_request")
    assert [request["model"] for request in requests] == ["m", "m"]
    contents = [request["input"]["request"]["messages"][-1]["content"] for request in requests]
    assert contents == ["hi", "go"]
    assert len(child.bundles.events("llm_response")) == 2
    assert "agent" in child.bundles.spans()
