# SPDX-License-Identifier: Apache-2.0
"""OpenLLMetry (Traceloop): `traceloop.span.kind` for tools, `gen_ai.prompt.N.…` for messages before its 0.50 line.

Source: traceloop/openllmetry, opentelemetry-semantic-conventions-ai. Its newer instrumentations write
`gen_ai.input.messages`, which the GenAI dialect reads; bedrock, litellm, watsonx and older versions still spread
messages over flat keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftrace_otel.core.mapping import messages as form
from sftrace_otel.core.mapping.genai import llm_call, tool_call
from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes, message_content

__all__ = ["map_traceloop"]

_OPERATIONS = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}


def map_traceloop(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """A tool of `@tool`, or an LLM span with flat prompt and completion keys."""
    if attributes.text("traceloop.span.kind") == "tool":
        name = attributes.text("traceloop.entity.name") or record.name.removesuffix(".tool")
        return tool_call(
            record,
            attributes,
            name,
            arguments="traceloop.entity.input",
            result="traceloop.entity.output",
            dialect="traceloop",
        )
    kind = attributes.text("llm.request.type")
    prompts, completions = attributes.rows("gen_ai.prompt"), attributes.rows("gen_ai.completion")
    if kind not in _OPERATIONS and not prompts and not completions:
        return None
    messages = [_message(row) for row in prompts] or form.input_messages(attributes.value("gen_ai.input.messages"))
    outputs = [_message(row) for row in completions] or attributes.value("gen_ai.output.messages")
    return llm_call(
        record,
        attributes,
        _OPERATIONS.get(kind or "chat", "chat"),
        messages=messages,
        outputs=outputs,
        tools=_functions(attributes) or attributes.value("gen_ai.tool.definitions"),
        dialect="traceloop",
    )


def _message(row: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": row.get("role") or "assistant", "content": message_content(row.get("content"))}
    for key in ("tool_call_id", "finish_reason"):
        if row.get(key):
            message[key] = row[key]
    calls = row.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            form.tool_call(call.get("id"), call.get("name"), call.get("arguments", "{}")) for call in calls
        ]
    return message


def _functions(attributes: Attributes) -> list[dict[str, Any]]:
    rows = attributes.rows("llm.request.functions")
    return [{"type": "function", **{key: Attributes(row).value(key) for key in row}} for row in rows]
