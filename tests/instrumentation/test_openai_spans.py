# SPDX-License-Identifier: Apache-2.0
"""Spans of the openai SDK: names, kinds, attributes; and other instrumentations of the same calls around them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from opentelemetry.trace import SpanKind

from sftrace_otel.bundle.read import open_bundle

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MESSAGES: Any = [{"role": "user", "content": "hi"}]
USAGE = {
    "prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 64}, "completion_tokens_details": {"reasoning_tokens": 7},
}  # fmt: skip


def client(server: Any) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="k", max_retries=0)


def attributes(span: Any) -> dict[str, Any]:
    """What the span says of the call, without the references to the bundle and the server's address."""
    return {key: value for key, value in span.attributes.items() if not key.startswith(("sftrace.", "server."))}


CHAT_ATTRIBUTES = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-5",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.top_p": 0.9,
    "gen_ai.request.max_tokens": 99,
    "gen_ai.request.frequency_penalty": 0.1,
    "gen_ai.request.presence_penalty": 0.2,
    "gen_ai.request.seed": 7,
    "gen_ai.request.choice.count": 2,
    "gen_ai.request.stop_sequences": ("a", "b"),
    "gen_ai.request.reasoning.level": "low",
    "gen_ai.output.type": "json",
    "openai.request.service_tier": "flex",
    "openai.api.type": "chat_completions",
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.response.model": "gpt-5-2025-08-07",
    "gen_ai.response.finish_reasons": ("stop", "length"),
    "openai.response.service_tier": "default",
    "openai.response.system_fingerprint": "fp_1",
    "gen_ai.usage.input_tokens": 100,
    "gen_ai.usage.output_tokens": 20,
    "gen_ai.usage.cache_read.input_tokens": 64,
    "gen_ai.usage.reasoning.output_tokens": 7,
}


def chat_answer(received: Any, module: Any) -> Any:
    head = {"id": "chatcmpl-1", "created": 1, "model": "gpt-5-2025-08-07", "service_tier": "default",
            "system_fingerprint": "fp_1"}  # fmt: skip
    reasons = ["stop", "length"]
    if not received.json.get("stream"):
        message = {"role": "assistant", "content": "x"}
        choices = [{"index": at, "message": message, "finish_reason": reason} for at, reason in enumerate(reasons)]
        return module.json_reply({**head, "object": "chat.completion", "choices": choices, "usage": USAGE})
    chunks = [
        {"choices": [{"index": at, "delta": {"content": "x"}, "finish_reason": reason}]}
        for at, reason in enumerate(reasons)
    ] + [{"choices": [], "usage": USAGE}]
    return module.sse_reply([{**head, "object": "chat.completion.chunk", **chunk} for chunk in chunks], done=True)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_chat_span(
    recorded: Run, frozen: Run, openai_server: Any, server_module: Any, spans: Run, read: Run, stream: bool
) -> None:
    openai_server.replies["POST /v1/chat/completions"] = lambda received: chat_answer(received, server_module)

    def program() -> int:
        made: Any = client(openai_server).chat.completions.create(
            model="gpt-5", messages=MESSAGES, temperature=0.5, top_p=0.9, max_completion_tokens=99, seed=7, n=2,
            frequency_penalty=0.1, presence_penalty=0.2, stop=["a", "b"], service_tier="flex",
            response_format={"type": "json_object"}, stream=stream, extra_body={"reasoning_effort": "low"},
        )  # fmt: skip
        return len(list(made)) if stream else 1

    recorded(program)
    [span] = spans()
    assert (span.name, span.kind) == ("chat gpt-5", SpanKind.CLIENT)
    assert span.instrumentation_scope.name == "sftrace_otel.openai"
    got = attributes(span)
    if stream:
        assert got.pop("gen_ai.request.stream") is True
        assert 0 < got.pop("gen_ai.response.time_to_first_chunk") <= (span.end_time - span.start_time) / 1e9
    assert got == CHAT_ATTRIBUTES
    assert span.attributes["server.address"] == "127.0.0.1"
    assert openai_server.url.endswith(f":{span.attributes['server.port']}")
    events = {event.type: event for event in read().events}
    assert span.attributes["sftrace.event.id"] == events["llm_request"].id
    assert span.attributes["sftrace.input_hash"] == events["llm_request"].input_hash
    assert span.attributes["sftrace.output_hash"] == events["llm_response"].output_hash
    frozen(program)
    served = spans()[1]
    assert served.name == "chat gpt-5"
    assert served.attributes["sftrace.replay.served"] is True
    assert {key: served.attributes.get(key) for key in CHAT_ATTRIBUTES} == CHAT_ATTRIBUTES


@pytest.mark.skipif(not hasattr(openai.OpenAI, "responses"), reason="this openai has no Responses API")
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_response_span(recorded: Run, openai_server: Any, server_module: Any, spans: Run, stream: bool) -> None:
    whole = server_module.response({"model": "gpt-5-2025"}, server_module.output_message("x"), service_tier="default")
    events = list(server_module.response_events(whole))
    reply = server_module.sse_reply(events, named=True) if stream else server_module.json_reply(whole)
    openai_server.replies["POST /v1/responses"] = reply

    def program() -> None:
        ask: Any = {"model": "gpt-5", "input": "hi", "max_output_tokens": 9, "previous_response_id": "resp_0"}
        extra = {"reasoning": {"effort": "high"}, "conversation": "conv_1"}
        made = client(openai_server).responses.create(**ask, service_tier="auto", stream=stream, extra_body=extra)
        if stream:
            list(made)

    recorded(program)
    [span] = spans()
    assert span.name == "chat gpt-5"
    got = attributes(span)
    if stream:
        assert got.pop("gen_ai.request.stream") is True
        assert got.pop("gen_ai.response.time_to_first_chunk") > 0
    assert got == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.previous_response.id": "resp_0",
        "gen_ai.request.reasoning.level": "high",
        "gen_ai.conversation.id": "conv_1",
        "openai.api.type": "responses",
        "openai.response.service_tier": "default",
        "gen_ai.response.id": "resp_test",
        "gen_ai.response.model": "gpt-5-2025",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 10,
        "gen_ai.usage.reasoning.output_tokens": 4,
    }


def test_spans_of_embeddings_and_completions(recorded: Run, openai_server: Any, server_module: Any, spans: Run) -> None:
    data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
    usage = {"prompt_tokens": 8, "total_tokens": 8}
    embedded = {"object": "list", "data": data, "model": "text-embedding-3-small", "usage": usage}
    openai_server.replies["POST /v1/embeddings"] = server_module.json_reply(embedded)
    choice = {"text": "x", "index": 0, "finish_reason": "stop", "logprobs": None}
    completed = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "g", "choices": [choice]}
    openai_server.replies["POST /v1/completions"] = server_module.json_reply(completed)

    def program() -> None:
        own = client(openai_server)
        own.embeddings.create(model="text-embedding-3-small", input="x", dimensions=1, encoding_format="float")
        own.completions.create(model="gpt-3.5-turbo-instruct", prompt="x")

    recorded(program)
    embeddings, completions = spans()
    assert embeddings.name == "embeddings text-embedding-3-small"
    assert attributes(embeddings) == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "text-embedding-3-small",
        "gen_ai.embeddings.dimension.count": 1,
        "gen_ai.request.encoding_formats": ("float",),
        "gen_ai.response.model": "text-embedding-3-small",
        "gen_ai.usage.input_tokens": 8,
    }
    assert completions.name == "text_completion gpt-3.5-turbo-instruct"
    assert completions.attributes["gen_ai.operation.name"] == "text_completion"


OTHERS = '''
import json, sys
import openai, wrapt
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from sftrace_otel import SftraceSpanProcessor, instrument

url, seam, order = sys.argv[1:]
provider = TracerProvider()
provider.add_span_processor(SftraceSpanProcessor())
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: json.dumps(
    [span.name, span.parent is not None]) + "\\n")))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("somebody.else")


def other(wrapped, instance, args, kwargs):
    """A span of its own with the call's content, as other instrumentations of this SDK make one."""
    name, attributes = ("chat m", {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m"}) if seam == "create" else ("ChatCompletion", {"openinference.span.kind": "LLM",
        "llm.model_name": "m"})
    asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    attributes |= {"gen_ai.input.messages": asked} if seam == "create" else {"input.value": asked}
    with tracer.start_as_current_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes) as span:
        done = wrapped(*args, **kwargs)
        if hasattr(done, "id"):
            span.set_attribute("gen_ai.response.id", done.id)
        span.set_attribute("gen_ai.output.messages" if seam == "create" else "output.value", "[]")
        return done


def wrap():
    if seam == "create":
        from openai.resources.chat import completions
        wrapt.wrap_function_wrapper(completions, "Completions.create", other)
    elif seam == "request":
        wrapt.wrap_function_wrapper(openai, "OpenAI.request", other)
    else:
        wrapt.wrap_function_wrapper("openai._base_client", "SyncAPIClient.request", other)


for step in (instrument, wrap) if order == "ours first" else (wrap, instrument):
    step()
client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
with tracer.start_as_current_span("agent"):
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert type(client.chat.completions.create(**ask)).__name__ == "ChatCompletion"
    stream = client.chat.completions.create(**ask, stream=True)
    assert type(stream).__name__ == "Stream"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "1: hi"
provider.shutdown()
'''


@pytest.mark.parametrize("order", ["ours first", "ours last"])
@pytest.mark.parametrize("seam", ["create", "request", "same place"])
def test_other_instrumentations_of_the_same_calls(openai_server: Any, tmp_path: Path, seam: str, order: str) -> None:
    script = tmp_path / "agent.py"
    script.write_text(OTHERS)
    done = subprocess.run(
        [sys.executable, str(script), openai_server.base_url, seam, order],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [json.loads(line)[0] for line in done.stdout.splitlines()]
    theirs = "chat m" if seam == "create" else "ChatCompletion"
    assert sorted(names) == sorted(["agent", theirs, theirs, "chat m", "chat m"])  # all spans reach other exporters
    [path] = (tmp_path / "sftraces").glob("*.sftrace")
    bundle = open_bundle(path)
    assert [row["kind"] for row in bundle.calls] == ["llm", "llm"]
    requests = [event for event in bundle.events if event.type == "llm_request"]
    assert [request.input["request"]["messages"][0]["content"] for request in requests] == ["hi", "hi"]
    responses = [event for event in bundle.events if event.type == "llm_response"]
    assert [event.output["choices"][0]["message"]["content"] for event in responses] == ["1: hi", "1: hi"]
    assert len(list(bundle.wire())) == 2
