# SPDX-License-Identifier: Apache-2.0
"""How a streamed answer is cut into values: server-sent events, one JSON value a line, or one growing JSON array.

Decision: three framings cover every service, so a dialect only says what its values mean. A value that is not whole
(the stream was left or cut in it) is given up; one that is no JSON is kept as its text.

Sources: HTML standard, "Event stream interpretation"; the NDJSON page of Ollama's API; Google's REST streaming, which
sends a JSON array element by element unless `alt=sse` is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from sftrace_otel.core.mapping.wire import sse_events

__all__ = ["MEDIA", "framing_of", "stream_bytes", "values_of"]

MEDIA = {"sse": "text/event-stream", "ndjson": "application/x-ndjson", "array": "application/json"}
"""Framing → the content type that says so; `array` is said by the endpoint alone."""

_decoder = json.JSONDecoder()


def framing_of(media: str) -> str:
    """The framing that a content type names, "" where it names none."""
    kind = media.partition(";")[0].strip().lower()
    if kind == "text/event-stream":
        return "sse"
    return "ndjson" if kind in ("application/x-ndjson", "application/ndjson", "application/jsonl") else ""


def values_of(data: bytes, framing: str) -> list[Any]:
    """The whole values of a stream, in order."""
    if framing == "sse":
        return [_value(text) for _, text in sse_events(data) if text.strip() != "[DONE]"]
    if framing == "ndjson":
        lines = [line for line in data.split(b"\n") if line.strip()]
        values = [_value(line.decode("utf-8", "replace")) for line in lines]
        if values and isinstance(values[-1], str) and not data.endswith(b"\n"):
            values.pop()
        return values
    return list(_elements(data.decode("utf-8", "replace")))


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        pass
    try:  # half of a surrogate pair: a service may cut a text anywhere
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _elements(text: str) -> Iterator[Any]:
    """The elements of a JSON array that may lack its end; of a text that is no array, its one value."""
    at = _after_blanks(text, 0, "")
    if at < len(text) and text[at] == "[":
        at += 1
    while True:
        at = _after_blanks(text, at, ",")
        try:
            value, at = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield value


def _after_blanks(text: str, at: int, also: str) -> int:
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def stream_bytes(values: Iterable[Any], framing: str, *, named: bool = False) -> Iterator[bytes]:
    """The bytes of a stream of `values`, one piece a value. `named`: events carry their `type` as their name."""
    if framing == "array":
        yield from _array(values)
        return
    for value in values:
        text = json.dumps(value, separators=(",", ":"))
        if framing == "ndjson":
            yield f"{text}\n".encode()
        else:
            name = f"event: {value['type']}\n" if named and isinstance(value, dict) and "type" in value else ""
            yield f"{name}data: {text}\n\n".encode()


def _array(values: Iterable[Any]) -> Iterator[bytes]:
    opening = "["
    for value in values:
        yield f"{opening}{json.dumps(value, separators=(',', ':'))}".encode()
        opening = ",\n"
    yield b"]" if opening != "[" else b"[]"
