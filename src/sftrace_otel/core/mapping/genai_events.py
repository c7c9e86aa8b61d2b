# SPDX-License-Identifier: Apache-2.0
"""GenAI conventions up to 1.36: `gen_ai.system` on the span, the content on span events.

Source: semantic conventions 1.28 to 1.36, "gen_ai" events: `gen_ai.content.prompt` and `gen_ai.content.completion` with
one JSON text each, later one event per message (`gen_ai.user.message`, …, `gen_ai.choice`). Strands writes the latter
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftrace_otel.core.mapping import messages as form
from sftrace_otel.core.mapping.genai import INFERENCE, llm_call
from sftrace_otel.core.mapping.model import MappedCall, SpanEvent, SpanRecord
from sftrace_otel.core.mapping.values import Attributes, message_content

__all__ = ["from_events", "map_genai_events"]

_ROLES = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}


def map_genai_events(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """An LLM span whose messages are span events, or that has no content at all."""
    operation = attributes.text("gen_ai.operation.name")
    if operation is None and not attributes.has("gen_ai.system"):
        return None
    if operation is not None and operation not in INFERENCE:
        return None
    if operation is not None and not record.events:
        return None
    messages, outputs = from_events([(event.name, event.attributes) for event in record.events])
    if operation is not None and not messages and not outputs:
        return None
    if operation is None and not _looks_like_inference(record, attributes):
        return None
    return llm_call(record, attributes, operation or "chat", messages=messages, outputs=outputs, dialect="genai-events")


def from_events(events: list[tuple[str, Mapping[str, Any]]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages of the request and of the answer from (event name, attributes or body) pairs."""
    messages: list[dict[str, Any]] = []
    outputs: list[Any] = []
    for name, raw in events:
        attributes = Attributes(raw)
        if name == "gen_ai.content.prompt":
            messages += form.input_messages(attributes.value("gen_ai.prompt"))
        elif name == "gen_ai.content.completion":
            value = attributes.value("gen_ai.completion")
            outputs += value if isinstance(value, list) else [value]
        elif name == "gen_ai.choice":
            outputs.append(_choice(attributes))
        elif name in _ROLES:
            messages.append(_message(attributes, _ROLES[name]))
    return messages, outputs


def _looks_like_inference(record: SpanRecord, attributes: Attributes) -> bool:
    has_model = attributes.has("gen_ai.request.model", "gen_ai.response.model")
    return has_model and (record.kind == "CLIENT" or any(_is_content(event) for event in record.events))


def _is_content(event: SpanEvent) -> bool:
    return event.name in _ROLES or event.name in ("gen_ai.choice", "gen_ai.content.prompt", "gen_ai.content.completion")


def _message(attributes: Attributes, role: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": attributes.text("role") or role,
        "content": message_content(attributes.raw.get("content")),
    }
    calls = attributes.value("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = calls
    identifier = attributes.text("id", "tool_call_id")
    if identifier:
        message["tool_call_id"] = identifier
    return message


def _choice(attributes: Attributes) -> dict[str, Any]:
    body = attributes.value("message")
    if not isinstance(body, Mapping):
        body = {"content": message_content(attributes.raw.get("message"))}
    message = dict(body)
    message.setdefault("role", "assistant")
    calls = attributes.value("tool_calls")
    if isinstance(calls, list):
        message.setdefault("tool_calls", calls)
    if message.get("content") is None and attributes.has("content"):
        message["content"] = message_content(attributes.raw["content"])
    return {**message, "finish_reason": attributes.text("finish_reason")}
