# SPDX-License-Identifier: Apache-2.0
"""Pydantic AI before it wrote GenAI attributes: `events` as one JSON attribute, tools with their own keys.

Source: pydantic/pydantic-ai, `models/instrumented.py` and `_instrumentation.py`, data format versions 1 and 2; version
3 and later are plain GenAI conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftrace_otel.core.mapping.genai import INFERENCE, llm_call, request_messages, tool_call
from sftrace_otel.core.mapping.genai_events import from_events
from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes

__all__ = ["map_pydantic_ai"]


def map_pydantic_ai(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """A tool run or a model request of an agent; the agent's own span is no call."""
    if attributes.has("tool_arguments", "tool_response") and attributes.has("gen_ai.tool.name"):
        return tool_call(
            record,
            attributes,
            attributes.text("gen_ai.tool.name"),
            arguments="tool_arguments",
            result="tool_response",
            dialect="pydantic-ai",
        )
    operation = attributes.text("gen_ai.operation.name")
    if operation not in INFERENCE or not attributes.has("events", "model_request_parameters"):
        return None
    messages, outputs = from_events(_events(attributes))
    if not messages:
        messages = request_messages(attributes)
    return llm_call(
        record,
        attributes,
        operation,
        messages=messages,
        outputs=outputs or attributes.value("gen_ai.output.messages"),
        tools=attributes.value("gen_ai.tool.definitions") or _tools(attributes.value("model_request_parameters")),
        dialect="pydantic-ai",
        cut_input="gen_ai.input.messages",
        cut_output="gen_ai.output.messages",
    )


def _events(attributes: Attributes) -> list[tuple[str, Mapping[str, Any]]]:
    rows = attributes.value("events")
    if not isinstance(rows, list):
        return []
    return [(str(row.get("event.name", "")), row) for row in rows if isinstance(row, Mapping)]


def _tools(parameters: object) -> list[dict[str, Any]]:
    found = parameters.get("function_tools") if isinstance(parameters, Mapping) else None
    if not isinstance(found, list):
        return []
    return [
        {
            "type": "function",
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("parameters_json_schema"),
        }
        for tool in found
        if isinstance(tool, Mapping)
    ]
