# SPDX-License-Identifier: Apache-2.0
"""GenAI semantic conventions of 2025-09 and later: messages as attributes, structured or JSON text.

Source: opentelemetry semantic-conventions-genai, spans (development status, 2026-11). The names are our own constants:
the SDK's are deprecated and have moved repository. `llm_call` is the one place that builds an LLM call, so each other
dialect only says where its content is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftrace_otel.core.mapping import messages as form
from sftrace_otel.core.mapping.model import MappedCall, SpanRecord
from sftrace_otel.core.mapping.values import Attributes, failure, plain, provider_name

__all__ = ["INFERENCE", "llm_call", "map_genai", "request_messages", "sdk_method", "tool_call"]

INFERENCE = frozenset({"chat", "generate_content", "text_completion", "embeddings", "fetch_response"})

# Methods of the openai SDK whose request and response have the form that we rebuild.
_OPENAI_METHODS = {
    "chat": "chat.completions.create",
    "text_completion": "completions.create",
    "embeddings": "embeddings.create",
}
_OPENAI = frozenset({"openai", "azure.ai.openai"})
_PARAMETERS = {
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.stream": "stream",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.stop_sequences": "stop",
    "gen_ai.request.choice.count": "n",
    "gen_ai.request.reasoning.level": "reasoning_effort",
    "gen_ai.request.previous_response.id": "previous_response_id",
    "gen_ai.embeddings.dimension.count": "dimensions",
    "openai.request.service_tier": "service_tier",
    "gen_ai.openai.request.service_tier": "service_tier",
}


def map_genai(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    """An inference or `execute_tool` span of the current conventions, also with its content on a span event."""
    operation = attributes.text("gen_ai.operation.name")
    if operation == "execute_tool":
        return _execute_tool(record, attributes)
    if operation not in INFERENCE:
        return None
    content = _with_details(record, attributes)
    return llm_call(
        record,
        content,
        operation,
        messages=request_messages(content),
        outputs=content.value("gen_ai.output.messages"),
        tools=content.value("gen_ai.tool.definitions"),
        dialect="genai",
        cut_input="gen_ai.input.messages",
        cut_output="gen_ai.output.messages",
    )


def llm_call(
    record: SpanRecord,
    attributes: Attributes,
    operation: str,
    *,
    messages: list[dict[str, Any]] | None = None,
    request: Mapping[str, Any] | None = None,
    outputs: object = None,
    response: object = None,
    tools: object = None,
    model: str | None = None,
    provider: str | None = None,
    dialect: str,
    cut_input: str = "",
    cut_output: str = "",
) -> MappedCall | None:
    """An LLM call from what a dialect found, or None where no model is named: an event needs one.

    `request` and `response` are bodies as the SDK had them; otherwise they are rebuilt from `messages`, the request
    parameters of the conventions, `outputs` (messages of the answer) and the usage. `cut_input`, `cut_output`: the
    attributes that held the content, for telling whether a length limit cut them.
    """
    asked = model or attributes.text("gen_ai.request.model", "llm.request.model") or _model_in(request)
    answered = attributes.text("gen_ai.response.model", "llm.response.model") or _model_in(response)
    named = asked or answered
    if not named:
        return None
    service = provider_name(provider or attributes.text("gen_ai.provider.name", "gen_ai.system"))
    service = service or attributes.text("server.address", "net.peer.name")
    usage = _Usage(attributes, response)
    method = sdk_method(service, operation, attributes)
    body = dict(request) if request is not None else _request(attributes, named, messages, tools)
    output = response if response is not None else _response(attributes, answered, outputs, usage, record)
    return MappedCall(
        kind="llm",
        name=method,
        provider=service,
        model=named,
        method=method,
        input={"method": method, "request": body},
        output=output,
        error=failure(record),
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        total_tokens=usage.total,
        response_model=answered,
        response_id=attributes.text("gen_ai.response.id") or _id_in(response),
        missing=_missing(request is None and not messages, response is None and not outputs),
        cut=_missing(cut_input in attributes.cut, cut_output in attributes.cut),
        dialect=dialect,
    )


def tool_call(
    record: SpanRecord,
    attributes: Attributes,
    name: str | None,
    *,
    arguments: str,
    result: str,
    dialect: str,
) -> MappedCall | None:
    """A tool call whose content is in the attributes `arguments` and `result`; None where no name is known."""
    if not name:
        return None
    given = attributes.value(arguments)
    output = attributes.value(result)
    error = failure(record)
    return MappedCall(
        kind="tool",
        name=name,
        input=given,
        output=output,
        error=error,
        tool_call_id=attributes.text("gen_ai.tool.call.id", "tool.id"),
        missing=_missing(not attributes.has(arguments), not attributes.has(result) and error is None),
        cut=_missing(arguments in attributes.cut, result in attributes.cut),
        dialect=dialect,
    )


def sdk_method(provider: str | None, operation: str, attributes: Attributes) -> str:
    """The SDK's path where the rebuilt body has that method's form, else `<provider>.<operation>`."""
    api = attributes.text("openai.api.type", "gen_ai.openai.api.type")
    if provider in _OPENAI and operation in _OPENAI_METHODS and api in (None, "chat_completions"):
        return _OPENAI_METHODS[operation]
    return f"{provider}.{operation}" if provider else operation


class _Usage:
    """Token counts of one call, from attributes or from a response body."""

    def __init__(self, attributes: Attributes, response: object) -> None:
        body = response.get("usage") if isinstance(response, Mapping) else None
        known = body if isinstance(body, Mapping) else {}
        self.prompt = attributes.number(
            "gen_ai.usage.input_tokens",
            "gen_ai.usage.prompt_tokens",
            "llm.usage.prompt_tokens",
            "llm.token_count.prompt",
        )
        self.completion = attributes.number(
            "gen_ai.usage.output_tokens",
            "gen_ai.usage.completion_tokens",
            "llm.usage.completion_tokens",
            "llm.token_count.completion",
        )
        self.total = attributes.number("gen_ai.usage.total_tokens", "llm.usage.total_tokens", "llm.token_count.total")
        self.prompt = _first(self.prompt, known.get("prompt_tokens"), known.get("input_tokens"))
        self.completion = _first(self.completion, known.get("completion_tokens"), known.get("output_tokens"))
        self.total = _first(self.total, known.get("total_tokens"), self._sum())

    def _sum(self) -> int | None:
        if self.prompt is None or self.completion is None:
            return None
        return self.prompt + self.completion

    def body(self) -> dict[str, int]:
        """`usage` of a rebuilt response: only what is known."""
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": self.total}
        return {key: count for key, count in counts.items() if count is not None}


def _first(*counts: object) -> int | None:
    return next((count for count in counts if isinstance(count, int) and not isinstance(count, bool)), None)


def _execute_tool(record: SpanRecord, attributes: Attributes) -> MappedCall | None:
    name = attributes.text("gen_ai.tool.name") or record.name.removeprefix("execute_tool").strip()
    arguments = "gen_ai.tool.call.arguments"
    if not attributes.has(arguments):
        arguments = "gen_ai.tool.input" if attributes.has("gen_ai.tool.input") else arguments
    result = "gen_ai.tool.call.result"
    if not attributes.has(result):
        result = "gen_ai.tool.output" if attributes.has("gen_ai.tool.output") else result
    return tool_call(record, attributes, name, arguments=arguments, result=result, dialect="genai")


def _with_details(record: SpanRecord, attributes: Attributes) -> Attributes:
    # Some instrumentations put the content on this event instead of on the span itself.
    for event in record.events:
        if event.name == "gen_ai.client.inference.operation.details":
            return Attributes({**event.attributes, **attributes.raw})
    return attributes


def request_messages(attributes: Attributes) -> list[dict[str, Any]]:
    """System instructions and input messages of the conventions, as one list of chat messages."""
    system = form.system_messages(attributes.value("gen_ai.system_instructions"))
    return system + form.input_messages(attributes.value("gen_ai.input.messages"))


def _request(
    attributes: Attributes, model: str, messages: list[dict[str, Any]] | None, tools: object
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model}
    if messages:
        body["messages"] = messages
    definitions = form.tools(tools)
    if definitions:
        body["tools"] = definitions
    for key, parameter in _PARAMETERS.items():
        value = attributes.raw.get(key)
        if value is not None:
            body[parameter] = plain(value)
    return body


def _response(
    attributes: Attributes, model: str | None, outputs: object, usage: _Usage, record: SpanRecord
) -> dict[str, Any] | None:
    reasons = plain(attributes.value("gen_ai.response.finish_reasons"))
    answers = form.choices(outputs, reasons if isinstance(reasons, list) else None) if outputs else []
    body: dict[str, Any] = {}
    identifier = attributes.text("gen_ai.response.id")
    if identifier:
        body["id"] = identifier
    if model:
        body["model"] = model
    if answers:
        body["choices"] = answers
    if usage.body():
        body["usage"] = usage.body()
    if not answers and record.status_code == "ERROR":
        return None
    return body or None


def _missing(no_input: bool, no_output: bool) -> tuple[str, ...]:
    return (("input",) if no_input else ()) + (("output",) if no_output else ())


def _model_in(body: object) -> str | None:
    model = body.get("model") if isinstance(body, Mapping) else None
    return model if isinstance(model, str) and model else None


def _id_in(body: object) -> str | None:
    identifier = body.get("id") if isinstance(body, Mapping) else None
    return identifier if isinstance(identifier, str) and identifier else None
