# SPDX-License-Identifier: Apache-2.0
"""LLM services on the wire: what is one, what it says, and streams put together and taken apart."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftrace_otel.core.mapping import dialects, wire, wire_anthropic, wire_gemini, wire_ollama
from sftrace_otel.core.mapping.framing import stream_bytes, values_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "m", "prompt": "p"}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
VERSION = [["anthropic-version", "2023-06-01"]]


def seen(path: str, body: Any, *, host: str = "127.0.0.1:8000", headers: Any = ()) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return dialects.recognised("POST", f"http://{host}{path}", headers, data)


@pytest.mark.parametrize(
    ("path", "body", "headers", "method", "operation", "model", "provider", "framing"),
    [
        ("/v1/chat/completions", CHAT, [], "chat.completions.create", "chat", "m", "openai", ""),
        ("/x/chat/completions", {**CHAT, "stream": True}, [], "chat.completions.create", "chat", "m", "openai", "sse"),
        ("/v1/completions", PROMPT, [], "completions.create", "text_completion", "m", "openai", ""),
        ("/v1/responses", {"model": "m", "input": "p"}, [], "responses.create", "chat", "m", "openai", ""),
        ("/v1/embeddings", {"model": "m", "input": ["a"]}, [], "embeddings.create", "embeddings", "m", "openai", ""),
        ("/v1/fim/completions", PROMPT, [], "fim.complete", "text_completion", "m", "mistral_ai", ""),
        ("/v1/messages", CHAT, VERSION, "messages.create", "chat", "m", "anthropic", ""),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}, [], "messages.create", "chat", "m", "anthropic",
         "sse"),
        ("/v1/messages?beta=true", CHAT, VERSION, "messages.create", "chat", "m", "anthropic", ""),
        ("/v1beta/models/g-2:generateContent?key=k", CONTENTS, [], "models.generate_content", "generate_content", "g-2",
         "gcp.gemini", ""),
        ("/v1beta/models/g-2:streamGenerateContent?alt=sse", CONTENTS, [], "models.generate_content_stream",
         "generate_content", "g-2", "gcp.gemini", "sse"),
        ("/v1beta/models/g-2:streamGenerateContent", CONTENTS, [], "models.generate_content_stream", "generate_content",
         "g-2", "gcp.gemini", "array"),
        ("/v1beta/models/e:embedContent", {"content": {"parts": []}}, [], "models.embed_content", "embeddings", "e",
         "gcp.gemini", ""),
        ("/v1beta/models/e:batchEmbedContents", {"requests": []}, [], "models.batch_embed_contents", "embeddings", "e",
         "gcp.gemini", ""),
        ("/v1beta/models/g%3AgenerateContent", CONTENTS, [], "models.generate_content", "generate_content", "g",
         "gcp.gemini", ""),
        ("/api/chat", CHAT, [], "ollama.chat", "chat", "m", "ollama", "ndjson"),
        ("/api/chat", {**CHAT, "stream": False}, [], "ollama.chat", "chat", "m", "ollama", ""),
        ("/api/generate", PROMPT, [], "ollama.generate", "text_completion", "m", "ollama", "ndjson"),
        ("/api/embed", {"model": "m", "input": "p"}, [], "ollama.embed", "embeddings", "m", "ollama", ""),
        ("/api/embeddings", {"model": "m", "prompt": "p"}, [], "ollama.embeddings", "embeddings", "m", "ollama", ""),
        ("/api/embeddings", {"model": "m", "input": "p"}, [], "embeddings.create", "embeddings", "m", "openai", ""),
    ],
)  # fmt: skip
def test_what_is_an_llm_call(
    path: str, body: Any, headers: Any, method: str, operation: str, model: str, provider: str, framing: str
) -> None:
    asked, service = seen(path, body, headers=headers)
    assert (asked.endpoint.method, asked.endpoint.operation, asked.model, service, asked.framing) == (
        method, operation, model, provider, framing,
    )  # fmt: skip
    assert asked.payload["method"] == method
    assert asked.payload["request"] == body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"n": 1}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"model": "", "messages": []}),
        ("/v1/chat/completions", {"model": "m", "messages": "hi"}),
        ("/v1/chat/completions", [CHAT]),
        ("/v1/chat/completions", b"model=m"),
        ("/v1/chat/completions", b"\xff"),
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions/other", CHAT),
        ("/v1/completions", CHAT),
        ("/survey/responses", {"name": "x", "input": "y"}),
        ("/v1/messages", CHAT),
        ("/v1/messages/count_tokens", {**CHAT, "max_tokens": 1}),
        ("/v1/messages/batches", {"requests": []}),
        ("/v1/threads/t/messages", {**CHAT, "max_tokens": 1}),
        ("/v1beta/models/g:generateContent", {"prompt": "hi"}),
        ("/v1beta/models/g:countTokens", CONTENTS),
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/generate", {"model": "m"}),
        ("/chat", CHAT),
        ("/", CHAT),
    ],
)
def test_what_stays_an_http_call(path: str, body: Any) -> None:
    assert seen(path, body) is None


def test_only_a_post_is_an_llm_call() -> None:
    assert dialects.recognised("GET", "http://h/v1/chat/completions", [], json.dumps(CHAT).encode()) is None


@pytest.mark.parametrize(
    ("host", "path", "provider"),
    [
        ("api.openai.com", "/v1/chat/completions", "openai"),
        ("api.mistral.ai", "/v1/chat/completions", "mistral_ai"),
        ("x.openai.azure.com", "/openai/deployments/d/chat/completions?api-version=1", "azure.ai.openai"),
        ("llm.corp.test", "/v1/chat/completions", "llm.corp.test"),
        ("gpu.corp.test:11434", "/api/chat", "ollama"),
        ("us-aiplatform.googleapis.com", "/v1/projects/p/publishers/google/models/g:generateContent", "gcp.vertex_ai"),
        ("generativelanguage.googleapis.com", "/v1beta/models/g:generateContent", "gcp.gemini"),
    ],
)
def test_the_provider_is_the_service_at_the_host(host: str, path: str, provider: str) -> None:
    assert seen(path, {**CHAT, **CONTENTS}, host=host)[1] == provider


def test_what_only_the_url_says_is_in_the_payload() -> None:
    azure = seen("/openai/deployments/mine/chat/completions", {"messages": []})[0]
    assert (azure.model, azure.payload["model"]) == ("mine", "mine")
    stream = seen("/v1/models/g:streamGenerateContent?key=k&alt=sse", CONTENTS)[0]
    assert stream.payload == {
        "method": "models.generate_content_stream", "model": "g", "alt": "sse", "request": CONTENTS,
    }  # fmt: skip
    vertex = seen(
        "/v1/projects/p/locations/l/publishers/anthropic/models/claude@1:streamRawPredict",
        {"anthropic_version": "vertex-2023-10-16", "messages": [], "max_tokens": 1, "stream": True},
    )[0]
    assert (vertex.endpoint.method, vertex.model, vertex.framing) == ("messages.create", "claude@1", "sse")


# --- requests ---------------------------------------------------------------------------------------------------------


def attributes(path: str, body: Any) -> dict[str, Any]:
    asked, provider = seen(path, body)
    return dialects.request_attributes(asked, provider)


def test_attributes_of_requests() -> None:
    assert attributes(
        "/v1/messages",
        {
            **CHAT, "max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop_sequences": ["x"], "stream": True,
            "output_config": {"effort": "high"},
        },
    ) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "anthropic", "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_k": 3,
        "gen_ai.request.stop_sequences": ("x",), "gen_ai.request.stream": True,
        "gen_ai.request.reasoning.level": "high",
    }  # fmt: skip
    assert attributes(
        "/v1beta/models/g:generateContent",
        {**CONTENTS, "generationConfig": {
            "topP": 0.1, "maxOutputTokens": 7, "candidateCount": 2, "stopSequences": ["s"],
            "thinkingConfig": {"thinkingLevel": "LOW"}}},
    ) == {
        "gen_ai.operation.name": "generate_content", "gen_ai.provider.name": "gcp.gemini", "gen_ai.request.model": "g",
        "gen_ai.request.top_p": 0.1, "gen_ai.request.max_tokens": 7, "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("s",), "gen_ai.request.reasoning.level": "LOW",
    }  # fmt: skip
    snake = attributes("/v1beta/models/g:generateContent", {**CONTENTS, "generation_config": {"max_output_tokens": 7}})
    assert snake["gen_ai.request.max_tokens"] == 7
    assert attributes("/api/chat", {**CHAT, "options": {"num_predict": 4, "seed": 1, "stop": "x"}}) == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "ollama", "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 4, "gen_ai.request.seed": 1, "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.request.stream": True,
    }  # fmt: skip


def answers(method: str, request: Any) -> list[tuple[str, str, object]]:
    return list(dialects.tool_answers(method, request))


def test_tool_results_in_a_request_to_anthropic() -> None:
    messages = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "5"}]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "6"},
        ]},
    ]  # fmt: skip
    assert answers("messages.create", {"messages": messages}) == [("t1", "add", "5"), ("t2", "t2", "6")]


def test_tool_results_in_a_request_to_gemini_keep_their_ids_as_the_conversation_grows() -> None:
    call = {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {}}}]}
    answer = {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"result": 5}}}]}
    short = answers("models.generate_content", {"contents": [call, answer]})
    long = answers("models.generate_content", {"contents": [call, answer, call, answer]})
    assert [(name, content) for _, name, content in long] == [("add", 5), ("add", 5)]
    assert long[0] == short[0]
    assert long[1][0] != long[0][0]


def test_tool_results_in_a_request_to_ollama_are_named_by_the_calls_before_them() -> None:
    asked = {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in ("add", "sub", "mul")]}
    results = [
        {"role": "tool", "content": "1", "tool_name": "sub"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    found = answers("ollama.chat", {"messages": [asked, *results]})
    assert [(name, content) for _, name, content in found] == [("sub", "1"), ("add", "2"), ("mul", "3")]
    assert len({call_id for call_id, _, _ in found}) == 3


# --- answers ----------------------------------------------------------------------------------------------------------


def endpoint(path: str) -> Any:
    return dialects.endpoint_of("POST", path)


def test_what_answers_say() -> None:
    claude = dialects.answered(
        endpoint("/v1/messages"),
        {"id": "i", "model": "c", "stop_reason": "end_turn",
         "usage": {"input_tokens": 1, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 100,
                   "output_tokens": 7}},
    )  # fmt: skip
    assert claude.tokens == (111, 7, 118)
    assert claude.model == "c"
    assert claude.error is None
    assert claude.attributes == {
        "gen_ai.response.id": "i", "gen_ai.response.model": "c", "gen_ai.response.finish_reasons": ("end_turn",),
        "gen_ai.usage.input_tokens": 111, "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 10, "gen_ai.usage.cache_write.input_tokens": 100,
    }  # fmt: skip
    gemini = dialects.answered(
        endpoint("/models/g:generateContent"),
        {"responseId": "r", "modelVersion": "g-1", "candidates": [{"finishReason": "STOP"}],
         "usageMetadata": {"promptTokenCount": 8, "candidatesTokenCount": 2, "thoughtsTokenCount": 3,
                           "toolUsePromptTokenCount": 4, "totalTokenCount": 17, "cachedContentTokenCount": 5}},
    )  # fmt: skip
    assert gemini.tokens == (12, 5, 17)
    assert gemini.attributes == {
        "gen_ai.response.id": "r", "gen_ai.response.model": "g-1", "gen_ai.response.finish_reasons": ("STOP",),
        "gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 5, "gen_ai.usage.reasoning.output_tokens": 3,
    }  # fmt: skip
    ollama = dialects.answered(
        endpoint("/api/chat"), {"model": "o", "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 4}
    )
    assert ollama.tokens == (3, 4, 7)
    assert dialects.answered(endpoint("/api/chat"), "no object").tokens == (None, None, None)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ({"type": "error", "error": {"type": "api_error", "message": "Internal"}}, ("api_error", "Internal")),
        ({"error": {"code": 429, "message": "slow", "status": "RESOURCE_EXHAUSTED"}}, ("RESOURCE_EXHAUSTED", "slow")),
        ([{"error": {"code": 400, "message": "bad"}}], ("400", "bad")),
        ({"error": "model not found"}, ("error", "model not found")),
        ({"error": {"message": "m", "type": "t", "code": None}}, ("t", "m")),
        ({"error": None, "output": []}, None),
        ({"choices": []}, None),
        ("text", None),
        (None, None),
    ],
)  # fmt: skip
def test_failures_that_an_answer_reports(output: Any, error: Any) -> None:
    assert wire.failure_of(output) == error


# --- streams ----------------------------------------------------------------------------------------------------------

quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
texts = st.text(max_size=20)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
objects = st.dictionaries(texts, scalars, max_size=4)
counts = st.integers(0, 2**40)


def optional(required: dict[str, Any], rest: dict[str, Any]) -> Any:
    return st.fixed_dictionaries(required, optional=rest)


blocks = st.one_of(
    optional({"type": st.just("text"), "text": texts}, {"citations": st.lists(objects, max_size=2)}),
    optional({"type": st.just("thinking"), "thinking": texts, "signature": texts}, {}),
    optional({"type": st.just("redacted_thinking"), "data": texts}, {}),
    optional(
        {"type": st.sampled_from(["tool_use", "server_tool_use"]), "id": texts, "name": texts, "input": objects}, {}
    ),
    optional(
        {"type": st.just("tool_use"), "id": texts, "name": texts, "input": texts.map(lambda text: '{"a": ' + text)}, {}
    ),
    optional({"type": st.just("web_search_tool_result"), "content": st.lists(objects, max_size=2)}, {}),
)
messages = optional(
    {
        "id": texts, "type": st.just("message"), "role": st.just("assistant"), "model": texts,
        "content": st.lists(blocks, max_size=4), "stop_reason": st.none() | texts, "stop_sequence": st.none() | texts,
        "usage": optional({"input_tokens": counts, "output_tokens": counts}, {"cache_read_input_tokens": counts}),
    },
    {"error": objects.filter(bool), "stop_details": st.none() | objects, "container": objects},
)  # fmt: skip
parts = st.one_of(
    optional({"text": texts}, {"thought": st.just(True), "thoughtSignature": texts}),
    st.fixed_dictionaries({"functionCall": st.fixed_dictionaries({"name": texts, "args": objects})}),
)
candidates = optional(
    {"content": st.fixed_dictionaries({"role": st.just("model"), "parts": st.lists(parts, max_size=4)})},
    {
        "finishReason": texts,
        "citationMetadata": st.fixed_dictionaries({"citationSources": st.lists(objects, max_size=2)}),
    },
)
generated = optional(
    {"candidates": st.lists(candidates, min_size=1, max_size=3).map(
        lambda found: [{**one, "index": at} for at, one in enumerate(found)])},
    {"usageMetadata": objects, "modelVersion": texts, "error": objects.filter(bool)},
)  # fmt: skip
tool_calls = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": texts, "arguments": objects})}))
chatted = optional(
    {"model": texts, "created_at": texts, "done": st.booleans(),
     "message": optional({"role": st.just("assistant"), "content": texts},
                         {"thinking": texts, "tool_calls": tool_calls})},
    {"done_reason": texts, "eval_count": counts, "error": texts.filter(bool),
     "logprobs": st.lists(objects, max_size=2)},
)  # fmt: skip
completed = optional(
    {"model": texts, "created_at": texts, "response": texts, "done": st.booleans()},
    {"thinking": texts, "context": st.lists(counts), "eval_count": counts},
)


@quick
@given(messages)
def test_a_message_taken_apart_is_put_together_again(message: Any) -> None:
    stream = b"".join(wire_anthropic.stream_of(message, "sse"))
    assert wire_anthropic.assemble(stream, "sse") == message


@quick
@given(generated, st.sampled_from(["sse", "array"]))
def test_generated_content_taken_apart_is_put_together_again(answer: Any, framing: str) -> None:
    stream = b"".join(wire_gemini.stream_of(answer, framing))
    assert wire_gemini.assemble(stream, framing) == answer


@quick
@given(chatted | completed)
def test_an_answer_of_ollama_taken_apart_is_put_together_again(answer: Any) -> None:
    stream = b"".join(wire_ollama.stream_of(answer, "ndjson"))
    assert wire_ollama.assemble(stream, "ndjson") == answer


@quick
@given(st.text(max_size=40), st.data())
def test_a_tool_input_in_any_pieces_is_exact(text: str, data: Any) -> None:
    """Joined tool-call argument strings are exact, even when they are no valid JSON."""
    raw = '{"a": ' + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    events = [
        {"type": "message_start", "message": {"content": [], "usage": {"output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "t", "input": {}}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": piece}}
          for piece in pieces),
    ]  # fmt: skip
    stream = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)
    message: Any = wire_anthropic.assemble(stream, "sse")
    given_input = message["content"][0]["input"]
    try:
        assert given_input == json.loads(raw)
    except ValueError:
        assert given_input == raw


@quick
@given(messages | generated | chatted, st.sampled_from(["sse", "ndjson", "array"]), st.data())
def test_a_stream_cut_anywhere_still_gives_what_came(answer: Any, framing: str, data: Any) -> None:
    for dialect in (wire_anthropic, wire_gemini, wire_ollama):
        stream = b"".join(dialect.stream_of(answer, framing))
        cut = stream[: data.draw(st.integers(0, len(stream)))]
        whole, part = values_of(stream, framing), values_of(cut, framing)
        assert part == whole[: len(part)]
        dialect.assemble(cut, framing)


def test_text_of_gemini_goes_on_across_chunks_and_not_within_one() -> None:
    chunks: list[Any] = [
        {"candidates": [{"content": {"role": "model", "parts": [{"text": "let me", "thought": True}]}, "index": 0}]},
        {"candidates": [{"content": {"role": "model", "parts": [{"text": " see", "thought": True}, {"text": "Hel"}]}}]},
        {"candidates": [{"content": {"role": "model", "parts": [{"text": "lo"}, {"text": "!"}]}}]},
        {"candidates": [{"content": {"parts": [{"text": "", "thoughtSignature": "s"}], "role": "model"},
                         "finishReason": "STOP", "index": 0}], "usageMetadata": {"totalTokenCount": 3}},
    ]  # fmt: skip
    stream = b"".join(f"data: {json.dumps(chunk)}\r\n\r\n".encode() for chunk in chunks)
    assert wire_gemini.assemble(stream, "sse") == {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "let me see", "thought": True},
                        {"text": "Hello"},
                        {"text": "!", "thoughtSignature": "s"},
                    ],
                },
                "index": 0,
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {"totalTokenCount": 3},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "media", "over"),
    [
        (b'event: message_stop\ndata: {"type": "message_stop"}\n\n', "text/event-stream", True),
        (b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n', "text/event-stream", False),
        (b'{"done":false}\n{"done": true, "context": [%s]}\n' % b",".join([b"1"] * 9000), "application/x-ndjson", True),
        (b'{"done":true}\n{"done":false}\n', "application/x-ndjson", False),
        (b'{"done":true}', "application/json", False),
    ],
)
def test_whether_a_stream_says_that_it_is_over(data: bytes, media: str, over: bool) -> None:
    assert dialects.complete_stream(data, media) is over


def test_a_text_that_was_cut_within_a_character_is_whole() -> None:
    halves = [b'{"message": {"content": "\\ud83d"}}\n', b'{"message": {"content": "\\ude00"}, "done": true}\n']
    answer: Any = wire_ollama.assemble(b"".join(halves), "ndjson")
    assert answer["message"]["content"] == "\ud83d\ude00"
    assert wire_ollama.assemble(b"".join(wire_ollama.stream_of(answer, "ndjson")), "ndjson") == {
        **answer, "message": {"content": "\U0001f600"},
    }  # fmt: skip


_MODULES = (wire, wire_anthropic, wire_gemini, wire_ollama)
_WORDS = sorted({word for module in _MODULES for word in re.findall(r'"(\w+)"', inspect.getsource(module))})
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=5),
    max_leaves=15,
)
_BODIES = st.dictionaries(st.sampled_from(_WORDS), _ANY, max_size=6)


@given(_BODIES)
def test_a_body_of_any_shape_is_read(body: Any) -> None:
    for service in (wire_anthropic, wire_gemini, wire_ollama):
        json.dumps([service.request_attributes(body), service.response_attributes(body), service.tokens_of(body)])
    json.dumps([wire.response_attributes(body), wire.tokens_of(body), wire.failure_of(body)])
    for module in _MODULES:
        assert all(len(answer) == 3 for answer in module.tool_answers(body))
    for framing in ("sse", "ndjson", "array"):
        for service in (wire_anthropic, wire_gemini, wire_ollama):
            assert all(isinstance(part, bytes) for part in service.stream_of(body, framing))
    assert all(isinstance(part, bytes) for part in wire.stream_of("chat.completions.create", body))


@given(st.lists(_BODIES, max_size=4), st.sampled_from(["sse", "ndjson", "array"]), st.booleans())
def test_a_stream_of_any_shape_is_assembled(values: Any, framing: str, named: bool) -> None:
    data = b"".join(stream_bytes(values, framing, named=named))
    for service in (wire_anthropic, wire_gemini, wire_ollama):
        json.dumps(service.assemble(data, framing))
    json.dumps(wire.assemble(data))
