# SPDX-License-Identifier: Apache-2.0
"""`OTEL_SFTRACE_CONTENT=span`: redacted content on the spans, in the messages of the GenAI conventions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai import OpenAI

from sftrace_otel.core.mapping import dialects, parts, wire
from sftrace_otel.core.mapping.parts import request_content, response_content

TOOL = {"name": "lookup", "description": "Looks up.", "parameters": {"type": "object"}}
CALL = {"type": "tool_call", "id": "c1", "name": "lookup", "arguments": {"city": "Oslo"}}
ANSWER = {"type": "tool_call_response", "id": "c1", "response": "rain"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "content": content}


REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chat": (
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [
                    {"type": "text", "text": "What?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
                    {"type": "image_url", "image_url": {"url": "http://h.test/p.png"}},
                ]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"city":"Oslo"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "lookup", "arguments": '{"city":'}},
                ]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        {
            "gen_ai.input.messages": [
                {"role": "system", "parts": [text("Be brief.")]},
                {"role": "user", "parts": [
                    text("What?"),
                    {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "QUJD"},
                    {"type": "uri", "modality": "image", "uri": "http://h.test/p.png"},
                ]},
                {"role": "assistant", "parts": [CALL, {**CALL, "id": "c2", "arguments": '{"city":'}]},
                {"role": "tool", "parts": [ANSWER]},
            ],
            "gen_ai.tool.definitions": [{"type": "function", **TOOL}],
        },
    ),
    "responses": (
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "What?"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": '{"city":"Oslo"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            ],
            "tools": [{"type": "function", **TOOL}, {"type": "web_search"}],
        },
        {
            "gen_ai.input.messages": [
                {"role": "user", "parts": [text("What?")]},
                {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}]},
                {"role": "assistant", "parts": [CALL]},
                {"role": "tool", "parts": [ANSWER]},
            ],
            "gen_ai.system_instructions": [text("Be brief.")],
            "gen_ai.tool.definitions": [{"type": "function", **TOOL}, {"type": "web_search"}],
        },
    ),
    "anthropic": (
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "tool_use", "id": "c1", "name": "lookup", "input": {"city": "Oslo"}},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
            ],
            "tools": [{"name": "lookup", "description": "Looks up.", "input_schema": {"type": "object"}}],
        },
        {
            "gen_ai.input.messages": [
                {"role": "user", "parts": [text("What?")]},
                {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, CALL]},
                {"role": "user", "parts": [ANSWER]},
            ],
            "gen_ai.system_instructions": [text("Be brief.")],
            "gen_ai.tool.definitions": [{"type": "function", **TOOL}],
        },
    ),
    "gemini": (
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "What?"}]},
                {"role": "model", "parts": [
                    {"functionCall": {"id": "c1", "name": "lookup", "args": {"city": "Oslo"}}},
                ]},
                {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "lookup", "response": "rain"}}]},
            ],
            "tools": [{"functionDeclarations": [TOOL]}],
        },
        {
            "gen_ai.input.messages": [
                {"role": "user", "parts": [text("What?")]},
                {"role": "assistant", "parts": [CALL]},
                {"role": "user", "parts": [ANSWER]},
            ],
            "gen_ai.system_instructions": [text("Be brief.")],
            "gen_ai.tool.definitions": [{"type": "function", **TOOL}],
        },
    ),
    "a prompt": ({"prompt": "Say"}, {"gen_ai.input.messages": [{"role": "user", "parts": [text("Say")]}]}),
    "nothing": ({"model": "m"}, {}),
}  # fmt: skip

RESPONSES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "chat": (
        {"choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]},
        [{"role": "assistant", "parts": [text("Hi")], "finish_reason": "stop"}],
    ),
    "responses": (
        {"output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": '{"city":"Oslo"}'},
        ]},
        [{"role": "assistant", "parts": [text("Hi"), CALL]}],
    ),
    "anthropic": (
        {"content": [
            {"type": "text", "text": "Hi"},
            {"type": "tool_use", "id": "c1", "name": "lookup", "input": {"city": "Oslo"}},
        ], "stop_reason": "tool_use"},
        [{"role": "assistant", "parts": [text("Hi"), CALL], "finish_reason": "tool_use"}],
    ),
    "gemini": (
        {"candidates": [{"content": {"role": "model", "parts": [{"text": "Hi"}]}, "finishReason": "STOP"}]},
        [{"role": "assistant", "parts": [text("Hi")], "finish_reason": "STOP"}],
    ),
    "ollama": (
        {"message": {"role": "assistant", "content": "Hi"}, "done_reason": "stop"},
        [{"role": "assistant", "parts": [text("Hi")], "finish_reason": "stop"}],
    ),
    "text": ({"choices": [{"text": "Hi", "finish_reason": "length"}]},
             [{"role": "assistant", "parts": [text("Hi")], "finish_reason": "length"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_of_each_service(name: str) -> None:
    body, content = REQUESTS[name]
    assert request_content(body) == content


@pytest.mark.parametrize("name", RESPONSES)
def test_answers_of_each_service(name: str) -> None:
    body, messages = RESPONSES[name]
    assert response_content(body) == {"gen_ai.output.messages": messages}


_WORDS = sorted(set(re.findall(r'"(\w+)"', inspect.getsource(parts))))
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from(_WORDS), _ANY, max_size=5))
@example({"messages": {"tool_calls": True}})
@example({"input": [{"type": "reasoning", "summary": [{"type": "image_url"}, {"text": 1}]}]})
@example({"output": [{"type": "reasoning", "summary": 1}]})
def test_a_body_of_any_shape_has_some_content_or_none(body: Any) -> None:
    for content in (request_content(body), response_content(body)):
        json.dumps(content)


def test_spans_carry_redacted_content_where_it_is_asked_for(
    openai_server: Any, spans: Callable[[], Any], recorded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SFTRACE_CONTENT", "span")

    def program() -> None:
        client = OpenAI(api_key="none", base_url=openai_server.base_url)
        asked = [{"role": "user", "content": "my key is sk-abcdefgh12345678"}]
        client.chat.completions.create(model="m", messages=asked)  # type: ignore[arg-type]
        client.close()

    recorded(program)
    [span] = [span for span in spans() if span.name == "chat m"]
    [message] = json.loads(span.attributes["gen_ai.input.messages"])
    assert message == {"role": "user", "parts": [text("my key is [REDACTED]")]}
    [answer] = json.loads(span.attributes["gen_ai.output.messages"])
    assert answer["role"] == "assistant" and answer["parts"][0]["type"] == "text" and answer["finish_reason"] == "stop"


@pytest.mark.parametrize("odd", [[], {}, 5, None, True])
def test_a_type_of_another_shape_names_no_kind(odd: Any) -> None:
    body = {"content": {"type": odd, "text": "hi"}, "output": [{"type": odd, "call_id": odd}]}
    parts.response_content(body)
    parts.request_content({"messages": [{"role": "user", "content": [{"type": odd}]}]})
    assert list(wire.tool_calls(body)) == []
    assert wire.complete_stream(b"data: " + json.dumps({"type": odd}).encode() + b"\n\n") is False
    endpoint = dialects.endpoint_of("POST", "https://api.openai.com/v1/responses")
    assert endpoint is not None
    event = json.dumps({"type": odd, "response": {"id": "r"}}).encode()
    dialects.assemble(endpoint, b"data: " + event + b"\n\n", "sse")
