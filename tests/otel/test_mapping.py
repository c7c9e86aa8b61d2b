# SPDX-License-Identifier: Apache-2.0
"""What each dialect's spans become. The spans are made up; their keys are those of the named instrumentations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftrace_otel.core.mapping import (
    MappedCall,
    Past,
    SpanEvent,
    SpanRecord,
    http_name,
    looks_like_call,
    map_content,
    map_span,
    select_calls,
)

QUESTION = {"role": "user", "content": "How warm is it in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "now", "parameters": {"type": "object"}},
}


def span(attributes: dict[str, Any], **more: Any) -> SpanRecord:
    fields: dict[str, Any] = {
        "trace_id": "a" * 32,
        "span_id": "1" * 16,
        "name": "span",
        "kind": "CLIENT",
        "start_ns": 1_000,
        "end_ns": 2_000,
    }
    return SpanRecord(attributes=attributes, **{**fields, **more})


def mapped(attributes: dict[str, Any], **more: Any) -> MappedCall:
    call = map_span(span(attributes, **more))
    assert call is not None
    return call


def request(call: MappedCall) -> dict[str, Any]:
    assert isinstance(call.input, dict)
    return call.input["request"]  # type: ignore[no-any-return]


# --- OTel GenAI, current --------------------------------------------------------------------------------------------

GENAI_INPUT = [
    {"role": "user", "parts": [{"type": "text", "content": "How warm is it in Oslo?"}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "call_1", "name": "weather", "arguments": {"city": "Oslo"}}],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": {"c": 7}}]},
]
GENAI_OUTPUT = [{"role": "assistant", "parts": [{"type": "text", "content": "7 degrees"}], "finish_reason": "stop"}]
GENAI = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-5",
    "gen_ai.response.model": "gpt-5-2026",
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.stop_sequences": ("END",),
    "gen_ai.usage.input_tokens": 10,
    "gen_ai.usage.output_tokens": 4,
    "gen_ai.response.finish_reasons": ("stop",),
    "gen_ai.system_instructions": [{"type": "text", "content": "Be brief."}],
    "gen_ai.tool.definitions": [
        {"type": "function", "name": "weather", "description": "now", "parameters": {"type": "object"}}
    ],
    "gen_ai.input.messages": GENAI_INPUT,
    "gen_ai.output.messages": GENAI_OUTPUT,
}


@pytest.mark.parametrize("spelling", ["structures", "json text"])
def test_genai_chat_is_rebuilt_in_the_openai_form(spelling: str) -> None:
    attributes = dict(GENAI)
    if spelling == "json text":
        for key in ("input.messages", "output.messages", "system_instructions", "tool.definitions"):
            attributes[f"gen_ai.{key}"] = json.dumps(attributes[f"gen_ai.{key}"])
    call = mapped(attributes)
    assert (call.kind, call.provider, call.model, call.method) == ("llm", "openai", "gpt-5", "chat.completions.create")
    assert call.input == {
        "method": "chat.completions.create",
        "request": {
            "model": "gpt-5",
            "messages": [
                {"role": "system", "content": "Be brief."},
                QUESTION,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                        }
                    ],
                },
                {"role": "tool", "content": '{"c": 7}', "tool_call_id": "call_1"},
            ],
            "tools": [WEATHER],
            "temperature": 0.5,
            "stop": ["END"],
        },
    }
    assert call.output == {
        "id": "chatcmpl-1",
        "model": "gpt-5-2026",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "7 degrees"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14},
    }
    assert (call.prompt_tokens, call.completion_tokens, call.total_tokens) == (10, 4, 14)
    assert (call.response_id, call.response_model, call.missing, call.cut) == ("chatcmpl-1", "gpt-5-2026", (), ())


def test_a_tool_result_is_read_under_its_older_name_too() -> None:
    old = [{"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "result": "7"}]}]
    call = mapped({**GENAI, "gen_ai.system_instructions": None, "gen_ai.input.messages": old})
    assert request(call)["messages"] == [{"role": "tool", "content": "7", "tool_call_id": "c"}]


def test_parts_that_are_no_text_are_kept() -> None:
    parts = [
        {"type": "text", "content": "look"},
        {"type": "uri", "modality": "image", "uri": "https://x.test/a.png"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "AAAA"},
        {"type": "reasoning", "content": "hm"},
        {"type": "novelty", "x": 1},
    ]
    call = mapped(
        {**GENAI, "gen_ai.system_instructions": None, "gen_ai.input.messages": [{"role": "user", "parts": parts}]}
    )
    assert request(call)["messages"][0]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "reasoning", "content": "hm"},
        {"type": "novelty", "x": 1},
    ]


def test_other_providers_keep_their_operation_as_method() -> None:
    call = mapped({**GENAI, "gen_ai.provider.name": "anthropic"})
    assert (call.provider, call.method) == ("anthropic", "anthropic.chat")
    responses = mapped({**GENAI, "openai.api.type": "responses"})
    assert responses.method == "openai.chat"


def test_content_in_the_details_event() -> None:
    content = {key: value for key, value in GENAI.items() if key.endswith(".messages")}
    bare = {key: value for key, value in GENAI.items() if key not in content}
    event = SpanEvent("gen_ai.client.inference.operation.details", 1_500, content)
    assert mapped(bare, events=(event,)) == mapped(GENAI)


def test_a_call_without_content_says_so_and_keeps_what_is_known() -> None:
    call = mapped({"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "m",
                   "gen_ai.usage.input_tokens": 3})  # fmt: skip
    assert call.missing == ("input", "output")
    assert request(call) == {"model": "m"}
    assert call.output == {"usage": {"prompt_tokens": 3}}


def test_an_llm_span_without_a_model_is_no_event() -> None:
    assert map_span(span({"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai"})) is None
    assert map_span(span({"gen_ai.operation.name": "chat", "gen_ai.request.model": ""})) is None


def test_the_answering_model_stands_in_for_an_unnamed_one() -> None:
    assert mapped({"gen_ai.operation.name": "chat", "gen_ai.response.model": "m2"}).model == "m2"


def test_the_host_stands_in_for_an_unnamed_provider() -> None:
    call = mapped({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "server.address": "llm.test"})
    assert (call.provider, call.method) == ("llm.test", "llm.test.chat")


def test_messages_cut_by_a_length_limit_stay_text_and_are_marked() -> None:
    text = json.dumps(GENAI_INPUT)[:60]
    call = mapped({**GENAI, "gen_ai.system_instructions": None, "gen_ai.input.messages": text})
    assert call.cut == ("input",)
    assert request(call)["messages"] == [{"role": "user", "content": text}]


def test_agents_and_workflows_are_no_calls() -> None:
    for operation in ("invoke_agent", "create_agent", "invoke_workflow", "plan", "retrieval"):
        attributes = {"gen_ai.operation.name": operation, "gen_ai.request.model": "m", "gen_ai.provider.name": "openai"}
        assert map_span(span(attributes, kind="INTERNAL")) is None


def test_execute_tool() -> None:
    call = mapped(
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "weather",
            "gen_ai.tool.call.id": "call_1",
            "gen_ai.tool.call.arguments": '{"city": "Oslo"}',
            "gen_ai.tool.call.result": {"c": 7},
        },
        kind="INTERNAL",
        name="execute_tool weather",
    )
    assert (call.kind, call.name, call.input, call.output) == ("tool", "weather", {"city": "Oslo"}, {"c": 7})
    assert (call.tool_call_id, call.missing, call.error) == ("call_1", (), None)


def test_a_failed_tool_has_type_and_message_of_its_exception() -> None:
    event = SpanEvent("exception", 1, {"exception.type": "shop.NotFound", "exception.message": "no such city"})
    call = mapped(
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather", "error.type": "NotFound"},
        status_code="ERROR",
        events=(event,),
    )
    assert call.error == ("shop.NotFound", "no such city")
    assert call.missing == ("input",)


def test_error_texts_are_never_empty() -> None:
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "t"}
    assert mapped(attributes, status_code="ERROR").error == ("Error", "Error")
    assert mapped({**attributes, "error.type": "ValueError"}, status_code="ERROR").error == ("ValueError", "ValueError")


# --- OTel GenAI up to 1.36 ------------------------------------------------------------------------------------------

OLD = {"gen_ai.system": "openai", "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-4"}


def test_messages_as_span_events() -> None:
    events = (
        SpanEvent("gen_ai.system.message", 1, {"content": "Be brief."}),
        SpanEvent("gen_ai.user.message", 2, {"content": "How warm is it in Oslo?"}),
        SpanEvent("gen_ai.tool.message", 3, {"content": '{"c": 7}', "id": "call_1"}),
        SpanEvent("gen_ai.choice", 4, {"index": 0, "finish_reason": "stop", "message": '{"content": "7 degrees"}'}),
    )
    call = mapped(OLD, events=events)
    assert request(call)["messages"] == [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "tool", "content": '{"c": 7}', "tool_call_id": "call_1"},
    ]
    assert call.output["choices"] == [  # type: ignore[index]
        {"index": 0, "message": {"content": "7 degrees", "role": "assistant"}, "finish_reason": "stop"}
    ]
    assert call.dialect == "genai-events"


def test_prompt_and_completion_events() -> None:
    events = (
        SpanEvent("gen_ai.content.prompt", 1, {"gen_ai.prompt": json.dumps([QUESTION])}),
        SpanEvent(
            "gen_ai.content.completion", 2, {"gen_ai.completion": '[{"role": "assistant", "content": "7 degrees"}]'}
        ),
    )
    attributes = {"gen_ai.system": "az.ai.inference", "gen_ai.request.model": "gpt-4", "gen_ai.usage.prompt_tokens": 5}
    call = mapped(attributes, events=events)
    assert (call.provider, call.prompt_tokens) == ("azure.ai.inference", 5)
    assert request(call)["messages"] == [QUESTION]
    assert call.output["choices"][0]["message"]["content"] == "7 degrees"  # type: ignore[index]


def test_an_answer_that_is_json_stays_the_text_it_was() -> None:
    call = mapped(OLD, events=(SpanEvent("gen_ai.choice", 1, {"message": '{"content": "{\\"c\\": 7}"}'}),))
    assert call.output["choices"][0]["message"]["content"] == '{"c": 7}'  # type: ignore[index]


def test_an_agent_span_with_gen_ai_system_is_no_call() -> None:
    assert map_span(span({"gen_ai.system": "strands-agents", "gen_ai.agent.name": "a"}, kind="INTERNAL")) is None


# --- OpenInference --------------------------------------------------------------------------------------------------


def test_openinference_with_the_request_body() -> None:
    body = {"model": "gpt-5", "messages": [QUESTION], "temperature": 0}
    answer = {"id": "c1", "choices": [{"index": 0, "message": {"role": "assistant", "content": "7"}}],
              "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}}  # fmt: skip
    call = mapped(
        {
            "openinference.span.kind": "LLM",
            "llm.provider": "openai",
            "llm.model_name": "gpt-5",
            "input.value": json.dumps(body),
            "input.mime_type": "application/json",
            "output.value": json.dumps(answer),
        },
        kind="INTERNAL",
        name="ChatCompletion",
    )
    assert call.input == {"method": "chat.completions.create", "request": body}
    assert call.output == answer
    assert (call.total_tokens, call.response_id) == (3, "c1")


def test_openinference_with_flat_keys() -> None:
    call = mapped(
        {
            "openinference.span.kind": "LLM",
            "llm.provider": "anthropic",
            "llm.model_name": "claude",
            "llm.invocation_parameters": '{"max_tokens": 9}',
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.contents.0.message_content.type": "text",
            "llm.input_messages.0.message.contents.0.message_content.text": "hi",
            "llm.input_messages.0.message.contents.1.message_content.type": "image",
            "llm.input_messages.0.message.contents.1.message_content.image.image.url": "https://x.test/a.png",
            "llm.input_messages.1.message.role": "assistant",
            "llm.input_messages.1.message.tool_calls.0.tool_call.id": "c1",
            "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "weather",
            "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": '{"city": "Oslo"}',
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": "7",
            "llm.tools.0.tool.json_schema": json.dumps(WEATHER),
            "llm.token_count.prompt": 2,
            "llm.token_count.completion": 1,
            "input.value": json.dumps({"messages": [[{"lc": 1}]]}),
        },
        kind="INTERNAL",
    )
    assert call.method == "anthropic.chat"
    body = request(call)
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "hi"},
        {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}},
    ]
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (body["max_tokens"], body["tools"], body["model"]) == (9, [WEATHER], "claude")
    assert call.output["choices"][0]["message"] == {"role": "assistant", "content": "7"}  # type: ignore[index]
    assert call.total_tokens == 3


def test_openinference_messages_keep_their_order_beyond_ten() -> None:
    attributes: dict[str, Any] = {"openinference.span.kind": "LLM", "llm.model_name": "m"}
    for index in (10, 2, 0, 11, 1, 3, 4, 5, 6, 7, 8, 9):
        attributes[f"llm.input_messages.{index}.message.role"] = "user"
        attributes[f"llm.input_messages.{index}.message.content"] = str(index)
    assert [message["content"] for message in request(mapped(attributes))["messages"]] == [str(n) for n in range(12)]


def test_openinference_tool_embedding_and_others() -> None:
    tool = mapped({"openinference.span.kind": "TOOL", "tool.name": "weather", "input.value": '{"city": "Oslo"}',
                   "output.value": "7"}, kind="INTERNAL")  # fmt: skip
    assert (tool.kind, tool.name, tool.input, tool.output) == ("tool", "weather", {"city": "Oslo"}, "7")
    embedding = mapped({"openinference.span.kind": "EMBEDDING", "embedding.model_name": "e", "llm.provider": "openai",
                        "embedding.embeddings.0.embedding.text": "hi"})  # fmt: skip
    assert embedding.input == {"method": "embeddings.create", "request": {"model": "e", "input": ["hi"]}}
    assert map_span(span({"openinference.span.kind": "CHAIN", "input.value": "x"}, kind="INTERNAL")) is None


def test_openinference_hidden_content_counts_as_missing() -> None:
    call = mapped({"openinference.span.kind": "LLM", "llm.model_name": "m", "input.value": "__REDACTED__",
                   "output.value": "__REDACTED__"})  # fmt: skip
    assert call.missing == ("input", "output")


# --- OpenLLMetry ----------------------------------------------------------------------------------------------------


def test_traceloop_flat_prompts() -> None:
    call = mapped(
        {
            "llm.request.type": "chat",
            "gen_ai.system": "OpenAI",
            "gen_ai.request.model": "gpt-4",
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "How warm is it in Oslo?",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.finish_reason": "tool_calls",
            "gen_ai.completion.0.tool_calls.0.id": "c1",
            "gen_ai.completion.0.tool_calls.0.name": "weather",
            "gen_ai.completion.0.tool_calls.0.arguments": '{"city": "Oslo"}',
            "llm.request.functions.0.name": "weather",
            "llm.request.functions.0.description": "now",
            "llm.request.functions.0.parameters": '{"type": "object"}',
            "llm.usage.total_tokens": 9,
        }
    )
    assert (call.provider, call.total_tokens) == ("openai", 9)
    assert request(call) == {"model": "gpt-4", "messages": [QUESTION], "tools": [WEATHER]}
    choice = call.output["choices"][0]  # type: ignore[index]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


def test_traceloop_tool_and_workflow() -> None:
    call = mapped(
        {
            "traceloop.span.kind": "tool",
            "traceloop.entity.name": "weather",
            "traceloop.entity.input": '{"args": ["Oslo"], "kwargs": {}}',
            "traceloop.entity.output": "7",
        },
        kind="INTERNAL",
    )
    assert (call.name, call.input, call.output) == ("weather", {"args": ["Oslo"], "kwargs": {}}, "7")
    assert map_span(span({"traceloop.span.kind": "workflow", "traceloop.entity.name": "w"}, kind="INTERNAL")) is None


def test_traceloop_of_today_is_read_as_genai() -> None:
    attributes = {**GENAI, "llm.request.type": None, "gen_ai.is_streaming": False}
    assert mapped(attributes, scope_name="opentelemetry.instrumentation.openai.v1").dialect == "genai"


# --- logfire, pydantic-ai, langfuse ---------------------------------------------------------------------------------


def test_logfire_request_and_response_data() -> None:
    body = {"model": "gpt-5", "messages": [QUESTION], "stream": False}
    call = mapped(
        {
            "logfire.span_type": "span",
            "request_data": json.dumps(body),
            "response_data": json.dumps(
                {"message": {"role": "assistant", "content": "7"}, "usage": {"total_tokens": 3}}
            ),
            "gen_ai.system": "openai",
            "gen_ai.request.model": "gpt-5",
        }
    )
    assert call.input == {"method": "chat.completions.create", "request": body}
    assert call.output["choices"][0]["message"]["content"] == "7"  # type: ignore[index]
    assert (call.dialect, call.total_tokens) == ("logfire", 3)


def test_logfire_of_today_and_its_streams() -> None:
    began = {**GENAI, "logfire.span_type": "span", "request_data": '{"model":"gpt-5"}'}
    whole = mapped(began)
    assert (whole.dialect, request(whole), whole.output) == ("logfire", request(mapped(GENAI)), mapped(GENAI).output)
    for key in ("gen_ai.output.messages", "gen_ai.usage.input_tokens"):
        del began[key]
    assert map_span(span(began)) is None
    assert mapped(began, status_code="ERROR").error == ("Error", "Error")
    log = mapped({**GENAI, "logfire.span_type": "log", "request_data": '{"model":"gpt-5"}'}, kind="INTERNAL")
    assert log.output == whole.output


def test_logfire_announcements_are_ignored() -> None:
    assert map_span(span({**GENAI, "logfire.span_type": "pending_span", "logfire.pending_parent_id": "0" * 16})) is None


def test_pydantic_ai_events_attribute_and_tool() -> None:
    events = [
        {"event.name": "gen_ai.user.message", "role": "user", "content": "How warm is it in Oslo?"},
        {"event.name": "gen_ai.choice", "index": 0, "message": {"role": "assistant", "content": "7"}},
    ]
    parameters = {"function_tools": [{"name": "weather", "description": "now",
                                      "parameters_json_schema": {"type": "object"}}]}  # fmt: skip
    call = mapped({**OLD, "events": json.dumps(events), "model_request_parameters": json.dumps(parameters)})
    assert request(call)["messages"] == [QUESTION]
    assert request(call)["tools"] == [WEATHER]
    assert call.dialect == "pydantic-ai"
    tool = mapped({"gen_ai.tool.name": "weather", "gen_ai.tool.call.id": "c1", "tool_arguments": '{"city": "Oslo"}',
                   "tool_response": "7"}, kind="INTERNAL", name="running tool")  # fmt: skip
    assert (tool.name, tool.input, tool.output, tool.tool_call_id) == ("weather", {"city": "Oslo"}, "7", "c1")


def test_pydantic_ai_of_today_is_read_as_genai_with_its_tools() -> None:
    call = mapped({**GENAI, "model_request_parameters": "{}"}, scope_name="pydantic-ai")
    assert request(call) == request(mapped(GENAI))
    assert call.output == mapped(GENAI).output


def test_langfuse_generation_and_tool() -> None:
    call = mapped(
        {
            "langfuse.observation.type": "generation",
            "langfuse.observation.model.name": "gpt-5",
            "langfuse.observation.model.parameters": '{"temperature": 1}',
            "langfuse.observation.input": json.dumps({"messages": [QUESTION], "tools": [WEATHER]}),
            "langfuse.observation.output": '{"role": "assistant", "content": "7"}',
            "langfuse.observation.usage_details": '{"input": 2, "output": 1, "total": 3}',
        },
        kind="INTERNAL",
    )
    assert request(call) == {"model": "gpt-5", "temperature": 1, "messages": [QUESTION], "tools": [WEATHER]}
    assert call.output["choices"][0]["message"] == {"role": "assistant", "content": "7"}  # type: ignore[index]
    assert (call.prompt_tokens, call.completion_tokens, call.total_tokens) == (2, 1, 3)
    tool = mapped({"langfuse.observation.type": "tool", "langfuse.observation.input": '{"city": "Oslo"}',
                   "langfuse.observation.output": "7"}, name="weather", kind="INTERNAL")  # fmt: skip
    assert (tool.name, tool.input, tool.output) == ("weather", {"city": "Oslo"}, "7")


# --- HTTP and MCP ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attributes",
    [
        {"http.method": "GET", "http.url": "https://api.test:8443/v1/x?k=1", "http.status_code": 200},
        {"http.request.method": "GET", "url.full": "https://api.test:8443/v1/x?k=1", "http.response.status_code": 200},
        {"http.request.method": "GET", "server.address": "api.test", "server.port": 8443, "url.scheme": "https",
         "url.path": "/v1/x", "url.query": "k=1", "http.response.status_code": 200},
    ],
)  # fmt: skip
def test_http_old_and_new_names(attributes: dict[str, Any]) -> None:
    call = mapped({**attributes, "http.response.header.content-type": ("text/plain",)})
    assert (call.kind, call.name) == ("http", "http GET https://api.test:8443/v1/x")
    assert call.input == {"method": "GET", "url": "https://api.test:8443/v1/x?k=1", "headers": [], "body": None}
    assert call.output == {"status_code": 200, "headers": [["content-type", "text/plain"]], "body": None}
    assert (call.missing, call.error) == (("input", "output"), None)


def test_an_http_answer_of_404_is_an_answer_and_a_refused_connection_an_error() -> None:
    attributes = {"http.method": "GET", "http.url": "http://x.test/", "error.type": "404"}
    assert mapped({**attributes, "http.status_code": 404}, status_code="ERROR").error is None
    refused = mapped({**attributes, "error.type": "ConnectError"}, status_code="ERROR", status_description="refused")
    assert refused.error == ("ConnectError", "refused")
    assert refused.output is None


def test_a_server_span_is_no_call() -> None:
    assert map_span(span({"http.method": "GET", "http.url": "http://x.test/"}, kind="SERVER")) is None


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://u:p@Api.Test:443/a?b#c", "http GET https://api.test/a"),
        ("https://[REDACTED]@api.test/a", "http GET https://api.test/a"),
        ("http://[::1]:80", "http GET http://[::1]/"),
        ("http://x.test:99999/a", "http GET http://x.test/a"),
    ],
)
def test_http_names(url: str, name: str) -> None:
    assert http_name("get", url) == name


def test_mcp_tools_call() -> None:
    sdk = mapped({"mcp.method.name": "tools/call", "jsonrpc.request.id": "1"}, name="MCP send tools/call weather")
    assert (sdk.kind, sdk.name, sdk.missing) == ("tool", "weather", ("input", "output"))
    full = mapped({"mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool",
                   "gen_ai.tool.name": "weather", "gen_ai.tool.call.arguments": '{"city": "Oslo"}',
                   "gen_ai.tool.call.result": "7"}, name="tools/call weather")  # fmt: skip
    assert (full.input, full.output, full.missing) == ({"city": "Oslo"}, "7", ())
    assert map_span(span({"mcp.method.name": "tools/list"})) is None
    served = {"mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"}
    assert map_span(span(served, kind="SERVER", name="tools/call weather")) is None


# --- all of them ----------------------------------------------------------------------------------------------------


def test_a_reference_is_not_mapped_but_its_content_can_be_asked_for() -> None:
    record = span({**GENAI, "sftrace.event.id": "evt_1"})
    assert map_span(record) is None
    assert map_content(record) is not None


KEYS = sorted(
    {*GENAI, *OLD, "openinference.span.kind", "input.value", "output.value", "llm.input_messages.0.message.role",
     "llm.input_messages.0.message", "llm.tools.0.tool.json_schema", "gen_ai.prompt.0.role", "gen_ai.completion.0",
     "traceloop.span.kind", "traceloop.entity.input", "llm.request.type", "request_data", "response_data", "events",
     "model_request_parameters", "langfuse.observation.type", "langfuse.observation.input", "http.method", "http.url",
     "langfuse.observation.usage_details", "http.status_code", "mcp.method.name", "gen_ai.tool.name"}
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=4) | st.sampled_from(
        ["", "chat", "LLM", "TOOL", "tool", "generation", "execute_tool", "GET", "http://x:y", "[", "{}", "[1]", "[[]]",
         '{"messages": [1]}', '[{"role": 1, "parts": [1, {"type": "tool_call"}]}]', "tools/call", "1e999", "\ud83e"]
    ),
    lambda inner: st.lists(inner, max_size=2).map(tuple) | st.dictionaries(st.sampled_from(["role", "parts", "messages",
                                                                                            "function"]), inner),
    max_leaves=4,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8), st.sampled_from(["CLIENT", "INTERNAL", "SERVER"]))
def test_no_attributes_make_it_raise_and_every_llm_call_has_a_model(attributes: dict[str, Any], kind: str) -> None:
    call = map_span(span(attributes, kind=kind))
    assert call is None or call.kind in ("llm", "tool", "http")
    if call is not None and call.kind == "llm":
        assert call.model and call.method
    if call is not None and call.error is not None:
        assert all(call.error)


# --- one call, several layers ---------------------------------------------------------------------------------------


def tree(*rows: tuple[str, str | None, dict[str, Any]]) -> list[tuple[SpanRecord, MappedCall | None]]:
    """Spans in the order in which they ended: children first."""
    spans = []
    for at, (span_id, parent, attributes) in enumerate(rows):
        record = span(attributes, span_id=span_id, parent_id=parent, start_ns=1_000 - at)
        spans.append((record, map_content(record)))
    return spans


LLM = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-5"}
POST = {"http.method": "POST", "http.url": "https://api.test/v1/chat"}
FRAMEWORK = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "openai/gpt-5",
    "input.value": "hi",
    "output.value": "7",
}


def test_three_layers_of_one_llm_call_are_one_call_told_by_the_richest() -> None:
    chosen = select_calls(tree(("h", "l", POST), ("l", "mid", LLM), ("mid", "f", {}), ("f", None, FRAMEWORK)))
    assert [(item.record.span_id, sorted(item.absorbed)) for item in chosen] == [("f", ["h", "l"])]


def test_calls_of_different_models_or_different_answers_stay_apart() -> None:
    other = {**LLM, "gen_ai.request.model": "small"}
    chosen = select_calls(tree(("b", "a", other), ("a", None, LLM)))
    assert [(item.record.span_id, item.above) for item in chosen] == [("a", None), ("b", "a")]
    first, second = ({**LLM, "gen_ai.response.id": name} for name in ("r1", "r2"))
    assert len(select_calls(tree(("b", "a", first), ("a", None, second)))) == 2


def test_an_http_exchange_below_a_tool_is_a_call_below_it() -> None:
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"}
    chosen = select_calls(tree(("h", "t", POST), ("t", None, tool)))
    assert [(item.call.kind, item.above) for item in chosen] == [("tool", None), ("http", "t")]


def test_a_tool_that_calls_itself_with_other_arguments_is_two_calls() -> None:
    def tool(n: int) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "f",
            "gen_ai.tool.call.arguments": {"n": n},
        }

    assert len(select_calls(tree(("b", "a", tool(1)), ("a", None, tool(2))))) == 2
    assert len(select_calls(tree(("b", "a", tool(1)), ("a", None, tool(1))))) == 1


def test_spans_around_and_below_a_recorded_call_are_left_out() -> None:
    rows = tree(("h", "r", POST), ("inner", "r", FRAMEWORK), ("r", "outer", LLM), ("outer", None, LLM))
    reference = rows[2][1]
    assert select_calls(rows, {"r": Past("outer", reference, recorded=True)}) == []


def test_a_span_around_a_call_that_is_recorded_and_forgotten_but_for_its_name() -> None:
    inner = tree(("r", "outer", LLM))[0][1]
    outer = tree(("outer", None, FRAMEWORK))
    past = {"r": Past("outer", inner, recorded=True)}
    assert select_calls(outer, past, ["r"]) == []
    assert len(select_calls(outer, past)) == 1
    other = {"r": Past("outer", tree(("r", "outer", {**LLM, "gen_ai.request.model": "x"}))[0][1], recorded=True)}
    assert len(select_calls(outer, other, ["r"])) == 1


def test_a_span_that_ends_after_the_call_around_it_is_still_the_same_call() -> None:
    [(_, ended)] = tree(("r", None, LLM))
    late = tree(("late", "mid", FRAMEWORK))
    assert select_calls(late, {"r": Past(None, ended, recorded=True), "mid": Past("r")}) == []
    assert len(select_calls(late, {})) == 1


def test_a_cycle_of_parents_ends() -> None:
    assert len(select_calls(tree(("a", "b", LLM), ("b", "a", {})))) == 1
    assert len(select_calls(tree(("a", "b", LLM), ("b", "a", LLM)))) <= 2


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [(LLM, True), (FRAMEWORK, True), ({"gen_ai.operation.name": "invoke_agent", "gen_ai.request.model": "m"}, False),
     (POST, False), ({"openinference.span.kind": "AGENT"}, False), ({"mcp.method.name": "tools/call"}, True)],
)  # fmt: skip
def test_open_spans_that_may_be_calls(attributes: dict[str, Any], expected: bool) -> None:
    assert looks_like_call(attributes) is expected
