# SPDX-License-Identifier: Apache-2.0
"""Redaction of what went over the wire: bodies as text, URLs, header fields.

A body keeps every character that is no part of a secret, so it still parses and still has its events and parts. Its
kind is told by its look, since content types lie: JSON, server-sent events (WHATWG HTML, section 9.2.6), JSON lines,
multipart (RFC 7578), form data, or plain text.

A secret in a stream may be cut over several events. The texts that arrive in pieces (`content`, `arguments`, `delta`,
…) are therefore joined over the events of one channel, redacted as a whole, and cut again where the pieces met: each
event keeps its place, the mark stands where the secret began, and the pieces of the secret are gone.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple, Protocol
from urllib.parse import quote_plus, unquote_plus

from sftrace_otel.core.alike import Template
from sftrace_otel.core.redact import jsontext
from sftrace_otel.core.redact.credentials import MARK, is_secret_parameter
from sftrace_otel.core.redact.names import Sensitivity, names_secret_header
from sftrace_otel.core.redact.walk import Finding
from sftrace_otel.formats import Json

PIECE_KEYS = frozenset(
    {"content", "arguments", "text", "delta", "partial_json", "thinking", "reasoning", "reasoning_content", "refusal"}
    | {"output_text", "input", "transcript", "response"}
)
"""Keys under which streaming APIs send texts in pieces."""

_MANY_LINES = 16
_MANY_TEMPLATES = 16
_LARGEST = 64 << 20
"""Bytes of a packed body that are looked into."""
_CHANNEL_KEYS = ("type", "index", "output_index", "content_index", "summary_index", "item_id")
_URL_HEADERS = frozenset({"location", "content-location", "referer", "origin", "link", "refresh"})
_FORM = re.compile(r"[A-Za-z0-9_.\-\[\]%+]{1,200}=[^\s&]*(?:&[A-Za-z0-9_.\-\[\]%+]{0,200}(?:=[^\s&]*)?)*")
_FIELD_NAME = re.compile(r'(?i)content-disposition:[^\r\n]{0,500}?\bname="([^"\r\n]{0,200})"')
_MULTIPART = re.compile(r"\s{0,8}--[^\r\n]{1,80}\r?\n[Cc]ontent-")
_USER_INFO = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]{0,30}:)?//(?!\[REDACTED\]@)[^/?#]*@")


class Rules(Protocol):
    """What this module asks the policy."""

    def sensitivity(self, name: str) -> Sensitivity:
        """What `name` says about its value."""

    def redact_text(self, text: str) -> tuple[str, tuple[Finding, ...]]:
        """`text` without secrets."""

    def holds_nothing(self, text: str, parts: list[Json]) -> bool:
        """Whether `text`, which consists of `parts`, is certainly without secrets."""

    def hold_nothing(self, texts: list[str], below: Json) -> bool:
        """Whether `texts` are certainly without secrets wherever they stand in `below`, which was found clean."""


def redact(rules: Rules, text: str) -> str:
    """A decoded body without secrets."""
    start = text[:200].lstrip()
    if start.startswith(("{", "[")):
        value = jsontext.loads(text)
        if value is not None and rules.holds_nothing(text, [value]):
            return text
    if _MULTIPART.match(text):
        return _multipart(rules, text)
    if start.startswith(("data:", "event:", "id:", "retry:", ":")):
        return _lines(rules, text)
    if _FORM.fullmatch(text):
        return redact_form(rules, text)
    if start.startswith("{") and "\n" in text.strip() and not _is_json(text):
        return _lines(rules, text)
    return rules.redact_text(text)[0]


def _is_json(text: str) -> bool:
    return jsontext.loads(text) is not None or jsontext.parse(text) is not None


def unpacked(data: bytes) -> bytes | None:
    """What gzip packed (RFC 1952), as far as it is whole and not larger than `_LARGEST`; None where it is not gzip."""
    decoder = zlib.decompressobj(wbits=31)
    try:
        return decoder.decompress(data, _LARGEST)
    except zlib.error:
        return None


def wide_text(data: bytes) -> str | None:
    """A text in UTF-16, told by its mark or by every other byte being zero; None for anything else."""
    head = data[:200]
    encoding = ""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif len(head) >= 8 and head[1::2].count(0) > len(head) * 2 // 5 and head[::2].count(0) == 0:
        encoding = "utf-16-le"
    elif len(head) >= 8 and head[::2].count(0) > len(head) * 2 // 5 and head[1::2].count(0) == 0:
        encoding = "utf-16-be"
    return data.decode(encoding, "replace") if encoding else None


def redact_url(rules: Rules, url: str) -> str:
    """A URL without user information, secret parameters (query and fragment) and other secrets."""
    rest, hash_mark, fragment = url.partition("#")
    base, question_mark, query = rest.partition("?")
    base = _USER_INFO.sub(rf"\g<1>//{MARK}@", base) if "@" in base else base
    base = rules.redact_text(base)[0]
    return f"{base}{question_mark}{redact_form(rules, query)}{hash_mark}{redact_form(rules, fragment)}"


def redact_form(rules: Rules, text: str) -> str:
    """`name=value&name=value` (application/x-www-form-urlencoded) without secrets; clean pairs stay as spelled."""
    return "&".join(_parameter(rules, pair) for pair in text.split("&")) if text else text


def redact_header(rules: Rules, name: str, value: str) -> str:
    """The value of one header field: the mark where the name calls for it, else the text without secrets."""
    if value and (rules.sensitivity(name) or names_secret_header(name)):
        return MARK
    if name.lower() in _URL_HEADERS and "," not in value and "<" not in value:
        return redact_url(rules, value)
    return rules.redact_text(value)[0]


def _parameter(rules: Rules, pair: str) -> str:
    name, equals, value = pair.partition("=")
    if equals and is_secret_parameter(unquote_plus(name), value, rules.sensitivity):
        return f"{rules.redact_text(name)[0]}={MARK}"
    plain = unquote_plus(pair)
    if rules.redact_text(plain)[0] == plain:
        return pair
    return equals.join(_respelled(rules, part) for part in ((name, value) if equals else (name,)))


def _respelled(rules: Rules, part: str) -> str:
    plain = unquote_plus(part)
    hidden = rules.redact_text(plain)[0]
    return part if hidden == plain else MARK.join(quote_plus(piece) for piece in hidden.split(MARK))


def _multipart(rules: Rules, text: str) -> str:
    """Each part by its name and its content; boundaries, headers and line ends stay."""
    boundary = text.lstrip().partition("\n")[0].rstrip("\r")
    return boundary.join(_part(rules, part) for part in text.split(boundary))


def _part(rules: Rules, part: str) -> str:
    blank = "\r\n\r\n" if "\r\n\r\n" in part else "\n\n"
    head, separator, body = part.partition(blank)
    if not separator:
        return rules.redact_text(part)[0]
    end = body[len(body.rstrip("\r\n")) :]
    content = body[: len(body) - len(end)]
    name = _FIELD_NAME.search(head)
    content = MARK if name and content and rules.sensitivity(name[1]) else redact(rules, content)
    return f"{rules.redact_text(head)[0]}{separator}{content}{end}"


class _Line:
    """One line: what stands before its JSON, the JSON, and its value, None for a line without any."""

    __slots__ = ("before", "text", "value")

    def __init__(self, line: str) -> None:
        self.before = "data: " if line.startswith("data: ") else "data:" if line.startswith("data:") else ""
        self.text = line[len(self.before) :]
        self.value: Json = None
        if self.text[:1] in ("{", "["):
            self.value = jsontext.loads(self.text)


def _lines(rules: Rules, text: str) -> str:
    """Server-sent events or JSON lines: texts in pieces first, then each line by itself."""
    if text.count("\n") > _MANY_LINES and _is_clean_stream(rules, text):
        return text
    return _lines_one_by_one(rules, text)


def _lines_one_by_one(rules: Rules, text: str) -> str:
    lines = [_Line(line) for line in text.split("\n")]
    if all(line.value is None for line in lines):
        return rules.redact_text(text)[0]
    whole = True
    for pieces in _channels(lines).values():
        if len(pieces) > 1:
            whole = _redact_pieces(rules, lines, pieces) and whole
    if whole and rules.holds_nothing(text, [line.text if line.value is None else line.value for line in lines]):
        return text
    return "\n".join(f"{line.before}{rules.redact_text(line.text)[0]}" for line in lines)


def _is_clean_stream(rules: Rules, text: str) -> bool:
    """Whether a stream is certainly without secrets; what `_lines` would find, read faster where events are alike."""
    parts: list[Json] = []
    channels: dict[Channel, list[str]] = {}
    runs: list[tuple[Template, list[str], list[str]]] = []
    template: Template | None = None
    raw: list[str] = []
    padding: list[str] = []
    channel: list[str] = []
    for line in text.split("\n"):
        read = template.read(line) if template is not None else None
        if read is not None:
            raw.append(read[0])
            padding.append(read[1])
            continue
        if not line:
            continue
        if raw and not _spelled_out(raw, channel):
            return False
        raw = []
        one = _Line(line)
        if not isinstance(one.value, dict):
            parts.append(one.text if one.value is None else one.value)
            continue
        parts.append(one.value)
        found: dict[Channel, list[_Piece]] = {}
        _collect(one.value, 0, _kind(one.value), (), found)
        for name, pieces in found.items():
            channel = channels.setdefault(name, [])
            channel += [piece.text for piece in pieces]
        if len(found) == 1 and len(pieces) == 1 and len(runs) < _MANY_TEMPLATES:
            template = Template.of(line, one.value, pieces[0].path, pieces[0].text)
            if template is not None:
                padding = []
                runs.append((template, channel, padding))
        else:
            template = None
    if raw and not _spelled_out(raw, channel):
        return False
    if not rules.holds_nothing(text, parts):
        return False
    if not all(rules.hold_nothing(said + padded, run.value) for run, said, padded in runs):
        return False
    return all(rules.redact_text(joined)[0] == joined for joined in map("".join, channels.values()))


def _spelled_out(raw: list[str], into: list[str]) -> bool:
    """Add the texts that JSON spells as `raw` to `into`; False where one is no JSON."""
    try:
        spelled = '","'.join(raw)
        into += json.loads(f'["{spelled}"]') if "\\" in spelled else raw
    except ValueError:
        return False
    return True


class _Piece(NamedTuple):
    """A text that is one piece of a stream: the number of its line and the keys that lead to it."""

    line: int
    path: tuple[str | int, ...]
    text: str


Channel = tuple[str | int, ...]


def _channels(lines: list[_Line]) -> Mapping[Channel, list[_Piece]]:
    """The pieces of each stream in order. A stream is told by the path of keys, list items by their `index`."""
    found: dict[Channel, list[_Piece]] = {}
    for number, line in enumerate(lines):
        if isinstance(line.value, dict):
            _collect(line.value, number, _kind(line.value), (), found)
    return found


def _kind(event: dict[str, Json]) -> Channel:
    """What tells the streams of one response apart besides the path: kind of event, item and indices."""
    return tuple([f"{key}={event[key]}" for key in _CHANNEL_KEYS if isinstance(event.get(key), str | int)])


def _collect(
    value: Json, line: int, channel: Channel, path: tuple[str | int, ...], found: dict[Channel, list[_Piece]]
) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str):
                if key in PIECE_KEYS:
                    found.setdefault((*channel, key), []).append(_Piece(line, (*path, key), item))
            elif isinstance(item, dict | list):
                _collect(item, line, (*channel, key), (*path, key), found)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            if isinstance(item, dict | list):
                index = item.get("index") if isinstance(item, dict) else None
                name = index if isinstance(index, int) else place
                _collect(item, line, (*channel, name), (*path, place), found)


def _redact_pieces(rules: Rules, lines: list[_Line], pieces: list[_Piece]) -> bool:
    """Whether `pieces`, joined, were without secrets; else they are changed in their lines."""
    joined = "".join([piece.text for piece in pieces])
    hidden = rules.redact_text(joined)[0]
    if hidden == joined:
        return True
    for piece, text in zip(pieces, cut_again([piece.text for piece in pieces], hidden), strict=True):
        if text != piece.text:
            _set(lines[piece.line], piece.path, text)
    return False


def cut_again(pieces: list[str], hidden: str) -> list[str]:
    """`hidden`, the redacted form of all `pieces` joined, cut into as many pieces at the same places."""
    old = "".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    cut: list[list[str]] = [[] for _ in pieces]
    removed = None
    for start, end in jsontext.kept(old, hidden) or [(0, 0), (len(old), len(old))]:
        if removed is not None:
            cut[min(bisect_right(ends, removed), len(pieces) - 1)].append(MARK)
        at = start
        while at < end:
            number = bisect_right(ends, at)
            cut[number].append(old[at : min(end, ends[number])])
            at = min(end, ends[number])
        removed = end
    return ["".join(parts) for parts in cut]


def _set(line: _Line, path: tuple[str | int, ...], text: str) -> None:
    """Change one text of a line, in its value and in its characters."""
    read = jsontext.parse(line.text)
    if read is None:
        return
    value, place = read
    changed = _with(value, path, text)
    line.text = jsontext.rewritten(line.text, place, value, changed)
    line.value = jsontext.loads(line.text)


def _with(value: Json, path: tuple[str | int, ...], text: str) -> Json:
    """`value` with the text at `path` replaced; what is beside the path stays the same object."""
    if not path:
        return text
    if isinstance(value, dict):
        return {key: _with(item, path[1:], text) if key == path[0] else item for key, item in value.items()}
    if isinstance(value, list):
        return [_with(item, path[1:], text) if place == path[0] else item for place, item in enumerate(value)]
    return value
