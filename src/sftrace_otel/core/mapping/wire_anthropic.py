# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API on the wire, at Anthropic, on Vertex AI and at any host that speaks it.

Decision: beta messages are messages: what tells them is a header, or a query that only some versions of the SDK send.
A streamed tool input is the object that its parts spell; parts that spell none (the stream was cut, the model erred)
stay the exact text that was sent, in the same place. Input tokens count what was read from and written to the prompt
cache, as the GenAI conventions say; the body keeps the service's own numbers.

Sources: Anthropic's API reference, "Messages" and "Streaming messages"; GenAI conventions, `gen_ai.usage.*`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from sftrace_otel.core.mapping.framing import stream_bytes, values_of
from sftrace_otel.core.mapping.wire import Endpoint, objects

__all__ = [
    "MESSAGES", "assemble", "is_request", "request_attributes", "response_attributes", "stream_of",
    "tokens_of", "tool_answers",
]  # fmt: skip

MESSAGES = Endpoint("messages.create", "chat", "messages")

_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
}
_CACHE = {
    "cache_read_input_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_creation_input_tokens": "gen_ai.usage.cache_write.input_tokens",
}
_EVENT_MEMBERS = frozenset({"type", "delta", "usage", "index"})


def is_request(body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether a body posted to `/v1/messages` asks for a message."""
    asked = "anthropic-version" in headers or "anthropic_version" in body or "max_tokens" in body
    return asked and isinstance(body.get("messages"), list)


def request_attributes(body: Mapping[str, Any]) -> dict[str, Any]:
    """Span attributes of a request's parameters; no content."""
    found: dict[str, Any] = {}
    for parameter, attribute in _PARAMETERS.items():
        value = body.get(parameter)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[attribute] = value
    stops = body.get("stop_sequences")
    if isinstance(stops, list) and stops and all(isinstance(item, str) for item in stops):
        found["gen_ai.request.stop_sequences"] = tuple(stops)
    config = body.get("output_config")
    if isinstance(config, Mapping) and isinstance(config.get("effort"), str):
        found["gen_ai.request.reasoning.level"] = config["effort"]
    return found


def response_attributes(message: Mapping[str, Any]) -> dict[str, Any]:
    """Span attributes of an answer but for the token counts that every dialect has; no content."""
    found: dict[str, Any] = {}
    if isinstance(message.get("id"), str):
        found["gen_ai.response.id"] = message["id"]
    if isinstance(message.get("model"), str):
        found["gen_ai.response.model"] = message["model"]
    if isinstance(message.get("stop_reason"), str):
        found["gen_ai.response.finish_reasons"] = (message["stop_reason"],)
    usage = message.get("usage")
    if isinstance(usage, Mapping):
        for member, attribute in _CACHE.items():
            if _count(usage.get(member)):
                found[attribute] = usage[member]
        details = usage.get("output_tokens_details")
        if isinstance(details, Mapping) and _count(details.get("thinking_tokens")):
            found["gen_ai.usage.reasoning.output_tokens"] = details["thinking_tokens"]
    return found


def tokens_of(message: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """(input, output, total) tokens; the input's with those of the prompt cache; no total is given."""
    usage = message.get("usage")
    if not isinstance(usage, Mapping):
        return (None, None, None)
    given = usage.get("input_tokens")
    cached = sum(_count(usage.get(member)) for member in _CACHE)
    asked = _count(given) + cached if isinstance(given, int) or cached else None
    answered = usage.get("output_tokens")
    return (asked, _count(answered) if isinstance(answered, int) else None, None)


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def tool_answers(body: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(call id, tool name, content) of each tool result that a request sends back to the model."""
    names: dict[str, str] = {}
    for message in objects(body.get("messages")):
        for block in objects(message.get("content")):
            if block.get("type") == "tool_use":
                names[str(block.get("id"))] = str(block.get("name"))
            elif block.get("type") == "tool_result":
                call_id = str(block.get("tool_use_id"))
                yield call_id, names.get(call_id, call_id), _text_of(block.get("content"))


def _text_of(content: object) -> object:
    """A tool result's text where it is one block of text, else the content as it is."""
    if isinstance(content, list) and len(content) == 1:
        only = content[0]
        if isinstance(only, Mapping) and only.get("type") == "text":
            return only.get("text")
    return content


# --- streams ----------------------------------------------------------------------------------------------------------


def assemble(data: bytes, framing: str) -> object:
    """The message that a stream amounts to, as far as it went; the list of its values if no message begins in it.

    An error that the stream reports is its member `error`.
    """
    values = values_of(data, framing)
    building = _Message()
    for value in values:
        if isinstance(value, dict):
            building.add(value)
    if building.message is not None:
        return building.finished()
    return values or None


class _Message:
    """A message while its events come in."""

    def __init__(self) -> None:
        self.message: dict[str, Any] | None = None
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, str] = {}

    def add(self, event: dict[str, Any]) -> None:
        kind, index = event.get("type"), event.get("index")
        if kind == "message_start":
            message = event.get("message")
            self.message = dict(message) if isinstance(message, dict) else {}
        elif self.message is None:
            return
        elif kind == "error":
            self.message["error"] = event.get("error")
        elif kind == "message_delta":
            self._end(self.message, event)
        elif kind == "content_block_start" and isinstance(index, int):
            block = event.get("content_block")
            self._begin(self.message, index, block if isinstance(block, dict) else {})
        elif kind == "content_block_delta" and isinstance(index, int):
            delta = event.get("delta")
            if isinstance(delta, dict):
                self._grow(index, delta)

    def _begin(self, message: dict[str, Any], index: int, block: dict[str, Any]) -> None:
        self._blocks[index] = dict(block)
        server = block.get("to")
        if block.get("type") == "fallback" and isinstance(server, dict) and isinstance(server.get("model"), str):
            message["model"] = server["model"]  # another model went on; the whole message names that one

    def _end(self, message: dict[str, Any], event: dict[str, Any]) -> None:
        delta, usage = event.get("delta"), event.get("usage")
        message.update(delta if isinstance(delta, dict) else {})
        if isinstance(usage, dict):
            known = message.get("usage")
            message["usage"] = _over(known if isinstance(known, dict) else {}, usage)
        message.update({key: value for key, value in event.items() if key not in _EVENT_MEMBERS and value is not None})

    def _grow(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks.setdefault(index, {})
        kind = delta.get("type")
        if kind == "input_json_delta":
            self._inputs[index] = self._inputs.get(index, "") + str(delta.get("partial_json") or "")
        elif kind in ("text_delta", "thinking_delta"):
            member = kind.removesuffix("_delta")
            block[member] = str(block.get(member) or "") + str(delta.get(member) or "")
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]
        else:
            block.update({key: value for key, value in delta.items() if key != "type"})

    def finished(self) -> dict[str, Any]:
        for index, text in self._inputs.items():
            if text:
                self._blocks[index]["input"] = _spelled(text)
        opening = (self.message or {}).get("content")
        content = list(opening) if isinstance(opening, list) else []
        return {**(self.message or {}), "content": [*content, *(self._blocks[at] for at in sorted(self._blocks))]}


def _over(known: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`known` with what `new` says; a null there says nothing about a member that is known."""
    return {**known, **{key: value for key, value in new.items() if value is not None or key not in known}}


def _spelled(text: str) -> object:
    """The object that the joined parts of a tool's input spell, or their exact text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return text
    return value if isinstance(value, dict) else text


def stream_of(message: object, framing: str) -> Iterable[bytes]:
    """The events that amount to `message`, for a recorded answer without wire data or an overridden one."""
    if not isinstance(message, Mapping):
        values = message if isinstance(message, (list, tuple)) else (message,)
        return stream_bytes(values, framing, named=True)
    return stream_bytes(_events(message), framing, named=True)


def _events(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    ending = {"stop_reason": message.get("stop_reason"), "stop_sequence": message.get("stop_sequence")}
    if "stop_details" in message:
        ending["stop_details"] = message["stop_details"]
    usage = message.get("usage")
    counts = usage if isinstance(usage, Mapping) else {"output_tokens": 0}  # SDKs read this count of every stream
    told = {key: value for key, value in message.items() if key != "error"}
    opening = {**told, "content": [], "usage": counts, **dict.fromkeys(ending)}
    yield {"type": "message_start", "message": opening}
    content = message.get("content")
    for index, block in enumerate(objects(content)):
        start, deltas = _taken_apart(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ending, "usage": counts}
    yield {"type": "error", "error": message["error"]} if message.get("error") else {"type": "message_stop"}


def _taken_apart(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block as its start and the deltas that make it whole again."""
    start, deltas = dict(block), []
    for member in ("text", "thinking"):
        if block.get("type") == member and isinstance(block.get(member), str) and block[member]:
            start[member] = ""
            deltas.append({"type": f"{member}_delta", member: block[member]})
    if block.get("type") == "thinking" and isinstance(block.get("signature"), str):
        start["signature"] = ""
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    given = block.get("input")
    if isinstance(given, (dict, str)) and given:
        start["input"] = {}
        text = given if isinstance(given, str) else json.dumps(given)
        deltas.append({"type": "input_json_delta", "partial_json": text})
    return start, deltas
