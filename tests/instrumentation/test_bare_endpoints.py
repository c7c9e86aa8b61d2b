# SPDX-License-Identifier: Apache-2.0
"""LLM services called with a bare HTTP client: one LLM call, its span, and offline replay with the server stopped."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from sftrace_otel import ReplayMismatchError, ReplaySession, record, trace_tool
from sftrace_otel.errors import ReplayPolicyError
from sftrace_otel.fork import ForkPoint, OverrideSpec, fork_trace
from sftrace_otel.instrumentation import serving, tracing
from sftrace_otel.instrumentation.exchange import Exchange

Run = Callable[..., Any]
MODULES = [httpx, httpx2]
server = sys.modules["llm_server"]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a provider of the program's own exports; the spans of our boundaries go there."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


# --- services ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A request, what the service answers, and the LLM call that it is."""

    path: str
    body: dict[str, Any]
    reply: Any
    method: str
    provider: str
    span: str
    output: Any
    tokens: tuple[int | None, int | None, int | None]
    attributes: dict[str, Any]


MESSAGES = [{"role": "user", "content": "hi"}]
CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]
COMPLETION = {
    "id": "c1", "object": "chat.completion", "created": 1, "model": "m-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}  # fmt: skip
CHUNK = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m-1"}
CHUNKS = [
    {**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}]},
    {**CHUNK, "choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]},
    {**CHUNK, "choices": [], "usage": COMPLETION["usage"]},
]
MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-1",
    "content": [
        {"type": "thinking", "thinking": "let me see", "signature": "sig"},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": [2.5]}},
    ],
    "stop_reason": "tool_use", "stop_sequence": None,
    "usage": {"input_tokens": 3, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 100, "output_tokens": 7},
}  # fmt: skip
MESSAGE_EVENTS = [
    {"type": "message_start", "message": {
        **MESSAGE, "content": [], "stop_reason": None, "usage": {**MESSAGE["usage"], "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "let me"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": " see"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "sig"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 1},
    {"type": "content_block_start", "index": 2,
     "content_block": {"type": "tool_use", "id": "t1", "name": "add", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ""}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1, '}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '"b": [2.5]}'}},
    {"type": "content_block_stop", "index": 2},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
     "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
]  # fmt: skip
GENERATED = {
    "candidates": [{
        "content": {"role": "model", "parts": [{"text": "Hello"}, {"functionCall": {"name": "add", "args": {"a": 1}}}]},
        "finishReason": "STOP", "index": 0,
    }],
    "usageMetadata": {"promptTokenCount": 4, "candidatesTokenCount": 2, "thoughtsTokenCount": 1, "totalTokenCount": 7},
    "modelVersion": "gemini-9-001", "responseId": "r1",
}  # fmt: skip
GENERATED_CHUNKS = [
    {"candidates": [{"content": {"role": "model", "parts": [{"text": "Hel"}]}, "index": 0}],
     "usageMetadata": {"promptTokenCount": 4, "totalTokenCount": 4}, "modelVersion": "gemini-9-001",
     "responseId": "r1"},
    {"candidates": [{"content": {"role": "model", "parts": [
        {"text": "lo"}, {"functionCall": {"name": "add", "args": {"a": 1}}}]}, "index": 0, "finishReason": "STOP"}],
     "usageMetadata": GENERATED["usageMetadata"], "modelVersion": "gemini-9-001", "responseId": "r1"},
]  # fmt: skip
CHATTED = {
    "model": "llama3", "created_at": "2026-01-01T00:00:02Z",
    "message": {
        "role": "assistant", "content": "Hello", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
    "done": True, "done_reason": "stop", "prompt_eval_count": 5, "eval_count": 3, "total_duration": 9,
}  # fmt: skip
CHAT_LINES = [
    {"model": "llama3", "created_at": "2026-01-01T00:00:00Z", "message": {"role": "assistant", "content": "Hel"},
     "done": False},
    {"model": "llama3", "created_at": "2026-01-01T00:00:01Z", "message": {
        "role": "assistant", "content": "lo", "tool_calls": CHATTED["message"]["tool_calls"]}, "done": False},
    {**CHATTED, "message": {"role": "assistant", "content": ""}},
]  # fmt: skip
WRITTEN = {"model": "llama3", "created_at": "z", "response": "Hello", "done": True, "context": [1, 2], "eval_count": 2}
WRITTEN_LINES = [
    {"model": "llama3", "created_at": "y", "response": "Hel", "done": False},
    {"model": "llama3", "created_at": "y", "response": "lo", "done": False},
    {**WRITTEN, "response": ""},
]
OPENAI = {"gen_ai.response.id": "c1", "gen_ai.response.model": "m-1", "gen_ai.response.finish_reasons": ("stop",)}
CLAUDE = {
    "gen_ai.request.max_tokens": 64, "gen_ai.response.id": "msg_1", "gen_ai.response.model": "claude-1",
    "gen_ai.response.finish_reasons": ("tool_use",), "gen_ai.usage.cache_read.input_tokens": 100,
    "gen_ai.usage.cache_write.input_tokens": 20,
}  # fmt: skip
GEMINI = {
    "gen_ai.response.id": "r1", "gen_ai.response.model": "gemini-9-001", "gen_ai.response.finish_reasons": ("STOP",),
    "gen_ai.usage.reasoning.output_tokens": 1,
}  # fmt: skip
LLAMA = {"gen_ai.response.model": "llama3"}
RESPONSE = {"id": "r", "object": "response", "model": "m-1", "status": "completed", "output": []}
ASK_CLAUDE = {"model": "claude", "max_tokens": 64, "messages": MESSAGES}
EMBEDDED = {"data": [{"embedding": [0.5]}], "model": "e-1", "usage": {"prompt_tokens": 2, "total_tokens": 2}}

CASES = {
    "openai": Case("/v1/chat/completions", {"model": "m", "messages": MESSAGES}, server.whole(COMPLETION),
                   "chat.completions.create", "openai", "chat m", COMPLETION, (3, 2, 5), OPENAI),
    "openai-stream": Case("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "stream": True},
                          server.events(*CHUNKS, done=True), "chat.completions.create", "openai", "chat m", COMPLETION,
                          (3, 2, 5), OPENAI),
    "openai-responses": Case("/v1/responses", {"model": "m", "input": "hi"},
                             server.whole(RESPONSE), "responses.create", "openai", "chat m", RESPONSE,
                             (None, None, None), {"gen_ai.response.id": "r"}),
    "openai-embeddings": Case("/v1/embeddings", {"model": "e", "input": "hi"}, server.whole(EMBEDDED),
                              "embeddings.create", "openai", "embeddings e", EMBEDDED, (2, None, 2),
                              {"gen_ai.response.model": "e-1"}),
    "mistral-fim": Case("/v1/fim/completions", {"model": "codestral", "prompt": "def", "suffix": "return"},
                        server.whole(COMPLETION), "fim.complete", "mistral_ai", "text_completion codestral", COMPLETION,
                        (3, 2, 5), OPENAI),
    "anthropic": Case("/v1/messages", ASK_CLAUDE, server.whole(MESSAGE),
                      "messages.create", "anthropic", "chat claude", MESSAGE, (123, 7, 130), CLAUDE),
    "anthropic-stream": Case("/v1/messages", {**ASK_CLAUDE, "stream": True},
                             server.named_events(*MESSAGE_EVENTS), "messages.create", "anthropic", "chat claude",
                             MESSAGE, (123, 7, 130), CLAUDE),
    "gemini": Case("/v1beta/models/gemini-9:generateContent", {"contents": CONTENTS}, server.whole(GENERATED),
                   "models.generate_content", "gcp.gemini", "generate_content gemini-9", GENERATED, (4, 3, 7), GEMINI),
    "gemini-sse": Case("/v1beta/models/gemini-9:streamGenerateContent?alt=sse", {"contents": CONTENTS},
                       server.events(*GENERATED_CHUNKS), "models.generate_content_stream", "gcp.gemini",
                       "generate_content gemini-9", GENERATED, (4, 3, 7), GEMINI),
    "gemini-array": Case("/v1beta/models/gemini-9:streamGenerateContent", {"contents": CONTENTS},
                         server.array(*GENERATED_CHUNKS), "models.generate_content_stream", "gcp.gemini",
                         "generate_content gemini-9", GENERATED, (4, 3, 7), GEMINI),
    "gemini-embed": Case("/v1beta/models/e:embedContent", {"content": {"parts": [{"text": "hi"}]}},
                         server.whole({"embedding": {"values": [0.5]}}), "models.embed_content", "gcp.gemini",
                         "embeddings e", {"embedding": {"values": [0.5]}}, (None, None, None), {}),
    "gemini-batch": Case("/v1beta/models/e:batchEmbedContents", {"requests": [{"content": {"parts": []}}]},
                         server.whole({"embeddings": []}), "models.batch_embed_contents", "gcp.gemini",
                         "embeddings e", {"embeddings": []}, (None, None, None), {}),
    "ollama": Case("/api/chat", {"model": "llama3", "messages": MESSAGES, "stream": False}, server.whole(CHATTED),
                   "ollama.chat", "ollama", "chat llama3", CHATTED, (5, 3, 8), LLAMA),
    "ollama-stream": Case("/api/chat", {"model": "llama3", "messages": MESSAGES}, server.lines(*CHAT_LINES),
                          "ollama.chat", "ollama", "chat llama3", CHATTED, (5, 3, 8), LLAMA),
    "ollama-generate": Case("/api/generate", {"model": "llama3", "prompt": "hi"}, server.lines(*WRITTEN_LINES),
                            "ollama.generate", "ollama", "text_completion llama3", WRITTEN, (None, 2, None), LLAMA),
    "ollama-embed": Case("/api/embed", {"model": "e", "input": ["hi"]},
                         server.whole({"model": "e", "embeddings": [[0.5]], "prompt_eval_count": 1}), "ollama.embed",
                         "ollama", "embeddings e", {"model": "e", "embeddings": [[0.5]], "prompt_eval_count": 1},
                         (1, None, None), {"gen_ai.response.model": "e"}),
    "ollama-embeddings": Case("/api/embeddings", {"model": "e", "prompt": "hi"}, server.whole({"embedding": [0.5]}),
                              "ollama.embeddings", "ollama", "embeddings e", {"embedding": [0.5]}, (None, None, None),
                              {}),
}  # fmt: skip

HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "sk-of-the-test"}


def post(module: Any, url: str, body: Any) -> list[Any]:
    """The answer of a call with a sync client, piece by piece."""
    with module.Client(headers=HEADERS) as client, client.stream("POST", url, json=body) as response:
        assert type(response) is module.Response
        return [response.status_code, response.headers["content-type"], list(response.iter_raw())]


def apost(module: Any, url: str, body: Any) -> list[Any]:
    """As `post`, with an async client."""

    async def run() -> list[Any]:
        async with (
            module.AsyncClient(headers=HEADERS) as client,
            client.stream("POST", url, json=body) as response,
        ):
            pieces = [piece async for piece in response.aiter_raw()]
            return [response.status_code, response.headers["content-type"], pieces]

    return asyncio.run(run())


def whole(module: Any, url: str, body: Any) -> list[Any]:
    """The answer of a call that does not stream on the client's side."""
    response = module.post(url, json=body, headers=HEADERS)
    return [response.status_code, response.headers["content-type"], [response.content]]


def requests_and_responses(bundle: Any) -> tuple[Any, Any]:
    events = list(bundle.events)
    assert [event.type for event in events] == ["run_start", "llm_request", "llm_response", "run_end"]
    return events[1], events[2]


@pytest.mark.parametrize("call", [post, apost, whole])
@pytest.mark.parametrize("module", MODULES, ids=["httpx", "httpx2"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_one_llm_call_and_replays_with_the_server_stopped(
    name: str, module: Any, call: Run, recorded: Run, frozen: Run, llm_server: Any, read: Run
) -> None:
    case = CASES[name]
    llm_server.replies.append(case.reply)
    url = llm_server.url + case.path
    want = recorded(call, module, url, case.body)
    assert b"".join(want[2]) == b"".join(case.reply.parts)
    request, response = requests_and_responses(read())
    assert request.input["method"] == case.method
    assert request.input["request"] == case.body
    assert (request.provider, request.model) == (case.provider, case.span.partition(" ")[2])
    assert response.output == case.output
    assert (response.prompt_tokens, response.completion_tokens, response.total_tokens) == case.tokens
    [row] = read().wire()
    assert row["method"] == "POST"
    assert row["status"] == 200
    llm_server.stop()
    assert frozen(call, module, url, case.body) == want
    assert len(llm_server.requests) == 1


@pytest.mark.parametrize("name", CASES)
def test_the_span_is_a_genai_client_span_that_ends_with_the_body(
    name: str, recorded: Run, llm_server: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    case = CASES[name]
    llm_server.replies.append(case.reply)

    def program() -> None:
        with (
            httpx.Client() as client,
            client.stream("POST", llm_server.url + case.path, json=case.body, headers=HEADERS) as response,
        ):
            pieces = response.iter_raw()
            next(pieces)
            assert spans.get_finished_spans() == ()
            list(pieces)
            assert len(spans.get_finished_spans()) == 1

    recorded(program)
    [span] = spans.get_finished_spans()
    found = dict(span.attributes or {})
    assert (span.name, span.kind, span.status.status_code) == (case.span, SpanKind.CLIENT, StatusCode.UNSET)
    operation, _, model = case.span.partition(" ")
    given, made, _ = case.tokens
    assert found["gen_ai.operation.name"] == operation
    assert found["gen_ai.provider.name"] == case.provider
    assert found["gen_ai.request.model"] == model
    assert found["server.address"] == "127.0.0.1"
    assert found["server.port"] == int(llm_server.url.rpartition(":")[2])
    assert found.get("gen_ai.usage.input_tokens") == given
    assert found.get("gen_ai.usage.output_tokens") == made
    assert case.attributes.items() <= found.items()
    streams = case.reply.media != "application/json"
    assert found.get("gen_ai.request.stream") is (True if streams else None)
    assert ("gen_ai.response.time_to_first_chunk" in found) is streams
    request, response = requests_and_responses(read())
    assert found["sftrace.event.id"] == request.id
    assert (found["sftrace.input_hash"], found["sftrace.output_hash"]) == (request.input_hash, response.output_hash)


def test_the_span_of_a_replayed_call_says_that_nothing_was_sent(
    recorded: Run, frozen: Run, llm_server: Any, spans: InMemorySpanExporter
) -> None:
    case = CASES["anthropic-stream"]
    llm_server.replies.append(case.reply)
    recorded(post, httpx, llm_server.url + case.path, case.body)
    spans.clear()
    frozen(post, httpx, llm_server.url + case.path, case.body)
    [span] = spans.get_finished_spans()
    found = dict(span.attributes or {})
    assert (span.name, found["sftrace.replay.served"], found["sftrace.replay.rung"]) == (case.span, True, "lineage")
    assert case.attributes.items() <= found.items()
    with pytest.raises(ReplayMismatchError):
        frozen(post, httpx, llm_server.url + case.path, {**case.body, "messages": []})
    missed = spans.get_finished_spans()[-1]
    assert (missed.attributes or {})["error.type"] == "ReplayMismatchError"
    assert "sftrace.replay.served" not in (missed.attributes or {})


def test_a_body_of_another_shape_stays_an_http_call(recorded: Run, frozen: Run, llm_server: Any, read: Run) -> None:
    def program() -> list[Any]:
        return [
            whole(httpx, llm_server.url + "/v1/chat/completions", {"n": 1}),
            whole(httpx, llm_server.url + "/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES}),
            whole(httpx, llm_server.url + "/api/chat", {"messages": MESSAGES}),
        ]

    llm_server.replies.extend([server.whole({"got": at}) for at in range(3)])
    want = recorded(program)
    assert [row["kind"] for row in read().calls] == ["http"] * 3
    llm_server.stop()
    assert frozen(program) == want


def test_each_retry_is_a_call_of_its_own(
    recorded: Run, frozen: Run, llm_server: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    case = CASES["anthropic"]
    error = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}

    def program() -> list[Any]:
        seen = [whole(httpx2, llm_server.url + case.path, case.body)]
        while seen[-1][0] == 429:
            seen.append(whole(httpx2, llm_server.url + case.path, case.body))
        return seen

    llm_server.replies.extend([server.whole(error, status=429, retry_after="7"), case.reply])
    want = recorded(program)
    assert [one[0] for one in want] == [429, 200]
    assert [row["kind"] for row in read().calls] == ["llm", "llm"]
    events = list(read().events)
    failed = next(event for event in events if event.type == "error")
    assert (failed.error_type, failed.message) == ("rate_limit_error", "slow down")
    assert [event.status for event in events if event.type == "llm_response"] == ["error", "ok"]
    first, second = spans.get_finished_spans()
    assert (first.attributes or {})["error.type"] == "rate_limit_error"
    assert first.status.status_code is StatusCode.ERROR
    assert second.status.status_code is StatusCode.UNSET
    llm_server.stop()
    assert frozen(program) == want


BROKEN = {
    "anthropic-stream": server.named_events(
        *MESSAGE_EVENTS[:9], {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    ),
    "gemini-sse": server.events(
        GENERATED_CHUNKS[0], {"error": {"code": 503, "message": "Overloaded", "status": "UNAVAILABLE"}}
    ),
    "gemini-array": server.array(
        GENERATED_CHUNKS[0], {"error": {"code": 503, "message": "Overloaded", "status": "UNAVAILABLE"}}
    ),
    "ollama-stream": server.lines(CHAT_LINES[0], {"error": "Overloaded"}),
    "openai-stream": server.events(CHUNKS[0], {"error": {"message": "Overloaded", "type": "server_error"}}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_within_a_stream_is_the_calls_error(
    name: str, recorded: Run, frozen: Run, llm_server: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    case = CASES[name]
    llm_server.replies.append(BROKEN[name])
    want = recorded(post, httpx, llm_server.url + case.path, case.body)
    events = {event.type: event for event in read().events}
    assert events["error"].message == "Overloaded"
    assert events["llm_response"].status == "error"
    output = json.dumps(events["llm_response"].output)
    assert "Hel" in output
    assert "Overloaded" in output
    [span] = spans.get_finished_spans()
    assert (span.attributes or {})["error.type"] == events["error"].error_type
    llm_server.stop()
    assert frozen(post, httpx, llm_server.url + case.path, case.body) == want


STREAMS = [name for name, case in CASES.items() if len(case.reply.parts) > 1]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_left_ends_there_again(
    name: str, recorded: Run, frozen: Run, llm_server: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    case = CASES[name]
    llm_server.replies.append(held(case.reply, 1))

    def program() -> bytes:
        with (
            httpx2.Client() as client,
            client.stream("POST", llm_server.url + case.path, json=case.body, headers=HEADERS) as response,
        ):
            for piece in response.iter_raw():
                return bytes(piece)
        raise AssertionError("nothing came")

    want = recorded(program)
    assert want == case.reply.parts[0]
    [row] = read().calls
    assert (row["kind"], row["end"]) == ("llm", "closed")
    assert len(spans.get_finished_spans()) == 1
    llm_server.stop()
    assert frozen(program) == want


def held(reply: Any, at: int, **members: Any) -> Any:
    """`reply`, of which the server keeps back what comes from part `at` on."""
    return server.Reply(parts=reply.parts, media=reply.media, wait_at=at, **members)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_cancelled_is_cancelled_again(
    name: str, recorded: Run, frozen: Run, llm_server: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    case = CASES[name]
    llm_server.replies.append(held(case.reply, 1))

    async def reader(seen: list[bytes], first: asyncio.Event) -> None:
        async with (
            httpx2.AsyncClient() as client,
            client.stream("POST", llm_server.url + case.path, json=case.body, headers=HEADERS) as response,
        ):
            async for piece in response.aiter_raw():
                seen.append(piece)
                first.set()

    async def run() -> list[bytes]:
        seen: list[bytes] = []
        first = asyncio.Event()
        task = asyncio.create_task(reader(seen, first))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    want = recorded(lambda: asyncio.run(run()))
    assert want == [case.reply.parts[0]]
    [row] = read().calls
    assert row["kind"] == "llm"
    assert row["end"] in ("cancelled", "closed")
    llm_server.stop()
    assert frozen(lambda: asyncio.run(run())) == want


def test_a_connection_that_breaks_breaks_again(
    recorded: Run, frozen: Run, llm_server: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    case = CASES["ollama-stream"]
    llm_server.replies.append(server.Reply(parts=case.reply.parts[:2], media=case.reply.media, cut=True))

    def program() -> list[Any]:
        seen: list[Any] = []
        try:
            with (
                httpx.Client() as client,
                client.stream("POST", llm_server.url + case.path, json=case.body) as response,
            ):
                seen.extend(response.iter_raw())
        except httpx.RemoteProtocolError as error:
            seen.append(str(error))
        return seen

    want = recorded(program)
    [row] = read().calls
    assert row["end"] == "failed"
    response = next(event for event in read().events if event.type == "llm_response")
    assert response.output["message"]["content"] == "Hello"
    [span] = spans.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "RemoteProtocolError"
    llm_server.stop()
    assert frozen(program) == want


def test_no_connection_is_an_error_under_the_request(
    recorded: Run, frozen: Run, llm_server: Any, read: Run, spans: InMemorySpanExporter
) -> None:
    case = CASES["anthropic"]
    llm_server.stop()

    def program() -> str:
        with pytest.raises(httpx.ConnectError) as caught:
            httpx.post(llm_server.url + case.path, json=case.body, headers=HEADERS)
        return str(caught.value)

    want = recorded(program)
    assert [event.type for event in read().events] == ["run_start", "llm_request", "error", "run_end"]
    [span] = spans.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "ConnectError"
    assert frozen(program) == want


def test_a_streamed_request_body_is_recognised_too(recorded: Run, frozen: Run, llm_server: Any, read: Run) -> None:
    case = CASES["openai"]
    data = json.dumps(case.body).encode()

    def program() -> int:
        headers = {"content-type": "application/json", "content-length": str(len(data))}
        body = iter([data[:10], data[10:]])
        return httpx.post(llm_server.url + case.path, content=body, headers=headers).status_code

    llm_server.replies.append(case.reply)
    assert recorded(program) == 200
    request, _ = requests_and_responses(read())
    assert request.input["request"] == case.body
    llm_server.stop()
    assert frozen(program) == 200


def test_a_changed_prompt_is_told_where(recorded: Run, frozen: Run, llm_server: Any) -> None:
    case = CASES["gemini"]
    llm_server.replies.append(case.reply)
    recorded(whole, httpx, llm_server.url + case.path, case.body)
    changed = {"contents": [{"role": "user", "parts": [{"text": "other"}]}]}
    with pytest.raises(ReplayMismatchError, match="/request/contents/0/parts/0/text"):
        frozen(whole, httpx, llm_server.url + case.path, changed)


def test_another_model_in_the_path_is_another_call(recorded: Run, frozen: Run, llm_server: Any) -> None:
    case = CASES["gemini"]
    llm_server.replies.append(case.reply)
    recorded(whole, httpx, llm_server.url + case.path, case.body)
    with pytest.raises(ReplayMismatchError, match=r"gcp\.gemini/gemini-10"):
        frozen(whole, httpx, llm_server.url + case.path.replace("gemini-9", "gemini-10"), case.body)


def test_no_key_reaches_the_bundle(recorded: Run, llm_server: Any, bundle_path: Path) -> None:
    key = "AIzaSy" + "D" * 33
    llm_server.replies.append(CASES["gemini"].reply)
    recorded(whole, httpx, f"{llm_server.url}{CASES['gemini'].path}?key={key}", CASES["gemini"].body)
    stored = b"".join(path.read_bytes() for path in bundle_path.rglob("*") if path.is_file())
    assert key.encode() not in stored
    assert b"sk-of-the-test" not in stored


# --- recordings of before ---------------------------------------------------------------------------------------------


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Record as versions did that knew no LLM service behind a bare client; call it to go on as now."""
    monkeypatch.setattr(serving, "exchange_of", lambda recorder, head: Exchange(recorder, head, None))
    import sftrace_otel.instrumentation.httpx as boundary

    now = boundary.exchange_of
    monkeypatch.setattr(boundary, "exchange_of", serving.exchange_of)

    def go_on() -> None:
        monkeypatch.setattr(boundary, "exchange_of", now)

    return go_on


@pytest.mark.parametrize("order", ["causal", "strict", "any"])
@pytest.mark.parametrize("name", CASES)
def test_a_recording_that_holds_it_as_an_http_call_replays(
    name: str, order: str, recorded: Run, llm_server: Any, read: Run, bundle_path: Path, as_before: Run
) -> None:
    case = CASES[name]

    def program() -> list[Any]:
        url = llm_server.url + case.path
        return [post(httpx, url, case.body), whole(httpx, llm_server.url + "/other", {}), post(httpx, url, case.body)]

    llm_server.replies.extend([case.reply, server.whole({"at": 1}), case.reply])
    want = recorded(program)
    assert [row["kind"] for row in read().calls] == ["http"] * 3
    as_before()
    llm_server.stop()
    with ReplaySession.from_trace(bundle_path, order=order) as replay, record("agent"):
        assert program() == want
        replay.verify_complete()


def test_a_changed_prompt_is_told_of_the_http_call_that_is_recorded(
    recorded: Run, frozen: Run, llm_server: Any, as_before: Run
) -> None:
    case = CASES["openai"]
    llm_server.replies.append(case.reply)
    recorded(whole, httpx, llm_server.url + case.path, case.body)
    as_before()
    changed = {**case.body, "messages": [{"role": "user", "content": "other"}]}
    with pytest.raises(ReplayMismatchError, match="/body/messages/0/content"):
        frozen(whole, httpx, llm_server.url + case.path, changed)


# --- forks ------------------------------------------------------------------------------------------------------------


OVERRIDES: dict[str, tuple[Any, bytes]] = {
    "openai-stream": (
        {**COMPLETION, "choices": [{"index": 0, "message": {"role": "assistant", "content": "Bye"},
                                    "finish_reason": "stop"}]}, b"data: "),
    "anthropic-stream": ({**MESSAGE, "content": [{"type": "text", "text": "Bye"}]}, b"event: message_start\ndata: "),
    "gemini-sse": ({"candidates": [{"content": {"role": "model", "parts": [{"text": "Bye"}]}}]}, b"data: "),
    "gemini-array": ({"candidates": [{"content": {"role": "model", "parts": [{"text": "Bye"}]}}]}, b"[{"),
    "ollama-stream": ({**CHATTED, "message": {"role": "assistant", "content": "Bye"}}, b"{"),
    "ollama-generate": ({**WRITTEN, "response": "Bye"}, b"{"),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_overridden_answer_streams_in_the_services_own_framing(
    name: str, recorded: Run, llm_server: Any, read: Run, bundle_path: Path, tmp_path: Path
) -> None:
    case, (answer, opening) = CASES[name], OVERRIDES[name]
    llm_server.replies.append(case.reply)
    url = llm_server.url + case.path
    want = recorded(post, httpx, url, case.body)
    response = next(event for event in read().events if event.type == "llm_response")
    fork_trace(
        bundle_path,
        ForkPoint(step=response.step),
        output_path=tmp_path / "fork.sftrace",
        overrides=[OverrideSpec(event_id=response.id, output=answer)],
    )
    llm_server.stop()
    with ReplaySession.from_trace(tmp_path / "fork.sftrace"), record("agent"):
        status, media, pieces = post(httpx, url, case.body)
    assert (status, media.partition(";")[0]) == (200, want[1].partition(";")[0])
    stream = b"".join(pieces)
    assert stream.startswith(opening)
    assert b"Bye" in stream
    assert b"Hel" not in stream


# --- tools ------------------------------------------------------------------------------------------------------------

ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"model": "m", "messages": [
        {"role": "assistant", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "t1", "content": "5"}]}),
    "anthropic": ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5"}]}]}),
    "gemini": ("/v1beta/models/g:generateContent", {"contents": [
        {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"result": 5}}}]}]}),
    "ollama": ("/api/chat", {"model": "m", "stream": False, "messages": [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "tool_name": "add", "content": "5"}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERED)
def test_a_tool_whose_result_goes_back_unrecorded_is_named(
    name: str, recorded: Run, frozen: Run, llm_server: Any, bundle_path: Path
) -> None:
    path, body = ANSWERED[name]
    llm_server.replies.append(server.whole({}))
    recorded(whole, httpx, llm_server.url + path, body)
    verdict = json.loads((bundle_path / "run.json").read_text("utf-8"))["verdict"]
    assert [obstacle["name"] for obstacle in verdict["obstacles"]] == ["add"]
    with pytest.raises(ReplayPolicyError, match="add"):
        frozen(whole, httpx, llm_server.url + path, body)


@pytest.mark.parametrize("name", ANSWERED)
def test_a_tool_that_is_recorded_is_no_obstacle(
    name: str, recorded: Run, frozen: Run, llm_server: Any, bundle_path: Path
) -> None:
    path, body = ANSWERED[name]

    @trace_tool
    def add() -> int:
        return 5

    def program() -> list[Any]:
        add()
        return whole(httpx, llm_server.url + path, body)

    llm_server.replies.append(server.whole({}))
    want = recorded(program)
    assert json.loads((bundle_path / "run.json").read_text("utf-8"))["verdict"]["offline"] is True
    llm_server.stop()
    assert frozen(program) == want
