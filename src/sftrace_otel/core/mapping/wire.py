# SPDX-License-Identifier: Apache-2.0
"""LLM traffic on the wire in OpenAI's form: what request and answer say, streams put together and taken apart.

Decision: the request body and the response body are the truth; attributes of spans and fields of events are read from
them here, for every client alike. A stream becomes the completion that the same request without `stream` would have
given, so that events of streamed and plain calls compare. Rejected: reading the SDK's typed objects, which differ
between its versions and lack what was sent beside the typed parameters.

Sources: OpenAI's REST API (chat completions, completions, embeddings, responses); GenAI semantic conventions
(`facts/otel.md` §3.2), whose names are written out here because their package has moved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from sftrace_otel.core.alike import Template

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "EMBEDDINGS",
    "FIM",
    "RESPONSES",
    "Endpoint",
    "assemble",
    "complete_stream",
    "failure_of",
    "is_mapping",
    "objects",
    "provider_of",
    "request_attributes",
    "response_attributes",
    "sse_events",
    "stream_of",
    "tokens_of",
    "tool_answers",
    "tool_calls",
]


class Endpoint:
    """An LLM endpoint: the SDK's method path and the GenAI operation."""

    __slots__ = ("api", "method", "operation")

    def __init__(self, method: str, operation: str, api: str) -> None:
        self.method = method
        self.operation = operation
        self.api = api


CHAT = Endpoint("chat.completions.create", "chat", "chat_completions")
RESPONSES = Endpoint("responses.create", "chat", "responses")
EMBEDDINGS = Endpoint("embeddings.create", "embeddings", "embeddings")
COMPLETIONS = Endpoint("completions.create", "text_completion", "completions")
FIM = Endpoint("fim.complete", "text_completion", "fim")

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
    if host.startswith("bedrock") and host.endswith((".amazonaws.com", ".api.aws")):
        return "aws.bedrock"
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


_OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}


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
    if found.get("openai.request.service_tier") == "auto":
        del found["openai.request.service_tier"]
    effort = _at(body, "reasoning", "effort") or body.get("reasoning_effort")
    if isinstance(effort, str):
        found["gen_ai.request.reasoning.level"] = effort
    conversation = _at(body, "conversation", "id") or body.get("conversation")
    if isinstance(conversation, str):
        found["gen_ai.conversation.id"] = conversation
    output = _OUTPUT_TYPES.get(str(_at(body, "response_format", "type") or _at(body, "text", "format", "type")))
    if output is not None:
        found["gen_ai.output.type"] = output
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
    if not is_mapping(body):
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
        for choice in objects(body.get("choices"))
        if isinstance(choice.get("finish_reason"), str)
    ] or _finish_of_response(body)
    if reasons:
        found["gen_ai.response.finish_reasons"] = tuple(reasons)
    prompt, completion, _ = tokens_of(body)
    if prompt is not None:
        found["gen_ai.usage.input_tokens"] = prompt
    if completion is not None:
        found["gen_ai.usage.output_tokens"] = completion
    usage = body.get("usage")
    if is_mapping(usage):
        for details, member, attribute in (
            ("prompt_tokens_details", "cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
            ("input_tokens_details", "cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
            ("completion_tokens_details", "reasoning_tokens", "gen_ai.usage.reasoning.output_tokens"),
            ("output_tokens_details", "reasoning_tokens", "gen_ai.usage.reasoning.output_tokens"),
        ):
            part = usage.get(details)
            if is_mapping(part) and _count(part.get(member)) is not None:
                found[attribute] = part[member]
    return found


_INCOMPLETE = {"max_output_tokens": "length", "content_filter": "content_filter"}


def _finish_of_response(body: Mapping[str, Any]) -> list[str]:
    """Why an answer of the Responses API ended, in the words of chat completions; nothing while it is under way."""
    status = body.get("status") if body.get("object") == "response" else None
    if status == "completed":
        calls = any(str(item.get("type")) in _CALLS for item in objects(body.get("output")))
        return ["tool_calls" if calls else "stop"]
    if status == "incomplete":
        reason = _at(body, "incomplete_details", "reason")
        return [_INCOMPLETE.get(str(reason), str(reason or status))]
    return ["error"] if status == "failed" else []


_CALLS = frozenset({"function_call", "custom_tool_call"})


def failure_of(body: object) -> tuple[str, str] | None:
    """(type, message) where an answer with a good HTTP status says that the model failed; None where it does not.

    That is an error event in a stream, or a response whose status is `failed`. The type is the provider's code for it.
    """
    for part in objects(body):
        if part.get("error"):
            return _failure(part["error"])
        if part.get("type") == "error":
            return _failure(part)
    return None


def _failure(error: object) -> tuple[str, str]:
    if not is_mapping(error):
        return ("error", str(error))
    kinds = (error.get("status"), error.get("code"), error.get("type"))
    kind = next((str(kind) for kind in kinds if isinstance(kind, (str, int)) and kind), "error")
    return (kind, str(error.get("message") or kind))


def tokens_of(body: object) -> tuple[int | None, int | None, int | None]:
    """(prompt, completion, total) tokens of an answer; None where it does not say."""
    usage = body.get("usage") if is_mapping(body) else None
    if not is_mapping(usage):
        return (None, None, None)
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    completion = _count(usage.get("completion_tokens", usage.get("output_tokens")))
    total = _count(usage.get("total_tokens"))
    if total is None and prompt is not None and completion is not None:
        total = prompt + completion
    return (prompt, completion, total)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _at(body: object, *path: str) -> Any:
    """The member of a member of `body`, None where it is not there."""
    for member in path:
        body = body.get(member) if is_mapping(body) else None
    return body


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether `value` is an object; to ask `Mapping` of what nearly always is a dict takes longer."""
    return type(value) is dict or isinstance(value, Mapping)


def objects(value: object) -> Sequence[Mapping[str, Any]]:
    """The objects in a list; an object by itself is the one that there is."""
    if isinstance(value, (list, tuple)):
        return [item for item in value if is_mapping(item)]
    return [value] if value is not None and is_mapping(value) else ()


def tool_answers(body: object) -> Iterator[tuple[str, str | None, object]]:
    """(call id, function name, content) of each tool result that a request sends back to the model.

    The name is None where only an earlier answer of the service said it. A result without an id (functions, before
    there were tools) is told from others by the conversation up to it, which later requests repeat.
    """
    if not is_mapping(body):
        return
    names: dict[str, str] = {}
    so_far = hashlib.sha256()
    for message in objects(body.get("messages")):
        for call in objects(message.get("tool_calls")):
            for kind in ("function", "custom"):
                if is_mapping(call.get(kind)):
                    names[str(call.get("id"))] = str(call[kind].get("name"))
        role = message.get("role")
        if role == "tool" and "tool_call_id" in message:
            call_id = str(message["tool_call_id"])
            yield call_id, names.get(call_id, call_id), message.get("content")
        elif role == "function":
            so_far.update(json.dumps(message, sort_keys=True, default=str).encode("utf-8", "replace"))
            yield so_far.hexdigest(), str(message.get("name")), message.get("content")
    for item in objects(body.get("input")):
        kind = str(item.get("type"))
        call_id = str(item.get("call_id"))
        if kind in _LOCAL_CALLS:
            names[call_id] = _name_of(item)
        elif kind.removesuffix("_output") in _LOCAL_CALLS:
            yield call_id, names.get(call_id) or _LOCAL_CALLS[kind.removesuffix("_output")], item.get("output")


_LOCAL_CALLS: dict[str, str | None] = {
    "function_call": None, "custom_tool_call": None, "computer_call": "computer", "local_shell_call": "local_shell",
    "shell_call": "shell", "apply_patch_call": "apply_patch",
}  # fmt: skip
"""Types of items that ask the program to run something, not the service; with the name where the item has none."""


def tool_calls(answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(call id, function name) of each call in an answer of the responses API that the program is to make."""
    for item in objects(answer.get("output")):
        if str(item.get("type")) in _LOCAL_CALLS:
            yield str(item.get("call_id")), _name_of(item)


def _name_of(item: Mapping[str, Any]) -> str:
    return str(item.get("name") or _LOCAL_CALLS.get(str(item.get("type"))) or item.get("call_id"))


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


_LAST = frozenset({"response.completed", "response.incomplete", "response.failed", "error", "message_stop"})
"""Types of events after which a stream says nothing more."""


def complete_stream(data: bytes) -> bool:
    """True if the stream says that it is over, although the connection may not have been read to its end."""
    if not data.endswith((b"\n\n", b"\r\n\r\n")):
        return False
    end = len(data) - 2
    while end and data[end - 1] in b"\r\n":
        end -= 1
    start = max(data.rfind(b"\n\n", 0, end), data.rfind(b"\r\n\r\n", 0, end))
    for _, text in sse_events(data[start + 1 :]):
        if text.strip() == "[DONE]":
            return True
        event = _decoded(text)
        if isinstance(event, dict) and (str(event.get("type")) in _LAST or event.get("error")):
            return True
    return False


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text


def assemble(data: bytes) -> object:
    """The completion that a stream amounts to, as far as it came; of another form, the list of its events' data.

    An error that the stream reports is its member `error`.
    """
    chunks = _chunks(data)
    if not chunks:
        return None
    objects = [chunk for chunk in chunks if isinstance(chunk, dict)]
    if any(isinstance(chunk.get("response"), dict) and "type" in chunk for chunk in objects):
        return _response(objects)
    if any("choices" in chunk for chunk in objects):
        return _completion(objects)
    return chunks


def _chunks(data: bytes) -> list[Any]:
    """What the events of a stream hold; of chat chunks that are alike but for their text, one with all of it."""
    chunks: list[Any] = []
    template: Template | None = None
    raw: list[str] = []
    texts: list[str] = []
    templates = 0
    for _, text in sse_events(data):
        read = template.read(text) if template is not None else None
        if read is not None:
            raw.append(read[0])
            texts.append(text)
            continue
        if raw:
            chunks += _joined(template, raw, texts)
            raw, texts = [], []
        if text.strip() != "[DONE]":
            chunk = _decoded(text)
            chunks.append(chunk)
            template = _template(text, chunk) if templates < _MANY_TEMPLATES else None
            templates += template is not None
    return chunks + _joined(template, raw, texts) if raw else chunks


_MANY_TEMPLATES = 16
_PLAIN_CHOICE = frozenset({"index", "delta", "finish_reason", "native_finish_reason", "logprobs"})


def _template(text: str, chunk: Any) -> Template | None:
    """The template of a chat chunk that continues one text and says nothing else; None for any other event."""
    choices = chunk.get("choices") if type(chunk) is dict else None
    if type(choices) is not list or len(choices) != 1 or type(choices[0]) is not dict:
        return None
    delta = choices[0].get("delta")
    if type(delta) is not dict or not choices[0].keys() <= _PLAIN_CHOICE or choices[0].get("logprobs") is not None:
        return None
    if any(value is not None and type(value) is not str for value in delta.values()):
        return None
    said = _said(delta)
    if len(said) != 1:
        return None
    return Template.of(text, chunk, ("choices", 0, "delta", said[0]), delta[said[0]])


def _said(delta: Mapping[str, Any]) -> list[str]:
    """The members of a delta that continue a text."""
    return [key for key, value in delta.items() if type(value) is str and key not in _NAMES]


def _joined(template: Template | None, raw: list[str], texts: list[str]) -> list[Any]:
    """One chunk with all that chunks of a template say; where that cannot be read, each by itself."""
    assert template is not None and isinstance(template.value, dict)
    try:
        spelled = '","'.join(raw)
        said = msgspec.json.decode(f'["{spelled}"]')
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return [_decoded(text) for text in texts]
    value: dict[str, Any] = template.value
    choice = value["choices"][0]
    delta = {**choice["delta"], _said(choice["delta"])[0]: "".join(said)}
    return [{**value, "choices": [{**choice, "delta": delta}]}]


def _completion(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Chat or text completion chunks as one completion."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for key, value in chunk.items():
            if key not in ("choices", "obfuscation") and (value is not None or key not in whole):
                whole[key] = value
        for choice in objects(chunk.get("choices")):
            _add_choice(choices.setdefault(_index(choice), {}), choice)
    chat = str(whole.get("object", "")).startswith("chat")
    if chat:
        whole["object"] = "chat.completion"
    whole["choices"] = [_finished(index, choices[index], chat) for index in sorted(choices)]
    return whole


def _index(value: Mapping[str, Any]) -> int:
    index = value.get("index")
    return index if isinstance(index, int) else 0


def _add_choice(into: dict[str, Any], choice: Mapping[str, Any]) -> None:
    for key, value in choice.items():
        if key == "delta" and is_mapping(value):
            _add(into.setdefault("message", {}), value)
        elif key in ("text", "logprobs"):
            _add(into, {key: value})
        elif value is not None or key not in into:
            into[key] = value


_NAMES = frozenset({"id", "type", "name", "role", "object", "status", "format", "index"})
"""Members of a delta that name something: said again, they are said anew, not continued."""


def _add(into: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Continue a message by a delta: texts and lists grow, objects grow within, all else is replaced."""
    for key, value in delta.items():
        known = into.get(key)
        if key == "tool_calls" and isinstance(value, list):
            into[key] = known if isinstance(known, list) else []
            for call in objects(value):
                _add(_tool_call(into[key], call), call)
        elif value is None:
            into.setdefault(key, None)
        elif is_mapping(value):
            into[key] = known if isinstance(known, dict) else {}
            _add(into[key], value)
        elif key in _NAMES:
            into[key] = value if value != "" else known or value
        elif type(known) is type(value) is str:
            into[key] = known + value
        elif type(known) is type(value) is list:
            known.extend(value)
        else:
            into[key] = value


def _tool_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> dict[str, Any]:
    """The call that `part` continues: the one of its index, but not under another id; without an index the last."""
    found = next((call for call in reversed(calls) if _continues(part, call)), None)
    if found is None:
        found = {}
        calls.append(found)
    return found


def _continues(part: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    index, name = part.get("index"), part.get("id")
    return index in (None, call.get("index")) and name in (None, "", call.get("id", name))


def _finished(index: int, choice: dict[str, Any], chat: bool) -> dict[str, Any]:
    choice = {**choice, "index": index}
    choice.setdefault("finish_reason", None)
    if chat:
        message = {"role": "assistant", "content": None, **choice.get("message", {})}
        if isinstance(message.get("tool_calls"), list):
            calls = sorted(message["tool_calls"], key=_index)
            message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in calls]
        choice["message"] = message
    return choice


_GROWING = {
    "response.output_text.delta": ("content", "content_index", "text"),
    "response.refusal.delta": ("content", "content_index", "refusal"),
    "response.reasoning_text.delta": ("content", "content_index", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_index", "text"),
}
"""Deltas of the Responses API that continue a part: the item's list, the event's member for the place, the text."""


def _response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Events of the Responses API as one response: what its last event holds, else as far as it came."""
    whole: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, item = event.get("type"), event.get("item")
        if isinstance(event.get("response"), dict):
            whole = event["response"]
            if str(kind) in _LAST:
                return whole
        elif kind == "error":
            whole = {**whole, "error": event.get("error") or _without(event, "type", "sequence_number")}
        elif isinstance(item, dict):
            items[_place(event, "output_index")] = item
        else:
            _continue(items.setdefault(_place(event, "output_index"), {}), str(kind), event)
    if items:
        whole = {**whole, "output": [items[at] for at in sorted(items) if items[at]]}
    return whole


def _continue(item: dict[str, Any], kind: str, event: Mapping[str, Any]) -> None:
    """Let an item of an unfinished response grow by one event."""
    delta = event.get("delta")
    if kind in _GROWING and isinstance(delta, str):
        member, place, text = _GROWING[kind]
        part = _part(item, member, _place(event, place))
        part[text] = str(part.get(text) or "") + delta
    elif kind in ("response.content_part.added", "response.content_part.done"):
        _part(item, "content", _place(event, "content_index")).update(event.get("part") or {})
    elif kind in ("response.reasoning_summary_part.added", "response.reasoning_summary_part.done"):
        _part(item, "summary", _place(event, "summary_index")).update(event.get("part") or {})
    elif kind == "response.function_call_arguments.delta" and isinstance(delta, str):
        item["arguments"] = str(item.get("arguments") or "") + delta
    elif kind == "response.custom_tool_call_input.delta" and isinstance(delta, str):
        item["input"] = str(item.get("input") or "") + delta


def _place(event: Mapping[str, Any], member: str) -> int:
    place = event.get(member)
    return place if isinstance(place, int) and 0 <= place < 10_000 else 0


def _part(item: dict[str, Any], member: str, at: int) -> dict[str, Any]:
    parts = item.setdefault(member, [])
    if not isinstance(parts, list):
        return {}
    parts.extend({} for _ in range(at + 1 - len(parts)))
    return parts[at] if isinstance(parts[at], dict) else {}


def _without(value: Mapping[str, Any], *members: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in members}


def stream_of(method: str, completion: object) -> Iterable[bytes]:
    """Server-sent events that amount to `completion`, for a recorded answer without wire data or an overridden one."""
    if method == "responses.create" and is_mapping(completion):
        yield from _response_events(completion)
        return
    if is_mapping(completion) and "choices" in completion:
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
    for choice in objects(completion.get("choices")):
        index = choice.get("index", 0)
        if not chat:
            yield {**base, "choices": [dict(choice)]}
            continue
        message = choice.get("message")
        delta = dict(message) if is_mapping(message) else {}
        if isinstance(delta.get("tool_calls"), (list, tuple)):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(objects(delta["tool_calls"]))]
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
    for at, item in enumerate(objects(response.get("output"))):
        yield event("response.output_item.added", output_index=at, item={**item, **_emptied(item)})
        for part_at, part in enumerate(objects(item.get("content"))):
            place = {"item_id": item.get("id"), "output_index": at, "content_index": part_at}
            if part.get("type") == "refusal":
                yield event("response.content_part.added", **place, part={**part, "refusal": ""})
                yield event("response.refusal.delta", **place, delta=part.get("refusal", ""))
                yield event("response.refusal.done", **place, refusal=part.get("refusal", ""))
                yield event("response.content_part.done", **place, part=dict(part))
            elif part.get("type") == "output_text":
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
    status = response.get("status")
    last = f"response.{status}" if status in ("failed", "incomplete") else "response.completed"
    yield event(last, response=dict(response))


def _emptied(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call":
        return {"arguments": ""}
    return {"content": []} if "content" in item else {}
