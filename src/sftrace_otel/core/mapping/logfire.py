# SPDX-License-Identifier: Apache-2.0
"""Logfire: the request's own body in `request_data`, the answer in `response_data`, and placeholder spans.

Source: pydantic/logfire, `_internal/constants.py` and `integrations/llm_providers` (4.x, 5.x). From 5.x messages are
GenAI attributes and `request_data` holds only the model. Logfire sends a zero-length `pending_span` when a span starts,
so that a live view can show it: it stands for nothing of its own. A streamed call is two spans: one that ends when the
stream begins, without an answer, and at its end a log beside it with request and answer, which is what we take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftrace_otel.core.mapping.genai import llm_call, request_messages
from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes

__all__ = ["is_begun_stream", "is_log", "is_pending", "map_logfire"]


def is_pending(attributes: Mapping[str, Any]) -> bool:
    """Whether a span is only logfire's announcement of one that is still running."""
    return attributes.get("logfire.span_type") == "pending_span"


def is_log(attributes: Mapping[str, Any]) -> bool:
    """Whether a span is logfire's log of something that happened beside it, such as the end of a stream."""
    return attributes.get("logfire.span_type") == "log"


def is_begun_stream(record: SpanRecord) -> bool:
    """Whether a span is the first half of a streamed call, whose whole a log will tell."""
    keys = record.attributes
    if "request_data" not in keys or "logfire.span_type" not in keys or is_log(keys) or record.status_code == "ERROR":
        return False
    answered = any(key in keys for key in ("response_data", "gen_ai.output.messages", "gen_ai.usage.input_tokens"))
    return not answered and keys.get("gen_ai.operation.name", "chat") == "chat"


def map_logfire(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """A span of `logfire.instrument_openai()` or `instrument_anthropic()`."""
    request = attributes.value("request_data")
    if not isinstance(request, Mapping) or not attributes.has("gen_ai.request.model", "gen_ai.system", "response_data"):
        return None
    operation = attributes.text("gen_ai.operation.name") or _operation(request)
    answer = attributes.value("response_data")
    outputs = attributes.value("gen_ai.output.messages")
    whole = any(key in request for key in ("messages", "input", "prompt"))
    return llm_call(
        record,
        attributes,
        operation,
        request=request if whole else None,
        messages=None if whole else request_messages(attributes),
        response=_response(answer),
        outputs=outputs,
        tools=attributes.value("gen_ai.tool.definitions"),
        dialect="logfire",
        cut_input="request_data" if whole else "gen_ai.input.messages",
        cut_output="response_data" if answer is not None else "gen_ai.output.messages",
    )


def _operation(request: Mapping[str, Any]) -> str:
    if "messages" in request:
        return "chat"
    if "prompt" in request:
        return "text_completion"
    return "embeddings" if "encoding_format" in request or "dimensions" in request else "responses"


def _response(answer: object) -> dict[str, Any] | None:
    if not isinstance(answer, Mapping):
        return None
    body = {key: value for key, value in answer.items() if key not in ("message", "combined_chunk_content")}
    message = answer.get("message")
    if message is None and "combined_chunk_content" in answer:
        message = {"role": "assistant", "content": answer["combined_chunk_content"]}
    if message is not None:
        body["choices"] = [{"index": 0, "message": message, "finish_reason": None}]
    return body or None
