# SPDX-License-Identifier: Apache-2.0
"""Which LLM service a request on the wire speaks to, and how that service's requests, answers and streams are read.

Decision: one table of routes. A request that a bare HTTP client sends is an LLM call if its path ends as a route's, its
body has that route's shape and a model is named; anything else stays a plain HTTP call. An SDK's boundary asks by path
alone: there the body is the SDK's own. A recorded call finds its dialect by its method. Rejected: deciding by host
(gateways and local servers have any), and by path alone (`/api/chat` is a path of many web applications).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from sftrace_otel.core.mapping import framing as framings
from sftrace_otel.core.mapping import wire, wire_anthropic, wire_gemini, wire_ollama
from sftrace_otel.core.mapping.wire import Endpoint, is_mapping

__all__ = [
    "Answered", "Inference", "answered", "ask", "assemble", "complete_stream", "endpoint_of", "error_body",
    "framing_of", "is_at", "recognised", "request_attributes", "results_of", "stream_of", "tool_answers", "tool_calls",
]  # fmt: skip

_Tokens = tuple[int | None, int | None, int | None]
_Shape = Callable[[Mapping[str, Any], Mapping[str, str]], bool]


class _Dialect(NamedTuple):
    """How one service's bodies are read.

    Attributes:
        parameters: Span attributes of the parameters in a request's body.
        attributes: Span attributes of an answer's body.
        tokens: (input, output, total) tokens of an answer's body.
        answers: Tool results that a request's body sends back to the model, as (call id, name, content); no name where
            the body does not say it.
        assemble: (stream, framing) → the answer that it amounts to.
        stream: (method, answer, framing) → the bytes of a stream that amounts to it.
        error: (type, message) → the body with which the service says that a request failed.
    """

    parameters: Callable[[Endpoint, Mapping[str, Any]], dict[str, Any]]
    attributes: Callable[[Mapping[str, Any]], dict[str, Any]]
    tokens: Callable[[Mapping[str, Any]], _Tokens]
    answers: Callable[[Mapping[str, Any]], Iterator[tuple[str, str | None, object]]]
    assemble: Callable[[bytes, str], object]
    stream: Callable[[str, object, str], Iterable[bytes]]
    error: Callable[[str, str], dict[str, Any]]


class _Route(NamedTuple):
    """An endpoint's place.

    Attributes:
        dialect: How its bodies are read.
        endpoint: Its method and operation.
        shape: (body, headers) → whether a body posted there is a request of this endpoint.
        provider: What a loopback stand-in of the service counts as.
        tail: The last word of its path: the last segment, or what stands behind a colon in it.
        path: Its path's end; its group `model` is a model that the body does not name.
    """

    dialect: _Dialect
    endpoint: Endpoint
    shape: _Shape
    provider: str
    tail: str
    path: re.Pattern[str]


class Inference(NamedTuple):
    """An LLM call about to be made.

    Attributes:
        endpoint: Its method and operation.
        model: As asked for, "unknown" where nothing names one.
        payload: The input of its event: `{"method", "request"}`, and what the URL says beside the body.
        request: Its body.
        framing: How its answer is streamed: "sse", "ndjson" or "array"; "" where it is not.
    """

    endpoint: Endpoint
    model: str
    payload: dict[str, object]
    request: object
    framing: str


class Answered(NamedTuple):
    """What an answer says.

    Attributes:
        attributes: For the span: id, model, finish reasons, usage; no content.
        model: The model that served, None where it does not say.
        tokens: (input, output, total).
        cached: How many of the input came from the service's prompt cache, None where it does not say.
        error: (type, message) of a failure that the service reports in it, None where it reports none.
    """

    attributes: dict[str, Any]
    model: str | None
    tokens: _Tokens
    cached: int | None
    error: tuple[str, str] | None


# --- the table --------------------------------------------------------------------------------------------------------

_OPENAI = _Dialect(
    parameters=lambda endpoint, body: wire.request_attributes(endpoint, body, ""),
    attributes=wire.response_attributes,
    tokens=wire.tokens_of,
    answers=wire.tool_answers,
    assemble=lambda data, _: wire.assemble(data),
    stream=lambda method, answer, _: wire.stream_of(method, answer),
    error=lambda kind, message: {"error": {"message": message, "type": kind, "param": None, "code": None}},
)
_ANTHROPIC = _Dialect(
    parameters=lambda _, body: wire_anthropic.request_attributes(body),
    attributes=wire_anthropic.response_attributes,
    tokens=wire_anthropic.tokens_of,
    answers=wire_anthropic.tool_answers,
    assemble=wire_anthropic.assemble,
    stream=lambda _, answer, framing: wire_anthropic.stream_of(answer, framing),
    error=lambda kind, message: {"type": "error", "error": {"type": kind, "message": message}},
)
_GEMINI = _Dialect(
    parameters=lambda _, body: wire_gemini.request_attributes(body),
    attributes=wire_gemini.response_attributes,
    tokens=wire_gemini.tokens_of,
    answers=wire_gemini.tool_answers,
    assemble=wire_gemini.assemble,
    stream=lambda _, answer, framing: wire_gemini.stream_of(answer, framing),
    error=lambda kind, message: {"error": {"message": message, "status": kind}},
)
_OLLAMA = _Dialect(
    parameters=lambda _, body: wire_ollama.request_attributes(body),
    attributes=wire_ollama.response_attributes,
    tokens=wire_ollama.tokens_of,
    answers=wire_ollama.tool_answers,
    assemble=wire_ollama.assemble,
    stream=lambda _, answer, framing: wire_ollama.stream_of(answer, framing),
    error=lambda _, message: {"error": message},
)

_AZURE = r"(?:/deployments/(?P<model>[^/]+))?"
_GOOGLE = r"/(?:models|tunedModels|endpoints)/(?P<model>[^/:]+):"
_VERTEX = r"/publishers/anthropic/models/(?P<model>(?!count-tokens)[^/:]+):"


def _has(member: str, *kinds: type) -> _Shape:
    return lambda body, _: isinstance(body.get(member), kinds)


def _route(dialect: _Dialect, endpoint: Endpoint, before: str, tail: str, shape: _Shape, provider: str) -> _Route:
    """A route whose path ends with what `before` matches and `tail`."""
    return _Route(dialect, endpoint, shape, provider, tail, re.compile(before + tail + "$"))


_asks = wire_anthropic.is_request
_ROUTES = (
    _route(_OLLAMA, wire_ollama.CHAT, "/api/", "chat", _has("messages", list), "ollama"),
    _route(_OLLAMA, wire_ollama.GENERATE, "/api/", "generate", _has("prompt", str), "ollama"),
    _route(_OLLAMA, wire_ollama.EMBED, "/api/", "embed", _has("input", str, list), "ollama"),
    _route(_OLLAMA, wire_ollama.EMBEDDINGS, "/api/", "embeddings", _has("prompt", str), "ollama"),
    _route(_ANTHROPIC, wire_anthropic.MESSAGES, "/v1/", "messages", _asks, "anthropic"),
    _route(_ANTHROPIC, wire_anthropic.MESSAGES, _VERTEX, "rawPredict", _asks, "gcp.vertex_ai"),
    _route(_ANTHROPIC, wire_anthropic.MESSAGES, _VERTEX, "streamRawPredict", _asks, "gcp.vertex_ai"),
    _route(_GEMINI, wire_gemini.GENERATE, _GOOGLE, "generateContent", _has("contents", list, dict), "gcp.gemini"),
    _route(_GEMINI, wire_gemini.STREAM, _GOOGLE, "streamGenerateContent", _has("contents", list, dict), "gcp.gemini"),
    _route(_GEMINI, wire_gemini.EMBED, _GOOGLE, "embedContent", _has("content", dict), "gcp.gemini"),
    _route(_GEMINI, wire_gemini.BATCH_EMBED, _GOOGLE, "batchEmbedContents", _has("requests", list), "gcp.gemini"),
    _route(_OPENAI, wire.CHAT, _AZURE + "/chat/", "completions", _has("messages", list), "openai"),
    _route(_OPENAI, wire.FIM, "/fim/", "completions", _has("prompt", str), "mistral_ai"),
    _route(
        _OPENAI, wire.COMPLETIONS, _AZURE + "(?<!/chat)(?<!/fim)/", "completions", _has("prompt", str, list), "openai"
    ),
    _route(_OPENAI, wire.EMBEDDINGS, _AZURE + "/", "embeddings", _has("input", str, list), "openai"),
    _route(_OPENAI, wire.RESPONSES, "/", "responses", _has("input", str, list), "openai"),
)

_BY_TAIL = {tail: [route for route in _ROUTES if route.tail == tail] for tail in {route.tail for route in _ROUTES}}
_DIALECTS = {route.endpoint.method: route.dialect for route in _ROUTES}
_OWN_HOSTS = frozenset({"ollama"})
"""Providers whose API nobody else speaks: at any host it is theirs."""


_Found = tuple[tuple[_Route, re.Match[str]], ...]


def _at(method: str, url: str) -> _Found:
    """The routes that `method url` may be, the most special first."""
    return _posted(url.partition("?")[0]) if method == "POST" or method.upper() == "POST" else ()


@functools.lru_cache(256)
def _posted(url: str) -> _Found:
    """The routes of a URL without its query; remembered, since each call asks several times for the same few."""
    path = unquote(urlsplit(url).path).rstrip("/")
    routes = _BY_TAIL.get(path.rpartition("/")[2].rpartition(":")[2], ())
    matches = ((route, route.path.search(path)) for route in routes)
    return tuple((route, match) for route, match in matches if match is not None)


def _dialect(method: str | None) -> _Dialect:
    return _DIALECTS.get(method or "", _OPENAI)


# --- requests ---------------------------------------------------------------------------------------------------------


def endpoint_of(method: str, url: str) -> Endpoint | None:
    """The LLM endpoint that `method url` is by its path alone; None for any other call."""
    found = _at(method, url)
    return found[0][0].endpoint if found else None


def is_at(endpoint: Endpoint, method: str, url: str) -> bool:
    """Whether `method url` may be a request of `endpoint`."""
    return any(route.endpoint.method == endpoint.method for route, _ in _at(method, url))


def ask(endpoint: Endpoint, url: str, request: object) -> Inference:
    """An LLM call of `endpoint` with the body `request`, sent to `url`."""
    for route, match in _at("POST", url):
        if route.endpoint.method == endpoint.method:
            return _inference(endpoint, match, url, request)
    return _inference(endpoint, None, url, request)


def recognised(method: str, url: str, headers: Iterable[Sequence[str]], body: bytes) -> tuple[Inference, str] | None:
    """The LLM call that a bare HTTP request is, with the GenAI name of the service; None for any other request.

    `headers` are [lower-case name, value] pairs.
    """
    routes = _at(method, url)
    if not routes:
        return None
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    named = {pair[0]: pair[1] for pair in headers}
    for route, match in routes:
        if route.shape(request, named):
            inference = _inference(route.endpoint, match, url, request)
            return None if inference.model == _UNKNOWN else (inference, _provider(route, url))
    return None


_UNKNOWN = "unknown"


def _inference(endpoint: Endpoint, match: re.Match[str] | None, url: str, request: object) -> Inference:
    body = request if is_mapping(request) else {}
    model = body.get("model")
    payload: dict[str, object] = {"method": endpoint.method}
    if not isinstance(model, str) or not model:
        model = (match.groupdict().get("model") if match is not None else None) or _UNKNOWN
        if model != _UNKNOWN:
            payload["model"] = model
    framing = _framing(endpoint, body, url)
    if framing == "sse" and endpoint.method == wire_gemini.STREAM.method:
        payload["alt"] = "sse"
    payload["request"] = request
    return Inference(endpoint, model, payload, request, framing)


def _framing(endpoint: Endpoint, body: Mapping[str, Any], url: str) -> str:
    """How the answer to a request is streamed."""
    if endpoint.method == wire_gemini.STREAM.method:
        return "sse" if "alt=sse" in urlsplit(url).query.lower().split("&") else "array"
    if endpoint.method in (wire_ollama.CHAT.method, wire_ollama.GENERATE.method):
        return "" if body.get("stream") is False else "ndjson"
    return "sse" if body.get("stream") is True else ""


def _provider(route: _Route, url: str) -> str:
    if route.provider in _OWN_HOSTS:
        return route.provider
    return wire.provider_of(urlsplit(url).hostname or "", own=route.provider)


def request_attributes(inference: Inference, provider: str) -> dict[str, Any]:
    """Span attributes of a request; no content."""
    endpoint = inference.endpoint
    body = inference.request if is_mapping(inference.request) else {}
    found = _dialect(endpoint.method).parameters(endpoint, body)
    found["gen_ai.operation.name"] = endpoint.operation
    found["gen_ai.provider.name"] = provider
    if inference.model != _UNKNOWN:
        found["gen_ai.request.model"] = inference.model
    if inference.framing:
        found["gen_ai.request.stream"] = True
    return found


def tool_answers(method: str | None, request: object) -> Iterator[tuple[str, str | None, object]]:
    """(call id, tool name, content) of each tool result that a request of `method` sends back to the model.

    Results of tools that ran at the service (web search, code execution) are none. The name is None where only an
    earlier answer said it (`tool_calls`).
    """
    if is_mapping(request):
        yield from _dialect(method).answers(request)


def tool_calls(method: str | None, answer: object) -> Iterator[tuple[str, str]]:
    """(call id, tool name) of each call that an answer asks for and that a later request may name by its id alone."""
    if method == wire.RESPONSES.method and isinstance(answer, Mapping):
        yield from wire.tool_calls(answer)


def results_of(content: object) -> Iterator[Any]:
    """What a tool may have given for its result to be sent as `content`: that itself, or, where it is text, the value
    whose JSON it is; the text alone where it is sent as a list of one block, as services and MCP servers do."""
    if isinstance(content, Mapping) and isinstance(content.get("content"), list):
        yield content
        content = content["content"]
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        block = content[0]
        if block.get("type") in ("text", "input_text", "output_text"):
            content = block.get("text")
    yield content
    if isinstance(content, str):
        try:
            yield msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass


# --- answers ----------------------------------------------------------------------------------------------------------


def framing_of(endpoint: Endpoint, media: str, data: bytes) -> str:
    """How an answer of `endpoint` with the content type `media` is streamed; "" where it is not."""
    if endpoint.method == wire_gemini.STREAM.method and data.lstrip()[:1] == b"[":
        return "array"
    return framings.framing_of(media)


def assemble(endpoint: Endpoint, data: bytes, framing: str) -> object:
    """The answer that a stream amounts to, in the form that the call without streaming would have given."""
    return _dialect(endpoint.method).assemble(data, framing)


def answered(endpoint: Endpoint, output: object) -> Answered:
    """What the answer `output` says, a body or what a stream amounts to."""
    failed = wire.failure_of(output)
    if not is_mapping(output):
        return Answered({}, None, (None, None, None), None, failed)
    dialect = _dialect(endpoint.method)
    attributes, tokens = dialect.attributes(output), dialect.tokens(output)
    given, made, total = tokens
    if given is not None:
        attributes["gen_ai.usage.input_tokens"] = given
    if made is not None:
        attributes["gen_ai.usage.output_tokens"] = made
    if total is None and given is not None and made is not None:
        total = given + made
    served = attributes.get("gen_ai.response.model")
    cached = attributes.get("gen_ai.usage.cache_read.input_tokens")
    return Answered(attributes, served or None, (given, made, total), cached, failed)


def complete_stream(data: bytes, media: str) -> bool:
    """True if a stream says that it is over, although the connection may not have been read to its end."""
    kind = framings.framing_of(media)
    if kind == "ndjson":
        return b'"done":true' in data.rstrip().rpartition(b"\n")[2].replace(b'": ', b'":')
    return kind == "sse" and wire.complete_stream(data)


def stream_of(method: str | None, answer: object, framing: str) -> tuple[str, Iterable[bytes]]:
    """(content type, bytes) of a stream that amounts to `answer`."""
    return framings.MEDIA[framing], _dialect(method).stream(method or "", answer, framing)


def error_body(method: str | None, kind: str, message: str) -> dict[str, Any]:
    """The body with which the service of `method` says that a request failed."""
    return _dialect(method).error(kind, message)
