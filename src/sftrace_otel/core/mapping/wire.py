# SPDX-License-Identifier: Apache-2.0
"""LLM traffic on the wire: which endpoint a path is, what request and answer say, streams put together and taken apart.

Decision: the request body and the response body are the truth; attributes of spans and fields of events are read from
them here, for every client alike. A stream becomes the completion that the same request without `stream` would have
given, so that events of streamed and plain calls compare. Rejected: reading the SDK's typed objects, which differ
between its versions and lack what was sent beside the typed parameters.

Sources: OpenAI's REST API (chat completions, completions, embeddings, responses); GenAI semantic conventions
(`facts/otel.md` §3.2), whose names are written out here because their package has moved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

__all__ = [
    "Endpoint",
    "assemble",
    "complete_stream",
    "endpoint_of",
    "provider_of",
    "request_attributes",
    "response_attributes",
    "sse_events",
    "stream_of",
    "tokens_of",
    "tool_answers",
]


class Endpoint:
    """An LLM endpoint: the SDK's method path and the GenAI operation."""

    __slots__ = ("api", "method", "operation")

    def __init__(self, method: str, operation: str, api: str) -> None:
        self.method = method
        self.operation = operation
        self.api = api


_ENDPOINTS = {
    "/chat/completions": Endpoint("chat.completions.create", "chat", "chat_completions"),
    "/responses": Endpoint("responses.create", "chat", "responses"),
    "/embeddings": Endpoint("embeddings.create", "embeddings", "embeddings"),
    "/completions": Endpoint("completions.create", "text_completion", "completions"),
}

_HOSTS = {
    "api.openai.com": "openai",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "api.moonshot.ai": "moonshot_ai",
    "api.cohere.com": "cohere",
    "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "gcp.gemini",
}
LLM_HOSTS = frozenset(_HOSTS)
"""Hosts known to serve models; a connection to one without a captured call is worth a loud line."""

_VERTEX = re.compile(r"aiplatform\.\w+\.rep\.googleapis\.com")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


def endpoint_of(method: str, path: str) -> Endpoint | None:
    """The LLM endpoint that `POST path` is, whatever stands before it; None for any other call."""
    if method.upper() != "POST":
        return None
    path = path.partition("?")[0].rstrip("/")
    for suffix, endpoint in _ENDPOINTS.items():
        if path.endswith(suffix):
            return endpoint
    return None


def provider_of(host: str, *, azure: bool = False, own: str = "openai") -> str:
    """The GenAI name of the service at `host`; a loopback stand-in counts as `own`'s API, any other host is itself."""
    host = host.lower()
    if azure or host.endswith(".openai.azure.com"):
        return "azure.ai.openai"
    if host in _LOOPBACK:
        return own
    if host.endswith(".openai.com"):
        return "openai"
    if host.endswith("aiplatform.googleapis.com") or _VERTEX.fullmatch(host):
        return "gcp.vertex_ai"
    return _HOSTS.get(host, host)


_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "previous_response_id": "gen_ai.request.previous_response.id",
    "service_tier": "openai.request.service_tier",
    "dimensions": "gen_ai.embeddings.dimension.count",
}


def request_attributes(endpoint: Endpoint, body: Mapping[str, Any], provider: str) -> dict[str, Any]:
    """Span attributes of a request; no content."""
    found: dict[str, Any] = {"gen_ai.operation.name": endpoint.operation, "gen_ai.provider.name": provider}
    model = body.get("model")
    if isinstance(model, str) and model:
        found["gen_ai.request.model"] = model
    for parameter, attribute in _PARAMETERS.items():
        value = body.get(parameter)
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            found[attribute] = value
    if found.get("gen_ai.request.choice.count") == 1:
        del found["gen_ai.request.choice.count"]
    if body.get("stream") is True:
        found["gen_ai.request.stream"] = True
    stop = body.get("stop")
    if isinstance(stop, str):
        found["gen_ai.request.stop_sequences"] = (stop,)
    elif isinstance(stop, (list, tuple)) and all(isinstance(item, str) for item in stop):
        found["gen_ai.request.stop_sequences"] = tuple(stop)
    encoding = body.get("encoding_format")
    if isinstance(encoding, str):
        found["gen_ai.request.encoding_formats"] = (encoding,)
    if endpoint.api in ("chat_completions", "responses"):
        found["openai.api.type"] = endpoint.api
    return found


def response_attributes(body: object) -> dict[str, Any]:
    """Span attributes of an answer: id, the model that served, finish reasons, token usage; no content."""
    found: dict[str, Any] = {}
    if not isinstance(body, Mapping):
        return found
    for member, attribute in (
        ("id", "gen_ai.response.id"),
        ("model", "gen_ai.response.model"),
        ("service_tier", "openai.response.service_tier"),
        ("system_fingerprint", "openai.response.system_fingerprint"),
    ):
        if isinstance(body.get(member), str):
            found[attribute] = body[member]
    reasons = [
        choice["finish_reason"]
        for choice in _objects(body.get("choices"))
        if isinstance(choice.get("finish_reason"), str)
    ]
    if reasons:
        found["gen_ai.response.finish_reasons"] = tuple(reasons)
    prompt, completion, _ = tokens_of(body)
    if prompt is not None:
        found["gen_ai.usage.input_tokens"] = prompt
    if completion is not None:
        found["gen_ai.usage.output_tokens"] = completion
    usage = body.get("usage")
    if isinstance(usage, Mapping):
        for details, member, attribute in (
            ("prompt_tokens_details", "cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
            ("input_tokens_details", "cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
            ("completion_tokens_details", "reasoning_tokens", "gen_ai.usage.reasoning.output_tokens"),
            ("output_tokens_details", "reasoning_tokens", "gen_ai.usage.reasoning.output_tokens"),
        ):
            part = usage.get(details)
            if isinstance(part, Mapping) and _count(part.get(member)) is not None:
                found[attribute] = part[member]
    return found


def tokens_of(body: object) -> tuple[int | None, int | None, int | None]:
    """(prompt, completion, total) tokens of an answer; None where it does not say."""
    usage = body.get("usage") if isinstance(body, Mapping) else None
    if not isinstance(usage, Mapping):
        return (None, None, None)
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    completion = _count(usage.get("completion_tokens", usage.get("output_tokens")))
    total = _count(usage.get("total_tokens"))
    if total is None and prompt is not None and completion is not None:
        total = prompt + completion
    return (prompt, completion, total)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, Mapping):
                yield item


def tool_answers(body: object) -> Iterator[tuple[str, str, object]]:
    """(call id, function name, content) of each tool result that a request sends back to the model."""
    if not isinstance(body, Mapping):
        return
    names: dict[str, str] = {}
    for message in _objects(body.get("messages")):
        for call in _objects(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, Mapping):
                names[str(call.get("id"))] = str(function.get("name"))
        if message.get("role") == "tool" and "tool_call_id" in message:
            call_id = str(message["tool_call_id"])
            yield call_id, names.get(call_id, call_id), message.get("content")
    for item in _objects(body.get("input")):
        if item.get("type") == "function_call":
            names[str(item.get("call_id"))] = str(item.get("name"))
        elif item.get("type") == "function_call_output":
            call_id = str(item.get("call_id"))
            yield call_id, names.get(call_id, call_id), item.get("output")


# --- streams ----------------------------------------------------------------------------------------------------------


def sse_events(data: bytes) -> Iterator[tuple[str | None, str]]:
    """(event name, data) of each whole server-sent event in `data` (HTML standard, "Event stream interpretation")."""
    name: str | None = None
    lines: list[str] = []
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    for line in text.split("\n"):
        if not line:
            if lines:
                yield name, "\n".join(lines)
            name, lines = None, []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            lines.append(value)
        elif field == "event":
            name = value


def complete_stream(data: bytes) -> bool:
    """True if the stream says that it is over, although the connection may not have been read to its end."""
    tail = data[-4096:].replace(b'": "', b'":"')
    return any(sign in tail for sign in (b"data: [DONE]", *_ENDS))


_ENDS = tuple(b'"type":"%s"' % kind for kind in (b"response.completed", b"message_stop", b"error"))


def assemble(data: bytes) -> object:
    """The completion that a stream amounts to; for a stream of another form, the list of its events' data."""
    chunks: list[Any] = []
    for _, text in sse_events(data):
        if text.strip() == "[DONE]":
            continue
        try:
            chunks.append(msgspec.json.decode(text))
        except (msgspec.MsgspecError, RecursionError):
            chunks.append(text)
    if not chunks:
        return None
    for chunk in reversed(chunks):
        if (
            isinstance(chunk, dict)
            and isinstance(chunk.get("response"), dict)
            and str(chunk.get("type")).startswith(("response.completed", "response.incomplete", "response.failed"))
        ):
            return chunk["response"]
    if any(isinstance(chunk, dict) and "choices" in chunk for chunk in chunks):
        return _completion([chunk for chunk in chunks if isinstance(chunk, dict)])
    return chunks


def _completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Chat or text completion chunks as one completion."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key != "choices" and (value is not None or key not in whole):
                whole[key] = value
        for choice in _objects(chunk.get("choices")):
            _add_choice(choices.setdefault(int(choice.get("index") or 0), {}), choice)
    chat = str(whole.get("object", "")).startswith("chat")
    if chat:
        whole["object"] = "chat.completion"
    whole["choices"] = [_finished(index, choices[index], chat) for index in sorted(choices)]
    return whole


def _add_choice(into: dict[str, Any], choice: Mapping[str, Any]) -> None:
    for key, value in choice.items():
        if key == "delta" and isinstance(value, Mapping):
            _add_delta(into.setdefault("message", {}), value)
        elif key == "text" and isinstance(value, str):
            into["text"] = into.get("text", "") + value
        elif key == "logprobs" and isinstance(value, Mapping):
            _add_logprobs(into, value)
        elif value is not None or key not in into:
            into[key] = value


def _add_logprobs(into: dict[str, Any], value: Mapping[str, Any]) -> None:
    known = into.get("logprobs")
    if not isinstance(known, dict):
        into["logprobs"] = known = {}
    for key, items in value.items():
        if isinstance(items, list) and isinstance(known.get(key), list):
            known[key] = known[key] + items
        elif items is not None or key not in known:
            known[key] = items


def _add_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", {})
            for call in _objects(value):
                _add_tool_call(calls.setdefault(int(call.get("index") or 0), {}), call)
        elif key in ("content", "refusal", "reasoning_content", "reasoning") and isinstance(value, str):
            message[key] = (message.get(key) or "") + value
        elif key == "function_call" and isinstance(value, Mapping):
            _add_function(message.setdefault("function_call", {}), value)
        elif value is not None or key not in message:
            message[key] = value


def _add_tool_call(into: dict[str, Any], call: Mapping[str, Any]) -> None:
    for key, value in call.items():
        if key == "function" and isinstance(value, Mapping):
            _add_function(into.setdefault("function", {}), value)
        elif key != "index" and value is not None:
            into[key] = value


def _add_function(into: dict[str, Any], function: Mapping[str, Any]) -> None:
    for key, value in function.items():
        if key == "arguments" and isinstance(value, str):
            into["arguments"] = into.get("arguments", "") + value
        elif value is not None:
            into[key] = value


def _finished(index: int, choice: dict[str, Any], chat: bool) -> dict[str, Any]:
    choice = {**choice, "index": index}
    choice.setdefault("finish_reason", None)
    if chat:
        message = {"role": "assistant", "content": None, **choice.get("message", {})}
        if isinstance(message.get("tool_calls"), dict):
            message["tool_calls"] = [message["tool_calls"][key] for key in sorted(message["tool_calls"])]
        choice["message"] = message
    return choice


def stream_of(method: str, completion: object) -> Iterable[bytes]:
    """Server-sent events that amount to `completion`, for a recorded answer without wire data or an overridden one."""
    if method == "responses.create" and isinstance(completion, Mapping):
        yield from _response_events(completion)
        return
    if isinstance(completion, Mapping) and "choices" in completion:
        for chunk in _chunks_of(completion):
            yield _event(chunk)
    elif isinstance(completion, (list, tuple)):
        for item in completion:
            yield _event(item)
    else:
        yield _event(completion)
    yield b"data: [DONE]\n\n"


def _event(value: object, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _chunks_of(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    base = {key: value for key, value in completion.items() if key not in ("choices", "usage")}
    chat = str(base.get("object", "chat.completion")).startswith("chat")
    if chat:
        base["object"] = "chat.completion.chunk"
    for choice in _objects(completion.get("choices")):
        index = choice.get("index", 0)
        if not chat:
            yield {**base, "choices": [dict(choice)]}
            continue
        message = choice.get("message")
        delta = dict(message) if isinstance(message, Mapping) else {}
        if isinstance(delta.get("tool_calls"), (list, tuple)):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(_objects(delta["tool_calls"]))]
        rest = {key: value for key, value in choice.items() if key not in ("message", "index", "finish_reason")}
        yield {**base, "choices": [{"index": index, "delta": delta, "finish_reason": None, **rest}]}
        reason = choice.get("finish_reason")
        yield {**base, "choices": [{"index": index, "delta": {}, "finish_reason": reason}]}
    if completion.get("usage") is not None:
        yield {**base, "choices": [], "usage": completion["usage"]}


def _response_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of the Responses API that an SDK needs to rebuild `response`."""
    number = 0

    def event(kind: str, /, **members: Any) -> bytes:
        nonlocal number
        number += 1
        return _event({"type": kind, "sequence_number": number - 1, **members}, kind)

    yield event("response.created", response={**response, "status": "in_progress", "output": []})
    for at, item in enumerate(_objects(response.get("output"))):
        yield event("response.output_item.added", output_index=at, item={**item, **_emptied(item)})
        for part_at, part in enumerate(_objects(item.get("content"))):
            place = {"item_id": item.get("id"), "output_index": at, "content_index": part_at}
            if part.get("type") == "output_text":
                yield event("response.content_part.added", **place, part={**part, "text": ""})
                yield event("response.output_text.delta", **place, delta=part.get("text", ""), logprobs=[])
                yield event("response.output_text.done", **place, text=part.get("text", ""), logprobs=[])
                yield event("response.content_part.done", **place, part=dict(part))
        if item.get("type") == "function_call":
            place = {"item_id": item.get("id"), "output_index": at}
            arguments = item.get("arguments", "")
            yield event("response.function_call_arguments.delta", **place, delta=arguments)
            yield event("response.function_call_arguments.done", **place, arguments=arguments, name=item.get("name"))
        yield event("response.output_item.done", output_index=at, item=dict(item))
    yield event("response.completed", response=dict(response))


def _emptied(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call":
        return {"arguments": ""}
    return {"content": []} if "content" in item else {}
