# SPDX-License-Identifier: Apache-2.0
"""Google's Gemini API on the wire, at `generativelanguage.googleapis.com` and on Vertex AI.

Decision: the model and whether the answer streams are in the URL, so the event's input carries them beside the body.
Text parts that went on from one chunk to the next are one part, as in an answer that was not streamed; parts that one
chunk sent apart stay apart.

Sources: Gemini API reference, `models.generateContent`, `streamGenerateContent`, `embedContent`, `batchEmbedContents`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sftrace_otel.core.mapping.framing import stream_bytes, values_of
from sftrace_otel.core.mapping.wire import Endpoint, objects

__all__ = [
    "BATCH_EMBED", "EMBED", "GENERATE", "STREAM", "assemble", "request_attributes", "response_attributes", "stream_of",
    "tokens_of", "tool_answers",
]  # fmt: skip

GENERATE = Endpoint("models.generate_content", "generate_content", "generate_content")
STREAM = Endpoint("models.generate_content_stream", "generate_content", "generate_content")
EMBED = Endpoint("models.embed_content", "embeddings", "embed_content")
BATCH_EMBED = Endpoint("models.batch_embed_contents", "embeddings", "embed_content")

_PARAMETERS = {
    "temperature": "gen_ai.request.temperature",
    "topP": "gen_ai.request.top_p",
    "topK": "gen_ai.request.top_k",
    "maxOutputTokens": "gen_ai.request.max_tokens",
    "frequencyPenalty": "gen_ai.request.frequency_penalty",
    "presencePenalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "candidateCount": "gen_ai.request.choice.count",
}
_JOINED = ("citationMetadata", "logprobsResult")
"""Members of a candidate whose lists go on from chunk to chunk."""


def _member(body: Mapping[str, Any], name: str) -> Any:
    """A member by its name in camel case, or in snake case, which the service takes as well."""
    if name in body:
        return body[name]
    return body.get("".join(f"_{char.lower()}" if char.isupper() else char for char in name))


def request_attributes(body: Mapping[str, Any]) -> dict[str, Any]:
    """Span attributes of a request's parameters; no content."""
    found: dict[str, Any] = {}
    config = _member(body, "generationConfig")
    if isinstance(config, Mapping):
        for parameter, attribute in _PARAMETERS.items():
            value = _member(config, parameter)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[attribute] = value
        stops = _member(config, "stopSequences")
        if isinstance(stops, list) and stops and all(isinstance(item, str) for item in stops):
            found["gen_ai.request.stop_sequences"] = tuple(stops)
        thinking = _member(config, "thinkingConfig")
        level = _member(thinking, "thinkingLevel") if isinstance(thinking, Mapping) else None
        if isinstance(level, str):
            found["gen_ai.request.reasoning.level"] = level
    size = _member(body, "outputDimensionality")
    if isinstance(size, int) and not isinstance(size, bool):
        found["gen_ai.embeddings.dimension.count"] = size
    return found


def response_attributes(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Span attributes of an answer but for the token counts that every dialect has; no content."""
    found: dict[str, Any] = {}
    if isinstance(answer.get("responseId"), str):
        found["gen_ai.response.id"] = answer["responseId"]
    if isinstance(answer.get("modelVersion"), str):
        found["gen_ai.response.model"] = answer["modelVersion"]
    reasons = [
        one["finishReason"] for one in objects(answer.get("candidates")) if isinstance(one.get("finishReason"), str)
    ]
    if reasons:
        found["gen_ai.response.finish_reasons"] = tuple(reasons)
    usage = answer.get("usageMetadata")
    if isinstance(usage, Mapping):
        if _count(usage.get("cachedContentTokenCount")):
            found["gen_ai.usage.cache_read.input_tokens"] = usage["cachedContentTokenCount"]
        if _count(usage.get("thoughtsTokenCount")):
            found["gen_ai.usage.reasoning.output_tokens"] = usage["thoughtsTokenCount"]
    return found


def tokens_of(answer: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """(input, output, total) tokens: those of tool results count as input, those of thoughts as output."""
    usage = answer.get("usageMetadata")
    if not isinstance(usage, Mapping):
        return (None, None, None)
    return (
        _sum(usage, "promptTokenCount", "toolUsePromptTokenCount"),
        _sum(usage, "candidatesTokenCount", "thoughtsTokenCount"),
        _sum(usage, "totalTokenCount"),
    )


def _sum(usage: Mapping[str, Any], *members: str) -> int | None:
    known = [_count(usage[member]) for member in members if member in usage]
    return sum(known) if known else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def tool_answers(body: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(call id, function name, response) of each function result that a request sends back to the model.

    A result without an id is told from others by the conversation up to it, which later requests repeat.
    """
    so_far = hashlib.sha256()
    for content in objects(body.get("contents")):
        for part in objects(content.get("parts")):
            so_far.update(json.dumps(part, sort_keys=True, default=str).encode("utf-8", "replace"))
            answer = _member(part, "functionResponse")
            if isinstance(answer, Mapping):
                call_id = answer.get("id")
                known = call_id if isinstance(call_id, str) and call_id else so_far.hexdigest()
                yield known, str(answer.get("name")), _unwrapped(answer.get("response"))


def _unwrapped(response: object) -> object:
    """What the function gave: a response must be an object, so callers put other values under one of two names."""
    if isinstance(response, Mapping) and len(response) == 1:
        (name, value) = next(iter(response.items()))
        return value if name in ("result", "output") else response
    return response


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
    candidates: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        whole.update({key: value for key, value in chunk.items() if value is not None or key not in whole})
        for candidate in objects(chunk.get("candidates")):
            index = candidate.get("index")
            _grow(candidates.setdefault(index if isinstance(index, int) else 0, {}), candidate)
    if candidates:
        whole["candidates"] = [candidates[index] for index in sorted(candidates)]
    return whole


def _grow(into: dict[str, Any], candidate: Mapping[str, Any]) -> None:
    for key, value in candidate.items():
        known = into.get(key)
        if key == "content" and isinstance(value, Mapping) and isinstance(known, dict):
            into[key] = _longer(known, value)
        elif key in _JOINED and isinstance(value, Mapping) and isinstance(known, dict):
            into[key] = {**known, **{name: _extended(known.get(name), item) for name, item in value.items()}}
        elif value is not None or key not in into:
            into[key] = value


def _extended(known: object, more: object) -> object:
    return [*known, *more] if isinstance(known, list) and isinstance(more, list) else more


def _longer(known: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A content with the parts of the next chunk: text that goes on is joined."""
    have, new = known.get("parts"), more.get("parts")
    if not isinstance(new, list):
        return {**known, **{key: value for key, value in more.items() if key != "parts"}}
    parts = list(have) if isinstance(have, list) else []
    rest = list(new)
    if parts and rest and _goes_on(parts[-1], rest[0]):
        parts[-1] = {**parts[-1], **rest[0], "text": parts[-1]["text"] + rest[0]["text"]}
        rest = rest[1:]
    return {**known, **more, "parts": [*parts, *rest]}


def _goes_on(last: object, first: object) -> bool:
    """Whether a text part continues another: both are text, both thought or neither, and none is signed off yet."""
    if not isinstance(last, Mapping) or not isinstance(first, Mapping):
        return False
    if not isinstance(last.get("text"), str) or not isinstance(first.get("text"), str):
        return False
    return "thoughtSignature" not in last and bool(last.get("thought")) == bool(first.get("thought"))


def stream_of(answer: object, framing: str) -> Iterable[bytes]:
    """A stream that amounts to `answer`: one chunk, which is a whole answer here, and the error that it ended with."""
    if isinstance(answer, Mapping) and "error" in answer and len(answer) > 1:
        answer = [{key: answer[key] for key in answer if key != "error"}, {"error": answer["error"]}]
    return stream_bytes(answer if isinstance(answer, (list, tuple)) else (answer,), framing)
