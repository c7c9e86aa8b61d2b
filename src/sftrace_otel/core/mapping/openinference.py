# SPDX-License-Identifier: Apache-2.0
"""OpenInference: `openinference.span.kind`, bodies in `input.value`/`output.value`, messages spread over flat keys.

Source: Arize openinference, spec/semantic_conventions.md (openinference-semantic-conventions 0.1.42). The body in
`input.value` wins where it is a request of the provider; LangChain and others put their own objects there, and then the
flat keys are the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftrace_otel.core.mapping import messages as form
from sftrace_otel.core.mapping.genai import llm_call, tool_call
from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes, as_text

__all__ = ["map_openinference"]

_REDACTED = "__REDACTED__"


def map_openinference(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """An LLM, EMBEDDING or TOOL span of OpenInference; other kinds are no calls."""
    kind = (attributes.text("openinference.span.kind") or "").upper()
    if kind == "TOOL":
        name = attributes.text("tool.name", "tool_call.function.name") or record.name
        arguments = "input.value" if attributes.has("input.value") else "tool.parameters"
        return tool_call(record, attributes, name, arguments=arguments, result="output.value", dialect="openinference")
    if kind == "LLM":
        return _llm(record, attributes)
    return _embedding(record, attributes) if kind == "EMBEDDING" else None


def _llm(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    body, answer = attributes.value("input.value"), attributes.value("output.value")
    request = body if _is_request(body) else _rebuilt(attributes, attributes.raw.get("input.value"))
    response = answer if _is_response(answer) else None
    outputs = None if response is not None else _outputs(attributes, attributes.raw.get("output.value"))
    operation = "responses" if request is not None and "input" in request else "chat"
    return llm_call(
        record,
        attributes,
        operation,
        request=_with_model(request, attributes),
        response=response,
        outputs=outputs,
        model=attributes.text("llm.model_name"),
        provider=attributes.text("llm.provider", "llm.system", "gen_ai.provider.name"),
        dialect="openinference",
        cut_input="input.value",
        cut_output="output.value",
    )


def _embedding(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    body = attributes.value("input.value")
    texts = [row.get("embedding", {}).get("text") for row in attributes.rows("embedding.embeddings")]
    request = body if isinstance(body, Mapping) else {"input": texts or body} if texts or body else None
    model = attributes.text("embedding.model_name", "llm.model_name")
    response = attributes.value("output.value")
    return llm_call(
        record,
        attributes,
        "embeddings",
        request=None if request is None else {"model": model, **request},
        response=response if isinstance(response, Mapping) else None,
        model=model,
        provider=attributes.text("llm.provider", "llm.system"),
        dialect="openinference",
        cut_input="input.value",
        cut_output="output.value",
    )


def _is_request(body: object) -> bool:
    if not isinstance(body, Mapping):
        return False
    messages = body.get("messages")
    if isinstance(messages, list):
        return all(isinstance(item, Mapping) and "role" in item for item in messages)
    return "input" in body and "model" in body


def _is_response(body: object) -> bool:
    return isinstance(body, Mapping) and any(key in body for key in ("choices", "output", "content", "candidates"))


def _with_model(request: Mapping[str, Any] | None, attributes: Attributes) -> Mapping[str, Any] | None:
    model = attributes.text("llm.model_name")
    return request if request is None or "model" in request or not model else {"model": model, **request}


def _rebuilt(attributes: Attributes, body: object) -> dict[str, Any] | None:
    messages = [_message(row.get("message", {})) for row in attributes.rows("llm.input_messages")]
    if not messages and body is not None and body != _REDACTED:
        messages = [{"role": "user", "content": as_text(body)}]
    if not messages:
        return None
    parameters = attributes.value("llm.invocation_parameters")
    request: dict[str, Any] = {**parameters} if isinstance(parameters, Mapping) else {}
    request["messages"] = messages
    tools = [Attributes(row.get("tool", {})).value("json_schema") for row in attributes.rows("llm.tools")]
    if tools:
        request.setdefault("tools", form.tools(tools))
    return request


def _outputs(attributes: Attributes, answer: object) -> list[Any] | None:
    messages = [_message(row.get("message", {})) for row in attributes.rows("llm.output_messages")]
    if not messages and answer is not None and answer != _REDACTED:
        return [as_text(answer)]
    return messages or None


def _message(row: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": row.get("role") or "assistant", "content": row.get("content")}
    contents = row.get("contents")
    if isinstance(contents, list):
        message["content"] = [_part(item.get("message_content", {})) for item in contents if isinstance(item, Mapping)]
    for key in ("name", "tool_call_id"):
        if row.get(key):
            message[key] = row[key]
    calls = row.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(item.get("tool_call", {})) for item in calls if isinstance(item, Mapping)]
    return message


def _part(content: Mapping[str, Any]) -> Mapping[str, Any]:
    image = content.get("image")
    if isinstance(image, Mapping) and isinstance(image.get("image"), Mapping):
        return {"type": "image_url", "image_url": {"url": image["image"].get("url")}}
    return content


def _call(row: Mapping[str, Any]) -> dict[str, Any]:
    function = row.get("function")
    known = function if isinstance(function, Mapping) else {}
    return form.tool_call(row.get("id"), known.get("name"), known.get("arguments", "{}"))
