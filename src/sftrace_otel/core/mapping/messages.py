# SPDX-License-Identifier: Apache-2.0
"""GenAI messages (role and parts) in the OpenAI form, in which `.sftrace` keeps LLM calls.

Source: GenAI semantic conventions, JSON schemas of `gen_ai.input.messages`, `gen_ai.output.messages`,
`gen_ai.system_instructions` and `gen_ai.tool.definitions` (development status, 2026-11). A part of an unknown type is
passed on unchanged. Rejected: keeping the parts form, since replay, diff and the reference tool read the OpenAI form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sftrace_otel.core.mapping.values import as_text, dump

__all__ = ["choices", "input_messages", "system_messages", "tool_call", "tools"]


def input_messages(value: object) -> list[dict[str, Any]]:
    """Chat messages from `gen_ai.input.messages` or from a list that is in the OpenAI form already.

    A message with tool results becomes one message of role `tool` for each. Text alone becomes one user message.
    """
    if isinstance(value, Mapping):
        value = value["messages"] if isinstance(value.get("messages"), list) else [value]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return []
    return [message for item in value for message in _message(item)]


def system_messages(value: object) -> list[dict[str, Any]]:
    """A system message from `gen_ai.system_instructions` (parts or text), or nothing."""
    if isinstance(value, str):
        return [{"role": "system", "content": value}] if value else []
    if not isinstance(value, list) or not value:
        return []
    return [{"role": "system", "content": _content([_content_part(part) for part in value])}]


def choices(value: object, finish_reasons: list[str] | None = None) -> list[dict[str, Any]]:
    """Choices of a chat completion from `gen_ai.output.messages`; `finish_reasons` fill in where a message has none."""
    reasons = finish_reasons or []
    rows = []
    for index, message in enumerate(_outputs(value)):
        reason = message.pop("finish_reason", None) or (reasons[index] if index < len(reasons) else None)
        rows.append({"index": index, "message": message, "finish_reason": _finish(reason)})
    return rows


def tools(value: object) -> list[Any]:
    """`tools` of a request from `gen_ai.tool.definitions` or a list in the OpenAI form."""
    if not isinstance(value, list):
        return []
    return [_tool(item) for item in value]


def tool_call(identifier: object, name: object, arguments: object) -> dict[str, Any]:
    """One entry of `tool_calls`; `arguments` become JSON text, as the OpenAI form has them."""
    call: dict[str, Any] = {"type": "function", "function": {"name": as_text(name), "arguments": dump(arguments)}}
    return {"id": str(identifier), **call} if identifier else call


def _outputs(value: object) -> Iterator[dict[str, Any]]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            yield {"role": "assistant", "content": item}
        elif isinstance(item, Mapping):
            known = "role" in item or "content" in item or "parts" in item or "tool_calls" in item
            messages = list(_message(item)) if known else [{"role": "assistant", "content": dump(item)}]
            if messages:
                yield {**messages[0], "finish_reason": item.get("finish_reason")}


def _message(item: object) -> Iterator[dict[str, Any]]:
    if isinstance(item, str):
        yield {"role": "user", "content": item}
        return
    if not isinstance(item, Mapping):
        return
    parts = item.get("parts")
    if not isinstance(parts, list):
        yield {key: value for key, value in item.items() if key != "finish_reason"}
        return
    yield from _from_parts(item, [part if isinstance(part, Mapping) else _text(part) for part in parts])


def _from_parts(item: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    content, calls = [], []
    for part in parts:
        kind = part.get("type")
        if kind == "tool_call":
            calls.append(tool_call(part.get("id"), part.get("name"), part.get("arguments", {})))
        elif kind == "tool_call_response":
            yield _tool_message(part)
        else:
            content.append(_content_part(part))
    if not content and not calls and any(part.get("type") == "tool_call_response" for part in parts):
        return
    message: dict[str, Any] = {"role": str(item.get("role") or "assistant"), "content": _content(content)}
    if item.get("name"):
        message["name"] = item["name"]
    if calls:
        message["tool_calls"] = calls
    yield message


def _tool_message(part: Mapping[str, Any]) -> dict[str, Any]:
    # The conventions renamed `result` to `response`; both are in the field.
    result = part["response"] if "response" in part else part.get("result", part.get("content"))
    message = {"role": "tool", "content": as_text(result)}
    return {**message, "tool_call_id": str(part["id"])} if part.get("id") else message


def _content(parts: list[Mapping[str, Any]]) -> Any:
    if not parts:
        return None
    if len(parts) == 1 and parts[0].get("type") == "text":
        return parts[0].get("text")
    return list(parts)


def _content_part(part: object) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        return {"type": "text", "text": as_text(part)}
    kind = part.get("type")
    if kind == "text" and "content" in part:
        return {"type": "text", "text": as_text(part["content"])}
    if kind == "uri" and part.get("modality", "image") == "image":
        return {"type": "image_url", "image_url": {"url": part.get("uri")}}
    if kind == "blob" and part.get("modality", "image") == "image":
        url = f"data:{part.get('mime_type') or 'application/octet-stream'};base64,{as_text(part.get('content'))}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "file" and "file_id" in part:
        return {"type": "file", "file": {"file_id": part["file_id"]}}
    return part


def _text(part: object) -> Mapping[str, Any]:
    return {"type": "text", "content": as_text(part)}


def _tool(item: object) -> Any:
    if not isinstance(item, Mapping) or "function" in item or item.get("type", "function") != "function":
        return item
    body = {key: value for key, value in item.items() if key != "type"}
    return {"type": "function", "function": body}


def _finish(reason: object) -> str | None:
    if reason is None:
        return None
    return "tool_calls" if reason in ("tool_call", "tool_calls") else str(reason)
