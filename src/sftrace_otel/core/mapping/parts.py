# SPDX-License-Identifier: Apache-2.0
"""Bodies of LLM services as the messages of the GenAI conventions: `[{"role", "parts": [{"type", …}]}]`.

Decision: for spans alone, where `OTEL_SFTRACE_CONTENT=span` asks for content; events keep the service's own body. What
has no part of its own is kept as a part with its own `type`, as the conventions allow. Rejected: one reader for each
service, since their messages differ in a few names only.

Source: `facts/otel.md` §3.2 (input and output messages, system instructions, tool definitions).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from sftrace_otel.core.mapping.wire import objects

__all__ = ["request_content", "response_content"]

_Part = dict[str, Any]
_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text"})


def request_content(body: object) -> dict[str, list[Any]]:
    """Span attributes with the content of a request's body: messages, system instructions, tool definitions."""
    if not isinstance(body, Mapping):
        return {}
    found: dict[str, list[Any]] = {}
    for member in ("messages", "input", "contents", "prompt"):
        if member in body:
            found["gen_ai.input.messages"] = list(_messages(body[member], "user"))
            break
    for member in ("system", "instructions", "systemInstruction", "system_instruction"):
        if body.get(member):
            found["gen_ai.system_instructions"] = list(_parts(_inside(body[member])))
            break
    if isinstance(body.get("tools"), list):
        found["gen_ai.tool.definitions"] = [definition for tool in body["tools"] for definition in _definitions(tool)]
    return found


def response_content(body: object) -> dict[str, list[Any]]:
    """The same of an answer's body: its messages."""
    if not isinstance(body, Mapping):
        return {}
    for member in ("choices", "candidates"):
        if isinstance(body.get(member), list):
            return {"gen_ai.output.messages": [_choice(one) for one in objects(body[member])]}
    for member in ("output", "content", "message", "response"):
        if member in body:
            messages = list(_messages(body[member], "assistant"))
            reason = body.get("stop_reason") or body.get("done_reason")
            return {"gen_ai.output.messages": [_ended(message, reason) for message in _joined(messages)]}
    return {}


def _choice(choice: Mapping[str, Any]) -> _Part:
    said = choice.get("message", choice.get("content", choice.get("text")))
    message = _joined(list(_messages(said, "assistant")))
    reason = choice.get("finish_reason") or choice.get("finishReason")
    return _ended(message[0] if message else {"role": "assistant", "parts": []}, reason)


def _ended(message: _Part, reason: object) -> _Part:
    return {**message, "finish_reason": str(reason)} if reason else message


def _joined(messages: list[_Part]) -> list[_Part]:
    """One message of all the parts that one answer says in one role."""
    joined: list[_Part] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1]["parts"] += message["parts"]
        else:
            joined.append({**message, "parts": list(message["parts"])})
    return joined


def _messages(value: object, role: str) -> Iterator[_Part]:
    if isinstance(value, str):
        yield {"role": role, "parts": [_text(value)]}
        return
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            yield {"role": role, "parts": [_text(item)]}
        elif isinstance(item, Mapping):
            yield {"role": _role(item, role), "parts": list(_of_message(item))}


def _role(item: Mapping[str, Any], otherwise: str) -> str:
    """Who says it; of the items of a response that have no role, calls and reasoning are the model's."""
    own, kind = item.get("role"), str(item.get("type", ""))
    if isinstance(own, str) and own:
        return "assistant" if own == "model" else own
    if kind.endswith("_call_output"):
        return "tool"
    return "assistant" if kind == "reasoning" or kind.endswith("_call") else otherwise


def _of_message(item: Mapping[str, Any]) -> Iterator[_Part]:
    if item.get("role") == "tool":
        yield _response(item.get("tool_call_id"), item.get("content"))
        return
    inside = _inside(item)
    yield from _parts([item] if inside is item else inside)
    for call in objects(item.get("tool_calls")):
        function = call.get("function")
        named = function if isinstance(function, Mapping) else call
        yield _call(call.get("id"), named.get("name"), named.get("arguments"))


def _inside(item: object) -> object:
    """What a message holds; the item itself where it is a part, no message."""
    if isinstance(item, Mapping):
        for member in ("content", "parts", "text"):
            if member in item and item.get("type", "message") == "message":
                return item[member]
    return item


def _parts(value: object) -> Iterator[_Part]:
    if isinstance(value, str):
        yield _text(value)
    elif isinstance(value, Mapping):
        yield _part(value)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _parts(item)


def _part(item: Mapping[str, Any]) -> _Part:
    kind = item.get("type")
    if not isinstance(kind, str):  # of another shape: it names no kind
        kind = None
    if kind in _TEXTS or (kind is None and isinstance(item.get("text"), str)):
        return _text(item.get("text"))
    if kind in ("thinking", "reasoning"):
        summary = (part.get("content") for part in _parts(item.get("summary")))
        said = item.get("thinking") or "".join(text for text in summary if isinstance(text, str))
        return {"type": "reasoning", "content": said}
    if kind in ("tool_use", "function_call"):
        return _call(item.get("call_id") or item.get("id"), item.get("name"), item.get("input", item.get("arguments")))
    if kind in ("tool_result", "function_call_output"):
        return _response(item.get("tool_use_id") or item.get("call_id"), item.get("content", item.get("output")))
    if isinstance(item.get("functionCall"), Mapping):
        call = item["functionCall"]
        return _call(call.get("id"), call.get("name"), call.get("args"))
    if isinstance(item.get("functionResponse"), Mapping):
        answer = item["functionResponse"]
        return _response(answer.get("id") or answer.get("name"), answer.get("response"))
    if kind == "image_url":
        picture = item.get("image_url")
        url = picture.get("url") if isinstance(picture, Mapping) else picture
        return _picture(str(url))
    return {"type": "unknown", **item} if kind is None else dict(item)


def _picture(url: str) -> _Part:
    head, comma, data = url.partition(",")
    if head.startswith("data:") and head.endswith(";base64") and comma:
        return {"type": "blob", "modality": "image", "mime_type": head[5:-7], "content": data}
    return {"type": "uri", "modality": "image", "uri": url}


def _text(text: object) -> _Part:
    return {"type": "text", "content": text}


def _call(identifier: object, name: object, arguments: object) -> _Part:
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, RecursionError):
            pass
    return {"type": "tool_call", "id": identifier, "name": name, "arguments": arguments}


def _response(identifier: object, response: object) -> _Part:
    return {"type": "tool_call_response", "id": identifier, "response": response}


def _definitions(tool: object) -> Iterator[_Part]:
    if not isinstance(tool, Mapping):
        return
    if isinstance(tool.get("functionDeclarations"), list):
        for declared in objects(tool["functionDeclarations"]):
            yield {"type": "function", **declared}
        return
    function = tool.get("function")
    if isinstance(function, Mapping):
        yield {"type": "function", **function}
        return
    definition = {"type": "function", **tool}
    if "input_schema" in definition:
        definition["parameters"] = definition.pop("input_schema")
    yield definition
