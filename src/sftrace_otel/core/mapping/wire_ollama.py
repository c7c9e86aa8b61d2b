# SPDX-License-Identifier: Apache-2.0
"""Ollama's own API on the wire: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`.

Decision: it streams unless the request says `"stream": false`, one JSON object a line. Texts are joined, lists of tool
calls and token probabilities go on, of all else the last line counts, as in the one object of an answer that was not
streamed.

Source: Ollama's API documentation (`docs/api.md` of its repository).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sftrace_otel.core.mapping.framing import stream_bytes, values_of
from sftrace_otel.core.mapping.wire import Endpoint, objects

__all__ = [
    "CHAT", "EMBED", "EMBEDDINGS", "GENERATE", "assemble", "request_attributes", "response_attributes",
    "stream_of", "tokens_of", "tool_answers",
]  # fmt: skip

CHAT = Endpoint("ollama.chat", "chat", "chat")
GENERATE = Endpoint("ollama.generate", "text_completion", "generate")
EMBED = Endpoint("ollama.embed", "embeddings", "embed")
EMBEDDINGS = Endpoint("ollama.embeddings", "embeddings", "embed")

_OPTIONS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "num_predict": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
_TEXTS = ("response", "thinking", "content")
_LISTS = ("tool_calls", "logprobs")


def request_attributes(body: Mapping[str, Any]) -> dict[str, Any]:
    """Span attributes of a request's parameters; no content."""
    found: dict[str, Any] = {}
    options = body.get("options")
    if isinstance(options, Mapping):
        for parameter, attribute in _OPTIONS.items():
            value = options.get(parameter)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[attribute] = value
        stop = options.get("stop")
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list) and stops and all(isinstance(item, str) for item in stops):
            found["gen_ai.request.stop_sequences"] = tuple(stops)
    if isinstance(body.get("dimensions"), int):
        found["gen_ai.embeddings.dimension.count"] = body["dimensions"]
    return found


def response_attributes(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Span attributes of an answer but for the token counts that every dialect has; no content."""
    found: dict[str, Any] = {}
    if isinstance(answer.get("model"), str):
        found["gen_ai.response.model"] = answer["model"]
    if isinstance(answer.get("done_reason"), str):
        found["gen_ai.response.finish_reasons"] = (answer["done_reason"],)
    return found


def tokens_of(answer: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """(input, output, total) tokens; no total is given."""
    return (_count(answer.get("prompt_eval_count")), _count(answer.get("eval_count")), None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def tool_answers(body: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(call id, tool name, content) of each tool result that a request sends back to the model.

    Where results carry no id, one is told from others by the conversation up to it, which later requests repeat; where
    they carry no name either, it is the name of the call that is next in turn.
    """
    so_far = hashlib.sha256()
    asked: list[tuple[object, str]] = []
    for message in objects(body.get("messages")):
        so_far.update(json.dumps(message, sort_keys=True, default=str).encode("utf-8", "replace"))
        for call in objects(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, Mapping):
                asked.append((call.get("id"), str(function.get("name"))))
        if message.get("role") == "tool":
            call_id = message.get("tool_call_id")
            known = call_id if isinstance(call_id, str) and call_id else so_far.hexdigest()
            yield known, _name_of(message, call_id, asked), message.get("content")


def _name_of(message: Mapping[str, Any], call_id: object, asked: list[tuple[object, str]]) -> str:
    """The name of the tool that a message answers for; its call is taken off `asked`."""
    named = message.get("tool_name") or message.get("name")
    for at, (own_id, name) in enumerate(asked):
        if own_id == call_id if call_id else name == named if named else True:
            del asked[at]
            return str(named or name)
    return str(named or call_id or "a tool")


# --- streams ----------------------------------------------------------------------------------------------------------


def assemble(data: bytes, framing: str) -> object:
    """The answer that a stream amounts to, as far as it went; the list of its values if it holds no answer.

    An error that the stream reports is its member `error`.
    """
    values = values_of(data, framing)
    chunks = [value for value in values if isinstance(value, dict)]
    if all("error" in chunk for chunk in chunks):
        return values or None
    whole: dict[str, Any] = {}
    for chunk in chunks:
        _grow(whole, chunk)
    return whole


def _grow(into: dict[str, Any], chunk: Mapping[str, Any]) -> None:
    for key, value in chunk.items():
        known = into.get(key)
        if key == "message" and isinstance(value, Mapping):
            into[key] = dict(known) if isinstance(known, dict) else {}
            _grow(into[key], value)
        elif key in _TEXTS and isinstance(value, str) and isinstance(known, str):
            into[key] = known + value
        elif key in _LISTS and isinstance(value, list) and isinstance(known, list):
            into[key] = [*known, *value]
        elif value is not None or key not in into:
            into[key] = value


def stream_of(answer: object, framing: str) -> Iterable[bytes]:
    """The lines that amount to `answer`: what was said, then the counts."""
    if isinstance(answer, Mapping):
        return stream_bytes(_lines(answer), framing)
    values = answer if isinstance(answer, (list, tuple)) else (answer,)
    return stream_bytes(values, framing)


def _lines(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    said = {key: answer[key] for key in ("message", *_TEXTS, *_LISTS) if key in answer}
    if said:
        yield {**{key: answer[key] for key in ("model", "created_at") if key in answer}, **said, "done": False}
    last = {key: _silent(key, value) for key, value in answer.items() if key not in _LISTS and key != "error"}
    if last:
        yield last
    if "error" in answer:
        yield {"error": answer["error"]}


def _silent(key: str, value: Any) -> Any:
    """What the last line has in place of a text that was said before."""
    if key == "message" and isinstance(value, Mapping):
        return {name: _silent(name, item) for name, item in value.items() if name not in _LISTS}
    return "" if key in _TEXTS and isinstance(value, str) else value
