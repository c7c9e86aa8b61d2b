# SPDX-License-Identifier: Apache-2.0
"""Redaction of JSON that is text: only the characters of a secret change, all others stay as they are spelled.

Decision: the text is read into values and, beside them, the places where they stand; the values are redacted like any
other; where a value changed, its place in the text is rewritten. So keys, pairs and nested texts follow one set of
rules, and white space, escapes, key order and number spellings survive. Rejected: dumping the redacted value (respells
everything), and expressions over the raw text (miss `\\u0070assword`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from sftrace_otel.core.redact.credentials import MARK
from sftrace_otel.formats import Json

MAX_DEPTH = 100
"""Containers inside containers that are read; deeper text is treated as plain text."""

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:"
    r'(?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+")|(?P<mark>[][{},:])|(?P<number>-?[0-9][0-9.eE+-]*)'
    r"|(?P<word>true|false|null|NaN|-?Infinity))",
    re.DOTALL,
)
_UNIT = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)
_KEY_END = re.compile(rb'"[ \t\r\n]*:')
_SPACE = re.compile(r"[ \t\r\n]*")
_SCANNER = json.JSONDecoder().raw_decode
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}


@dataclass(slots=True)
class Place:
    """Where a value stands in the text: `start` to `end`, with the places of its keys and of its children."""

    start: int
    end: int
    keys: list[Place]
    children: list[Place]


class _NotJson(Exception):
    """The text is not one JSON value, or not one whose places are unambiguous."""


def parse(text: str) -> tuple[Json, Place] | None:
    """The value of a JSON text and its places; None where it is not JSON, is too deep, or repeats a key.

    Numbers other than short ints are given as 0: which number stands there makes no difference to redaction.
    """
    reader = _Reader(text)
    try:
        value, place = reader.value(0)
        reader.finish()
    except (_NotJson, ValueError):
        return None
    return value, place


def loads(text: str) -> Json:
    """The value of a JSON array or object; None where it is not JSON or repeats a key. Faster than `parse`."""
    try:
        data = text.encode()
        fast: Json = orjson.loads(data)
        if spells_each_key_once(data, orjson.dumps(fast)):
            return fast
    except (ValueError, TypeError):  # the second for what is nested deeper than it writes
        pass
    try:
        value: Json = json.loads(text, object_pairs_hook=_members)
    except (ValueError, RecursionError):
        return None
    return value


def spells_each_key_once(text: bytes, dumped: bytes) -> bool:
    """Whether `text` has no key that `dumped`, the JSON of its value, lacks; False where that is not certain.

    A quote before a colon ends a key or stands in a string. Without `\\u` every such place of `dumped` is one of
    `text`, so a key too many would show in the count.
    """
    return text == dumped or (b"\\u" not in text and len(_KEY_END.findall(text)) == dumped.count(b'":'))


def _members(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError
    return members


def rewritten(text: str, place: Place, old: Json, new: Json) -> str:
    """`text` with the parts of `old` that differ in `new` replaced where they stand."""
    pieces: list[str] = []
    done = 0
    for start, end, replacement in sorted(_edits(text, place, old, new)):
        pieces += (text[done:start], replacement)
        done = end
    return "".join((*pieces, text[done:]))


def is_shallow(value: Json) -> bool:
    """Whether `value` has at most `MAX_DEPTH` containers inside containers."""
    level: list[Json] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Json] = []
        for item in level:
            if isinstance(item, dict | list):
                below += item.values() if isinstance(item, dict) else item
        if not below:
            return True
        level = below
    return False


def respelled_where_changed(text: str, old: Json, new: Json) -> str:
    """`text`, of which `old` is what `loads` gave, with the parts that differ in `new` replaced where they stand.

    Parts that are the same objects are passed over by the standard library's scanner, so it takes little more time than
    reading `text` again.
    """
    edits: list[tuple[int, int, str]] = []
    _seek(text, 0, old, new, edits)
    pieces: list[str] = []
    done = 0
    for start, end, replacement in edits:
        pieces += (text[done:start], replacement)
        done = end
    return "".join((*pieces, text[done:]))


def _seek(text: str, at: int, old: Json, new: Json, edits: list[tuple[int, int, str]]) -> int:
    """Note the edits of the value that begins at `at` or after white space there; give where it ends."""
    start = _after_space(text, at)
    if new is old:
        return _end(text, start)
    if isinstance(old, dict) and isinstance(new, dict):
        for (old_key, old_item), (new_key, new_item) in zip(old.items(), new.items(), strict=True):
            begin = _after_space(text, start + 1)
            end = _end(text, begin)
            if new_key != old_key:
                edits.append((begin, end, respelled(text[begin:end], old_key, new_key)))
            start = _after_space(text, _seek(text, _after_space(text, end) + 1, old_item, new_item, edits))
        return start + 1
    if isinstance(old, list) and isinstance(new, list):
        for old_item, new_item in zip(old, new, strict=True):
            start = _after_space(text, _seek(text, start + 1, old_item, new_item, edits))
        return start + 1
    end = _end(text, start)
    if isinstance(old, str) and isinstance(new, str):
        edits.append((start, end, respelled(text[start:end], old, new)))
    else:
        edits.append((start, end, json.dumps(new, ensure_ascii=False)))
    return end


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _end(text: str, start: int) -> int:
    return int(_SCANNER(text, start)[1])


def kept(old: str, new: str) -> list[tuple[int, int]] | None:
    """The spans of `old` that `new` keeps, one before, between and after its marks; None where they do not fit."""
    pieces = new.split(MARK)
    spans = []
    at = 0
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        start = len(old) - len(piece) if last else (0 if number == 0 else old.find(piece, at))
        if start < at or not old.startswith(piece, start):
            return None
        at = start + len(piece)
        spans.append((start, at))
    return spans


class _Reader:
    """A JSON reader that keeps places. One use."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def value(self, depth: int) -> tuple[Json, Place]:
        token = self._next()
        start, end = token.span(token.lastgroup or 0)
        if token.lastgroup == "string":
            return self._string(start, end), Place(start, end, [], [])
        if token.lastgroup == "number":
            digits = token["number"]
            return int(digits) if digits.isdecimal() and len(digits) < 10 else 0, Place(start, end, [], [])
        if token.lastgroup == "word":
            return _WORDS.get(token["word"], 0), Place(start, end, [], [])
        if depth >= MAX_DEPTH or token["mark"] not in "[{":
            raise _NotJson
        return self._array(start, depth) if token["mark"] == "[" else self._object(start, depth)

    def finish(self) -> None:
        if self._text[self._at :].strip(" \t\r\n"):
            raise _NotJson

    def _next(self) -> re.Match[str]:
        token = _TOKEN.match(self._text, self._at)
        if token is None:
            raise _NotJson
        self._at = token.end()
        return token

    def _mark(self, *wanted: str) -> str:
        mark = self._next()["mark"]
        if mark not in wanted:
            raise _NotJson
        return str(mark)

    def _peek(self) -> str | None:
        token = _TOKEN.match(self._text, self._at)
        return token["mark"] if token else None

    def _string(self, start: int, end: int) -> str:
        inner = self._text[start + 1 : end - 1]
        return str(json.loads(self._text[start:end], strict=False)) if "\\" in inner else inner

    def _array(self, start: int, depth: int) -> tuple[Json, Place]:
        items: list[Json] = []
        place = Place(start, start, [], [])
        more = self._peek() != "]"
        if not more:
            self._next()
        while more:
            item, child = self.value(depth + 1)
            items.append(item)
            place.children.append(child)
            more = self._mark(",", "]") == ","
        place.end = self._at
        return items, place

    def _object(self, start: int, depth: int) -> tuple[Json, Place]:
        members: dict[str, Json] = {}
        place = Place(start, start, [], [])
        more = self._peek() != "}"
        if not more:
            self._next()
        while more:
            key, key_place = self.value(MAX_DEPTH)
            if not isinstance(key, str) or key in members:
                raise _NotJson
            self._mark(":")
            members[key], child = self.value(depth + 1)
            place.keys.append(key_place)
            place.children.append(child)
            more = self._mark(",", "}") == ","
        place.end = self._at
        return members, place


def _edits(text: str, place: Place, old: Json, new: Json) -> Iterator[tuple[int, int, str]]:
    if new is old:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key_place, child, (old_key, old_item), (new_key, new_item) in zip(
            place.keys, place.children, old.items(), new.items(), strict=True
        ):
            if new_key != old_key:
                yield key_place.start, key_place.end, respelled(text[key_place.start : key_place.end], old_key, new_key)
            yield from _edits(text, child, old_item, new_item)
    elif isinstance(old, list) and isinstance(new, list):
        for child, old_item, new_item in zip(place.children, old, new, strict=True):
            yield from _edits(text, child, old_item, new_item)
    elif isinstance(old, str) and isinstance(new, str):
        yield place.start, place.end, respelled(text[place.start : place.end], old, new)
    else:
        yield place.start, place.end, json.dumps(new, ensure_ascii=False)


def respelled(token: str, old: str, new: str) -> str:
    """The JSON string `token`, which spells `old`, changed to spell `new`; what is kept keeps its escapes."""
    spans = kept(old, new)
    if spans is None:
        return json.dumps(new, ensure_ascii=False)
    inner = token[1:-1]
    if "\\" in inner:
        starts = [found.start() for found in _UNIT.finditer(inner)] + [len(inner)]
        if len(starts) != len(old) + 1:
            return json.dumps(new, ensure_ascii=False)
        spans = [(starts[start], starts[end]) for start, end in spans]
    return f'"{MARK.join(inner[start:end] for start, end in spans)}"'
